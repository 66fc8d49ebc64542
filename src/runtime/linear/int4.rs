//! W4A8: 4-bit weights with a scale and zero point per group, int8 activations with a scale per token.

use std::ops::Range;

use rayon::prelude::*;

use super::{Linear, split_rows, split_rows_by, tokens_of};
use crate::error::{InputError, Result};
use crate::pack::{CodeLayout, Int4Matrix};
use crate::runtime::kernels::int4::{self, WORD, Words};
use crate::runtime::kernels::int8;

/// Longest stretch of K whose sum is exact, as in vLLM's int4 product.
const MAX_BLOCK: usize = 128;
/// Rows that one task takes where the words of neighbouring rows lie side by side: enough for a stream.
const ROWS_OF_COLUMNS: usize = 128;
/// The same where many tokens share what was unpacked.
const ROWS_FOR_MANY: usize = 32;
/// Sums that a thread holds, so that they stay in the first-level cache.
const SUMS: usize = 2048;

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
        if !matrix.group_size().is_multiple_of(block) || !block.is_multiple_of(WORD) {
            let expected = format!("groups of a multiple of {WORD} up to {MAX_BLOCK}, or a multiple of that");
            return Err(InputError::default().expected(expected).found(matrix.group_size()).into());
        }
        if matches!(matrix.codes().layout(), CodeLayout::Blocks { .. }) {
            return Err(InputError::default().expected("words of codes").found("interleaved rows").into());
        }
        Ok(Self { matrix, block })
    }

    /// The packed codes of some rows and blocks.
    fn words<'s>(
        &self,
        rows: &Range<usize>,
        blocks: &Range<usize>,
        scratch: &'s mut Vec<[u8; 4]>,
    ) -> Words<'s>
    where
        'a: 's,
    {
        let (bytes, [out, k]) = (self.matrix.codes().bytes(), self.matrix.shape());
        let words = blocks.start * self.block / WORD..blocks.end * self.block / WORD;
        if self.matrix.codes().layout() == CodeLayout::Columns {
            let words = &bytes.as_chunks::<4>().0[words.start * out + rows.start..];
            return Words { words, stride: out, rows: rows.len() };
        }
        let stride = k / 2;
        scratch.resize(words.len() * rows.len(), [0; 4]);
        int4::interleave(&bytes[rows.start * stride + words.start * 4..], stride, rows.len(), scratch);
        Words { words: scratch, stride: rows.len(), rows: rows.len() }
    }

    /// The product of one token with rows whose words follow each other: row by row, as they are.
    fn one_token(&self, x: &Activations, rows: Range<usize>, y: &mut [f32]) {
        let (bytes, k) = (self.matrix.codes().bytes(), self.matrix.shape()[1]);
        let (groups, per_group) = (self.matrix.groups(), self.matrix.group_size() / self.block);
        split_rows(1, rows, y, |scratch: &mut Scratch, rows, out| {
            let Scratch { sums, scales, zero_points, terms, .. } = scratch;
            sums.resize(x.blocks, 0);
            scales.resize(x.blocks, 0.0);
            zero_points.resize(x.blocks, 0);
            terms.resize(x.blocks, 0.0);
            for (row, y) in rows.zip(out) {
                int4::row_sums(&bytes[row * k / 2..][..k / 2], &x.codes, self.block, sums);
                self.matrix.grids_of_row(row, &mut scales[..groups], &mut zero_points[..groups]);
                if per_group > 1 {
                    for b in (0..x.blocks).rev() {
                        (scales[b], zero_points[b]) = (scales[b / per_group], zero_points[b / per_group]);
                    }
                }
                int4::block_terms(sums, zero_points, &x.sums, scales, terms);
                *y = terms.iter().fold(0.0, |total, term| total + term) * x.scales[0];
            }
        });
    }
}

/// What a thread keeps from task to task.
#[derive(Default)]
struct Scratch {
    /// `[words, rows]`.
    words: Vec<[u8; 4]>,
    /// `[blocks, tokens, rows]`.
    sums: Vec<i32>,
    /// `[rows]`; of a single row `[blocks]`, and so are the others.
    scales: Vec<f32>,
    zero_points: Vec<i32>,
    terms: Vec<f32>,
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
        let block = self.block;
        let x = Activations::new(x, self.in_features(), block);
        let height = match self.matrix.codes().layout() {
            CodeLayout::Rows if tokens == 1 => return self.one_token(&x, rows, y),
            CodeLayout::Columns if tokens == 1 => ROWS_OF_COLUMNS,
            _ => ROWS_FOR_MANY,
        };
        split_rows_by(height, tokens, rows, y, |scratch: &mut Scratch, rows, out| {
            let n = rows.len();
            scratch.scales.resize(n, 0.0);
            scratch.zero_points.resize(n, 0);
            out.fill(0.0);
            let at_once = (SUMS / (tokens * n)).max(1);
            for first in (0..x.blocks).step_by(at_once) {
                let blocks = first..(first + at_once).min(x.blocks);
                let words = self.words(&rows, &blocks, &mut scratch.words);
                scratch.sums.resize(blocks.len() * tokens * n, 0);
                let codes = &x.codes[blocks.start * tokens * block..blocks.end * tokens * block];
                int4::block_sums(words, codes, tokens, block, &mut scratch.sums);
                for (b, sums) in blocks.zip(scratch.sums.chunks_exact(tokens * n)) {
                    let group = b * block / self.matrix.group_size();
                    let (scales, zero_points) = (&mut scratch.scales, &mut scratch.zero_points);
                    self.matrix.grids_of_rows(rows.clone(), group, scales, zero_points);
                    let x_sums = &x.sums[b * tokens..][..tokens];
                    for ((y, sums), x_sum) in out.chunks_exact_mut(n).zip(sums.chunks_exact(n)).zip(x_sums) {
                        int4::add_block(sums, zero_points, scales, *x_sum, y);
                    }
                }
            }
            for (out, scale) in out.chunks_exact_mut(n).zip(&x.scales) {
                for y in out {
                    *y *= scale;
                }
            }
        });
    }
}

/// Quantized tokens.
struct Activations {
    blocks: usize,
    /// `[blocks, tokens, block]`, arranged for words of nibbles.
    codes: Vec<i8>,
    /// `[blocks, tokens]`: the sum of a block's codes.
    sums: Vec<i32>,
    /// `[tokens]`.
    scales: Vec<f32>,
}

impl Activations {
    fn new(x: &[f32], k: usize, block: usize) -> Self {
        let (tokens, blocks) = (x.len() / k, k / block);
        let (codes, scales) = int8::quantize_tokens(x, k);
        let mut arranged = vec![0; x.len()];
        let mut sums = vec![0; blocks * tokens];
        let by_block = arranged.par_chunks_mut(tokens * block).zip(sums.par_chunks_mut(tokens));
        by_block.enumerate().for_each(|(b, (arranged, sums))| {
            let codes = codes.chunks_exact(k).map(|codes| &codes[b * block..][..block]);
            for ((codes, arranged), sum) in codes.zip(arranged.chunks_exact_mut(block)).zip(sums) {
                int4::arrange(codes, arranged);
                *sum = codes.iter().map(|code| i32::from(*code)).sum();
            }
        });
        Self { blocks, codes: arranged, sums, scales }
    }
}
