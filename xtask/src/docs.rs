//! Completions for shells and manual pages, made from the same declarations as the command line itself.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::CommandFactory;
use clap_complete::Shell;
use spark_convert::cli::Cli;

/// Name of the program.
const NAME: &str = "spark-convert";

/// Shells that completions are written for.
const SHELLS: [Shell; 4] = [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::PowerShell];

/// Writes `completions/` and `man/` below a directory, and returns the files.
///
/// # Errors
/// When a file cannot be written.
pub fn write(dir: &Path) -> Result<Vec<PathBuf>> {
    let (completions, man) = (dir.join("completions"), dir.join("man"));
    fs::create_dir_all(&completions)?;
    fs::create_dir_all(&man)?;
    let mut written = Vec::new();
    for shell in SHELLS {
        let path = clap_complete::generate_to(shell, &mut Cli::command(), NAME, &completions)?;
        if shell == Shell::Bash {
            // clap_complete 4.6 writes the hyphen of the name in two ways, so that no command's options are
            // found: it sets `spark__convert..` and asks for `spark__subcmd__convert..`.
            let text = fs::read_to_string(&path)?;
            fs::write(&path, text.replace("spark__subcmd__convert", "spark__convert"))?;
        }
        written.push(path);
    }
    clap_mangen::generate_to(Cli::command(), &man)?;
    for entry in fs::read_dir(&man)? {
        written.push(entry?.path());
    }
    written.sort();
    Ok(written)
}
