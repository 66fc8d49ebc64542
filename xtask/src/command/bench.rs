//! `cargo xtask bench`: the main job on a checkpoint of the real size, beside the bare I/O, llama.cpp and
//! PyTorch.
//!
//! Everything is measured side by side in one run, caches warm; only ratios mean anything.

mod runtime;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use xtask::fixtures::{FixtureSpec, Preset};

use super::process::{program, release_binary, root};

/// Options of the task.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Checkpoint to work on [default: a random one of the 1.7B's shapes, made once under target/]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Threads of every program
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Runs of each; the fastest counts
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// What to measure
    #[arg(long, value_enum, default_value_t = Part::All)]
    part: Part,
    /// llama-quantize, to measure beside
    #[arg(long, value_name = "PROGRAM", requires = "gguf")]
    llama_quantize: Option<PathBuf>,
    /// llama-bench, to measure beside
    #[arg(long, value_name = "PROGRAM", requires = "gguf")]
    llama_bench: Option<PathBuf>,
    /// A Python with torch and safetensors, to measure a plain script of it beside
    #[arg(long, value_name = "PROGRAM")]
    python: Option<PathBuf>,
    /// A PyTorch model of Spark, to measure beside the reference of verify: a script with the command line
    /// `logits --model DIR --random-tokens N --out FILE --threads N`
    #[arg(long, value_name = "FILE", requires = "python")]
    torch_reference: Option<PathBuf>,
    /// The same checkpoint as a BF16 GGUF, for llama.cpp
    #[arg(long, value_name = "FILE")]
    gguf: Option<PathBuf>,
    /// Where the JSON goes
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Everything
    All,
    /// Writing artifacts, and reading them back
    Quantize,
    /// Decoding and reading prompts
    Decode,
    /// The reference of verify
    Reference,
}

/// What one program cost.
#[derive(Clone, Debug, Serialize)]
struct Cost {
    name: String,
    wall_s: f64,
    cpu_s: f64,
    peak_rss_anon_mib: f64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let binary = release_binary()?;
    let work = root().join("target/bench");
    fs::create_dir_all(&work)?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => full_size_model(&work)?,
    };
    let wanted = |part| args.part == Part::All || args.part == part;
    let mut json = serde_json::json!({"threads": args.threads});
    warm(&weights(&model)?)?;
    if wanted(Part::Quantize) {
        let costs = quantize(args, &binary, &model, &work)?;
        print_costs(&costs)?;
        json["costs"] = serde_json::to_value(costs)?;
    }
    if wanted(Part::Decode) {
        let rates = runtime::decode_and_prompt(args, &binary, &model, &work)?;
        runtime::print_rates(&rates);
        json["rates"] = serde_json::to_value(rates)?;
    }
    if wanted(Part::Reference) {
        let prompts = runtime::prompts(args, &model, &work)?;
        runtime::print_prompts(&prompts);
        json["prompts"] = serde_json::to_value(prompts)?;
    }
    if let Some(path) = &args.json {
        fs::write(path, serde_json::to_string_pretty(&json)?)?;
    }
    Ok(())
}

fn quantize(args: &Args, binary: &Path, model: &Path, work: &Path) -> Result<Vec<Cost>> {
    let out = work.join("out");
    let input = weights(model)?;
    let quantize = |options: &[&str]| {
        let mut command = program(binary);
        command.arg("quantize").arg(model).arg("--scheme").args(options);
        command
            .args(["--force", "--progress", "none", "--threads", &args.threads.to_string(), "--out"])
            .arg(&out);
        command
    };
    let mut costs = Vec::new();
    // The last one's output is what the bare I/O copies.
    for options in [
        ["w4a8"].as_slice(),
        &["w4a8", "--asymmetric", "--head", "int8"],
        &["w4a16"],
        &["w8a8", "--head", "int8"],
        &["w8a8", "--method", "rtn"],
        &["w8a8"],
    ] {
        let name = format!("quantize {}", options.join(" "));
        costs.push(best(args.runs, &name, || {
            remove(&out)?;
            measure(&name, &mut quantize(options))
        })?);
    }
    let copy = work.join("copy");
    let this = std::env::current_exe()?;
    costs.push(best(args.runs, "bare I/O", || {
        remove(&copy)?;
        let mut command = Command::new(&this);
        command
            .arg("bare-io")
            .arg("--input")
            .args(&input)
            .arg("--output")
            .args(&weights(&out)?)
            .arg("--to")
            .arg(&copy);
        measure("bare I/O: read the input, copy the output, sync", &mut command)
    })?);
    let mut verify = program(binary);
    verify.arg("verify").arg(&out).arg("--reference").arg(model);
    // The bytes only: what the model says takes minutes, and is not what is compared here.
    verify.args(["--scenario", "none", "--progress", "none", "--threads", &args.threads.to_string()]);
    costs.push(measure("verify --scenario none", &mut verify)?);
    if let (Some(llama), Some(gguf)) = (&args.llama_quantize, &args.gguf) {
        let to = work.join("quantized.gguf");
        for kind in ["Q8_0", "Q4_K_M"] {
            let name = format!("llama-quantize {kind}");
            costs.push(best(args.runs, &name, || {
                let mut command = Command::new(llama);
                command.arg(gguf).arg(&to).arg(kind).arg(args.threads.to_string());
                measure(&name, &mut command)
            })?);
        }
        remove(&to)?;
    }
    if let Some(python) = &args.python {
        let script = root().join("tests/oracle/plain_torch.py");
        let name = "plain PyTorch script, w8a8 rtn";
        costs.push(best(args.runs, name, || {
            remove(&copy)?;
            let mut command = Command::new(python);
            command.arg(&script).arg(model).arg(&copy).arg(args.threads.to_string());
            measure(name, &mut command)
        })?);
    }
    remove(&copy)?;
    remove(&out)?;
    Ok(costs)
}

fn print_costs(costs: &[Cost]) -> Result<()> {
    let bare =
        costs.iter().find(|c| c.name.starts_with("bare I/O")).context("the bare I/O was not measured")?;
    println!("| | wall s | CPU s | wall / bare I/O | CPU / bare I/O | peak RssAnon MiB |");
    println!("|---|---|---|---|---|---|");
    for c in costs {
        println!(
            "| {} | {:.2} | {:.2} | {:.2} | {:.2} | {:.0} |",
            c.name,
            c.wall_s,
            c.cpu_s,
            c.wall_s / bare.wall_s,
            c.cpu_s / bare.cpu_s,
            c.peak_rss_anon_mib
        );
    }
    Ok(())
}

/// The fastest of some runs, with the largest memory of all of them.
fn best(runs: usize, name: &str, mut once: impl FnMut() -> Result<Cost>) -> Result<Cost> {
    let mut costs = (0..runs.max(1)).map(|_| once()).collect::<Result<Vec<_>>>()?;
    let memory = costs.iter().map(|c| c.peak_rss_anon_mib).fold(0.0, f64::max);
    costs.sort_by(|a, b| a.wall_s.total_cmp(&b.wall_s));
    let cpu_s = costs.iter().map(|c| c.cpu_s).fold(f64::INFINITY, f64::min);
    let first = costs.first().with_context(|| format!("{name}: no run"))?;
    Ok(Cost { cpu_s, peak_rss_anon_mib: memory, ..first.clone() })
}

/// Runs a program to its end, looking at its memory every few milliseconds.
fn measure(name: &str, command: &mut Command) -> Result<Cost> {
    let before = children_cpu_s()?;
    let start = Instant::now();
    let mut child =
        command.stdout(Stdio::null()).spawn().with_context(|| format!("cannot start {command:?}"))?;
    let mut peak_kib = 0;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        peak_kib = peak_kib.max(rss_anon_kib(&child).unwrap_or(0));
        std::thread::sleep(Duration::from_millis(4));
    };
    let wall_s = start.elapsed().as_secs_f64();
    ensure!(status.success(), "{command:?}: {status}");
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    let peak_rss_anon_mib = peak_kib as f64 / 1024.0;
    Ok(Cost { name: name.to_owned(), wall_s, cpu_s: children_cpu_s()? - before, peak_rss_anon_mib })
}

/// Anonymous memory: what mapped files bring and drop does not count.
fn rss_anon_kib(child: &Child) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = status.lines().find(|l| l.starts_with("RssAnon:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// User and system time of all children that have ended, from /proc (fields 16 and 17, in ticks).
fn children_cpu_s() -> Result<f64> {
    /// USER_HZ, which is 100 on every Linux that Rust runs on.
    const TICKS_PER_S: f64 = 100.0;
    let stat = fs::read_to_string("/proc/self/stat")?;
    // The program's name may hold blanks: count from its closing parenthesis.
    let rest = stat.rsplit_once(')').context("/proc/self/stat")?.1;
    let ticks: f64 = rest.split_whitespace().skip(13).take(2).map(|t| t.parse::<f64>().unwrap_or(0.0)).sum();
    Ok(ticks / TICKS_PER_S)
}

fn full_size_model(work: &Path) -> Result<PathBuf> {
    let model = work.join("full-1.7b");
    if !model.join("model.safetensors.index.json").is_file() {
        remove(&model)?;
        println!("making {} (3.4 GB)", model.display());
        FixtureSpec::from(Preset::Full1_7b).write(&model)?;
    }
    Ok(model)
}

fn weights(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn warm(files: &[PathBuf]) -> Result<()> {
    for file in files {
        read(file)?;
    }
    Ok(())
}

fn read(path: &Path) -> Result<()> {
    let mut buffer = vec![0; 4 << 20];
    let mut file = File::open(path)?;
    while file.read(&mut buffer)? > 0 {}
    Ok(())
}

fn remove(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Ok(m) if m.is_dir() => Ok(fs::remove_dir_all(path)?),
        Ok(_) => Ok(fs::remove_file(path)?),
        Err(_) => Ok(()),
    }
}

/// Options of the hidden task that the bench compares with.
#[derive(clap::Args)]
pub(crate) struct BareIoArgs {
    #[arg(long, num_args = 1..)]
    input: Vec<PathBuf>,
    #[arg(long, num_args = 1..)]
    output: Vec<PathBuf>,
    #[arg(long)]
    to: PathBuf,
}

/// Reads the input once, and copies the output with a sync at the end of each file.
pub(crate) fn bare_io(args: &BareIoArgs) -> Result<()> {
    warm(&args.input)?;
    fs::create_dir_all(&args.to)?;
    let mut buffer = vec![0; 4 << 20];
    for path in &args.output {
        let mut from = File::open(path)?;
        let mut to = File::create(args.to.join(path.file_name().context("a file name")?))?;
        loop {
            match from.read(&mut buffer)? {
                0 => break,
                n => to.write_all(&buffer[..n])?,
            }
        }
        to.sync_all()?;
    }
    Ok(())
}
