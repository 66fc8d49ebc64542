//! `cargo xtask`: the development tasks of the project.

mod command;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Development tasks of spark-convert.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Write a synthetic Spark checkpoint in the published layout.
    Fixtures(command::fixtures::Args),
}

fn main() -> Result<()> {
    match Cli::parse().task {
        Task::Fixtures(args) => command::fixtures::run(&args),
    }
}
