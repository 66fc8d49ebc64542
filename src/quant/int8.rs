//! Symmetric int8 with one f32 scale per row: `w = code * scale`, codes in -127..=127.
//!
//! The rule of compressed-tensors' `int-quantized` channel strategy. -128 is not used, so that the
//! grid is symmetric and a consumer may negate a code.

use super::{ErrorSums, Method};
use crate::simd::{LANES, multiversion, sum_lanes};

/// Largest code.
pub const MAX_CODE: f32 = 127.0;

/// Scales tried per row by [`Method::Search`]; the first is that of [`Method::RoundToNearest`].
pub const CANDIDATES: usize = 16;

/// Adding and subtracting 1.5 * 2^23 rounds an f32 of magnitude below 2^22 to a whole number, half to
/// even, and leaves that number in the low bits: one addition instead of a rounding instruction that
/// the baseline lacks and a conversion that saturates.
const ROUND: f32 = 12_582_912.0;

/// The scale of a row whose largest absolute value is `amax`; finite and above zero for every finite
/// `amax`. An all-zero row gets 1, and a row so small that `amax / 127` is subnormal the smallest
/// normal number, since consumers flush subnormals to zero.
pub fn full_range_scale(amax: f32) -> f32 {
    if amax == 0.0 { 1.0 } else { (amax / MAX_CODE).max(f32::MIN_POSITIVE) }
}

/// Chooses the scale of a row: the largest absolute value lands on code 127, or with
/// [`Method::Search`] the best of [`CANDIDATES`] scales at or below that. `amax` is the row's largest
/// absolute value and must be finite.
pub fn row_scale(row: &[f32], amax: f32, method: Method) -> f32 {
    let full = full_range_scale(amax);
    // Rows below the normal range have no finer scale to try.
    if method == Method::RoundToNearest || full <= 2.0 * f32::MIN_POSITIVE || amax == 0.0 {
        return full;
    }
    // Shrinking the scale by d saves about 2 d K/12 squared steps of rounding noise and costs the one
    // largest weight (127 d)^2: the optimum is d = K / (12 * 127^2). With several weights near the
    // maximum it is smaller, with none but one it is that; the search goes to four times it.
    #[expect(clippy::cast_precision_loss, reason = "row lengths are far below 2^24")]
    let optimum = row.len() as f32 / (12.0 * MAX_CODE * MAX_CODE);
    let step = (4.0 * optimum).clamp(0.01, 0.25) / (CANDIDATES - 1) as f32;
    let mut best = (f64::INFINITY, full);
    for i in 0..CANDIDATES {
        let scale = full * (1.0 - step * i as f32);
        let error = f64::from(squared_steps(row, 1.0 / scale)) * f64::from(scale) * f64::from(scale);
        if error < best.0 {
            best = (error, scale);
        }
    }
    best.1
}

multiversion! {
    /// Squared error of a row on a grid, in squared steps.
    fn squared_steps(row: &[f32], steps_per_unit: f32) -> f32 {
        let (chunks, rest) = row.as_chunks::<LANES>();
        let mut sums = [0.0f32; LANES];
        for chunk in chunks {
            for (sum, w) in sums.iter_mut().zip(chunk) {
                let steps = w * steps_per_unit;
                let code = (steps.clamp(-MAX_CODE, MAX_CODE) + ROUND) - ROUND;
                *sum = (steps - code).mul_add(steps - code, *sum);
            }
        }
        let mut total = sum_lanes(sums);
        for w in rest {
            let steps = w * steps_per_unit;
            let code = (steps.clamp(-MAX_CODE, MAX_CODE) + ROUND) - ROUND;
            total = (steps - code).mul_add(steps - code, total);
        }
        total
    }
}

/// Codes of a row: `w / scale`, half to even, clamped.
///
/// # Panics
/// When the lengths differ.
pub fn encode_row(row: &[f32], scale: f32, codes: &mut [i8]) {
    assert_eq!(row.len(), codes.len(), "a code for every weight");
    encode(row, scale, codes);
}

multiversion! {
    fn encode(row: &[f32], scale: f32, codes: &mut [i8]) {
        for (code, w) in codes.iter_mut().zip(row) {
            // A division: the reciprocal would move values on a tie to the wrong side.
            let rounded = (w / scale).clamp(-MAX_CODE, MAX_CODE) + ROUND;
            *code = rounded.to_bits().to_le_bytes()[0].cast_signed();
        }
    }
}

/// Weights of a row of codes: `code * scale`.
///
/// # Panics
/// When the lengths differ.
pub fn decode_row(codes: &[i8], scale: f32, row: &mut [f32]) {
    assert_eq!(row.len(), codes.len(), "a code for every weight");
    for (w, code) in row.iter_mut().zip(codes) {
        *w = f32::from(*code) * scale;
    }
}

/// Squared sums of a row against its codes. Works in steps, so that the squares of very large and
/// very small weights stay within f32.
///
/// # Panics
/// When the lengths differ.
pub fn row_error(row: &[f32], codes: &[i8], scale: f32) -> ErrorSums {
    assert_eq!(row.len(), codes.len(), "a code for every weight");
    let [signal, noise] = error_in_steps(row, codes, 1.0 / scale);
    let square = f64::from(scale) * f64::from(scale);
    ErrorSums { signal: f64::from(signal) * square, noise: f64::from(noise) * square }
}

multiversion! {
    /// Sums of squares of a row and of its error, in squared steps.
    fn error_in_steps(row: &[f32], codes: &[i8], steps_per_unit: f32) -> [f32; 2] {
        let (rows, row_rest) = row.as_chunks::<LANES>();
        let (code_chunks, code_rest) = codes.as_chunks::<LANES>();
        let (mut signal, mut noise) = ([0.0f32; LANES], [0.0f32; LANES]);
        for (chunk, codes) in rows.iter().zip(code_chunks) {
            for i in 0..LANES {
                let steps = chunk[i] * steps_per_unit;
                let error = steps - f32::from(codes[i]);
                signal[i] = steps.mul_add(steps, signal[i]);
                noise[i] = error.mul_add(error, noise[i]);
            }
        }
        let (mut signal, mut noise) = (sum_lanes(signal), sum_lanes(noise));
        for (w, code) in row_rest.iter().zip(code_rest) {
            let steps = w * steps_per_unit;
            let error = steps - f32::from(*code);
            signal = steps.mul_add(steps, signal);
            noise = error.mul_add(error, noise);
        }
        [signal, noise]
    }
}

/// The largest squared error that rounding a row to its full-range grid can cost: half a step for
/// every weight. No search may exceed it, and a scale that does not belong to its row does.
pub fn rounding_bound(row_len: usize, amax: f32) -> f64 {
    let half_step = f64::from(full_range_scale(amax)) / 2.0;
    #[expect(clippy::cast_precision_loss, reason = "row lengths are far below 2^53")]
    let bound = row_len as f64 * half_step * half_step;
    // The codes are computed in f32: a weight next to a tie may land an ulp of 127 beyond half a step.
    bound * (1.0 + 1e-3)
}

#[cfg(test)]
#[path = "int8_tests.rs"]
mod tests;
