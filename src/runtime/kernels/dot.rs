//! Products of f32 rows with weight rows, `y = x W^T`, on one thread.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::ops::Range;

use super::rows::{Row, Rows};

/// Lanes of a running sum; part of the definition of the results.
pub(crate) const LANES: usize = 8;
/// Elements that are summed before the lanes are added up; part of the definition of the results.
/// Four weight rows and three activation rows of this length fill a first-level cache.
pub(crate) const K_BLOCK: usize = 512;
/// Elements that a lane's running sum takes up before it is put aside and starts again at zero; part
/// of the definition of the results. Two levels of short sums lose less than one long one: 5 dB at
/// the model's row lengths.
pub(crate) const SEGMENT: usize = 128;

/// Activation rows of a full tile: with [`TILE_W`], as many sums as there are registers for.
const TILE_X: usize = 3;
/// Weight rows of a full tile.
const TILE_W: usize = 4;

/// `y[r * stride + c] = x[r] . w[c]`.
pub(crate) fn multiply<R: Row>(x: Rows<'_>, w: &[R], y: &mut [f32], stride: usize) {
    // A tile of weight rows from end to end before the next: a processor foresees few streams, and long ones.
    for (w, first) in w.chunks(TILE_W).zip((0..).step_by(TILE_W)) {
        for range in k_blocks(x.len) {
            block(x, range.clone(), w.len(), |c| w[c].slice(range.clone()), &mut y[first..], stride);
        }
    }
}

/// The same for `n` rows that have to be decoded: `decode(k, out)` writes elements `k` of every row to
/// `out`, `[n, k.len()]`.
///
/// One block at a time of all `n` rows is decoded, into `panel`, so `n` should be small.
pub(crate) fn multiply_decoded(
    x: Rows<'_>,
    n: usize,
    decode: impl Fn(Range<usize>, &mut [f32]),
    panel: &mut Vec<f32>,
    y: &mut [f32],
    stride: usize,
) {
    for range in k_blocks(x.len) {
        let len = range.len();
        panel.resize(n * len, 0.0);
        decode(range.clone(), panel);
        block(x, range, n, |c| &panel[c * len..][..len], y, stride);
    }
}

fn k_blocks(k: usize) -> impl Iterator<Item = Range<usize>> {
    (0..k).step_by(K_BLOCK).map(move |start| start..(start + K_BLOCK).min(k))
}

/// One block of K: sets `y` if it is the first, adds to it otherwise.
fn block<R: Row>(
    x: Rows<'_>,
    k: Range<usize>,
    n: usize,
    w: impl Fn(usize) -> R,
    y: &mut [f32],
    stride: usize,
) {
    let mut r = 0;
    while r < x.count() {
        let xr = |i: usize| &x.row(r + i)[k.clone()];
        let y = &mut y[r * stride..];
        let first = k.start == 0;
        // Four rows, the query heads of a key head, go as two pairs.
        r += match x.count() - r {
            1 => strip([xr(0)], n, &w, y, stride, first),
            2 | 4 => strip([xr(0), xr(1)], n, &w, y, stride, first),
            _ => strip::<R, TILE_X>([xr(0), xr(1), xr(2)], n, &w, y, stride, first),
        };
    }
}

/// `M` rows of x against all rows of w; returns `M`.
fn strip<R: Row, const M: usize>(
    x: [&[f32]; M],
    n: usize,
    w: &impl Fn(usize) -> R,
    y: &mut [f32],
    stride: usize,
    first: bool,
) -> usize {
    let mut c = 0;
    while c + TILE_W <= n {
        put(&tile(x, std::array::from_fn::<_, TILE_W, _>(|j| w(c + j))), &mut y[c..], stride, first);
        c += TILE_W;
    }
    for c in c..n {
        put(&tile(x, [w(c)]), &mut y[c..], stride, first);
    }
    M
}

#[inline(always)]
fn put<const M: usize, const N: usize>(sums: &[[f32; N]; M], y: &mut [f32], stride: usize, first: bool) {
    for (r, sums) in sums.iter().enumerate() {
        for (y, sum) in y[r * stride..][..N].iter_mut().zip(sums) {
            *y = if first { *sum } else { *y + sum };
        }
    }
}

/// The dot products of `M` rows with `N` rows of the same length; `N` is at most 4.
#[inline(always)]
fn tile<R: Row, const M: usize, const N: usize>(x: [&[f32]; M], w: [R; N]) -> [[f32; N]; M] {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::has_avx2() {
        // SAFETY: the processor has every feature the function is compiled for.
        #[allow(unsafe_code)]
        return unsafe { tile_avx2(x, w) };
    }
    tile_portable(x, w)
}

/// The definition of [`tile`].
fn tile_portable<R: Row, const M: usize, const N: usize>(x: [&[f32]; M], w: [R; N]) -> [[f32; N]; M] {
    x.map(|x| {
        w.map(|w| {
            assert_eq!(x.len(), w.len());
            let mut totals = [0.0f32; LANES];
            for start in (0..x.len()).step_by(SEGMENT) {
                let mut lanes = [0.0f32; LANES];
                for k in start..(start + SEGMENT).min(x.len()) {
                    lanes[k % LANES] = x[k].mul_add(w.get(k), lanes[k % LANES]);
                }
                for (total, lane) in totals.iter_mut().zip(lanes) {
                    *total += lane;
                }
            }
            let [a, b, c, d, e, f, g, h] = totals;
            ((a + e) + (c + g)) + ((b + f) + (d + h))
        })
    })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn tile_avx2<R: Row, const M: usize, const N: usize>(x: [&[f32]; M], w: [R; N]) -> [[f32; N]; M] {
    let k = x[0].len();
    assert!(x.iter().all(|x| x.len() == k) && w.iter().all(|w| w.len() == k), "rows differ in length");
    let mut totals = [[_mm256_setzero_ps(); N]; M];
    for start in (0..k).step_by(SEGMENT) {
        let end = (start + SEGMENT).min(k);
        let whole = start + (end - start) / LANES * LANES;
        let mut sums = [[_mm256_setzero_ps(); N]; M];
        let mut i = start;
        while i < whole {
            let mut xs = [_mm256_setzero_ps(); M];
            for r in 0..M {
                // SAFETY: i + 8 <= k, the length of every row.
                xs[r] = unsafe { _mm256_loadu_ps(x[r].as_ptr().add(i)) };
            }
            for j in 0..N {
                // SAFETY: as above.
                let w = unsafe { w[j].load(i) };
                for r in 0..M {
                    sums[r][j] = _mm256_fmadd_ps(xs[r], w, sums[r][j]);
                }
            }
            i += LANES;
        }
        if whole < end {
            for (sums, x) in sums.iter_mut().zip(x) {
                for (sum, w) in sums.iter_mut().zip(w) {
                    let mut lanes = [0.0; LANES];
                    // SAFETY: the array has eight elements.
                    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), *sum) };
                    for i in whole..end {
                        lanes[i - whole] = x[i].mul_add(w.get(i), lanes[i - whole]);
                    }
                    // SAFETY: as above.
                    *sum = unsafe { _mm256_loadu_ps(lanes.as_ptr()) };
                }
            }
        }
        for r in 0..M {
            for j in 0..N {
                totals[r][j] = _mm256_add_ps(totals[r][j], sums[r][j]);
            }
        }
    }
    let mut out = [[0.0; N]; M];
    for r in 0..M {
        let mut four = [_mm256_setzero_ps(); 4];
        four[..N].copy_from_slice(&totals[r]);
        out[r].copy_from_slice(&sum_lanes(four)[..N]);
    }
    out
}

/// Adds up the lanes of four running sums, halves onto halves.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn sum_lanes(sums: [__m256; 4]) -> [f32; 4] {
    let mut halves = [_mm_setzero_ps(); 4];
    for i in 0..4 {
        halves[i] = _mm_add_ps(_mm256_castps256_ps128(sums[i]), _mm256_extractf128_ps::<1>(sums[i]));
    }
    let [a, b, c, d] = halves;
    // Lane i of all four beside each other.
    let (ab, cd) = (_mm_unpacklo_ps(a, b), _mm_unpacklo_ps(c, d));
    let (lane0, lane1) = (_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
    let (ab, cd) = (_mm_unpackhi_ps(a, b), _mm_unpackhi_ps(c, d));
    let (lane2, lane3) = (_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
    let sum = _mm_add_ps(_mm_add_ps(lane0, lane2), _mm_add_ps(lane1, lane3));
    let mut out = [0.0; 4];
    // SAFETY: the array has four elements.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), sum) };
    out
}

#[cfg(test)]
mod tests {
    use super::super::rows::{Bf16Row, F16Row, F32Row, I8Row};
    use super::*;

    fn wave(n: usize, step: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * step).sin()).collect()
    }

    /// The definition, for one output.
    fn one(x: &[f32], w: &[f32]) -> f32 {
        let blocks = x.chunks(K_BLOCK).zip(w.chunks(K_BLOCK));
        blocks.map(|(x, w)| tile_portable([x], [w])[0][0]).reduce(|a, b| a + b).unwrap()
    }

    #[test]
    fn every_output_is_the_same_sum_whatever_it_is_computed_with() {
        for (m, n, k) in [(1, 1, 1), (1, 9, 8), (2, 5, 100), (3, 4, 512), (4, 7, 1029), (8, 6, 1536)] {
            let (x, w) = (wave(m * k, 0.7), wave(n * k, 0.3));
            let rows: Vec<&[f32]> = w.chunks(k).collect();
            let (mut direct, mut decoded) = (vec![f32::NAN; m * n], vec![f32::NAN; m * n]);
            multiply(Rows::dense(&x, k), &rows, &mut direct, n);
            let decode = |k: Range<usize>, out: &mut [f32]| {
                for (row, out) in rows.iter().zip(out.chunks_mut(k.len())) {
                    out.copy_from_slice(&row[k.clone()]);
                }
            };
            multiply_decoded(Rows::dense(&x, k), n, decode, &mut Vec::new(), &mut decoded, n);
            for (i, (a, b)) in direct.iter().zip(&decoded).enumerate() {
                let expected = one(&x[i / n * k..][..k], rows[i % n]);
                assert_eq!(a.to_bits(), expected.to_bits(), "{m} {n} {k}");
                assert_eq!(b.to_bits(), expected.to_bits(), "{m} {n} {k}");
                let exact: f64 = (x[i / n * k..][..k].iter().zip(rows[i % n]))
                    .map(|(x, w)| f64::from(*x) * f64::from(*w))
                    .sum();
                assert!((f64::from(expected) - exact).abs() < 1e-6 * (k as f64).sqrt().max(1.0), "{k}");
            }
        }
    }

    #[test]
    fn both_builds_of_the_tile_agree_for_every_kind_of_row() {
        fn check<R: Row>(row: impl Fn(usize) -> R, k: usize) {
            let x = wave(3 * k, 0.9);
            let x = |r: usize| &x[r * k..][..k];
            let w: [R; 4] = std::array::from_fn(row);
            assert_eq!(tile([x(0), x(1), x(2)], w), tile_portable([x(0), x(1), x(2)], w));
            assert_eq!(tile([x(0)], [w[1]]), tile_portable([x(0)], [w[1]]));
        }
        for k in [1, 7, 8, 21, 160] {
            // Finite as bf16, as f16 and as f32.
            let bytes: Vec<u8> = (0..4 * k * 4).map(|i| (i * 37 % 120) as u8 / 2).collect();
            let floats = wave(4 * k, 0.2);
            check(|c| &floats[c * k..][..k], k);
            check(|c| F32Row(&bytes[c * k * 4..][..k * 4]), k);
            check(|c| F16Row(&bytes[c * k * 2..][..k * 2]), k);
            check(|c| Bf16Row(&bytes[c * k * 2..][..k * 2]), k);
            let codes: Vec<u8> = bytes.iter().map(|b| b.wrapping_mul(5)).collect();
            check(|c| I8Row(&codes[c * k..][..k]), k);
        }
    }
}
