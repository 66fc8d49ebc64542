//! Means with their standard error, and tails.

use serde::{Deserialize, Serialize};

/// A mean and how far it may be off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Mean {
    /// The mean; 0 of nothing.
    pub mean: f64,
    /// Standard error of the mean, `sqrt(sum (x - mean)^2 / (n - 1) / n)`, as if the values were
    /// independent of each other, which is how `llama-perplexity` has it too. Null below two values.
    pub sem: Option<f64>,
}

impl Mean {
    /// Of any number of values. Two passes: the sum of squares of small deviations stays exact.
    pub fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        let n = count(values.clone().count());
        if n == 0.0 {
            return Self::default();
        }
        let mean = values.clone().sum::<f64>() / n;
        let squares: f64 = values.map(|x| (x - mean) * (x - mean)).sum();
        Self { mean, sem: (n > 1.0).then(|| (squares / (n - 1.0) / n).sqrt()) }
    }
}

/// Mean and tail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Quantiles {
    /// Mean.
    pub mean: f64,
    /// Its standard error; see [`Mean::sem`].
    pub sem: Option<f64>,
    /// Median.
    pub median: f64,
    /// 99 % of the positions are at or below.
    pub p99: f64,
    /// 99.9 % of the positions are at or below.
    pub p999: f64,
    /// Largest.
    pub max: f64,
}

impl Quantiles {
    /// Of any number of values; all zero for none.
    pub fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let Some(max) = sorted.last().copied() else { return Self::default() };
        // The smallest value that has at least the share p of all values at or below it.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small")]
        let at = |p: f64| sorted[((count(sorted.len()) * p).ceil() as usize).clamp(1, sorted.len()) - 1];
        let Mean { mean, sem } = Mean::of(sorted.iter().copied());
        Self { mean, sem, median: at(0.5), p99: at(0.99), p999: at(0.999), max }
    }
}

/// How often values fall between powers of ten, in quarters of a decade: for pictures of a tail.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    /// `counts[0]` is below `10^FROM`, `counts[i]` from `10^(FROM + (i - 1) / 4)` on, the last bin open.
    pub counts: Vec<usize>,
}

impl Histogram {
    /// The lowest edge is this power of ten.
    pub const FROM: i32 = -6;
    /// The highest edge is this power of ten.
    pub const TO: i32 = 1;
    /// Bins of a decade.
    pub const PER_DECADE: i32 = 4;

    /// The lower edges of all bins but the first.
    pub fn edges() -> impl Iterator<Item = f64> {
        let steps = (Self::TO - Self::FROM) * Self::PER_DECADE;
        (0..=steps).map(|i| 10f64.powf(f64::from(Self::FROM) + f64::from(i) / f64::from(Self::PER_DECADE)))
    }

    /// Of values that are not negative.
    pub fn of(values: &[f64]) -> Self {
        let edges: Vec<f64> = Self::edges().collect();
        let mut counts = vec![0; edges.len() + 1];
        for value in values {
            counts[edges.partition_point(|edge| edge <= value)] += 1;
        }
        Self { counts }
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
pub(super) fn count(n: usize) -> f64 {
    n as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_take_the_smallest_value_that_covers_the_share() {
        let values: Vec<f64> = (1..=1000).rev().map(f64::from).collect();
        let q = Quantiles::of(&values);
        assert_eq!((q.median, q.p99, q.p999, q.max, q.mean), (500.0, 990.0, 999.0, 1000.0, 500.5));
        assert_eq!(Quantiles::of(&[]), Quantiles::default());
    }

    /// The variance of 1..=n is n (n + 1) / 12.
    #[test]
    fn the_standard_error_is_that_of_the_mean() {
        let sem = Mean::of((1..=1000).map(f64::from)).sem.unwrap();
        assert!((sem - (1000.0f64 * 1001.0 / 12.0 / 1000.0).sqrt()).abs() < 1e-9, "{sem}");
        assert_eq!(Mean::of([3.0].into_iter()), Mean { mean: 3.0, sem: None });
        assert_eq!(Mean::of([].into_iter()), Mean { mean: 0.0, sem: None });
        assert_eq!(Mean::of([2.0, 2.0].into_iter()).sem, Some(0.0));
    }

    #[test]
    fn every_value_is_in_one_bin() {
        let histogram = Histogram::of(&[0.0, 1e-7, 1e-6, 1.0, 9.99, 10.0, 1e9]);
        assert_eq!(histogram.counts.iter().sum::<usize>(), 7);
        assert_eq!((histogram.counts[0], histogram.counts[1], *histogram.counts.last().unwrap()), (2, 1, 2));
        // 1 is 24 quarters of a decade above 1e-6.
        assert_eq!((histogram.counts[25], histogram.counts[28]), (1, 1));
    }
}
