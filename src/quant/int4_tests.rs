//! What the tests of the grids share, and the kernels.

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::quant::Method;

pub(super) const METHODS: [Method; 2] = [Method::RoundToNearest, Method::Search];

/// bf16 numbers of every size; the last two are the largest, and the smallest that a scale may be.
pub(super) const CONSTANTS: [f32; 9] = [
    0.0,
    1.0,
    -1.0,
    0.100_097_656,
    -0.007_019_043,
    f32::from_bits(0x7217_0000),
    -5.0,
    BF16_MAX,
    f32::MIN_POSITIVE,
];

pub(super) fn goldens() -> Value {
    serde_json::from_str(include_str!("../../fixtures/goldens/cpu_formats.json")).unwrap()
}

/// The rule that stands in the goldens.
pub(super) fn golden_weight(n: usize, k: usize) -> f32 {
    (((n * 31 + k * 17) % 97) as f32 - 48.0) / 256.0 * if k.is_multiple_of(5) { 4.0 } else { 1.0 }
}

pub(super) fn hex(text: &Value) -> Vec<u8> {
    let text = text.as_str().unwrap();
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

pub(super) fn bf16_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]])) << 16)
}

pub(super) fn is_bf16(x: f32) -> bool {
    x.to_bits() & 0xffff == 0
}

/// Groups next to what f32 holds.
pub(super) fn extremes() -> Vec<Vec<f32>> {
    let mut groups = Vec::new();
    for largest in
        [BF16_MAX, 3.0e38, 1e36, 1.1e36, 1e-33, 1e-34, 1e-36, 1e-38, 1e-40, f32::from_bits(1 << 16)]
    {
        let m = to_bf16(largest);
        for parts in [
            vec![1.0, -1.0, 0.3],
            vec![1.0],
            vec![-1.0],
            vec![1.0, 0.0],
            vec![-0.93, 1.0, 0.5, -0.2],
            vec![-1.0, 0.88, 0.0, 0.1],
            vec![0.99, 1.0],
            (0..40).map(|i| (i as f32 * 0.7).sin()).collect(),
        ] {
            groups.push(parts.iter().map(|p| to_bf16(p * m)).collect());
        }
    }
    groups
}

/// Uniform numbers in 0..1 from a counter.
fn uniform(seed: u32) -> f32 {
    let mut x = seed.wrapping_mul(0x9e37_79b9) ^ 0x5bd1_e995;
    for _ in 0..3 {
        x ^= x >> 15;
        x = x.wrapping_mul(0x2c1b_3c6d);
        x ^= x >> 12;
    }
    (x >> 8) as f32 / 16_777_216.0
}

/// Bell-shaped groups of every length, some with an outlier, some off zero.
pub(super) fn samples() -> Vec<Vec<f32>> {
    let mut groups = Vec::new();
    for (at, len) in [32, 64, 128, 32, 64, 128, 17, 40, 100, 256, 32, 64].into_iter().enumerate() {
        for repeat in 0..3 {
            let seed = (at * 3 + repeat) as u32 * 10_000;
            let weight = |i: u32| (0..6).map(|j| uniform(seed + i * 6 + j) - 0.5).sum::<f32>() * 0.03;
            let mut group: Vec<f32> = (0..len).map(weight).collect();
            if repeat == 1 {
                group[3] *= 4.0;
            }
            if at % 4 == 3 {
                group.iter_mut().for_each(|w| *w += 0.01);
            }
            groups.push(group.into_iter().map(to_bf16).collect());
        }
    }
    groups
}

/// Every bf16 number between two parts of a scale.
pub(super) fn scales_around(scale: f32, from: f32, to: f32) -> impl Iterator<Item = f32> {
    let bits = |x: f32| to_bf16(x).to_bits() >> 16;
    (bits(scale * from)..=bits(scale * to)).map(|b| f32::from_bits(b << 16))
}

pub(super) fn plain_noise(weights: &[f32], decode: impl Fn(f32) -> f32) -> f64 {
    weights.iter().map(|w| (f64::from(*w) - f64::from(decode(*w))).powi(2)).sum()
}

/// The mean of a ratio of noises over groups.
#[derive(Default)]
pub(super) struct Loss {
    sum_db: f64,
    groups: u32,
}

impl Loss {
    pub(super) fn add(&mut self, ours: f64, best: f64) {
        self.sum_db += 10.0 * (ours / best).log10();
        self.groups += 1;
    }

    pub(super) fn mean_db(&self) -> f64 {
        self.sum_db / f64::from(self.groups)
    }
}

pub(super) fn any_group() -> impl Strategy<Value = Vec<f32>> {
    let weights = prop::collection::vec(-1f32..1.0, 1..200);
    let size = prop_oneof![Just(1.0f32), -30f32..30.0];
    (weights, size).prop_map(|(weights, size)| weights.iter().map(|w| to_bf16(w * size.exp2())).collect())
}

pub(super) fn check_sums(weights: &[f32], back: &[f32], sums: ErrorSums) {
    let signal: f64 = weights.iter().map(|w| f64::from(*w).powi(2)).sum();
    let noise: f64 = weights.iter().zip(back).map(|(w, d)| (f64::from(*w) - f64::from(*d)).powi(2)).sum();
    assert!((sums.signal - signal).abs() <= 1e-5 * signal, "{} {signal}", sums.signal);
    assert!((sums.noise - noise).abs() <= 1e-5 * noise, "{} {noise}", sums.noise);
}

/// With importance the weighted error is less and the plain error more; none, zeros and equal
/// importances are one and the same.
pub(super) fn check_importance(quantize: impl Fn(&[f32], Option<&[f32]>) -> Vec<f32>) {
    let (mut plain, mut weighted) = ([0.0; 2], [0.0; 2]);
    for weights in samples() {
        let importance: Vec<f32> =
            (0..weights.len()).map(|i| if i % 8 == 0 { 1000.0 } else { 10.0 }).collect();
        let (a, b) = (quantize(&weights, None), quantize(&weights, Some(&importance)));
        for (i, (w, h)) in weights.iter().zip(&importance).enumerate() {
            let [ea, eb] = [a[i], b[i]].map(|d| f64::from(w - d).powi(2));
            plain = [plain[0] + ea, plain[1] + eb];
            weighted = [weighted[0] + ea * f64::from(*h), weighted[1] + eb * f64::from(*h)];
        }
        for same in [0.0, 1.0, 4.0] {
            assert_eq!(quantize(&weights, Some(&vec![same; weights.len()])), a, "{same}");
        }
    }
    assert!(weighted[1] < 0.8 * weighted[0], "{weighted:?}");
    assert!(plain[1] >= plain[0], "{plain:?}");
}

#[test]
fn bf16_is_rounded_half_to_even() {
    for i in 0..100_000u32 {
        let x = f32::from_bits(i.wrapping_mul(0x9e37_79b9));
        if x.is_finite() && x.abs() <= BF16_MAX {
            assert_eq!(to_bf16(x).to_bits(), half::bf16::from_f32(x).to_f32().to_bits(), "{x:e}");
        }
    }
    assert_eq!(neighbour(1.0, 1), 1.007_812_5);
    assert_eq!(neighbour(1.0, -1), 0.996_093_75);
}

#[test]
fn the_best_lane_is_the_first_of_equals() {
    let mut values = [3.0; LANES];
    assert_eq!((smallest(values), largest(values)), (0, 0));
    (values[5], values[9], values[7], values[12]) = (0.0, 0.0, 8.0, 8.0);
    assert_eq!((smallest(values), largest(values)), (5, 7));
}

/// The builds of every kernel agree bit for bit, at lengths with and without a remainder.
#[test]
fn builds_of_the_kernels_agree() {
    for len in [1usize, 15, 16, 17, 32, 100, 256] {
        let weights: Vec<f32> = (0..len as u32).map(|i| uniform(i) - 0.4).collect();
        let importance: Vec<f32> = (0..len as u32).map(|i| uniform(i + 999)).collect();
        assert_eq!(extent(&weights), extent::scalar(&weights));
        for grid in [
            Grid { scale: -0.07, zero: 8.0, offset: 0.0, rounds_codes: false },
            Grid { scale: 0.07, zero: 5.0, offset: 0.0, rounds_codes: true },
            Grid { scale: 0.07, zero: 8.0, offset: 0.11, rounds_codes: false },
        ] {
            let (mut fast, mut slow) = (vec![0; len], vec![0; len]);
            encode(&weights, grid.scale, grid.offset, [grid.zero, 0.0], &mut fast);
            encode::scalar(&weights, grid.scale, grid.offset, [grid.zero, 0.0], &mut slow);
            assert_eq!(fast, slow);
            grid.encode(&weights, &mut fast);
            let (mut back, mut slow_back) = (vec![0.0; len], vec![0.0; len]);
            decode(&fast, grid.scale, grid.zero, grid.offset, &mut back);
            decode::scalar(&fast, grid.scale, grid.zero, grid.offset, &mut slow_back);
            assert_eq!(back, slow_back);
            assert_eq!(
                errors(&weights, &fast, grid, [3.0, 14.0]).map(f32::to_bits),
                errors::scalar(&weights, &fast, grid, [3.0, 14.0]).map(f32::to_bits)
            );
        }
        let lane = |first: f32, step: f32| std::array::from_fn(|i| first + step * i as f32);
        let candidates = Candidates::new(lane(0.05, 0.004), lane(0.0, 1.0), lane(0.0, 0.03));
        for importance in [None, Some(&importance[..])] {
            let mut sums = [Fit::default(); 2];
            fit(&weights, importance, &candidates, &mut sums[0]);
            fit::scalar(&weights, importance, &candidates, &mut sums[1]);
            assert_eq!(sums[0], sums[1]);
            let mut sums = [[0.0; LANES]; 2];
            misfit(&weights, importance, &candidates, &mut sums[0]);
            misfit::scalar(&weights, importance, &candidates, &mut sums[1]);
            assert_eq!(sums[0].map(f32::to_bits), sums[1].map(f32::to_bits));
        }
    }
}

#[test]
#[should_panic(expected = "a code for every weight")]
fn lengths_must_agree() {
    symmetric::group_error(&[1.0; 4], &[8; 3], 1.0);
}

/// One weight at a time is the same as a group, ties and clipping included.
#[test]
fn the_nearest_code_of_a_weight_is_that_of_its_group() {
    let weights: Vec<f32> = (-400..400).map(|i| i as f32 * 0.25).collect();
    let grids = [
        symmetric::grid(1.0),
        symmetric::grid(-2.5),
        zero_point::grid(1.0, 3),
        zero_point::grid(0.5, 15),
        zero_point::grid(3.0, 0),
        affine::grid(1.5, -2.25),
    ];
    for grid in grids {
        let mut codes = vec![0; weights.len()];
        grid.encode(&weights, &mut codes);
        for (w, code) in weights.iter().zip(&codes) {
            assert_eq!(grid.nearest(*w), (*code, grid.decode(*code)), "{w} on {grid:?}");
        }
    }
}
