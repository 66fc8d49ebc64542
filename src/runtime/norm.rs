//! RMSNorm.

use rayon::prelude::*;

use super::Rounding;
use crate::simd::{LANES, multiversion, sum_lanes};

/// `out = w * (x / sqrt(mean(x^2) + eps))`, row by row, rounded once at the end.
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, rounding: Rounding, out: &mut [f32]) {
    let n = weight.len();
    let rows = x.par_chunks_exact(n).zip(out.par_chunks_exact_mut(n));
    rows.for_each(|(x, out)| norm_row(x, weight, eps, rounding, out));
}

multiversion! {
    fn norm_row(x: &[f32], weight: &[f32], eps: f32, rounding: Rounding, out: &mut [f32]) {
        let mut lanes = [0.0f32; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane = x.mul_add(*x, *lane);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane = x.mul_add(*x, *lane);
        }
        #[expect(clippy::cast_precision_loss, reason = "row lengths are far below 2^24")]
        let mean = sum_lanes(lanes) / x.len() as f32;
        let scale = 1.0 / (mean + eps).sqrt();
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = rounding.round(w * (x * scale));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_divided_by_its_root_mean_square_and_multiplied_by_the_weight_as_stored() {
        let mut out = [0.0; 4];
        // Mean square (9 + 9 + 9 + 9) / 4 + 7 = 16.
        rms_norm(&[3.0, -3.0, 3.0, -3.0], &[4.0, 8.0, 0.0, -4.0], 7.0, Rounding::None, &mut out);
        assert_eq!(out, [3.0, -6.0, 0.0, 3.0]);
    }

    #[test]
    fn both_builds_agree() {
        let x: Vec<f32> = (0..1003).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        let (mut a, mut b) = (vec![0.0; 1003], vec![0.0; 1003]);
        for rounding in [Rounding::None, Rounding::Bf16] {
            norm_row(&x, &x, 1e-6, rounding, &mut a);
            norm_row::scalar(&x, &x, 1e-6, rounding, &mut b);
            assert_eq!(a, b);
        }
    }
}
