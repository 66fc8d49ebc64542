//! How far a greedy continuation goes along with the reference's.

use serde::{Deserialize, Serialize};

use super::spread::count;
use crate::runtime::argmax;

/// A reference's choice with a margin of at most this many nats is as good as undecided.
pub const TIE_NATS: f64 = 0.05;

/// How far a greedy continuation goes along with the reference's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Greedy {
    /// Tokens up to the first divergence.
    pub matched: usize,
    /// The same, with all tokens where the first divergence is a tie: the reference was undecided itself.
    pub kept: usize,
    /// Tokens compared.
    pub of: usize,
    /// Where and how decidedly they part, if they do; of several prompts the first that parts.
    pub divergence: Option<Divergence>,
}

/// The first token that differs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Divergence {
    /// Index in the continuation.
    pub index: usize,
    /// The reference's log-probability of its choice less that of the other model's, in nats.
    pub margin_nats: f64,
    /// Whether the margin is at most [`TIE_NATS`].
    pub tie: bool,
    /// What the reference chose.
    pub reference_token: u32,
    /// What the other model chose.
    pub other_token: u32,
}

impl Greedy {
    /// Compares choices by teacher forcing: position by position the logits of both models after the
    /// reference's own tokens. The other model's greedy text equals the reference's up to the first
    /// position where their choices differ, since up to there both have seen the same tokens.
    pub fn start() -> Self {
        Self::default()
    }

    /// Takes in the next position of the continuation.
    pub fn add(&mut self, reference: &[f32], other: &[f32]) {
        let (reference_token, other_token) = (argmax(reference), argmax(other));
        if self.divergence.is_none() {
            if reference_token == other_token {
                self.matched += 1;
            } else {
                let margin_nats = f64::from(reference[reference_token as usize])
                    - f64::from(reference[other_token as usize]);
                let tie = margin_nats <= TIE_NATS;
                self.divergence =
                    Some(Divergence { index: self.of, margin_nats, tie, reference_token, other_token });
            }
        }
        self.of += 1;
        self.kept = if self.divergence.is_some_and(|d| d.tie) { self.of } else { self.matched };
    }

    /// Takes in the continuation of another prompt.
    pub fn merge(&mut self, other: &Self) {
        self.matched += other.matched;
        self.kept += other.kept;
        self.of += other.of;
        self.divergence = self.divergence.or(other.divergence);
    }

    /// Share of the tokens kept; 0 of none.
    pub fn share(&self) -> f64 {
        count(self.kept) / count(self.of.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_stops_at_the_first_difference_and_says_how_decided_it_was() {
        let mut greedy = Greedy::start();
        greedy.add(&[1.0, 0.0], &[2.0, 0.0]);
        greedy.add(&[1.0, 0.97], &[0.0, 0.5]);
        greedy.add(&[5.0, 0.0], &[0.0, 5.0]);
        assert_eq!((greedy.matched, greedy.kept, greedy.of), (1, 3, 3));
        let divergence = greedy.divergence.unwrap();
        assert_eq!((divergence.index, divergence.tie), (1, true));
        assert_eq!((divergence.reference_token, divergence.other_token), (0, 1));
        assert!((divergence.margin_nats - 0.03).abs() < 1e-6);
    }

    #[test]
    fn a_change_of_mind_is_no_tie_and_prompts_add_up() {
        let mut first = Greedy::start();
        first.add(&[1.0, 0.0], &[2.0, 0.0]);
        let mut second = Greedy::start();
        // 0.0625 is more than a tie.
        second.add(&[1.0, 0.9375], &[0.0, 0.5]);
        second.add(&[1.0, 0.0], &[1.0, 0.0]);
        first.merge(&second);
        assert_eq!((first.matched, first.kept, first.of), (1, 1, 3));
        assert!(!first.divergence.unwrap().tie);
        assert!((first.share() - 1.0 / 3.0).abs() < 1e-15);
    }
}
