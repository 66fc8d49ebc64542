//! A quantized module as an artifact stores it.

use super::int8::Int8Matrix;
use crate::pack::{GroupGrid, GroupGrids, Int4Matrix};
use crate::quant::int4::{affine, symmetric, zero_point};
use crate::quant::{ErrorSums, int8};

/// A quantized module as an artifact stores it: borrowed bytes, nothing expanded.
#[derive(Clone, Debug)]
pub enum Packed<'a> {
    /// Symmetric int8 with a scale per row.
    Int8(Int8Matrix<'a>),
    /// 4-bit codes with a grid per group of a row.
    Int4(Int4Matrix<'a>),
}

/// How much of an error an encoder can have left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tolerance {
    /// Of a row or group no more than rounding to nearest.
    Rounding,
    /// Of a row eight times as much: errors were moved to where inputs are small.
    Solved,
}

/// What the sum of a row's bounds (half a step for every weight) is multiplied by. Rounding leaves a third of
/// a bound, GPTQ some dB more than that, and a scale that is off by a factor of two 20 bounds.
const SOLVED_EXCESS: f64 = 8.0;

impl Packed<'_> {
    /// Decodes a row of weights, `[in]`.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::Int8(matrix) => int8::decode_row(matrix.row_codes(row), matrix.scales[row], out),
            Self::Int4(matrix) => matrix.decode_row(row, out),
        }
    }

    /// Squared error of a row against its source, whose largest absolute value is `amax`; `None` when
    /// it is more than any encoder of this format can have left.
    pub fn row_error(
        &self,
        row: usize,
        source: &[f32],
        amax: f32,
        tolerance: Tolerance,
    ) -> Option<ErrorSums> {
        let excess = match tolerance {
            Tolerance::Rounding => 1.0,
            Tolerance::Solved => SOLVED_EXCESS,
        };
        match self {
            Self::Int8(matrix) => {
                let sums = int8::row_error(source, matrix.row_codes(row), matrix.scales[row]);
                (sums.noise <= excess * int8::rounding_bound(source.len(), amax)).then_some(sums)
            }
            Self::Int4(matrix) => {
                let mut codes = vec![0; source.len()];
                matrix.codes().decode(row..row + 1, 0..source.len(), &mut codes);
                let groups = source.chunks(matrix.group_size()).zip(codes.chunks(matrix.group_size()));
                let symmetric = matches!(
                    matrix.grids(),
                    GroupGrids::GroupMajor { .. } | GroupGrids::RowMajor { zero_points: None, .. }
                );
                let (mut sums, mut row_bound) = (ErrorSums::default(), 0.0);
                for (group, (weights, codes)) in groups.enumerate() {
                    let (error, bound) = match matrix.grid(row, group) {
                        GroupGrid::ZeroPoint { scale, .. } if symmetric => (
                            symmetric::group_error(weights, codes, scale),
                            symmetric::rounding_bound(weights),
                        ),
                        GroupGrid::ZeroPoint { scale, zero_point } => {
                            let error = zero_point::group_error(weights, codes, scale, zero_point);
                            (error, zero_point::rounding_bound(weights))
                        }
                        GroupGrid::Affine { scale, zero } => (
                            affine::group_error(weights, codes, scale, zero),
                            affine::rounding_bound(weights),
                        ),
                    };
                    let beyond = tolerance == Tolerance::Rounding && error.noise > bound;
                    if error.noise.is_nan() || beyond {
                        return None;
                    }
                    sums += error;
                    row_bound += bound;
                }
                (sums.noise <= excess * row_bound).then_some(sums)
            }
        }
    }
}
