//! Codes of other layouts as words of eight neighbours along K, words of neighbouring rows side by side: the
//! form that [`super::int4`] multiplies.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::int4::WORD;

/// Rows of a tile.
#[cfg(target_arch = "x86_64")]
const TILE: usize = 8;

/// Turns words that follow each other along a row, `[rows, words]` with rows `stride` bytes apart, into
/// words of neighbouring rows side by side, `[words, rows]`.
pub(crate) fn interleave(bytes: &[u8], stride: usize, rows: usize, out: &mut [[u8; 4]]) {
    let words = out.len() / rows;
    #[cfg(target_arch = "x86_64")]
    if rows.is_multiple_of(TILE) && words.is_multiple_of(WORD) && crate::simd::has_avx2() {
        // SAFETY: the processor has every feature the function is compiled for.
        #[allow(unsafe_code)]
        return unsafe { interleave_avx2(bytes, stride, rows, out) };
    }
    for row in 0..rows {
        let bytes = bytes[row * stride..][..words * 4].as_chunks::<4>().0;
        for (out, word) in out.iter_mut().skip(row).step_by(rows).zip(bytes) {
            *out = *word;
        }
    }
}

/// Squares of eight words are transposed at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn interleave_avx2(bytes: &[u8], stride: usize, rows: usize, out: &mut [[u8; 4]]) {
    let words = out.len() / rows;
    assert!(rows.is_multiple_of(TILE) && words.is_multiple_of(WORD) && out.len() == rows * words);
    assert!(rows == 0 || (rows - 1) * stride + words * 4 <= bytes.len(), "rows past the end");
    for r in (0..rows).step_by(TILE) {
        for w in (0..words).step_by(WORD) {
            let mut x = [_mm256_setzero_si256(); TILE];
            for i in 0..TILE {
                // SAFETY: row r + i < rows has its words w..w + 8 within the bytes.
                x[i] = unsafe { _mm256_loadu_si256(bytes.as_ptr().add((r + i) * stride + w * 4).cast()) };
                // The rows are too many streams for the processor to foresee; the next tile of them is
                // asked for by hand.
                let next = bytes.as_ptr().wrapping_add((r + i + TILE) * stride + w * 4);
                _mm_prefetch::<_MM_HINT_T1>(next.cast());
            }
            let mut pairs = [_mm256_setzero_si256(); TILE];
            for i in (0..TILE).step_by(2) {
                pairs[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
                pairs[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
            }
            let mut fours = [_mm256_setzero_si256(); TILE];
            for i in (0..TILE).step_by(4) {
                fours[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
                fours[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
                fours[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
                fours[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
            }
            for i in 0..4 {
                let (low, high) = (
                    _mm256_permute2x128_si256::<0x20>(fours[i], fours[i + 4]),
                    _mm256_permute2x128_si256::<0x31>(fours[i], fours[i + 4]),
                );
                // SAFETY: words w + i and w + i + 4 of rows r..r + 8 lie within `out`.
                unsafe {
                    _mm256_storeu_si256(out.as_mut_ptr().add((w + i) * rows + r).cast(), low);
                    _mm256_storeu_si256(out.as_mut_ptr().add((w + i + 4) * rows + r).cast(), high);
                }
            }
        }
    }
}

/// Turns the columns of a block of interleaved rows, `[columns, half]` bytes with rows `d` and `d + half` in the
/// nibbles of byte d, into words of neighbouring rows side by side, `[columns/8, 2 * half]` with `stride` words
/// from one line to the next.
///
/// # Panics
/// When the lengths do not fit or columns are left over.
pub(crate) fn interleave_block(bytes: &[u8], half: usize, out: &mut [[u8; 4]], stride: usize) {
    let words = bytes.len() / (half * WORD);
    assert!(
        bytes.len() == words * WORD * half
            && 2 * half <= stride
            && (words == 0 || (words - 1) * stride + 2 * half <= out.len()),
        "{} bytes of {half} do not fill lines of {stride} of {} words",
        bytes.len(),
        out.len()
    );
    #[cfg(target_arch = "x86_64")]
    if crate::simd::has_avx2() && matches!(half, 16 | 32) {
        // SAFETY: the processor has every feature the functions are compiled for.
        #[allow(unsafe_code)]
        unsafe {
            match half {
                32 => return interleave_block_avx2::<32>(bytes, out, stride),
                // Two words at a time; the last one may be alone.
                _ => interleave_block_avx2::<16>(bytes, out, stride),
            }
        }
        return interleave_block_portable(bytes, half, words / 2 * 2, out, stride);
    }
    interleave_block_portable(bytes, half, 0, out, stride);
}

/// The definition of [`interleave_block`], from word `first` on.
fn interleave_block_portable(bytes: &[u8], half: usize, first: usize, out: &mut [[u8; 4]], stride: usize) {
    for (word, columns) in bytes.chunks_exact(half * WORD).enumerate().skip(first) {
        for r in 0..2 * half {
            let (d, shift) = (r % half, r / half * 4);
            let code = |k: usize| columns[k * half + d] >> shift & 15;
            out[word * stride + r] = std::array::from_fn(|i| code(2 * i) | code(2 * i + 1) << 4);
        }
    }
}

/// For halves of 16, the lower half of a register takes a word and the upper one the next; for halves of 32
/// they take the first and the second 16 bytes of the same.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn interleave_block_avx2<const HALF: usize>(bytes: &[u8], out: &mut [[u8; 4]], stride: usize) {
    const { assert!(HALF == 16 || HALF == 32) };
    let at_once = 32 / HALF;
    let words = bytes.len() / (HALF * WORD) / at_once * at_once;
    assert!(words * WORD * HALF <= bytes.len() && 2 * HALF <= stride);
    assert!(words == 0 || (words - 1) * stride + 2 * HALF <= out.len());
    let low = _mm256_set1_epi8(15);
    // Words and rows from the lower half of a register to the upper one.
    let upper = if HALF == 16 { stride } else { 16 };
    for w in (0..words).step_by(at_once) {
        let mut columns = [_mm256_setzero_si256(); WORD];
        for j in 0..WORD {
            // SAFETY: column j of word w, and of the next where two are taken at once, lies within the bytes.
            columns[j] = unsafe {
                let at = bytes.as_ptr().add((w * WORD + j) * HALF);
                match HALF {
                    16 => _mm256_set_m128i(
                        _mm_loadu_si128(at.add(WORD * HALF).cast()),
                        _mm_loadu_si128(at.cast()),
                    ),
                    _ => _mm256_loadu_si256(at.cast()),
                }
            };
        }
        // Of two columns, the nibbles of the same row into one byte.
        let mut pairs = [[_mm256_setzero_si256(); WORD / 2]; 2];
        for j in 0..WORD / 2 {
            let (even, odd) = (columns[2 * j], columns[2 * j + 1]);
            let swap = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16::<4>(even), odd), low);
            pairs[0][j] = _mm256_xor_si256(even, _mm256_slli_epi16::<4>(swap));
            pairs[1][j] = _mm256_xor_si256(odd, swap);
        }
        for part in 0..2 {
            let [a, b, c, d] = pairs[part];
            let (ab, cd) = (_mm256_unpacklo_epi8(a, b), _mm256_unpacklo_epi8(c, d));
            let (ab_high, cd_high) = (_mm256_unpackhi_epi8(a, b), _mm256_unpackhi_epi8(c, d));
            let fours = [
                _mm256_unpacklo_epi16(ab, cd),
                _mm256_unpackhi_epi16(ab, cd),
                _mm256_unpacklo_epi16(ab_high, cd_high),
                _mm256_unpackhi_epi16(ab_high, cd_high),
            ];
            for i in 0..4 {
                // SAFETY: four rows of line w from part * HALF + 4 i on, and of the upper half's, lie within
                // `out`.
                unsafe {
                    let at = out.as_mut_ptr().add(w * stride + part * HALF + 4 * i);
                    _mm_storeu_si128(at.cast(), _mm256_castsi256_si128(fours[i]));
                    _mm_storeu_si128(at.add(upper).cast(), _mm256_extracti128_si256::<1>(fours[i]));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaving_puts_the_words_of_rows_beside_each_other() {
        for (rows, words, spare) in [(8, 8, 0), (16, 24, 12), (5, 8, 4), (8, 3, 1)] {
            let stride = words * 4 + spare;
            let bytes: Vec<u8> = (0..rows * stride).map(|i| (i * 37 % 251) as u8).collect();
            let mut out = vec![[0; 4]; rows * words];
            interleave(&bytes, stride, rows, &mut out);
            for (i, word) in out.iter().enumerate() {
                assert_eq!(word, &bytes[i % rows * stride + i / rows * 4..][..4], "{rows} {words}");
            }
        }
    }

    #[test]
    fn the_words_of_a_block_are_those_of_its_rows() {
        for (half, words, spare) in [(16, 4, 0), (16, 3, 5), (32, 3, 0), (32, 2, 64)] {
            let (rows, stride) = (2 * half, 2 * half + spare);
            let code = |r: usize, k: usize| (r * 31 + k * 7 + k / 3) as u8 % 16;
            let byte = |i: usize| code(i % half, i / half) | code(i % half + half, i / half) << 4;
            let bytes: Vec<u8> = (0..words * WORD * half).map(byte).collect();
            let mut out = vec![[0xff; 4]; words * stride];
            interleave_block(&bytes, half, &mut out, stride);
            for (i, word) in out.iter().enumerate() {
                let expected = match (i % stride, i / stride * WORD) {
                    (r, k) if r < rows => {
                        std::array::from_fn(|j| code(r, k + 2 * j) | code(r, k + 2 * j + 1) << 4)
                    }
                    _ => [0xff; 4],
                };
                assert_eq!(*word, expected, "{half} {words} {i}");
            }
            let mut again = vec![[0xff; 4]; out.len()];
            interleave_block_portable(&bytes, half, 0, &mut again, stride);
            assert_eq!(out, again);
        }
    }
}
