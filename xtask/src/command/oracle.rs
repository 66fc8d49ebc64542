//! `cargo xtask oracle`: the independent referees, where they are at hand.
//!
//! They are Python programs on the real libraries, kept outside this project; each set makes its own
//! environment once.

mod levels;
mod reference;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use safetensors::SafeTensors;
use serde_json::Value;
use spark_convert::opened::Opened;
use spark_convert::runtime::{Model, State, argmax};
use spark_convert::tensor::Dtype;
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

/// Weight SNR on four fixed matrices against the levels that the referee expects.
pub(super) fn grids(dir: &Path) -> Result<()> {
    levels::check(dir, &python(dir, "light")?)
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
            let mut verify = program(&binary);
            verify.arg("verify").arg(&artifact).arg("--reference").arg(&source).args(["--scenario", "none"]);
            output(&mut verify)?;
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
    // From shorter than the window of 16 to five times as long.
    let prompt = |n: u32| (0..n).map(|i| (i * i * 31 + i * 17 + 7 * n) % 512).collect::<Vec<u32>>();
    fs::write(&prompts, serde_json::to_string(&[4, 15, 17, 80].map(prompt))?)?;
    if !has_vnni() {
        println!(
            "no VNNI here: the consumer's int8 kernel saturates on full codes, so codes are halved first"
        );
    }
    with_artifacts(&["square", "wide"], |preset, _, artifact, head| {
        if !has_vnni() {
            seven_bits(artifact)?;
        }
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
        let mut all = Agreement::default();
        for result in said["results"].as_array().context("results")? {
            let one = agreement(&model, result)?;
            println!(
                "vllm {preset}, {head} head, prompt of {}: {one}",
                result["prompt"].as_array().map_or(0, Vec::len)
            );
            all.add(&one);
        }
        println!("vllm {preset}, {head} head: {int8} int8 modules, {all}");
        all.check(!has_vnni())
    })
}

/// Whether the processor sums products of bytes in 32 bits. Without it oneDNN, which vLLM multiplies
/// int8 with, adds pairs of products in 16 bits, and they saturate: measured on AVX2, 11 to 16 %
/// relative error at codes up to 127, none at codes up to 64.
fn has_vnni() -> bool {
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    flags.split_whitespace().any(|flag| flag == "avx512_vnni" || flag == "avx_vnni")
}

/// Halves the int8 codes of an artifact and doubles their scales, in place: another artifact, which
/// both implementations can compute exactly.
fn seven_bits(artifact: &Path) -> Result<()> {
    for entry in fs::read_dir(artifact)? {
        let path = entry?.path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let mut bytes = fs::read(&path)?;
        let (header, metadata) = SafeTensors::read_metadata(&bytes)?;
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let data = &mut bytes[8 + header + start..8 + header + end];
            if info.dtype == Dtype::I8 {
                for code in data {
                    *code = (code.cast_signed() / 2).cast_unsigned();
                }
            } else if name.ends_with(".weight_scale") {
                for scale in data.as_chunks_mut::<4>().0 {
                    *scale = (f32::from_le_bytes(*scale) * 2.0).to_le_bytes();
                }
            }
        }
        fs::write(&path, bytes)?;
    }
    Ok(())
}

/// How far two implementations of one artifact are from each other.
///
/// They agree to the last bits until a sum on the edge between two int8 codes falls to different
/// sides; from there on they differ as two roundings of the same model do.
#[derive(Default)]
struct Agreement {
    /// Sum of |log-probability difference| over the other's 20 most likely tokens.
    diff_sum: f64,
    /// Log-probabilities compared.
    compared: u32,
    /// Positions whose choice differs although the margin is above 0.1 nats.
    decided_otherwise: usize,
    positions: usize,
}

impl Agreement {
    fn add(&mut self, other: &Self) {
        self.diff_sum += other.diff_sum;
        self.compared += other.compared;
        self.decided_otherwise += other.decided_otherwise;
        self.positions += other.positions;
    }

    fn mean_diff(&self) -> f64 {
        self.diff_sum / f64::from(self.compared)
    }

    /// # Errors
    /// Above a mean of 0.05 nats, or with a decided choice that differs. The choices of an artifact
    /// whose codes were halved are only counted: it is not one that is shipped, and its coarser
    /// weights leave less decided.
    fn check(&self, halved: bool) -> Result<()> {
        let chosen_alike = halved || self.decided_otherwise == 0;
        ensure!(self.mean_diff() <= 0.05 && chosen_alike, "too far apart: {self}");
        Ok(())
    }
}

impl std::fmt::Display for Agreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (mean, otherwise, positions) = (self.mean_diff(), self.decided_otherwise, self.positions);
        write!(f, "mean logprob difference {mean:.5}, {otherwise} of {positions} decided choices differ")
    }
}

/// Feeds what vLLM generated to this runtime and compares the log-probabilities of every position.
fn agreement(model: &Model<'_>, result: &Value) -> Result<Agreement> {
    let ids = |v: &Value| -> Result<Vec<u32>> { Ok(serde_json::from_value(v.clone())?) };
    let (prompt, generated) = (ids(&result["prompt"])?, ids(&result["tokens"])?);
    let fed = [&prompt[..], &generated[..generated.len() - 1]].concat();
    let width = model.config().hidden_size;
    let hidden = model.forward(&mut State::new(model.config()), &fed)?;
    let mut agreement = Agreement::default();
    let tops: Vec<Vec<(u32, f64)>> = serde_json::from_value(result["top"].clone())?;
    for (i, top) in tops.iter().enumerate() {
        let at = prompt.len() - 1 + i;
        let logits = model.logits(&hidden[at * width..(at + 1) * width]);
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let log_sum = max + logits.iter().map(|x| (f64::from(*x) - max).exp()).sum::<f64>().ln();
        for (token, logprob) in top {
            agreement.diff_sum += (f64::from(logits[*token as usize]) - log_sum - logprob).abs();
            agreement.compared += 1;
        }
        let margin = top[0].1 - top[1].1;
        agreement.decided_otherwise += usize::from(argmax(&logits) != top[0].0 && margin > 0.1);
        agreement.positions += 1;
    }
    Ok(agreement)
}
