//! Weights in blocks of ggml, float activations.

use std::ops::Range;

use super::{Linear, multiply_by_decoded_rows, tokens_of};
use crate::ggml::BlockMatrix;
use crate::runtime::kernels::dot;

/// The longest block; every piece of a row that is decoded starts at a block's start.
const LONGEST_BLOCK: usize = 256;
const _: () = assert!(dot::K_BLOCK.is_multiple_of(LONGEST_BLOCK));

/// Blocks become f32, a piece of a row at a time, and are multiplied in the order of summation of
/// [`super::FloatLinear`]: a contestant differs from the reference in its weights alone. llama.cpp itself
/// rounds the activations to int8 before it multiplies such weights.
#[derive(Clone, Copy, Debug)]
pub struct BlockLinear<'a>(BlockMatrix<'a>);

impl<'a> BlockLinear<'a> {
    /// Over a matrix of blocks of any type.
    pub fn new(matrix: BlockMatrix<'a>) -> Self {
        Self(matrix)
    }
}

impl Linear for BlockLinear<'_> {
    fn in_features(&self) -> usize {
        self.0.shape()[1]
    }

    fn out_features(&self) -> usize {
        self.0.shape()[0]
    }

    fn forward_rows(&self, x: &[f32], rows: Range<usize>, y: &mut [f32]) {
        tokens_of(self, x, &rows, y);
        multiply_by_decoded_rows(x, self.in_features(), rows, y, |row, k, out| self.0.decode(row, k, out));
    }
}
