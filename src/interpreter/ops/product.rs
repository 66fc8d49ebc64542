//! Products of matrices.
//!
//! Two quantized operands are multiplied as integers: the sums are exact, and one product with the
//! scales, rounded to f32 once, ends them. An activation of 16 bits times a weight of 8 overflows 32
//! bits after 258 terms; how each kernel avoids that is said where it is written. Anything else is
//! multiplied in f32.

use std::ops::Range;

use rayon::prelude::*;

use super::elementwise::{broadcast, broadcast_strides};
use super::movement::for_each_row;
use crate::interpreter::codes::{Codes, Encoding, Operand, View};
use crate::interpreter::context::{Built, Context, Operator, Result};
use crate::interpreter::tensor::{Data, Tensor};
use crate::onnx::ElementType;
use crate::runtime::kernels::mix::mix;
use crate::runtime::kernels::rows::{F32Row, Rows};
use crate::runtime::kernels::{dot, int8};
use crate::runtime::{multiply_by_decoded_rows, split_rows};
use crate::simd::multiversion;

/// Longest sum: that many products of two 17-bit numbers stay below 2^53, so f64 holds every partial
/// sum exactly.
const MAX_TERMS: usize = 1 << 19;

/// `x [M, K]` times the rows of `w [N, K]`.
struct Gemm {
    rows: usize,
    terms: usize,
    columns: usize,
}

pub(super) fn gemm(context: &Context<'_>) -> Result<Built> {
    let [x, w] = context.arguments()?;
    context.known(&["alpha", "beta", "transA", "transB"])?;
    context.fixed_int("transA", 0, 0)?;
    context.fixed_int("transB", 0, 1)?;
    // beta is for a bias, and there is none.
    let alpha = context.float("alpha", 1.0)?;
    context.float("beta", 1.0)?;
    if alpha != 1.0 {
        return Err(context.error().expected("the attribute alpha to be 1").found(alpha));
    }
    context.float_input(x)?;
    context.float_input(w)?;
    let [m, k] = *x.shape else {
        return Err(context.wrong_shape(x, "a matrix"));
    };
    let [n, wk] = *w.shape else {
        return Err(context.wrong_shape(w, "a matrix"));
    };
    if k != wk {
        return Err(context.wrong_shape(w, format!("rows of {k}, like {}", x.name)));
    }
    check_terms(context, k)?;
    let operator = Box::new(Gemm { rows: m, terms: k, columns: n });
    Ok(Built { element: ElementType::F32, shape: vec![m, n], operator })
}

fn check_terms(context: &Context<'_>, k: usize) -> Result<()> {
    if k <= MAX_TERMS {
        return Ok(());
    }
    Err(context.error().expected(format!("sums of at most {MAX_TERMS} terms")).found(k))
}

impl Operator for Gemm {
    fn run(&self, inputs: &[Operand<'_>]) -> Tensor {
        let (x, w) = (&inputs[0], &inputs[1]);
        let mut out = vec![0.0; self.rows * self.columns];
        match (x.quantized(), w.quantized()) {
            (Some((x, x_encoding)), Some((w, w_encoding)))
                if !x_encoding.per_axis && w_encoding.is_by_rows() =>
            {
                self.integers(x, x_encoding, w, w_encoding, &mut out);
            }
            (_, Some((w, encoding))) if encoding.is_by_rows() => {
                let k = self.terms;
                multiply_by_decoded_rows(&x.floats(), k, 0..self.columns, &mut out, |row, part, out| {
                    let (scale, zero) = encoding.of_run(row);
                    w.dequantize(row * k + part.start..row * k + part.end, scale, zero, out);
                });
            }
            _ => self.floats(x, w, &mut out),
        }
        Tensor::made(&[self.rows, self.columns], Data::F32(out))
    }
}

impl Gemm {
    /// In f32; weights of a file are read where they are.
    fn floats(&self, x: &Operand<'_>, w: &Operand<'_>, out: &mut [f32]) {
        let (k, n) = (self.terms, self.columns);
        let x = x.floats();
        let x = Rows::dense(&x, k);
        match w {
            Operand { view: View::Raw(raw), encoding: None } => {
                split_rows(self.rows, 0..n, out, |(): &mut (), rows, out| {
                    let w: Vec<_> =
                        rows.clone().map(|r| F32Row(&raw.bytes[r * k * 4..(r + 1) * k * 4])).collect();
                    dot::multiply(x, &w, out, rows.len());
                });
            }
            _ => {
                let w = w.floats();
                split_rows(self.rows, 0..n, out, |(): &mut (), rows, out| {
                    let w: Vec<_> = rows.clone().map(|r| &w[r * k..(r + 1) * k]).collect();
                    dot::multiply(x, &w, out, rows.len());
                });
            }
        }
    }

    fn integers(
        &self,
        x: Codes<'_>,
        x_encoding: &Encoding,
        w: Codes<'_>,
        w_encoding: &Encoding,
        out: &mut [f32],
    ) {
        let (x_scale, x_zero) = (x_encoding.scales[0], x_encoding.zeros[0]);
        let scaled = |row: usize, sum: i64| scaled(sum, x_scale, w_encoding.of_run(row).0);
        match w {
            Codes::I8(w) if self.terms <= int8::MAX_K && w_encoding.zeros.iter().all(|z| *z == 0) => {
                self.bytes(&Halves::of(x, x_zero, self.terms), w, scaled, out);
            }
            _ => {
                let mut centred = vec![0; x.len()];
                x.centred(0..x.len(), x_zero, &mut centred);
                self.wide(&centred, w, w_encoding, scaled, out);
            }
        }
    }

    /// Weights of 8 bits: the kernel for products of bytes on each half of the activations.
    fn bytes(&self, x: &Halves, w: &[i8], scaled: impl Fn(usize, i64) -> f32 + Sync, out: &mut [f32]) {
        let (m, k) = (self.rows, self.terms);
        split_rows(m, 0..self.columns, out, |sums: &mut Vec<i32>, rows, out| {
            let n = rows.len();
            sums.clear();
            sums.resize(x.rows.len() / k * n, 0);
            int8::multiply(&x.rows, &w[rows.start * k..rows.end * k], k, |r, c, sum| sums[r * n + c] = sum);
            let ones = &sums[Halves::PLANES * m * n..];
            for (r, out) in out.chunks_exact_mut(n).enumerate() {
                let planes = &sums[Halves::PLANES * r * n..];
                for (c, out) in out.iter_mut().enumerate() {
                    *out = scaled(rows.start + c, x.sum(planes[c], planes[n + c], ones[c]));
                }
            }
        });
    }

    /// Any weights, in i64.
    fn wide(
        &self,
        centred: &[i32],
        w: Codes<'_>,
        encoding: &Encoding,
        scaled: impl Fn(usize, i64) -> f32 + Sync,
        out: &mut [f32],
    ) {
        let k = self.terms;
        split_rows(self.rows, 0..self.columns, out, |row: &mut Vec<i32>, rows, out| {
            row.resize(k, 0);
            let n = rows.len();
            for (c, r) in rows.enumerate() {
                w.centred(r * k..(r + 1) * k, encoding.of_run(r).1, row);
                for (out, x) in out[c..].iter_mut().step_by(n).zip(centred.chunks_exact(k)) {
                    *out = scaled(r, dot_i64(x, row));
                }
            }
        });
    }
}

/// The sum of products of codes as a number.
fn scaled(sum: i64, x_scale: f32, w_scale: f32) -> f32 {
    // Below 2^53 by MAX_TERMS; the product of two f32 is exact in f64.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "rounded to f32 at the end"
    )]
    let value = (sum as f64 * (f64::from(x_scale) * f64::from(w_scale))) as f32;
    value
}

/// Activations of 16 bits as numbers that the kernel for products of bytes takes: the real code is
/// `256 high + low + offset`, with both within -128..=127, and a row of ones for the offset's share.
struct Halves {
    /// Two rows per activation row, then the row of ones.
    rows: Vec<i16>,
    offset: i64,
}

impl Halves {
    const PLANES: usize = 2;

    fn of(x: Codes<'_>, zero: i32, k: usize) -> Self {
        // What brings a code into the range of an i16.
        let shift = if matches!(x, Codes::U16(_) | Codes::U16Bytes(_)) { 1 << 15 } else { 0 };
        let mut codes = vec![0; x.len()];
        x.centred(0..x.len(), shift, &mut codes);
        let mut rows = vec![1i16; (codes.len() / k * Self::PLANES + 1) * k];
        for (codes, rows) in codes.chunks_exact(k).zip(rows.chunks_exact_mut(Self::PLANES * k)) {
            let (high, low) = rows.split_at_mut(k);
            for ((code, high), low) in codes.iter().zip(high).zip(low) {
                #[expect(clippy::cast_possible_truncation, reason = "codes have 16 bits, halves 8")]
                let halves = ((code >> 8) as i16, ((code & 0xff) - 128) as i16);
                (*high, *low) = halves;
            }
        }
        Self { rows, offset: i64::from(shift + 128 - zero) }
    }

    fn sum(&self, high: i32, low: i32, ones: i32) -> i64 {
        256 * i64::from(high) + i64::from(low) + self.offset * i64::from(ones)
    }
}

multiversion! {
    /// A product of two 17-bit numbers has 34 bits: 2^29 of them fit.
    fn dot_i64(x: &[i32], w: &[i32]) -> i64 {
        let mut lanes = [0i64; 8];
        let ((xs, x_rest), (ws, w_rest)) = (x.as_chunks::<8>(), w.as_chunks::<8>());
        for (x, w) in xs.iter().zip(ws) {
            for ((lane, x), w) in lanes.iter_mut().zip(x).zip(w) {
                *lane += i64::from(*x) * i64::from(*w);
            }
        }
        let rest: i64 = x_rest.iter().zip(w_rest).map(|(x, w)| i64::from(*x) * i64::from(*w)).sum();
        lanes.iter().sum::<i64>() + rest
    }
}

/// `a [.., M, K]` times `b [.., K, N]`, the leading dimensions broadcast.
struct MatMul {
    rows: usize,
    terms: usize,
    columns: usize,
    shape: Vec<usize>,
    /// Where the matrices of each output matrix start.
    starts: Vec<(usize, usize)>,
}

pub(super) fn mat_mul(context: &Context<'_>) -> Result<Built> {
    let [a, b] = context.arguments()?;
    context.known(&[])?;
    context.float_input(a)?;
    context.float_input(b)?;
    let (Some((a_outer, [m, k])), Some((b_outer, [bk, n]))) =
        (a.shape.split_last_chunk::<2>(), b.shape.split_last_chunk::<2>())
    else {
        let found = format!("{:?} and {:?}", a.shape, b.shape);
        return Err(context.error().expected("two matrices or more").found(found));
    };
    if k != bk {
        return Err(context.wrong_shape(b, format!("matrices of {k} rows")));
    }
    check_terms(context, *k)?;
    let outer = broadcast(a_outer, b_outer).ok_or_else(|| {
        let found = format!("{:?} and {:?}", a.shape, b.shape);
        context.error().expected("leading dimensions that broadcast").found(found)
    })?;
    let shape = [&*outer, &[*m, *n]].concat();
    context.check_size(&shape)?;
    let starts = |inner: &[usize], len: usize| {
        let mut starts = Vec::new();
        for_each_row(&outer, &broadcast_strides(inner, &outer), |start, count, stride| {
            starts.extend((0..count).map(|i| (start + i * stride) * len));
        });
        starts
    };
    let starts = starts(a_outer, m * k).into_iter().zip(starts(b_outer, k * n)).collect();
    let operator = Box::new(MatMul { rows: *m, terms: *k, columns: *n, shape: shape.clone(), starts });
    Ok(Built { element: ElementType::F32, shape, operator })
}

impl Operator for MatMul {
    fn run(&self, inputs: &[Operand<'_>]) -> Tensor {
        let (a, b) = (&inputs[0], &inputs[1]);
        let mut out = vec![0.0; self.shape.iter().product()];
        match (a.per_tensor(), b.per_tensor()) {
            (Some((a, a_by)), Some((b, b_by))) => self.integers(a, a_by, b, b_by, &mut out),
            _ => self.floats(&a.floats(), &b.floats(), &mut out),
        }
        Tensor::made(&self.shape, Data::F32(out))
    }
}

impl MatMul {
    fn floats(&self, a: &[f32], b: &[f32], out: &mut [f32]) {
        let (m, k, n) = (self.rows, self.terms, self.columns);
        out.par_chunks_mut(m * n).zip(&self.starts).for_each(|(out, (a_start, b_start))| {
            mix(Rows::dense(&a[*a_start..][..m * k], k), &b[*b_start..][..k * n], n, out);
        });
    }

    /// Codes as f64, whose sums are exact: see [`MAX_TERMS`].
    fn integers(&self, a: Codes<'_>, a_by: (f32, i32), b: Codes<'_>, b_by: (f32, i32), out: &mut [f32]) {
        /// Columns of a task.
        const WIDTH: usize = 128;
        let (m, k, n) = (self.rows, self.terms, self.columns);
        let blocks: Vec<(usize, Range<usize>)> = (0..self.starts.len())
            .flat_map(|i| (0..n).step_by(WIDTH).map(move |c| (i, c..(c + WIDTH).min(n))))
            .collect();
        let sums: Vec<Vec<f64>> = blocks
            .par_iter()
            .map(|(i, columns)| {
                let (a_start, b_start) = self.starts[*i];
                let width = columns.len();
                let mut left = vec![0; m * k];
                a.centred(a_start..a_start + m * k, a_by.1, &mut left);
                let mut right = vec![0; width];
                let mut sums = vec![0.0; m * width];
                for row in 0..k {
                    let start = b_start + row * n + columns.start;
                    b.centred(start..start + width, b_by.1, &mut right);
                    for (left, sums) in left.chunks_exact(k).zip(sums.chunks_exact_mut(width)) {
                        add_products(f64::from(left[row]), &right, sums);
                    }
                }
                sums
            })
            .collect();
        let scale = f64::from(a_by.0) * f64::from(b_by.0);
        for ((i, columns), sums) in blocks.iter().zip(&sums) {
            for (row, sums) in sums.chunks_exact(columns.len()).enumerate() {
                let start = (i * m + row) * n + columns.start;
                for (out, sum) in out[start..].iter_mut().zip(sums) {
                    #[expect(clippy::cast_possible_truncation, reason = "rounded to f32 at the end")]
                    let value = (sum * scale) as f32;
                    *out = value;
                }
            }
        }
    }
}

multiversion! {
    fn add_products(a: f64, b: &[i32], sums: &mut [f64]) {
        for (sum, b) in sums.iter_mut().zip(b) {
            *sum += a * f64::from(*b);
        }
    }
}
