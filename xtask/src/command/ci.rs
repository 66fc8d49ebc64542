//! `cargo xtask ci`: the gate, what `.ci/run` runs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::process::{cargo, output, program, release_binary, root, run};
use super::{oracle, supply_chain};

/// The crate of the fuzz targets, a workspace of its own.
const FUZZ_TARGETS: &str = "xtask/fuzz/Cargo.toml";

/// No options.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run_all(_args: &Args) -> Result<()> {
    type Step = fn() -> Result<()>;
    let steps: [(&str, Step); 10] = [
        ("format", || {
            run(cargo().args(["fmt", "--all", "--check"]))?;
            run(cargo().args(["fmt", "--check", "--manifest-path", FUZZ_TARGETS]))
        }),
        ("lock file", || output(cargo().args(["metadata", "--locked", "--format-version=1"])).map(drop)),
        ("clippy", || {
            run(cargo().args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]))
        }),
        ("tests", || run(cargo().args(["test", "--workspace", "--locked"]))),
        ("fuzz targets", fuzz_targets),
        ("docs", || {
            run(cargo()
                .args(["doc", "--workspace", "--no-deps", "--locked"])
                .env("RUSTDOCFLAGS", "-D warnings"))
        }),
        ("supply chain", supply_chain::check),
        ("oldest compiler", supply_chain::oldest_compiler),
        ("end to end", end_to_end),
        ("referees", referees),
    ];
    let start = Instant::now();
    for (name, step) in steps {
        println!("== {name}");
        let began = Instant::now();
        step().map_err(|e| e.context(format!("step {name:?}")))?;
        println!("== {name}: {:.0} s", began.elapsed().as_secs_f64());
    }
    println!("== all passed in {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// The fuzz targets compile, and are those of `cargo xtask fuzz`. Running them takes cargo-fuzz.
fn fuzz_targets() -> Result<()> {
    let mut clippy = cargo();
    clippy.args(["clippy", "--locked", "--no-default-features", "--manifest-path", FUZZ_TARGETS]);
    run(clippy.args(["--target-dir", "target", "--", "-D", "warnings"]))?;
    let mut metadata = cargo();
    metadata.args(["metadata", "--no-deps", "--format-version=1", "--manifest-path", FUZZ_TARGETS]);
    let metadata: serde_json::Value = serde_json::from_str(&output(&mut metadata)?)?;
    let targets = metadata["packages"][0]["targets"].as_array().context("cargo metadata: no targets")?;
    let binaries = targets.iter().filter(|target| target["kind"][0] == "bin");
    let mut names: Vec<_> = binaries.filter_map(|target| target["name"].as_str()).collect();
    let mut expected = xtask::fuzz::NAMES.to_vec();
    names.sort_unstable();
    expected.sort_unstable();
    ensure!(names == expected, "{FUZZ_TARGETS}: has the targets {names:?}");
    Ok(())
}

/// The real binary on the bundled checkpoint: written twice, the same bytes, verified, spoilt, found.
fn end_to_end() -> Result<()> {
    let binary = release_binary()?;
    let temp = tempfile::tempdir()?;
    for (i, options) in [
        ["w8a8"].as_slice(),
        &["w8a8", "--head", "int8"],
        &["w4a8"],
        &["w4a8", "--asymmetric", "--head", "int8"],
        &["w4a16"],
    ]
    .iter()
    .enumerate()
    {
        let outs: Vec<PathBuf> = ["1", "2"].iter().map(|t| temp.path().join(format!("{i}-{t}"))).collect();
        for (threads, out) in ["1", "2"].iter().zip(&outs) {
            let quantize = || {
                let mut command = program(&binary);
                command.args(["quantize", "fixtures/spark-tiny", "--scheme"]).args(*options);
                command.args(["--threads", threads, "--out"]).arg(out);
                output(&mut command)
            };
            ensure!(quantize()?.contains("written"));
            ensure!(quantize()?.contains("up to date"));
        }
        ensure!(files(&outs[0])? == files(&outs[1])?, "1 and 2 threads wrote different bytes");
        let verify = |more: &[&str]| {
            let mut verify = program(&binary);
            verify.arg("verify").arg(&outs[0]).args(["--reference", "fixtures/spark-tiny"]);
            verify.args(more).status()
        };
        ensure!(verify(&[])?.code() == Some(0), "{options:?} does not pass its own gates");
        let said =
            output(program(&binary).arg("generate").arg(&outs[0]).args(["--tokens", "3,17,42", "--json"]))?;
        ensure!(serde_json::from_str::<serde_json::Value>(&said)?["tokens"].is_array());
        let shard = outs[0].join("model-00002-of-00002.safetensors");
        let mut bytes = fs::read(&shard)?;
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
        fs::write(&shard, bytes)?;
        ensure!(verify(&["--scenario", "none"])?.code() == Some(1), "a flipped byte went unnoticed");
    }
    Ok(())
}

fn files(dir: &Path) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        found.insert(path.strip_prefix(dir)?.to_owned(), fs::read(&path)?);
    }
    if found.is_empty() { bail!("{}: is empty", dir.display()) } else { Ok(found) }
}

/// The light referees where they are checked out beside the project, and those whose large
/// environment is at hand already.
fn referees() -> Result<()> {
    let Some(dir) = oracle::referees(None) else {
        println!("SKIPPED: no referees beside the checkout ({})", root().join("../shared/oracle").display());
        return Ok(());
    };
    oracle::grids(&dir)?;
    oracle::interpreter(&dir)?;
    oracle::exports(&dir, false)?;
    if oracle::is_made("full") {
        oracle::checkpoints(&dir)?;
        oracle::forward(&dir)?;
    } else {
        println!(
            "SKIPPED: the large environment of the checkpoint and forward pass referees is not made (cargo xtask oracle --set full)"
        );
    }
    Ok(())
}
