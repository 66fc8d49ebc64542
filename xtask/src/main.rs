//! `cargo xtask`: the development tasks of the project.

mod command;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// What `fuzz` measures with.
#[global_allocator]
static ALLOCATOR: xtask::fuzz::Counting = xtask::fuzz::Counting;

/// Development tasks of spark-convert.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run the gate: format, clippy, tests, docs, end to end, referees.
    Ci(command::ci::Args),
    /// Write shell completions and manual pages.
    Docs(command::docs::Args),
    /// Kill, fail and interrupt the main job at every system call that changes a file.
    #[cfg(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"))]
    Faults(command::faults::Args),
    /// Write a synthetic Spark checkpoint in the published layout.
    Fixtures(Box<command::fixtures::Args>),
    /// Put damaged files before everything that reads them.
    Fuzz(command::fuzz::Args),
    /// Write a checkpoint as a GGUF file, without a vocabulary.
    Gguf(command::gguf::Args),
    /// Write logits that the figures of verify are compared on with NumPy's.
    Goldens(command::goldens::Args),
    /// Run the independent referees.
    Oracle(command::oracle::Args),
    /// Measure the main job on a checkpoint of the real size.
    Bench(command::bench::Args),
    /// What the bench compares with.
    #[command(hide = true)]
    BareIo(command::bench::BareIoArgs),
}

fn main() -> Result<()> {
    match Cli::parse().task {
        Task::Ci(args) => command::ci::run_all(&args),
        Task::Docs(args) => command::docs::run(&args),
        #[cfg(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"))]
        Task::Faults(args) => command::faults::run(&args),
        Task::Fixtures(args) => command::fixtures::run(&args),
        Task::Fuzz(args) => command::fuzz::run(&args),
        Task::Gguf(args) => command::gguf::run(&args),
        Task::Goldens(args) => command::goldens::run(&args),
        Task::Oracle(args) => command::oracle::run_sets(&args),
        Task::Bench(args) => command::bench::run(&args),
        Task::BareIo(args) => command::bench::bare_io(&args),
    }
}
