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
    pub fn row_error(&self, row: usize, source: &[f32], amax: f32) -> Option<ErrorSums> {
        match self {
            Self::Int8(matrix) => {
                let sums = int8::row_error(source, matrix.row_codes(row), matrix.scales[row]);
                (sums.noise <= int8::rounding_bound(source.len(), amax)).then_some(sums)
            }
            Self::Int4(matrix) => {
                let mut codes = vec![0; source.len()];
                matrix.codes().decode(row..row + 1, 0..source.len(), &mut codes);
                let groups = source.chunks(matrix.group_size()).zip(codes.chunks(matrix.group_size()));
                let symmetric = matches!(
                    matrix.grids(),
                    GroupGrids::GroupMajor { .. } | GroupGrids::RowMajor { zero_points: None, .. }
                );
                let mut sums = ErrorSums::default();
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
                    if error.noise.is_nan() || error.noise > bound {
                        return None;
                    }
                    sums += error;
                }
                Some(sums)
            }
        }
    }
}
