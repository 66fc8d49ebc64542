//! The forward pass: decode and prompts beside llama.cpp, and the reference of `verify` beside PyTorch.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use super::super::process::{cargo, output, program, root};
use super::{Args, measure, remove};

/// Tokens of the prompt, and tokens that are decoded.
const PROMPT: usize = 128;
const DECODE: usize = 12;
/// Prompts of the reference of `verify`: a sentence, a screen, a long conversation.
const LENGTHS: [usize; 3] = [28, 137, 2465];

/// Tokens per second of one build in one engine.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Rate {
    name: String,
    decode_per_s: f64,
    prompt_per_s: f64,
}

/// Seconds of all logits of a prompt.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Prompt {
    tokens: usize,
    seconds: f64,
    /// The PyTorch program from start to end, and the same less what it takes for one token: reading the
    /// checkpoint.
    torch_wall_s: Option<f64>,
    torch_s: Option<f64>,
}

/// What the builds are compared with; the first is measured again at the end.
const PEERS: [&str; 3] = ["Q4_K_M", "Q8_0", "BF16"];

/// Our builds, what makes them, and the peer that each is compared with.
const BUILDS: [(&str, &[&str], &str); 3] = [
    ("w4a16", &["--scheme", "w4a16", "--layout", "tinygemm-avx2-n32"], "Q4_K_M"),
    ("w4a8", &["--scheme", "w4a8"], "Q4_K_M"),
    ("w8a8 --head int8", &["--scheme", "w8a8", "--head", "int8"], "Q8_0"),
];

pub(super) fn decode_and_prompt(args: &Args, binary: &Path, model: &Path, work: &Path) -> Result<Vec<Rate>> {
    let mut rates = Vec::new();
    let peers = Peers::new(args, work)?;
    let peer = |name: &str, rates: &mut Vec<Rate>| -> Result<()> {
        rates.extend(peers.as_ref().map(|peers| peers.measure(name)).transpose()?);
        Ok(())
    };
    for name in PEERS {
        peer(name, &mut rates)?;
        for (build, options, _) in BUILDS.iter().filter(|(_, _, other)| *other == name) {
            let out = work.join("out");
            remove(&out)?;
            let mut quantize = program(binary);
            quantize
                .arg("quantize")
                .arg(model)
                .args(*options)
                .args(["--progress", "none", "--out"])
                .arg(&out);
            measure(build, &mut quantize)?;
            rates.push(ours(args, build, &out)?);
            remove(&out)?;
        }
        if name == "BF16" {
            rates.push(ours(args, "the checkpoint, f32 arithmetic", model)?);
        }
    }
    peer(PEERS[0], &mut rates)?;
    peers.map_or(Ok(()), Peers::remove)?;
    Ok(rates)
}

/// The bench of the forward pass, one line of JSON for each thing measured.
fn forward(args: &Args, model: &Path, options: &[&str]) -> Result<Vec<Value>> {
    let mut command = cargo();
    command.args(["bench", "--locked", "--quiet", "--bench", "forward", "--"]).arg(model).args(options);
    let lines = output(command.args(["--threads", &args.threads.to_string()]))?;
    lines.lines().map(|line| serde_json::from_str(line).with_context(|| line.to_owned())).collect()
}

fn ours(args: &Args, name: &str, model: &Path) -> Result<Rate> {
    let (prompt, decode, runs) = (PROMPT.to_string(), DECODE.to_string(), args.runs.to_string());
    let options = ["--last-only", "--tokens", &prompt, "--decode", &decode, "--runs", &runs];
    let lines = forward(args, model, &options)?;
    let rate = |i: usize| lines.get(i).and_then(|line| line["tokens_per_second"].as_f64());
    let prompt_per_s = rate(0).context("no rate of the prompt")?;
    let decode_per_s = rate(1).context("no rate of decoding")?;
    Ok(Rate { name: name.to_owned(), decode_per_s, prompt_per_s })
}

/// llama.cpp's bench and its files.
struct Peers<'a> {
    args: &'a Args,
    bench: &'a Path,
    files: Vec<(&'static str, std::path::PathBuf)>,
}

impl<'a> Peers<'a> {
    /// `None` without llama.cpp's bench.
    fn new(args: &'a Args, work: &Path) -> Result<Option<Self>> {
        let (Some(bench), Some(gguf)) = (&args.llama_bench, &args.gguf) else { return Ok(None) };
        let mut files = vec![("BF16", gguf.clone())];
        if let Some(quantize) = &args.llama_quantize {
            for kind in ["Q4_K_M", "Q8_0"] {
                let file = work.join(format!("{kind}.gguf"));
                let mut command = Command::new(quantize);
                command.arg(gguf).arg(&file).arg(kind).arg(args.threads.to_string()).stderr(Stdio::null());
                measure(kind, &mut command)?;
                files.push((kind, file));
            }
        }
        Ok(Some(Self { args, bench, files }))
    }

    fn measure(&self, name: &str) -> Result<Rate> {
        let file = self.files.iter().find(|(kind, _)| *kind == name);
        let (_, file) = file.with_context(|| format!("{name} needs --llama-quantize"))?;
        let mut command = Command::new(self.bench);
        command.args(["-o", "json", "-p", &PROMPT.to_string(), "-n", &DECODE.to_string()]);
        command
            .args(["-t", &self.args.threads.to_string(), "-r", &self.args.runs.to_string(), "-m"])
            .arg(file);
        let tests: Vec<Value> = serde_json::from_str(&output(&mut command)?)?;
        // The fastest run, as of the others.
        let rate = |prompt: bool| {
            let test = tests.iter().find(|test| (test["n_prompt"] != 0) == prompt)?;
            test["samples_ts"].as_array()?.iter().filter_map(Value::as_f64).reduce(f64::max)
        };
        Ok(Rate {
            name: format!("llama.cpp {name}"),
            decode_per_s: rate(false).context("no rate of decoding")?,
            prompt_per_s: rate(true).context("no rate of the prompt")?,
        })
    }

    fn remove(self) -> Result<()> {
        self.files.iter().skip(1).try_for_each(|(_, file)| remove(file))
    }
}

pub(super) fn print_rates(rates: &[Rate]) {
    // Of the peer that was measured twice, the faster one.
    let peer = |name: &str, rate: fn(&Rate) -> f64| {
        let name = format!("llama.cpp {name}");
        rates.iter().filter(|r| r.name == name).map(rate).reduce(f64::max)
    };
    println!("\n| tokens per second | decode | to llama.cpp's | prompt of {PROMPT} | to llama.cpp's |");
    println!("|---|---|---|---|---|");
    for r in rates {
        let build = BUILDS.iter().find(|(name, _, _)| *name == r.name).map(|(_, _, peer)| *peer);
        let other = build.or((!r.name.starts_with("llama.cpp")).then_some("BF16"));
        let ratio = |mine: f64, rate: fn(&Rate) -> f64| {
            let other = other.and_then(|name| peer(name, rate));
            other.map_or(String::new(), |theirs| format!("{:.2}", mine / theirs))
        };
        println!(
            "| {} | {:.1} | {} | {:.1} | {} |",
            r.name,
            r.decode_per_s,
            ratio(r.decode_per_s, |r| r.decode_per_s),
            r.prompt_per_s,
            ratio(r.prompt_per_s, |r| r.prompt_per_s)
        );
    }
}

/// All logits of prompts of the checkpoint in f32, beside a PyTorch program with the command line
/// `logits --model DIR --random-tokens N --out FILE --threads N`.
pub(super) fn prompts(args: &Args, model: &Path, work: &Path) -> Result<Vec<Prompt>> {
    let torch = |n: usize| -> Result<Option<f64>> {
        let (Some(python), Some(script)) = (&args.python, &args.torch_reference) else { return Ok(None) };
        let out = work.join("logits.npy");
        let mut command = Command::new(python);
        command.arg(script).args(["logits", "--threads", &args.threads.to_string(), "--random-tokens"]);
        command.arg(n.to_string()).arg("--model").arg(model).arg("--out").arg(&out).current_dir(root());
        let cost = measure("torch", &mut command)?;
        remove(&out)?;
        Ok(Some(cost.wall_s))
    };
    // Whatever comes first also brings the program and the weights into memory.
    torch(1)?;
    let one = torch(1)?;
    let mut all = Vec::new();
    for tokens in LENGTHS {
        let torch_wall_s = torch(tokens)?;
        let lines = forward(args, model, &["--tokens", &tokens.to_string(), "--decode", "0", "--runs", "1"])?;
        let seconds = lines.first().and_then(|line| line["seconds"].as_f64()).context("no seconds")?;
        let torch_s = torch_wall_s.zip(one).map(|(wall, one)| wall - one);
        all.push(Prompt { tokens, seconds, torch_wall_s, torch_s });
    }
    Ok(all)
}

pub(super) fn print_prompts(prompts: &[Prompt]) {
    println!("\n| all logits of a prompt in f32 | s | PyTorch s | its whole program s | PyTorch / ours |");
    println!("|---|---|---|---|---|");
    for p in prompts {
        let show = |s: Option<f64>| s.map_or(String::new(), |s| format!("{s:.2}"));
        println!(
            "| {} tokens | {:.2} | {} | {} | {} |",
            p.tokens,
            p.seconds,
            show(p.torch_s),
            show(p.torch_wall_s),
            show(p.torch_s.map(|s| s / p.seconds))
        );
    }
}
