//! The verbs: from arguments to a result on stdout.

mod export_npu;
mod export_options;
mod generate;
mod inspect;
mod model_arg;
mod quantize;
mod scheme;
mod table;
mod verify;

use std::io::Write;

use serde::Serialize;

use crate::cli::{Command, LogArgs, ThreadArgs};
use crate::error::{Exit, Failure};

/// Runs a command.
///
/// # Errors
/// A [`Failure`], which decides the exit code.
pub fn run(command: Command) -> anyhow::Result<Exit> {
    match command {
        Command::Inspect(args) => inspect::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::ExportNpu(args) => export_npu::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Generate(args) => generate::run(&args),
    }
}

/// The logging options of a command.
pub fn log_args(command: &Command) -> LogArgs {
    match command {
        Command::Inspect(args) => args.log,
        Command::Quantize(args) => args.log,
        Command::ExportNpu(args) => args.log,
        Command::Verify(args) => args.log,
        Command::Generate(args) => args.log,
    }
}

/// Runs `work` on a pool of as many threads as asked for.
fn on_threads<T: Send>(threads: ThreadArgs, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
    let mut builder = rayon::ThreadPoolBuilder::new();
    if let Some(threads) = threads.threads {
        builder = builder.num_threads(usize::from(threads));
    }
    let pool = builder.build().map_err(|e| Failure::usage(format!("--threads: cannot start them: {e}")))?;
    Ok(pool.install(work))
}

/// Writes the result.
fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Writes the result as JSON.
fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    Ok(print(&format!("{}\n", serde_json::to_string_pretty(value)?))?)
}
