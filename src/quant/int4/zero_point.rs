//! 4 bits with a whole zero point: `weight = (code - zero) * scale`, codes and zero 0 to 15, a positive
//! bf16 scale.
//!
//! The grid of compressed-tensors' asymmetric `pack-quantized`, and of AWQ. Zero is always one of its
//! weights. The symmetric grid of either sign is among its cases (zero 8 and zero 7).

use super::{
    BF16_MAX, Candidates, Grid, Group, MAX_CODE, ROUND, SEARCHED, clamp, extent, largest, max, min,
    neighbour, smallest, storable_scale,
};
use crate::quant::{ErrorSums, Method};
use crate::simd::{LANES, multiversion};

/// Scales that are tried, as parts of that which spreads the group's whole range over the codes.
const FACTORS: [f32; LANES] = [
    1.000, 0.965, 0.931, 0.899, 0.867, 0.837, 0.808, 0.779, 0.752, 0.726, 0.700, 0.676, 0.652, 0.629, 0.607,
    0.586,
];

/// How zero is placed when the range is wider than the codes: so that the clipping is all above, on
/// both sides, all below.
const PLACES: [f32; 3] = [0.0, -1.0, 1.0];

/// The grid that a group is stored with.
pub fn grid(scale: f32, zero: u8) -> Grid {
    Grid { scale, zero: f32::from(zero), offset: 0.0, rounds_codes: true }
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
) -> (f32, u8) {
    let (scale, zero) = match method {
        Method::RoundToNearest => rounding(extent(weights)),
        Method::Search | Method::Gptq => search(Group::new(weights, importance)),
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

multiversion! {
    fn search(group: Group<'_>) -> (f32, u8) {
        let [lo, hi] = extent(group.weights);
        let full = rounding([lo, hi]);
        if lo == hi || !SEARCHED.contains(&max(hi, -lo)) {
            return full;
        }
        let (lo, hi) = (min(lo, 0.0), max(hi, 0.0));
        let widest = (hi - lo) / MAX_CODE;
        // Per place of zero the scale and zero of the best candidate, the scale refitted to its codes.
        let mut best = [(0.0, 0.0); PLACES.len()];
        for (place, best) in PLACES.into_iter().zip(&mut best) {
            let (mut scale, mut zero) = ([0.0; LANES], [0.0; LANES]);
            for i in 0..LANES {
                scale[i] = widest * FACTORS[i];
                let (below, above) = (-lo / scale[i], hi / scale[i]);
                let half_excess = max(0.5 * (below + above - MAX_CODE), 0.0);
                let at = place.mul_add(max(half_excess, 1.0), below - half_excess);
                zero[i] = (clamp(at, 0.0, MAX_CODE) + ROUND) - ROUND;
            }
            let fit = group.fit(&Candidates::new(scale, zero, [0.0; LANES]));
            let (mut gain, mut refit) = ([0.0; LANES], [0.0; LANES]);
            for i in 0..LANES {
                let steps = fit.products[i] / max(fit.squares[i], f32::MIN_POSITIVE);
                gain[i] = fit.products[i] * steps * (FACTORS[i] * FACTORS[i]);
                refit[i] = storable_scale(scale[i] * steps);
            }
            let chosen = largest(gain);
            *best = (refit[chosen], zero[chosen]);
        }
        let (mut scale, mut zero) = ([0.0; LANES], [0.0; LANES]);
        for i in 0..LANES {
            let (about, at) = best[i.saturating_sub(1) / 5];
            scale[i] = neighbour(about, (i as i32 + 4) % 5 - 2);
            zero[i] = at;
        }
        (scale[0], zero[0]) = (full.0, f32::from(full.1));
        let chosen = smallest(group.noise(&Candidates::new(scale, zero, [0.0; LANES]), full.0));
        (scale[chosen], zero[chosen] as u8)
    }
}

#[cfg(test)]
#[path = "zero_point_tests.rs"]
mod tests;
