//! Blocks of rows, column after column: byte d of a column is `code[d] | code[d + rows/2] << 4`.

use std::ops::Range;

/// Side of the squares of bytes that are transposed at once.
const TILE: usize = 8;
/// Rows of a block from which on transposing beats picking nibbles one by one.
const TRANSPOSE_FROM: usize = 4;

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

/// Rows `within` a block, from the bytes `[width, half]` of some of its columns.
fn transpose(bytes: &[u8], half: usize, within: Range<usize>, out: &mut [u8], width: usize) {
    const NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;
    let whole = width / TILE * TILE;
    for d in (0..half).step_by(TILE) {
        let (low, high) = (overlap(d, &within), overlap(d + half, &within));
        if low.is_empty() && high.is_empty() {
            continue;
        }
        for k in (0..whole).step_by(TILE) {
            let square = transposed(std::array::from_fn(|i| word(&bytes[(k + i) * half + d..])));
            let mut put = |first: usize, range: &Range<usize>, shift: u32| {
                for r in range.clone() {
                    let codes = (square[r - first] >> shift & NIBBLES).to_le_bytes();
                    out[(r - within.start) * width + k..][..TILE].copy_from_slice(&codes);
                }
            };
            put(d, &low, 0);
            put(d + half, &high, 4);
        }
        for r in low.chain(high) {
            let out = &mut out[(r - within.start) * width..][whole..width];
            pick(&bytes[whole * half..], half, r, out);
        }
    }
}

/// The part of `first..first + TILE` that is within a range.
fn overlap(first: usize, range: &Range<usize>) -> Range<usize> {
    let start = first.max(range.start);
    start..(first + TILE).min(range.end).max(start)
}

#[inline(always)]
fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(*bytes.first_chunk().expect("whole tiles only"))
}

/// Byte j of word i becomes byte i of word j: squares of one byte, of two and of four change places
/// across the diagonal.
#[inline(always)]
pub(super) fn transposed(mut x: [u64; TILE]) -> [u64; TILE] {
    let mut swap = |i: usize, j: usize, shift: u32, mask: u64| {
        let t = (x[i] >> shift ^ x[j]) & mask;
        x[i] ^= t << shift;
        x[j] ^= t;
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
    x
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
                let pairs = |i| word(at(d + i, k)) | word(at(d + i + half, k)) << 4;
                for (j, bytes) in transposed(std::array::from_fn(pairs)).into_iter().enumerate() {
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
