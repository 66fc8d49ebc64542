//! `cargo xtask fuzz`: damaged files before everything that reads them.

mod guided;

use std::time::Instant;

use anyhow::{Result, ensure};
use xtask::fuzz::{NAMES, run as run_target};

use super::process::release_binary;

/// Options of the task.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to damage [default: everything]
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(NAMES))]
    target: Vec<String>,
    /// Files per target
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    runs: u64,
    /// First seed; the others follow it
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Let libFuzzer choose the damage by what it reaches (needs cargo-fuzz and a C++ compiler)
    #[arg(long)]
    guided: bool,
    /// Tell how many lines of each reader are reached by the files that guided runs kept (needs LLVM's tools)
    #[arg(long, conflicts_with_all = ["guided", "runs", "seed"])]
    coverage: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let binary = release_binary()?;
    let names: Vec<&str> = match args.target.is_empty() {
        true => NAMES.to_vec(),
        false => args.target.iter().map(String::as_str).collect(),
    };
    if args.guided {
        return guided::run_targets(&binary, &names, args.seed, args.runs);
    }
    if args.coverage {
        return guided::coverage(&binary, &names);
    }
    // A panic is caught and told with its seed.
    std::panic::set_hook(Box::new(|_| {}));
    let mut bad = 0;
    for name in names {
        let start = Instant::now();
        let outcome = run_target(&binary, name, args.seed, args.runs)?;
        for what in outcome.bad.iter().take(20) {
            println!("BAD: {what}");
        }
        bad += outcome.bad.len();
        println!(
            "{name}: {} files, {} accepted, {} bad, at most {} KiB of memory, {:.0} s",
            outcome.runs,
            outcome.accepted,
            outcome.bad.len(),
            outcome.peak_bytes / 1024,
            start.elapsed().as_secs_f64()
        );
    }
    ensure!(bad == 0, "{bad} files were read in a way that must not be");
    Ok(())
}
