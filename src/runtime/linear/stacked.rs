//! Linears on top of each other.

use std::ops::Range;

use super::{Linear, tokens_of};
use crate::error::{InputError, Result};

/// Several linears of the same input, one after the other along the output: a fused projection whose
/// parts are stored apart.
pub struct StackedLinear<'a> {
    parts: Vec<Box<dyn Linear + 'a>>,
    in_features: usize,
    out_features: usize,
}

impl<'a> StackedLinear<'a> {
    /// Stacks the parts, the first rows first.
    ///
    /// # Errors
    /// When there is no part, or they differ in the length of their rows.
    pub fn new(parts: Vec<Box<dyn Linear + 'a>>) -> Result<Self> {
        let Some(in_features) = parts.first().map(|part| part.in_features()) else {
            return Err(InputError::default().expected("at least one linear").found(0).into());
        };
        if let Some(other) = parts.iter().map(|part| part.in_features()).find(|k| *k != in_features) {
            let expected = format!("rows of {in_features} in every part");
            return Err(InputError::default().expected(expected).found(other).into());
        }
        let out_features = parts.iter().map(|part| part.out_features()).sum();
        Ok(Self { parts, in_features, out_features })
    }
}

impl Linear for StackedLinear<'_> {
    fn in_features(&self) -> usize {
        self.in_features
    }

    fn out_features(&self) -> usize {
        self.out_features
    }

    fn forward_rows(&self, x: &[f32], rows: Range<usize>, y: &mut [f32]) {
        let tokens = tokens_of(self, x, &rows, y);
        let stride = rows.len();
        let mut first = 0;
        let mut block = Vec::new();
        for part in &self.parts {
            let all = first..first + part.out_features();
            let wanted = rows.start.max(all.start)..rows.end.min(all.end);
            first = all.end;
            if wanted.start >= wanted.end {
                continue;
            }
            let at = wanted.start - rows.start;
            let within = wanted.start - all.start..wanted.end - all.start;
            let n = within.len();
            if tokens == 1 {
                part.forward_rows(x, within, &mut y[at..at + n]);
                continue;
            }
            block.resize(tokens * n, 0.0);
            part.forward_rows(x, within, &mut block);
            for (y, block) in y.chunks_exact_mut(stride).zip(block.chunks_exact(n)) {
                y[at..at + n].copy_from_slice(block);
            }
        }
    }
}
