//! W8A16: int8 weights with a scale per row, float activations.

use std::borrow::Cow;
use std::ops::Range;

use super::{Linear, WIDEN_FROM, split_rows, tokens_of};
use crate::error::{InputError, Result};
use crate::runtime::kernels::dot;
use crate::runtime::kernels::rows::{I8Row, Row, Rows};

/// The arithmetic of PyTorch's `_weight_int8pack_mm`: `x * code` summed in f32, in the order of
/// [`super::FloatLinear`], and the sum multiplied by the row's scale.
#[derive(Clone, Debug)]
pub struct Int8FloatLinear<'a> {
    /// `[out, in]`, the bytes of int8.
    codes: &'a [u8],
    scales: Cow<'a, [f32]>,
    in_features: usize,
}

impl<'a> Int8FloatLinear<'a> {
    /// Borrows codes `[out, in]` and one scale per row.
    ///
    /// # Errors
    /// When there is not one row of codes per scale.
    pub fn new(codes: &'a [i8], scales: impl Into<Cow<'a, [f32]>>, in_features: usize) -> Result<Self> {
        let scales = scales.into();
        if in_features == 0 || Some(codes.len()) != scales.len().checked_mul(in_features) {
            let expected = format!("{} rows of {in_features} int8 weights", scales.len());
            let found = format!("{} codes", codes.len());
            return Err(InputError::default().expected(expected).found(found).into());
        }
        Ok(Self { codes: bytemuck::cast_slice(codes), scales, in_features })
    }

    fn row(&self, row: usize) -> I8Row<'_> {
        I8Row(&self.codes[row * self.in_features..][..self.in_features])
    }
}

impl Linear for Int8FloatLinear<'_> {
    fn in_features(&self) -> usize {
        self.in_features
    }

    fn out_features(&self) -> usize {
        self.scales.len()
    }

    fn forward_rows(&self, x: &[f32], rows: Range<usize>, y: &mut [f32]) {
        let tokens = tokens_of(self, x, &rows, y);
        let x = Rows::dense(x, self.in_features);
        split_rows(tokens, rows, y, |panel: &mut Vec<f32>, rows, out| {
            let n = rows.len();
            if tokens < WIDEN_FROM {
                let rows: Vec<_> = rows.clone().map(|row| self.row(row)).collect();
                dot::multiply(x, &rows, out, n);
            } else {
                let widen = |k: Range<usize>, out: &mut [f32]| {
                    for (row, out) in rows.clone().zip(out.chunks_exact_mut(k.len())) {
                        let codes = self.row(row).slice(k.clone()).0;
                        for (x, code) in out.iter_mut().zip(codes) {
                            *x = f32::from(i8::from_le_bytes([*code]));
                        }
                    }
                };
                dot::multiply_decoded(x, n, widen, panel, out, n);
            }
            for out in out.chunks_exact_mut(n) {
                for (y, scale) in out.iter_mut().zip(&self.scales[rows.clone()]) {
                    *y *= scale;
                }
            }
        });
    }
}
