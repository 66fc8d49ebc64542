//! How far one model's logits are from another's, position by position.
//!
//! Streaming: logits are looked at once and dropped; per position a few numbers stay. Logarithms of
//! sums are taken in f64, since the divergences of interest are smaller than an f32 can hold beside
//! a logit.

use serde::Serialize;

use crate::quant::ErrorSums;
use crate::runtime::argmax;

/// Tokens of the reference whose log-probabilities are compared.
pub const TOP: usize = 20;

/// A reference's choice with a margin of at most this many nats is as good as undecided.
pub const TIE_NATS: f64 = 0.05;

/// The comparison of two models on one text.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    logits: ErrorSums,
    kl: Vec<f64>,
    same_top: usize,
    top_overlap: usize,
    max_logprob_diff: f64,
}

/// What a [`Comparison`] comes to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Positions compared.
    pub positions: usize,
    /// `10 log10(sum r^2 / sum (r - y)^2)` over all logits; null where they are equal.
    pub logits_snr_db: Option<f64>,
    /// KL(reference || other) per position, in nats.
    pub kl: Quantiles,
    /// Share of positions with the same most likely token.
    pub same_top: f64,
    /// Mean share of the reference's 20 most likely tokens that are among the other's.
    pub top20_overlap: f64,
    /// Largest difference of log-probability among the reference's 20 most likely tokens, in nats.
    pub max_logprob_diff: f64,
}

/// Mean and tail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub median: f64,
    /// 99 % of the positions are at or below.
    pub p99: f64,
    /// 99.9 % of the positions are at or below.
    pub p999: f64,
    /// Largest.
    pub max: f64,
}

/// What one position contributes.
#[derive(Clone, Copy, Debug)]
pub struct Position {
    logits: ErrorSums,
    kl: f64,
    same_top: bool,
    top_overlap: usize,
    max_logprob_diff: f64,
}

impl Position {
    /// Compares the logits of both models over the vocabulary.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn of(reference: &[f32], other: &[f32]) -> Self {
        assert_eq!(reference.len(), other.len(), "two vocabularies");
        let (log_r, log_y) = (log_sum_exp(reference), log_sum_exp(other));
        let mut logits = ErrorSums::default();
        let mut kl = 0.0;
        for (r, y) in reference.iter().zip(other) {
            let (r, y) = (f64::from(*r), f64::from(*y));
            logits += ErrorSums { signal: r * r, noise: (r - y) * (r - y) };
            kl += (r - log_r).exp() * ((r - log_r) - (y - log_y));
        }
        let (top_r, top_y) = (top(reference), top(other));
        let logprob_diff =
            |t: &usize| ((f64::from(reference[*t]) - log_r) - (f64::from(other[*t]) - log_y)).abs();
        Self {
            logits,
            // It is not negative but for rounding.
            kl: kl.max(0.0),
            same_top: argmax(reference) == argmax(other),
            top_overlap: top_r.iter().filter(|t| top_y.contains(t)).count(),
            max_logprob_diff: top_r.iter().map(logprob_diff).fold(0.0, f64::max),
        }
    }
}

impl Comparison {
    /// Takes in one position.
    pub fn add(&mut self, position: Position) {
        self.logits += position.logits;
        self.kl.push(position.kl);
        self.same_top += usize::from(position.same_top);
        self.top_overlap += position.top_overlap;
        self.max_logprob_diff = self.max_logprob_diff.max(position.max_logprob_diff);
    }

    /// Takes in the positions of another comparison.
    pub fn merge(&mut self, other: &Self) {
        self.logits += other.logits;
        self.kl.extend(&other.kl);
        self.same_top += other.same_top;
        self.top_overlap += other.top_overlap;
        self.max_logprob_diff = self.max_logprob_diff.max(other.max_logprob_diff);
    }

    /// The figures.
    pub fn summary(&self, vocab_size: usize) -> Summary {
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
        let share = |count: usize, of: usize| count as f64 / of.max(1) as f64;
        let positions = self.kl.len();
        Summary {
            positions,
            logits_snr_db: self.logits.snr_db(),
            kl: Quantiles::of(&self.kl),
            same_top: share(self.same_top, positions),
            top20_overlap: share(self.top_overlap, positions * TOP.min(vocab_size)),
            max_logprob_diff: self.max_logprob_diff,
        }
    }
}

impl Quantiles {
    /// Of any number of values; all zero for none.
    pub fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let Some(max) = sorted.last().copied() else { return Self::default() };
        // The smallest value that has at least the share p of all values at or below it.
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "small"
        )]
        let at = |p: f64| sorted[((sorted.len() as f64 * p).ceil() as usize).clamp(1, sorted.len()) - 1];
        #[expect(clippy::cast_precision_loss, reason = "small")]
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        Self { mean, median: at(0.5), p99: at(0.99), p999: at(0.999), max }
    }
}

/// `ln(sum(exp(x)))`.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + logits.iter().map(|x| (f64::from(*x) - max).exp()).sum::<f64>().ln()
}

/// The most likely tokens, likeliest first; of equal ones the lower id.
fn top(logits: &[f32]) -> Vec<usize> {
    let mut best: Vec<usize> = Vec::with_capacity(TOP + 1);
    for (token, x) in logits.iter().enumerate() {
        if best.len() == TOP && logits[best[TOP - 1]] >= *x {
            continue;
        }
        let at = best.partition_point(|b| logits[*b] >= *x);
        best.insert(at, token);
        best.truncate(TOP);
    }
    best
}

/// How far a greedy continuation goes along with the reference's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Greedy {
    /// Tokens up to the first divergence.
    pub matched: usize,
    /// Tokens compared.
    pub of: usize,
    /// Where and how decidedly they part, if they do.
    pub divergence: Option<Divergence>,
}

/// The first token that differs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Divergence {
    /// Index in the continuation.
    pub index: usize,
    /// The reference's log-probability of its choice less that of the other model's, in nats.
    pub margin_nats: f64,
    /// Whether the margin is at most [`TIE_NATS`].
    pub tie: bool,
}

impl Greedy {
    /// Compares choices by teacher forcing: position by position the logits of both models after the
    /// reference's own tokens. The other model's greedy text equals the reference's up to the first
    /// position where their choices differ, since up to there both have seen the same tokens.
    pub fn start() -> Self {
        Self { matched: 0, of: 0, divergence: None }
    }

    /// Takes in the next position of the continuation.
    pub fn add(&mut self, reference: &[f32], other: &[f32]) {
        let (choice, theirs) = (argmax(reference) as usize, argmax(other) as usize);
        if self.divergence.is_none() {
            if choice == theirs {
                self.matched += 1;
            } else {
                let margin_nats = f64::from(reference[choice]) - f64::from(reference[theirs]);
                self.divergence =
                    Some(Divergence { index: self.of, margin_nats, tie: margin_nats <= TIE_NATS });
            }
        }
        self.of += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn softmax(logits: &[f32]) -> Vec<f64> {
        let e: Vec<f64> = logits.iter().map(|x| f64::from(*x).exp()).collect();
        let sum: f64 = e.iter().sum();
        e.into_iter().map(|x| x / sum).collect()
    }

    #[test]
    fn figures_are_those_of_their_definitions() {
        let (r, y) = ([1.0f32, 2.0, 0.0, -1.0], [1.5f32, 1.25, 0.0, -1.0]);
        let mut comparison = Comparison::default();
        comparison.add(Position::of(&r, &y));
        comparison.add(Position::of(&r, &r));
        let summary = comparison.summary(4);
        let (p, q) = (softmax(&r), softmax(&y));
        let kl: f64 = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum();
        assert!((summary.kl.max - kl).abs() < 1e-12 && (summary.kl.mean - kl / 2.0).abs() < 1e-12);
        assert_eq!(summary.kl.median, 0.0);
        // Signal 2 * (1 + 4 + 0 + 1), noise 0.25 + 0.5625.
        assert!((summary.logits_snr_db.unwrap() - 10.0 * (12.0f64 / 0.8125).log10()).abs() < 1e-9);
        assert_eq!((summary.positions, summary.same_top), (2, 0.5));
        assert_eq!(summary.top20_overlap, 1.0);
        let largest = p.iter().zip(&q).map(|(p, q)| (p.ln() - q.ln()).abs()).fold(0.0, f64::max);
        assert!((summary.max_logprob_diff - largest).abs() < 1e-12);
    }

    #[test]
    fn equal_logits_lose_nothing_however_large_they_are() {
        let logits = [3e38f32, -3e38, 0.0];
        let mut comparison = Comparison::default();
        comparison.add(Position::of(&logits, &logits));
        let summary = comparison.summary(3);
        assert_eq!((summary.kl.max, summary.logits_snr_db, summary.same_top), (0.0, None, 1.0));
    }

    #[test]
    fn quantiles_take_the_smallest_value_that_covers_the_share() {
        let values: Vec<f64> = (1..=1000).rev().map(f64::from).collect();
        let q = Quantiles::of(&values);
        assert_eq!((q.median, q.p99, q.p999, q.max, q.mean), (500.0, 990.0, 999.0, 1000.0, 500.5));
        assert_eq!(Quantiles::of(&[]), Quantiles::default());
    }

    #[test]
    fn the_top_is_ordered_and_prefers_the_lower_id() {
        let logits: Vec<f32> = (0..100).map(|i| ((i * 37) % 50) as f32).collect();
        let mut expected: Vec<usize> = (0..100).collect();
        expected.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        assert_eq!(top(&logits), expected[..TOP]);
    }

    #[test]
    fn greedy_stops_at_the_first_difference_and_says_how_decided_it_was() {
        let mut greedy = Greedy::start();
        greedy.add(&[1.0, 0.0], &[2.0, 0.0]);
        greedy.add(&[1.0, 0.97], &[0.0, 0.5]);
        greedy.add(&[5.0, 0.0], &[0.0, 5.0]);
        assert_eq!((greedy.matched, greedy.of), (1, 3));
        let divergence = greedy.divergence.unwrap();
        assert_eq!((divergence.index, divergence.tie), (1, true));
        assert!((divergence.margin_nats - 0.03).abs() < 1e-6);
    }
}
