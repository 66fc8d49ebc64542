//! What a projection is to the forward pass, whatever its weights are made of.

mod blocks;
mod float;
mod int4;
mod int4_blocks;
mod int4_float;
mod int8;
mod int8_float;
mod stacked;

use std::ops::Range;

use rayon::prelude::*;

use super::kernels::dot;
use super::kernels::rows::Rows;
use crate::error::Result;
use crate::formats::{Activations, Packed};
pub use blocks::BlockLinear;
pub use float::FloatLinear;
pub use int4::Int4Linear;
pub use int4_float::Int4FloatLinear;
pub use int8::Int8Linear;
pub use int8_float::Int8FloatLinear;
pub use stacked::StackedLinear;

/// Rows of weights that one task multiplies by. No effect on results: every output element is
/// computed in one task, in an order that depends on the length of the row alone.
const ROW_BLOCK: usize = 32;

/// Pieces of the work for every thread, at least.
const PIECES: usize = 8;

/// Tokens from which on it pays to widen a block of weights once for all of them.
const WIDEN_FROM: usize = 6;

/// A matrix `[out_features, in_features]` that activations are multiplied by.
///
/// An implementation computes each output element in one fixed order, independent of the other
/// tokens and rows of the call and of the number of threads.
pub trait Linear: Send + Sync {
    /// Length of an activation row.
    fn in_features(&self) -> usize;

    /// Number of weight rows.
    fn out_features(&self) -> usize;

    /// `y [tokens, rows.len()] = x [tokens, in_features] W[rows]^T`: a block of the outputs, for
    /// heads whose whole output would be too large to hold.
    ///
    /// # Panics
    /// When the lengths do not fit or `rows` reaches past the end.
    fn forward_rows(&self, x: &[f32], rows: Range<usize>, y: &mut [f32]);

    /// `y [tokens, out_features] = x [tokens, in_features] W^T`.
    ///
    /// # Panics
    /// When the lengths do not fit.
    fn forward(&self, x: &[f32], y: &mut [f32]) {
        self.forward_rows(x, 0..self.out_features(), y);
    }
}

/// The linear of a module as an artifact stores it.
///
/// # Errors
/// When its rows are too long for exact sums.
pub fn packed_linear<'a>(packed: Packed<'a>) -> Result<Box<dyn Linear + 'a>> {
    match packed {
        Packed::Int8(matrix) => match matrix.activations {
            Activations::Int8 => {
                Ok(Box::new(Int8Linear::new(matrix.codes, matrix.scales, matrix.in_features)?))
            }
            Activations::Float => {
                Ok(Box::new(Int8FloatLinear::new(matrix.codes, matrix.scales, matrix.in_features)?))
            }
        },
        // Zero points are for kernels of int8 activations, an affine grid for one of floats.
        Packed::Int4(matrix) if !matrix.grids().has_zero_points() => {
            Ok(Box::new(Int4FloatLinear::new(matrix)?))
        }
        Packed::Int4(matrix) => Ok(Box::new(Int4Linear::new(matrix)?)),
    }
}

/// The linear of a module on a consumer that multiplies 4-bit weights by float activations.
///
/// # Errors
/// When its rows are too long for exact sums.
pub fn packed_linear_on_floats<'a>(packed: Packed<'a>) -> Result<Box<dyn Linear + 'a>> {
    match packed {
        Packed::Int4(matrix) => Ok(Box::new(Int4FloatLinear::new(matrix)?)),
        packed @ Packed::Int8(_) => packed_linear(packed),
    }
}

/// Checks the lengths of a call and returns the number of tokens.
fn tokens_of(linear: &impl Linear, x: &[f32], rows: &Range<usize>, y: &[f32]) -> usize {
    let k = linear.in_features();
    let tokens = x.len() / k;
    assert!(
        x.len() == tokens * k
            && y.len() == tokens * rows.len()
            && rows.start <= rows.end
            && rows.end <= linear.out_features(),
        "x of {}, y of {}, rows {rows:?} for a linear of [{}, {k}]",
        x.len(),
        y.len(),
        linear.out_features(),
    );
    tokens
}

/// Runs `task` over blocks of weight rows on all threads and puts the results together in `y`
/// `[tokens, rows.len()]`.
///
/// `task(scratch, rows, out)` fills `out`, `[tokens, rows.len()]` for its own rows; the scratch is
/// one per thread. For the use of [`Linear`] implementations.
pub fn split_rows<S: Default + Send>(
    tokens: usize,
    rows: Range<usize>,
    y: &mut [f32],
    task: impl Fn(&mut S, Range<usize>, &mut [f32]) + Sync,
) {
    split_rows_by(ROW_BLOCK, tokens, rows, y, task);
}

/// The same with blocks of `height` rows.
fn split_rows_by<S: Default + Send>(
    height: usize,
    tokens: usize,
    rows: Range<usize>,
    y: &mut [f32],
    task: impl Fn(&mut S, Range<usize>, &mut [f32]) + Sync,
) {
    let n = rows.len();
    if tokens == 0 || n == 0 {
        return;
    }
    let block = |start: usize| rows.start + start..rows.start + (start + height).min(n);
    // A thread that is done must find pieces left to take, however uneven their speeds are.
    let piece = (n.div_ceil(height) / (PIECES * rayon::current_num_threads())).max(1);
    if tokens == 1 {
        let each = |s: &mut S, (i, out): (usize, &mut [f32])| task(s, block(i * height), out);
        let blocks = y.par_chunks_mut(height).enumerate().with_max_len(piece);
        return blocks.for_each_init(S::default, each);
    }
    let starts: Vec<usize> = (0..n).step_by(height).collect();
    let blocks: Vec<Vec<f32>> = starts
        .par_iter()
        .with_max_len(piece)
        .map_init(S::default, |scratch, start| {
            let range = block(*start);
            let mut out = vec![0.0; tokens * range.len()];
            task(scratch, range, &mut out);
            out
        })
        .collect();
    y.par_chunks_mut(n).enumerate().for_each(|(token, y)| {
        for (y, block) in y.chunks_mut(height).zip(&blocks) {
            y.copy_from_slice(&block[token * y.len()..][..y.len()]);
        }
    });
}

/// The product for weights that are decoded to f32 a block at a time: `decode(row, columns, out)`
/// writes those columns of a weight row. For the use of [`Linear`] implementations; the order of
/// summation is that of [`FloatLinear`].
///
/// # Panics
/// When the lengths do not fit.
pub fn multiply_by_decoded_rows(
    x: &[f32],
    in_features: usize,
    rows: Range<usize>,
    y: &mut [f32],
    decode: impl Fn(usize, Range<usize>, &mut [f32]) + Sync,
) {
    let x = Rows::dense(x, in_features);
    assert_eq!(y.len(), x.count() * rows.len(), "x and y differ in tokens");
    split_rows(x.count(), rows, y, |panel: &mut Vec<f32>, rows, out| {
        let n = rows.len();
        let decode_all = |k: Range<usize>, panel: &mut [f32]| {
            for (row, out) in rows.clone().zip(panel.chunks_exact_mut(k.len())) {
                decode(row, k.clone(), out);
            }
        };
        dot::multiply_decoded(x, n, decode_all, panel, out, n);
    });
}

#[cfg(test)]
pub(super) mod tests;
