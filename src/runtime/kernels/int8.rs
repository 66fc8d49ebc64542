//! Integer products: activation codes (i16, so that they need no widening) with i8 weight codes,
//! summed exactly in i32.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use rayon::prelude::*;

use crate::simd::multiversion;
use crate::tensor::{EXPONENT_BITS, amax_bits};

/// Longest row: with codes of magnitude up to 128 the sum stays within an i32.
pub(crate) const MAX_K: usize = (i32::MAX / (128 * 128)) as usize;

const STEP: usize = 16;
const TILE_X: usize = 3;
const TILE_W: usize = 4;
/// Activation codes that pass together.
const X_BLOCK: usize = 1 << 16;

/// Quantizes one token: symmetric, scale = absmax / 127, half to even. Returns the scale; that of a
/// row of zeros is 0, and that of a row with a NaN or an infinity is not finite.
pub(crate) fn quantize_token(x: &[f32], codes: &mut [i16]) -> f32 {
    let absmax = amax_bits(x);
    if absmax >= EXPONENT_BITS {
        codes.fill(0);
        return f32::NAN;
    }
    let scale = f32::from_bits(absmax) / 127.0;
    if scale == 0.0 {
        codes.fill(0);
        return 0.0;
    }
    round_to_codes(x, scale, codes);
    scale
}

/// The same of tokens `[tokens, k]`, in parallel: codes and scales.
pub(crate) fn quantize_tokens(x: &[f32], k: usize) -> (Vec<i16>, Vec<f32>) {
    let mut codes = vec![0; x.len()];
    let tokens = codes.par_chunks_mut(k).zip(x.par_chunks(k));
    let scales = tokens.map(|(codes, x)| quantize_token(x, codes)).collect();
    (codes, scales)
}

multiversion! {
    fn round_to_codes(x: &[f32], scale: f32, codes: &mut [i16]) {
        for (code, x) in codes.iter_mut().zip(x) {
            // In range but for scales so small that they have lost bits.
            #[expect(clippy::cast_possible_truncation, reason = "within 127")]
            let rounded = (x / scale).round_ties_even().clamp(-127.0, 127.0) as i16;
            *code = rounded;
        }
    }
}

/// Passes `x[r] . w[c]` to `put(r, c, sum)`; `x` holds rows of length `k` without gaps, `w` too.
pub(crate) fn multiply(x: &[i16], w: &[i8], k: usize, mut put: impl FnMut(usize, usize, i32)) {
    assert!(k <= MAX_K, "sums of this length could overflow");
    let n = w.len() / k;
    let wr = |c: usize| &w[c * k..][..k];
    // Some tokens at a time, so that they stay in the cache while the weights pass.
    let tokens = (X_BLOCK / k).max(TILE_X) / TILE_X * TILE_X;
    for (i, x) in x.chunks(tokens * k).enumerate() {
        let mut put = |r: usize, c: usize, sum: i32| put(i * tokens + r, c, sum);
        let m = x.len() / k;
        let mut c = 0;
        while c + TILE_W <= n {
            let w = std::array::from_fn::<_, TILE_W, _>(|j| wr(c + j));
            strip(x, m, k, w, |r, j, sum| put(r, c + j, sum));
            c += TILE_W;
        }
        for c in c..n {
            strip(x, m, k, [wr(c)], |r, _, sum| put(r, c, sum));
        }
    }
}

fn strip<const N: usize>(
    x: &[i16],
    m: usize,
    k: usize,
    w: [&[i8]; N],
    mut put: impl FnMut(usize, usize, i32),
) {
    let mut tokens = |r: usize, sums: &[[i32; N]]| {
        for (i, sums) in sums.iter().enumerate() {
            for (j, sum) in sums.iter().enumerate() {
                put(r + i, j, *sum);
            }
        }
    };
    let xr = |r: usize| &x[r * k..][..k];
    let mut r = 0;
    while r + TILE_X <= m {
        tokens(r, &tile([xr(r), xr(r + 1), xr(r + 2)], w));
        r += TILE_X;
    }
    for r in r..m {
        tokens(r, &tile([xr(r)], w));
    }
}

/// Dot products of `M` rows with `N` rows of the same length.
#[inline(always)]
fn tile<const M: usize, const N: usize>(x: [&[i16]; M], w: [&[i8]; N]) -> [[i32; N]; M] {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::has_avx2() {
        // SAFETY: the processor has every feature the function is compiled for.
        #[allow(unsafe_code)]
        return unsafe { tile_avx2(x, w) };
    }
    tile_portable(x, w)
}

/// The definition of [`tile`]; sums are exact, so their order does not matter.
fn tile_portable<const M: usize, const N: usize>(x: [&[i16]; M], w: [&[i8]; N]) -> [[i32; N]; M] {
    x.map(|x| w.map(|w| x.iter().zip(w).map(|(x, w)| i32::from(*x) * i32::from(*w)).sum()))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn tile_avx2<const M: usize, const N: usize>(x: [&[i16]; M], w: [&[i8]; N]) -> [[i32; N]; M] {
    let k = x[0].len();
    assert!(x.iter().all(|x| x.len() == k) && w.iter().all(|w| w.len() == k), "rows differ in length");
    let whole = k / STEP * STEP;
    let mut sums = [[_mm256_setzero_si256(); N]; M];
    let mut i = 0;
    while i < whole {
        let mut xs = [_mm256_setzero_si256(); M];
        for r in 0..M {
            // SAFETY: i + 16 <= k, the length of every row.
            xs[r] = unsafe { _mm256_loadu_si256(x[r].as_ptr().add(i).cast()) };
        }
        for j in 0..N {
            // SAFETY: as above.
            let w = unsafe { _mm256_cvtepi8_epi16(_mm_loadu_si128(w[j].as_ptr().add(i).cast())) };
            for r in 0..M {
                // Pairs of products, at most 2 * 128 * 128: no overflow, unlike with maddubs.
                sums[r][j] = _mm256_add_epi32(sums[r][j], _mm256_madd_epi16(xs[r], w));
            }
        }
        i += STEP;
    }
    let mut out = [[0; N]; M];
    if whole < k {
        out = tile_portable(x.map(|x| &x[whole..]), w.map(|w| &w[whole..]));
    }
    for r in 0..M {
        for j in 0..N {
            let sum = sums[r][j];
            let four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            out[r][j] += _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two)));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(x: &[i16], w: &[i8]) -> i64 {
        x.iter().zip(w).map(|(x, w)| i64::from(*x) * i64::from(*w)).sum()
    }

    #[test]
    fn sums_are_exact_at_every_shape_and_at_the_extremes() {
        for (m, n, k) in [(1, 1, 1), (1, 5, 33), (2, 4, 16), (3, 9, 100), (7, 6, 515), (8, 5, 16_384)] {
            let x: Vec<i16> = (0..m * k).map(|i| (i * 7919 % 255) as i16 - 127).collect();
            let w: Vec<i8> = (0..n * k).map(|i| ((i * 104_729 % 256) as i16 - 128) as i8).collect();
            let mut seen = 0;
            multiply(&x, &w, k, |r, c, sum| {
                assert_eq!(i64::from(sum), naive(&x[r * k..][..k], &w[c * k..][..k]), "{m} {n} {k}");
                seen += 1;
            });
            assert_eq!(seen, m * n);
        }
        let (x, w) = (vec![-128i16; MAX_K], vec![-128i8; MAX_K]);
        multiply(&x, &w, MAX_K, |_, _, sum| assert_eq!(i64::from(sum), (MAX_K as i64) << 14));
    }

    #[test]
    fn both_builds_of_the_tile_agree() {
        let x: Vec<i16> = (0..3 * 1000).map(|i| (i * 31 % 255) as i16 - 127).collect();
        let w: Vec<i8> = (0..4 * 1000).map(|i| (i * 57 % 256) as u8 as i8).collect();
        let xs: [&[i16]; 3] = std::array::from_fn(|r| &x[r * 1000..][..1000]);
        let ws: [&[i8]; 4] = std::array::from_fn(|c| &w[c * 1000..][..1000]);
        assert_eq!(tile(xs, ws), tile_portable(xs, ws));
    }

    #[test]
    fn tokens_quantize_to_127_half_to_even() {
        let mut codes = [9; 6];
        // The scale is 1: codes are the values, rounded.
        assert_eq!(quantize_token(&[127.0, -126.5, 0.5, 1.5, -2.5, 0.49], &mut codes), 1.0);
        assert_eq!(codes, [127, -126, 0, 2, -2, 0]);
        assert_eq!(quantize_token(&[0.0; 6], &mut codes), 0.0);
        assert_eq!(codes, [0; 6]);
        assert!(quantize_token(&[1.0, f32::NAN, 0.0, 0.0, 0.0, 0.0], &mut codes).is_nan());
        assert!(quantize_token(&[1.0, f32::INFINITY, 0.0, 0.0, 0.0, 0.0], &mut codes).is_nan());
        let x: Vec<f32> = (0..99).map(|i| (i as f32 * 0.37).sin()).collect();
        let (mut a, mut b) = (vec![0; 99], vec![1; 99]);
        round_to_codes(&x, 1.0 / 127.0, &mut a);
        round_to_codes::scalar(&x, 1.0 / 127.0, &mut b);
        assert_eq!(a, b);
        // A scale so small that it has lost bits must not push codes over the edge.
        quantize_token(&[1e-43, -1e-43, 0.0, 0.0, 0.0, 0.0], &mut codes);
        assert!(codes.iter().all(|c| (-127..=127).contains(c)), "{codes:?}");
    }
}
