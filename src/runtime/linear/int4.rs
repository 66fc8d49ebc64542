//! W4A8: 4-bit weights with a scale and zero point per group, int8 activations with a scale per token.

use std::ops::Range;

use rayon::prelude::*;

use super::int4_blocks::{Int4Blocks, Scratch};
use super::{Linear, split_rows, tokens_of};
use crate::error::{InputError, Result};
use crate::pack::{GridBuffer, Int4Matrix};
use crate::runtime::kernels::{int4, int8};

/// Sums that a thread holds, so that they stay in the first-level cache.
const SUMS: usize = 2048;

/// The arithmetic of vLLM's `int4_scaled_mm` on CPU: K is cut into blocks of the group, or of 128 where
/// groups are longer. Inside a block the sum of `x code * (code - zero point)` is an exact integer; the
/// blocks' sums, each times its group's scale, are added in f32 in order, and the total is multiplied
/// by the token's scale. A token of zeros gives zeros.
#[derive(Clone, Copy, Debug)]
pub struct Int4Linear<'a>(Int4Blocks<'a>);

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
        Ok(Self(Int4Blocks::new(matrix)?))
    }

    /// The product of one token with rows whose words follow each other: row by row, as they are.
    fn one_token(&self, x: &Activations, rows: Range<usize>, y: &mut [f32]) {
        let Int4Blocks { matrix, block } = self.0;
        let (bytes, k, per_group) = (matrix.codes().bytes(), matrix.shape()[1], self.0.per_group());
        split_rows(1, rows, y, |scratch: &mut RowScratch, rows, out| {
            let RowScratch { sums, grids, terms } = scratch;
            sums.resize(self.0.blocks(), 0);
            terms.resize(self.0.blocks(), 0.0);
            for (row, y) in rows.zip(out) {
                int4::row_sums(&bytes[row * k / 2..][..k / 2], &x.codes, block, sums);
                matrix.grids_of_row(row, grids);
                grids.repeat(per_group);
                int4::block_terms(sums, grids.zero_points(), &x.sums, grids.scales(), terms);
                *y = terms.iter().fold(0.0, |total, term| total + term) * x.scales[0];
            }
        });
    }
}

/// What a thread keeps from row to row.
#[derive(Default)]
struct RowScratch {
    /// `[blocks]`, like the others.
    sums: Vec<i32>,
    grids: GridBuffer,
    terms: Vec<f32>,
}

/// What a thread keeps from task to task.
#[derive(Default)]
struct TaskScratch {
    words: Scratch,
    /// `[blocks, tokens, rows]`.
    sums: Vec<i32>,
    /// `[rows]`.
    grids: GridBuffer,
}

impl Linear for Int4Linear<'_> {
    fn in_features(&self) -> usize {
        self.0.matrix.shape()[1]
    }

    fn out_features(&self) -> usize {
        self.0.matrix.shape()[0]
    }

    fn forward_rows(&self, x: &[f32], rows: Range<usize>, y: &mut [f32]) {
        let tokens = tokens_of(self, x, &rows, y);
        if tokens == 0 {
            return;
        }
        let x = Activations::new(x, self.in_features(), self.0.block);
        if tokens == 1 && self.0.has_rows() {
            return self.one_token(&x, rows, y);
        }
        self.0.split(tokens, rows, y, |scratch: &mut TaskScratch, rows, out| {
            let (n, block) = (rows.len(), self.0.block);
            let TaskScratch { words, sums, grids } = scratch;
            // Either some blocks of all tokens or some tokens of one block.
            let tokens_at_once = (SUMS / n).clamp(1, tokens);
            let blocks_at_once = (SUMS / (n * tokens)).max(1);
            out.fill(0.0);
            self.0.each_piece(&rows, words, |piece, words| {
                for first in piece.clone().step_by(blocks_at_once) {
                    let blocks = first..(first + blocks_at_once).min(piece.end);
                    let words = words.skip_to_block(first - piece.start, block);
                    for first in (0..tokens).step_by(tokens_at_once) {
                        let at = first..(first + tokens_at_once).min(tokens);
                        let codes = &x.codes[(blocks.start * tokens + at.start) * block..];
                        sums.resize(blocks.len() * at.len() * n, 0);
                        let codes = &codes[..blocks.len() * at.len() * block];
                        int4::block_sums(words, codes, at.len(), block, sums);
                        for (b, sums) in blocks.clone().zip(sums.chunks_exact(at.len() * n)) {
                            self.0.matrix.grids_of_rows(rows.clone(), b / self.0.per_group(), grids);
                            let x_sums = &x.sums[b * tokens..][at.clone()];
                            let out = out[at.start * n..at.end * n].chunks_exact_mut(n);
                            for ((y, sums), x_sum) in out.zip(sums.chunks_exact(n)).zip(x_sums) {
                                int4::add_block(sums, grids.zero_points(), grids.scales(), *x_sum, y);
                            }
                        }
                    }
                }
            });
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
    /// `[blocks, tokens, block]`, each block arranged for words of nibbles.
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
        Self { codes: arranged, sums, scales }
    }
}
