//! The verbs: from arguments to a result on stdout.

mod calibration;
mod export_npu;
mod export_options;
mod generate;
mod gguf;
mod inspect;
mod model_arg;
mod plan;
mod quantize;
mod scheme;
mod verify;
mod verify_args;

use std::io::Write;

#[cfg(test)]
pub(crate) use scheme::format as format_of;
use serde::Serialize;

use crate::cli::{Command, LogArgs, ThreadArgs};
use crate::error::{Exit, Failure};
use crate::table;

/// Runs a command.
///
/// # Errors
/// A [`Failure`], which decides the exit code.
pub fn run(command: Command) -> anyhow::Result<Exit> {
    match command {
        Command::Inspect(args) => inspect::run(&args),
        Command::Plan(args) => plan::run(&args),
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
        Command::Plan(args) => args.log,
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

/// Writes the result. Names out of files stand in it, so what could drive a terminal is replaced.
fn print(text: &str) -> std::io::Result<()> {
    write_out(&text.replace(|c: char| c.is_control() && !matches!(c, '\n' | '\t'), "\u{fffd}"))
}

/// Writes the result as JSON.
fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    Ok(print_json_text(&format!("{}\n", serde_json::to_string_pretty(value)?))?)
}

/// Writes JSON, whose strings escape no more than they must: not what drives a terminal with a code above 126.
fn print_json_text(json: &str) -> std::io::Result<()> {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match c.is_control() && c != '\n' {
            true => text.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => text.push(c),
        }
    }
    write_out(&text)
}

fn write_out(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
