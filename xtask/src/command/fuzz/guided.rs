//! Damage guided by coverage: libFuzzer keeps the files that reach something new, and changes those further.
//! The fuzz targets are the crate in `xtask/fuzz`, which cargo-fuzz builds.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use xtask::fuzz::{Target, dictionary};

use super::super::process::{cargo, output, program, root, run};

/// Where the crate of the fuzz targets is.
const CRATE: &str = "xtask/fuzz";

/// The sources of what makes sense of files, from the root. Some of them write as well, and none of that is
/// reached.
const READERS: [&str; 18] = [
    "src/artifact/manifest.rs",
    "src/calibrate/importance.rs",
    "src/checkpoint/header.rs",
    "src/checkpoint/inventory.rs",
    "src/checkpoint/tensor_files.rs",
    "src/formats/read.rs",
    "src/gguf",
    "src/interpreter/ops",
    "src/interpreter/plan.rs",
    "src/npu/runner",
    "src/npu/runner.rs",
    "src/onnx",
    "src/opened.rs",
    "src/spark",
    "src/tokenize/chat.rs",
    "src/tokenize/generation.rs",
    "src/tokenize/python.rs",
    "src/tokenize/tojson.rs",
];

/// Where files, findings and builds of the targets are.
struct Place(PathBuf);

impl Place {
    fn corpus(&self, name: &str) -> PathBuf {
        self.0.join("corpus").join(name)
    }

    /// The built targets; those that count lines are apart.
    fn builds(&self, counting: bool) -> PathBuf {
        self.0.join(if counting { "counting" } else { "guided" })
    }
}

/// Reads `runs` files of each target. What the runs found worth keeping stays in `target/fuzz/corpus`, where
/// the next run starts from.
pub(super) fn run_targets(binary: &Path, names: &[&str], seed: u64, runs: u64) -> Result<()> {
    let place = Place(root().join("target/fuzz"));
    let triple = host()?;
    let fuzz = ["fuzz", "build", "--fuzz-dir", CRATE, "--sanitizer", "none", "--no-cfg-fuzzing"];
    let mut build = cargo();
    build.args(fuzz).args(["--target", &triple, "--codegen-units", "16", "--target-dir"]);
    run(build.arg(place.builds(false))).context("cargo-fuzz is needed (cargo install cargo-fuzz)")?;
    fs::write(place.0.join("dictionary"), dictionary())?;
    let mut failed = Vec::new();
    for name in names {
        let corpus = place.corpus(name);
        fs::create_dir_all(&corpus)?;
        let wholes = Target::new(binary, name)?.wholes().to_vec();
        for (i, whole) in wholes.iter().enumerate() {
            fs::write(corpus.join(format!("undamaged-{i}")), whole)?;
        }
        let longest = wholes.iter().map(Vec::len).max().unwrap_or(0);
        let temp = tempfile::tempdir()?;
        let mut fuzz = target(&place.builds(false).join(&triple).join("release").join(name), binary, &temp);
        fuzz.arg(&corpus).args([
            format!("-runs={runs}"),
            format!("-seed={}", seed.wrapping_add(1)),
            format!("-max_len={}", longest * 2 + 4096),
            format!("-dict={}", place.0.join("dictionary").display()),
            format!("-artifact_prefix={}/found-{name}-", place.0.display()),
            "-timeout=20".to_owned(),
            "-rss_limit_mb=1024".to_owned(),
            "-print_final_stats=1".to_owned(),
        ]);
        let log_file = place.0.join(format!("{name}.log"));
        let start = Instant::now();
        let done = fuzz.stderr(fs::File::create(&log_file)?).status();
        let done = done.with_context(|| format!("cannot start {fuzz:?}"))?;
        let log = String::from_utf8_lossy(&fs::read(&log_file)?).into_owned();
        let read = log.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
        println!(
            "{name}: {} files, {} kept, {}, {:.0} s",
            read.unwrap_or("?").trim(),
            fs::read_dir(&corpus)?.count(),
            if done.success() { "0 bad" } else { "BAD" },
            start.elapsed().as_secs_f64()
        );
        if !done.success() {
            let telling = |line: &&str| ["panicked", "ERROR:", name].iter().any(|word| line.contains(word));
            log.lines().filter(telling).for_each(|line| println!("  {line}"));
            failed.push(*name);
        }
    }
    ensure!(failed.is_empty(), "{failed:?}: the files that show it are {}/found-*", place.0.display());
    Ok(())
}

/// Reads what the runs have kept once more, and tells how many lines of each reader that reaches.
pub(super) fn coverage(binary: &Path, names: &[&str]) -> Result<()> {
    let place = Place(root().join("target/fuzz"));
    let builds = place.builds(true);
    let mut build = cargo();
    build.args(["build", "--release", "--locked", "--quiet", "--manifest-path"]);
    build.arg(format!("{CRATE}/Cargo.toml")).arg("--target-dir").arg(&builds);
    run(build.env("RUSTFLAGS", "-C instrument-coverage"))?;
    let temp = tempfile::tempdir()?;
    let mut objects: Vec<OsString> = Vec::new();
    for name in names {
        let object = builds.join("release").join(name);
        let mut read = target(&object, binary, &temp);
        read.arg("-runs=0").arg(place.corpus(name));
        read.env("LLVM_PROFILE_FILE", temp.path().join(format!("{name}.profraw")));
        let done = read.stderr(Stdio::null()).status().with_context(|| format!("cannot start {read:?}"))?;
        ensure!(done.success(), "{read:?}: {done}; the run that kept its files tells more");
        objects.extend(["--object".into(), object.into_os_string()]);
    }
    let merged = builds.join("merged.profdata");
    let mut merge = program(llvm("llvm-profdata")?);
    merge.args(["merge", "--sparse", "--output"]).arg(&merged);
    run(merge.args(names.iter().map(|name| temp.path().join(format!("{name}.profraw")))))?;
    let mut report = program(llvm("llvm-cov")?);
    report.arg("export").arg("--summary-only").arg("--instr-profile").arg(&merged).args(&objects);
    let report: serde_json::Value = serde_json::from_str(&output(&mut report)?)?;
    let files = report["data"][0]["files"].as_array().context("llvm-cov: no files")?;
    let (mut all, mut reached) = (0, 0);
    for file in files {
        let path = Path::new(file["filename"].as_str().unwrap_or_default());
        let Ok(path) = path.strip_prefix(root()) else { continue };
        let is_test = path.components().any(|c| c.as_os_str().to_string_lossy().contains("test"));
        if is_test || !READERS.iter().any(|reader| path.starts_with(reader)) {
            continue;
        }
        let lines = |key: &str| file["summary"]["lines"][key].as_u64().unwrap_or(0);
        println!("{:5} of {:5} lines  {}", lines("covered"), lines("count"), path.display());
        (all, reached) = (all + lines("count"), reached + lines("covered"));
    }
    ensure!(all > 0, "llvm-cov names none of the readers");
    println!("{reached:5} of {all:5} lines, {:.1} %", reached as f64 / all as f64 * 100.0);
    Ok(())
}

/// A built target, with its temporary files in `temp`.
fn target(built: &Path, binary: &Path, temp: &tempfile::TempDir) -> Command {
    let mut command = program(built);
    command.env("SPARK_CONVERT", binary).env("TMPDIR", temp.path());
    command
}

/// The triple of this machine.
fn host() -> Result<String> {
    let version = output(program("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV: no host")?.to_owned())
}

/// A tool of LLVM, of the version that the compiler is built with.
fn llvm(name: &str) -> Result<String> {
    let version = output(program("rustc").arg("-vV"))?;
    let major = version.lines().find_map(|line| line.strip_prefix("LLVM version: ")?.split('.').next());
    let sysroot = output(program("rustc").args(["--print", "sysroot"]))?;
    let component = format!("{}/lib/rustlib/{}/bin/{name}", sysroot.trim(), host()?);
    let names = [component, format!("{name}-{}", major.unwrap_or_default()), name.to_owned()];
    let found = names.into_iter().find(|n| Command::new(n).arg("--version").output().is_ok());
    match found {
        Some(found) => Ok(found),
        None => {
            bail!("{name} is needed (rustup component add llvm-tools, or LLVM {})", major.unwrap_or_default())
        }
    }
}
