//! `cargo xtask oracle`: the independent referees, where they are at hand.
//!
//! They are Python programs on the real libraries, kept outside this project; each set makes its own
//! environment once.

mod reference;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use safetensors::SafeTensors;
use serde_json::Value;
use spark_convert::opened::Opened;
use spark_convert::quant::ErrorSums;
use spark_convert::quant::int8::{self, Method};
use spark_convert::runtime::{Model, State, argmax};
use spark_convert::tensor::{TensorView, amax_bits};
use xtask::fixtures::FixtureSpec;

use super::process::{output, program, release_binary, root, run};

/// Which referees.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Set {
    /// Grid levels on fixed matrices (215 MiB of packages).
    Light,
    /// The real compressed-tensors library reads artifacts (5.1 GiB).
    Full,
    /// PyTorch computes logits and greedy tokens (the environment of `full`).
    Reference,
    /// vLLM's CPU build loads artifacts and generates (6.2 GiB, Linux x86-64).
    Vllm,
}

/// Options of the task.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which referees; may be repeated
    #[arg(long = "set", value_enum, default_values_t = [Set::Light])]
    sets: Vec<Set>,
    /// Where they are [default: ../shared/oracle]
    #[arg(long, value_name = "DIR")]
    referees: Option<PathBuf>,
}

pub(crate) fn run_sets(args: &Args) -> Result<()> {
    let dir = referees(args.referees.as_deref()).context("no referees there; pass --referees DIR")?;
    for set in &args.sets {
        match set {
            Set::Light => grids(&dir)?,
            Set::Full => checkpoints(&dir)?,
            Set::Reference => forward(&dir)?,
            Set::Vllm => vllm(&dir)?,
        }
    }
    Ok(())
}

/// The directory of the referees, if there is one.
pub(super) fn referees(given: Option<&Path>) -> Option<PathBuf> {
    let dir = given.map_or_else(|| root().join("../shared/oracle"), Path::to_owned);
    dir.join("setup.sh").is_file().then_some(dir)
}

/// Whether a set's environment was made before.
pub(super) fn is_made(set: &str) -> bool {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let Some(entries) = cache.and_then(|c| fs::read_dir(c.join("spark-convert-oracle")).ok()) else {
        return false;
    };
    entries.flatten().any(|e| {
        e.file_name().to_string_lossy().starts_with(&format!("{set}-")) && e.path().join(".ready").is_file()
    })
}

/// The interpreter of a set, whose environment is made if need be.
fn python(dir: &Path, set: &str) -> Result<String> {
    let said = output(program("bash").arg(dir.join("setup.sh")).arg(set))?;
    Ok(said.lines().last().context("setup.sh said nothing")?.to_owned())
}

/// Weight SNR on four fixed matrices against the levels that the referee expects, within 0.1 dB.
pub(super) fn grids(dir: &Path) -> Result<()> {
    const TOLERANCE_DB: f64 = 0.1;
    let temp = tempfile::tempdir()?;
    run(program(python(dir, "light")?)
        .arg(dir.join("grid_reference.py"))
        .args(["make", "--out"])
        .arg(temp.path()))?;
    let bytes = fs::read(temp.path().join("matrices.safetensors"))?;
    let matrices = SafeTensors::deserialize(&bytes)?;
    let golden: Value = serde_json::from_slice(&fs::read(dir.join("golden/snr_levels.json"))?)?;
    let levels = golden["levels_db"].as_object().context("levels_db")?;
    ensure!(levels.len() == matrices.len(), "matrices and levels differ");
    for (name, grids) in levels {
        let matrix = matrices.tensor(name)?;
        let view = TensorView { name, dtype: matrix.dtype(), shape: matrix.shape(), bytes: matrix.data() };
        let expected = grids["int8 channel amax/127"].as_f64().context("level")?;
        let rtn = int8_snr_db(view, Method::RoundToNearest);
        let search = int8_snr_db(view, Method::Search);
        println!("{name}: int8 {rtn:.2} dB (expected {expected:.2}), search {search:.2} dB");
        ensure!((rtn - expected).abs() <= TOLERANCE_DB, "{name}: off by more than {TOLERANCE_DB} dB");
        ensure!(search >= rtn, "{name}: search is below rounding");
    }
    Ok(())
}

fn int8_snr_db(matrix: TensorView<'_>, method: Method) -> f64 {
    let mut weights = vec![0.0; matrix.row_len()];
    let mut codes = vec![0; matrix.row_len()];
    let sums: ErrorSums = (0..matrix.rows())
        .map(|row| {
            matrix.decode_row(row, &mut weights);
            let scale = int8::row_scale(&weights, f32::from_bits(amax_bits(&weights)), method);
            int8::encode_row(&weights, scale, &mut codes);
            int8::row_error(&weights, &codes, scale)
        })
        .sum();
    sums.snr_db().unwrap_or(f64::INFINITY)
}

/// Presets the artifacts are made of.
fn presets() -> BTreeMap<&'static str, FixtureSpec> {
    [("tiny", FixtureSpec::tiny()), ("square", FixtureSpec::square()), ("wide", FixtureSpec::wide())].into()
}

/// Makes the w8a8 artifacts of some presets and hands each to `judge`.
fn with_artifacts(
    names: &[&str],
    mut judge: impl FnMut(&str, &Path, &Path, &str) -> Result<()>,
) -> Result<()> {
    let binary = release_binary()?;
    let temp = tempfile::tempdir()?;
    for (preset, spec) in presets().into_iter().filter(|(name, _)| names.contains(name)) {
        let source = temp.path().join(preset);
        spec.write(&source)?;
        for head in ["bf16", "int8"] {
            let artifact = temp.path().join(format!("{preset}-{head}"));
            let mut quantize = program(&binary);
            quantize
                .arg("quantize")
                .arg(&source)
                .args(["--scheme", "w8a8", "--head", head, "--out"])
                .arg(&artifact);
            output(&mut quantize)?;
            output(program(&binary).arg("verify").arg(&artifact).arg("--reference").arg(&source))?;
            judge(preset, &source, &artifact, head)?;
        }
    }
    Ok(())
}

/// The real compressed-tensors library on the small presets.
pub(super) fn checkpoints(dir: &Path) -> Result<()> {
    let python = python(dir, "full")?;
    with_artifacts(&["tiny", "square", "wide"], |preset, source, artifact, head| {
        println!("check_w8a8 {preset}, {head} head");
        let mut check = program(&python);
        check.arg(dir.join("check_w8a8.py")).arg("--source").arg(source).arg("--artifact").arg(artifact);
        run(check.args(["--head", head]))
    })
}

/// The forward pass against PyTorch.
pub(super) fn forward(dir: &Path) -> Result<()> {
    reference::check(dir, &python(dir, "full")?)
}

/// The real consumer on the small presets: loads, every linear on its int8 kernel, and its
/// log-probabilities are this runtime's.
fn vllm(dir: &Path) -> Result<()> {
    let python = python(dir, "vllm")?;
    let temp = tempfile::tempdir()?;
    let prompts = temp.path().join("prompts.json");
    // Shorter than the window of 16, and five times as long.
    let long: Vec<u32> = (0..80u32).map(|i| (i * i * 31 + i * 17 + 7) % 512).collect();
    fs::write(&prompts, serde_json::to_string(&vec![vec![3, 17, 42, 99], long])?)?;
    with_artifacts(&["square", "wide"], |preset, _, artifact, head| {
        let mut load = program(&python);
        load.arg(dir.join("run_vllm.py")).arg(artifact).arg(&prompts);
        // float32 activations: bf16 rounding would flip int8 codes.
        load.args(["--threads", "1", "--max-tokens", "24", "--dtype", "float32"]);
        let said: Value = serde_json::from_str(&output(load.env("VLLM_CPU_KVCACHE_SPACE", "1"))?)?;
        let methods = said["methods"].as_object().context("methods")?;
        let int8: u64 = methods
            .iter()
            .filter(|(name, _)| name.contains("Int8"))
            .filter_map(|(_, count)| count[0].as_u64())
            .sum();
        let layers = if preset == "square" { 8 } else { 4 };
        // gate_proj and up_proj are one module at load.
        let expected = 4 * layers + u64::from(head == "int8");
        if int8 != expected {
            bail!("{preset}, {head} head: {int8} int8 modules, expected {expected}: {methods:?}");
        }
        let opened = Opened::open(artifact)?;
        let model = opened.model()?;
        for result in said["results"].as_array().context("results")? {
            let agreement = agreement(&model, result)?;
            println!("vllm {preset}, {head} head: {int8} int8 modules, {agreement}");
            agreement.check()?;
        }
        Ok(())
    })
}

/// How far two implementations of one artifact are from each other.
struct Agreement {
    /// Mean |log-probability difference| over the other's 20 most likely tokens.
    mean_diff: f64,
    /// Positions whose choice differs although the margin is above 0.1 nats.
    decided_otherwise: usize,
    positions: usize,
}

impl Agreement {
    /// # Errors
    /// Above a mean of 0.05 nats, or with a decided choice that differs.
    fn check(&self) -> Result<()> {
        ensure!(self.mean_diff <= 0.05 && self.decided_otherwise == 0, "too far apart: {self}");
        Ok(())
    }
}

impl std::fmt::Display for Agreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { mean_diff, decided_otherwise, positions } = self;
        write!(f, "mean logprob difference {mean_diff:.5}, {decided_otherwise} of {positions} choices differ")
    }
}

/// Feeds what vLLM generated to this runtime and compares the log-probabilities of every position.
fn agreement(model: &Model<'_>, result: &Value) -> Result<Agreement> {
    let ids = |v: &Value| -> Result<Vec<u32>> { Ok(serde_json::from_value(v.clone())?) };
    let (prompt, generated) = (ids(&result["prompt"])?, ids(&result["tokens"])?);
    let fed = [&prompt[..], &generated[..generated.len() - 1]].concat();
    let width = model.config().hidden_size;
    let hidden = model.forward(&mut State::new(model.config()), &fed)?;
    let (mut sum, mut count, mut decided_otherwise) = (0.0, 0, 0);
    let tops: Vec<Vec<(u32, f64)>> = serde_json::from_value(result["top"].clone())?;
    for (i, top) in tops.iter().enumerate() {
        let at = prompt.len() - 1 + i;
        let logits = model.logits(&hidden[at * width..(at + 1) * width]);
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let log_sum = max + logits.iter().map(|x| (f64::from(*x) - max).exp()).sum::<f64>().ln();
        for (token, logprob) in top {
            sum += (f64::from(logits[*token as usize]) - log_sum - logprob).abs();
            count += 1;
        }
        let margin = top[0].1 - top[1].1;
        decided_otherwise += usize::from(argmax(&logits) != top[0].0 && margin > 0.1);
    }
    Ok(Agreement { mean_diff: sum / f64::from(count), decided_otherwise, positions: tops.len() })
}
