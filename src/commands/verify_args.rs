//! What `verify` was asked for, before anything is opened that takes time: bars, scenarios, outputs.

use std::path::{Path, PathBuf};

use crate::artifact::{Staging, write_file};
use crate::checkpoint::ModelDir;
use crate::cli::VerifyArgs;
use crate::error::{Failure, InputError, Result};
use crate::gates::{Bar, GateFile, Metric};
use crate::report::{self, Report};
use crate::scenario::{self, Scenario};
use crate::verify::Cache;

/// The file that tells a directory of an earlier report from any other.
const REPORT_JSON: &str = "report.json";

/// The bars of the command line.
pub(super) fn flags(args: &VerifyArgs) -> Result<Vec<Bar>> {
    let given = [
        (Metric::WeightSnrDb, args.min_weight_snr_db),
        (Metric::SnrDb, args.min_snr_db),
        (Metric::Kld, args.max_kld),
        (Metric::Greedy, args.min_greedy),
        (Metric::Actions, args.min_actions),
        (Metric::StepSnrDb, args.min_step_snr_db),
        (Metric::KvSnrDb, args.min_kv_snr_db),
        (Metric::GraphSnrDb, args.min_graph_snr_db),
    ];
    let mut bars = Vec::new();
    for (metric, bar) in given.into_iter().filter_map(|(metric, bar)| Some((metric, bar?))) {
        let option = format!("--{}", metric.key().replace('_', "-"));
        metric
            .check(bar)
            .map_err(|expected| Failure::usage(format!("{option} {bar}: expected {expected}")))?;
        if metric.is_behaviour() && args.scenario.iter().any(|s| s == "none") {
            return Err(Failure::usage(format!(
                "--scenario none: {option}, a gate on what the model says, would have no effect"
            )));
        }
        bars.push(Bar { metric, scenario: None, bar, asked: true });
    }
    Ok(bars)
}

/// The bars of `--gates`.
pub(super) fn gate_file(args: &VerifyArgs) -> Result<Option<GateFile>> {
    let Some(path) = &args.gates else { return Ok(None) };
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let shown = path.display().to_string();
    if !path.is_file() {
        return Err(InputError::file(shown).expected("a TOML file of gates").found("no such file").into());
    }
    let text = String::from_utf8(ModelDir::open(parent)?.read(&name)?)
        .map_err(|e| InputError::file(&shown).expected("UTF-8").found(e))?;
    Ok(Some(GateFile::parse(&shown, &text)?))
}

/// A bar on a scenario that is not run would never be looked at, and one on what the model says takes
/// a scenario.
pub(super) fn check_file(file: &GateFile, scenarios: &[Scenario]) -> Result<()> {
    for bar in file.all() {
        let key = bar.metric.key();
        if let Some(name) = bar.scenario.as_ref().filter(|name| scenarios.iter().all(|s| s.name != **name)) {
            let names: Vec<_> = scenarios.iter().map(|s| s.name.as_str()).collect();
            return Err(Failure::usage(format!(
                "--gates: scenario.{name}.{key}: the scenario is not run; those that are: {}",
                names.join(", ")
            )));
        }
        if bar.metric.is_behaviour() && scenarios.is_empty() {
            return Err(Failure::usage(format!(
                "--scenario none: {key} of --gates, a gate on what the model says, would have no effect"
            )));
        }
    }
    Ok(())
}

/// The scenarios to run.
pub(super) fn scenarios(args: &VerifyArgs) -> Result<Vec<Scenario>> {
    let wanted = &args.scenario;
    if wanted.iter().any(|s| s == "none") {
        if wanted.len() > 1 {
            return Err(Failure::usage("--scenario none goes with no other"));
        }
        for (option, given) in [("--suite", args.suite.is_some()), ("--cache", args.cache.is_some())] {
            if given {
                return Err(Failure::usage(format!("--scenario none: {option} would have no effect")));
            }
        }
        return Ok(Vec::new());
    }
    let mut all = match &args.suite {
        Some(dir) => scenario::read_suite(dir)?,
        None => scenario::bundled()?,
    };
    if let Some(unknown) = wanted.iter().find(|name| all.iter().all(|s| s.name != **name)) {
        let names: Vec<_> = all.iter().map(|s| s.name.as_str()).collect();
        return Err(Failure::usage(format!(
            "--scenario {unknown}: expected none, or one of {}",
            names.join(", ")
        )));
    }
    all.retain(|s| wanted.is_empty() || wanted.contains(&s.name));
    Ok(all)
}

/// Refuses a `--cache` that is something else, or that a report would replace.
pub(super) fn check_cache(args: &VerifyArgs) -> Result<()> {
    let Some(path) = &args.cache else { return Ok(()) };
    Cache::check(path)?;
    let resolved = |path: &Path| std::path::absolute(path).map(|p| p.components().collect::<PathBuf>()).ok();
    let inside = |report: &PathBuf| Some(resolved(path)?.starts_with(resolved(report)?));
    if args.report.as_ref().and_then(inside).unwrap_or(false) {
        return Err(Failure::usage(format!(
            "--cache {}: --report would replace it; choose another directory",
            path.display()
        )));
    }
    Ok(())
}

/// Where reports go.
pub(super) struct Outputs {
    report: Option<PathBuf>,
    junit: Option<PathBuf>,
}

impl Outputs {
    /// Checks the destinations before the work is done.
    pub(super) fn check(args: &VerifyArgs) -> Result<Self> {
        if let Some(dir) = &args.report {
            if dir.file_name().is_none() {
                return Err(Failure::usage(format!(
                    "--report {}: expected the name of a directory to make",
                    dir.display()
                )));
            }
            if super::quantize::occupied(dir)? && !dir.join(REPORT_JSON).is_file() {
                return Err(Failure::usage(format!(
                    "--report {}: exists and holds no {REPORT_JSON}; choose another directory",
                    dir.display()
                )));
            }
            super::quantize::refuse_precious(dir)?;
        }
        if let Some(file) = &args.junit {
            let parent = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            if !parent.is_dir() || file.is_dir() || file.file_name().is_none() {
                return Err(Failure::usage(format!(
                    "--junit {}: expected a file in a directory that exists",
                    file.display()
                )));
            }
        }
        Ok(Self { report: args.report.clone(), junit: args.junit.clone() })
    }

    /// Writes what was asked for.
    pub(super) fn write(&self, report: &Report) -> anyhow::Result<()> {
        if let Some(dir) = &self.report {
            let dir: PathBuf = dir.components().collect();
            let document = report::document(report);
            let staging = Staging::begin(&dir)?;
            staging.write(REPORT_JSON, report.json()?.as_bytes())?;
            staging.write("report.md", report::markdown(&document).as_bytes())?;
            staging.write("report.html", report::html(&document).as_bytes())?;
            staging.publish(true)?;
            tracing::info!("report: {}", dir.join("report.html").display());
        }
        if let Some(file) = &self.junit {
            write_file(file, report::junit(report).as_bytes())?;
        }
        Ok(())
    }
}
