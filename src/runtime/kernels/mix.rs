//! Weighted sums of value rows, `out[r] = sum over j of p[r][j] v[j]`, positions in order.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::rows::Rows;

/// Columns of a tile.
const WIDTH: usize = 16;
/// Positions after which the next tile gets its turn, so that a tile's values stay in the cache.
/// The sums go on from where they were: no effect on the results.
const POSITIONS: usize = 256;

/// Fills `out`, one row per row of `p`; `v` holds `p.len` rows of `width` elements.
///
/// A zero weight leaves a sum as it is, so that rows which do not see the same positions can share
/// one call.
pub(crate) fn mix(p: Rows<'_>, v: &[f32], width: usize, out: &mut [f32]) {
    assert!(v.len() == p.len * width && out.len() == p.count() * width, "shapes differ");
    out.fill(0.0);
    for start in (0..p.len).step_by(POSITIONS) {
        let end = (start + POSITIONS).min(p.len);
        let v = &v[start * width..end * width];
        let pr = |r: usize| &p.row(r)[start..end];
        for column in (0..width / WIDTH * WIDTH).step_by(WIDTH) {
            let mut r = 0;
            while r + 4 <= p.count() {
                tile([pr(r), pr(r + 1), pr(r + 2), pr(r + 3)], v, width, column, &mut out[r * width..]);
                r += 4;
            }
            for r in r..p.count() {
                tile([pr(r)], v, width, column, &mut out[r * width..]);
            }
        }
        let rest = width / WIDTH * WIDTH..width;
        for (r, out) in out.chunks_exact_mut(width).enumerate() {
            for (v, p) in v.chunks_exact(width).zip(pr(r)) {
                for (out, v) in out[rest.clone()].iter_mut().zip(&v[rest.clone()]) {
                    *out = p.mul_add(*v, *out);
                }
            }
        }
    }
}

/// Adds to `WIDTH` columns of `M` rows of `out`.
#[inline(always)]
fn tile<const M: usize>(p: [&[f32]; M], v: &[f32], width: usize, column: usize, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::has_avx2() {
        // SAFETY: the processor has every feature the function is compiled for.
        #[allow(unsafe_code)]
        return unsafe { tile_avx2(p, v, width, column, out) };
    }
    tile_portable(p, v, width, column, out);
}

/// The definition of [`tile`].
fn tile_portable<const M: usize>(p: [&[f32]; M], v: &[f32], width: usize, column: usize, out: &mut [f32]) {
    for (r, p) in p.into_iter().enumerate() {
        let out = &mut out[r * width + column..][..WIDTH];
        for (p, v) in p.iter().zip(v.chunks_exact(width)) {
            for (out, v) in out.iter_mut().zip(&v[column..]) {
                *out = p.mul_add(*v, *out);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn tile_avx2<const M: usize>(p: [&[f32]; M], v: &[f32], width: usize, column: usize, out: &mut [f32]) {
    let positions = p[0].len();
    assert!(
        p.iter().all(|p| p.len() == positions)
            && v.len() == positions * width
            && column + WIDTH <= width
            && out.len() >= M * width,
        "shapes differ"
    );
    // SAFETY: column + 16 <= width and row r of `out`, for r < M, is inside it.
    let mut sums: [[__m256; 2]; M] = std::array::from_fn(|r| unsafe {
        let out = out.as_ptr().add(r * width + column);
        [_mm256_loadu_ps(out), _mm256_loadu_ps(out.add(8))]
    });
    for j in 0..positions {
        // SAFETY: j < positions, the rows of `v` and the length of every row of `p`.
        let (a, b) = unsafe {
            let v = v.as_ptr().add(j * width + column);
            (_mm256_loadu_ps(v), _mm256_loadu_ps(v.add(8)))
        };
        for (sums, p) in sums.iter_mut().zip(p) {
            // SAFETY: as above.
            let p = _mm256_set1_ps(unsafe { *p.get_unchecked(j) });
            sums[0] = _mm256_fmadd_ps(p, a, sums[0]);
            sums[1] = _mm256_fmadd_ps(p, b, sums[1]);
        }
    }
    for (r, [a, b]) in sums.into_iter().enumerate() {
        // SAFETY: as for the loads.
        unsafe {
            let out = out.as_mut_ptr().add(r * width + column);
            _mm256_storeu_ps(out, a);
            _mm256_storeu_ps(out.add(8), b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_run_over_positions_in_order_at_every_shape() {
        for (rows, positions, width) in [(1, 1, 1), (4, 300, 64), (5, 517, 40), (9, 20, 7), (3, 256, 16)] {
            let p: Vec<f32> = (0..rows * positions).map(|i| (i as f32 * 0.7).sin()).collect();
            let v: Vec<f32> = (0..positions * width).map(|i| (i as f32 * 0.3).cos()).collect();
            let mut out = vec![f32::NAN; rows * width];
            mix(Rows::dense(&p, positions), &v, width, &mut out);
            for r in 0..rows {
                for c in 0..width {
                    let expected =
                        (0..positions).fold(0.0, |s, j| p[r * positions + j].mul_add(v[j * width + c], s));
                    assert_eq!(out[r * width + c].to_bits(), f32::to_bits(expected), "{r} {c}");
                }
            }
        }
    }

    #[test]
    fn both_builds_of_the_tile_agree() {
        let p: Vec<f32> = (0..4 * 100).map(|i| (i as f32 * 0.7).sin()).collect();
        let v: Vec<f32> = (0..100 * 48).map(|i| (i as f32 * 0.3).cos()).collect();
        let ps: [&[f32]; 4] = std::array::from_fn(|r| &p[r * 100..][..100]);
        let (mut a, mut b) = (vec![0.5; 4 * 48], vec![0.5; 4 * 48]);
        tile(ps, &v, 48, 16, &mut a);
        tile_portable(ps, &v, 48, 16, &mut b);
        assert_eq!(a, b);
    }
}
