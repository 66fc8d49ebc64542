use proptest::prelude::*;

use super::*;

fn amax(row: &[f32]) -> f32 {
    row.iter().fold(0.0, |m, w| w.abs().max(m))
}

fn quantize(row: &[f32], method: Method) -> (f32, Vec<i8>) {
    let scale = row_scale(row, amax(row), method);
    let mut codes = vec![0; row.len()];
    encode_row(row, scale, &mut codes);
    (scale, codes)
}

#[test]
fn rounding_is_half_to_even_on_the_exact_quotient() {
    // amax 127 makes the scale exactly 1, so the codes are the rounded weights.
    let row = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, 0.499, 0.501];
    let (scale, codes) = quantize(&row, Method::RoundToNearest);
    assert_eq!(scale, 1.0);
    assert_eq!(codes, [127, 0, 2, 2, 0, -2, -2, 126, -126, 0, 1]);
}

#[test]
fn an_all_zero_row_has_a_positive_scale_and_decodes_to_zero() {
    for method in [Method::RoundToNearest, Method::Search] {
        let (scale, codes) = quantize(&[0.0, -0.0, 0.0], method);
        assert!(scale.is_finite() && scale > 0.0);
        let mut back = [1.0; 3];
        decode_row(&codes, scale, &mut back);
        assert_eq!(back, [0.0; 3]);
        assert_eq!(row_error(&[0.0; 3], &codes, scale), ErrorSums::default());
    }
}

#[test]
fn extreme_rows_keep_finite_scales_and_sums() {
    for largest in [f32::MAX, 3.0e38, 1e-38, 1e-40, f32::from_bits(1)] {
        let row = [largest, -largest / 2.0, largest / 3.0, 0.0];
        for method in [Method::RoundToNearest, Method::Search] {
            let (scale, codes) = quantize(&row, method);
            assert!(scale.is_normal() && scale > 0.0, "{largest:e}");
            let sums = row_error(&row, &codes, scale);
            assert!(sums.signal.is_finite() && sums.noise.is_finite(), "{largest:e} {sums:?}");
        }
    }
}

#[test]
fn one_outlier_is_clipped_when_that_pays() {
    // 4095 weights spread evenly over +-1 and one of 1.05: full range makes every step 5 % coarser.
    let mut row: Vec<f32> = (0..4096).map(|i| (i as f32 / 4095.0) * 2.0 - 1.0).collect();
    row[17] = 1.05;
    let (full, codes) = quantize(&row, Method::RoundToNearest);
    let rtn = row_error(&row, &codes, full);
    let (scale, codes) = quantize(&row, Method::Search);
    let searched = row_error(&row, &codes, scale);
    assert!(scale < full, "{scale} {full}");
    assert!(searched.noise < rtn.noise);
}

/// The builds of every kernel agree bit for bit, at lengths with and without a remainder.
#[test]
fn builds_of_the_kernels_agree() {
    for len in [0, 1, 15, 16, 17, 256, 1000] {
        let row: Vec<f32> = (0..len).map(|i| ((i * 7919) % 1013) as f32 * 0.013 - 6.0).collect();
        let scale = full_range_scale(amax(&row)) * 0.97;
        let (mut fast, mut slow) = (vec![0; len], vec![0; len]);
        encode(&row, scale, &mut fast);
        encode::scalar(&row, scale, &mut slow);
        assert_eq!(fast, slow);
        assert_eq!(
            squared_steps(&row, 1.0 / scale).to_bits(),
            squared_steps::scalar(&row, 1.0 / scale).to_bits()
        );
        assert_eq!(
            error_in_steps(&row, &fast, 1.0 / scale).map(f32::to_bits),
            error_in_steps::scalar(&row, &slow, 1.0 / scale).map(f32::to_bits)
        );
    }
}

proptest! {
    #[test]
    fn codes_are_the_nearest_and_errors_are_what_decoding_shows(
        row in prop::collection::vec(-1e3f32..1e3, 1..200),
    ) {
        for method in [Method::RoundToNearest, Method::Search] {
            let (scale, codes) = quantize(&row, method);
            prop_assert!(scale > 0.0 && scale <= full_range_scale(amax(&row)));
            let mut back = vec![0.0; row.len()];
            decode_row(&codes, scale, &mut back);
            let (mut signal, mut noise) = (0.0f64, 0.0f64);
            for ((w, code), d) in row.iter().zip(&codes).zip(&back) {
                let exact = f64::from(*w) / f64::from(scale);
                let nearest = exact.clamp(-127.0, 127.0);
                prop_assert!((nearest - f64::from(*code)).abs() <= 0.5 + 1e-4);
                signal += f64::from(*w).powi(2);
                noise += (f64::from(*w) - f64::from(*d)).powi(2);
            }
            let sums = row_error(&row, &codes, scale);
            prop_assert!((sums.signal - signal).abs() <= 1e-5 * signal);
            // Weights that the grid holds exactly leave rounding of the last place behind.
            prop_assert!((sums.noise - noise).abs() <= 1e-3 * noise + 1e-10 * signal, "{} {}", sums.noise, noise);
            prop_assert!(sums.noise <= rounding_bound(row.len(), amax(&row)));
        }
    }

    #[test]
    fn search_is_never_below_rounding(row in prop::collection::vec(-1f32..1.0, 1..3000)) {
        let (full, codes) = quantize(&row, Method::RoundToNearest);
        let rtn = row_error(&row, &codes, full).noise;
        let (scale, codes) = quantize(&row, Method::Search);
        let searched = row_error(&row, &codes, scale).noise;
        // The ranking multiplies by a reciprocal where the codes divide: allow for the last place.
        prop_assert!(searched <= rtn * (1.0 + 1e-4) + 1e-12);
    }
}
