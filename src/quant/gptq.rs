//! GPTQ on a fixed grid: rounds the columns of a matrix one after the other and moves what each loses
//! to columns that are still to come, so that the outputs on calibrated inputs change least.
//!
//! Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers":
//! with `H = sum x x'` over the inputs and `U` the upper Cholesky factor of `H^-1`, column `i` is
//! rounded to `q`, and `(w - q) / U[i, i] * U[i, j]` is taken from every later column `j`. The rows of a
//! matrix do not depend on each other. Columns are visited by falling `H[i, i]`, which needs no trace in
//! the artifact because every group has its grid before ("static" order).
//!
//! Everything is in f64 and summed in an order that depends on the sizes alone, so codes do not depend
//! on threads or the processor.

mod dense;
mod factor;

use rayon::prelude::*;

use dense::{COLUMNS, ROWS, add_products, pack_rows, panels};
pub use factor::NotPositive;

use crate::simd::multiversion;

/// Columns that are rounded before the others hear of it.
const BLOCK: usize = 128;
/// Strips of rows of a Hessian that one task adds to.
const STRIPS: usize = 4;
/// What is added to the diagonal at first, as a part of its mean, and by how much it grows when that
/// does not make the matrix positive: the values of the common implementations.
const DAMPING: f64 = 0.01;
const DAMPING_GROWTH: f64 = 10.0;
/// Attempts before a module is given up on.
const ATTEMPTS: usize = 3;

/// The sum of `x x'` over the inputs of a matrix.
#[derive(Clone, Debug)]
pub struct Hessian {
    /// `[in, in]`; the part on and above the diagonal is filled.
    sums: Vec<f64>,
    columns: usize,
    inputs: usize,
}

impl Hessian {
    /// No inputs yet of a matrix with so many columns.
    pub fn new(columns: usize) -> Self {
        Self { sums: vec![0.0; columns * columns], columns, inputs: 0 }
    }

    /// Inputs seen.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Adds inputs `[n, in]`. The order in which they come is the order of summation.
    ///
    /// # Panics
    /// When `x` is not whole rows.
    pub fn add(&mut self, x: &[f32]) {
        let n = self.columns;
        assert!(x.len().is_multiple_of(n), "{} values in rows of {n}", x.len());
        let count = x.len() / n;
        self.inputs += count;
        let inputs = panels(n, count, |input, column| f64::from(x[input * n + column]));
        self.sums.par_chunks_mut(n * ROWS * STRIPS).enumerate().for_each(|(task, sums)| {
            let first = task * ROWS * STRIPS;
            let strips: Vec<_> = (first..(first + ROWS * STRIPS).min(n))
                .step_by(ROWS)
                .map(|first| {
                    pack_rows(count, |input, row| {
                        if first + row < n { f64::from(x[input * n + first + row]) } else { 0.0 }
                    })
                })
                .collect();
            // A panel of inputs is fetched once for all strips; the few sums below the diagonal that this
            // makes are never read.
            for panel in first / COLUMNS..n.div_ceil(COLUMNS) {
                let inputs = &inputs[panel * count..][..count];
                for (a, sums) in strips.iter().zip(sums.chunks_mut(n * ROWS)) {
                    add_products(a, inputs, sums, n, panel * COLUMNS);
                }
            }
        });
    }

    /// `H[i, i]`: how much the squared error of each column counts.
    pub fn diagonal(&self) -> Vec<f64> {
        (0..self.columns).map(|i| self.sums[i * self.columns + i]).collect()
    }

    /// The same relative to the largest, as the grid searches take it.
    pub fn importance(&self) -> Vec<f32> {
        let diagonal = self.diagonal();
        let largest = diagonal.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        #[expect(clippy::cast_possible_truncation, reason = "relative weights")]
        diagonal.iter().map(|h| (h / largest) as f32).collect()
    }

    /// What [`Solver::solve`] needs. Columns that no input reached are rounded to nearest.
    ///
    /// # Errors
    /// When no damping tried makes the matrix positive: a NaN among the inputs.
    pub fn solver(&self) -> Result<Solver, NotPositive> {
        let n = self.columns;
        let mut diagonal = self.diagonal();
        let dead = diagonal.iter().filter(|h| **h == 0.0).count();
        #[expect(clippy::cast_precision_loss, reason = "row lengths are far below 2^53")]
        let mean = diagonal.iter().sum::<f64>() / n as f64;
        for h in &mut diagonal {
            if *h == 0.0 {
                *h = if mean > 0.0 { mean } else { 1.0 };
            }
        }
        let mut order: Vec<usize> = (0..n).collect();
        // Stable: equal columns stay in their order.
        order.sort_by(|a, b| diagonal[*b].total_cmp(&diagonal[*a]));
        let mut damping = DAMPING;
        let mut refused = NotPositive { column: 0 };
        for _ in 0..ATTEMPTS {
            let added = damping * if mean > 0.0 { mean } else { 1.0 };
            let element = |i: usize, j: usize| {
                let (i, j) = (order[i], order[j]);
                if i == j { diagonal[i] + added } else { self.sums[i.min(j) * n + i.max(j)] }
            };
            match factor::upper_of_inverse(n, element) {
                Ok(factor) => return Ok(Solver { columns: n, order, factor, damping, dead }),
                Err(NotPositive { column }) => refused = NotPositive { column: order[column] },
            }
            damping *= DAMPING_GROWTH;
        }
        Err(refused)
    }
}

/// The factor of one Hessian; rounds every matrix that has these inputs.
#[derive(Clone, Debug)]
pub struct Solver {
    columns: usize,
    /// The columns as they are visited.
    order: Vec<usize>,
    /// `U` in the order of visits: panels of [`COLUMNS`] columns, each `[rows up to its last][COLUMNS]`.
    factor: Vec<Vec<[f64; COLUMNS]>>,
    damping: f64,
    dead: usize,
}

impl Solver {
    /// What was added to the diagonal, as a part of its mean.
    pub fn damping(&self) -> f64 {
        self.damping
    }

    /// Columns that no input reached.
    pub fn dead(&self) -> usize {
        self.dead
    }

    /// Rounds rows of weights `[n, in]` to codes of the same shape. `nearest(row, column, weight)` gives
    /// the code on the grid of that place, and what it decodes to. Returns the squared error of the
    /// outputs, summed over the inputs (and as many more as the damping stands for).
    ///
    /// # Panics
    /// When `weights` is not whole rows or the lengths differ.
    pub fn solve(
        &self,
        weights: &[f32],
        nearest: impl Fn(usize, usize, f32) -> (u8, f32),
        codes: &mut [u8],
    ) -> f64 {
        let n = self.columns;
        assert!(weights.len().is_multiple_of(n) && weights.len() == codes.len(), "rows of {n}, a code each");
        let count = weights.len() / n;
        let mut w: Vec<f64> = Vec::with_capacity(weights.len());
        for row in weights.chunks_exact(n) {
            w.extend(self.order.iter().map(|column| f64::from(row[*column])));
        }
        let mut errors = vec![0.0f64; count * BLOCK];
        let mut output_noise = 0.0;
        for start in (0..n).step_by(BLOCK) {
            let end = (start + BLOCK).min(n);
            let factor: Vec<f64> = (start..end)
                .flat_map(|i| (start..end).map(move |j| (i, j)))
                .map(|(i, j)| if i <= j { self.factor[j / COLUMNS][i][j % COLUMNS] } else { 0.0 })
                .collect();
            for row in 0..count {
                let errors = &mut errors[row * BLOCK..][..end - start];
                let w = &mut w[row * n..][start..end];
                self.round_block(row, start, &factor, w, errors, &nearest, &mut codes[row * n..][..n]);
                output_noise = errors.iter().fold(output_noise, |sum, e| e.mul_add(*e, sum));
            }
            // What the block lost goes to the columns after it: a panel of the factor at a time for all rows,
            // so that it is fetched once.
            let strips: Vec<_> = (0..count.div_ceil(ROWS))
                .map(|strip| {
                    pack_rows(end - start, |k, row| {
                        let row = strip * ROWS + row;
                        if row < count { -errors[row * BLOCK + k] } else { 0.0 }
                    })
                })
                .collect();
            for panel in end / COLUMNS..n.div_ceil(COLUMNS) {
                // Only the last block ends within a panel, and nothing is after it.
                let factor = &self.factor[panel][start..end];
                for (a, w) in strips.iter().zip(w.chunks_mut(ROWS * n)) {
                    add_products(a, factor, w, n, panel * COLUMNS);
                }
            }
        }
        output_noise
    }

    /// Rounds the columns `start..` of one row, `w`, and leaves the scaled errors in `errors`. `factor` is the
    /// block of the factor at these columns, `[w.len(), w.len()]`.
    #[expect(clippy::too_many_arguments, reason = "the inner loop of one function")]
    fn round_block(
        &self,
        row: usize,
        start: usize,
        factor: &[f64],
        w: &mut [f64],
        errors: &mut [f64],
        nearest: impl Fn(usize, usize, f32) -> (u8, f32),
        codes: &mut [u8],
    ) {
        for (i, u) in factor.chunks_exact(w.len()).enumerate() {
            let column = self.order[start + i];
            #[expect(clippy::cast_possible_truncation, reason = "the grids are f32")]
            let (code, decoded) = nearest(row, column, w[i] as f32);
            codes[column] = code;
            let error = (w[i] - f64::from(decoded)) / u[i];
            errors[i] = error;
            take_away(error, &u[i + 1..], &mut w[i + 1..]);
        }
    }
}

multiversion! {
    /// `w -= error * u`, one rounding each.
    fn take_away(error: f64, u: &[f64], w: &mut [f64]) {
        for (w, u) in w.iter_mut().zip(u) {
            *w = (-error).mul_add(*u, *w);
        }
    }
}

#[cfg(test)]
mod tests;
