//! W4A16: 4-bit weights in groups, float activations.

use std::ops::Range;

use rayon::prelude::*;

use super::int4_blocks::{Int4Blocks, Scratch};
use super::{Linear, split_rows, tokens_of};
use crate::error::Result;
use crate::pack::{GridBuffer, Int4Matrix};
use crate::runtime::kernels::fixed_point::{self, Block, DIGITS, MAX_BLOCK};
use crate::runtime::kernels::int4;

/// The product of PyTorch's tinygemm on CPU but for rounding: weights are never rounded to bf16. Where tinygemm
/// rounds each weight and each partial sum to f32, here the sums of a block's codes (the group, or 128 of it)
/// with its activations are exact, the activations being integers of 24 bits there, with a power
/// of two per block as their unit; grids are applied to the sums, and the blocks added in f32 in order.
#[derive(Clone, Copy, Debug)]
pub struct Int4FloatLinear<'a>(Int4Blocks<'a>);

impl<'a> Int4FloatLinear<'a> {
    /// Over a matrix with grids of any kind.
    ///
    /// # Errors
    /// When groups are no multiple of 8, or longer than 128 and no multiple of that.
    pub fn new(matrix: Int4Matrix<'a>) -> Result<Self> {
        Ok(Self(Int4Blocks::new(matrix)?))
    }

    /// The product of one token with rows whose words follow each other: row by row, as they are.
    fn one_token(&self, x: &[f32], rows: Range<usize>, y: &mut [f32]) {
        let Int4Blocks { matrix, block } = self.0;
        let (bytes, k, per_group) = (matrix.codes().bytes(), matrix.shape()[1], self.0.per_group());
        let blocks = self.0.blocks();
        let mut codes = vec![0; DIGITS * k];
        let mut of_blocks = Vec::with_capacity(blocks);
        for (b, x) in x.chunks_exact(block).enumerate() {
            let planes = codes.chunks_exact_mut(k).map(|codes| &mut codes[b * block..][..block]);
            of_blocks.push(integers(x, planes));
        }
        split_rows(1, rows, y, |scratch: &mut RowScratch, rows, out| {
            let RowScratch { sums, grids, terms } = scratch;
            sums.resize(DIGITS * blocks, 0);
            terms.resize(blocks, 0.0);
            for (row, y) in rows.zip(out) {
                for (codes, sums) in codes.chunks_exact(k).zip(sums.chunks_exact_mut(blocks)) {
                    int4::row_sums(&bytes[row * k / 2..][..k / 2], codes, block, sums);
                }
                matrix.grids_of_row(row, grids);
                grids.repeat(per_group);
                fixed_point::block_terms(
                    sums,
                    grids.zero_points(),
                    grids.scales(),
                    grids.zeros(),
                    &of_blocks,
                    terms,
                );
                *y = terms.iter().zip(&of_blocks).fold(0.0, |total, (term, x)| term.mul_add(x.unit, total));
            }
        });
    }
}

/// What a thread keeps from row to row.
#[derive(Default)]
struct RowScratch {
    /// `[digits, blocks]`.
    sums: Vec<i32>,
    /// `[blocks]`, like the terms.
    grids: GridBuffer,
    terms: Vec<f32>,
}

impl Linear for Int4FloatLinear<'_> {
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
        if tokens == 1 && self.0.has_rows() {
            return self.one_token(x, rows, y);
        }
        let x = Activations::new(x, self.in_features(), self.0.block);
        self.0.split(tokens, rows, y, |(scratch, grids): &mut (Scratch, GridBuffer), rows, out| {
            let block = self.0.block;
            out.fill(0.0);
            self.0.each_piece(&rows, scratch, |blocks, words| {
                for b in blocks.clone() {
                    self.0.matrix.grids_of_rows(rows.clone(), b / self.0.per_group(), grids);
                    let words = words.skip_to_block(b - blocks.start, block);
                    let digits = &x.digits[b * tokens * DIGITS * block..][..tokens * DIGITS * block];
                    fixed_point::add_block(
                        words,
                        digits,
                        &x.blocks[b * tokens..][..tokens],
                        block,
                        grids,
                        self.0.ahead(&rows, b),
                        out,
                    );
                }
            });
        });
    }
}

/// Tokens as integers.
struct Activations {
    /// `[blocks, tokens, 3, block]`, each block arranged for words of nibbles.
    digits: Vec<i8>,
    /// `[blocks, tokens]`.
    blocks: Vec<Block>,
}

impl Activations {
    fn new(x: &[f32], k: usize, block: usize) -> Self {
        let tokens = x.len() / k;
        let mut digits = vec![0; DIGITS * x.len()];
        let mut blocks = vec![Block::default(); tokens * k / block];
        let by_block = digits.par_chunks_mut(tokens * DIGITS * block).zip(blocks.par_chunks_mut(tokens));
        by_block.enumerate().for_each(|(b, (digits, blocks))| {
            let x = x.chunks_exact(k).map(|x| &x[b * block..][..block]);
            for ((x, digits), of_block) in x.zip(digits.chunks_exact_mut(DIGITS * block)).zip(blocks) {
                *of_block = integers(x, digits.chunks_exact_mut(block));
            }
        });
        Self { digits, blocks }
    }
}

/// A block of activations as integers: their digits, arranged, to a plane each.
fn integers<'c>(x: &[f32], planes: impl Iterator<Item = &'c mut [i8]>) -> Block {
    let mut digits = [[0; MAX_BLOCK]; DIGITS];
    let block = fixed_point::split(x, digits.each_mut().map(|digits| &mut digits[..x.len()]));
    for (digits, plane) in digits.iter().zip(planes) {
        int4::arrange(&digits[..x.len()], plane);
    }
    block
}
