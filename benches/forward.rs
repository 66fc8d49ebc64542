//! `cargo bench --bench forward -- MODEL...`: seconds of the forward pass of checkpoints, artifacts and GGUF
//! files, a line of JSON for each. Reading a prompt includes the logits of every position, as `verify` needs
//! them. Best of several runs; only ratios within one run mean anything.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use spark_convert::opened::Opened;
use spark_convert::runtime::{Model, State, argmax};

/// Positions whose logits are made at a time, as `verify` does.
const POSITIONS: usize = 16;

#[derive(Parser)]
struct Args {
    /// Checkpoints, artifacts or GGUF files
    #[arg(required = true)]
    models: Vec<PathBuf>,
    /// Lengths of prompts
    #[arg(long, value_delimiter = ',', default_value = "128")]
    tokens: Vec<usize>,
    /// Tokens that are decoded one by one after the first prompt
    #[arg(long, default_value_t = 12)]
    decode: usize,
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Runs of each; the fastest counts
    #[arg(long, default_value_t = 2)]
    runs: usize,
    /// Leave out the logits of all positions but the last, as a server does
    #[arg(long)]
    last_only: bool,
    /// What `cargo bench` passes to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    rayon::ThreadPoolBuilder::new().num_threads(args.threads).build()?.install(|| {
        for path in &args.models {
            let opened = Opened::open(path)?;
            measure(&args, &path.display().to_string(), &opened.model()?)?;
        }
        Ok(())
    })
}

fn measure(args: &Args, name: &str, model: &Model<'_>) -> Result<()> {
    let vocab = model.config().vocab_size;
    let ids = |n: usize| -> Vec<u32> {
        (0..n).map(|i| u32::try_from((i * i * 31 + 17 * i + 5) % vocab).expect("a token id")).collect()
    };
    // Brings the weights into memory.
    model.forward_last(&mut State::new(model.config()), &ids(2))?;
    for n in &args.tokens {
        let tokens = ids(*n);
        let seconds =
            best(args.runs, || prompt(model, &mut State::new(model.config()), &tokens, args.last_only))?;
        let rate = *n as f64 / seconds;
        let line = serde_json::json!({
            "model": name, "prompt_tokens": n, "all_logits": !args.last_only, "seconds": seconds,
            "tokens_per_second": rate, "peak_rss_anon_mib": rss_anon_mib()?,
        });
        println!("{line}");
    }
    if args.decode > 0 {
        let seconds = best(args.runs, || {
            let mut state = State::new(model.config());
            let mut hidden = model.forward_last(&mut state, &ids(2))?;
            let start = Instant::now();
            for _ in 0..args.decode {
                hidden = model.forward_last(&mut state, &[argmax(&model.logits(&hidden))])?;
            }
            Ok(start.elapsed().as_secs_f64())
        })?;
        let rate = args.decode as f64 / seconds;
        let line = serde_json::json!({
            "model": name, "decoded_tokens": args.decode, "seconds": seconds, "tokens_per_second": rate,
        });
        println!("{line}");
    }
    Ok(())
}

/// Seconds of reading a prompt.
fn prompt(model: &Model<'_>, state: &mut State, tokens: &[u32], last_only: bool) -> Result<f64> {
    let start = Instant::now();
    if last_only {
        let hidden = model.forward_last(state, tokens)?;
        std::hint::black_box(model.logits(&hidden));
    } else {
        let hidden = model.forward(state, tokens)?;
        for rows in hidden.chunks(POSITIONS * model.config().hidden_size) {
            std::hint::black_box(model.logits(rows));
        }
    }
    Ok(start.elapsed().as_secs_f64())
}

fn best(runs: usize, mut once: impl FnMut() -> Result<f64>) -> Result<f64> {
    let mut seconds = f64::INFINITY;
    for _ in 0..runs.max(1) {
        seconds = seconds.min(once()?);
    }
    Ok(seconds)
}

/// Anonymous memory now, in MiB: what mapped files bring and drop does not count.
fn rss_anon_mib() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).context("RssAnon")?;
    Ok(line.split_whitespace().nth(1).context("a number of KiB")?.parse::<u64>()? / 1024)
}
