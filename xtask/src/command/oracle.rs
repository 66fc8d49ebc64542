//! `cargo xtask oracle`: the independent referees, where they are at hand.
//!
//! They are Python programs on the real libraries, kept outside this project; each set makes its own
//! environment once.

mod consumer;
mod engines;
mod export;
mod levels;
mod nodes;
mod reference;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use xtask::fixtures::FixtureSpec;

use super::process::{output, program, release_binary, root, run};

/// Which referees.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Set {
    /// Grid levels on fixed matrices; ONNX Runtime on operators and whole exports (215 MiB of packages).
    Light,
    /// The real compressed-tensors library reads artifacts (5.1 GiB).
    Full,
    /// PyTorch computes logits and greedy tokens (the environment of `full`).
    Reference,
    /// The same on the bundled checkpoint alone.
    Bundled,
    /// Every combination of dialect, split and caches of an export, in ONNX Runtime (`light`'s environment).
    Combinations,
    /// ONNX Runtime, OpenVINO and MNN run one export of every dialect (450 MiB of packages).
    Engines,
    /// NumPy computes what verify reports of three artifacts (the environment of `light`).
    EndToEnd,
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
            Set::Light => {
                grids(&dir)?;
                interpreter(&dir)?;
                exports(&dir, true)?;
            }
            Set::Full => {
                checkpoints(&dir)?;
                tinygemm(&dir)?;
            }
            Set::Reference => {
                forward(&dir)?;
                bundled(&dir)?;
            }
            Set::Bundled => bundled(&dir)?,
            Set::Combinations => engines::combinations(&dir, &python(&dir, "light")?, &release_binary()?)?,
            Set::Engines => engines::check(&release_binary()?)?,
            Set::EndToEnd => end_to_end(&dir)?,
            Set::Vllm => {
                let temp = tempfile::tempdir()?;
                consumer::vllm(&dir, &python(&dir, "vllm")?, &release_binary()?, &sources(temp.path())?)?;
            }
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

/// The interpreter of exported graphs against ONNX Runtime.
pub(super) fn interpreter(dir: &Path) -> Result<()> {
    nodes::check(&python(dir, "light")?)
}

/// A checkpoint that artifacts are made of.
struct Source {
    name: &'static str,
    dir: PathBuf,
    layers: u64,
}

/// The presets that all kernels take in groups of 64 (not of 128: one has an MLP of 832), and the
/// bundled trained checkpoint.
fn sources(temp: &Path) -> Result<[Source; 3]> {
    let preset = |name, spec: FixtureSpec| -> Result<Source> {
        let dir = temp.join(name);
        let layers = spec.geometry.layers as u64;
        spec.write(&dir)?;
        Ok(Source { name, dir, layers })
    };
    Ok([
        preset("square", FixtureSpec::square())?,
        preset("wide", FixtureSpec::wide())?,
        Source { name: "spark-tiny", dir: root().join("fixtures/spark-tiny"), layers: 8 },
    ])
}

/// One form of artifact and the referee that reads it.
struct Form {
    scheme: &'static str,
    options: &'static [&'static str],
    checker: &'static str,
    check_options: &'static [&'static str],
}

const fn form(
    scheme: &'static str,
    options: &'static [&'static str],
    checker: &'static str,
    check_options: &'static [&'static str],
) -> Form {
    Form { scheme, options, checker, check_options }
}

const GPTQ: &str = "check_gptq.py";
const PACKED: &str = "check_packed.py";
const TINYGEMM: &str = "check_tinygemm.py";

const FORMS: [Form; 15] = [
    form("w8a8", &[], "check_w8a8.py", &["--head", "bf16"]),
    form("w8a8", &["--head", "int8"], "check_w8a8.py", &["--head", "int8"]),
    form("w4a8", &["--group-size", "64"], GPTQ, &[]),
    form("w4a8", &["--group-size", "32", "--method", "rtn"], GPTQ, &[]),
    form("w4a8", &["--group-size", "64", "--qkv", "split"], GPTQ, &["--qkv", "split"]),
    form("w4a8", &["--group-size", "64", "--head", "bf16"], GPTQ, &["--tied-head"]),
    form("w4a8", &["--group-size", "64", "--asymmetric"], PACKED, &[]),
    form("w4a8", &["--group-size", "32", "--asymmetric", "--method", "rtn"], PACKED, &[]),
    form("w4a8", &["--group-size", "64", "--asymmetric", "--head", "int8"], PACKED, &["--head", "int8"]),
    form("w4a8", &["--group-size", "64", "--head", "int8"], PACKED, &["--symmetric", "--head", "int8"]),
    form("w4a8", &["--group-size", "64", "--packing", "compressed-tensors"], PACKED, &["--symmetric"]),
    form("w4a16", &["--group-size", "64"], TINYGEMM, &[]),
    form("w4a16", &["--group-size", "32", "--method", "rtn"], TINYGEMM, &[]),
    form("w4a16", &["--group-size", "64", "--head", "int8"], TINYGEMM, &["--head", "int8"]),
    form("w4a16", &["--group-size", "64", "--head", "bf16"], TINYGEMM, &["--head", "bf16"]),
];

/// Groups of 128, on checkpoints that take them.
const FORMS_128: [Form; 5] = [
    form("w8a8", &[], "check_w8a8.py", &["--head", "bf16"]),
    form("w4a8", &[], GPTQ, &[]),
    form("w4a8", &["--asymmetric", "--head", "int8"], PACKED, &["--head", "int8"]),
    form("w4a8", &["--asymmetric"], PACKED, &[]),
    form("w4a16", &[], TINYGEMM, &[]),
];

/// Writes an artifact and has its bytes verified.
fn make(binary: &Path, source: &Source, scheme: &str, options: &[&str], artifact: &Path) -> Result<()> {
    let mut quantize = program(binary);
    quantize.arg("quantize").arg(&source.dir).args(["--scheme", scheme]).args(options);
    output(quantize.arg("--out").arg(artifact))?;
    let mut verify = program(binary);
    verify.arg("verify").arg(artifact).arg("--reference").arg(&source.dir).args(["--scenario", "none"]);
    output(&mut verify)?;
    Ok(())
}

/// The real libraries read every form.
pub(super) fn checkpoints(dir: &Path) -> Result<()> {
    let python = python(dir, "full")?;
    let binary = release_binary()?;
    let temp = tempfile::tempdir()?;
    let sources = sources(temp.path())?;
    for source in &sources {
        let forms = if source.name == "square" { FORMS.as_slice() } else { &FORMS_128 };
        for (i, form) in forms.iter().enumerate() {
            println!("{} {}: {} {:?}", form.checker, source.name, form.scheme, form.options);
            let artifact = temp.path().join(format!("{}-{i}", source.name));
            make(&binary, source, form.scheme, form.options, &artifact)?;
            let mut check = program(&python);
            check.arg(dir.join(form.checker)).arg("--source").arg(&source.dir);
            run(check.arg("--artifact").arg(&artifact).args(form.check_options))?;
            fs::remove_dir_all(&artifact)?;
        }
    }
    Ok(())
}

/// The figures of artifacts that the bundled checkpoint becomes, from the written bytes, against the committed
/// ones that a test holds `verify` to.
fn end_to_end(dir: &Path) -> Result<()> {
    let (binary, temp) = (release_binary()?, tempfile::tempdir()?);
    let source = Source { name: "spark-tiny", dir: root().join("fixtures/spark-tiny"), layers: 8 };
    for scheme in ["w8a8", "w4a8", "w4a16"] {
        make(&binary, &source, scheme, &[], &temp.path().join(scheme))?;
    }
    let mut check = program(python(dir, "light")?);
    check.arg(root().join("tests/oracle/end_to_end.py")).arg("--artifacts").arg(temp.path());
    run(check.arg("--check").arg(root().join("fixtures/goldens/end-to-end")))
}

/// The project's own loader of w4a16 artifacts on PyTorch's kernel.
fn tinygemm(dir: &Path) -> Result<()> {
    let temp = tempfile::tempdir()?;
    consumer::tinygemm(&python(dir, "full")?, &release_binary()?, &sources(temp.path())?)
}

/// ONNX Runtime runs exports to the end of their context.
pub(super) fn exports(dir: &Path, all: bool) -> Result<()> {
    export::check(dir, &python(dir, "light")?, &release_binary()?, all)
}

/// The forward pass against PyTorch on the referee's own checkpoints.
pub(super) fn forward(dir: &Path) -> Result<()> {
    reference::check(dir, &python(dir, "full")?)
}

/// The same on the bundled checkpoint.
fn bundled(dir: &Path) -> Result<()> {
    reference::check_bundled(dir, &python(dir, "full")?)
}
