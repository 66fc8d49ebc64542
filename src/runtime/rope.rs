//! Rotary embedding of the leading dimensions of a head, in half-split pairs.

use std::ops::Range;

use super::Rounding;
use crate::spark::RopeParameters;

/// Inverse frequencies of one layer type.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    inv_freq: Vec<f32>,
}

/// Cosines and sines for a run of positions.
pub(crate) struct Angles {
    half: usize,
    /// Per position the cosines, then the sines.
    values: Vec<f32>,
}

impl Rope {
    /// The reference takes an f32 power and an f32 reciprocal, so a table in f64 would be *less*
    /// equal to it: 91 dB at position 2560. The power here is one in f64 rounded to f32. Of the
    /// published frequencies, 128 and 32, one differs from PyTorch's by 1 ulp: the 111th of the
    /// sliding layers, 3.4e-4. At position 2560 that turns its pair by 6e-8 too much, no more than
    /// rounding the angle to f32 does.
    pub(crate) fn new(parameters: RopeParameters) -> Self {
        let dims = parameters.rotary_dims;
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "meant to be f32")]
        let frequency = |i: usize| {
            let exponent = (2 * i) as f32 / dims as f32;
            1.0 / libm::pow(f64::from(parameters.theta as f32), f64::from(exponent)) as f32
        };
        Self { inv_freq: (0..dims / 2).map(frequency).collect() }
    }

    /// Angles are f32 products of position and inverse frequency.
    pub(crate) fn angles(&self, positions: Range<usize>) -> Angles {
        let half = self.inv_freq.len();
        let mut values = Vec::with_capacity(positions.len() * 2 * half);
        for position in positions {
            #[expect(clippy::cast_precision_loss, reason = "as the reference does")]
            let position = position as f32;
            values.extend(self.inv_freq.iter().map(|f| libm::cosf(position * f)));
            values.extend(self.inv_freq.iter().map(|f| libm::sinf(position * f)));
        }
        Angles { half, values }
    }
}

impl Angles {
    /// Cosines and sines at the `index`th position of the run, one for every pair.
    pub(crate) fn at(&self, index: usize) -> (&[f32], &[f32]) {
        self.values[index * 2 * self.half..][..2 * self.half].split_at(self.half)
    }

    /// Rotates the pairs `(i, i + half)` of a head at the `index`th position of the run.
    pub(crate) fn rotate(&self, index: usize, head: &mut [f32], rounding: Rounding) {
        let (cos, sin) = self.at(index);
        let (a, b) = head[..2 * self.half].split_at_mut(self.half);
        for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(cos.iter().zip(sin)) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
        rounding.apply(head);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_half_split_and_the_rest_passes() {
        let rope = Rope::new(RopeParameters { theta: 1e4, rotary_dims: 4 });
        assert_eq!(rope.inv_freq, [1.0, 0.01]);
        let mut head = [1.0, 0.0, 0.0, 2.0, 5.0, 6.0];
        rope.angles(3..4).rotate(0, &mut head, Rounding::None);
        // (1, 0) turned by 3 and (0, 2) by 0.03.
        let expected = [3f64.cos(), -2.0 * 0.03f64.sin(), 3f64.sin(), 2.0 * 0.03f64.cos(), 5.0, 6.0];
        for (found, expected) in head.into_iter().zip(expected) {
            assert!((f64::from(found) - expected).abs() < 1e-6, "{found} {expected}");
        }
    }

    #[test]
    fn position_zero_changes_nothing() {
        let rope = Rope::new(RopeParameters { theta: 5e6, rotary_dims: 8 });
        let mut head: Vec<f32> = (0..10).map(|i| i as f32 - 4.5).collect();
        let before = head.clone();
        rope.angles(0..1).rotate(0, &mut head, Rounding::None);
        assert_eq!(head, before);
    }

    /// From `1 / theta ** (arange(0, dims, 2).float() / dims)` in PyTorch 2.13.
    #[test]
    fn inverse_frequencies_have_the_bits_of_the_reference() {
        let check = |theta: f64, rotary_dims: usize, expected: &[(usize, u32)]| {
            let rope = Rope::new(RopeParameters { theta, rotary_dims });
            for (i, bits) in expected {
                assert_eq!(rope.inv_freq[*i].to_bits(), *bits, "theta {theta}, pair {i}");
            }
        };
        check(1e4, 256, &SLIDING);
        check(5e6, 64, &FULL);
    }

    const SLIDING: [(usize, u32); 7] = [
        (1, 0x3f6e39f8),
        (5, 0x3f32a506),
        (17, 0x3e96aaea),
        (42, 0x3d47763f),
        (63, 0x3c301052),
        (90, 0x3ac9d75c),
        (127, 0x38e15c91),
    ];
    const FULL: [(usize, u32); 7] = [
        (1, 0x3f1e165d),
        (3, 0x3e712429),
        (8, 0x3cad3d5e),
        (13, 0x3af8ea93),
        (21, 0x38287230),
        (30, 0x350cc8e3),
        (31, 0x34ade091),
    ];
}
