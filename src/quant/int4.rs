//! 4-bit codes for a group of weights that share a bf16 scale: one module per grid.
//!
//! | grid | weight | stored with the codes |
//! |---|---|---|
//! | [`symmetric`] | `(code - 8) * scale` | scale, of either sign |
//! | [`zero_point`] | `(code - zero) * scale` | scale, whole zero 0..=15 |
//! | [`affine`] | `(code - 8) * scale + zero` | scale, bf16 zero |
//!
//! A group is a slice of finite weights of any length from one up. Scales and zeros are rounded to
//! bf16 before anything is judged or encoded with them, since that is what a consumer multiplies by.
//! A scale is never zero, subnormal or infinite: consumers flush subnormals, and divide.
//!
//! The searches evaluate `LANES` grids at a time, one a lane: every weight is broadcast, so there is
//! no horizontal sum and no remainder, and the cost per weight does not depend on the group's length.

pub mod affine;
pub mod symmetric;
pub mod zero_point;

use super::ErrorSums;
use crate::simd::{LANES, multiversion, sum_lanes};

/// Largest code.
const MAX_CODE: f32 = 15.0;

/// Code of zero in the middle of the codes.
const MIDDLE: f32 = 8.0;

/// Adding 1.5 * 2^23 rounds an f32 of magnitude below 2^22 half to even and leaves the whole number in
/// the low bits; subtracting it again gives the number.
const ROUND: f32 = 12_582_912.0;

/// Largest finite bf16.
const BF16_MAX: f32 = f32::from_bits(0x7f7f_0000);

/// Groups whose largest absolute value is outside of this are rounded, not searched: squares of
/// scales, and scales below the full range, stay normal inside, and no decoded weight is infinite.
const SEARCHED: std::ops::RangeInclusive<f32> = 1e-34..=1e36;

/// Rounds to bf16, half to even; the result is finite for arguments up to [`BF16_MAX`].
#[inline(always)]
fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000)
}

/// The bf16 number `steps` above a positive bf16 number (below, when negative).
#[expect(clippy::cast_sign_loss, reason = "two's complement is what is added")]
#[inline(always)]
fn neighbour(x: f32, steps: i32) -> f32 {
    f32::from_bits(x.to_bits().wrapping_add((steps as u32) << 16))
}

/// A scale of (about) this value that may be stored: bf16 and normal.
#[inline(always)]
fn storable_scale(scale: f32) -> f32 {
    to_bf16(scale.max(f32::MIN_POSITIVE))
}

/// What a group is stored with: `weight = (code - zero) * scale + offset`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grid {
    scale: f32,
    /// A code, 0 to 15; not necessarily the one that `offset` would round to.
    zero: f32,
    offset: f32,
    /// Whether the zero is added before rounding, as consumers of [`zero_point`] do: on a tie its
    /// parity decides.
    rounds_codes: bool,
}

impl Grid {
    /// The code of one weight, as the modules' `encode_group` chooses it, and what it decodes to.
    pub fn nearest(self, weight: f32) -> (u8, f32) {
        let (before, after) = if self.rounds_codes { (self.zero, 0.0) } else { (0.0, self.zero) };
        let steps = (weight - self.offset) / self.scale + before;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to 0..=15")]
        let code = (clamp(steps, -after, MAX_CODE - after).round_ties_even() + after) as u8;
        (code, self.decode(code))
    }

    pub(in crate::quant) fn decode(self, code: u8) -> f32 {
        (f32::from(code) - self.zero).mul_add(self.scale, self.offset)
    }

    fn encode(self, weights: &[f32], codes: &mut [u8]) {
        assert_eq!(weights.len(), codes.len(), "a code for every weight");
        let (before, after) = if self.rounds_codes { (self.zero, 0.0) } else { (0.0, self.zero) };
        encode(weights, self.scale, self.offset, [before, after], codes);
    }

    fn decode_into(self, codes: &[u8], weights: &mut [f32]) {
        assert_eq!(weights.len(), codes.len(), "a code for every weight");
        decode(codes, self.scale, self.zero, self.offset, weights);
    }

    /// Squared sums of a group against its codes. Noise is counted in steps and signal in the largest
    /// power of the grid, so that the squares of very large and very small weights stay within f32.
    fn error(self, weights: &[f32], codes: &[u8]) -> ErrorSums {
        assert_eq!(weights.len(), codes.len(), "a code for every weight");
        let noise_unit = self.scale.abs();
        let signal_unit = noise_unit.max(self.offset.abs());
        let [signal, noise] = errors(weights, codes, self, [1.0 / signal_unit, 1.0 / noise_unit]);
        let square = |unit: f32| f64::from(unit) * f64::from(unit);
        ErrorSums {
            signal: f64::from(signal) * square(signal_unit),
            noise: f64::from(noise) * square(noise_unit),
        }
    }

    /// The largest squared error of `weights` on this grid: for every weight half a step, or what the
    /// farther of the group's ends loses by clipping where that is more. It clips by what rounding the
    /// scale and the zero to bf16 moved the ends of the grid. Exact for a constant group.
    fn bound(self, weights: &[f32]) -> f64 {
        let [lo, hi] = extent(weights);
        let mut worst = f64::from(self.scale.abs()) / 2.0;
        if lo == hi {
            let mut code = [0];
            self.encode(&[lo], &mut code);
            worst = (f64::from(lo) - f64::from(self.decode(code[0]))).abs();
        } else {
            let ends = [0.0, MAX_CODE].map(|code| {
                (f64::from(code) - f64::from(self.zero)) * f64::from(self.scale) + f64::from(self.offset)
            });
            worst = worst.max(ends[0] - f64::from(lo)).max(f64::from(hi) - ends[1]);
        }
        #[expect(clippy::cast_precision_loss, reason = "groups are far shorter than 2^53")]
        let bound = weights.len() as f64 * worst * worst;
        // Codes are computed in f32: a weight next to a tie may land an ulp beyond half a step.
        bound * (1.0 + 1e-3)
    }
}

multiversion! {
    fn encode(weights: &[f32], scale: f32, offset: f32, zero: [f32; 2], codes: &mut [u8]) {
        let [before, after] = zero;
        let added = (after + ROUND).to_bits().to_le_bytes()[0];
        for (code, w) in codes.iter_mut().zip(weights) {
            // A division: the reciprocal would move values on a tie to the wrong side.
            let steps = (w - offset) / scale + before;
            let rounded = clamp(steps, -after, MAX_CODE - after) + ROUND;
            *code = rounded.to_bits().to_le_bytes()[0].wrapping_add(added);
        }
    }
}

multiversion! {
    fn decode(codes: &[u8], scale: f32, zero: f32, offset: f32, weights: &mut [f32]) {
        for (w, code) in weights.iter_mut().zip(codes) {
            *w = (f32::from(*code) - zero).mul_add(scale, offset);
        }
    }
}

multiversion! {
    /// Sums of squares of a group and of its error, each in squares of the unit whose inverse is given.
    fn errors(weights: &[f32], codes: &[u8], grid: Grid, per_unit: [f32; 2]) -> [f32; 2] {
        let [signal_per_unit, noise_per_unit] = per_unit;
        let (chunks, rest) = weights.as_chunks::<LANES>();
        let (code_chunks, code_rest) = codes.as_chunks::<LANES>();
        let (mut signal, mut noise) = ([0.0f32; LANES], [0.0f32; LANES]);
        for (chunk, codes) in chunks.iter().zip(code_chunks) {
            for i in 0..LANES {
                let decoded = (f32::from(codes[i]) - grid.zero).mul_add(grid.scale, grid.offset);
                let (w, error) = (chunk[i] * signal_per_unit, (chunk[i] - decoded) * noise_per_unit);
                signal[i] = w.mul_add(w, signal[i]);
                noise[i] = error.mul_add(error, noise[i]);
            }
        }
        let (mut signal, mut noise) = (sum_lanes(signal), sum_lanes(noise));
        for (w, code) in rest.iter().zip(code_rest) {
            let error = (w - grid.decode(*code)) * noise_per_unit;
            let w = w * signal_per_unit;
            signal = w.mul_add(w, signal);
            noise = error.mul_add(error, noise);
        }
        [signal, noise]
    }
}

multiversion! {
    /// The smallest and the largest weight.
    fn extent(weights: &[f32]) -> [f32; 2] {
        let (chunks, rest) = weights.as_chunks::<LANES>();
        let (mut low, mut high) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
        for chunk in chunks {
            for i in 0..LANES {
                low[i] = min(chunk[i], low[i]);
                high[i] = max(chunk[i], high[i]);
            }
        }
        for w in rest {
            low[0] = min(*w, low[0]);
            high[0] = max(*w, high[0]);
        }
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                low[i] = min(low[i + width], low[i]);
                high[i] = max(high[i + width], high[i]);
            }
            width /= 2;
        }
        [low[0], high[0]]
    }
}

// One comparison each, unlike the methods of f32, which also order NaN.
#[inline(always)]
fn min(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

#[inline(always)]
fn max(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    min(max(x, low), high)
}

/// Grids to be tried, one a lane. A weight is `w * inverse + shift` steps from the grid's zero, its
/// code that number rounded and clamped.
#[derive(Clone, Copy, Debug)]
struct Candidates {
    scale: [f32; LANES],
    inverse: [f32; LANES],
    shift: [f32; LANES],
    low: [f32; LANES],
    high: [f32; LANES],
}

impl Candidates {
    /// Grids of some scales, zeros (as codes) and offsets.
    #[inline(always)]
    fn new(scale: [f32; LANES], zero: [f32; LANES], offset: [f32; LANES]) -> Self {
        let mut new =
            Self { scale, inverse: [0.0; LANES], shift: [0.0; LANES], low: [0.0; LANES], high: [0.0; LANES] };
        for i in 0..LANES {
            new.inverse[i] = 1.0 / scale[i];
            new.shift[i] = -offset[i] * new.inverse[i];
            new.low[i] = -zero[i];
            new.high[i] = MAX_CODE - zero[i];
        }
        new
    }
}

/// What a least-squares fit of weights to the codes of a grid needs, per candidate: weighted sums of
/// codes (counted from zero), of their squares, and of their products with the weights in steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Fit {
    codes: [f32; LANES],
    squares: [f32; LANES],
    products: [f32; LANES],
}

/// The weights of a group, and how much each of their squared errors counts.
#[derive(Clone, Copy)]
struct Group<'a> {
    weights: &'a [f32],
    importance: Option<&'a [f32]>,
}

impl<'a> Group<'a> {
    /// Importance that is zero throughout, or whose sums would leave f32, is no importance.
    fn new(weights: &'a [f32], importance: Option<&'a [f32]>) -> Self {
        let usable = |h: &&[f32]| {
            assert_eq!(h.len(), weights.len(), "an importance for every weight");
            let largest = h.iter().copied().fold(0.0, max);
            (1e-25..=1e30).contains(&largest)
        };
        Self { weights, importance: importance.filter(usable) }
    }

    fn fit(self, candidates: &Candidates) -> Fit {
        let mut sums = Fit::default();
        fit(self.weights, self.importance, candidates, &mut sums);
        sums
    }

    /// Squared errors of the candidates, in squares of `unit`.
    #[inline(always)]
    fn noise(self, candidates: &Candidates, unit: f32) -> [f32; LANES] {
        let mut noise = [0.0; LANES];
        misfit(self.weights, self.importance, candidates, &mut noise);
        for (noise, scale) in noise.iter_mut().zip(&candidates.scale) {
            let units = scale / unit;
            *noise *= units * units;
        }
        noise
    }
}

/// The lanes' numbers take the place of this many low bits of what is compared: it costs a millionth
/// of precision and makes the choice a few vector instructions, without a branch.
const LANE_BITS: u32 = LANES as u32 - 1;

/// The first lane with the smallest of some non-negative values.
#[inline(always)]
fn smallest(values: [f32; LANES]) -> usize {
    let mut keys = [0; LANES];
    for i in 0..LANES {
        keys[i] = (values[i].to_bits() & !LANE_BITS) | i as u32;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            keys[i] = keys[i].min(keys[i + width]);
        }
        width /= 2;
    }
    (keys[0] & LANE_BITS) as usize
}

/// The first lane with the largest of some non-negative values.
#[inline(always)]
fn largest(values: [f32; LANES]) -> usize {
    let mut keys = [0; LANES];
    for i in 0..LANES {
        // The complement orders them the other way.
        keys[i] = (!values[i].to_bits() & !LANE_BITS) | i as u32;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            keys[i] = keys[i].min(keys[i + width]);
        }
        width /= 2;
    }
    (keys[0] & LANE_BITS) as usize
}

#[inline(always)]
fn fit_lanes(pairs: impl Iterator<Item = (f32, f32)>, candidates: &Candidates, sums: &mut Fit) {
    let Candidates { inverse, shift, low, high, .. } = *candidates;
    let (mut codes, mut squares, mut products) = ([0.0f32; LANES], [0.0f32; LANES], [0.0f32; LANES]);
    for (w, importance) in pairs {
        for i in 0..LANES {
            let steps = w.mul_add(inverse[i], shift[i]);
            let code = (clamp(steps, low[i], high[i]) + ROUND) - ROUND;
            let weighted = code * importance;
            codes[i] += weighted;
            squares[i] = code.mul_add(weighted, squares[i]);
            products[i] = steps.mul_add(weighted, products[i]);
        }
    }
    *sums = Fit { codes, squares, products };
}

#[inline(always)]
fn misfit_lanes(pairs: impl Iterator<Item = (f32, f32)>, candidates: &Candidates, sums: &mut [f32; LANES]) {
    let Candidates { inverse, shift, low, high, .. } = *candidates;
    let mut noise = [0.0f32; LANES];
    for (w, importance) in pairs {
        for i in 0..LANES {
            let steps = w.mul_add(inverse[i], shift[i]);
            let error = steps - ((clamp(steps, low[i], high[i]) + ROUND) - ROUND);
            noise[i] = error.mul_add(error * importance, noise[i]);
        }
    }
    *sums = noise;
}

/// Weights that all count the same; multiplying by one is compiled to nothing.
#[inline(always)]
fn alike(weights: &[f32]) -> impl Iterator<Item = (f32, f32)> {
    weights.iter().map(|w| (*w, 1.0))
}

#[inline(always)]
fn paired(weights: &[f32], importance: &[f32]) -> impl Iterator<Item = (f32, f32)> {
    weights.iter().copied().zip(importance.iter().copied())
}

multiversion! {
    fn fit(weights: &[f32], importance: Option<&[f32]>, candidates: &Candidates, sums: &mut Fit) {
        match importance {
            None => fit_lanes(alike(weights), candidates, sums),
            Some(importance) => fit_lanes(paired(weights, importance), candidates, sums),
        }
    }
}

multiversion! {
    /// Squared error of a group on every candidate, in squared steps of each.
    fn misfit(
        weights: &[f32],
        importance: Option<&[f32]>,
        candidates: &Candidates,
        sums: &mut [f32; LANES],
    ) {
        match importance {
            None => misfit_lanes(alike(weights), candidates, sums),
            Some(importance) => misfit_lanes(paired(weights, importance), candidates, sums),
        }
    }
}

#[cfg(test)]
#[path = "int4_tests.rs"]
mod tests;
