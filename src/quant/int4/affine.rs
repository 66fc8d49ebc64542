//! Affine 4 bits: `weight = (code - 8) * scale + zero` in one fused multiply-add, codes 0 to 15, bf16
//! scale and zero, the scale positive.
//!
//! The grid of PyTorch's tinygemm kernels. The zero is the weight of code 8 and may be anything, so the
//! grid need not contain zero.

use super::{
    BF16_MAX, Candidates, Grid, Group, MAX_CODE, MIDDLE, SEARCHED, extent, largest, max, neighbour, smallest,
    storable_scale, to_bf16,
};
use crate::quant::{ErrorSums, Method};
use crate::simd::{LANES, multiversion, sum_lanes};

/// Ends that are tried on either side, as parts of the range that they lie inside of it.
const ENDS: usize = 4;
const INWARD: [f32; ENDS] = [0.0, 0.02, 0.05, 0.1];

/// Least-squares fits of every candidate.
const FITS: usize = 3;

/// The grid that a group is stored with.
pub fn grid(scale: f32, zero: f32) -> Grid {
    Grid { scale, zero: MIDDLE, offset: zero, rounds_codes: false }
}

/// Chooses scale and zero of a group and encodes it. `importance` weighs the squared errors that
/// [`Method::Search`] minimises; it needs a non-negative number per weight and counts relatively.
///
/// # Panics
/// When the lengths differ.
pub fn quantize_group(
    weights: &[f32],
    importance: Option<&[f32]>,
    method: Method,
    codes: &mut [u8],
) -> (f32, f32) {
    let (scale, zero) = match method {
        Method::RoundToNearest => rounding(extent(weights)),
        Method::Search | Method::Gptq => search(Group::new(weights, importance)),
    };
    encode_group(weights, scale, zero, codes);
    (scale, zero)
}

/// Codes of a group: `(weight - zero) / scale` half to even, clamped to -8..=7, plus 8.
///
/// # Panics
/// When the lengths differ.
pub fn encode_group(weights: &[f32], scale: f32, zero: f32, codes: &mut [u8]) {
    grid(scale, zero).encode(weights, codes);
}

/// Weights of a group of codes: `(code - 8) * scale + zero`, rounded once.
///
/// # Panics
/// When the lengths differ.
pub fn decode_group(codes: &[u8], scale: f32, zero: f32, weights: &mut [f32]) {
    grid(scale, zero).decode_into(codes, weights);
}

/// Squared sums of a group against its codes.
///
/// # Panics
/// When the lengths differ.
pub fn group_error(weights: &[f32], codes: &[u8], scale: f32, zero: f32) -> ErrorSums {
    grid(scale, zero).error(weights, codes)
}

/// The largest squared error that rounding a group can leave, and so the largest that an unweighted
/// search can: for every weight half a step, or the clipping at the ends where that is more. (bf16
/// moves the ends by up to 8/256 of a step for the scale and by 1/256 of the zero, which is many steps
/// where a group lies far from zero.)
pub fn rounding_bound(weights: &[f32]) -> f64 {
    let (scale, zero) = rounding(extent(weights));
    grid(scale, zero).bound(weights)
}

/// The range of the group over 15 steps.
fn rounding([lo, hi]: [f32; 2]) -> (f32, f32) {
    if lo == hi {
        let zero = to_bf16(lo.clamp(-BF16_MAX, BF16_MAX));
        // One step makes up for most of what rounding the zero leaves, where it leaves anything.
        let left = (lo - zero).abs();
        return (if left == 0.0 { 1.0 } else { storable_scale(left) }, zero);
    }
    let (lo, hi) = (lo.clamp(-BF16_MAX, BF16_MAX), hi.clamp(-BF16_MAX, BF16_MAX));
    // Two divisions: the difference of the largest weights is infinite.
    let scale = if hi - lo < f32::INFINITY { (hi - lo) / MAX_CODE } else { hi / MAX_CODE - lo / MAX_CODE };
    let scale = storable_scale(scale);
    // Halved, since eight steps alone may be infinite.
    let mut zero = to_bf16(2.0 * (0.5 * MIDDLE * scale + 0.5 * lo));
    // Rounding may move an end beyond f32: back by a sixteenth of a step, or by what zeros lie apart.
    let back = (scale / 16.0).max(zero.abs() / 128.0);
    if (MAX_CODE - MIDDLE).mul_add(scale, zero) == f32::INFINITY {
        zero = to_bf16(zero - back);
    } else if (-MIDDLE).mul_add(scale, zero) == f32::NEG_INFINITY {
        zero = to_bf16(zero + back);
    }
    (scale, zero)
}

multiversion! {
    /// Weighted sums of a group: of ones, and of the weights counted from `middle`, in `unit`s.
    fn moments(weights: &[f32], importance: Option<&[f32]>, middle: f32, unit: f32) -> [f32; 2] {
        let per_unit = 1.0 / unit;
        let (chunks, rest) = weights.as_chunks::<LANES>();
        let (h_chunks, h_rest) = importance.unwrap_or_default().as_chunks::<LANES>();
        let (mut ones, mut sums) = ([0.0f32; LANES], [0.0f32; LANES]);
        for (at, chunk) in chunks.iter().enumerate() {
            let h = h_chunks.get(at).unwrap_or(&[1.0; LANES]);
            for i in 0..LANES {
                ones[i] += h[i];
                sums[i] = ((chunk[i] - middle) * per_unit).mul_add(h[i], sums[i]);
            }
        }
        for (at, w) in rest.iter().enumerate() {
            let h = h_rest.get(at).unwrap_or(&1.0);
            ones[at] += h;
            sums[at] = ((w - middle) * per_unit).mul_add(*h, sums[at]);
        }
        [sum_lanes(ones), sum_lanes(sums)]
    }
}

multiversion! {
    fn search(group: Group<'_>) -> (f32, f32) {
        let [lo, hi] = extent(group.weights);
        let full = rounding([lo, hi]);
        if lo == hi || !SEARCHED.contains(&max(hi, -lo)) || full.0 < 1e-35 {
            return full;
        }
        let (range, middle) = (hi - lo, 0.5 * (lo + hi));
        let [count, sum] = moments(group.weights, group.importance, middle, range);
        let (mut scale, mut zero) = ([0.0f32; LANES], [0.0f32; LANES]);
        for i in 0..LANES {
            let (low, high) = (lo + range * INWARD[i / ENDS], hi - range * INWARD[i % ENDS]);
            scale[i] = (high - low) / MAX_CODE;
            zero[i] = low + MIDDLE * scale[i];
        }
        // Codes, then the scale and zero that decode them best, then the codes of those: never worse.
        let (mut gain, mut mean) = ([0.0; LANES], [0.0; LANES]);
        for _ in 0..FITS {
            let fit = group.fit(&Candidates::new(scale, [MIDDLE; LANES], zero));
            for i in 0..LANES {
                // The mean weight, counted from the candidate's zero, in its steps.
                let steps = (sum * range / count + (middle - zero[i])) / scale[i];
                mean[i] = fit.codes[i] / count;
                let spread = fit.squares[i] - fit.codes[i] * mean[i];
                let common = fit.products[i] - fit.codes[i] * steps;
                let slope = if spread > 0.0 && common > 0.0 { common / spread } else { 1.0 };
                let units = scale[i] / full.0;
                gain[i] = max(common * slope * (units * units), 0.0);
                zero[i] += scale[i] * (steps - slope * mean[i]);
                scale[i] *= slope;
            }
        }
        let chosen = largest(gain);
        let (mut fine, mut fine_zero) = ([0.0; LANES], [0.0; LANES]);
        for i in 0..LANES {
            fine[i] = neighbour(storable_scale(scale[chosen]), (i as i32 + 4) % 5 - 2);
            // The zero that goes with the rounded scale, and the bf16 numbers beside it.
            let ideal = to_bf16(zero[chosen] - mean[chosen] * (fine[i] - scale[chosen]));
            fine_zero[i] = if ideal.abs() < 1e-36 { ideal } else { neighbour(ideal, (i as i32 + 4) / 5 - 2) };
        }
        (fine[0], fine_zero[0]) = full;
        let best = smallest(group.noise(&Candidates::new(fine, [MIDDLE; LANES], fine_zero), full.0));
        (fine[best], fine_zero[best])
    }
}

#[cfg(test)]
#[path = "affine_tests.rs"]
mod tests;
