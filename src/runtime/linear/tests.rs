//! One suite, run against every kind of linear.

use std::borrow::Cow;

use half::{bf16, f16};
use serde_json::Value;

use super::*;
use crate::ggml::{BlockMatrix, BlockType};
use crate::pack::{CodeLayout, GroupGrids, Int4Matrix, PackedCodes, pack_columns, pack_rows, zero_points};
use crate::runtime::{BlockEmbedding, Embedding, PackedEmbedding, Rounding};
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

/// What an int8 consumer makes of a token.
fn quantized(x: &[f32]) -> Vec<f64> {
    let scale = x.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0;
    let code = |x: &f32| if scale == 0.0 { 0.0 } else { (x / scale).round_ties_even() };
    x.iter().map(|x| f64::from(code(x)) * f64::from(scale)).collect()
}

/// A 4-bit matrix and the bytes that it is stored as.
struct Int4 {
    shape: [usize; 2],
    group_size: usize,
    /// `[out, in]`.
    codes: Vec<u8>,
    /// `[out, in/g]`: exact in bf16, of both signs.
    scales: Vec<f32>,
    /// `[out, in/g]`: exact in bf16.
    zeros: Vec<f32>,
    /// `[out, in/g]`, 0..=15.
    zero_points: Vec<u8>,
    bytes: Vec<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Gptq,
    Packed,
    PackedSymmetric,
    Tinygemm(usize),
    RowMajor,
}

impl Int4 {
    fn new(shape: [usize; 2], group_size: usize) -> Self {
        let count = shape[0] * shape[1] / group_size;
        let exact = |x: f32| bf16::from_f32(x).to_f32();
        let codes = noise(shape[0] * shape[1], 6).iter().map(|x| ((x + 1.0) * 8.0) as u8).collect();
        Self {
            shape,
            group_size,
            codes,
            scales: noise(count, 7).iter().map(|x| exact(x + 0.25)).collect(),
            zeros: noise(count, 8).iter().map(|x| exact(x * 2.0)).collect(),
            zero_points: (0..count).map(|i| (i * 7 % 16) as u8).collect(),
            bytes: Vec::new(),
        }
    }

    fn groups(&self) -> usize {
        self.shape[1] / self.group_size
    }

    /// `[out, in/g]` of 16-bit elements, transposed to `[in/g, out]`.
    fn by_group(&self, values: &[f32]) -> Vec<f32> {
        let groups = self.groups();
        (0..values.len()).map(|i| values[i % self.shape[0] * groups + i / self.shape[0]]).collect()
    }

    /// Stores the matrix and borrows it.
    fn matrix(&mut self, kind: Kind) -> Int4Matrix<'_> {
        let bf16s =
            |x: &[f32]| -> Vec<u8> { x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect() };
        let words = |x: Vec<u32>| -> Vec<u8> { x.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let layout = match kind {
            Kind::Gptq => CodeLayout::Columns,
            Kind::Tinygemm(rows) => CodeLayout::Blocks { rows },
            _ => CodeLayout::Rows,
        };
        let mut codes = Vec::new();
        if kind == Kind::Gptq {
            codes = words(pack_columns(&self.codes, self.shape[1]));
        } else {
            pack_rows(layout, &self.codes, self.shape[1], &mut codes);
        }
        let scales = match kind {
            Kind::Gptq => bf16s(&self.by_group(&self.scales)),
            Kind::Tinygemm(_) => {
                let (scales, zeros) = (self.by_group(&self.scales), self.by_group(&self.zeros));
                bf16s(&scales.iter().zip(zeros).flat_map(|(s, z)| [*s, z]).collect::<Vec<_>>())
            }
            _ => bf16s(&self.scales),
        };
        let zeros = match kind {
            Kind::Packed => words(zero_points::pack_row_major(&self.zero_points, self.groups())),
            _ => bf16s(&self.zeros),
        };
        self.bytes = vec![codes, scales, zeros];
        let [codes, scales, zeros] = &self.bytes[..] else { unreachable!() };
        let grids = match kind {
            Kind::Gptq => GroupGrids::GroupMajor { scales },
            Kind::Packed => GroupGrids::RowMajor { scales, zero_points: Some(zeros) },
            Kind::PackedSymmetric => GroupGrids::RowMajor { scales, zero_points: None },
            Kind::Tinygemm(_) => GroupGrids::ScalesAndZeros(scales),
            Kind::RowMajor => GroupGrids::RowMajorAffine { scales, zeros },
        };
        Int4Matrix::new(PackedCodes::new(codes, layout, self.shape).unwrap(), self.group_size, grids).unwrap()
    }

    /// The integer that a code stands for, in steps from its zero point.
    fn steps(&self, kind: Kind, i: usize) -> i64 {
        let zero_point = if kind == Kind::Packed { self.zero_points[i / self.group_size] } else { 8 };
        i64::from(self.codes[i]) - i64::from(zero_point)
    }

    fn weights(&self, kind: Kind) -> Vec<f32> {
        (0..self.codes.len())
            .map(|i| {
                let scale = f64::from(self.scales[i / self.group_size]);
                let zero = match kind {
                    Kind::Tinygemm(_) | Kind::RowMajor => f64::from(self.zeros[i / self.group_size]),
                    _ => 0.0,
                };
                // The product is exact in f64: one rounding.
                (self.steps(kind, i) as f64 * scale + zero) as f32
            })
            .collect()
    }
}

const WITH_ZERO_POINTS: [Kind; 3] = [Kind::Gptq, Kind::Packed, Kind::PackedSymmetric];
const AFFINE: [Kind; 3] = [Kind::Tinygemm(64), Kind::Tinygemm(32), Kind::RowMajor];

#[test]
fn int4_linears() {
    for (shape, group_size) in
        [([64, 32], 32), ([64, 192], 64), ([128, 640], 128), ([64, 256], 256), ([192, 16], 16)]
    {
        let mut int4 = Int4::new(shape, group_size);
        for kind in WITH_ZERO_POINTS {
            let weights = int4.weights(kind);
            suite(&Int4Linear::new(int4.matrix(kind)).unwrap(), &weights, quantized);
            suite(&Int4FloatLinear::new(int4.matrix(kind)).unwrap(), &weights, floats);
        }
        for kind in AFFINE {
            let weights = int4.weights(kind);
            suite(&Int4FloatLinear::new(int4.matrix(kind)).unwrap(), &weights, floats);
        }
    }
    // Rows that fill no block of tasks.
    let mut int4 = Int4::new([40, 96], 32);
    let weights = int4.weights(Kind::Packed);
    suite(&Int4Linear::new(int4.matrix(Kind::Packed)).unwrap(), &weights, quantized);
}

/// The promised arithmetic, written out with integers in i64: equal bits.
#[test]
fn int4_sums_are_exact_inside_a_block_and_in_order_outside() {
    for group_size in [32, 64, 128, 256] {
        let (n, k) = (64, 512);
        let mut int4 = Int4::new([n, k], group_size);
        let x = noise(k, 4);
        let scale = x.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0;
        let x_codes: Vec<i64> = x.iter().map(|x| (x / scale).round_ties_even() as i64).collect();
        for kind in WITH_ZERO_POINTS {
            let mut y = vec![f32::NAN; n];
            Int4Linear::new(int4.matrix(kind)).unwrap().forward(&x, &mut y);
            for (row, y) in y.iter().enumerate() {
                let mut total = 0.0f32;
                for start in (0..k).step_by(group_size.min(128)) {
                    let columns = start..start + group_size.min(128);
                    let sum: i64 = columns.map(|c| x_codes[c] * int4.steps(kind, row * k + c)).sum();
                    total += sum as f32 * int4.scales[(row * k + start) / group_size];
                }
                assert_eq!(y.to_bits(), (total * scale).to_bits(), "{kind:?} {group_size} {row}");
            }
        }
    }
}

/// Against the product in f64. A step of 2^-22 to 2^-23 of a block's largest activation, three standard deviations,
/// is uniform noise of 2^-22.5 * 3 / sqrt(12) of one: 137 dB. Sums in f32 of the same length keep 139.
#[test]
fn int4_float_activations_have_24_bits() {
    let (n, k) = (64, 2048);
    for group_size in [32, 128] {
        let mut int4 = Int4::new([n, k], group_size);
        // Sums of twelve uniform values are nearly normally distributed.
        let x: Vec<f32> = noise(12 * k, 4).chunks(12).map(|x| x.iter().sum::<f32>()).collect();
        for kind in WITH_ZERO_POINTS.into_iter().chain(AFFINE) {
            let mut y = vec![f32::NAN; n];
            Int4FloatLinear::new(int4.matrix(kind)).unwrap().forward(&x, &mut y);
            let (mut signal, mut noise) = (0.0, 0.0);
            for (row, y) in y.iter().enumerate() {
                let weight = |c: usize| {
                    let zero =
                        if AFFINE.contains(&kind) { int4.zeros[(row * k + c) / group_size] } else { 0.0 };
                    let steps = int4.steps(kind, row * k + c) as f64;
                    steps * f64::from(int4.scales[(row * k + c) / group_size]) + f64::from(zero)
                };
                let exact: f64 = (0..k).map(|c| f64::from(x[c]) * weight(c)).sum();
                signal += exact * exact;
                noise += (f64::from(*y) - exact).powi(2);
            }
            let snr_db = 10.0 * (signal / noise).log10();
            assert!(snr_db > 131.0, "{kind:?} {group_size}: {snr_db} dB");
        }
    }
}

#[test]
fn a_block_that_is_not_finite_gives_nan() {
    let mut int4 = Int4::new([64, 64], 32);
    for kind in [Kind::Tinygemm(64), Kind::RowMajor] {
        let mut x = noise(3 * 64, 4);
        x[70] = f32::INFINITY;
        let mut y = vec![0.0; 3 * 64];
        Int4FloatLinear::new(int4.matrix(kind)).unwrap().forward(&x, &mut y);
        assert!(y[64..128].iter().all(|y| y.is_nan()));
        assert!(y[..64].iter().chain(&y[128..]).all(|y| y.is_finite()));
        Int4FloatLinear::new(int4.matrix(kind)).unwrap().forward(&x[64..128], &mut y[..64]);
        assert!(y[..64].iter().all(|y| y.is_nan()));
    }
}

/// The golden case "tinygemm": PyTorch's own product, bit for bit once rounded to bf16.
#[test]
fn the_golden_tinygemm_product() {
    let golden: Value =
        serde_json::from_str(include_str!("../../../fixtures/goldens/cpu_formats.json")).unwrap();
    let case = &golden["tinygemm"];
    let bytes = |hex: &Value| -> Vec<u8> {
        let hex = hex.as_str().unwrap();
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
    };
    let number = |key: &str| case[key].as_u64().unwrap() as usize;
    let (n, k, g) = (number("N"), number("K"), number("group_size"));
    let (packed, grids) = (bytes(&case["weight_packed_hex"]), bytes(&case["scales_and_zeros_hex"]));
    let codes = PackedCodes::new(&packed, CodeLayout::Blocks { rows: 64 }, [n, k]).unwrap();
    let matrix = Int4Matrix::new(codes, g, GroupGrids::ScalesAndZeros(&grids)).unwrap();
    // The rule of the golden file's activations, exact in bf16.
    let x: Vec<f32> = (0..5 * k).map(|i| (((i / k * 13 + i % k * 5) % 31) as f32 - 15.0) / 8.0).collect();
    let mut y = vec![f32::NAN; 5 * n];
    Int4FloatLinear::new(matrix).unwrap().forward(&x, &mut y);
    let y: Vec<u8> = y.iter().flat_map(|y| bf16::from_f32(*y).to_le_bytes()).collect();
    assert_eq!(y, bytes(&case["gemm"]["y_bf16_hex"]));
}

#[test]
fn an_embedding_row_out_of_a_packed_head() {
    let mut int4 = Int4::new([128, 96], 32);
    for kind in WITH_ZERO_POINTS.into_iter().chain(AFFINE) {
        let weights = int4.weights(kind);
        let embedding = PackedEmbedding::new(int4.matrix(kind));
        assert_eq!((embedding.vocab_size(), embedding.hidden_size()), (128, 96));
        for token in [0, 1, 31, 32, 63, 64, 127] {
            let mut row = vec![f32::NAN; 96];
            embedding.row(token, &mut row);
            assert_eq!(row, weights[token as usize * 96..][..96], "{kind:?} {token}");
        }
    }
}

#[test]
fn int8_float_linears() {
    for shape in SHAPES {
        let codes = int8_codes(shape[0] * shape[1]);
        let scales = noise(shape[0], 3);
        let w: Vec<f32> = (codes.chunks(shape[1]).zip(&scales))
            .flat_map(|(codes, s)| codes.iter().map(move |c| f32::from(*c) * s))
            .collect();
        suite(&Int8FloatLinear::new(&codes, &scales[..], shape[1]).unwrap(), &w, floats);
    }
    assert!(Int8FloatLinear::new(&[0; 5], vec![1.0], 4).is_err());
    assert!(Int8FloatLinear::new(&[], vec![], 0).is_err());
}

/// Parts of different kinds, and the same bits as the matrix in one piece.
#[test]
fn stacked_linears() {
    let k = 96;
    let heights = [5, 1, 64, 40];
    let codes = int8_codes(heights.iter().sum::<usize>() * k);
    let scales: Vec<f32> = noise(codes.len() / k, 3);
    let mut parts: Vec<Box<dyn Linear>> = Vec::new();
    let mut first = 0;
    for height in heights {
        let rows = first..first + height;
        let codes = &codes[rows.start * k..rows.end * k];
        parts.push(Box::new(Int8Linear::new(codes, &scales[rows], k).unwrap()));
        first += height;
    }
    let stacked = StackedLinear::new(parts).unwrap();
    let w: Vec<f32> = codes.iter().enumerate().map(|(i, c)| f32::from(*c) * scales[i / k]).collect();
    suite(&stacked, &w, quantized);
    let whole = Int8Linear::new(&codes, &scales[..], k).unwrap();
    let x = noise(7 * k, 9);
    let (mut a, mut b) = (vec![f32::NAN; 7 * first], vec![f32::NAN; 7 * first]);
    stacked.forward(&x, &mut a);
    whole.forward(&x, &mut b);
    assert_eq!(a, b);

    let part =
        |k: usize| Box::new(Int8Linear::new(&[1; 12], vec![1.0; 12 / k], k).unwrap()) as Box<dyn Linear>;
    assert!(StackedLinear::new(vec![]).is_err());
    assert!(StackedLinear::new(vec![part(3), part(4)]).is_err());
    assert!(StackedLinear::new(vec![part(3), part(3)]).is_ok());
}

#[test]
fn grids_that_are_no_integers_are_no_w4a8() {
    let mut int4 = Int4::new([64, 384], 192);
    for kind in AFFINE {
        assert!(Int4Linear::new(int4.matrix(kind)).unwrap_err().to_string().contains("zero points"));
    }
    assert!(Int4Linear::new(int4.matrix(Kind::Gptq)).unwrap_err().to_string().contains("192"));
    assert!(Int4FloatLinear::new(int4.matrix(Kind::Gptq)).unwrap_err().to_string().contains("192"));
}

/// Blocks of random codes whose f16 numbers are of the size of a weight's scale.
fn block_bytes(kind: BlockType, count: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        noise(count * kind.bytes(), 9).iter().map(|x| ((x + 1.0) * 127.99) as u8).collect();
    let halves: &[usize] = match kind {
        BlockType::Q8_0 => &[0],
        BlockType::Q4K | BlockType::Q5K => &[0, 2],
        BlockType::Q6K => &[208],
    };
    for (block, scale) in bytes.chunks_mut(kind.bytes()).zip(noise(count, 10)) {
        for at in halves {
            block[*at..at + 2].copy_from_slice(&f16::from_f32(scale * 0.01).to_le_bytes());
        }
    }
    bytes
}

#[test]
fn block_linears() {
    for kind in [BlockType::Q8_0, BlockType::Q4K, BlockType::Q5K, BlockType::Q6K] {
        // One piece of a row, one and a half, and a whole number of them.
        for (n, k) in [(37, 256), (5, 768), (1, 1024)] {
            let bytes = block_bytes(kind, n * k / kind.elements());
            let matrix = BlockMatrix::new(kind, [n, k], &bytes).unwrap();
            let mut w = vec![0.0; n * k];
            for (row, out) in w.chunks_mut(k).enumerate() {
                matrix.decode_row(row, out);
            }
            suite(&BlockLinear::new(matrix), &w, floats);

            // Against the same weights as f32: the same bits, for few tokens and for many.
            let float_bytes: Vec<u8> = w.iter().flat_map(|x| x.to_le_bytes()).collect();
            let view = TensorView { name: "w", dtype: Dtype::F32, shape: &[n, k], bytes: &float_bytes };
            let float = FloatLinear::new(view, Rounding::None).unwrap();
            for tokens in [1, 2 * WIDEN_FROM] {
                let x = noise(tokens * k, 3);
                let (mut y, mut expected) = (vec![0.0; tokens * n], vec![0.0; tokens * n]);
                BlockLinear::new(matrix).forward(&x, &mut y);
                float.forward(&x, &mut expected);
                assert_eq!(y, expected, "{} {tokens}", kind.name());
            }
            let mut row = vec![0.0; k];
            BlockEmbedding::new(matrix).row(u32::try_from(n - 1).unwrap(), &mut row);
            assert_eq!(row, w[(n - 1) * k..]);
        }
    }
}
