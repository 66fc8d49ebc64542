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

    #[test]
    fn the_ratio_is_in_decibels_and_silence_is_not_nan() {
        assert_eq!(ErrorSums { signal: 100.0, noise: 1.0 }.snr_db(), Some(20.0));
        assert_eq!(ErrorSums { signal: 5.0, noise: 0.0 }.snr_db(), None);
        assert_eq!(ErrorSums::default().snr_db(), None);
        assert_eq!(ErrorSums { signal: 0.0, noise: 1.0 }.snr_db(), Some(f64::NEG_INFINITY));
    }
}
