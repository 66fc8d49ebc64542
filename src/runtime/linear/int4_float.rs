//! W4A16: 4-bit weights in groups, float activations.

use std::ops::Range;

use super::{Linear, multiply_by_decoded_blocks, tokens_of};
use crate::pack::Int4Matrix;

/// The arithmetic of PyTorch's tinygemm on CPU: weights become f32 by one rounded operation (see
/// [`crate::pack::GroupGrid`]), never bf16, and products are summed in f32. The order of summation is that
/// of [`super::FloatLinear`].
#[derive(Clone, Copy, Debug)]
pub struct Int4FloatLinear<'a>(Int4Matrix<'a>);

impl<'a> Int4FloatLinear<'a> {
    /// Over a matrix with grids of any kind.
    pub fn new(matrix: Int4Matrix<'a>) -> Self {
        Self(matrix)
    }
}

impl Linear for Int4FloatLinear<'_> {
    fn in_features(&self) -> usize {
        self.0.shape()[1]
    }

    fn out_features(&self) -> usize {
        self.0.shape()[0]
    }

    fn forward_rows(&self, x: &[f32], rows: Range<usize>, y: &mut [f32]) {
        tokens_of(self, x, &rows, y);
        multiply_by_decoded_blocks(x, self.in_features(), rows, y, |rows, k, out| {
            self.0.decode(rows, k, out);
        });
    }
}
