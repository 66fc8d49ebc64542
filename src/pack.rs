//! Bit layouts of 4-bit codes: where the code of row n, column k of a matrix `[out, in]` lies.
//!
//! Slices in, slices out. Knows no file, no tensor name and no configuration, and nothing of how codes
//! are chosen. Bytes may lie at any alignment: words are read as little-endian bytes.

mod blocks;
mod columns;
mod matrix;
mod rows;
pub mod zero_points;

use std::ops::Range;

pub use columns::pack_columns;
pub use matrix::{GridBuffer, GroupGrid, GroupGrids, Int4Matrix};

/// How the 4-bit codes of a matrix `[out, in]` are laid out. Every layout takes `out * in / 2` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeLayout {
    /// `[out, in/2]` bytes, the first of two neighbours along `in` in the low nibble. Read as
    /// little-endian int32 `[out, in/8]`, these are the words of compressed-tensors' `pack-quantized`.
    Rows,
    /// int32 `[in/8, out]`, little-endian: code of column 8r+i in bits 4i..4i+3 of word r. GPTQ.
    Columns,
    /// `[out/rows, in, rows/2]` bytes, `rows` being 32 or 64: byte d of a block's column is
    /// `code[d] | code[d + rows/2] << 4`. The full blocks of PyTorch's tinygemm, 64 rows with AVX-512
    /// and 32 with AVX2.
    Blocks {
        /// Output rows of a block.
        rows: usize,
    },
}

impl CodeLayout {
    /// Bytes of the codes of a matrix; `None` when the layout cannot hold the shape.
    ///
    /// * `Rows`: `in` is even.
    /// * `Columns`: `in` is a multiple of 8.
    /// * `Blocks`: `out` is a multiple of the block. PyTorch packs a last block of 16, 32 or 48 rows by
    ///   another rule, neighbours instead of halves; such a matrix would have no three-dimensional shape
    ///   whose every element follows one rule, so it is not written at all.
    ///
    /// Nor is there a layout for a matrix without elements.
    pub fn len_bytes(self, [out_features, in_features]: [usize; 2]) -> Option<usize> {
        let fits = match self {
            Self::Rows => in_features.is_multiple_of(2),
            Self::Columns => in_features.is_multiple_of(8),
            Self::Blocks { rows } => matches!(rows, 32 | 64) && out_features.is_multiple_of(rows),
        };
        let elements = out_features.checked_mul(in_features).filter(|n| fits && *n > 0)?;
        Some(elements / 2)
    }
}

/// Borrowed 4-bit codes of a matrix `[out, in]`.
#[derive(Clone, Copy, Debug)]
pub struct PackedCodes<'a> {
    bytes: &'a [u8],
    layout: CodeLayout,
    shape: [usize; 2],
}

impl<'a> PackedCodes<'a> {
    /// Borrows the bytes of the codes; `None` when the layout does not hold the shape, or the bytes are
    /// more or fewer than the shape needs.
    pub fn new(bytes: &'a [u8], layout: CodeLayout, shape: [usize; 2]) -> Option<Self> {
        (layout.len_bytes(shape) == Some(bytes.len())).then_some(Self { bytes, layout, shape })
    }

    /// `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// How the codes lie.
    pub fn layout(&self) -> CodeLayout {
        self.layout
    }

    /// The bytes, in that layout.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Writes the codes (0..=15) of any rows and columns to `out`, `[rows.len(), columns.len()]`; reads
    /// nothing else. Neighbouring rows are cheaper together than one by one.
    ///
    /// # Panics
    /// When a range reaches past the end or `out` has another length.
    pub fn decode(&self, rows: Range<usize>, columns: Range<usize>, out: &mut [u8]) {
        let [out_features, in_features] = self.shape;
        check_ranges(self.shape, &rows, &columns, out.len());
        if out.is_empty() {
            return;
        }
        match self.layout {
            CodeLayout::Rows => rows::decode(self.bytes, in_features, rows, columns, out),
            CodeLayout::Columns => columns::decode(self.bytes, out_features, rows, columns, out),
            CodeLayout::Blocks { rows: block } => {
                blocks::decode(self.bytes, block, in_features, rows, columns, out);
            }
        }
    }
}

/// Panics unless the ranges are within the shape and `len` is the number of elements they select.
fn check_ranges(shape: [usize; 2], rows: &Range<usize>, columns: &Range<usize>, len: usize) {
    assert!(
        rows.start <= rows.end
            && rows.end <= shape[0]
            && columns.start <= columns.end
            && columns.end <= shape[1]
            && len == rows.len() * columns.len(),
        "rows {rows:?}, columns {columns:?} of {shape:?} into {len}"
    );
}

/// Appends whole rows to the bytes of a matrix: `codes` is `[n, in]`, one code (0..=15) per byte. Blocks
/// of rows packed one after the other are the matrix. ([`CodeLayout::Columns`] has no such order; see
/// [`pack_columns`].)
///
/// # Panics
/// When the layout is `Columns`, or cannot hold `n` rows of `in_features` (for `Blocks`, n has to be a
/// multiple of the block), or `codes` does not hold whole rows.
pub fn pack_rows(layout: CodeLayout, codes: &[u8], in_features: usize, bytes: &mut Vec<u8>) {
    assert!(in_features > 0 && codes.len().is_multiple_of(in_features), "codes are not whole rows");
    let n = codes.len() / in_features;
    debug_assert!(codes.iter().all(|code| *code < 16), "codes have four bits");
    if n == 0 {
        return;
    }
    let shape = [n, in_features];
    let len = layout.len_bytes(shape);
    let len = len.unwrap_or_else(|| panic!("{layout:?} cannot hold {n} rows of {in_features}"));
    let start = bytes.len();
    bytes.resize(start + len, 0);
    match layout {
        CodeLayout::Rows => rows::pack(codes, &mut bytes[start..]),
        CodeLayout::Columns => panic!("words across rows cannot be appended row by row"),
        CodeLayout::Blocks { rows } => blocks::pack(codes, rows, in_features, &mut bytes[start..]),
    }
}

#[cfg(test)]
mod tests;
