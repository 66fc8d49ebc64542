//! Blocks of rows, column after column: byte d of a column is `code[d] | code[d + rows/2] << 4`.

use std::ops::Range;

use crate::simd::multiversion;

/// Side of the squares of bytes that are transposed at once.
const TILE: usize = 8;
/// Rows of a block from which on transposing beats picking nibbles one by one.
const TRANSPOSE_FROM: usize = 4;
const NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;

/// See [`super::PackedCodes::decode`]; the ranges have been checked and are not empty.
pub(super) fn decode(
    bytes: &[u8],
    block: usize,
    in_features: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [u8],
) {
    let half = block / 2;
    let width = columns.len();
    let mut row = rows.start;
    let mut out = out;
    while row < rows.end {
        let b = row / block;
        let end = rows.end.min((b + 1) * block);
        let (part, rest) = out.split_at_mut((end - row) * width);
        out = rest;
        // Of the block, only the bytes of these columns.
        let bytes = &bytes[b * half * in_features..][columns.start * half..columns.end * half];
        let within = row - b * block..end - b * block;
        if within.len() < TRANSPOSE_FROM {
            for (r, out) in within.zip(part.chunks_exact_mut(width)) {
                pick(bytes, half, r, out);
            }
        } else {
            transpose(bytes, half, within, part, width);
        }
        row = end;
    }
}

/// Row `r` of a block, from the bytes `[out.len(), half]` of some of its columns.
fn pick(bytes: &[u8], half: usize, r: usize, out: &mut [u8]) {
    let (d, shift) = (r % half, r / half * 4);
    for (code, column) in out.iter_mut().zip(bytes.chunks_exact(half)) {
        *code = column[d] >> shift & 15;
    }
}

multiversion! {
    /// Rows `within` a block, from the bytes `[width, half]` of some of its columns.
    fn transpose(bytes: &[u8], half: usize, within: Range<usize>, out: &mut [u8], width: usize) {
        match half {
            16 => transpose_half::<2>(bytes, within, out, width),
            32 => transpose_half::<4>(bytes, within, out, width),
            _ => unreachable!("blocks have 32 or 64 rows"),
        }
    }
}

/// [`transpose`] for columns of `L` words.
#[inline(always)]
fn transpose_half<const L: usize>(bytes: &[u8], within: Range<usize>, out: &mut [u8], width: usize) {
    let half = L * TILE;
    let one_half = within.end <= half || within.start >= half;
    let step = if one_half { 2 * TILE } else { TILE };
    let whole = width / step * step;
    let (low, high) =
        if one_half { (within.clone(), within.clone()) } else { (within.start..half, half..within.end) };
    for k in (0..whole).step_by(step) {
        let bytes = &bytes[k * half..][..step * half];
        let mut tile = [[0; L]; TILE];
        if one_half {
            // The other nibble of every byte is of no use: it makes room for eight more columns.
            let shift = if within.end <= half { 0 } else { 4 };
            let (left, right) = bytes.split_at(TILE * half);
            for (i, lanes) in tile.iter_mut().enumerate() {
                for (lane, slot) in lanes.iter_mut().enumerate() {
                    let at = i * half + lane * TILE;
                    *slot =
                        word(&left[at..]) >> shift & NIBBLES | (word(&right[at..]) >> shift & NIBBLES) << 4;
                }
            }
        } else {
            for (i, lanes) in tile.iter_mut().enumerate() {
                for (lane, slot) in lanes.iter_mut().enumerate() {
                    *slot = word(&bytes[i * half + lane * TILE..]);
                }
            }
        }
        transpose_lanes(&mut tile);
        for (rows, k, shift) in [(&low, k, 0), (&high, k + step - TILE, 4)] {
            for r in rows.clone() {
                let codes = (tile[r % TILE][r % half / TILE] >> shift & NIBBLES).to_le_bytes();
                out[(r - within.start) * width + k..][..TILE].copy_from_slice(&codes);
            }
        }
    }
    if whole < width {
        for (r, out) in within.zip(out.chunks_exact_mut(width)) {
            pick(&bytes[whole * half..], half, r, &mut out[whole..]);
        }
    }
}

#[inline(always)]
fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(*bytes.first_chunk().expect("whole tiles only"))
}

/// In every lane, byte j of word i becomes byte i of word j: squares of one byte, of two and of four
/// change places across the diagonal.
#[inline(always)]
pub(super) fn transpose_lanes<const L: usize>(x: &mut [[u64; L]; TILE]) {
    let mut swap = |i: usize, j: usize, shift: u32, mask: u64| {
        let (front, back) = x.split_at_mut(j);
        for (a, b) in front[i].iter_mut().zip(&mut back[0]) {
            let t = (*a >> shift ^ *b) & mask;
            *a ^= t << shift;
            *b ^= t;
        }
    };
    for i in [0, 2, 4, 6] {
        swap(i, i + 1, 8, 0x00ff_00ff_00ff_00ff);
    }
    for i in [0, 1, 4, 5] {
        swap(i, i + 2, 16, 0x0000_ffff_0000_ffff);
    }
    for i in 0..4 {
        swap(i, i + 4, 32, 0x0000_0000_ffff_ffff);
    }
}

/// See [`super::pack_rows`].
pub(super) fn pack(codes: &[u8], block: usize, in_features: usize, out: &mut [u8]) {
    let half = block / 2;
    let whole = in_features / TILE * TILE;
    let blocks = codes.chunks_exact(block * in_features).zip(out.chunks_exact_mut(half * in_features));
    for (codes, out) in blocks {
        let at = |row: usize, k: usize| &codes[row * in_features + k..];
        for d in (0..half).step_by(TILE) {
            for k in (0..whole).step_by(TILE) {
                let mut tile = std::array::from_fn(|i| [word(at(d + i, k)) | word(at(d + i + half, k)) << 4]);
                transpose_lanes(&mut tile);
                for (j, [bytes]) in tile.into_iter().enumerate() {
                    out[(k + j) * half + d..][..TILE].copy_from_slice(&bytes.to_le_bytes());
                }
            }
        }
        for k in whole..in_features {
            for d in 0..half {
                out[k * half + d] = at(d, k)[0] & 15 | at(d + half, k)[0] << 4;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_of_the_kernel_agree() {
        let bytes: Vec<u8> = (0..32 * 45).map(|i| (i * 37 / 5 % 256) as u8).collect();
        for (half, within, width) in
            [(32, 0..64, 45), (32, 3..61, 40), (16, 0..32, 90), (16, 20..32, 7), (32, 32..64, 41)]
        {
            let (mut a, mut b) = (vec![0; within.len() * width], vec![1; within.len() * width]);
            let bytes = &bytes[..half * width];
            transpose(bytes, half, within.clone(), &mut a, width);
            transpose::scalar(bytes, half, within, &mut b, width);
            assert_eq!(a, b);
        }
    }
}
