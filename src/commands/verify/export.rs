//! Judging an NPU export: the figures of `verify::npu` against gates, and what is printed of them.

use std::path::Path;

use super::{Asked, Source, Verdict};
use crate::artifact::Manifest;
use crate::checkpoint::ModelDir;
use crate::cli::VerifyArgs;
use crate::error::{Failure, Result};
use crate::gates::{self, Bar, Metric};
use crate::interrupt::Interrupt;
use crate::npu::manifest::DECODE_MANIFEST_FILE;
use crate::npu::options::Options;
use crate::npu::runner::OpenedExport;
use crate::opened::{chat_template, tokenizer};
use crate::progress;
use crate::verify::npu::{
    ExportBehaviour, ExportFiles, ExportGates, ExportRun, Stretches, check_export_contract,
    check_export_weights,
};
use crate::verify::{Check, Finding};

/// What lies in slots that nothing was written to may not show: the mask hides it.
const MIN_UNWRITTEN_DB: f64 = 60.0;

/// Whether an artifact is an export.
pub(super) fn is_export(manifest: &Manifest) -> bool {
    manifest.scheme == Options::SCHEME
}

/// The scheme of an export.
pub(super) const SCHEME: &str = Options::SCHEME;

/// Refuses gates that hold nothing of these artifacts, and a cache that none of them would use: `None` stands for one whose manifest was changed, which
/// is told later.
pub(super) fn check_options(
    flags: &[Bar],
    cache: bool,
    manifests: &[Option<Manifest>],
    contestants: bool,
) -> Result<()> {
    if manifests.contains(&None) {
        return Ok(());
    }
    let exports = || manifests.iter().flatten().filter(|m| is_export(m));
    // Its graph is a float graph that says it is one of codes elsewhere.
    if exports().any(|m| m.options.get("dialect").is_some_and(|dialect| dialect == "aimet")) {
        return Err(Failure::usage(
            "an export of dialect aimet: verify does not judge encodings beside a graph; --dialect float18 \
             writes the same graph, and the qdq dialects the same encodings, in a form that it judges",
        ));
    }
    let others = contestants || manifests.iter().flatten().any(|m| !is_export(m));
    if cache && !others {
        return Err(Failure::usage("--cache has no effect on NPU exports, whose steps are all that is run"));
    }
    let whole = |m: &Manifest| m.options.get("split").is_some_and(|split| split == "whole");
    for metric in flags.iter().map(|bar| bar.metric) {
        let option = format!("--{}", metric.key().replace('_', "-"));
        if !metric.is_of_artifacts() && exports().next().is_none() {
            return Err(Failure::usage(format!("{option} has no effect: no artifact is an NPU export")));
        }
        if !metric.is_of_exports() && !others {
            return Err(Failure::usage(format!("{option} has no effect on NPU exports")));
        }
        if metric == Metric::GraphSnrDb && exports().all(whole) {
            return Err(Failure::usage(format!(
                "{option} has no effect: no export is split into several graphs"
            )));
        }
    }
    Ok(())
}

/// Everything that can be found out about an export.
pub(super) fn examine(
    dir: &ModelDir,
    manifest: &Manifest,
    source: &Source<'_>,
    args: &VerifyArgs,
    asked: &Asked,
    interrupt: &Interrupt,
    verdict: &mut Verdict,
) -> Result<()> {
    let files = match ExportFiles::open(dir) {
        Ok((files, findings)) => {
            verdict.findings.extend(findings);
            files
        }
        Err(finding) => {
            verdict.findings.push(finding);
            return Ok(());
        }
    };
    verdict.findings.extend(files.check_integrity(dir, manifest));
    interrupt.check()?;
    verdict.findings.extend(check_export_contract(&files, manifest, source.checkpoint));
    let bars = asked.over(gates::default_export_bars(ExportGates::of(files.precision())), SCHEME);
    let bytes = source.checkpoint.files.total_bytes();
    let progress = progress::new(args.run.progress, "verify", bytes);
    let (modules, findings) =
        check_export_weights(&files, manifest, source.checkpoint, progress.as_ref(), interrupt)?;
    progress.finish();
    verdict.findings.extend(findings);
    verdict.modules = modules;
    // Running what is built otherwise measures nothing.
    if !verdict.findings.is_empty() || source.scenarios.is_empty() {
        verdict.gates = gates::judge_export(&bars, &verdict.modules, None);
        return Ok(());
    }
    match run(dir.path(), source, args, interrupt) {
        Ok(behaviour) => {
            verdict.findings.extend(unwritten(&behaviour));
            verdict.export = Some(behaviour);
        }
        // The checkpoint has run before: what cannot be run is the export.
        Err(e @ (Failure::Input(_) | Failure::Usage(_))) => verdict.findings.push(Finding {
            check: Check::Contract,
            file: DECODE_MANIFEST_FILE.to_owned(),
            subject: None,
            what: e.to_string(),
            consequence: Some("the step cannot be run by what is written".to_owned()),
        }),
        Err(e) => return Err(e),
    }
    verdict.gates = gates::judge_export(&bars, &verdict.modules, verdict.export.as_ref());
    Ok(())
}

/// Runs the steps on the texts of all scenarios, one behind the other.
fn run(
    path: &Path,
    source: &Source<'_>,
    args: &VerifyArgs,
    interrupt: &Interrupt,
) -> Result<ExportBehaviour> {
    let checkpoint = source.checkpoint;
    let tokenizer = tokenizer(&checkpoint.dir, &checkpoint.config)?;
    let template = chat_template(&checkpoint.dir)?;
    let mut text = Vec::new();
    for scenario in source.scenarios {
        for prompt in scenario.prompts(&checkpoint.config, &tokenizer, template.as_ref())? {
            text.extend(prompt.tokens);
        }
    }
    let export = OpenedExport::open(path)?;
    let weights: u64 =
        checkpoint.specs.iter().map(|s| s.shape.iter().map(|d| *d as u64).product::<u64>()).sum();
    let stretches = Stretches::new(&checkpoint.config, export.manifest().context, weights);
    let prefill: usize = stretches.run.iter().map(|s| s.from).sum();
    let total = stretches.steps() + prefill;
    let progress = progress::new_in_tokens(args.run.progress, "steps", total);
    let run = ExportRun { export: &export, model: &source.model, text: &text, stretches: &stretches };
    let behaviour = run.run(progress.as_ref(), interrupt)?;
    progress.finish();
    Ok(behaviour)
}

fn unwritten(behaviour: &ExportBehaviour) -> Option<Finding> {
    let db = behaviour.unwritten_slots_snr_db.filter(|db| *db < MIN_UNWRITTEN_DB)?;
    Some(Finding {
        check: Check::Contract,
        file: DECODE_MANIFEST_FILE.to_owned(),
        subject: Some("masks".to_owned()),
        what: format!("values in slots that were not written change the logits: {db:.1} dB"),
        consequence: Some("blocked positions are seen".to_owned()),
    })
}
