//! A 4-bit matrix with its grids, decoded a piece at a time.

use std::ops::Range;

use super::{PackedCodes, check_ranges, zero_points};
use crate::simd::multiversion;

/// The zero point of symmetric grids.
const MIDDLE: u8 = 8;
/// Codes that are unpacked before they become weights; fits a first-level cache beside the weights.
const PIECE: usize = 4096;
/// Rows of a piece: what lies side by side in the layouts that interleave rows.
const PIECE_ROWS: usize = 32;

/// What the codes of one group stand for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GroupGrid {
    /// `(code - zero_point) * scale`.
    ZeroPoint {
        /// The step, of either sign.
        scale: f32,
        /// The code of 0.0.
        zero_point: u8,
    },
    /// `(code - 8).mul_add(scale, zero)`, rounded once.
    Affine {
        /// The step, of either sign.
        scale: f32,
        /// The value of code 8.
        zero: f32,
    },
}

impl GroupGrid {
    /// Decodes codes of the group.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn decode(self, codes: &[u8], out: &mut [f32]) {
        assert_eq!(codes.len(), out.len(), "codes and weights differ");
        match self {
            Self::ZeroPoint { scale, zero_point } => scale_codes(codes, zero_point, scale, out),
            Self::Affine { scale, zero } => affine_codes(codes, scale, zero, out),
        }
    }
}

multiversion! {
    fn scale_codes(codes: &[u8], zero_point: u8, scale: f32, out: &mut [f32]) {
        let zero_point = i16::from(zero_point);
        for (x, code) in out.iter_mut().zip(codes) {
            *x = f32::from(i16::from(*code) - zero_point) * scale;
        }
    }
}

multiversion! {
    fn affine_codes(codes: &[u8], scale: f32, zero: f32, out: &mut [f32]) {
        for (x, code) in out.iter_mut().zip(codes) {
            *x = (f32::from(*code) - 8.0).mul_add(scale, zero);
        }
    }
}

/// Where the grids of a matrix `[out, in]` in groups of g along `in` lie: borrowed bytes, bf16
/// little-endian but for the zero points.
#[derive(Clone, Copy, Debug)]
pub enum GroupGrids<'a> {
    /// GPTQ with a symmetric grid; the zero point is 8.
    GroupMajor {
        /// `[in/g, out]`.
        scales: &'a [u8],
    },
    /// compressed-tensors `pack-quantized`.
    RowMajor {
        /// `[out, in/g]`.
        scales: &'a [u8],
        /// int32 `[out/8, in/g]` (see [`zero_points`]); without, they are 8.
        zero_points: Option<&'a [u8]>,
    },
    /// tinygemm: `[in/g, out, 2]`, scale then zero.
    ScalesAndZeros(&'a [u8]),
    /// The row-major form of the same grid.
    RowMajorAffine {
        /// `[out, in/g]`.
        scales: &'a [u8],
        /// `[out, in/g]`.
        zeros: &'a [u8],
    },
}

impl GroupGrids<'_> {
    /// Whether weights are an integer times a scale, so that integer products can be summed exactly.
    pub fn has_zero_points(&self) -> bool {
        matches!(self, Self::GroupMajor { .. } | Self::RowMajor { .. })
    }

    /// Whether every length is that of `out_features` rows of `groups` groups.
    fn fit(&self, out_features: usize, groups: usize) -> bool {
        // Neither product can overflow where the bytes exist, so a wrong length is all that is left.
        let count = out_features.checked_mul(groups);
        let is = |bytes: &[u8], each: usize| count.and_then(|n| n.checked_mul(each)) == Some(bytes.len());
        match self {
            Self::GroupMajor { scales } => is(scales, 2),
            Self::RowMajor { scales, zero_points } => {
                let packed = |z: &[u8]| out_features.is_multiple_of(8) && is_half(z, count);
                is(scales, 2) && zero_points.is_none_or(packed)
            }
            Self::ScalesAndZeros(bytes) => is(bytes, 4),
            Self::RowMajorAffine { scales, zeros } => is(scales, 2) && is(zeros, 2),
        }
    }
}

/// Whether there is a nibble for each of `count`, an even number.
fn is_half(bytes: &[u8], count: Option<usize>) -> bool {
    count.map(|n| n / 2) == Some(bytes.len())
}

/// Grids that were read, one after the other: a code stands for `(code - zero_points[i]) * scales[i] +
/// zeros[i]`.
#[derive(Clone, Debug, Default)]
pub struct GridBuffer {
    scales: Vec<f32>,
    zero_points: Vec<i32>,
    zeros: Vec<f32>,
    has_zero_points: bool,
    has_zeros: bool,
}

impl GridBuffer {
    /// The steps, of either sign.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// 8 where the grid is symmetric or affine.
    pub fn zero_points(&self) -> &[i32] {
        &self.zero_points
    }

    /// Whether any zero point may be another than 8.
    pub fn has_zero_points(&self) -> bool {
        self.has_zero_points
    }

    /// 0.0 where the grid has a zero point.
    pub fn zeros(&self) -> &[f32] {
        &self.zeros
    }

    /// Makes every grid `times` ones.
    pub fn repeat(&mut self, times: usize) {
        if times == 1 {
            return;
        }
        let n = self.scales.len() * times;
        self.scales.resize(n, 0.0);
        self.zero_points.resize(n, 0);
        self.zeros.resize(n, 0.0);
        for i in (0..n).rev() {
            self.scales[i] = self.scales[i / times];
            self.zero_points[i] = self.zero_points[i / times];
            self.zeros[i] = self.zeros[i / times];
        }
    }

    /// Makes room for `n` grids of a kind: zero points of 8 and zeros of 0.0 unless others are to be read.
    fn prepare(&mut self, n: usize, grids: GroupGrids<'_>) {
        let has_zero_points = matches!(grids, GroupGrids::RowMajor { zero_points: Some(_), .. });
        let has_zeros = !grids.has_zero_points();
        if (self.scales.len(), self.has_zero_points, self.has_zeros) == (n, has_zero_points, has_zeros) {
            return;
        }
        (self.has_zero_points, self.has_zeros) = (has_zero_points, has_zeros);
        self.scales.resize(n, 0.0);
        self.zero_points.clear();
        self.zero_points.resize(n, MIDDLE.into());
        self.zeros.clear();
        self.zeros.resize(n, 0.0);
    }
}

/// A 4-bit matrix `[out, in]` as stored: nothing is expanded.
#[derive(Clone, Copy, Debug)]
pub struct Int4Matrix<'a> {
    codes: PackedCodes<'a>,
    group_size: usize,
    grids: GroupGrids<'a>,
}

impl<'a> Int4Matrix<'a> {
    /// Puts codes and grids together. `None` when the groups do not divide the rows or the bytes of the
    /// grids are more or fewer than one grid per row and group needs.
    pub fn new(codes: PackedCodes<'a>, group_size: usize, grids: GroupGrids<'a>) -> Option<Self> {
        let [out_features, in_features] = codes.shape();
        let whole = group_size > 0 && in_features.is_multiple_of(group_size);
        (whole && grids.fit(out_features, in_features / group_size)).then_some(Self {
            codes,
            group_size,
            grids,
        })
    }

    /// `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        self.codes.shape()
    }

    /// The codes.
    pub fn codes(&self) -> PackedCodes<'a> {
        self.codes
    }

    /// Weights of a row that share a grid.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// Groups of a row.
    pub fn groups(&self) -> usize {
        self.shape()[1] / self.group_size
    }

    /// Where the grids lie.
    pub fn grids(&self) -> GroupGrids<'a> {
        self.grids
    }

    /// The grid of one group.
    ///
    /// # Panics
    /// When there is no such row or group.
    #[inline]
    pub fn grid(&self, row: usize, group: usize) -> GroupGrid {
        let (out_features, groups) = (self.shape()[0], self.groups());
        assert!(row < out_features && group < groups, "row {row}, group {group} of {out_features}, {groups}");
        let (by_row, by_group) = (row * groups + group, group * out_features + row);
        match self.grids {
            GroupGrids::GroupMajor { scales } => {
                GroupGrid::ZeroPoint { scale: bf16_at(scales, by_group), zero_point: MIDDLE }
            }
            GroupGrids::RowMajor { scales, zero_points } => {
                let zero_point = |bytes| zero_points::read_row_major(bytes, groups, row, group);
                GroupGrid::ZeroPoint {
                    scale: bf16_at(scales, by_row),
                    zero_point: zero_points.map_or(MIDDLE, zero_point),
                }
            }
            GroupGrids::ScalesAndZeros(bytes) => GroupGrid::Affine {
                scale: bf16_at(bytes, 2 * by_group),
                zero: bf16_at(bytes, 2 * by_group + 1),
            },
            GroupGrids::RowMajorAffine { scales, zeros } => {
                GroupGrid::Affine { scale: bf16_at(scales, by_row), zero: bf16_at(zeros, by_row) }
            }
        }
    }

    /// The grids of one group of neighbouring rows.
    ///
    /// # Panics
    /// When there is no such row or group.
    pub fn grids_of_rows(&self, rows: Range<usize>, group: usize, out: &mut GridBuffer) {
        let (out_features, groups) = (self.shape()[0], self.groups());
        check_ranges([out_features, groups], &rows, &(group..group + 1), rows.len());
        out.prepare(rows.len(), self.grids);
        let first = group * out_features + rows.start;
        match self.grids {
            GroupGrids::GroupMajor { scales } => widen_bf16(&scales[2 * first..], &mut out.scales),
            GroupGrids::RowMajor { scales, zero_points } => {
                for (row, scale) in rows.clone().zip(&mut out.scales) {
                    *scale = bf16_at(scales, row * groups + group);
                }
                if let Some(bytes) = zero_points {
                    for (row, zero_point) in rows.zip(&mut out.zero_points) {
                        *zero_point = zero_points::read_row_major(bytes, groups, row, group).into();
                    }
                }
            }
            GroupGrids::ScalesAndZeros(bytes) => {
                // Those of the following rows are asked for by hand: every group is a page of its own.
                #[cfg(target_arch = "x86_64")]
                crate::simd::prefetch(bytes.as_ptr().wrapping_add(4 * (first + rows.len())), 4 * rows.len());
                widen_bf16_pairs(&bytes[4 * first..], &mut out.scales, &mut out.zeros);
            }
            GroupGrids::RowMajorAffine { scales, zeros } => {
                for (i, row) in rows.enumerate() {
                    out.scales[i] = bf16_at(scales, row * groups + group);
                    out.zeros[i] = bf16_at(zeros, row * groups + group);
                }
            }
        }
    }

    /// The grids of all groups of one row.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn grids_of_row(&self, row: usize, out: &mut GridBuffer) {
        let (out_features, groups) = (self.shape()[0], self.groups());
        check_ranges([out_features, groups], &(row..row + 1), &(0..groups), groups);
        out.prepare(groups, self.grids);
        match self.grids {
            GroupGrids::GroupMajor { scales } => {
                for (group, scale) in out.scales.iter_mut().enumerate() {
                    *scale = bf16_at(scales, group * out_features + row);
                }
            }
            GroupGrids::RowMajor { scales, zero_points } => {
                widen_bf16(&scales[2 * row * groups..], &mut out.scales);
                if let Some(bytes) = zero_points {
                    for (group, zero_point) in out.zero_points.iter_mut().enumerate() {
                        *zero_point = zero_points::read_row_major(bytes, groups, row, group).into();
                    }
                }
            }
            GroupGrids::ScalesAndZeros(bytes) => {
                for group in 0..groups {
                    let at = 2 * (group * out_features + row);
                    (out.scales[group], out.zeros[group]) = (bf16_at(bytes, at), bf16_at(bytes, at + 1));
                }
            }
            GroupGrids::RowMajorAffine { scales, zeros } => {
                widen_bf16(&scales[2 * row * groups..], &mut out.scales);
                widen_bf16(&zeros[2 * row * groups..], &mut out.zeros);
            }
        }
    }

    /// Decodes one row into `out`, `[in]`.
    ///
    /// # Panics
    /// When there is no such row or `out` has another length.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        self.decode(row..row + 1, 0..self.shape()[1], out);
    }

    /// Decodes any rows and columns into `out`, `[rows.len(), columns.len()]`. Neighbouring rows are
    /// cheaper together than one by one.
    ///
    /// # Panics
    /// When a range reaches past the end or `out` has another length.
    pub fn decode(&self, rows: Range<usize>, columns: Range<usize>, out: &mut [f32]) {
        check_ranges(self.shape(), &rows, &columns, out.len());
        if out.is_empty() {
            return;
        }
        let mut buffer = [0; PIECE];
        let height = rows.len().min(PIECE_ROWS);
        for first in rows.clone().step_by(height) {
            let piece_rows = first..(first + height).min(rows.end);
            for left in columns.clone().step_by(PIECE / height) {
                let piece = left..(left + PIECE / height).min(columns.end);
                let codes = &mut buffer[..piece_rows.len() * piece.len()];
                self.codes.decode(piece_rows.clone(), piece.clone(), codes);
                for (row, codes) in piece_rows.clone().zip(codes.chunks_exact(piece.len())) {
                    let at = (row - rows.start) * columns.len() + left - columns.start;
                    self.apply_grids(row, piece.clone(), codes, &mut out[at..][..piece.len()]);
                }
            }
        }
    }

    /// The weights of some columns of a row from their codes.
    fn apply_grids(&self, row: usize, columns: Range<usize>, codes: &[u8], out: &mut [f32]) {
        let mut column = columns.start;
        while column < columns.end {
            let group = column / self.group_size;
            let end = columns.end.min((group + 1) * self.group_size);
            let part = column - columns.start..end - columns.start;
            self.grid(row, group).decode(&codes[part.clone()], &mut out[part]);
            column = end;
        }
    }
}

multiversion! {
    /// Pairs of a scale and a zero, apart.
    fn widen_bf16_pairs(bytes: &[u8], scales: &mut [f32], zeros: &mut [f32]) {
        for ((pair, scale), zero) in bytes.as_chunks::<4>().0.iter().zip(scales).zip(zeros) {
            let pair = u32::from_le_bytes(*pair);
            (*scale, *zero) = (f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000));
        }
    }
}

fn widen_bf16(bytes: &[u8], out: &mut [f32]) {
    for (x, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *x = bf16_at(bytes, 0);
    }
}

#[inline]
fn bf16_at(bytes: &[u8], i: usize) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_of_a_kernel_agree() {
        let codes: Vec<u8> = (0..1003).map(|i| (i * 7 % 16) as u8).collect();
        let (mut a, mut b) = (vec![0.0; 1003], vec![1.0; 1003]);
        for (scale, zero) in [(0.013, 0.7), (-3.1, 1e-3), (1e-30, -5.0)] {
            for zero_point in [0, 8, 15] {
                scale_codes(&codes, zero_point, scale, &mut a);
                scale_codes::scalar(&codes, zero_point, scale, &mut b);
                assert_eq!(a, b);
                for (x, code) in a.iter().zip(&codes) {
                    assert_eq!(*x, (f32::from(*code) - f32::from(zero_point)) * scale);
                }
            }
            affine_codes(&codes, scale, zero, &mut a);
            affine_codes::scalar(&codes, scale, zero, &mut b);
            assert_eq!(a, b);
        }
    }
}
