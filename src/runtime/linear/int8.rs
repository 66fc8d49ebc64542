//! W8A8: int8 weights with a scale per row, int8 activations with a scale per token.

use std::borrow::Cow;
use std::ops::Range;

use super::{Linear, split_rows, tokens_of};
use crate::error::{InputError, Result};
use crate::runtime::kernels::int8;

/// A linear whose sums over K are exact integers; per token and row the result is
/// `sum * token scale * row scale` in f32. A token of zeros gives zeros.
#[derive(Clone, Debug)]
pub struct Int8Linear<'a> {
    codes: &'a [i8],
    scales: Cow<'a, [f32]>,
    in_features: usize,
}

impl<'a> Int8Linear<'a> {
    /// Borrows codes `[out, in]` and one scale per row.
    ///
    /// # Errors
    /// When there is not one row of codes per scale, or rows are too long for sums in i32.
    pub fn new(codes: &'a [i8], scales: impl Into<Cow<'a, [f32]>>, in_features: usize) -> Result<Self> {
        let scales = scales.into();
        if in_features == 0 || in_features > int8::MAX_K {
            let expected = format!("rows of 1 to {} int8 weights", int8::MAX_K);
            return Err(InputError::default().expected(expected).found(in_features).into());
        }
        if Some(codes.len()) != scales.len().checked_mul(in_features) {
            let expected = format!("{} rows of {in_features} int8 weights", scales.len());
            return Err(InputError::default()
                .expected(expected)
                .found(format!("{} codes", codes.len()))
                .into());
        }
        Ok(Self { codes, scales, in_features })
    }
}

impl Linear for Int8Linear<'_> {
    fn in_features(&self) -> usize {
        self.in_features
    }

    fn out_features(&self) -> usize {
        self.scales.len()
    }

    fn forward_rows(&self, x: &[f32], rows: Range<usize>, y: &mut [f32]) {
        let tokens = tokens_of(self, x, &rows, y);
        let k = self.in_features;
        let (codes, token_scales) = int8::quantize_tokens(x, k);
        split_rows(tokens, rows, y, |(): &mut (), rows, out| {
            let n = rows.len();
            let scales = &self.scales[rows.clone()];
            let weights = &self.codes[rows.start * k..rows.end * k];
            int8::multiply(&codes, weights, k, |r, c, sum| {
                #[expect(clippy::cast_precision_loss, reason = "rounded once, to nearest")]
                let sum = sum as f32;
                out[r * n + c] = sum * token_scales[r] * scales[c];
            });
        });
    }
}
