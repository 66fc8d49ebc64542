//! `cargo xtask docs`: completions and manual pages.

use std::path::PathBuf;

use anyhow::Result;

/// Options of the task.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory to write to [default: target/docs]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| super::process::root().join("target/docs"));
    for path in xtask::docs::write(&out)? {
        println!("{}", path.display());
    }
    Ok(())
}
