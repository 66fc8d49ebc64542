//! Float activations as integers of three digits, for exact sums with integer weights.
//!
//! **Definition.** Of a block of activations, the unit is the smallest power of two (of normal numbers) for which
//! the largest magnitude is at most 0x7f7f7f once rounded, three digits of eight bits and a sign: that is
//! `(digits[0] * 256 + digits[1]) * 256 + digits[2]`. An activation is the nearest multiple of the unit, half to even. Sums of these are
//! exact, so that all that is lost is this rounding and the few operations on a block's sums: 134 dB at the model's
//! row lengths, where sums in f32 keep 139 and the rest of the forward pass 115 to 121.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::int4::{WORD, Words, nibbles};
use crate::pack::GridBuffer;
use crate::simd::multiversion;
#[cfg(target_arch = "x86_64")]
use crate::simd::prefetch;
use crate::tensor::{EXPONENT_BITS, amax_bits};

/// Digits of an activation.
pub(crate) const DIGITS: usize = 3;
/// Magnitudes of activations are below 2 to this power.
const BITS: u32 = 23;
/// The mantissa up to which a magnitude just below that power still is, once rounded, no more than three digits
/// of 127.
const LARGEST_MANTISSA: u32 = 0x7e_fefe;
/// Longest block: sums of digits times codes stay within an i32.
pub(crate) const MAX_BLOCK: usize = 128;
/// Words whose products are summed in 16 bits: four times two bytes times two products of at most 15 * 128.
#[cfg(target_arch = "x86_64")]
const WORDS: usize = 4;
/// Columns of those words.
#[cfg(target_arch = "x86_64")]
const CHUNK: usize = WORDS * WORD;
/// Rows of a tile.
#[cfg(target_arch = "x86_64")]
const TILE: usize = 8;
/// Tiles that share a token's digits: with three digits, as many sums as there are registers for.
#[cfg(target_arch = "x86_64")]
const TILES: usize = 4;
/// The same of a single token, whose codes are taken from the words as they come.
#[cfg(target_arch = "x86_64")]
const TILES_OF_ONE: usize = 2;
const MANTISSA_BITS: u32 = 23;
const MANTISSA: u32 = (1 << MANTISSA_BITS) - 1;
/// The bits of an exponent of 0.
const BIAS: u32 = 127;

/// What the integers of a block stand for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Block {
    /// The value of 1; a NaN when an activation is not finite.
    pub(crate) unit: f32,
    /// The sum of the upper two digits' values.
    pub(crate) upper: i32,
    /// The sum of the lowest digits.
    pub(crate) lowest: i32,
    /// The sum of all, in units.
    pub(crate) sum: f32,
}

/// Rounds a block of activations and writes their digits, the upper ones first.
///
/// # Panics
/// When the lengths differ.
pub(crate) fn split(x: &[f32], digits: [&mut [i16]; DIGITS]) -> Block {
    assert!(digits.iter().all(|digits| digits.len() == x.len()), "activations and digits differ in length");
    let largest = amax_bits(x);
    if largest >= EXPONENT_BITS {
        for digits in digits {
            digits.fill(0);
        }
        return Block { unit: f32::NAN, ..Block::default() };
    }
    let power = (largest >> MANTISSA_BITS) + 1 + u32::from(largest & MANTISSA > LARGEST_MANTISSA);
    // Below the smallest normal number there is no unit to take the inverse of.
    let exponent = power.saturating_sub(BITS).max(1);
    let inverse = f32::from_bits((2 * BIAS - exponent) << MANTISSA_BITS);
    let (upper, lowest) = round(x, inverse, digits);
    Block { unit: f32::from_bits(exponent << MANTISSA_BITS), upper, lowest, sum: value(upper, lowest) }
}

multiversion! {
    /// The digits of `x * inverse`, rounded, and the sums of the upper two and of the lowest.
    fn round(x: &[f32], inverse: f32, digits: [&mut [i16]; DIGITS]) -> (i32, i32) {
        let [high, middle, low] = digits;
        let (mut upper, mut lowest) = (0, 0);
        for (((x, high), middle), low) in x.iter().zip(high).zip(middle).zip(low) {
            #[expect(clippy::cast_possible_truncation, reason = "within 2^23, and low bits are what is wanted")]
            {
                let value = (x * inverse).round_ties_even() as i32;
                *low = i16::from(value as i8);
                let above = (value - i32::from(*low)) >> 8;
                *middle = i16::from(above as i8);
                *high = ((above - i32::from(*middle)) >> 8) as i16;
                upper += above;
                lowest += i32::from(*low);
            }
        }
        (upper, lowest)
    }
}

/// The value of a difference of sums, in units: one rounding where it leaves 24 bits.
#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "rounded once, at the upper digits")]
fn value(upper: i32, lowest: i32) -> f32 {
    (upper as f32).mul_add(256.0, lowest as f32)
}

/// What a block adds to an output, in units: `(code - zero_point) * scale + zero` summed with its activations. `upper` and
/// `lowest` are the sums of the codes with the upper two digits' values and with the lowest digits.
#[inline(always)]
fn term([upper, lowest]: [i32; 2], zero_point: i32, scale: f32, zero: f32, x: Block) -> f32 {
    let steps = value(upper - zero_point * x.upper, lowest - zero_point * x.lowest);
    scale.mul_add(steps, zero * x.sum)
}

multiversion! {
    /// The terms of all blocks of one row, in units; `sums` are the products of its codes with the digits, `[3, blocks]`.
    pub(crate) fn block_terms(
        sums: &[i32],
        zero_points: &[i32],
        scales: &[f32],
        zeros: &[f32],
        x: &[Block],
        terms: &mut [f32],
    ) {
        let n = terms.len();
        let (high, rest) = sums.split_at(n);
        let (middle, lowest) = rest.split_at(n);
        let (lowest, zero_points, scales, zeros) = (&lowest[..n], &zero_points[..n], &scales[..n], &zeros[..n]);
        for (b, (y, x)) in terms.iter_mut().zip(x).enumerate() {
            *y = term([high[b] * 256 + middle[b], lowest[b]], zero_points[b], scales[b], zeros[b], *x);
        }
    }
}

/// Bytes that will be wanted soon: those of the first rows, and of as many rows again in every `stride`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead<'a> {
    pub(crate) bytes: &'a [u8],
    /// Rows that lie together.
    pub(crate) height: usize,
    /// Bytes from there to the next rows that do.
    pub(crate) stride: usize,
}

/// Adds the terms of a block of some tokens to their outputs of some rows: `digits` are `[tokens, 3, block]`, each
/// digit's arranged, `y` is `[tokens, rows]`. While a single token is multiplied, as many bytes as the block has are
/// asked for from `ahead`.
///
/// # Panics
/// When the lengths do not fit or the block is not of whole words.
pub(crate) fn add_block(
    w: Words<'_>,
    digits: &[i8],
    x: &[Block],
    block: usize,
    grids: &GridBuffer,
    ahead: Option<Ahead<'_>>,
    y: &mut [f32],
) {
    let n = w.rows;
    assert!(
        (1..=MAX_BLOCK).contains(&block)
            && block.is_multiple_of(WORD)
            && n <= w.stride
            && (block / WORD - 1) * w.stride + n <= w.words.len()
            && digits.len() == x.len() * DIGITS * block
            && grids.scales().len() == n
            && grids.zeros().len() == n
            && grids.zero_points().len() == n
            && y.len() == x.len() * n,
        "{} words, {} tokens, {} digits of blocks of {block} and {} outputs of {n} rows do not fit",
        w.words.len(),
        x.len(),
        digits.len(),
        y.len()
    );
    #[cfg(target_arch = "x86_64")]
    if crate::simd::has_avx2() {
        // SAFETY: the processor has every feature the functions are compiled for.
        #[allow(unsafe_code)]
        let done = unsafe {
            match block / CHUNK {
                _ if !block.is_multiple_of(CHUNK) => 0,
                1 => add_chunks::<1>(w, digits, x, grids, ahead, y),
                2 => add_chunks::<2>(w, digits, x, grids, ahead, y),
                3 => add_chunks::<3>(w, digits, x, grids, ahead, y),
                _ => add_chunks::<4>(w, digits, x, grids, ahead, y),
            }
        };
        return add_block_portable(w, done, digits, x, block, grids, y);
    }
    add_block_portable(w, 0, digits, x, block, grids, y);
}

/// The definition of [`add_block`], from row `first` on.
fn add_block_portable(
    w: Words<'_>,
    first: usize,
    digits: &[i8],
    x: &[Block],
    block: usize,
    grids: &GridBuffer,
    y: &mut [f32],
) {
    let n = w.rows;
    for r in first..n {
        for (t, (digits, x)) in digits.chunks_exact(DIGITS * block).zip(x).enumerate() {
            let mut sums = [0; DIGITS];
            for (digits, sum) in digits.chunks_exact(block).zip(&mut sums) {
                let (even, odd) = digits.split_at(block / 2);
                for (word, (even, odd)) in
                    even.chunks_exact(WORD / 2).zip(odd.chunks_exact(WORD / 2)).enumerate()
                {
                    *sum += nibbles(&w.words[word * w.stride + r], even, odd);
                }
            }
            let sums = [sums[0] * 256 + sums[1], sums[2]];
            let term = term(sums, grids.zero_points()[r], grids.scales()[r], grids.zeros()[r], *x);
            y[t * n + r] = term.mul_add(x.unit, y[t * n + r]);
        }
    }
}

/// For blocks of so many chunks. Returns how many rows were done, whole tiles.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_chunks<const CHUNKS: usize>(
    w: Words<'_>,
    digits: &[i8],
    x: &[Block],
    grids: &GridBuffer,
    ahead: Option<Ahead<'_>>,
    y: &mut [f32],
) -> usize {
    let mut row = 0;
    if x.len() == 1 {
        while row + TILES_OF_ONE * TILE <= w.rows {
            add_tiles::<CHUNKS, TILES_OF_ONE, true>(w, row, digits, x, grids, ahead, y);
            row += TILES_OF_ONE * TILE;
        }
    } else {
        while row + TILES * TILE <= w.rows {
            add_tiles::<CHUNKS, TILES, false>(w, row, digits, x, grids, None, y);
            row += TILES * TILE;
        }
    }
    while row + TILE <= w.rows {
        add_tiles::<CHUNKS, 1, false>(w, row, digits, x, grids, None, y);
        row += TILE;
    }
    row
}

/// The tiles of rows from `row` on.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn add_tiles<const CHUNKS: usize, const N: usize, const ONE: bool>(
    w: Words<'_>,
    row: usize,
    digits: &[i8],
    x: &[Block],
    grids: &GridBuffer,
    ahead: Option<Ahead<'_>>,
    y: &mut [f32],
) {
    let (n, words, block) = (w.rows, CHUNKS * WORDS, CHUNKS * CHUNK);
    assert!(row + N * TILE <= n && (words - 1) * w.stride + n <= w.words.len());
    assert!(digits.len() == x.len() * DIGITS * block && y.len() == x.len() * n);
    let (scales, zeros, zero_points) = (grids.scales(), grids.zeros(), grids.zero_points());
    assert!(scales.len() == n && zeros.len() == n && zero_points.len() == n);
    let ahead = ahead.map(|ahead| {
        let at = row / ahead.height * ahead.stride + row % ahead.height * block / 2;
        ahead.bytes.as_ptr().wrapping_add(at)
    });
    let low = _mm256_set1_epi8(15);
    let nibbles = |chunk: usize, i: usize, j: usize| {
        // SAFETY: eight words of this line, from row + 8 j on, lie within the words.
        let word = unsafe {
            let at = (chunk * WORDS + i) * w.stride + row + j * TILE;
            _mm256_loadu_si256(w.words.as_ptr().add(at).cast())
        };
        [_mm256_and_si256(word, low), _mm256_and_si256(_mm256_srli_epi16::<4>(word), low)]
    };
    let mut codes = [[[[_mm256_setzero_si256(); 2]; N]; WORDS]; CHUNKS];
    for chunk in 0..CHUNKS {
        for i in 0..WORDS {
            for j in 0..N {
                if !ONE {
                    codes[chunk][i][j] = nibbles(chunk, i, j);
                }
            }
        }
    }
    let ones = _mm256_set1_epi16(1);
    for t in 0..x.len() {
        let mut upper = [_mm256_setzero_si256(); N];
        let mut lowest = [_mm256_setzero_si256(); N];
        for chunk in 0..CHUNKS {
            let mut sums = [[_mm256_setzero_si256(); N]; DIGITS];
            for i in 0..WORDS {
                let x = |part: usize| {
                    let mut x = [_mm256_setzero_si256(); DIGITS];
                    for digit in 0..DIGITS {
                        let at = (t * DIGITS + digit) * block + part * (block / 2);
                        let at = at + (chunk * WORDS + i) * (WORD / 2);
                        // SAFETY: these four digits of the token lie within `digits`.
                        x[digit] = unsafe {
                            _mm256_set1_epi32(digits.as_ptr().add(at).cast::<i32>().read_unaligned())
                        };
                    }
                    x
                };
                let mut add = |j: usize, codes, x: [__m256i; DIGITS]| {
                    for digit in 0..DIGITS {
                        let products = _mm256_maddubs_epi16(codes, x[digit]);
                        sums[digit][j] = _mm256_add_epi16(sums[digit][j], products);
                    }
                };
                if ONE {
                    if let Some(ahead) = ahead {
                        // As many bytes as the words of this step have.
                        let at = (chunk * WORDS + i) * N * TILE * WORD / 2;
                        prefetch(ahead.wrapping_add(at), N * TILE * WORD / 2);
                    }
                    let x = [x(0), x(1)];
                    for j in 0..N {
                        let codes = nibbles(chunk, i, j);
                        add(j, codes[0], x[0]);
                        add(j, codes[1], x[1]);
                    }
                } else {
                    for part in 0..2 {
                        let x = x(part);
                        for j in 0..N {
                            add(j, codes[chunk][i][j][part], x);
                        }
                    }
                }
            }
            for j in 0..N {
                let high = _mm256_madd_epi16(sums[0][j], _mm256_set1_epi16(256));
                let middle = _mm256_madd_epi16(sums[1][j], ones);
                upper[j] = _mm256_add_epi32(upper[j], _mm256_add_epi32(high, middle));
                lowest[j] = _mm256_add_epi32(lowest[j], _mm256_madd_epi16(sums[2][j], ones));
            }
        }
        let x = x[t];
        for j in 0..N {
            let r = row + j * TILE;
            // SAFETY: eight rows from r on have grids, and eight outputs of the token.
            unsafe {
                let scale = _mm256_loadu_ps(scales.as_ptr().add(r));
                let zero = _mm256_loadu_ps(zeros.as_ptr().add(r));
                let zero_point = _mm256_loadu_si256(zero_points.as_ptr().add(r).cast());
                let y = y.as_mut_ptr().add(t * n + r);
                let of_zero_point = |of_x| match grids.has_zero_points() {
                    true => _mm256_mullo_epi32(zero_point, _mm256_set1_epi32(of_x)),
                    false => _mm256_slli_epi32::<3>(_mm256_set1_epi32(of_x)),
                };
                let upper = _mm256_cvtepi32_ps(_mm256_sub_epi32(upper[j], of_zero_point(x.upper)));
                let lowest = _mm256_cvtepi32_ps(_mm256_sub_epi32(lowest[j], of_zero_point(x.lowest)));
                let steps = _mm256_fmadd_ps(upper, _mm256_set1_ps(256.0), lowest);
                let term = _mm256_fmadd_ps(scale, steps, _mm256_mul_ps(zero, _mm256_set1_ps(x.sum)));
                _mm256_storeu_ps(y, _mm256_fmadd_ps(term, _mm256_set1_ps(x.unit), _mm256_loadu_ps(y)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::pack::{CodeLayout, GroupGrids, Int4Matrix, PackedCodes, pack_columns, zero_points};
    use crate::runtime::kernels::int4::arrange;

    /// Values without pattern, of either sign and of several sizes.
    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.7).sin() * [1.0, 0.01, 3.0, 1e-4][i % 4]).collect()
    }

    fn split_all(x: &[f32]) -> (Block, Vec<i64>) {
        let mut digits = [const { [0i16; 16] }; DIGITS];
        let block = split(x, digits.each_mut().map(|digits| &mut digits[..x.len()]));
        assert!(digits.iter().flatten().all(|digit| (-128..128).contains(digit)));
        let value = |i: usize| digits.iter().fold(0, |sum, digit| sum * 256 + i64::from(digit[i]));
        (block, (0..x.len()).map(value).collect())
    }

    #[test]
    fn an_activation_is_the_nearest_multiple_of_the_unit() {
        let mut cases = vec![wave(16), vec![0.0; 5], vec![1.0, -1.0, 0.5], vec![f32::MAX, 1.0, -f32::MAX]];
        // On either side of what three digits hold; subnormal numbers; a wide range.
        for mantissa in [0x7e_fefd, 0x7e_fefe, 0x7e_feff, 0x7e_ff00, 0x7f_ffff] {
            cases.push(vec![f32::from_bits(0x3f80_0000 | mantissa), -3e-7, 0.75]);
        }
        cases.push(vec![1e-40, -3e-45, 0.0]);
        cases.push(vec![1e30, 1.0, 2e23, -1.5e23]);
        for x in cases {
            let (block, values) = split_all(&x);
            let unit = f64::from(block.unit);
            let largest = x.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max);
            let most = f64::from(0x7f_7f7f);
            assert!((largest / unit).round_ties_even() <= most && unit.log2().fract() == 0.0, "{x:?}");
            let half = (largest / unit * 2.0).round_ties_even();
            assert!(half > most || block.unit == f32::MIN_POSITIVE, "{x:?}");
            for (x, value) in x.iter().zip(&values) {
                assert_eq!(*value as f64, (f64::from(*x) / unit).round_ties_even(), "{x}");
            }
            let sum: i64 = values.iter().sum();
            assert_eq!(i64::from(block.upper) * 256 + i64::from(block.lowest), sum);
            assert_eq!(block.sum, sum as f32);
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (block, values) = split_all(&[1.0, bad]);
            assert!(block.unit.is_nan() && values == [0, 0]);
        }
    }

    #[test]
    fn both_builds_of_rounding_agree() {
        let x = wave(101);
        let mut a = [vec![0; 101], vec![0; 101], vec![0; 101]];
        let mut b = [vec![1; 101], vec![1; 101], vec![1; 101]];
        let sums = round(&x, 1e6, a.each_mut().map(|a| &mut a[..]));
        assert_eq!(sums, round::scalar(&x, 1e6, b.each_mut().map(|b| &mut b[..])));
        assert_eq!(a, b);
    }

    /// The promised arithmetic with integers in i64: equal bits, for every build and whatever is multiplied
    /// together, also for the largest digits and codes.
    #[test]
    fn sums_are_exact_and_grids_are_applied_once() {
        for (n, tokens, block, extreme) in [
            (8, 1, 8, false),
            (40, 1, 32, false),
            (72, 3, 32, false),
            (48, 2, 64, true),
            (16, 1, 96, false),
            (40, 5, 128, true),
            (24, 1, 128, true),
            (16, 2, 40, false),
        ] {
            let code = |r: usize, k: usize| if extreme { 15 } else { ((r * 31 + k * 7) % 16) as u8 };
            let codes: Vec<u8> = (0..n * block).map(|i| code(i / block, i % block)).collect();
            let words: Vec<[u8; 4]> = pack_columns(&codes, block).iter().map(|w| w.to_le_bytes()).collect();
            let x: Vec<f32> = if extreme { vec![-0.999_999_9; tokens * block] } else { wave(tokens * block) };
            let (mut digits, mut blocks) = (Vec::new(), Vec::new());
            for x in x.chunks(block) {
                let mut split_digits = [vec![0; block], vec![0; block], vec![0; block]];
                blocks.push(split(x, split_digits.each_mut().map(|digits| &mut digits[..])));
                for plane in split_digits {
                    let mut arranged = vec![0; block];
                    arrange(&plane, &mut arranged);
                    digits.extend(arranged);
                }
            }
            let exact = |x: f32| bf16::from_f32(x).to_f32();
            let scales: Vec<f32> = (0..n).map(|r| exact(0.01 + r as f32 * 0.003)).collect();
            let zeros: Vec<f32> = (0..n).map(|r| exact((r as f32 * 0.9).cos())).collect();
            let points: Vec<u8> = (0..n).map(|r| (r * 5 % 16) as u8).collect();
            let bytes =
                |x: &[f32]| -> Vec<u8> { x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect() };
            let (scale_bytes, zero_bytes) = (bytes(&scales), bytes(&zeros));
            let packed: Vec<u8> =
                zero_points::pack_row_major(&points, 1).iter().flat_map(|word| word.to_le_bytes()).collect();
            let nibbles = vec![0; n * block / 2];
            let codes_of = PackedCodes::new(&nibbles, CodeLayout::Rows, [n, block]).unwrap();
            for affine in [true, false] {
                let grids = match affine {
                    true => GroupGrids::RowMajorAffine { scales: &scale_bytes, zeros: &zero_bytes },
                    false => GroupGrids::RowMajor { scales: &scale_bytes, zero_points: Some(&packed) },
                };
                let matrix = Int4Matrix::new(codes_of, block, grids).unwrap();
                let mut grids = GridBuffer::default();
                matrix.grids_of_rows(0..n, 0, &mut grids);
                let w = Words { words: &words, stride: n, rows: n };
                let mut y = vec![0.25; tokens * n];
                add_block(w, &digits, &blocks, block, &grids, None, &mut y);
                let mut again = vec![0.25; tokens * n];
                add_block_portable(w, 0, &digits, &blocks, block, &grids, &mut again);
                assert_eq!(y, again, "{n} {tokens} {block}");
                for (i, y) in y.iter().enumerate() {
                    let (t, r) = (i / n, i % n);
                    let unit = blocks[t].unit;
                    let integer = |k: usize| (x[t * block + k] / unit).round_ties_even() as i64;
                    let point = if affine { 8 } else { i64::from(points[r]) };
                    let steps: i64 = (0..block).map(|k| integer(k) * (i64::from(code(r, k)) - point)).sum();
                    let sum: i64 = (0..block).map(integer).sum();
                    // The upper digits' share is rounded once, and so is its sum with the lowest digits'.
                    let rounded =
                        |x: i64, lowest: i64| (((x - lowest) / 256) as f32).mul_add(256.0, lowest as f32);
                    let low = |k: usize| i64::from(integer(k) as i8);
                    let lowest: i64 = (0..block).map(|k| low(k) * (i64::from(code(r, k)) - point)).sum();
                    let zero = if affine { zeros[r] } else { 0.0 };
                    let all = rounded(sum, (0..block).map(low).sum());
                    let term = scales[r].mul_add(rounded(steps, lowest), zero * all);
                    assert_eq!(y.to_bits(), term.mul_add(unit, 0.25).to_bits(), "{n} {tokens} {block} {i}");
                }
            }
        }
    }
}
