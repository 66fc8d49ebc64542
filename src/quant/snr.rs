//! Signal-to-noise ratio of a quantized tensor.

use std::iter::Sum;
use std::ops::AddAssign;

/// Sums of squares behind a signal-to-noise ratio; add them up in a fixed order.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ErrorSums {
    /// Sum of `w^2`.
    pub signal: f64,
    /// Sum of `(w - dequantized)^2`.
    pub noise: f64,
}

impl ErrorSums {
    /// Of rows of weights `[n, in]` and what they decode to, the squares of each column `[in]` counted by so
    /// much; all alike if nothing is said.
    ///
    /// With `columns` the mean squares of a matrix's inputs, `noise` is the mean energy of what rounding adds to its
    /// outputs, as far as the errors of different weights have nothing to do with each other.
    ///
    /// # Panics
    /// When the lengths differ, or are not of whole rows.
    pub fn weighted(weights: &[f32], decoded: &[f32], in_features: usize, columns: Option<&[f64]>) -> Self {
        assert_eq!(weights.len(), decoded.len(), "what every weight decodes to");
        assert!(
            weights.len().is_multiple_of(in_features),
            "{} weights in rows of {in_features}",
            weights.len()
        );
        assert!(columns.is_none_or(|c| c.len() == in_features), "a number for every column");
        let mut sums = Self::default();
        for (row, decoded) in weights.chunks_exact(in_features).zip(decoded.chunks_exact(in_features)) {
            for (column, (w, d)) in row.iter().zip(decoded).enumerate() {
                let (w, d) = (f64::from(*w), f64::from(*d));
                let counts = columns.map_or(1.0, |columns| columns[column]);
                sums.signal += counts * w * w;
                sums.noise += counts * (w - d) * (w - d);
            }
        }
        sums
    }

    /// `noise / signal`, 0 where nothing was lost.
    pub fn relative(&self) -> f64 {
        if self.noise == 0.0 { 0.0 } else { self.noise / self.signal }
    }

    /// `10 log10(signal / noise)`, or `None` where nothing was lost (an all-zero tensor included).
    pub fn snr_db(&self) -> Option<f64> {
        if self.noise == 0.0 { None } else { Some(10.0 * (self.signal / self.noise).log10()) }
    }
}

impl AddAssign for ErrorSums {
    fn add_assign(&mut self, other: Self) {
        self.signal += other.signal;
        self.noise += other.noise;
    }
}

impl Sum for ErrorSums {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |mut total, part| {
            total += part;
            total
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows of two: squares 1, 4, 9 and 16, errors 0.5, 0, 1 and 2.
    #[test]
    fn columns_count_by_what_is_said_of_them() {
        let (weights, decoded) = ([1.0, 2.0, 3.0, 4.0], [0.5, 2.0, 4.0, 2.0]);
        let plain = ErrorSums::weighted(&weights, &decoded, 2, None);
        assert_eq!(plain, ErrorSums { signal: 30.0, noise: 0.25 + 1.0 + 4.0 });
        let weighted = ErrorSums::weighted(&weights, &decoded, 2, Some(&[4.0, 0.5]));
        assert_eq!(weighted, ErrorSums { signal: 4.0 * 10.0 + 0.5 * 20.0, noise: 4.0 * 1.25 + 0.5 * 4.0 });
        assert_eq!(weighted.relative(), 7.0 / 50.0);
        assert_eq!(ErrorSums::default().relative(), 0.0);
    }

    #[test]
    fn the_ratio_is_in_decibels_and_silence_is_not_nan() {
        assert_eq!(ErrorSums { signal: 100.0, noise: 1.0 }.snr_db(), Some(20.0));
        assert_eq!(ErrorSums { signal: 5.0, noise: 0.0 }.snr_db(), None);
        assert_eq!(ErrorSums::default().snr_db(), None);
        assert_eq!(ErrorSums { signal: 0.0, noise: 1.0 }.snr_db(), Some(f64::NEG_INFINITY));
    }
}
