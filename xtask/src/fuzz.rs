//! Hostile input: files that somebody else wrote, damaged at random, put before everything that reads them.
//!
//! Readers must refuse or read; they must not panic, hang, or ask for more memory than a file of that size
//! can need. Damage is drawn from a seed, so that what is found can be found again.

mod memory;
mod mutate;
mod target;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
pub use memory::Counting;
use mutate::Damage;
pub use target::{NAMES, Target};

/// Longest that reading one small file may take, on a busy machine.
const LONGEST: Duration = Duration::from_secs(20);

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
    target.read(target.whole()).with_context(|| format!("{name}: the undamaged file is refused"))?;
    let mut outcome = Outcome::default();
    for seed in first_seed..first_seed.saturating_add(runs) {
        let bytes = Damage::new(seed).damaged(target.whole());
        let start = Instant::now();
        let (read, peak) = memory::peak(|| catch_unwind(AssertUnwindSafe(|| target.read(&bytes))));
        outcome.runs += 1;
        outcome.peak_bytes = outcome.peak_bytes.max(peak);
        let mut bad = |what: String| outcome.bad.push(format!("{name}, seed {seed}: {what}"));
        match read {
            Ok(Ok(())) => outcome.accepted += 1,
            Ok(Err(refusal)) => {
                let line = refusal.to_string();
                if line.is_empty() || line.contains('\n') {
                    bad(format!("the refusal is not one line: {line:?}"));
                }
            }
            Err(_) => bad("panicked".to_owned()),
        }
        if start.elapsed() > LONGEST {
            bad(format!("took {:?}", start.elapsed()));
        }
        if peak > target.memory_bound(bytes.len()) {
            bad(format!("held {peak} bytes for a file of {}", bytes.len()));
        }
    }
    Ok(outcome)
}
