//! `verify`: judge artifacts from their bytes on disk; any finding is exit 1.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{model_arg, on_threads, print, print_json, table};
use crate::artifact::Manifest;
use crate::checkpoint::{Checkpoint, MANIFEST_FILE, ModelDir, TensorFiles};
use crate::cli::VerifyArgs;
use crate::error::{Exit, Failure, Result};
use crate::formats::{self, Format};
use crate::interrupt::Interrupt;
use crate::progress;
use crate::verify::{
    Check, Finding, ModuleSnr, check_contract, check_integrity, check_source, check_weights, read_manifest,
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
    modules: Vec<ModuleSnr>,
}

/// A figure against its bar.
#[derive(Serialize)]
struct Gate {
    name: &'static str,
    bar: f64,
    measured: Option<f64>,
    passed: bool,
}

pub(super) fn run(args: &VerifyArgs) -> anyhow::Result<Exit> {
    if let Some(bar) = args.min_weight_snr_db.filter(|bar| !bar.is_finite()) {
        return Err(
            Failure::usage(format!("--min-weight-snr-db {bar}: expected a number of decibels")).into()
        );
    }
    let artifacts = match args.artifacts.as_slice() {
        [] => artifacts_here()?,
        given => given.to_vec(),
    };
    let reference = model_arg::resolve(args.reference.as_deref(), "--reference")?;
    let checkpoint = Checkpoint::open(&reference)?;
    let interrupt = Interrupt::install()?;
    let verdicts = on_threads(args.run, || {
        artifacts.iter().map(|path| judge(path, &checkpoint, args, &interrupt)).collect::<Result<Vec<_>>>()
    })??;
    let passed = verdicts.iter().all(|v| v.passed);
    if args.json {
        print_json(&serde_json::json!({"schema_version": 1, "passed": passed, "artifacts": verdicts}))?;
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

/// Every artifact under `artifacts/`.
fn artifacts_here() -> Result<Vec<PathBuf>> {
    let none =
        || Failure::usage(format!("no artifact under {ARTIFACTS}/; name one, or make one with quantize"));
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

fn judge(path: &Path, checkpoint: &Checkpoint, args: &VerifyArgs, interrupt: &Interrupt) -> Result<Verdict> {
    let dir = ModelDir::open(path)?;
    let mut verdict = Verdict {
        artifact: path.to_owned(),
        scheme: None,
        passed: false,
        gates: Vec::new(),
        findings: Vec::new(),
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
    check_source(checkpoint, &manifest.source.files)?;
    match formats::from_manifest(&manifest.scheme, &manifest.options) {
        Err(what) => verdict.findings.push(Finding {
            check: Check::Contract,
            file: MANIFEST_FILE.to_owned(),
            subject: None,
            what,
            consequence: None,
        }),
        Ok(format) => examine(&dir, &manifest, checkpoint, format.as_ref(), args, interrupt, &mut verdict)?,
    }
    verdict.passed = verdict.findings.is_empty() && verdict.gates.iter().all(|g| g.passed);
    Ok(verdict)
}

fn examine(
    dir: &ModelDir,
    manifest: &Manifest,
    checkpoint: &Checkpoint,
    format: &dyn Format,
    args: &VerifyArgs,
    interrupt: &Interrupt,
    verdict: &mut Verdict,
) -> Result<()> {
    let files = match TensorFiles::open(dir) {
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
    verdict.findings.extend(check_integrity(dir, manifest, files.as_ref())?);
    interrupt.check()?;
    let Some(files) = files else { return Ok(()) };
    verdict.findings.extend(check_contract(dir, &files, checkpoint, format));
    let progress = progress::new(args.run.progress, "verify", checkpoint.files.total_bytes());
    let (modules, findings) =
        check_weights(&files, manifest, checkpoint, format, progress.as_ref(), interrupt)?;
    progress.finish();
    verdict.findings.extend(findings);
    verdict
        .gates
        .push(weight_gate(&modules, args.min_weight_snr_db.unwrap_or(format.default_min_weight_snr_db())));
    verdict.modules = modules;
    Ok(())
}

fn weight_gate(modules: &[ModuleSnr], bar: f64) -> Gate {
    let measured = modules.iter().filter_map(|m| m.snr_db).min_by(f64::total_cmp);
    // Nothing lost in any module is better than any bar; nothing measured at all is no pass.
    let passed = measured.map_or(!modules.is_empty(), |m| m >= bar);
    Gate { name: "weight_snr_db", bar, measured: measured.map(crate::artifact::rounded), passed }
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
    for finding in &verdict.findings {
        text += &format!("FAIL {finding}\n");
    }
    for gate in &verdict.gates {
        let measured = gate.measured.map_or_else(|| "exact".to_owned(), |m| format!("{m:.2}"));
        let word = if gate.passed { "ok" } else { "FAIL" };
        text += &format!("gate {} >= {}: {measured} {word}\n", gate.name, gate.bar);
    }
    text + if verdict.passed { "passed\n\n" } else { "failed\n\n" }
}
