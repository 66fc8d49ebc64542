//! `verify`: judge artifacts from their bytes on disk; any finding, or a missed gate, is exit 1.

mod contestant;
mod export;

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::verify_args::{self as wanted, Outputs};
use super::{gguf, model_arg, on_threads, print, print_json_text};
use crate::artifact::{Manifest, Sha256Hex};
use crate::checkpoint::{Checkpoint, MANIFEST_FILE, ModelDir, TensorFiles, is_gguf};
use crate::cli::VerifyArgs;
use crate::error::{Exit, Failure, Result};
use crate::formats::{self, Format};
use crate::gates::{self, Bar, GateFile};
use crate::interrupt::Interrupt;
use crate::opened::{Artifact, chat_template, checkpoint_model, no_chat_template, tokenizer};
use crate::plan::stored_bytes_per_token;
use crate::progress;
use crate::report::{self, ReferenceModel, Report, SizesOnDisk, Verdict};
use crate::runtime::{Model, Rounding};
use crate::scenario::Scenario;
use crate::spark::SparkConfig;
use crate::tokenize::Tokenizer;
use crate::verify::{
    Behaviour, Cache, Check, Finding, Passes, Reference, Speech, check_behaviour, check_contract,
    check_integrity, check_source, check_weights, read_manifest, source_hashes,
};

/// Where artifacts are looked for.
const ARTIFACTS: &str = "artifacts";

/// What artifacts are held to.
struct Asked {
    file: Option<GateFile>,
    flags: Vec<Bar>,
}

impl Asked {
    /// The bars for an artifact of a scheme, over the scheme's own; those of figures that it has.
    fn over(&self, mut bars: Vec<Bar>, scheme: &str) -> Vec<Bar> {
        if let Some(file) = &self.file {
            gates::overlay(&mut bars, &file.bars(scheme));
        }
        gates::overlay(&mut bars, &self.flags);
        let export = scheme == export::SCHEME;
        bars.retain(|bar| if export { bar.metric.is_of_exports() } else { bar.metric.is_of_artifacts() });
        bars
    }
}

/// The checkpoint, and what it says in every scenario: found out when the first artifact gets that far.
struct Source<'a> {
    checkpoint: &'a Checkpoint,
    scenarios: &'a [Scenario],
    model: Model<'a>,
    /// Where earlier runs have left what it says.
    cache: Option<&'a Path>,
    /// Hashes of its files, where they are known.
    hashes: Option<BTreeMap<String, Sha256Hex>>,
    said: OnceCell<Said>,
}

/// What the checkpoint says.
struct Said {
    tokenizer: Tokenizer,
    references: Vec<Reference>,
    cache: Option<Cache>,
}

impl Source<'_> {
    /// Runs a model on all scenarios.
    fn compare(&self, model: &Model<'_>, interrupt: &Interrupt) -> Result<Behaviour> {
        let Said { tokenizer, references, cache } = self.said(interrupt)?;
        let speech = speech(self.checkpoint, tokenizer);
        check_behaviour(references, &self.model, model, &speech, cache.as_ref(), interrupt)
    }

    fn said(&self, interrupt: &Interrupt) -> Result<&Said> {
        if let Some(said) = self.said.get() {
            return Ok(said);
        }
        let tokenizer = tokenizer(&self.checkpoint.dir, &self.checkpoint.config)?;
        let floor = checkpoint_model(self.checkpoint, Rounding::Bf16)?;
        let cache = self.cache.map(|path| self.open_cache(path, &floor)).transpose()?;
        let references = self.run_references(&floor, &tokenizer, cache.as_ref(), interrupt)?;
        Ok(self.said.get_or_init(|| Said { tokenizer, references, cache }))
    }

    fn open_cache(&self, path: &Path, floor: &Model<'_>) -> Result<Cache> {
        let stop = &self.checkpoint.config.eos_token_ids;
        match &self.hashes {
            Some(hashes) => Cache::open(path, hashes, stop, &self.model, floor),
            None => Cache::open(path, &source_hashes(self.checkpoint)?, stop, &self.model, floor),
        }
    }

    /// Runs the scenarios through the checkpoint, once for all artifacts.
    fn run_references(
        &self,
        floor: &Model<'_>,
        tokenizer: &Tokenizer,
        cache: Option<&Cache>,
        interrupt: &Interrupt,
    ) -> Result<Vec<Reference>> {
        let template = chat_template(&self.checkpoint.dir)?;
        let speech = speech(self.checkpoint, tokenizer);
        let mut references = Vec::new();
        for scenario in self.scenarios {
            for prompt in scenario.prompts(&self.checkpoint.config, tokenizer, template.as_ref())? {
                let run = || {
                    let n = prompt.tokens.len();
                    tracing::debug!("scenario {}: {n} tokens through the checkpoint", prompt.name);
                    Passes::run(&prompt, &self.model, floor, speech.stop, interrupt)
                };
                let passes = match cache {
                    Some(cache) => cache.passes(&prompt, run)?,
                    None => run()?,
                };
                let name = &scenario.name;
                references.push(Reference::of(name, prompt, passes, &self.model, floor, &speech, interrupt)?);
            }
        }
        if let (Some(path), Some((used, made))) = (self.cache, cache.map(Cache::tally)) {
            let shown = path.display();
            tracing::info!(
                "--cache {shown}: {used} prompts known, {made} run through the checkpoint and added"
            );
        }
        Ok(references)
    }
}

pub(super) fn run(args: &VerifyArgs) -> anyhow::Result<Exit> {
    let flags = wanted::flags(args)?;
    let file = wanted::gate_file(args)?;
    let outputs = Outputs::check(args)?;
    let scenarios = wanted::scenarios(args)?;
    wanted::check_cache(args)?;
    if let Some(file) = &file {
        wanted::check_file(file, &scenarios)?;
    }
    let asked = Asked { file, flags };
    let artifacts = match args.artifacts.as_slice() {
        [] => artifacts_here()?,
        given => given.to_vec(),
    };
    if args.gelu.is_some() && !artifacts.iter().any(|path| is_gguf(path)) {
        return Err(gguf::gelu_of_others().into());
    }
    let reference = model_arg::resolve(args.reference.as_deref(), "--reference")?;
    let checkpoint = model_arg::open(&reference, args.tokenizer.as_deref())?;
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
        let (mut manifests, mut contestants) = (Vec::new(), false);
        for path in &artifacts {
            if is_gguf(path) {
                contestant::check(path, &checkpoint)?;
                contestants = true;
            } else {
                manifests.push(read_manifest(&ModelDir::open(path)?)?.ok());
            }
        }
        export::check_options(&asked.flags, args.cache.is_some(), &manifests, contestants)?;
        for manifest in manifests.iter().flatten() {
            check_source(&checkpoint, &manifest.source.files)?;
        }
        let source = Source {
            model: checkpoint_model(&checkpoint, Rounding::None)?,
            said: OnceCell::new(),
            scenarios: &scenarios,
            cache: args.cache.as_deref(),
            // What was just compared with the files.
            hashes: manifests.iter().flatten().next().map(|m| {
                m.source.files.iter().map(|(name, file)| (name.clone(), file.sha256.clone())).collect()
            }),
            checkpoint: &checkpoint,
        };
        artifacts.iter().map(|path| judge(path, &source, args, &asked, &interrupt)).collect()
    })??;
    let reference = ReferenceModel { path: reference, sizes: sizes(&checkpoint.files, &checkpoint.config) };
    let report = Report::new(reference, skipped, verdicts);
    outputs.write(&report)?;
    match args.json {
        true => print_json_text(&report.json()?)?,
        false => print(&format!("{}\n", report::text(&report::document(&report))))?,
    }
    let failed: Vec<_> =
        report.artifacts.iter().filter(|v| !v.passed).map(|v| v.artifact.display().to_string()).collect();
    if !report.passed {
        tracing::error!("failed: {}", failed.join(", "));
    }
    Ok(if report.passed { Exit::Done } else { Exit::Gate })
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

fn speech<'a>(checkpoint: &'a Checkpoint, tokenizer: &'a Tokenizer) -> Speech<'a> {
    Speech { tokenizer: Some(tokenizer), stop: &checkpoint.config.eos_token_ids }
}

fn judge(
    path: &Path,
    source: &Source<'_>,
    args: &VerifyArgs,
    asked: &Asked,
    interrupt: &Interrupt,
) -> Result<Verdict> {
    let mut verdict = Verdict::new(path.to_owned());
    if is_gguf(path) {
        contestant::examine(path, source, args, interrupt, &mut verdict)?;
        verdict.gates = gates::judge(
            &asked.over(Vec::new(), contestant::SCHEME),
            &verdict.modules,
            verdict.behaviour.as_ref(),
        );
        verdict.passed = verdict.findings.is_empty() && verdict.gates.iter().all(|g| g.passed);
        return Ok(verdict);
    }
    let dir = ModelDir::open(path)?;
    let manifest = match read_manifest(&dir)? {
        Ok(manifest) => manifest,
        Err(finding) => {
            verdict.findings.push(finding);
            return Ok(verdict);
        }
    };
    verdict.scheme = Some(manifest.scheme.clone());
    if export::is_export(&manifest) {
        export::examine(&dir, &manifest, source, args, asked, interrupt, &mut verdict)?;
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
        Ok(format) => {
            let bars = asked.over(gates::default_bars(format.default_gates()), &manifest.scheme);
            examine(dir, &manifest, source, format, args, interrupt, &mut verdict)?;
            verdict.gates = gates::judge(&bars, &verdict.modules, verdict.behaviour.as_ref());
        }
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
    verdict.sizes = Some(sizes(&files, &checkpoint.config));
    verdict.findings.extend(check_contract(
        &dir,
        &files,
        checkpoint,
        manifest.smoothing.as_ref(),
        format.as_ref(),
    ));
    let progress = progress::new(args.run.progress, "verify", checkpoint.files.total_bytes());
    let (modules, findings) =
        check_weights(&files, manifest, checkpoint, format.as_ref(), progress.as_ref(), interrupt)?;
    progress.finish();
    verdict.findings.extend(findings);
    verdict.modules = modules;
    // Running what no loader would take, or takes for something else, measures nothing.
    if verdict.findings.is_empty() && !source.scenarios.is_empty() {
        let artifact = Artifact::open(dir, format)?;
        let behaviour = source.compare(&artifact.model()?, interrupt)?;
        verdict.findings.extend(not_finite(&behaviour));
        verdict.behaviour = Some(behaviour);
    }
    Ok(())
}

fn sizes(files: &TensorFiles, config: &SparkConfig) -> SizesOnDisk {
    SizesOnDisk { tensor_bytes: files.total_bytes(), bytes_per_token: stored_bytes_per_token(files, config) }
}

/// Logits that are no numbers fail an artifact whatever the bars are.
fn not_finite(behaviour: &Behaviour) -> impl Iterator<Item = Finding> {
    behaviour.scenarios.iter().filter(|s| s.artifact.not_finite > 0).map(|s| {
        let of = s.artifact.positions + s.artifact.not_finite;
        Finding {
            check: Check::Behaviour,
            file: format!("scenario {}", s.scenario),
            subject: None,
            what: format!("logits that are NaN or infinite at {} of {of} positions", s.artifact.not_finite),
            consequence: Some("no token can be chosen there".to_owned()),
        }
    })
}
