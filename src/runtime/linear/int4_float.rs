//! W4A16: 4-bit weights in groups, float activations.

use std::ops::Range;

use super::{Linear, WIDEN_FROM, multiply_by_decoded_blocks, split_rows_by, tokens_of};
use crate::pack::{CodeLayout, GroupGrids, Int4Matrix};
use crate::runtime::kernels::int4_float::{self, InterleavedRows};

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
        let tokens = tokens_of(self, x, &rows, y);
        if tokens < WIDEN_FROM
            && let Some(height) = self.interleaved(&rows)
        {
            return split_rows_by(height, tokens, rows, y, |(): &mut (), rows, out| {
                let block = self.block(rows);
                for (x, y) in x.chunks_exact(self.in_features()).zip(out.chunks_exact_mut(height)) {
                    int4_float::multiply(block, x, y);
                }
            });
        }
        multiply_by_decoded_blocks(x, self.in_features(), rows, y, |rows, k, out| {
            self.0.decode(rows, k, out);
        });
    }
}

impl<'a> Int4FloatLinear<'a> {
    /// The height of the blocks whose rows are interleaved, where `rows` are whole ones of them and there
    /// is a kernel that takes them as they are.
    fn interleaved(&self, rows: &Range<usize>) -> Option<usize> {
        let CodeLayout::Blocks { rows: height } = self.0.codes().layout() else { return None };
        let whole = rows.start.is_multiple_of(height) && rows.end.is_multiple_of(height);
        let affine = matches!(self.0.grids(), GroupGrids::ScalesAndZeros(_));
        (whole && affine && int4_float::has_fast_kernel(self.0.group_size())).then_some(height)
    }

    /// One block.
    fn block(&self, rows: Range<usize>) -> InterleavedRows<'a> {
        let GroupGrids::ScalesAndZeros(grids) = self.0.grids() else { unreachable!("asked before") };
        let [stride, k] = self.0.shape();
        InterleavedRows {
            codes: &self.0.codes().bytes()[rows.start * k / 2..rows.end * k / 2],
            rows: rows.len(),
            grids: &grids[rows.start * 4..],
            stride,
            group_size: self.0.group_size(),
        }
    }
}
