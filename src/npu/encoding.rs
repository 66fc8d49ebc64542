//! How reals become codes: `real = (code - zero_point) * scale`.
//!
//! The rules are those of Qualcomm's HTP: activations unsigned and per tensor, whatever is the second
//! operand of a product of activations signed with zero point 0, results of Softmax and Sigmoid on
//! fixed grids.

use crate::calibrate::Range;
use crate::onnx::ElementType;

/// Width of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// 8 bits.
    Eight,
    /// 16 bits.
    Sixteen,
}

impl Bits {
    /// The unsigned type.
    pub fn unsigned(self) -> ElementType {
        match self {
            Self::Eight => ElementType::U8,
            Self::Sixteen => ElementType::U16,
        }
    }

    /// The signed type.
    pub fn signed(self) -> ElementType {
        match self {
            Self::Eight => ElementType::I8,
            Self::Sixteen => ElementType::I16,
        }
    }

    /// The largest unsigned code: 255 or 65535.
    pub fn levels(self) -> u16 {
        match self {
            Self::Eight => u16::from(u8::MAX),
            Self::Sixteen => u16::MAX,
        }
    }

    /// The largest signed code: 127 or 32767.
    pub fn largest(self) -> u16 {
        self.levels() / 2
    }

    /// The unsigned code of zero on a symmetric grid: 128 or 32768.
    pub fn middle(self) -> u16 {
        self.levels() / 2 + 1
    }
}

/// An encoding of a whole tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Encoding {
    /// Type of the codes.
    pub element: ElementType,
    /// Step; normal, finite and above zero.
    pub scale: f32,
    /// The code of zero.
    pub zero_point: u16,
}

impl Encoding {
    /// Unsigned, the ends of `range` (which is taken to hold zero) at the first and the last code.
    ///
    /// Returns `None` for a range without an extent that a grid could have.
    pub fn asymmetric(range: Range, bits: Bits) -> Option<Self> {
        let Range { min, max } = range.with_zero();
        let scale = step((f64::from(max) - f64::from(min)) / f64::from(bits.levels()))?;
        let zero = (-f64::from(min) / f64::from(scale)).round_ties_even();
        let zero_point = whole(zero.clamp(0.0, f64::from(bits.levels())));
        Some(Self { element: bits.unsigned(), scale, zero_point })
    }

    /// Signed with zero point 0, `amax` at the largest code.
    pub fn signed(amax: f32, bits: Bits) -> Option<Self> {
        let scale = step(f64::from(amax) / f64::from(bits.largest()))?;
        Some(Self { element: bits.signed(), scale, zero_point: 0 })
    }

    /// Unsigned on the grid of [`Encoding::signed`]: the codes are those plus a constant.
    pub fn shifted(self, bits: Bits) -> Self {
        Self { element: bits.unsigned(), scale: self.scale, zero_point: bits.middle() }
    }

    /// For cosines and sines: -1 to 1, which are codes 1 and 65535.
    pub fn unit(bits: Bits) -> Self {
        let scale = (1.0 / f64::from(bits.largest())) as f32;
        Self { element: bits.unsigned(), scale, zero_point: bits.middle() }
    }

    /// For probabilities: 0 to 1, both of them codes.
    pub fn probability(bits: Bits) -> Self {
        let scale = (1.0 / f64::from(bits.levels())) as f32;
        Self { element: bits.unsigned(), scale, zero_point: 0 }
    }

    /// For the results of Sigmoid: HTP demands steps of a power of two.
    pub fn sigmoid(bits: Bits) -> Self {
        let scale = (1.0 / (f64::from(bits.levels()) + 1.0)) as f32;
        Self { element: bits.unsigned(), scale, zero_point: 0 }
    }

    /// For a mask from `blocked` (below zero), which is code 0, to zero, which is the last code.
    pub fn mask(blocked: f32, bits: Bits) -> Self {
        let scale = (-f64::from(blocked) / f64::from(bits.levels())) as f32;
        Self { element: bits.unsigned(), scale, zero_point: bits.levels() }
    }

    /// Little-endian bytes of the zero point in the type of the codes.
    pub fn zero_point_bytes(self) -> Vec<u8> {
        self.zero_point.to_le_bytes()[..self.element.bytes()].to_vec()
    }
}

/// The step as an f32, if it is one that no processor flushes to zero.
fn step(step: f64) -> Option<f32> {
    let step = step as f32;
    (step.is_finite() && step >= f32::MIN_POSITIVE).then_some(step)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to 0 to 65535")]
fn whole(x: f64) -> u16 {
    x as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code of a real, as the ONNX operator defines it.
    fn code(e: Encoding, x: f32) -> f64 {
        f64::from(x / e.scale).round_ties_even() + f64::from(e.zero_point)
    }

    #[test]
    fn the_ends_of_a_range_are_the_first_and_the_last_code_and_zero_is_exact() {
        for (min, max) in [(-3.0, 5.0), (0.0, 7.0), (-2.0, 0.0), (-1e-3, 400.0)] {
            for bits in [Bits::Eight, Bits::Sixteen] {
                let e = Encoding::asymmetric(Range::new(min, max), bits).unwrap();
                let levels = f64::from(bits.levels());
                assert!(code(e, min).abs() <= 1.0 && (code(e, max) - levels).abs() <= 1.0, "{min} {max}");
                assert_eq!(code(e, 0.0), f64::from(e.zero_point));
            }
        }
        // 8 in 65535 steps; zero after 3/8 of them: 24575.6.
        let e = Encoding::asymmetric(Range::new(-3.0, 5.0), Bits::Sixteen).unwrap();
        assert_eq!((e.element, e.scale, e.zero_point), (ElementType::U16, 8.0 / 65535.0, 24576));
    }

    #[test]
    fn a_range_without_extent_has_no_grid() {
        for range in [Range::new(0.0, 0.0), Range::EMPTY, Range::new(0.0, 1e-40)] {
            assert_eq!(Encoding::asymmetric(range, Bits::Sixteen), None);
        }
        assert_eq!(Encoding::signed(0.0, Bits::Sixteen), None);
        assert!(Encoding::asymmetric(Range::new(f32::MIN, f32::MAX), Bits::Eight).is_some());
    }

    /// Section 4 of the export's contract gives these numbers.
    #[test]
    fn fixed_grids_are_those_of_the_contract() {
        let b = Bits::Sixteen;
        assert_eq!(
            Encoding::unit(b),
            Encoding { element: ElementType::U16, scale: 1.0 / 32767.0, zero_point: 32768 }
        );
        assert_eq!(Encoding::probability(b).scale, 1.0 / 65535.0);
        assert_eq!(Encoding::sigmoid(b).scale, 1.0 / 65536.0);
        assert_eq!(Encoding::sigmoid(Bits::Eight).scale, 1.0 / 256.0);
        let mask = Encoding::mask(-40.0, b);
        assert_eq!((mask.scale, mask.zero_point), (40.0 / 65535.0, 65535));
        assert_eq!((code(mask, -40.0), code(mask, 0.0)), (0.0, 65535.0));
        let key = Encoding::signed(7.4, b).unwrap();
        assert_eq!((key.element, key.zero_point), (ElementType::I16, 0));
        assert_eq!(key.shifted(b).zero_point, 32768);
        assert_eq!(key.shifted(b).scale, key.scale);
        assert_eq!((Bits::Eight.largest(), Bits::Eight.middle()), (127, 128));
        assert_eq!(Encoding::unit(b).zero_point_bytes(), [0, 128]);
        assert_eq!(Encoding::unit(Bits::Eight).zero_point_bytes(), [128]);
    }
}
