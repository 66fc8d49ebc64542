//! GGUF files beside artifacts: the same figures, no promises to hold them to.

use std::path::Path;

use super::{Source, not_finite};
use crate::checkpoint::GgufFile;
use crate::cli::VerifyArgs;
use crate::commands::gguf;
use crate::error::Result;
use crate::interrupt::Interrupt;
use crate::opened::gguf_model;
use crate::progress;
use crate::report::{SizesOnDisk, Verdict};
use crate::runtime::Gelu;
use crate::verify::{check_contestant, check_same_model};

/// Stands for a scheme in reports and in files of gates.
pub(super) const SCHEME: &str = "gguf";

/// Refuses what is not a build of the source, before any time is spent on it.
pub(super) fn check(path: &Path, source: &crate::checkpoint::Checkpoint) -> Result<()> {
    check_same_model(&GgufFile::open(path)?, &source.config)
}

/// The figures of a contestant.
pub(super) fn examine(
    path: &Path,
    source: &Source<'_>,
    args: &VerifyArgs,
    interrupt: &Interrupt,
    verdict: &mut Verdict,
) -> Result<()> {
    let file = GgufFile::open(path)?;
    let gelu = gguf::gelu(args.gelu);
    verdict.scheme = Some(SCHEME.to_owned());
    let form = match gelu {
        Gelu::Exact => "exact",
        Gelu::Tanh => "tanh",
    };
    verdict.notes.push(format!(
        "contestant: {}, {form} GELU; no hashes and no contract to check",
        gguf::types_text(&file)
    ));
    verdict.sizes =
        Some(SizesOnDisk { tensor_bytes: file.tensor_bytes(), bytes_per_token: file.bytes_per_token() });
    let progress = progress::new(args.run.progress, "verify", source.checkpoint.files.total_bytes());
    let (modules, findings) = check_contestant(&file, source.checkpoint, progress.as_ref(), interrupt)?;
    progress.finish();
    verdict.modules = modules;
    verdict.findings.extend(findings);
    if verdict.findings.is_empty() && !source.scenarios.is_empty() {
        let model = gguf_model(&file)?.with_gelu(gelu);
        let behaviour = source.compare(&model, interrupt)?;
        verdict.findings.extend(not_finite(&behaviour));
        verdict.behaviour = Some(behaviour);
    }
    Ok(())
}
