//! The upper Cholesky factor of an inverse, without the inverse.
//!
//! With `A` the matrix read from its last row and column to its first, `A = L L'` and `M = L^-1`, the
//! factor is `M` read in the same reversed way: it is upper triangular, and its transpose times itself is
//! the inverse. That is one factorization and one triangular inverse instead of two factorizations and a
//! full inverse.

use rayon::prelude::*;

use crate::simd::multiversion;

use super::dense::{COLUMNS, ROWS, add_products, pack_rows, panels};

/// Rows and columns that are factored together.
const BLOCK: usize = 64;

/// A matrix that has no Cholesky factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotPositive {
    /// The column at which it showed.
    pub column: usize,
}

impl std::fmt::Display for NotPositive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the Hessian is not positive at column {}", self.column)
    }
}

/// `U` with `U' U = H^-1`, `H` symmetric `[n, n]` given by its elements, in panels of [`COLUMNS`] columns,
/// each `[rows up to its last][COLUMNS]`.
pub(super) fn upper_of_inverse(
    n: usize,
    element: impl Fn(usize, usize) -> f64 + Sync,
) -> Result<Vec<Vec<[f64; COLUMNS]>>, NotPositive> {
    let mut a = vec![0.0; n * n];
    a.par_chunks_mut(n).enumerate().for_each(|(i, row)| {
        for (j, x) in row.iter_mut().take(i + 1).enumerate() {
            *x = element(n - 1 - i, n - 1 - j);
        }
    });
    factor(&mut a, n).map_err(|column| NotPositive { column: n - 1 - column })?;
    invert(&mut a, n);
    let panel = |panel: usize| -> Vec<[f64; COLUMNS]> {
        let rows = ((panel + 1) * COLUMNS).min(n);
        let row = |i: usize| {
            std::array::from_fn(|j| {
                let j = panel * COLUMNS + j;
                if i <= j && j < n { a[(n - 1 - i) * n + n - 1 - j] } else { 0.0 }
            })
        };
        (0..rows).map(row).collect()
    };
    Ok((0..n.div_ceil(COLUMNS)).into_par_iter().map(panel).collect())
}

/// The lower Cholesky factor in place of the lower part; the column where there is none.
fn factor(a: &mut [f64], n: usize) -> Result<(), usize> {
    for start in (0..n).step_by(BLOCK) {
        let end = (start + BLOCK).min(n);
        let size = end - start;
        let mut block: Vec<f64> =
            (start..end).flat_map(|i| &a[i * n + start..i * n + end]).copied().collect();
        factor_block(&mut block, size).map_err(|i| start + i)?;
        for (i, row) in block.chunks_exact(size).enumerate() {
            a[(start + i) * n + start..][..=i].copy_from_slice(&row[..=i]);
        }
        let columns: Vec<f64> = (0..size * size).map(|i| block[i % size * size + i / size]).collect();
        let rest = &mut a[end * n..];
        rest.par_chunks_mut(n).for_each(|row| divide_row(&mut row[start..end], &columns));
        // What is left, minus the outer product of the columns just made.
        let columns = panels(n - end, size, |k, i| rest[i * n + start + k]);
        rest.par_chunks_mut(n * ROWS).enumerate().for_each(|(strip, rows)| {
            let left = pack_rows(size, |k, row| rows.get(row * n + start + k).map_or(0.0, |x| -x));
            let last = (strip * ROWS + ROWS).min(n - end);
            for panel in 0..last.div_ceil(COLUMNS) {
                let b = &columns[panel * size..][..size];
                add_products(&left, b, rows, n, end + panel * COLUMNS);
            }
        });
    }
    Ok(())
}

multiversion! {
    /// The same of one block, `[size, size]`.
    fn factor_block(a: &mut [f64], size: usize) -> Result<(), usize> {
        for i in 0..size {
            for j in 0..=i {
                let sum =
                    (0..j).fold(a[i * size + j], |sum, k| (-a[i * size + k]).mul_add(a[j * size + k], sum));
                if i > j {
                    a[i * size + j] = sum / a[j * size + j];
                } else if sum > 0.0 && sum.is_finite() {
                    a[i * size + i] = sum.sqrt();
                } else {
                    return Err(i);
                }
            }
        }
        Ok(())
    }
}

multiversion! {
    /// A row times the inverse of the transpose of a lower triangular block that is given by its columns.
    /// Terms are taken from an element in the order of the columns.
    fn divide_row(row: &mut [f64], columns: &[f64]) {
        for (j, column) in columns.chunks_exact(row.len()).enumerate() {
            let x = row[j] / column[j];
            row[j] = x;
            for (sum, l) in row[j + 1..].iter_mut().zip(&column[j + 1..]) {
                *sum = (-x).mul_add(*l, *sum);
            }
        }
    }
}

multiversion! {
    /// The inverse of a lower triangular block, given by its rows, times `rows`, in their place.
    fn substitute(block: &[f64], rows: &mut [[f64; COLUMNS]]) {
        let size = rows.len();
        for (i, l) in block.chunks_exact(size).enumerate() {
            let (before, now) = rows.split_at_mut(i);
            for (x, row) in l.iter().zip(before.iter()) {
                for (sum, known) in now[0].iter_mut().zip(row) {
                    *sum = (-x).mul_add(*known, *sum);
                }
            }
            for sum in &mut now[0] {
                *sum /= l[i];
            }
        }
    }
}

/// The inverse of a lower triangular matrix in its place.
fn invert(l: &mut [f64], n: usize) {
    // Column panels of the inverse so far, each of the rows from its first column on.
    let mut inverse: Vec<Vec<[f64; COLUMNS]>> = vec![Vec::new(); n.div_ceil(COLUMNS)];
    for start in (0..n).step_by(BLOCK) {
        let end = (start + BLOCK).min(n);
        let strips: Vec<Vec<[f64; ROWS]>> = (start..end)
            .step_by(ROWS)
            .map(|first| {
                pack_rows(start, |k, row| if first + row < end { -l[(first + row) * n + k] } else { 0.0 })
            })
            .collect();
        let block: Vec<f64> = (start..end).flat_map(|i| &l[i * n + start..i * n + end]).copied().collect();
        inverse[..end.div_ceil(COLUMNS)].par_iter_mut().enumerate().for_each(|(panel, inverse)| {
            let column = panel * COLUMNS;
            let mut rows = vec![[0.0; COLUMNS]; end - start];
            for (i, row) in rows.iter_mut().enumerate() {
                if let Some(x) = row.get_mut((start + i).wrapping_sub(column)) {
                    *x = 1.0;
                }
            }
            if column < start {
                for (strip, rows) in strips.iter().zip(rows.chunks_mut(ROWS)) {
                    add_products(&strip[column..], inverse, rows.as_flattened_mut(), COLUMNS, 0);
                }
            }
            substitute(&block, &mut rows);
            inverse.extend(&rows[column.saturating_sub(start)..]);
        });
    }
    l.par_chunks_mut(n).enumerate().for_each(|(i, row)| {
        for (j, x) in row.iter_mut().take(i + 1).enumerate() {
            let panel = j / COLUMNS;
            *x = inverse[panel][i - panel * COLUMNS][j % COLUMNS];
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A positive matrix of any size: random rows times their transpose, plus some of the identity.
    fn positive(n: usize) -> Vec<f64> {
        let mut state = 7u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 / f64::from(1 << 24) - 0.5
        };
        let x: Vec<f64> = (0..n * n).map(|_| random()).collect();
        let mut h = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..n {
                h[i * n + j] = (0..n).map(|k| x[i * n + k] * x[j * n + k]).sum::<f64>();
            }
            h[i * n + i] += 0.1;
        }
        h
    }

    #[test]
    fn the_transpose_times_the_factor_is_the_inverse() {
        for n in [1, 5, 8, 63, 64, 65, 150] {
            let h = positive(n);
            let panels = upper_of_inverse(n, |i, j| h[i * n + j]).unwrap();
            let u = |i: usize, j: usize| {
                panels[j / COLUMNS].get(i).map_or(0.0, |row| if i <= j { row[j % COLUMNS] } else { 0.0 })
            };
            // H U' U = 1
            let mut worst: f64 = 0.0;
            for i in 0..n {
                let hu: Vec<f64> =
                    (0..n).map(|k| (0..n).map(|j| h[i * n + j] * u(k, j)).sum::<f64>()).collect();
                for j in 0..n {
                    let one = (0..n).map(|k| hu[k] * u(k, j)).sum::<f64>();
                    worst = worst.max((one - f64::from(u8::from(i == j))).abs());
                }
            }
            assert!(worst < 1e-8, "{n}: {worst}");
        }
    }

    #[test]
    fn builds_of_the_kernels_agree() {
        for n in [1, 7, 64] {
            let (mut a, mut b) = (positive(n), positive(n));
            assert_eq!(factor_block(&mut a, n), factor_block::scalar(&mut b, n));
            assert_eq!(a, b);
            let columns: Vec<f64> = (0..n * n).map(|i| a[i % n * n + i / n]).collect();
            let mut row: Vec<f64> = (0..n).map(|i| (i as f64 * 0.7).sin()).collect();
            let mut again = row.clone();
            divide_row(&mut row, &columns);
            divide_row::scalar(&mut again, &columns);
            assert_eq!(row, again);
            let mut rows: Vec<[f64; COLUMNS]> =
                (0..n).map(|i| std::array::from_fn(|j| ((i * 8 + j) as f64).cos())).collect();
            let mut twice = rows.clone();
            substitute(&a, &mut rows);
            substitute::scalar(&a, &mut twice);
            assert_eq!(rows, twice);
        }
    }

    #[test]
    fn what_is_not_positive_is_told() {
        let mut h = positive(70);
        h[3 * 70 + 3] = -1.0;
        assert_eq!(upper_of_inverse(70, |i, j| h[i * 70 + j]), Err(NotPositive { column: 3 }));
        h[3 * 70 + 3] = f64::NAN;
        assert!(upper_of_inverse(70, |i, j| h[i * 70 + j]).is_err());
    }
}
