//! The one product of f64 matrices that everything is made of.

use crate::simd::multiversion;

/// Rows of a tile.
pub(super) const ROWS: usize = 4;
/// Columns of a tile.
pub(super) const COLUMNS: usize = 8;

multiversion! {
    /// `c[i][j] += sum over k of a[k][i] * b[k][j]`, `k` rising, one rounding a term.
    fn tile(a: &[[f64; ROWS]], b: &[[f64; COLUMNS]], c: &mut [[f64; COLUMNS]; ROWS]) {
        let mut sums = *c;
        for (a, b) in a.iter().zip(b) {
            for i in 0..ROWS {
                for j in 0..COLUMNS {
                    sums[i][j] = a[i].mul_add(b[j], sums[i][j]);
                }
            }
        }
        *c = sums;
    }
}

/// Adds the product of packed rows and a packed panel to up to four rows of `c` (`[rows, stride]`), at
/// the columns from `column` on. What reaches beyond the last column is left out.
pub(super) fn add_products(
    a: &[[f64; ROWS]],
    b: &[[f64; COLUMNS]],
    c: &mut [f64],
    stride: usize,
    column: usize,
) {
    assert_eq!(a.len(), b.len(), "as many terms on both sides");
    // Whole tiles are the rule, and copies of a known length are no calls.
    if c.len() > (ROWS - 1) * stride && column + COLUMNS <= stride {
        let mut sums: [[f64; COLUMNS]; ROWS] =
            std::array::from_fn(|i| *c[i * stride + column..].first_chunk().expect("a whole tile"));
        tile(a, b, &mut sums);
        for (i, sums) in sums.iter().enumerate() {
            *c[i * stride + column..].first_chunk_mut().expect("a whole tile") = *sums;
        }
        return;
    }
    let width = COLUMNS.min(stride - column);
    let mut sums = [[0.0; COLUMNS]; ROWS];
    for (sums, c) in sums.iter_mut().zip(c.chunks(stride)) {
        sums[..width].copy_from_slice(&c[column..column + width]);
    }
    tile(a, b, &mut sums);
    for (sums, c) in sums.iter().zip(c.chunks_mut(stride)) {
        c[column..column + width].copy_from_slice(&sums[..width]);
    }
}

/// Four rows of a left factor, term by term: `element(k, row)`.
pub(super) fn pack_rows(terms: usize, element: impl Fn(usize, usize) -> f64) -> Vec<[f64; ROWS]> {
    (0..terms).map(|k| std::array::from_fn(|row| element(k, row))).collect()
}

/// A right factor of so many columns in panels, each `[terms][COLUMNS]`: `element(k, column)`. The last
/// panel is filled up with zeros.
pub(super) fn panels(
    columns: usize,
    terms: usize,
    element: impl Fn(usize, usize) -> f64 + Sync,
) -> Vec<[f64; COLUMNS]> {
    use rayon::prelude::*;
    let mut packed = vec![[0.0; COLUMNS]; columns.div_ceil(COLUMNS) * terms];
    packed.par_chunks_mut(terms.max(1)).enumerate().for_each(|(panel, packed)| {
        for (k, packed) in packed.iter_mut().enumerate() {
            for (j, x) in packed.iter_mut().enumerate() {
                let column = panel * COLUMNS + j;
                *x = if column < columns { element(k, column) } else { 0.0 };
            }
        }
    });
    packed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_of_the_tile_agree_and_sum_in_order() {
        let value = |i: usize| ((i * 2_654_435_761) % 1009) as f64 / 977.0 - 0.5;
        let a: Vec<[f64; ROWS]> = (0..37).map(|k| std::array::from_fn(|i| value(k * 7 + i))).collect();
        let b: Vec<[f64; COLUMNS]> =
            (0..37).map(|k| std::array::from_fn(|j| value(k * 11 + j + 5))).collect();
        let start: [[f64; COLUMNS]; ROWS] = std::array::from_fn(|i| std::array::from_fn(|j| value(i * j)));
        let (mut fast, mut slow) = (start, start);
        tile(&a, &b, &mut fast);
        tile::scalar(&a, &b, &mut slow);
        assert_eq!(fast, slow);
        for i in 0..ROWS {
            for j in 0..COLUMNS {
                let sum = (0..37).fold(start[i][j], |sum, k| a[k][i].mul_add(b[k][j], sum));
                assert_eq!(fast[i][j], sum);
            }
        }
    }

    #[test]
    fn columns_beyond_the_last_are_left_alone() {
        let a = pack_rows(2, |k, row| (k + row) as f64);
        let b = panels(10, 2, |k, column| (k * 10 + column) as f64);
        let mut c = vec![0.0; 3 * 10];
        add_products(&a, &b[2..], &mut c, 10, 8);
        for row in 0..3 {
            assert!(c[row * 10..][..8].iter().all(|x| *x == 0.0));
            for column in 8..10 {
                let expected = (row * column + (1 + row) * (10 + column)) as f64;
                assert_eq!(c[row * 10 + column], expected);
            }
        }
    }
}
