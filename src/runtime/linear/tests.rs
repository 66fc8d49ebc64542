//! One suite, run against every kind of linear.

use std::borrow::Cow;

use half::{bf16, f16};

use super::*;
use crate::runtime::Rounding;
use crate::tensor::{Dtype, TensorView};

/// Values without pattern in -1..1.
pub(crate) fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn in_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
}

/// What every linear promises; `w` is the matrix it stands for and `activation` what it makes of a
/// token before multiplying.
fn suite(linear: &dyn Linear, w: &[f32], activation: impl Fn(&[f32]) -> Vec<f64>) {
    let (n, k) = (linear.out_features(), linear.in_features());
    assert_eq!(w.len(), n * k);
    let tokens = 11;
    let mut x = noise(tokens * k, 5);
    x[3 * k..4 * k].fill(0.0);
    let mut y = vec![f32::NAN; tokens * n];
    linear.forward(&x, &mut y);

    // The product, to the precision of f32.
    for (x, y) in x.chunks(k).zip(y.chunks(n)) {
        let x = activation(x);
        for (w, y) in w.chunks(k).zip(y) {
            let terms = || x.iter().zip(w).map(|(x, w)| x * f64::from(*w));
            let (exact, size): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
            assert!((f64::from(*y) - exact).abs() <= 1e-6 * size, "{y} {exact}");
        }
    }
    assert!(y[3 * n..4 * n].iter().all(|y| *y == 0.0), "zeros in, zeros out");

    // The bits do not depend on what is multiplied together ...
    for t in 1..=tokens {
        let mut part = vec![f32::NAN; t * n];
        linear.forward(&x[..t * k], &mut part);
        assert_eq!(part, y[..t * n], "{t} tokens");
    }
    for rows in [0..1, 0..n, n - 1..n, n / 3..n - 1, 1..1] {
        for t in [1, tokens] {
            let mut part = vec![f32::NAN; t * rows.len()];
            linear.forward_rows(&x[..t * k], rows.clone(), &mut part);
            for t in 0..t {
                assert_eq!(part[t * rows.len()..][..rows.len()], y[t * n..][rows.clone()], "{rows:?}");
            }
        }
    }
    // ... nor on the number of threads.
    for threads in 1..=3 {
        let mut again = vec![f32::NAN; y.len()];
        in_threads(threads, || linear.forward(&x, &mut again));
        assert_eq!(again, y, "{threads} threads");
    }
    // No tokens are no work.
    linear.forward(&[], &mut []);
    // Lengths that do not fit are the caller's mistake.
    let short = std::panic::AssertUnwindSafe(|| linear.forward(&x[..k], &mut vec![0.0; n + 1]));
    assert!(std::panic::catch_unwind(short).is_err());
}

const SHAPES: [[usize; 2]; 4] = [[1, 1], [70, 40], [33, 515], [5, 1100]];

fn floats(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

#[test]
fn float_linears() {
    for shape in SHAPES {
        let w = noise(shape[0] * shape[1], 1);
        let as_bf16: Vec<bf16> = w.iter().map(|w| bf16::from_f32(*w)).collect();
        let as_f16: Vec<f16> = w.iter().map(|w| f16::from_f32(*w)).collect();
        let kinds: [(Dtype, Vec<u8>, Vec<f32>); 3] = [
            (Dtype::F32, w.iter().flat_map(|w| w.to_le_bytes()).collect(), w.clone()),
            (
                Dtype::BF16,
                as_bf16.iter().flat_map(|w| w.to_le_bytes()).collect(),
                as_bf16.iter().map(|w| w.to_f32()).collect(),
            ),
            (
                Dtype::F16,
                as_f16.iter().flat_map(|w| w.to_le_bytes()).collect(),
                as_f16.iter().map(|w| w.to_f32()).collect(),
            ),
        ];
        for (dtype, bytes, values) in kinds {
            // At any alignment.
            let mut shifted = vec![0];
            shifted.extend_from_slice(&bytes);
            let view = TensorView { name: "w", dtype, shape: &shape, bytes: &shifted[1..] };
            suite(&FloatLinear::new(view, Rounding::None).unwrap(), &values, floats);
            let rounded: Vec<f32> = values.iter().map(|w| bf16::from_f32(*w).to_f32()).collect();
            suite(&FloatLinear::new(view, Rounding::Bf16).unwrap(), &rounded, floats);
        }
    }
}

fn int8_codes(n: usize) -> Vec<i8> {
    noise(n, 2).into_iter().map(|x| (x * 128.0) as i8).collect()
}

#[test]
fn int8_linears() {
    for shape in SHAPES {
        let codes = int8_codes(shape[0] * shape[1]);
        let scales: Vec<f32> = noise(shape[0], 3).into_iter().map(|x| x.abs() + 0.01).collect();
        let w: Vec<f32> = (codes.chunks(shape[1]).zip(&scales))
            .flat_map(|(codes, s)| codes.iter().map(move |c| f32::from(*c) * s))
            .collect();
        let quantized = |x: &[f32]| {
            let scale = x.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0;
            let code = |x: &f32| if scale == 0.0 { 0.0 } else { (x / scale).round_ties_even() };
            x.iter().map(|x| f64::from(code(x)) * f64::from(scale)).collect()
        };
        suite(&Int8Linear::new(&codes, &scales[..], shape[1]).unwrap(), &w, quantized);
        suite(&Int8Linear::new(&codes, Cow::Owned(scales), shape[1]).unwrap(), &w, quantized);
    }
}

/// The same product in i64, and the two scales in the order that is promised: equal bits.
#[test]
fn int8_sums_are_exact() {
    let (n, k) = (9, 777);
    let codes = int8_codes(n * k);
    let scales: Vec<f32> = noise(n, 3);
    let x = noise(k, 4);
    let mut y = vec![0.0; n];
    Int8Linear::new(&codes, &scales[..], k).unwrap().forward(&x, &mut y);
    let scale = x.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0;
    for (row, y) in y.iter().enumerate() {
        let product = |(x, c): (&f32, &i8)| (x / scale).round_ties_even() as i64 * i64::from(*c);
        let sum: i64 = x.iter().zip(&codes[row * k..][..k]).map(product).sum();
        assert_eq!(y.to_bits(), (sum as f32 * scale * scales[row]).to_bits());
    }
}

#[test]
fn a_token_that_is_not_finite_gives_nan() {
    let linear = Int8Linear::new(&[1, 2], vec![1.0], 2).unwrap();
    let mut y = [0.0; 2];
    linear.forward(&[1.0, f32::NAN, 1.0, 0.0], &mut y);
    assert!(y[0].is_nan() && y[1].is_finite());
}

#[test]
fn what_is_no_matrix_is_refused() {
    let view = TensorView { name: "w", dtype: Dtype::F32, shape: &[2, 2], bytes: &[0; 16] };
    let refused = |view| FloatLinear::new(view, Rounding::None).unwrap_err().to_string();
    assert_eq!(refused(TensorView { dtype: Dtype::I8, ..view }), "w: expected BF16, F16 or F32, found I8");
    assert!(refused(TensorView { shape: &[4], ..view }).contains("a matrix"));
    assert!(refused(TensorView { bytes: &[0; 15], ..view }).contains("15 bytes"));
    assert!(Int8Linear::new(&[0; 5], vec![1.0], 4).is_err());
    assert!(Int8Linear::new(&[], vec![], 1 << 20).is_err());
}
