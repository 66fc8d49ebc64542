//! Token ids to rows of the residual stream.

use crate::error::{InputError, Result};
use crate::ggml::BlockMatrix;
use crate::pack::Int4Matrix;
use crate::tensor::{TensorView, dtype_name, element_bytes};

/// A table of token embeddings, whatever it is made of.
pub trait Embedding: Send + Sync {
    /// Number of rows.
    fn vocab_size(&self) -> usize;

    /// Length of a row.
    fn hidden_size(&self) -> usize;

    /// Decodes the row of a token.
    ///
    /// # Panics
    /// When the token is not below `vocab_size` or `out` has another length than `hidden_size`.
    fn row(&self, token: u32, out: &mut [f32]);
}

/// An embedding over BF16, F16 or F32 bytes that stay where they are.
#[derive(Clone, Copy, Debug)]
pub struct FloatEmbedding<'a>(TensorView<'a>);

impl<'a> FloatEmbedding<'a> {
    /// Borrows a matrix `[vocab, hidden]`.
    ///
    /// # Errors
    /// When the tensor is not a matrix of floats, or its bytes do not fit its shape.
    pub fn new(view: TensorView<'a>) -> Result<Self> {
        let error = InputError::default().subject(view.name);
        if !view.is_float() {
            return Err(error.expected("BF16, F16 or F32").found(dtype_name(view.dtype)).into());
        }
        let elements = view.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        let bytes = elements.and_then(|n| n.checked_mul(element_bytes(view.dtype)));
        if view.shape.len() != 2 || bytes != Some(view.bytes.len()) {
            let found = format!("shape {:?} over {} bytes", view.shape, view.bytes.len());
            return Err(error.expected("a matrix with bytes for every element").found(found).into());
        }
        Ok(Self(view))
    }
}

impl Embedding for FloatEmbedding<'_> {
    fn vocab_size(&self) -> usize {
        self.0.rows()
    }

    fn hidden_size(&self) -> usize {
        self.0.row_len()
    }

    fn row(&self, token: u32, out: &mut [f32]) {
        self.0.decode_row(token as usize, out);
    }
}

/// An embedding of 4-bit codes, of which a row at a time is decoded.
#[derive(Clone, Copy, Debug)]
pub struct PackedEmbedding<'a>(Int4Matrix<'a>);

impl<'a> PackedEmbedding<'a> {
    /// Over a matrix `[vocab, hidden]`.
    pub fn new(matrix: Int4Matrix<'a>) -> Self {
        Self(matrix)
    }
}

impl Embedding for PackedEmbedding<'_> {
    fn vocab_size(&self) -> usize {
        self.0.shape()[0]
    }

    fn hidden_size(&self) -> usize {
        self.0.shape()[1]
    }

    fn row(&self, token: u32, out: &mut [f32]) {
        self.0.decode_row(token as usize, out);
    }
}

/// An embedding of ggml's blocks, of which a row at a time is decoded.
#[derive(Clone, Copy, Debug)]
pub struct BlockEmbedding<'a>(BlockMatrix<'a>);

impl<'a> BlockEmbedding<'a> {
    /// Over a matrix `[vocab, hidden]`.
    pub fn new(matrix: BlockMatrix<'a>) -> Self {
        Self(matrix)
    }
}

impl Embedding for BlockEmbedding<'_> {
    fn vocab_size(&self) -> usize {
        self.0.shape()[0]
    }

    fn hidden_size(&self) -> usize {
        self.0.shape()[1]
    }

    fn row(&self, token: u32, out: &mut [f32]) {
        self.0.decode_row(token as usize, out);
    }
}
