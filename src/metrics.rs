//! How far one model's logits are from another's, position by position.
//!
//! Streaming: logits are looked at once and dropped; per position a few numbers stay. Logarithms of
//! sums are taken in f64, since the divergences of interest are smaller than an f32 can hold beside
//! a logit.

mod greedy;
mod spread;

use serde::{Deserialize, Serialize};

use crate::quant::ErrorSums;
use crate::runtime::argmax;
pub use greedy::{Divergence, Greedy, TIE_NATS};
use spread::count;
pub use spread::{Histogram, Mean, Quantiles};

/// Tokens of the reference whose log-probabilities are compared.
pub const TOP: usize = 20;

/// The lowest SNR that is reported: noise over silence has none.
const LOWEST_SNR_DB: f64 = -1000.0;

/// The comparison of two models on one text.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    logits: ErrorSums,
    kl: Vec<f64>,
    same_top: Vec<bool>,
    top_overlap: Vec<usize>,
    max_logprob_diff: f64,
    /// Negative log-likelihoods of the text's next token: the reference's, the other's.
    nll: Vec<[f64; 2]>,
    not_finite: usize,
}

/// What a [`Comparison`] comes to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Positions compared.
    pub positions: usize,
    /// Positions that could not be compared, since a logit is NaN or infinite. Any of them is a finding.
    pub not_finite: usize,
    /// `10 log10(sum r^2 / sum (r - y)^2)` over all logits; null where they are equal.
    pub logits_snr_db: Option<f64>,
    /// KL(reference || other) per position, in nats.
    pub kl: Quantiles,
    /// Share of positions with the same most likely token.
    pub same_top: f64,
    /// Its standard error; see [`Mean::sem`].
    pub same_top_sem: Option<f64>,
    /// Mean share of the reference's 20 most likely tokens that are among the other's.
    pub top20_overlap: f64,
    /// Its standard error.
    pub top20_overlap_sem: Option<f64>,
    /// Largest difference of log-probability among the reference's 20 most likely tokens, in nats.
    pub max_logprob_diff: f64,
    /// How well both predict the text; null where no token follows.
    pub perplexity: Option<Perplexity>,
}

/// How well both models predict a text that neither of them wrote.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Perplexity {
    /// Tokens predicted.
    pub tokens: usize,
    /// `exp` of the mean negative log-likelihood, of the reference.
    pub reference: f64,
    /// The same of the other model.
    pub other: f64,
    /// Mean of `ln(other / reference)` over the tokens. Token by token the difference is much surer than
    /// either perplexity.
    pub ln_ratio: Mean,
}

/// What one position contributes.
#[derive(Clone, Copy, Debug)]
pub struct Position {
    logits: ErrorSums,
    kl: f64,
    same_top: bool,
    top_overlap: usize,
    max_logprob_diff: f64,
    nll: Option<[f64; 2]>,
    finite: bool,
}

impl Position {
    /// Compares the logits of both models over the vocabulary.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn of(reference: &[f32], other: &[f32]) -> Self {
        Self::before(reference, other, None)
    }

    /// The same, where the text goes on with the token `next`.
    ///
    /// # Panics
    /// When the lengths differ, or the token is outside the vocabulary.
    pub fn before(reference: &[f32], other: &[f32], next: Option<u32>) -> Self {
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
        let nll = |t: u32| {
            let t = t as usize;
            [log_r - f64::from(reference[t]), log_y - f64::from(other[t])]
        };
        Self {
            logits,
            // It is not negative but for rounding.
            kl: kl.max(0.0),
            same_top: argmax(reference) == argmax(other),
            top_overlap: top_r.iter().filter(|t| top_y.contains(t)).count(),
            max_logprob_diff: top_r.iter().map(logprob_diff).fold(0.0, f64::max),
            nll: next.map(nll),
            // `f64::max` above prefers zero to NaN.
            finite: reference.iter().chain(other).all(|x| x.is_finite()),
        }
    }
}

impl Comparison {
    /// Takes in one position.
    pub fn add(&mut self, position: Position) {
        if !position.finite {
            self.not_finite += 1;
            return;
        }
        self.logits += position.logits;
        self.kl.push(position.kl);
        self.same_top.push(position.same_top);
        self.top_overlap.push(position.top_overlap);
        self.max_logprob_diff = self.max_logprob_diff.max(position.max_logprob_diff);
        self.nll.extend(position.nll);
    }

    /// Takes in the positions of another comparison.
    pub fn merge(&mut self, other: &Self) {
        self.logits += other.logits;
        self.kl.extend(&other.kl);
        self.same_top.extend(&other.same_top);
        self.top_overlap.extend(&other.top_overlap);
        self.max_logprob_diff = self.max_logprob_diff.max(other.max_logprob_diff);
        self.nll.extend(&other.nll);
        self.not_finite += other.not_finite;
    }

    /// The figures.
    pub fn summary(&self, vocab_size: usize) -> Summary {
        let top = count(TOP.min(vocab_size).max(1));
        let same_top = Mean::of(self.same_top.iter().map(|same| f64::from(u8::from(*same))));
        let overlap = Mean::of(self.top_overlap.iter().map(|n| count(*n) / top));
        Summary {
            positions: self.kl.len(),
            not_finite: self.not_finite,
            logits_snr_db: self.logits.snr_db().map(|db| db.max(LOWEST_SNR_DB)),
            kl: Quantiles::of(&self.kl),
            same_top: same_top.mean,
            same_top_sem: same_top.sem,
            top20_overlap: overlap.mean,
            top20_overlap_sem: overlap.sem,
            max_logprob_diff: self.max_logprob_diff,
            perplexity: self.perplexity(),
        }
    }

    /// How the divergences of all positions spread.
    pub fn kl_histogram(&self) -> Histogram {
        Histogram::of(&self.kl)
    }

    fn perplexity(&self) -> Option<Perplexity> {
        // A hopeless model's is as large as a number can be, which JSON can hold.
        let perplexity = |i: usize| Mean::of(self.nll.iter().map(move |nll| nll[i])).mean.exp().min(f64::MAX);
        (!self.nll.is_empty()).then(|| Perplexity {
            tokens: self.nll.len(),
            reference: perplexity(0),
            other: perplexity(1),
            ln_ratio: Mean::of(self.nll.iter().map(|[reference, other]| other - reference)),
        })
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
    fn the_top_is_ordered_and_prefers_the_lower_id() {
        let logits: Vec<f32> = (0..100).map(|i| ((i * 37) % 50) as f32).collect();
        let mut expected: Vec<usize> = (0..100).collect();
        expected.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        assert_eq!(top(&logits), expected[..TOP]);
    }

    #[test]
    fn perplexities_are_those_of_the_next_tokens() {
        let (r, y) = ([1.0f32, 2.0, 0.0, -1.0], [1.5f32, 1.25, 0.0, -1.0]);
        let mut comparison = Comparison::default();
        comparison.add(Position::before(&r, &y, Some(1)));
        comparison.add(Position::before(&r, &y, Some(3)));
        comparison.add(Position::of(&r, &y));
        let found = comparison.summary(4).perplexity.unwrap();
        let (p, q) = (softmax(&r), softmax(&y));
        assert_eq!(found.tokens, 2);
        assert!((found.reference - (1.0 / (p[1] * p[3])).sqrt()).abs() < 1e-9);
        assert!((found.other - (1.0 / (q[1] * q[3])).sqrt()).abs() < 1e-9);
        assert!((found.ln_ratio.mean - (found.other / found.reference).ln()).abs() < 1e-12);
        let [a, b] = [1, 3].map(|t: usize| (p[t] / q[t]).ln());
        assert!((found.ln_ratio.sem.unwrap() - (a - b).abs() / 2.0).abs() < 1e-12);
        assert_eq!(Comparison::default().summary(4).perplexity, None);
    }

    /// NaN must not pass for a divergence of zero.
    #[test]
    fn what_is_not_finite_is_counted_and_not_compared() {
        let mut comparison = Comparison::default();
        comparison.add(Position::of(&[1.0, 2.0], &[1.0, 2.0]));
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            comparison.add(Position::of(&[1.0, 2.0], &[poison, 2.0]));
        }
        let summary = comparison.summary(2);
        assert_eq!((summary.positions, summary.not_finite, summary.kl.max), (1, 3, 0.0));
    }
}
