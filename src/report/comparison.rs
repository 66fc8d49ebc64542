//! Several artifacts side by side, and which of them no other beats.

use serde::{Deserialize, Serialize};

use super::Verdict;

/// An artifact in the comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contestant {
    /// Its path.
    pub artifact: String,
    /// Its scheme.
    pub scheme: Option<String>,
    /// Bytes of all tensors on disk.
    pub tensor_bytes: u64,
    /// Bytes read per decoded token.
    pub bytes_per_token: u64,
    /// Mean KL divergence, in nats per token.
    pub kl_mean: f64,
    /// Its standard error.
    pub kl_sem: Option<f64>,
    /// Share of positions with the same most likely token.
    pub same_top: f64,
    /// Share of the greedy tokens kept.
    pub greedy_share: f64,
    /// Tool calls kept, of so many; null where the reference makes none.
    pub actions: Option<[usize; 2]>,
    /// Seconds that its passes took in this runtime.
    pub seconds: f64,
    /// Whether it passed.
    pub passed: bool,
    /// Whether no other one reads at most as many bytes per token and diverges at most as far, one of them
    /// less. Only sound ones compete.
    pub pareto: bool,
}

/// The artifacts that ran, with the best marked.
pub fn compare(verdicts: &[Verdict]) -> Vec<Contestant> {
    let mut contestants: Vec<(Contestant, bool)> = verdicts
        .iter()
        .filter_map(|v| {
            let (behaviour, sizes) = (v.behaviour.as_ref()?, v.sizes?);
            let contestant = Contestant {
                artifact: v.artifact.display().to_string(),
                scheme: v.scheme.clone(),
                tensor_bytes: sizes.tensor_bytes,
                bytes_per_token: sizes.bytes_per_token,
                kl_mean: behaviour.total.kl.mean,
                kl_sem: behaviour.total.kl.sem,
                same_top: behaviour.total.same_top,
                greedy_share: behaviour.greedy_share,
                actions: behaviour.actions.map(|a| [a.same, a.of]),
                seconds: behaviour.seconds,
                passed: v.passed,
                pareto: false,
            };
            Some((contestant, v.findings.is_empty()))
        })
        .collect();
    let sound: Vec<(u64, f64)> =
        contestants.iter().filter(|c| c.1).map(|(c, _)| (c.bytes_per_token, c.kl_mean)).collect();
    for (contestant, is_sound) in &mut contestants {
        let own = (contestant.bytes_per_token, contestant.kl_mean);
        contestant.pareto = *is_sound && !sound.iter().any(|other| beats(*other, own));
    }
    contestants.into_iter().map(|(contestant, _)| contestant).collect()
}

/// Not worse in anything, and better in something.
fn beats(a: (u64, f64), b: (u64, f64)) -> bool {
    a.0 <= b.0 && a.1 <= b.1 && (a.0 < b.0 || a.1 < b.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_worse_in_something_and_better_in_nothing_is_beaten() {
        let (small, good, both, worse) = ((4, 0.5), (8, 0.1), (4, 0.1), (9, 0.5));
        assert!(!beats(small, good) && !beats(good, small) && !beats(good, good));
        assert!(beats(both, small) && beats(both, good) && beats(small, worse) && beats(good, worse));
        assert!(!beats((1, f64::NAN), (2, 0.1)), "what is not a number beats nothing");
    }
}
