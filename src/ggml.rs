//! The tensor types of ggml that a Spark GGUF is made of: their names, their sizes, and blocks of codes
//! decoded to f32.
//!
//! Source: `ggml-common.h` and `ggml-quants.c` of llama.cpp. What a block decodes to is pinned, bit for
//! bit, to the Python package `gguf` (`fixtures/goldens/ggml`).

mod blocks;

use std::ops::Range;

pub use blocks::BlockType;

use crate::error::{InputError, Result};
use crate::tensor::{Dtype, element_bytes};

/// The type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// Elements that stand for themselves: F32, F16 or BF16.
    Float(Dtype),
    /// Blocks of codes that share scales.
    Blocks(BlockType),
}

/// Every type that is read, for messages.
pub const SUPPORTED: &str = "F32, F16, BF16, Q8_0, Q4_K, Q5_K or Q6_K";

/// Names of types that ggml has or had, by their number.
const NAMES: &[(u32, &str)] = &[
    (2, "Q4_0"),
    (3, "Q4_1"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

impl TensorType {
    /// The type with a number of `enum ggml_type`, if it is one that is read here.
    pub fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::Float(Dtype::F32),
            1 => Self::Float(Dtype::F16),
            30 => Self::Float(Dtype::BF16),
            8 => Self::Blocks(BlockType::Q8_0),
            12 => Self::Blocks(BlockType::Q4K),
            13 => Self::Blocks(BlockType::Q5K),
            14 => Self::Blocks(BlockType::Q6K),
            _ => return None,
        })
    }

    /// The name that ggml gives it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float(Dtype::F16) => "F16",
            Self::Float(Dtype::BF16) => "BF16",
            Self::Float(_) => "F32",
            Self::Blocks(kind) => kind.name(),
        }
    }

    /// Elements of a block; 1 of floats.
    pub fn block_len(self) -> usize {
        match self {
            Self::Float(_) => 1,
            Self::Blocks(kind) => kind.elements(),
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::Float(dtype) => element_bytes(dtype),
            Self::Blocks(kind) => kind.bytes(),
        }
    }

    /// Bytes of `elements` elements: `None` when they are no whole blocks, or more bytes than can be
    /// counted.
    pub fn bytes_of(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_len()) {
            return None;
        }
        (elements / self.block_len()).checked_mul(self.block_bytes())
    }
}

/// What to call a type of any number in a message.
pub fn type_name(id: u32) -> String {
    let known = TensorType::from_id(id).map(TensorType::name);
    let known = known.or_else(|| NAMES.iter().find(|(i, _)| *i == id).map(|(_, name)| *name));
    known.map_or_else(|| format!("ggml type {id}"), |name| format!("{name} (ggml type {id})"))
}

/// A matrix of blocks that stays where it lies; a piece of a row at a time is decoded.
#[derive(Clone, Copy, Debug)]
pub struct BlockMatrix<'a> {
    kind: BlockType,
    /// `[out, in]`.
    shape: [usize; 2],
    bytes: &'a [u8],
}

impl<'a> BlockMatrix<'a> {
    /// Borrows the blocks of a matrix `[out, in]`, row after row.
    ///
    /// # Errors
    /// When a row is no whole number of blocks, or the bytes are not those of all rows.
    pub fn new(kind: BlockType, shape: [usize; 2], bytes: &'a [u8]) -> Result<Self> {
        let row = TensorType::Blocks(kind).bytes_of(shape[1]).filter(|_| shape[1] > 0);
        if row.and_then(|row| row.checked_mul(shape[0])) != Some(bytes.len()) {
            let found = format!("shape {shape:?} over {} bytes", bytes.len());
            let expected = format!("whole {} blocks for every row", kind.name());
            return Err(InputError::default().expected(expected).found(found).into());
        }
        Ok(Self { kind, shape, bytes })
    }

    /// `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Decodes some columns of a row.
    ///
    /// # Panics
    /// When the columns are no whole blocks, reach past the row, or are not as many as `out` has room for.
    pub fn decode(&self, row: usize, columns: Range<usize>, out: &mut [f32]) {
        let (len, bytes) = (self.kind.elements(), self.kind.bytes());
        assert!(
            columns.start.is_multiple_of(len)
                && columns.end.is_multiple_of(len)
                && columns.end <= self.shape[1],
            "columns {columns:?} of rows of {} in blocks of {len}",
            self.shape[1],
        );
        let row_bytes = self.shape[1] / len * bytes;
        let row = &self.bytes[row * row_bytes..][..row_bytes];
        self.kind.decode(&row[columns.start / len * bytes..columns.end / len * bytes], out);
    }

    /// Decodes a row.
    ///
    /// # Panics
    /// When there is no such row, or `out` has another length.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        self.decode(row, 0..self.shape[1], out);
    }
}

#[cfg(test)]
mod tests;
