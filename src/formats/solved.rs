//! Codes that were chosen beforehand, for calibrated inputs: what a codec makes of rows, kept until the
//! module's turn in the file comes.
//!
//! A row of 4 bits is its codes, two a byte (the first in the low nibble), and for each group the bits
//! of the bf16 scale and of the zero; a row of 8 bits its codes and the f32 scale.

use crate::quant::gptq::Solver;

/// How the codes of a module are chosen.
#[derive(Clone, Copy, Debug)]
pub enum Choice<'a> {
    /// By the weights alone.
    Weights,
    /// The same, the squared error of each column `[in]` counted by so much, relatively; a codec whose grid
    /// is that of a whole row takes no notice.
    Weighted(&'a [f32]),
    /// They were: [`SolvedRows::bytes`] of the module's rows.
    Solved(&'a [u8]),
}

/// What is known of the inputs of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Moves the error of a column to others.
    pub solver: &'a Solver,
    /// `[in]`: how much the squared error of each column counts in the choice of a grid, relatively.
    pub importance: &'a [f32],
}

/// Rows of a module with grids and codes chosen.
#[derive(Clone, Debug)]
pub struct SolvedRows {
    /// [`super::Codec::solved_row_bytes`] a row.
    pub bytes: Vec<u8>,
    /// `[rows, in]`: what they decode to.
    pub decoded: Vec<f32>,
    /// Squared error of the outputs, summed over the calibrated inputs (damping included).
    pub output_noise: f64,
}
