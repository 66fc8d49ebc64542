//! What decides the codes of modules beyond their own weights, by module.

use crate::artifact::Sha256Hex;
use crate::calibrate::Importance;
use crate::formats::Choice;
use crate::plan::Step;
use crate::solve::Solution;

/// What there is to go by.
pub enum Guidance {
    /// The weights alone.
    Weights,
    /// How much each input column counts.
    Importance(Importance),
    /// Codes that were chosen for calibrated inputs.
    Solution(Solution),
}

impl Guidance {
    /// How the codes of a step's module are chosen.
    pub fn choice(&self, step: &Step) -> Choice<'_> {
        match self {
            Self::Weights => Choice::Weights,
            Self::Importance(importance) => {
                importance.of(step.module, &step.source).map_or(Choice::Weights, Choice::Weighted)
            }
            Self::Solution(solution) => {
                solution.module(step.module_name()).map_or(Choice::Weights, Choice::Solved)
            }
        }
    }

    /// SNR of a module's outputs on the calibration inputs, where they were run.
    pub fn output_snr_db(&self, step: &Step) -> Option<f64> {
        let Self::Solution(solution) = self else { return None };
        solution.modules.get(step.module_name())?.output_snr_db
    }

    /// Hash of the calibration tokens, or of the importance matrix.
    pub fn sha256(&self) -> Option<Sha256Hex> {
        match self {
            Self::Weights => None,
            Self::Importance(importance) => Some(importance.sha256.clone()),
            Self::Solution(solution) => Some(solution.tokens_sha256.clone()),
        }
    }

    /// What was out of the ordinary, one sentence each.
    pub fn notes(&self) -> Vec<String> {
        match self {
            Self::Weights => Vec::new(),
            Self::Importance(importance) => importance.notes.clone(),
            Self::Solution(solution) => solution.notes(),
        }
    }
}
