//! Grids and codes chosen for calibrated inputs: the searched grid, with each column's error counted by
//! how large its inputs are, then GPTQ's rounding on it.

use half::bf16;

use super::{Grid, Int4, StoredGrid};
use crate::formats::{Inputs, SolvedRows};
use crate::quant::int4::{self, affine, symmetric, zero_point};

/// Rows `[n, in]` of weights as [`SolvedRows`].
pub(super) fn solve(codec: &Int4, weights: &[f32], inputs: &Inputs<'_>) -> SolvedRows {
    let (k, g) = (inputs.importance.len(), codec.group_size);
    let mut codes = vec![0; weights.len()];
    let mut grids = Vec::with_capacity(weights.len() / g);
    for (row, codes) in weights.chunks_exact(k).zip(codes.chunks_exact_mut(k)) {
        for (group, codes) in codes.chunks_exact_mut(g).enumerate() {
            let columns = group * g..(group + 1) * g;
            let importance = Some(&inputs.importance[columns.clone()]);
            grids.push(codec.encode_group(&row[columns], importance, codes).0);
        }
    }
    let groups = k / g;
    let nearest: Vec<int4::Grid> = grids.iter().map(|grid| codec.opened(*grid)).collect();
    let at = |row: usize, column: usize| row * groups + column / g;
    let output_noise =
        inputs.solver.solve(weights, |row, column, w| nearest[at(row, column)].nearest(w), &mut codes);
    let mut bytes = Vec::new();
    for (codes, grids) in codes.chunks_exact(k).zip(grids.chunks_exact(groups)) {
        bytes.extend(codes.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4));
        for grid in grids {
            bytes.extend(grid.scale.to_le_bytes());
            bytes.extend(grid.zero.to_le_bytes());
        }
    }
    let mut decoded = vec![0.0; weights.len()];
    for ((codes, decoded), grid) in codes.chunks_exact(g).zip(decoded.chunks_exact_mut(g)).zip(&grids) {
        codec.decode_group(codes, *grid, decoded);
    }
    SolvedRows { bytes, decoded, output_noise }
}

/// The codes of a row of a module that was solved, into `codes`, and its grids.
pub(super) fn row(codec: &Int4, solved: &[u8], row: usize, codes: &mut [u8]) -> Vec<StoredGrid> {
    let k = codes.len();
    let row_bytes = k / 2 + 4 * codec.groups(k);
    let (packed, grids) = solved[row * row_bytes..][..row_bytes].split_at(k / 2);
    for (pair, byte) in codes.chunks_exact_mut(2).zip(packed) {
        (pair[0], pair[1]) = (byte & 15, byte >> 4);
    }
    let grid = |b: &[u8; 4]| StoredGrid {
        scale: u16::from_le_bytes([b[0], b[1]]),
        zero: u16::from_le_bytes([b[2], b[3]]),
    };
    grids.as_chunks::<4>().0.iter().map(grid).collect()
}

impl Int4 {
    fn opened(&self, grid: StoredGrid) -> int4::Grid {
        let scale = bf16::from_bits(grid.scale).to_f32();
        match self.grid {
            Grid::Symmetric(_) => symmetric::grid(scale),
            Grid::ZeroPoint => zero_point::grid(scale, grid.zero.to_le_bytes()[0]),
            Grid::Affine => affine::grid(scale, bf16::from_bits(grid.zero).to_f32()),
        }
    }

    pub(super) fn decode_group(&self, codes: &[u8], grid: StoredGrid, weights: &mut [f32]) {
        let scale = bf16::from_bits(grid.scale).to_f32();
        match self.grid {
            Grid::Symmetric(_) => symmetric::decode_group(codes, scale, weights),
            Grid::ZeroPoint => {
                zero_point::decode_group(codes, scale, grid.zero.to_le_bytes()[0], weights);
            }
            Grid::Affine => {
                affine::decode_group(codes, scale, bf16::from_bits(grid.zero).to_f32(), weights);
            }
        }
    }
}
