//! Exponential, error function and what is made of them.
//!
//! Written out rather than taken from the C library, so that they vectorise and give the same bits
//! on every system. The polynomials were fitted for this file (weighted least squares, reweighted
//! towards the smallest largest error); the tests hold them against `libm` in f64.

use crate::runtime::Rounding;
use crate::simd::{LANES, multiversion, sum_lanes};

/// `e^x`, within 1 ulp (subnormal results within 1 unit of the last place).
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// Adding it moves the integer part of a float into its lowest bits.
    const MAGIC: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Past these the result is 0 or infinite anyway; a NaN passes both comparisons.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let p = 0.001_381_446_5f32;
    let p = p.mul_add(r, 0.008_368_781);
    let p = p.mul_add(r, 0.041_668_393);
    let p = p.mul_add(r, 0.166_665_2);
    let p = p.mul_add(r, 0.499_999_94);
    let p = (p * r).mul_add(r, r) + 1.0;
    // 2^n in two factors, since one alone could leave the range of an f32.
    #[expect(clippy::cast_possible_wrap, reason = "bits are bits")]
    let n = (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let (half, rest) = (n >> 1, n - (n >> 1));
    #[expect(clippy::cast_sign_loss, reason = "bits are bits")]
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    p * power(half) * power(rest)
}

/// The error function, within 2 ulp.
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    let a = x.abs();
    // Below 1: x + x P(x^2).
    let u = a * a;
    let p = 7.847_214e-5f32;
    let p = p.mul_add(u, -0.000_800_834_4);
    let p = p.mul_add(u, 0.005_188_136);
    let p = p.mul_add(u, -0.026_853_722);
    let p = p.mul_add(u, 0.112_835_83);
    let p = p.mul_add(u, -0.376_126_26);
    let p = p.mul_add(u, 0.128_379_17);
    let small = p.mul_add(a, a);
    // From 1 on: 1 - e^Q(x), with Q the logarithm of the complement; from 4 on that is 1.
    let c = if a > 4.0 { 4.0 } else { a };
    let q = 1.858_160_4e-4f32;
    let q = q.mul_add(c, -0.002_942_079_7);
    let q = q.mul_add(c, 0.021_815_613);
    let q = q.mul_add(c, -0.103_059_74);
    let q = q.mul_add(c, -0.638_198_9);
    let q = q.mul_add(c, -1.127_056_8);
    let q = q.mul_add(c, -0.000_349_438_43);
    let large = 1.0 - exp(q);
    (if a < 1.0 { small } else { large }).copysign(x)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

multiversion! {
    /// Exact GELU in place, `x / 2 (1 + erf(x / sqrt 2))`.
    pub(crate) fn gelu(row: &mut [f32]) {
        for x in row.iter_mut() {
            *x = *x * 0.5 * (1.0 + erf(*x * std::f32::consts::FRAC_1_SQRT_2));
        }
    }
}

multiversion! {
    /// Turns dot products of a query and its visible keys into probabilities, in place.
    ///
    /// The published code scales and subtracts the maximum in the precision of the projections and
    /// takes the softmax in f32.
    pub(crate) fn softmax(scores: &mut [f32], scale: f32, rounding: Rounding) {
        for s in scores.iter_mut() {
            *s = rounding.round(rounding.round(*s) * scale);
        }
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (chunks, rest) = scores.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, s) in lanes.iter_mut().zip(chunk) {
                *lane = if *s > *lane { *s } else { *lane };
            }
        }
        let max = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |m, s| if *s > m { *s } else { m });
        let mut sums = [0.0f32; LANES];
        let (chunks, rest) = scores.as_chunks_mut::<LANES>();
        for chunk in chunks {
            for (sum, s) in sums.iter_mut().zip(chunk) {
                *s = exp(rounding.round(*s - max));
                *sum += *s;
            }
        }
        for (sum, s) in sums.iter_mut().zip(rest) {
            *s = exp(rounding.round(*s - max));
            *sum += *s;
        }
        let sum = sum_lanes(sums);
        for s in scores.iter_mut() {
            *s /= sum;
        }
        rounding.apply(scores);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every 997th float, both signs.
    fn floats() -> impl Iterator<Item = f32> {
        (0..0xff00_0000u32 / 997).map(|i| f32::from_bits((i * 997).rotate_right(1))).filter(|x| x.is_finite())
    }

    /// Distance in units of the last place of the exact value.
    fn ulps(found: f32, exact: f64) -> f64 {
        let nearest = (exact as f32).abs().max(f32::MIN_POSITIVE);
        let unit = f32::from_bits(nearest.to_bits() & 0x7f80_0000) * f32::EPSILON;
        (f64::from(found) - exact).abs() / f64::from(unit)
    }

    #[test]
    fn exp_is_within_one_ulp() {
        let range = |x: &f32| (-120.0..89.0).contains(x);
        let worst = floats().filter(range).map(|x| ulps(exp(x), libm::exp(f64::from(x))));
        let dense = (-1000..890_000).map(|i| i as f32 * 1e-4 - 0.013).filter(range);
        let worst = worst.chain(dense.map(|x| ulps(exp(x), libm::exp(f64::from(x))))).fold(0.0, f64::max);
        assert!(worst < 1.0, "{worst}");
        assert_eq!((exp(0.0), exp(-200.0), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        assert_eq!((exp(100.0), exp(f32::INFINITY)), (f32::INFINITY, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn erf_is_within_two_ulp_and_odd() {
        let dense = (0..600_000).map(|i| i as f32 * 1e-5);
        let worst = floats().chain(dense).map(|x| ulps(erf(x), libm::erf(f64::from(x)))).fold(0.0, f64::max);
        assert!(worst < 2.0, "{worst}");
        assert_eq!((erf(-0.75), erf(f32::INFINITY), erf(-9.0)), (-erf(0.75), 1.0, -1.0));
        assert!(erf(f32::NAN).is_nan());
    }

    /// The tanh form differs by up to 4.7e-4.
    #[test]
    fn gelu_is_the_exact_form() {
        let mut row: Vec<f32> = (-80_000..80_000).map(|i| i as f32 * 1e-4).collect();
        let exact: Vec<f64> = (row.iter().map(|x| f64::from(*x)))
            .map(|x| x / 2.0 * (1.0 + libm::erf(x / 2f64.sqrt())))
            .collect();
        gelu(&mut row);
        let worst = row.iter().zip(exact).map(|(x, e)| (f64::from(*x) - e).abs()).fold(0.0, f64::max);
        assert!(worst < 5e-7, "{worst}");
    }

    #[test]
    fn sigmoid_saturates_without_nan() {
        assert_eq!([0.0, 200.0, -200.0].map(sigmoid), [0.5, 1.0, 0.0]);
        assert!((sigmoid(1.5) - 0.817_574_5).abs() < 1e-7);
    }

    #[test]
    fn softmax_sums_to_one_and_survives_large_scores() {
        let mut scores: Vec<f32> = (0..37).map(|i| 3e4 + i as f32 * 2.0).collect();
        softmax(&mut scores, 0.5, Rounding::None);
        assert!((scores.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert!((scores[36] / scores[35] - std::f32::consts::E).abs() < 1e-5);
        let mut one = [-5.0];
        softmax(&mut one, 1.0, Rounding::Bf16);
        assert_eq!(one, [1.0]);
    }

    #[test]
    fn both_builds_agree() {
        let row: Vec<f32> = (0..1003).map(|i| (i as f32 * 0.37).sin() * 6.0).collect();
        let (mut a, mut b) = (row.clone(), row.clone());
        gelu(&mut a);
        gelu::scalar(&mut b);
        assert_eq!(a, b);
        for rounding in [Rounding::None, Rounding::Bf16] {
            let (mut a, mut b) = (row.clone(), row.clone());
            softmax(&mut a, 0.3, rounding);
            softmax::scalar(&mut b, 0.3, rounding);
            assert_eq!(a, b);
        }
    }
}
