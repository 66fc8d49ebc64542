//! Products of a float token with interleaved 4-bit rows (see [`crate::pack::CodeLayout::Blocks`]) on
//! affine grids, without unpacking rows: lanes are rows here, and the lanes of the order of summation are
//! sums of their own.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
#[cfg(target_arch = "x86_64")]
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::dot::K_BLOCK;
use super::dot::{LANES, SEGMENT};

/// A block of rows and its grids, as stored.
#[derive(Clone, Copy)]
pub(crate) struct InterleavedRows<'a> {
    /// `[K, rows/2]`.
    pub(crate) codes: &'a [u8],
    /// 32 or 64.
    pub(crate) rows: usize,
    /// bf16 pairs of scale and zero; that of group g and row r of the block at `(g * stride + r) * 4`.
    pub(crate) grids: &'a [u8],
    /// Rows of the matrix.
    pub(crate) stride: usize,
    /// Columns of a group.
    pub(crate) group_size: usize,
}

/// Whether groups and segments have common ends, as the fast kernel needs it.
pub(crate) fn has_fast_kernel(group_size: usize) -> bool {
    crate::simd::has_avx2()
        && group_size.is_multiple_of(LANES)
        && (SEGMENT.is_multiple_of(group_size) || group_size.is_multiple_of(SEGMENT))
}

/// `y[r] = x . w[r]` for the rows of a block, in the order of summation of [`super::dot`].
///
/// # Panics
/// When the lengths do not fit or there is no fast kernel for the groups.
pub(crate) fn multiply(w: InterleavedRows<'_>, x: &[f32], y: &mut [f32]) {
    let groups = x.len() / w.group_size;
    assert!(
        has_fast_kernel(w.group_size)
            && matches!(w.rows, 32 | 64)
            && y.len() == w.rows
            && groups > 0
            && x.len() == groups * w.group_size
            && w.codes.len() == x.len() * w.rows / 2
            && w.rows <= w.stride
            && ((groups - 1) * w.stride + w.rows) * 4 <= w.grids.len(),
        "{} activations, {} bytes of codes and {} of grids of {} rows do not fit",
        x.len(),
        w.codes.len(),
        w.grids.len(),
        w.rows
    );
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the processor has every feature the function is compiled for.
    #[allow(unsafe_code)]
    unsafe {
        multiply_avx2(w, x, y);
    }
}

/// Bytes of a column that are worked on together: 16 rows in the low nibbles, 16 in the high ones.
#[cfg(target_arch = "x86_64")]
const CHUNK: usize = 16;
/// The rows of a chunk, eight at a time: the first and the second eight of the low nibbles, then of the
/// high ones.
#[cfg(target_arch = "x86_64")]
const PARTS: usize = 4;
#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;

/// The first of a part's rows, for the chunk that begins at byte `d` of `half`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn first_row(part: usize, d: usize, half: usize) -> usize {
    part / 2 * half + d + part % 2 * 8
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn multiply_avx2(w: InterleavedRows<'_>, x: &[f32], y: &mut [f32]) {
    let half = w.rows / 2;
    for start in (0..x.len()).step_by(K_BLOCK) {
        let block_end = (start + K_BLOCK).min(x.len());
        for d in (0..half).step_by(CHUNK) {
            // Of every lane, the sums of the rows.
            let mut totals = [[_mm256_setzero_ps(); PARTS]; LANES];
            for (i, start) in (start..block_end).step_by(SEGMENT).enumerate() {
                // While these columns are worked on, their share of the following ones is fetched: the
                // order they are read in is none that the processor foresees.
                let share = (d / CHUNK * (K_BLOCK / SEGMENT) + i) * SEGMENT * CHUNK;
                let ahead = w.codes.as_ptr().wrapping_add((start / K_BLOCK + 1) * K_BLOCK * half + share);
                for line in (0..SEGMENT * CHUNK).step_by(LINE_BYTES) {
                    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line).cast());
                }
                let sums = segment(w, d, x, start..(start + SEGMENT).min(block_end));
                for lane in 0..LANES {
                    for part in 0..PARTS {
                        totals[lane][part] = _mm256_add_ps(totals[lane][part], sums[lane][part]);
                    }
                }
            }
            for part in 0..PARTS {
                let [a, b, c, d_, e, f, g, h] = totals.map(|lane| lane[part]);
                let even = _mm256_add_ps(_mm256_add_ps(a, e), _mm256_add_ps(c, g));
                let odd = _mm256_add_ps(_mm256_add_ps(b, f), _mm256_add_ps(d_, h));
                let sum = _mm256_add_ps(even, odd);
                // SAFETY: eight outputs from there on are within the block's rows.
                unsafe {
                    let y = y.as_mut_ptr().add(first_row(part, d, half));
                    let sum = if start == 0 { sum } else { _mm256_add_ps(_mm256_loadu_ps(y), sum) };
                    _mm256_storeu_ps(y, sum);
                }
            }
        }
    }
}

/// The sums of every lane over a segment, or what is left of one.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn segment(w: InterleavedRows<'_>, d: usize, x: &[f32], columns: Range<usize>) -> [[__m256; PARTS]; LANES] {
    let mut sums = [[_mm256_setzero_ps(); PARTS]; LANES];
    // Groups are parts of a segment or whole segments: a stretch lies within one.
    let groups = columns.start / w.group_size..;
    for (group, start) in groups.zip(columns.clone().step_by(w.group_size)) {
        let stretch = start..(start + w.group_size).min(columns.end);
        let mut scales = [_mm256_setzero_ps(); PARTS];
        let mut zeros = [_mm256_setzero_ps(); PARTS];
        let mut firsts = [_mm256_setzero_ps(); PARTS];
        let mut exact = true;
        for part in 0..PARTS {
            let at = (group * w.stride + first_row(part, d, w.rows / 2)) * 4;
            // SAFETY: the grids of every group and row of the block are there.
            let pairs = unsafe { _mm256_loadu_si256(w.grids.as_ptr().add(at).cast()) };
            // Those of the next block of rows, asked for by hand: every group is a page of its own.
            let next = w.grids.as_ptr().wrapping_add(at + w.rows * 4);
            _mm_prefetch::<_MM_HINT_T1>(next.cast());
            scales[part] = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs));
            zeros[part] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-0x1_0000)));
            let (first, is_exact) = first_code(scales[part], zeros[part]);
            firsts[part] = first;
            exact &= is_exact;
        }
        if exact {
            add_columns::<true>(w, d, x, stretch, scales, firsts, &mut sums);
        } else {
            add_columns::<false>(w, d, x, stretch, scales, zeros, &mut sums);
        }
    }
    sums
}

/// The values of code 0, `zero - 8 * scale`, and whether all of them are floats. Where they are, a weight is
/// one rounded operation from there as well as from the middle, of the same exact value, and a subtraction
/// is saved.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn first_code(scale: __m256, zero: __m256) -> (__m256, bool) {
    let eight = _mm256_mul_ps(scale, _mm256_set1_ps(8.0));
    let first = _mm256_sub_ps(zero, eight);
    // What the difference lost, exactly: Knuth's two-sum.
    let minus_eight = _mm256_sub_ps(first, zero);
    let lost = _mm256_add_ps(
        _mm256_sub_ps(zero, _mm256_sub_ps(first, minus_eight)),
        _mm256_sub_ps(_mm256_sub_ps(_mm256_setzero_ps(), eight), minus_eight),
    );
    // Of what is not finite, the loss is a NaN.
    let is_exact = _mm256_cmp_ps::<_CMP_EQ_OQ>(lost, _mm256_setzero_ps());
    (first, _mm256_movemask_ps(is_exact) == 0xff)
}

/// Adds columns of one group. `origins` are the values of code 0 if `FROM_FIRST`, of code 8 otherwise.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn add_columns<const FROM_FIRST: bool>(
    w: InterleavedRows<'_>,
    d: usize,
    x: &[f32],
    columns: Range<usize>,
    scales: [__m256; PARTS],
    origins: [__m256; PARTS],
    sums: &mut [[__m256; PARTS]; LANES],
) {
    let half = w.rows / 2;
    let low = _mm256_set1_epi32(15);
    let middle = _mm256_set1_epi32(8);
    // Bytes 0..4 and 4..8, or 8..12 and 12..16, of either half of a register to the low bytes of its words.
    let spread = |first: i8| {
        let word = |i: i8| i32::from_le_bytes([(first + i).cast_unsigned(), 0x80, 0x80, 0x80]);
        _mm256_setr_epi32(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7))
    };
    let spreads = [spread(0), spread(8)];
    for (lane, sums) in sums.iter_mut().enumerate() {
        let mut here = *sums;
        let mut k = columns.start + lane;
        while k < columns.end {
            // SAFETY: groups are whole eights of columns, so k is one of x, and the 16 bytes from d on of
            // its column are there.
            let (bytes, x) = unsafe {
                let bytes = _mm_loadu_si128(w.codes.as_ptr().add(k * half + d).cast());
                (_mm256_broadcastsi128_si256(bytes), _mm256_broadcast_ss(x.get_unchecked(k)))
            };
            for part in 0..PARTS {
                let bytes = _mm256_shuffle_epi8(bytes, spreads[part % 2]);
                let codes = match part / 2 {
                    0 => _mm256_and_si256(bytes, low),
                    _ => _mm256_srli_epi32::<4>(bytes),
                };
                let steps = match FROM_FIRST {
                    true => codes,
                    false => _mm256_sub_epi32(codes, middle),
                };
                let weights = _mm256_fmadd_ps(_mm256_cvtepi32_ps(steps), scales[part], origins[part]);
                here[part] = _mm256_fmadd_ps(x, weights, here[part]);
            }
            k += LANES;
        }
        *sums = here;
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::runtime::kernels::dot;
    use crate::runtime::kernels::rows::Rows;

    /// Against the definition, weights decoded first: the same bits, also where the value of code 0 is no
    /// float and where it overflows.
    #[test]
    fn the_sums_are_those_of_decoded_rows() {
        if !has_fast_kernel(32) {
            return;
        }
        let zero_of = |kind: usize, scale: f32, i: usize| match kind {
            0 => scale * (i % 9) as f32 - 3.0 * scale,
            1 => scale * 1e-7 * (1 + i % 5) as f32,
            2 => -0.0,
            _ => 1e30 * scale,
        };
        for (rows, k, group_size) in [(32, 96, 32), (64, 640, 128), (32, 1280, 256), (64, 1152, 64)] {
            for kind in 0..4 {
                let (groups, stride) = (k / group_size, rows + 32);
                let codes: Vec<u8> = (0..k * rows / 2).map(|i| (i * 37 / 3 % 256) as u8).collect();
                let pair = |i: usize| {
                    let scale = bf16::from_f32(
                        0.01 * (1 + i % 13) as f32 * if i.is_multiple_of(3) { -1.0 } else { 1.0 },
                    );
                    [scale, bf16::from_f32(zero_of(kind, scale.to_f32(), i))]
                };
                let pairs: Vec<[bf16; 2]> = (0..groups * stride).map(pair).collect();
                let grids: Vec<u8> = pairs.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
                let x: Vec<f32> = (0..k).map(|i| (i as f32 * 0.7).sin()).collect();
                let mut y = vec![f32::NAN; rows];
                multiply(
                    InterleavedRows { codes: &codes, rows, grids: &grids, stride, group_size },
                    &x,
                    &mut y,
                );
                for (r, y) in y.iter().enumerate() {
                    let weight = |c: usize| {
                        let byte = codes[c * rows / 2 + r % (rows / 2)];
                        let code = if r < rows / 2 { byte & 15 } else { byte >> 4 };
                        let [scale, zero] = pairs[c / group_size * stride + r].map(bf16::to_f32);
                        (f32::from(code) - 8.0).mul_add(scale, zero)
                    };
                    let w: Vec<f32> = (0..k).map(weight).collect();
                    let mut expected = [0.0];
                    dot::multiply(Rows::dense(&x, k), &[&w[..]], &mut expected, 1);
                    assert_eq!(y.to_bits(), expected[0].to_bits(), "{rows} {k} {kind} {r}");
                }
            }
        }
    }
}
