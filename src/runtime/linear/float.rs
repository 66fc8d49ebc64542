//! Weights as they lie in a checkpoint.

use std::ops::Range;

use super::{Linear, WIDEN_FROM, multiply_by_decoded_rows, split_rows, tokens_of};
use crate::error::{InputError, Result};
use crate::runtime::Rounding;
use crate::runtime::kernels::dot;
use crate::runtime::kernels::rows::{Bf16Row, F16Row, F32Row, Row, Rows};
use crate::tensor::{Dtype, TensorView, dtype_name, element_bytes, widen};

/// A linear over BF16, F16 or F32 bytes that stay where they are; never more than a block of rows
/// is widened.
#[derive(Clone, Copy, Debug)]
pub struct FloatLinear<'a> {
    view: TensorView<'a>,
    rounding: Rounding,
}

impl<'a> FloatLinear<'a> {
    /// Borrows a matrix. With [`Rounding::Bf16`], weights of a wider type are rounded as they are
    /// read, as loading the checkpoint in bf16 would do.
    ///
    /// # Errors
    /// When the tensor is not a matrix of floats, or its bytes do not fit its shape.
    pub fn new(view: TensorView<'a>, rounding: Rounding) -> Result<Self> {
        let error = InputError::default().subject(view.name);
        if !view.is_float() {
            return Err(error.expected("BF16, F16 or F32").found(dtype_name(view.dtype)).into());
        }
        let [out, k] = *view.shape else {
            return Err(error.expected("a matrix").found(format!("shape {:?}", view.shape)).into());
        };
        let expected = out.checked_mul(k).and_then(|n| n.checked_mul(element_bytes(view.dtype)));
        if k == 0 || expected != Some(view.bytes.len()) {
            let found = format!("shape {:?} over {} bytes", view.shape, view.bytes.len());
            return Err(error.expected("bytes for every element").found(found).into());
        }
        Ok(Self { view, rounding: if view.dtype == Dtype::BF16 { Rounding::None } else { rounding } })
    }

    fn narrow<R: Row>(
        &self,
        x: &[f32],
        rows: Range<usize>,
        y: &mut [f32],
        row: impl Fn(&'a [u8]) -> R + Sync,
    ) {
        let x = Rows::dense(x, self.in_features());
        split_rows(x.count(), rows, y, |(): &mut (), rows, out| {
            let n = rows.len();
            let w = self.view.row_range(rows).chunks_exact(self.view.row_bytes()).map(&row);
            dot::multiply(x, &w.collect::<Vec<_>>(), out, n);
        });
    }
}

impl Linear for FloatLinear<'_> {
    fn in_features(&self) -> usize {
        self.view.row_len()
    }

    fn out_features(&self) -> usize {
        self.view.rows()
    }

    fn forward_rows(&self, x: &[f32], rows: Range<usize>, y: &mut [f32]) {
        let tokens = tokens_of(self, x, &rows, y);
        if tokens < WIDEN_FROM && self.rounding == Rounding::None {
            return match self.view.dtype {
                Dtype::BF16 => self.narrow(x, rows, y, Bf16Row),
                Dtype::F16 => self.narrow(x, rows, y, F16Row),
                _ => self.narrow(x, rows, y, F32Row),
            };
        }
        let width = element_bytes(self.view.dtype);
        multiply_by_decoded_rows(x, self.in_features(), rows, y, |row, k, out| {
            let bytes = self.view.row_range(row..row + 1);
            widen(self.view.dtype, &bytes[k.start * width..k.end * width], out);
            self.rounding.apply(out);
        });
    }
}
