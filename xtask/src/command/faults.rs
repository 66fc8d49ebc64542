//! `cargo xtask faults`: faults at every system call of `quantize` that changes a file.

use std::time::Instant;

use anyhow::{Result, ensure};

use super::process::release_binary;

/// Options of the task.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Take every Nth call only
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    stride: u16,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let binary = release_binary()?;
    let start = Instant::now();
    let sweep = xtask::faults::sweep(&binary, usize::from(args.stride))?;
    for (ending, count) in &sweep.endings {
        println!("{count:>6}  {ending}");
    }
    for bad in &sweep.bad {
        println!("BAD: {bad}");
    }
    println!(
        "{} faults, {} bad outcomes, {:.0} s",
        sweep.faults,
        sweep.bad.len(),
        start.elapsed().as_secs_f64()
    );
    ensure!(
        sweep.bad.is_empty(),
        "an artifact was left that is neither absent nor whole, or an ending was wrong"
    );
    Ok(())
}
