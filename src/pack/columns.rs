//! Words of eight neighbours along `in`, neighbouring words belonging to neighbouring rows.

use std::ops::Range;

/// Codes of a word.
const WORD: usize = 8;

/// See [`super::PackedCodes::decode`]; the ranges have been checked and are not empty.
pub(super) fn decode(
    bytes: &[u8],
    out_features: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [u8],
) {
    let width = columns.len();
    let words = bytes.as_chunks::<4>().0;
    let mut column = columns.start;
    // The rows of one word after the other: their words lie side by side.
    while column < columns.end {
        let word = column / WORD;
        let end = columns.end.min((word + 1) * WORD);
        let words = &words[word * out_features..][rows.clone()];
        let (at, len, skip) = (column - columns.start, end - column, column % WORD);
        if len == WORD {
            for (word, out) in words.iter().zip(out.chunks_exact_mut(width)) {
                out[at..at + WORD].copy_from_slice(&spread(u32::from_le_bytes(*word)));
            }
        } else {
            for (word, out) in words.iter().zip(out.chunks_exact_mut(width)) {
                out[at..at + len].copy_from_slice(&spread(u32::from_le_bytes(*word))[skip..skip + len]);
            }
        }
        column = end;
    }
}

/// The eight nibbles of a word, lowest first.
#[inline]
pub(super) fn spread(word: u32) -> [u8; WORD] {
    let x = u64::from(word);
    let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    let x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
    let x = (x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f;
    x.to_le_bytes()
}

/// Eight codes to a word, the first lowest.
#[inline]
pub(super) fn join(codes: [u8; WORD]) -> u32 {
    let x = u64::from_le_bytes(codes) & 0x0f0f_0f0f_0f0f_0f0f;
    let x = (x | x >> 4) & 0x00ff_00ff_00ff_00ff;
    let x = (x | x >> 8) & 0x0000_ffff_0000_ffff;
    #[expect(clippy::cast_possible_truncation, reason = "the upper half has been moved down")]
    let word = (x | x >> 16) as u32;
    word
}

/// Packs a strip of rows for [`super::CodeLayout::Columns`]: `codes` `[n, in]`, one code (0..=15) per
/// byte, to words `[in/8, n]`. The strips of a matrix lie beside each other in its `[in/8, out]`.
///
/// # Panics
/// When `in_features` is no multiple of 8 or `codes` does not hold whole rows.
pub fn pack_columns(codes: &[u8], in_features: usize) -> Vec<u32> {
    assert!(
        in_features > 0 && in_features.is_multiple_of(WORD) && codes.len().is_multiple_of(in_features),
        "{} codes are no whole rows of {in_features}",
        codes.len()
    );
    debug_assert!(codes.iter().all(|code| *code < 16), "codes have four bits");
    let n = codes.len() / in_features;
    let mut words = vec![0; codes.len() / WORD];
    for (row, codes) in codes.chunks_exact(in_features).enumerate() {
        for (r, codes) in codes.as_chunks::<WORD>().0.iter().enumerate() {
            words[r * n + row] = join(*codes);
        }
    }
    words
}
