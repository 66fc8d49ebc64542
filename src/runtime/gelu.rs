//! Which form of GELU the MLP goes through.

use std::sync::LazyLock;

use half::f16;

use super::kernels::activation::gelu;

/// A form of GELU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gelu {
    /// `x / 2 (1 + erf(x / sqrt 2))`, as the model was trained and published.
    #[default]
    Exact,
    /// The tanh form as llama.cpp's CPU backend computes it: through a table of all f16 numbers, so that
    /// input and output are rounded to f16 (`ggml_vec_geglu_f32`). It is up to 4.7e-4 from the exact form,
    /// and the rounding comes on top.
    Tanh,
}

impl Gelu {
    /// Applies it in place.
    pub(super) fn apply(self, row: &mut [f32]) {
        match self {
            Self::Exact => gelu(row),
            Self::Tanh => {
                let table = &*TABLE;
                for x in row {
                    *x = through(table, *x);
                }
            }
        }
    }
}

/// Outputs by the bits of the input.
static TABLE: LazyLock<Vec<f16>> = LazyLock::new(|| {
    (0..=u16::MAX).map(|bits| f16::from_f32(tanh_form(f16::from_bits(bits).to_f32()))).collect()
});

/// `0.5 x (1 + tanh(sqrt(2 / pi) x (1 + 0.044715 x^2)))`, in f32.
fn tanh_form(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + libm::tanhf(SQRT_2_OVER_PI * x * (1.0 + 0.044_715 * x * x)))
}

/// From 10 on either side the table is passed by.
fn through(table: &[f16], x: f32) -> f32 {
    if x <= -10.0 {
        0.0
    } else if x >= 10.0 {
        x
    } else {
        table[usize::from(f16::from_f32(x).to_bits())].to_f32()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(gelu: Gelu, xs: &[f32]) -> Vec<f32> {
        let mut row = xs.to_vec();
        gelu.apply(&mut row);
        row
    }

    /// The definition in f64, of the rounded input; the result may be a neighbour where f32 and f64 round
    /// to different sides.
    #[test]
    fn the_table_holds_the_tanh_form_of_every_f16() {
        let mut moved = 0;
        for x in (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f32()).filter(|x| x.abs() < 10.0) {
            let exact = f64::from(x);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * exact * (1.0 + 0.044_715 * exact * exact);
            let expected = 0.5 * exact * (1.0 + libm::tanh(inner));
            let found = applied(Gelu::Tanh, &[x])[0];
            // An f16 has 11 bits; below 2^-14 its numbers are 2^-24 apart. 1 + tanh cancels on the left,
            // where f32 leaves 2^-24 of x.
            let unit = (expected.abs() / 2048.0).max(0.5f64.powi(25)) + exact.abs() * 0.5f64.powi(24);
            assert!((f64::from(found) - expected).abs() <= unit, "{x}: {found} for {expected}");
            moved += usize::from(found != applied(Gelu::Exact, &[x])[0]);
        }
        assert!(moved > 10_000, "the two forms differ: {moved}");
    }

    #[test]
    fn inputs_are_rounded_to_f16_and_large_ones_pass() {
        let between = 1.0 + 0.5f32.powi(12);
        assert_eq!(applied(Gelu::Tanh, &[between]), applied(Gelu::Tanh, &[1.0]));
        assert_ne!(applied(Gelu::Exact, &[between]), applied(Gelu::Exact, &[1.0]));
        assert_eq!(applied(Gelu::Tanh, &[-10.0, -1e30, 10.0, 12345.678]), [0.0, 0.0, 10.0, 12345.678]);
        assert!(applied(Gelu::Tanh, &[f32::NAN])[0].is_nan());
    }
}
