//! Where results are rounded to a narrower format.

use half::bf16;

/// The precision a forward pass is computed in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// Everything in f32.
    #[default]
    None,
    /// As the published code rounds when it runs in bf16: the outputs of norms, projections, rotary
    /// embedding, scores, probabilities, gates and activations are bf16, while the residual stream,
    /// the inside of norms and softmax, and the sums of products are f32.
    Bf16,
}

impl Rounding {
    /// Rounds one value, half to even.
    #[inline(always)]
    pub(crate) fn round(self, x: f32) -> f32 {
        match self {
            Self::None => x,
            Self::Bf16 => bf16_round(x),
        }
    }

    /// Rounds values in place.
    pub fn apply(self, values: &mut [f32]) {
        if self == Self::Bf16 {
            for x in values {
                *x = bf16_round(*x);
            }
        }
    }
}

/// Rounds to the nearest bf16 and back; written on the bits so that loops over it vectorise.
#[inline(always)]
fn bf16_round(x: f32) -> f32 {
    let bits = x.to_bits();
    let odd = (bits >> 16) & 1;
    let rounded = f32::from_bits(bits.wrapping_add(0x7fff + odd) & 0xffff_0000);
    if x.is_nan() { bf16::NAN.to_f32() } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_agrees_with_the_half_crate() {
        for i in 0..=u32::MAX / 9973 {
            let x = f32::from_bits(i * 9973);
            let expected = bf16::from_f32(x).to_f32();
            let found = Rounding::Bf16.round(x);
            assert!(found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()), "{x:e}");
        }
        for x in [1.0 + 0.5f32.powi(8), 1.0 + 3.0 * 0.5f32.powi(8), f32::MAX, -0.0] {
            assert_eq!(Rounding::Bf16.round(x).to_bits(), bf16::from_f32(x).to_f32().to_bits());
        }
        assert_eq!(Rounding::None.round(1.1), 1.1);
    }
}
