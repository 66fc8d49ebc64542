//! The interval that the values at a place were seen in.

use crate::tensor::{EXPONENT_BITS, amax_bits, extremes};

/// The smallest and the largest value seen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// The smallest; infinity while nothing was seen.
    pub min: f32,
    /// The largest; minus infinity while nothing was seen.
    pub max: f32,
}

impl Range {
    /// Of no values.
    pub const EMPTY: Self = Self { min: f32::INFINITY, max: f32::NEG_INFINITY };

    /// From one value to another.
    pub const fn new(min: f32, max: f32) -> Self {
        Self { min, max }
    }

    /// Of some values; `None` when one of them is NaN or infinite.
    pub fn of(values: &[f32]) -> Option<Self> {
        if amax_bits(values) >= EXPONENT_BITS {
            return None;
        }
        let [min, max] = extremes(values);
        Some(Self { min, max })
    }

    /// Whether nothing was seen.
    pub fn is_empty(self) -> bool {
        self.min > self.max
    }

    /// The smallest range that holds both.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self { min: self.min.min(other.min), max: self.max.max(other.max) }
    }

    /// The same around zero: what an encoding with an exact zero spans.
    #[must_use]
    pub fn with_zero(self) -> Self {
        self.union(Self::new(0.0, 0.0))
    }

    /// Both ends away from zero by `factor`, since texts that were not seen go further.
    #[must_use]
    pub fn widened(self, factor: f32) -> Self {
        let Self { min, max } = self.with_zero();
        Self { min: min * factor, max: max * factor }
    }

    /// The range of values that are multiplied by a `factor` above zero.
    #[must_use]
    pub fn times(self, factor: f32) -> Self {
        Self { min: self.min * factor, max: self.max * factor }
    }

    /// The largest magnitude; zero of no values.
    pub fn amax(self) -> f32 {
        let Self { min, max } = self.with_zero();
        max.max(-min)
    }

    /// Whether this reaches beyond `other` by more than `share` of its extent.
    pub fn outgrows(self, other: Self, share: f32) -> bool {
        let slack = (other.with_zero().max - other.with_zero().min) * share;
        self.min < other.min - slack || self.max > other.max + slack
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_grow_and_know_nothing_of_nan() {
        let range = Range::of(&[2.0, -1.0, 0.5]).unwrap();
        assert_eq!(range, Range::new(-1.0, 2.0));
        assert_eq!(range.union(Range::EMPTY), range);
        assert_eq!(range.union(Range::new(1.0, 3.0)), Range::new(-1.0, 3.0));
        assert_eq!(range.amax(), 2.0);
        assert!(Range::of(&[1.0, f32::NAN]).is_none() && Range::of(&[f32::NEG_INFINITY]).is_none());
        assert!(Range::EMPTY.is_empty() && !range.is_empty());
        assert_eq!(Range::EMPTY.amax(), 0.0);
    }

    #[test]
    fn widening_goes_away_from_zero_and_takes_zero_in() {
        assert_eq!(Range::new(-4.0, 8.0).widened(1.25), Range::new(-5.0, 10.0));
        assert_eq!(Range::new(2.0, 4.0).widened(1.25), Range::new(0.0, 5.0));
        assert_eq!(Range::new(-8.0, -4.0).widened(1.25), Range::new(-10.0, 0.0));
    }

    #[test]
    fn growth_is_measured_against_what_was_there() {
        let before = Range::new(-1.0, 1.0);
        assert!(!Range::new(-1.0, 1.01).outgrows(before, 0.01));
        assert!(Range::new(-1.0, 1.03).outgrows(before, 0.01));
        assert!(Range::new(0.0, 0.1).outgrows(Range::EMPTY, 0.01));
    }
}
