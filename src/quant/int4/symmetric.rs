//! Symmetric 4 bits: `weight = (code - 8) * scale`, codes 0 to 15, a bf16 scale.
//!
//! The grid of GPTQ's 4-bit packing. It has one level more on one side, -8 against 7; a negative scale
//! turns that side to where the largest weights are, which costs no bits.

use super::{
    BF16_MAX, Candidates, Grid, Group, MIDDLE, SEARCHED, extent, largest, max, neighbour, smallest,
    storable_scale,
};
use crate::quant::{ErrorSums, Method};
use crate::simd::{LANES, multiversion};

/// Which signs a scale may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signs {
    /// Positive scales only, for consumers that were not tried with others.
    Positive,
    /// Whichever loses less.
    Both,
}

/// Scales tried per sign before the best of each sign is refined, as parts of 1/7 of the largest
/// absolute value.
const SCALES: usize = LANES / 2;
const FACTORS: [f32; SCALES] = [1.0, 0.935, 0.874, 0.817, 0.764, 0.715, 0.668, 0.625];
/// From one of them half way to the next.
const BETWEEN: f32 = 0.967;

/// The grid that a group is stored with.
pub fn grid(scale: f32) -> Grid {
    Grid { scale, zero: MIDDLE, offset: 0.0, rounds_codes: false }
}

/// Chooses the scale of a group and encodes it. `importance` weighs the squared errors that
/// [`Method::Search`] minimises; it needs a non-negative number per weight and counts relatively.
///
/// # Panics
/// When the lengths differ.
pub fn quantize_group(
    weights: &[f32],
    importance: Option<&[f32]>,
    method: Method,
    signs: Signs,
    codes: &mut [u8],
) -> f32 {
    let scale = match method {
        Method::RoundToNearest => rounding_scale(extent(weights)),
        Method::Search | Method::Gptq => searched_scale(Group::new(weights, importance), signs),
    };
    encode_group(weights, scale, codes);
    scale
}

/// Codes of a group: `weight / scale` half to even, clamped to -8..=7, plus 8.
///
/// # Panics
/// When the lengths differ.
pub fn encode_group(weights: &[f32], scale: f32, codes: &mut [u8]) {
    grid(scale).encode(weights, codes);
}

/// Weights of a group of codes: `(code - 8) * scale`.
///
/// # Panics
/// When the lengths differ.
pub fn decode_group(codes: &[u8], scale: f32, weights: &mut [f32]) {
    grid(scale).decode_into(codes, weights);
}

/// Squared sums of a group against its codes.
///
/// # Panics
/// When the lengths differ.
pub fn group_error(weights: &[f32], codes: &[u8], scale: f32) -> ErrorSums {
    grid(scale).error(weights, codes)
}

/// The largest squared error that rounding a group can leave, and so the largest that an unweighted
/// search can: half a step of the full-range grid for every weight. (bf16 moves 7 steps by at most
/// 7/256 of one, which is less than the half step beyond the last code that still rounds to it.)
pub fn rounding_bound(weights: &[f32]) -> f64 {
    grid(rounding_scale(extent(weights))).bound(weights)
}

/// The largest absolute value on code 15 or 1, that is 7 steps from zero.
fn rounding_scale([lo, hi]: [f32; 2]) -> f32 {
    let amax = hi.max(-lo).min(BF16_MAX);
    if amax == 0.0 {
        return 1.0;
    }
    // Seven steps of a rounded scale would miss a constant that bf16 holds.
    if lo == hi && storable_scale(amax) == amax {
        return amax;
    }
    storable_scale(amax / 7.0)
}

multiversion! {
    fn searched_scale(group: Group<'_>, signs: Signs) -> f32 {
        let [lo, hi] = extent(group.weights);
        let (full, amax) = (rounding_scale([lo, hi]), max(hi, -lo));
        if lo == hi || !SEARCHED.contains(&amax) {
            return full;
        }
        // A grid of a negative scale is that of the absolute value with zero at 7.
        let other = if signs == Signs::Both { MIDDLE - 1.0 } else { MIDDLE };
        let (mut scale, mut zero) = ([0.0; LANES], [0.0; LANES]);
        for i in 0..LANES {
            scale[i] = full * FACTORS[i % SCALES];
            zero[i] = if i < SCALES { MIDDLE } else { other };
        }
        // Positive scales alone: twice as many, between those.
        if signs == Signs::Positive {
            for scale in &mut scale[SCALES..] {
                *scale *= BETWEEN;
            }
        }
        let fit = group.fit(&Candidates::new(scale, zero, [0.0; LANES]));
        // The codes of a candidate are best decoded with the scale products / squares, in steps, which
        // takes products^2 / squares off the error. Every bf16 scale around that is tried, for the
        // best of either half.
        let (mut gain, mut refit) = ([[0.0; LANES]; 2], [0.0; LANES]);
        for i in 0..LANES {
            let (factor, steps) = (scale[i] / full, fit.products[i] / max(fit.squares[i], f32::MIN_POSITIVE));
            gain[i / SCALES][i] = fit.products[i] * steps * (factor * factor);
            refit[i] = storable_scale(scale[i] * steps);
        }
        let about = gain.map(|gain| refit[largest(gain)]);
        let (mut scale, mut zero) = ([0.0; LANES], [0.0; LANES]);
        for i in 0..LANES {
            scale[i] = neighbour(if i < SCALES { about[0] } else { about[1] }, i as i32 % 8 - 4);
            zero[i] = if i < SCALES { MIDDLE } else { other };
        }
        scale[0] = full;
        let chosen = smallest(group.noise(&Candidates::new(scale, zero, [0.0; LANES]), full));
        if zero[chosen] == MIDDLE { scale[chosen] } else { -scale[chosen] }
    }
}

#[cfg(test)]
#[path = "symmetric_tests.rs"]
mod tests;
