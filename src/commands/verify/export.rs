//! Judging an NPU export: the figures of `verify::npu` against gates, and what is printed of them.

use std::path::Path;

use super::{Gate, Source, Verdict, weight_gate};
use crate::artifact::{Manifest, rounded};
use crate::checkpoint::ModelDir;
use crate::cli::VerifyArgs;
use crate::commands::table;
use crate::error::{Failure, Result};
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

/// Refuses gates that hold nothing of these artifacts: `None` stands for one whose manifest was changed, which
/// is told later.
pub(super) fn check_gates(args: &VerifyArgs, manifests: &[Option<Manifest>]) -> Result<()> {
    if manifests.contains(&None) {
        return Ok(());
    }
    let exports = || manifests.iter().flatten().filter(|m| is_export(m));
    for (name, gate) in [
        ("--min-step-snr-db", args.min_step_snr_db),
        ("--min-kv-snr-db", args.min_kv_snr_db),
        ("--min-graph-snr-db", args.min_graph_snr_db),
    ] {
        if gate.is_some() && exports().next().is_none() {
            return Err(Failure::usage(format!("{name} has no effect: no artifact is an NPU export")));
        }
    }
    let whole = |m: &Manifest| m.options.get("split").is_some_and(|split| split == "whole");
    if args.min_graph_snr_db.is_some() && exports().all(whole) {
        return Err(Failure::usage(
            "--min-graph-snr-db has no effect: no export is split into several graphs",
        ));
    }
    Ok(())
}

/// Everything that can be found out about an export.
pub(super) fn examine(
    dir: &ModelDir,
    manifest: &Manifest,
    source: &Source<'_>,
    args: &VerifyArgs,
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
    let gates = ExportGates::of(files.precision());
    let bytes = source.checkpoint.files.total_bytes();
    let progress = progress::new(args.run.progress, "verify", bytes);
    let (modules, findings) =
        check_export_weights(&files, manifest, source.checkpoint, progress.as_ref(), interrupt)?;
    progress.finish();
    verdict.findings.extend(findings);
    verdict.gates.push(weight_gate(&modules, args.min_weight_snr_db.unwrap_or(gates.min_weight_snr_db)));
    verdict.modules = modules;
    // Running what is built otherwise measures nothing.
    if !verdict.findings.is_empty() || source.scenarios.is_empty() {
        return Ok(());
    }
    match run(dir.path(), source, args, interrupt) {
        Ok(behaviour) => {
            verdict.findings.extend(unwritten(&behaviour));
            verdict.gates.extend(behaviour_gates(&behaviour, args, gates));
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
        text.extend(scenario.tokens(&checkpoint.config, &tokenizer, template.as_ref())?);
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

fn behaviour_gates(behaviour: &ExportBehaviour, args: &VerifyArgs, defaults: ExportGates) -> Vec<Gate> {
    // A comparison with NaN is false: what cannot be measured does not pass.
    let at_least = |name, measured: Option<f64>, bar: f64| Gate {
        name,
        at_most: false,
        bar,
        measured: measured.map(rounded),
        passed: measured.is_none_or(|m| m >= bar),
    };
    let mut gates = vec![
        at_least("snr_db", behaviour.logits.logits_snr_db, args.min_snr_db.unwrap_or(defaults.min_snr_db)),
        at_least(
            "step_snr_db",
            Some(behaviour.worst_step.snr_db),
            args.min_step_snr_db.unwrap_or(defaults.min_step_snr_db),
        ),
        at_least(
            "kv_snr_db",
            Some(behaviour.lowest_kv()),
            args.min_kv_snr_db.unwrap_or(defaults.min_kv_snr_db),
        ),
    ];
    if let Some(lowest) = behaviour.lowest_graph() {
        let bar = args.min_graph_snr_db.unwrap_or(defaults.min_graph_snr_db);
        gates.push(at_least("graph_snr_db", Some(lowest), bar));
    }
    gates.push(at_least(
        "greedy",
        Some(behaviour.greedy_share),
        args.min_greedy.unwrap_or(defaults.min_greedy),
    ));
    if let Some(bar) = args.max_kld {
        let kld = behaviour.logits.kl.mean;
        gates.push(Gate { name: "kld", at_most: true, bar, measured: Some(kld), passed: kld <= bar });
    }
    gates
}

/// The figures as a table.
pub(super) fn text(behaviour: &ExportBehaviour) -> String {
    let stretches: Vec<String> =
        behaviour.stretches.run.iter().map(|s| format!("{} to {}", s.from, s.to - 1)).collect();
    let mut text = format!("steps at positions {}", stretches.join(", "));
    if stretches.len() > 1 {
        text += ", all but the first from the checkpoint's keys and values";
    }
    if let Some(left_out) = &behaviour.stretches.left_out {
        text += &format!(" ({left_out})");
    }
    text.push('\n');
    let db = |db: f64| format!("{db:.2} dB");
    let mut rows = vec![
        vec!["  logits, all steps".to_owned(), table::decibels(behaviour.logits.logits_snr_db)],
        vec![format!("  worst step, at {}", behaviour.worst_step.position), db(behaviour.worst_step.snr_db)],
        vec!["  empty caches".to_owned(), db(behaviour.empty_cache_snr_db)],
    ];
    for (name, figure) in [
        ("  full window", behaviour.full_window_snr_db),
        ("  full context, the last step", behaviour.full_cache_snr_db),
        ("  unwritten slots changed", behaviour.unwritten_slots_snr_db),
    ] {
        rows.extend(figure.map(|figure| vec![name.to_owned(), db(figure)]));
    }
    rows.push(vec!["  KL mean, nats".to_owned(), format!("{:.5}", behaviour.logits.kl.mean)]);
    rows.push(vec!["  same token".to_owned(), format!("{:.1} %", 100.0 * behaviour.greedy_share)]);
    rows.push(vec![
        "  same token, continuing its own text".to_owned(),
        format!("{:.1} %", 100.0 * behaviour.continuation_greedy_share),
    ]);
    text += &table::table(&rows);
    let header = ["  returned entries", "type", "keys", "values"].map(str::to_owned).to_vec();
    let layers = behaviour.keys_values.iter().map(|l| {
        vec![format!("  layer {}", l.layer), l.layer_type.clone(), db(l.key_snr_db), db(l.value_snr_db)]
    });
    text += &table::table(&std::iter::once(header).chain(layers).collect::<Vec<_>>());
    if !behaviour.graph_types.is_empty() {
        let header = ["  graphs by themselves", "graphs", "lowest", "mean"].map(str::to_owned).to_vec();
        let types = behaviour.graph_types.iter().map(|t| {
            vec![format!("  {}", t.layer_type), t.graphs.to_string(), db(t.min_snr_db), db(t.mean_snr_db)]
        });
        text += &table::table(&std::iter::once(header).chain(types).collect::<Vec<_>>());
    }
    text
}
