//! Hostile input: files that somebody else wrote, damaged at random, put before everything that reads them.
//!
//! Readers must refuse or read; they must not panic, hang, or ask for more memory than a file of that size
//! can need. Damage is drawn from a seed, so that what is found can be found again.

mod memory;
mod mutate;
mod target;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use anyhow::Result;
pub use memory::Counting;
pub use mutate::{Damage, dictionary};
pub use target::{NAMES, Read, Target};

/// What a run of one target came to.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Files read.
    pub runs: u64,
    /// Those that were taken for good.
    pub accepted: u64,
    /// Most bytes of memory that one of them took.
    pub peak_bytes: u64,
    /// What must not be, each with the seed that shows it.
    pub bad: Vec<String>,
}

/// Reads `runs` damaged files of a kind; the seeds are `first_seed` and those that follow. `binary` is the
/// built `spark-convert`, which makes the undamaged files.
///
/// # Errors
/// When there is no such target, or its files cannot be made.
pub fn run(binary: &Path, name: &str, first_seed: u64, runs: u64) -> Result<Outcome> {
    let target = Target::new(binary, name)?;
    let wholes = target.wholes();
    let mut outcome = Outcome::default();
    for seed in first_seed..first_seed.saturating_add(runs) {
        let whole = &wholes[usize::try_from(seed).unwrap_or(0) % wholes.len()];
        let bytes = Damage::new(seed).damaged(whole);
        let tried = catch_unwind(AssertUnwindSafe(|| target.try_on(&bytes)));
        outcome.runs += 1;
        match tried {
            Ok(Ok(read)) => {
                outcome.accepted += u64::from(read.accepted);
                outcome.peak_bytes = outcome.peak_bytes.max(read.peak_bytes);
            }
            Ok(Err(bad)) => outcome.bad.push(format!("{name}, seed {seed}: {bad}")),
            Err(_) => outcome.bad.push(format!("{name}, seed {seed}: panicked")),
        }
    }
    Ok(outcome)
}
