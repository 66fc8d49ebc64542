//! Judging a written artifact, from its bytes on disk and the source they were made from.
//!
//! Four questions, in this order: are these the bytes that were written (`integrity`); would the
//! consumer read them as meant (`contract`); how far are the weights from the source (`weights`); and
//! what does the model say (`behaviour`). The first three answer with [`Finding`]s, and any finding
//! fails the artifact; the figures of the last two are held against gates.

mod behaviour;
mod cache;
mod contestant;
mod contract;
mod integrity;
mod json_diff;
mod layers;
pub mod npu;
mod passes;
mod said;
mod weights;

use serde::{Deserialize, Serialize};

pub use behaviour::{Behaviour, PromptReport, Reference, ScenarioReport, check_behaviour};
pub use cache::Cache;
pub use contestant::{check_contestant, check_same_model};
pub use contract::check_contract;
pub use integrity::{check_integrity, check_source, read_manifest, source_hashes};
pub use layers::{LAYER_WINDOWS, LayerSnr, Layers, layer_kind};
pub use passes::Passes;
pub use said::{ActionReport, ActionTally, Said, Speech};
pub use weights::{ModuleSnr, check_weights};

/// Which question a finding answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Check {
    /// Bytes differ from what the manifest says was written.
    Integrity,
    /// The consumer would refuse or misread something.
    Contract,
    /// Weights are not the source's, quantized.
    Weights,
    /// What the model says is no text at all.
    Behaviour,
}

/// Something wrong with an artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Which question it answers.
    pub check: Check,
    /// The file.
    pub file: String,
    /// The tensor, or the dotted configuration key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// What was expected and what was found.
    pub what: String,
    /// What the consumer does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consequence: Option<String>,
}

impl Finding {
    fn new(check: Check, file: impl Into<String>, what: impl Into<String>) -> Self {
        Self { check, file: file.into(), subject: None, what: what.into(), consequence: None }
    }

    fn subject(mut self, subject: impl Into<String>) -> Self {
        self.subject = Some(subject.into());
        self
    }

    fn consequence(mut self, consequence: impl Into<String>) -> Self {
        self.consequence = Some(consequence.into());
        self
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut line = self.file.clone();
        for part in [&self.subject, &Some(self.what.clone())].into_iter().flatten() {
            line = format!("{line}: {part}");
        }
        if let Some(consequence) = &self.consequence {
            line = format!("{line} ({consequence})");
        }
        f.write_str(&crate::error::one_line(&line))
    }
}
