//! GGUF files beside artifacts: the same figures, no promises to hold them to.

use std::path::Path;

use serde::Serialize;

use super::{Gate, Source, Verdict, behaviour_gates, weight_gate};
use crate::checkpoint::GgufFile;
use crate::cli::VerifyArgs;
use crate::commands::{gguf, table};
use crate::error::Result;
use crate::formats::Gates;
use crate::interrupt::Interrupt;
use crate::opened::gguf_model;
use crate::progress;
use crate::runtime::Gelu;
use crate::verify::{check_behaviour, check_contestant, check_same_model};

/// What a contestant is made of.
#[derive(Serialize)]
pub(super) struct Contestant {
    /// Tensors and bytes by type.
    types: serde_json::Value,
    #[serde(skip)]
    types_text: String,
    tensor_bytes: u64,
    bytes_per_token: u64,
    /// The form of GELU that it ran with.
    gelu: &'static str,
}

impl Contestant {
    fn new(file: &GgufFile, gelu: Gelu) -> Self {
        Self {
            types: gguf::types_json(file),
            types_text: gguf::types_text(file),
            tensor_bytes: file.tensor_bytes(),
            bytes_per_token: file.bytes_per_token(),
            gelu: match gelu {
                Gelu::Exact => "exact",
                Gelu::Tanh => "tanh",
            },
        }
    }

    pub(super) fn text(&self) -> String {
        format!(
            "contestant: {}, {}, {} read per token, {} GELU; no hashes and no contract to check\n",
            self.types_text,
            table::bytes(self.tensor_bytes),
            table::bytes(self.bytes_per_token),
            self.gelu,
        )
    }
}

/// Refuses what is not a build of the source, before any time is spent on it.
pub(super) fn check(path: &Path, source: &crate::checkpoint::Checkpoint) -> Result<()> {
    check_same_model(&GgufFile::open(path)?, &source.config)
}

/// The figures of a contestant; gates are those that were asked for.
pub(super) fn judge(
    path: &Path,
    source: &Source<'_>,
    args: &VerifyArgs,
    interrupt: &Interrupt,
) -> Result<Verdict> {
    let file = GgufFile::open(path)?;
    let gelu = gguf::gelu(args.gelu);
    let progress = progress::new(args.run.progress, "verify", source.checkpoint.files.total_bytes());
    let (modules, findings) = check_contestant(&file, source.checkpoint, progress.as_ref(), interrupt)?;
    progress.finish();
    let mut gates: Vec<Gate> = Vec::new();
    gates.extend(args.min_weight_snr_db.map(|bar| weight_gate(&modules, bar)));
    let mut behaviour = None;
    if findings.is_empty() && !source.scenarios.is_empty() {
        let model = gguf_model(&file)?.with_gelu(gelu);
        let found = check_behaviour(source.references(interrupt)?, &source.model, &model, interrupt)?;
        let given = [args.min_snr_db, args.max_kld, args.min_greedy].map(|bar| bar.is_some());
        let all = behaviour_gates(&found, args, NO_GATES);
        gates.extend(all.into_iter().zip(given).filter_map(|(gate, given)| given.then_some(gate)));
        behaviour = Some(found);
    }
    let passed = findings.is_empty() && gates.iter().all(|g| g.passed);
    Ok(Verdict {
        artifact: path.to_owned(),
        scheme: Some("gguf".to_owned()),
        contestant: Some(Contestant::new(&file, gelu)),
        passed,
        gates,
        findings,
        behaviour,
        modules,
    })
}

/// Stands where a scheme has its own bars; none of them is ever looked at.
const NO_GATES: Gates = Gates {
    min_weight_snr_db: f64::NEG_INFINITY,
    min_snr_db: f64::NEG_INFINITY,
    max_kld: f64::INFINITY,
    min_greedy: 0.0,
};
