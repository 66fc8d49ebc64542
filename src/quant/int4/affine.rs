//! Affine 4 bits: `weight = (code - 8) * scale + zero` in one fused multiply-add, codes 0 to 15, bf16
//! scale and zero, the scale positive.
//!
//! The grid of PyTorch's tinygemm kernels. The zero is the weight of code 8 and may be anything, so the
//! grid need not contain zero.

use super::{
    Candidates, Grid, Group, MAX_CODE, MIDDLE, SEARCHED, extent, neighbour, smallest, storable_scale, to_bf16,
};
use crate::quant::{ErrorSums, Method};
use crate::simd::LANES;

/// Ends that are tried on either side, and how much of the range lies between one and the next.
const ENDS: usize = 4;
const STEP: f32 = 0.045;

/// Ends of a grid are kept inside of this, so that rounding scale and zero to bf16 cannot move a
/// decoded weight to infinity: 2^127 * (2 - 2^-5), an eleventh of a step from the largest bf16.
const LARGEST: f32 = f32::from_bits(0x7f7c_0000);

fn grid(scale: f32, zero: f32) -> Grid {
    Grid { scale, zero: MIDDLE, offset: zero, rounds_codes: false }
}

/// Chooses scale and zero of a group and encodes it. `importance` weighs the squared errors that
/// [`Method::Search`] minimises; it needs a non-negative number per weight and counts relatively.
///
/// # Panics
/// When the lengths differ, or the group is empty.
pub fn quantize_group(
    weights: &[f32],
    importance: Option<&[f32]>,
    method: Method,
    codes: &mut [u8],
) -> (f32, f32) {
    let (scale, zero) = match method {
        Method::RoundToNearest => rounding(extent(weights)),
        Method::Search => search(Group::new(weights, importance)),
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
        let zero = to_bf16(lo.clamp(-LARGEST, LARGEST));
        let left = if lo.abs() <= LARGEST { (lo - zero).abs() } else { 0.0 };
        return (if left == 0.0 { 1.0 } else { storable_scale(left) }, zero);
    }
    let (lo, hi) = (lo.clamp(-LARGEST, LARGEST), hi.clamp(-LARGEST, LARGEST));
    // Two divisions: the difference of the largest weights is infinite.
    let scale = if hi - lo < f32::INFINITY { (hi - lo) / MAX_CODE } else { hi / MAX_CODE - lo / MAX_CODE };
    let scale = storable_scale(scale);
    (scale, to_bf16(MIDDLE * scale + lo))
}

/// Weighted sums of a group: of the importances, and of the weights counted from `middle`, in `unit`s.
fn moments(group: Group<'_>, middle: f32, unit: f32) -> [f64; 2] {
    let mut sums = [0.0; 2];
    for (i, w) in group.weights.iter().enumerate() {
        let h = f64::from(group.importance.map_or(1.0, |h| h[i]));
        sums[0] += h;
        sums[1] += h * f64::from((w - middle) / unit);
    }
    sums
}

fn search(group: Group<'_>) -> (f32, f32) {
    let [lo, hi] = extent(group.weights);
    let full = rounding([lo, hi]);
    if lo == hi || !SEARCHED.contains(&hi.max(-lo)) || full.0 <= 1e-36 {
        return full;
    }
    let (range, middle) = (hi - lo, 0.5 * (lo + hi));
    let moments = moments(group, middle, range);
    let (mut scale, mut zero) = ([0.0f32; LANES], [0.0f32; LANES]);
    for i in 0..LANES {
        let (low, high) = (lo + range * STEP * (i / ENDS) as f32, hi - range * STEP * (i % ENDS) as f32);
        scale[i] = (high - low) / MAX_CODE;
        zero[i] = low + MIDDLE * scale[i];
    }
    let mut best = (0.0f64, scale[0], zero[0], 0.0f64);
    for _ in 0..3 {
        let fit = group.fit(&Candidates::new(scale, [MIDDLE; LANES], zero));
        for i in 0..LANES {
            let [n, sum] = moments;
            let (step, inverse) = (f64::from(scale[i]), 1.0 / f64::from(scale[i]));
            // Sum of the weights, counted from the candidate's zero, in its steps.
            let steps = sum * f64::from(range) * inverse + n * f64::from(middle - zero[i]) * inverse;
            let codes = f64::from(fit.codes[i]);
            let spread = f64::from(fit.squares[i]) - codes * codes / n;
            let common = f64::from(fit.products[i]) - codes * steps / n;
            if spread <= 0.0 || common <= 0.0 {
                continue;
            }
            let slope = common / spread;
            let gain = common * slope * step * step;
            scale[i] = (slope * step) as f32;
            zero[i] += (step * (steps - slope * codes) / n) as f32;
            if gain > best.0 {
                best = (gain, scale[i], zero[i], codes / n);
            }
        }
    }
    let (_, about, at, mean_code) = best;
    let (mut fine_scale, mut fine_zero) = ([full.0; LANES], [full.1; LANES]);
    for i in 1..LANES {
        let k = ((i - 1) / 3) as i32 - 2;
        let z = ((i - 1) % 3) as i32 - 1;
        fine_scale[i] = neighbour(storable_scale(about), k);
        let ideal = at - mean_code as f32 * (fine_scale[i] - about);
        fine_zero[i] = if ideal.abs() > 1e-36 { neighbour(to_bf16(ideal), z) } else { to_bf16(ideal) };
    }
    let fine = Candidates::new(fine_scale, [MIDDLE; LANES], fine_zero);
    let chosen = smallest(&group.noise(&fine));
    (fine_scale[chosen], fine_zero[chosen])
}
