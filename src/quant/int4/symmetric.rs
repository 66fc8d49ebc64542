//! Symmetric 4 bits: `weight = (code - 8) * scale`, codes 0 to 15, a bf16 scale.
//!
//! The grid of GPTQ's 4-bit packing. It has one level more on one side, -8 against 7; a negative scale
//! turns that side to where the largest weights are, which costs no bits.

use super::{
    BF16_MAX, Candidates, Grid, Group, MIDDLE, SEARCHED, extent, neighbour, smallest, storable_scale,
};
use crate::quant::{ErrorSums, Method};
use crate::simd::LANES;

/// Which signs a scale may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signs {
    /// Positive scales only, for consumers that were not tried with others.
    Positive,
    /// Whichever loses less.
    Both,
}

/// Scales tried per sign before the best of each sign is refined; and by what each is finer than the
/// one before it. The first is 1/7 of the largest absolute value.
const SCALES: usize = LANES / 2;
const RATIO: f32 = 0.935;

fn grid(scale: f32) -> Grid {
    Grid { scale, zero: MIDDLE, offset: 0.0, rounds_codes: false }
}

/// Chooses the scale of a group and encodes it. `importance` weighs the squared errors that
/// [`Method::Search`] minimises; it needs a non-negative number per weight and counts relatively.
///
/// # Panics
/// When the lengths differ, or the group is empty.
pub fn quantize_group(
    weights: &[f32],
    importance: Option<&[f32]>,
    method: Method,
    signs: Signs,
    codes: &mut [u8],
) -> f32 {
    let scale = match method {
        Method::RoundToNearest => rounding_scale(extent(weights)),
        Method::Search => searched_scale(Group::new(weights, importance), signs),
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

fn searched_scale(group: Group<'_>, signs: Signs) -> f32 {
    let [lo, hi] = extent(group.weights);
    let (full, amax) = (rounding_scale([lo, hi]), hi.max(-lo));
    if lo == hi || !SEARCHED.contains(&amax) {
        return full;
    }
    // A grid of a negative scale is that of the absolute value with zero at 7.
    let (mut scale, mut zero) = ([0.0; LANES], [MIDDLE; LANES]);
    let mut factor = amax / 7.0;
    for i in 0..SCALES {
        (scale[i], scale[i + SCALES]) = (factor, factor);
        factor *= RATIO;
        if signs == Signs::Both {
            zero[i + SCALES] = MIDDLE - 1.0;
        } else {
            scale[i + SCALES] *= RATIO.sqrt();
        }
    }
    let coarse = Candidates::new(scale, zero, [0.0; LANES]);
    let fit = group.fit(&coarse);
    // The codes of a candidate are best decoded with the scale products / squares, in steps, which
    // takes products^2 / squares off the error. Every bf16 scale around that is tried.
    let mut best = [(-1.0f64, full); 2];
    for i in 0..LANES {
        let (step, products) = (f64::from(scale[i]), f64::from(fit.products[i]));
        let gain = products * products / f64::from(fit.squares[i]).max(1.0) * (step * step);
        let half = &mut best[i / SCALES];
        if gain > half.0 {
            *half = (gain, scale[i] * (fit.products[i] / fit.squares[i]));
        }
    }
    scale[0] = full;
    zero[0] = MIDDLE;
    for i in 1..LANES {
        let (_, about) = best[i / SCALES];
        #[expect(clippy::cast_possible_wrap, clippy::cast_possible_truncation, reason = "a lane's number")]
        let steps = (i % SCALES) as i32 - SCALES as i32 / 2;
        scale[i] = neighbour(storable_scale(about), steps);
    }
    let fine = Candidates::new(scale, zero, [0.0; LANES]);
    let chosen = smallest(&group.noise(&fine));
    if zero[chosen] == MIDDLE { scale[chosen] } else { -scale[chosen] }
}
