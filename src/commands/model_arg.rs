//! Which checkpoint a command works on when none, or not all of it, is said.

use std::path::{Path, PathBuf};

use crate::checkpoint::{CONFIG_FILE, Checkpoint, is_gguf};
use crate::error::{Failure, Result};

/// The environment variable that names the checkpoint.
pub(super) const VARIABLE: &str = "SPARK_CHECKPOINT";

/// The bundled checkpoint, relative to a checkout.
const BUNDLED: &str = "fixtures/spark-tiny";

/// The checkpoint to work on: the argument, `$SPARK_CHECKPOINT`, the current directory if it holds a
/// Spark config.json, or, only inside a checkout of this project, the bundled one. A pipeline whose
/// variable is not set must not ship the wrong model.
///
/// # Errors
/// A usage error when there is none of these.
pub(super) fn resolve(argument: Option<&Path>, option: &str) -> Result<PathBuf> {
    if let Some(path) = argument {
        return not_empty(path.to_owned(), option);
    }
    if let Some(path) = std::env::var_os(VARIABLE) {
        return not_empty(path.into(), VARIABLE);
    }
    let here = PathBuf::from(".");
    if is_spark(&here) {
        return Ok(here);
    }
    if let Some(checkout) = checkout() {
        let bundled = checkout.join(BUNDLED);
        tracing::info!("no checkpoint was named: taking the bundled one, {BUNDLED}");
        return Ok(bundled);
    }
    Err(Failure::usage(format!(
        "no checkpoint: pass {option}, set {VARIABLE}, or change into a directory with a Spark config.json"
    )))
}

/// Opens a source of weights: a checkpoint, or a GGUF file with the model directory of `--tokenizer`.
///
/// # Errors
/// As opening, and when there is a directory and no GGUF file that it goes with.
pub(super) fn open(path: &Path, tokenizer: Option<&Path>) -> Result<Checkpoint> {
    match (is_gguf(path), tokenizer) {
        (true, _) => Checkpoint::open_gguf(path, tokenizer),
        (false, None) => Checkpoint::open(path),
        (false, Some(_)) => Err(Failure::usage(format!(
            "--tokenizer goes with a GGUF file, and {} is none: a checkpoint's directory has its own",
            path.display()
        ))),
    }
}

fn not_empty(path: PathBuf, option: &str) -> Result<PathBuf> {
    match path.as_os_str().is_empty() {
        true => Err(Failure::usage(format!("{option} is empty; is a variable not set?"))),
        false => Ok(path),
    }
}

fn is_spark(dir: &Path) -> bool {
    let read = || -> Option<serde_json::Value> {
        serde_json::from_slice(&std::fs::read(dir.join(CONFIG_FILE)).ok()?).ok()
    };
    read().is_some_and(|config| config.get("model_type").and_then(|m| m.as_str()) == Some("spark2_5"))
}

/// The checkout of this project that holds the current directory.
fn checkout() -> Option<PathBuf> {
    let here = std::env::current_dir().ok()?;
    let found = here.ancestors().find(|dir| {
        std::fs::read_to_string(dir.join("Cargo.toml"))
            .is_ok_and(|text| text.contains("\nname = \"spark-convert\"\n"))
            && dir.join(BUNDLED).is_dir()
    })?;
    // Relative where possible, so that messages read as the user would write them.
    Some(if found == here { PathBuf::new() } else { found.to_owned() })
}
