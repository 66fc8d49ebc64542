//! What `verify` found out, in one structure, and the forms it is shown in.
//!
//! [`Report`] is the source of all of them. It is written as JSON as it stands; everything else goes
//! through a [`document`](mod@document) of headings, tables and lines, which text, Markdown and HTML only set in type,
//! so that they cannot disagree. The document is made from nothing but the report: read back from its
//! JSON, a report gives the same document, which a test holds it to.

mod comparison;
pub mod document;
mod export;
mod figures;
mod html;
mod junit;
mod markdown;
mod sections;
mod svg;
mod text;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::gates::Gate;
use crate::verify::npu::ExportBehaviour;
use crate::verify::{Behaviour, Finding, ModuleSnr};

pub use comparison::{Contestant, compare};
pub use html::html;
pub use junit::junit;
pub use markdown::markdown;
pub use sections::document;
pub use text::text;

/// Version of the JSON: keys may be added within one, never change their meaning.
pub const SCHEMA_VERSION: u32 = 2;

/// Everything that a run of `verify` found out.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// See [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Whether every artifact passed.
    pub passed: bool,
    /// What the artifacts were compared with.
    pub reference: ReferenceModel,
    /// Scenarios that the checkpoint could not run, for want of a chat template.
    pub skipped_scenarios: Vec<String>,
    /// The artifacts side by side, of those that ran.
    pub comparison: Vec<Contestant>,
    /// What was found out about each.
    pub artifacts: Vec<Verdict>,
}

/// The checkpoint that artifacts are compared with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReferenceModel {
    /// Where it is.
    pub path: PathBuf,
    /// Its sizes.
    pub sizes: SizesOnDisk,
}

/// What a model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SizesOnDisk {
    /// Bytes of all tensors on disk.
    pub tensor_bytes: u64,
    /// Bytes read per decoded token: every linear, norm and the head; of the embedding one row.
    pub bytes_per_token: u64,
}

/// Everything that was found out about one artifact.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Verdict {
    /// Where it is.
    pub artifact: PathBuf,
    /// Its scheme, if it says one that is known.
    pub scheme: Option<String>,
    /// Whether nothing was found and every gate passed.
    pub passed: bool,
    /// What there is to know about it, one sentence each.
    pub notes: Vec<String>,
    /// Its sizes, measured on its files.
    pub sizes: Option<SizesOnDisk>,
    /// Figures against bars.
    pub gates: Vec<Gate>,
    /// What is wrong with it.
    pub findings: Vec<Finding>,
    /// What it says in every scenario.
    pub behaviour: Option<Behaviour>,
    /// The steps of an NPU export.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<ExportBehaviour>,
    /// How far the weights of each module are from the source's.
    pub modules: Vec<ModuleSnr>,
}

impl Report {
    /// Puts verdicts together.
    pub fn new(reference: ReferenceModel, skipped_scenarios: Vec<String>, artifacts: Vec<Verdict>) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            passed: artifacts.iter().all(|v| v.passed),
            reference,
            skipped_scenarios,
            comparison: compare(&artifacts),
            artifacts,
        }
    }

    /// The JSON text.
    ///
    /// # Errors
    /// When it cannot be written as JSON, which no report made here is.
    pub fn json(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }
}

impl Verdict {
    /// A verdict before anything is known.
    pub fn new(artifact: PathBuf) -> Self {
        Self {
            artifact,
            scheme: None,
            passed: false,
            notes: Vec::new(),
            sizes: None,
            gates: Vec::new(),
            findings: Vec::new(),
            behaviour: None,
            export: None,
            modules: Vec::new(),
        }
    }

    /// The last part of its path: what it is called in figures.
    pub fn name(&self) -> String {
        let name = self.artifact.file_name().map(|n| n.to_string_lossy().into_owned());
        name.unwrap_or_else(|| self.artifact.display().to_string())
    }
}

#[cfg(test)]
mod tests;
