//! W4A8: 4-bit weights with a scale and zero point per group, int8 activations with a scale per token.

use std::ops::Range;

use rayon::prelude::*;

use super::{Linear, split_rows, tokens_of};
use crate::error::{InputError, Result};
use crate::pack::{GroupGrid, Int4Matrix};
use crate::runtime::kernels::int8;

/// Longest stretch of K whose sum is exact, as in vLLM's int4 product.
const MAX_BLOCK: usize = 128;

/// The arithmetic of vLLM's `int4_scaled_mm` on CPU: K is cut into blocks of the group, or of 128 where
/// groups are longer. Inside a block the sum of `x code * (code - zero point)` is an exact integer; the
/// blocks' sums, each times its group's scale, are added in f32 in order, and the total is multiplied
/// by the token's scale. A token of zeros gives zeros.
#[derive(Clone, Copy, Debug)]
pub struct Int4Linear<'a> {
    matrix: Int4Matrix<'a>,
    block: usize,
}

impl<'a> Int4Linear<'a> {
    /// Over a matrix whose grids have integer zero points.
    ///
    /// # Errors
    /// When the grids are affine, or groups are longer than 128 and no multiple of it.
    pub fn new(matrix: Int4Matrix<'a>) -> Result<Self> {
        if !matrix.grids().has_zero_points() {
            return Err(InputError::default()
                .expected("4-bit groups with integer zero points")
                .found("an offset per group")
                .into());
        }
        let block = matrix.group_size().min(MAX_BLOCK);
        if !matrix.group_size().is_multiple_of(block) {
            let expected = format!("groups of at most {MAX_BLOCK} or a multiple of it");
            return Err(InputError::default().expected(expected).found(matrix.group_size()).into());
        }
        Ok(Self { matrix, block })
    }

    /// Decodes a block of columns of some rows to integers and scales.
    fn decode(&self, rows: Range<usize>, columns: Range<usize>, codes: &mut [u8], scales: &mut [f32]) {
        let group = columns.start / self.matrix.group_size();
        self.matrix.codes().decode(rows.clone(), columns, codes);
        for ((row, codes), slot) in rows.zip(codes.chunks_exact_mut(self.block)).zip(scales) {
            let GroupGrid::ZeroPoint { scale, zero_point } = self.matrix.grid(row, group) else {
                unreachable!("checked when the linear was made")
            };
            // The two's complement of a difference below 16 fits a byte.
            for code in codes {
                *code = code.wrapping_sub(zero_point);
            }
            *slot = scale;
        }
    }
}

/// What a thread keeps from block to block.
#[derive(Default)]
struct Scratch {
    /// `[rows, block]`.
    codes: Vec<u8>,
    /// `[rows]`.
    scales: Vec<f32>,
}

impl Linear for Int4Linear<'_> {
    fn in_features(&self) -> usize {
        self.matrix.shape()[1]
    }

    fn out_features(&self) -> usize {
        self.matrix.shape()[0]
    }

    fn forward_rows(&self, x: &[f32], rows: Range<usize>, y: &mut [f32]) {
        let tokens = tokens_of(self, x, &rows, y);
        if tokens == 0 {
            return;
        }
        let (k, block) = (self.in_features(), self.block);
        let mut codes = vec![0i16; x.len()];
        let token_scales: Vec<f32> = codes
            .par_chunks_mut(k)
            .zip(x.par_chunks(k))
            .map(|(codes, x)| int8::quantize_token(x, codes))
            .collect();
        let codes = by_blocks(codes, k, block);
        split_rows(tokens, rows, y, |scratch: &mut Scratch, rows, out| {
            let n = rows.len();
            scratch.codes.resize(n * block, 0);
            scratch.scales.resize(n, 0.0);
            out.fill(0.0);
            for (b, x) in codes.chunks_exact(tokens * block).enumerate() {
                let columns = b * block..(b + 1) * block;
                self.decode(rows.clone(), columns, &mut scratch.codes, &mut scratch.scales);
                let (weights, scales) = (bytemuck::cast_slice(&scratch.codes), &scratch.scales);
                int8::multiply(x, weights, block, |r, c, sum| {
                    #[expect(clippy::cast_precision_loss, reason = "below 2^24: exact")]
                    let sum = sum as f32;
                    out[r * n + c] += sum * scales[c];
                });
            }
            for (out, scale) in out.chunks_exact_mut(n).zip(&token_scales) {
                for y in out {
                    *y *= scale;
                }
            }
        });
    }
}

/// From `[tokens, in]` to `[in/block, tokens, block]`, so that a block is a matrix without gaps.
fn by_blocks(codes: Vec<i16>, k: usize, block: usize) -> Vec<i16> {
    let tokens = codes.len() / k;
    if tokens == 1 {
        return codes;
    }
    let mut blocks = vec![0; codes.len()];
    blocks.par_chunks_mut(tokens * block).enumerate().for_each(|(b, out)| {
        for (out, codes) in out.chunks_exact_mut(block).zip(codes.chunks_exact(k)) {
            out.copy_from_slice(&codes[b * block..][..block]);
        }
    });
    blocks
}
