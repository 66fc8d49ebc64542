//! 4 bits with a whole zero point: `weight = (code - zero) * scale`, codes and zero 0 to 15, a positive
//! bf16 scale.
//!
//! The grid of compressed-tensors' asymmetric `pack-quantized`, and of AWQ. Zero is always one of its
//! weights. The symmetric grid of either sign is among its cases (zero 8 and zero 7).

use super::{
    BF16_MAX, Candidates, Grid, Group, MAX_CODE, SEARCHED, extent, neighbour, smallest, storable_scale,
    to_bf16,
};
use crate::quant::{ErrorSums, Method};
use crate::simd::LANES;

/// By what a scale that is tried is finer than the one before it. The first spreads the group's whole
/// range over the codes.
const RATIO: f32 = 0.965;

/// How zero is placed when the range is wider than the codes: so that the clipping is all above, on
/// both sides, all below.
const PLACES: [f32; 3] = [0.0, -1.0, 1.0];

fn grid(scale: f32, zero: u8) -> Grid {
    Grid { scale, zero: f32::from(zero), offset: 0.0, rounds_codes: true }
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
) -> (f32, u8) {
    let (scale, zero) = match method {
        Method::RoundToNearest => rounding(extent(weights)),
        Method::Search => search(Group::new(weights, importance)),
    };
    encode_group(weights, scale, zero, codes);
    (scale, zero)
}

/// Codes of a group: `weight / scale + zero` half to even, clamped to 0..=15. On a tie the parity of
/// the zero decides, as in the compressed-tensors library.
///
/// # Panics
/// When the lengths differ.
pub fn encode_group(weights: &[f32], scale: f32, zero: u8, codes: &mut [u8]) {
    grid(scale, zero).encode(weights, codes);
}

/// Weights of a group of codes: `(code - zero) * scale`.
///
/// # Panics
/// When the lengths differ.
pub fn decode_group(codes: &[u8], scale: f32, zero: u8, weights: &mut [f32]) {
    grid(scale, zero).decode_into(codes, weights);
}

/// Squared sums of a group against its codes.
///
/// # Panics
/// When the lengths differ.
pub fn group_error(weights: &[f32], codes: &[u8], scale: f32, zero: u8) -> ErrorSums {
    grid(scale, zero).error(weights, codes)
}

/// The largest squared error that rounding a group can leave, and so the largest that an unweighted
/// search can: for every weight half a step, or the clipping at the ends where that is more. (A zero
/// next to a tie moves the grid by half a step, and bf16 the other end by up to 15/256 of one.)
pub fn rounding_bound(weights: &[f32]) -> f64 {
    let (scale, zero) = rounding(extent(weights));
    grid(scale, zero).bound(weights)
}

/// The range of the group and zero, over 15 steps; zero on the nearest code.
fn rounding([lo, hi]: [f32; 2]) -> (f32, u8) {
    // A constant that bf16 holds is one step from zero.
    if lo == hi && storable_scale(lo.abs()) == lo.abs() {
        return (lo.abs(), if lo < 0.0 { 15 } else { 0 });
    }
    let (lo, hi) = (lo.clamp(-BF16_MAX, 0.0), hi.clamp(0.0, BF16_MAX));
    if lo == hi {
        return (1.0, 0);
    }
    // Two divisions: the difference of the largest weights is infinite.
    let scale = if hi - lo < f32::INFINITY { (hi - lo) / MAX_CODE } else { hi / MAX_CODE - lo / MAX_CODE };
    let mut scale = storable_scale(scale);
    let zero = (-lo / scale).round_ties_even().min(MAX_CODE);
    // Up to half a step beyond the largest weights there is no f32.
    let reach = zero.max(MAX_CODE - zero);
    if !(scale * reach).is_finite() {
        scale = f32::from_bits((f32::MAX / reach).to_bits() & 0xffff_0000);
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 15")]
    (scale, zero as u8)
}

fn search(group: Group<'_>) -> (f32, u8) {
    let [lo, hi] = extent(group.weights);
    let full = rounding([lo, hi]);
    if lo == hi || !SEARCHED.contains(&hi.max(-lo)) {
        return full;
    }
    let (lo, hi) = (lo.min(0.0), hi.max(0.0));
    let mut scale = [0.0; LANES];
    let mut step = (hi - lo) / MAX_CODE;
    for s in &mut scale {
        *s = step;
        step *= RATIO;
    }
    // Per place of zero the best candidate: what it takes off the squared error, scale and zero.
    let mut best = [(-1.0f64, 0.0f32, 0.0f32); PLACES.len()];
    for (place, best) in PLACES.into_iter().zip(&mut best) {
        let mut zero = [0.0; LANES];
        for i in 0..LANES {
            let (below, above) = (-lo / scale[i], hi / scale[i]);
            let half_excess = (0.5 * (below + above - MAX_CODE)).max(0.0);
            let middle = below - half_excess;
            zero[i] = place.mul_add(half_excess.max(1.0), middle).round_ties_even().clamp(0.0, MAX_CODE);
        }
        let fit = group.fit(&Candidates::new(scale, zero, [0.0; LANES]));
        for i in 0..LANES {
            let (step, products) = (f64::from(scale[i]), f64::from(fit.products[i]));
            let gain = products * products / f64::from(fit.squares[i]) * (step * step);
            if gain > best.0 {
                *best = (gain, scale[i] * (fit.products[i] / fit.squares[i]), zero[i]);
            }
        }
    }
    let (mut scale, mut zero) = ([full.0; LANES], [f32::from(full.1); LANES]);
    for i in 1..LANES {
        let (gain, about, at) = best[(i - 1) / 5];
        if gain > 0.0 {
            #[expect(
                clippy::cast_possible_wrap,
                clippy::cast_possible_truncation,
                reason = "a lane's number"
            )]
            let steps = ((i - 1) % 5) as i32 - 2;
            scale[i] = neighbour(storable_scale(about), steps);
            zero[i] = at;
        }
    }
    let chosen = smallest(&group.noise(&Candidates::new(scale, zero, [0.0; LANES])));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 15")]
    (scale[chosen], zero[chosen] as u8)
}
