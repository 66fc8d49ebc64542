//! `verify`: judge artifacts from their bytes on disk; any finding, or a missed gate, is exit 1.

mod export;

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{model_arg, on_threads, print, print_json, table};
use crate::artifact::{Manifest, rounded};
use crate::checkpoint::{Checkpoint, MANIFEST_FILE, ModelDir, TensorFiles};
use crate::cli::VerifyArgs;
use crate::error::{Exit, Failure, Result};
use crate::formats::{self, Format, Gates};
use crate::interrupt::Interrupt;
use crate::metrics::{Greedy, Summary};
use crate::opened::{Artifact, chat_template, checkpoint_model, no_chat_template, tokenizer};
use crate::progress;
use crate::runtime::{Model, Rounding};
use crate::scenario::{self, Scenario};
use crate::verify::npu::ExportBehaviour;
use crate::verify::{
    Behaviour, Check, Finding, ModuleSnr, Reference, check_behaviour, check_contract, check_integrity,
    check_source, check_weights, read_manifest,
};

/// Modules listed on screen; JSON has them all.
const WORST: usize = 10;

/// Where artifacts are looked for.
const ARTIFACTS: &str = "artifacts";

/// Everything that was found out about one artifact.
#[derive(Serialize)]
struct Verdict {
    artifact: PathBuf,
    scheme: Option<String>,
    passed: bool,
    gates: Vec<Gate>,
    findings: Vec<Finding>,
    behaviour: Option<Behaviour>,
    /// The steps of an NPU export.
    export: Option<ExportBehaviour>,
    modules: Vec<ModuleSnr>,
}

/// A figure against its bar.
#[derive(Serialize)]
struct Gate {
    name: &'static str,
    at_most: bool,
    bar: f64,
    measured: Option<f64>,
    passed: bool,
}

/// The checkpoint, and what it says in every scenario: found out when the first artifact gets that far.
struct Source<'a> {
    checkpoint: &'a Checkpoint,
    scenarios: &'a [Scenario],
    model: Model<'a>,
    references: OnceCell<Vec<Reference>>,
}

impl Source<'_> {
    fn references(&self, interrupt: &Interrupt) -> Result<&[Reference]> {
        if let Some(references) = self.references.get() {
            return Ok(references);
        }
        let references = run_references(self.checkpoint, &self.model, self.scenarios, interrupt)?;
        Ok(self.references.get_or_init(|| references))
    }
}

pub(super) fn run(args: &VerifyArgs) -> anyhow::Result<Exit> {
    check_gates(args)?;
    let artifacts = match args.artifacts.as_slice() {
        [] => artifacts_here()?,
        given => given.to_vec(),
    };
    let scenarios = scenarios(args)?;
    let reference = model_arg::resolve(args.reference.as_deref(), "--reference")?;
    let checkpoint = Checkpoint::open(&reference)?;
    let (scenarios, skipped) = runnable(&checkpoint, scenarios, args)?;
    if !skipped.is_empty() {
        tracing::warn!(
            "{} scenarios skipped, since the checkpoint has no chat template: {}",
            skipped.len(),
            skipped.join(", ")
        );
    }
    let interrupt = Interrupt::install()?;
    let verdicts = on_threads(args.run.threads, || -> Result<Vec<Verdict>> {
        // What is not an artifact, or another checkpoint's, is told before any time is spent on it.
        let mut manifests = Vec::new();
        for path in &artifacts {
            manifests.push(read_manifest(&ModelDir::open(path)?)?.ok());
        }
        export::check_gates(args, &manifests)?;
        for manifest in manifests.iter().flatten() {
            check_source(&checkpoint, &manifest.source.files)?;
        }
        let source = Source {
            model: checkpoint_model(&checkpoint, Rounding::None)?,
            references: OnceCell::new(),
            scenarios: &scenarios,
            checkpoint: &checkpoint,
        };
        artifacts.iter().map(|path| judge(path, &source, args, &interrupt)).collect()
    })??;
    let passed = verdicts.iter().all(|v| v.passed);
    if args.json {
        print_json(&serde_json::json!({
            "schema_version": 1, "passed": passed, "skipped_scenarios": skipped, "artifacts": verdicts,
        }))?;
    } else {
        print(&verdicts.iter().map(text).collect::<String>())?;
    }
    let failed: Vec<_> =
        verdicts.iter().filter(|v| !v.passed).map(|v| v.artifact.display().to_string()).collect();
    if !passed {
        tracing::error!("failed: {}", failed.join(", "));
    }
    Ok(if passed { Exit::Done } else { Exit::Gate })
}

/// Bars that nothing, or everything, would pass are mistakes.
fn check_gates(args: &VerifyArgs) -> Result<()> {
    let gates = [
        ("--min-weight-snr-db", args.min_weight_snr_db, f64::NEG_INFINITY..=f64::INFINITY),
        ("--min-snr-db", args.min_snr_db, f64::NEG_INFINITY..=f64::INFINITY),
        ("--min-step-snr-db", args.min_step_snr_db, f64::NEG_INFINITY..=f64::INFINITY),
        ("--min-kv-snr-db", args.min_kv_snr_db, f64::NEG_INFINITY..=f64::INFINITY),
        ("--min-graph-snr-db", args.min_graph_snr_db, f64::NEG_INFINITY..=f64::INFINITY),
        ("--max-kld", args.max_kld, 0.0..=f64::INFINITY),
        ("--min-greedy", args.min_greedy, 0.0..=1.0),
    ];
    for (name, bar, range) in gates {
        if let Some(bar) = bar.filter(|bar| !bar.is_finite() || !range.contains(bar)) {
            return Err(Failure::usage(format!(
                "{name} {bar}: expected a number{}",
                match name {
                    "--min-greedy" => " from 0 to 1",
                    "--max-kld" => " of nats, not negative",
                    _ => " of decibels",
                }
            )));
        }
    }
    let of_exports = [args.min_step_snr_db, args.min_kv_snr_db, args.min_graph_snr_db];
    let behaviour =
        [args.min_snr_db, args.max_kld, args.min_greedy].iter().chain(&of_exports).any(Option::is_some);
    if behaviour && args.scenario.iter().any(|s| s == "none") {
        return Err(Failure::usage("--scenario none: a gate on what the model says would have no effect"));
    }
    Ok(())
}

fn scenarios(args: &VerifyArgs) -> Result<Vec<Scenario>> {
    let wanted = &args.scenario;
    if wanted.iter().any(|s| s == "none") {
        return match wanted.len() {
            1 => Ok(Vec::new()),
            _ => Err(Failure::usage("--scenario none goes with no other")),
        };
    }
    let mut all = scenario::bundled()?;
    all.retain(|s| wanted.is_empty() || wanted.contains(&s.name));
    Ok(all)
}

/// The scenarios that this checkpoint can run, and the names of those that it cannot: chats, when it
/// has no chat template. One that was asked for by name is not skipped.
fn runnable(
    checkpoint: &Checkpoint,
    scenarios: Vec<Scenario>,
    args: &VerifyArgs,
) -> Result<(Vec<Scenario>, Vec<String>)> {
    let chats = scenarios.iter().any(Scenario::is_chat);
    if !chats || chat_template(&checkpoint.dir)?.is_some() {
        return Ok((scenarios, Vec::new()));
    }
    if !args.scenario.is_empty() {
        return Err(no_chat_template("choose scenarios of plain text: long, code"));
    }
    let (chats, texts): (Vec<_>, Vec<_>) = scenarios.into_iter().partition(Scenario::is_chat);
    Ok((texts, chats.into_iter().map(|s| s.name).collect()))
}

/// Every artifact under `artifacts/`.
fn artifacts_here() -> Result<Vec<PathBuf>> {
    let none = || {
        Failure::usage(format!(
            "no artifact under {ARTIFACTS}/; name one, or make one with quantize or export-npu"
        ))
    };
    let entries = std::fs::read_dir(ARTIFACTS).map_err(|_| none())?;
    let mut found: Vec<_> = entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.join(MANIFEST_FILE).is_file() && !is_hidden(p))
        .collect();
    found.sort();
    if found.is_empty() { Err(none()) } else { Ok(found) }
}

/// A staging directory of a run that is going on, or was killed.
fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'))
}

/// Runs the scenarios through the checkpoint, once for all artifacts.
fn run_references(
    checkpoint: &Checkpoint,
    model: &Model<'_>,
    scenarios: &[Scenario],
    interrupt: &Interrupt,
) -> Result<Vec<Reference>> {
    let floor = checkpoint_model(checkpoint, Rounding::Bf16)?;
    let tokenizer = tokenizer(&checkpoint.dir, &checkpoint.config)?;
    let template = chat_template(&checkpoint.dir)?;
    scenarios
        .iter()
        .map(|scenario| {
            let prompt = scenario.tokens(&checkpoint.config, &tokenizer, template.as_ref())?;
            tracing::debug!("scenario {}: {} tokens through the checkpoint", scenario.name, prompt.len());
            Reference::run(&scenario.name, &prompt, scenario.new_tokens, model, &floor, interrupt)
        })
        .collect()
}

fn judge(path: &Path, source: &Source<'_>, args: &VerifyArgs, interrupt: &Interrupt) -> Result<Verdict> {
    let dir = ModelDir::open(path)?;
    let mut verdict = Verdict {
        artifact: path.to_owned(),
        scheme: None,
        passed: false,
        gates: Vec::new(),
        findings: Vec::new(),
        behaviour: None,
        export: None,
        modules: Vec::new(),
    };
    let manifest = match read_manifest(&dir)? {
        Ok(manifest) => manifest,
        Err(finding) => {
            verdict.findings.push(finding);
            return Ok(verdict);
        }
    };
    verdict.scheme = Some(manifest.scheme.clone());
    if export::is_export(&manifest) {
        export::examine(&dir, &manifest, source, args, interrupt, &mut verdict)?;
        verdict.passed = verdict.findings.is_empty() && verdict.gates.iter().all(|g| g.passed);
        return Ok(verdict);
    }
    match formats::from_manifest(&manifest.scheme, &manifest.options) {
        Err(what) => verdict.findings.push(Finding {
            check: Check::Contract,
            file: MANIFEST_FILE.to_owned(),
            subject: None,
            what,
            consequence: None,
        }),
        Ok(format) => examine(dir, &manifest, source, format, args, interrupt, &mut verdict)?,
    }
    verdict.passed = verdict.findings.is_empty() && verdict.gates.iter().all(|g| g.passed);
    Ok(verdict)
}

fn examine(
    dir: ModelDir,
    manifest: &Manifest,
    source: &Source<'_>,
    format: Box<dyn Format>,
    args: &VerifyArgs,
    interrupt: &Interrupt,
    verdict: &mut Verdict,
) -> Result<()> {
    let checkpoint = source.checkpoint;
    let files = match TensorFiles::open(&dir) {
        Ok(files) => Some(files),
        Err(e) => {
            verdict.findings.push(Finding {
                check: Check::Contract,
                file: String::new(),
                subject: None,
                what: e.to_string(),
                consequence: Some("no loader gets past it".to_owned()),
            });
            None
        }
    };
    verdict.findings.extend(check_integrity(&dir, manifest, files.as_ref())?);
    interrupt.check()?;
    let Some(files) = files else { return Ok(()) };
    verdict.findings.extend(check_contract(&dir, &files, checkpoint, format.as_ref()));
    let progress = progress::new(args.run.progress, "verify", checkpoint.files.total_bytes());
    let (modules, findings) =
        check_weights(&files, manifest, checkpoint, format.as_ref(), progress.as_ref(), interrupt)?;
    progress.finish();
    verdict.findings.extend(findings);
    let defaults = format.default_gates();
    verdict.gates.push(weight_gate(&modules, args.min_weight_snr_db.unwrap_or(defaults.min_weight_snr_db)));
    verdict.modules = modules;
    // Running what no loader would take, or takes for something else, measures nothing.
    if verdict.findings.is_empty() && !source.scenarios.is_empty() {
        let artifact = Artifact::open(dir, format)?;
        let references = source.references(interrupt)?;
        let behaviour = check_behaviour(references, &source.model, &artifact.model()?, interrupt)?;
        verdict.gates.extend(behaviour_gates(&behaviour, args, defaults));
        verdict.behaviour = Some(behaviour);
    }
    Ok(())
}

fn weight_gate(modules: &[ModuleSnr], bar: f64) -> Gate {
    let measured = modules.iter().filter_map(|m| m.snr_db).min_by(f64::total_cmp);
    // Nothing lost in any module is better than any bar; nothing measured at all is no pass.
    let passed = measured.map_or(!modules.is_empty(), |m| m >= bar);
    Gate { name: "weight_snr_db", at_most: false, bar, measured: measured.map(rounded), passed }
}

fn behaviour_gates(behaviour: &Behaviour, args: &VerifyArgs, defaults: Gates) -> [Gate; 3] {
    let snr = behaviour.total.logits_snr_db;
    let kld = behaviour.total.kl.mean;
    let share = behaviour.greedy_share;
    let min_snr = args.min_snr_db.unwrap_or(defaults.min_snr_db);
    let max_kld = args.max_kld.unwrap_or(defaults.max_kld);
    let min_greedy = args.min_greedy.unwrap_or(defaults.min_greedy);
    [
        // A comparison with NaN is false: what cannot be measured does not pass.
        Gate {
            name: "snr_db",
            at_most: false,
            bar: min_snr,
            measured: snr,
            passed: snr.is_none_or(|s| s >= min_snr),
        },
        Gate { name: "kld", at_most: true, bar: max_kld, measured: Some(kld), passed: kld <= max_kld },
        Gate {
            name: "greedy",
            at_most: false,
            bar: min_greedy,
            measured: Some(share),
            passed: share >= min_greedy,
        },
    ]
}

fn text(verdict: &Verdict) -> String {
    let scheme = verdict.scheme.as_deref().unwrap_or("unknown scheme");
    let mut text = format!("{}  {scheme}\n", verdict.artifact.display());
    let mut worst: Vec<_> = verdict.modules.iter().collect();
    worst.sort_by(|a, b| a.snr_db.unwrap_or(f64::INFINITY).total_cmp(&b.snr_db.unwrap_or(f64::INFINITY)));
    if !worst.is_empty() {
        text += &format!("weight SNR, lowest {} of {} modules:\n", worst.len().min(WORST), worst.len());
        let rows: Vec<_> = worst
            .iter()
            .take(WORST)
            .map(|m| vec![format!("  {}", m.module), table::decibels(m.snr_db)])
            .collect();
        text += &table::table(&rows);
    }
    let zero_rows: usize = verdict.modules.iter().map(|m| m.zero_rows).sum();
    if zero_rows > 0 {
        text += &format!("{zero_rows} rows are all zero in the source\n");
    }
    if let Some(behaviour) = &verdict.behaviour {
        text += &behaviour_text(behaviour);
    }
    if let Some(behaviour) = &verdict.export {
        text += &export::text(behaviour);
    }
    for finding in &verdict.findings {
        text += &format!("FAIL {finding}\n");
    }
    for gate in &verdict.gates {
        let measured = gate.measured.map_or_else(|| "exact".to_owned(), |m| format!("{m:.4}"));
        let word = if gate.passed { "ok" } else { "FAIL" };
        let sign = if gate.at_most { "<=" } else { ">=" };
        text += &format!("gate {} {sign} {}: {measured} {word}\n", gate.name, gate.bar);
    }
    text + if verdict.passed { "passed\n\n" } else { "failed\n\n" }
}

fn behaviour_text(behaviour: &Behaviour) -> String {
    let header = [
        "scenario",
        "tokens",
        "logits SNR",
        "KL mean",
        "99.9 %",
        "max",
        "same top",
        "top-20",
        "max dlogp",
        "greedy",
        "first divergence",
    ];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for s in &behaviour.scenarios {
        rows.push(row(&s.scenario, s.prompt_tokens, &s.artifact, Some(&s.greedy)));
        rows.push(row("  bf16 floor", s.prompt_tokens, &s.floor, Some(&s.floor_greedy)));
    }
    rows.push(row("total", behaviour.total.positions, &behaviour.total, None));
    rows.push(row("  bf16 floor", behaviour.floor_total.positions, &behaviour.floor_total, None));
    table::table(&rows)
}

fn row(name: &str, tokens: usize, s: &Summary, greedy: Option<&Greedy>) -> Vec<String> {
    let mut row = vec![
        name.to_owned(),
        tokens.to_string(),
        table::decibels(s.logits_snr_db),
        format!("{:.5}", s.kl.mean),
        format!("{:.4}", s.kl.p999),
        format!("{:.4}", s.kl.max),
        format!("{:.1} %", 100.0 * s.same_top),
        format!("{:.1} %", 100.0 * s.top20_overlap),
        format!("{:.3}", s.max_logprob_diff),
    ];
    if let Some(greedy) = greedy {
        row.push(format!("{}/{}", greedy.matched, greedy.of));
        row.push(greedy.divergence.map_or_else(
            || "-".to_owned(),
            |d| {
                format!("token {}, margin {:.3}{}", d.index, d.margin_nats, if d.tie { " (tie)" } else { "" })
            },
        ));
    }
    row
}
