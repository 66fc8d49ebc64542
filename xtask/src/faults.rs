//! Whether `quantize` survives what can happen to it: it is run again and again, each time with another
//! fault in the way of another of its system calls, and after each the target must be absent or whole, the
//! exit code and the message right, and the same command must succeed when it is run once more.
//!
//! What a kill leaves is what the system holds, so this shows the order of the calls, not what a disk
//! keeps when the power fails; for that, files are synced before their directory is renamed, which the
//! order shows as well.

mod trace;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
pub use trace::{Fault, Kind, Traced, run};

use crate::fixtures::FixtureSpec;

/// What is done at a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blow {
    Kill,
    Fail(i32),
    Signal(i32),
    Truncate,
}

/// How faults of one sort went.
#[derive(Clone, Debug, Default)]
pub struct Sweep {
    /// Faults that were injected.
    pub faults: usize,
    /// How runs ended: what was done, and the exit code or signal.
    pub endings: BTreeMap<String, usize>,
    /// Outcomes that must not be.
    pub bad: Vec<String>,
}

/// A checkpoint, and what `quantize` makes of it undisturbed.
struct Bench {
    root: tempfile::TempDir,
    binary: PathBuf,
    whole: Tree,
    /// An artifact of other options, to be replaced.
    older: Tree,
}

type Tree = BTreeMap<PathBuf, Vec<u8>>;

/// The options that are disturbed, and others.
const OPTIONS: [&str; 2] = ["--head=bf16", "--head=int8"];

/// Names of the input's weights.
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// Injects faults of every sort at every `stride`-th call, into a run that makes a new artifact and one that
/// replaces an older.
///
/// # Errors
/// When a program cannot be traced, or fails undisturbed.
pub fn sweep(binary: &Path, stride: usize) -> Result<Sweep> {
    let bench = Bench::new(binary)?;
    let mut sweep = Sweep::default();
    for replace in [false, true] {
        bench.lay_out(replace)?;
        let calls = trace::run(&mut bench.command(replace), None)?;
        ensure!(calls.ended == Ok(0), "undisturbed: {calls:?}");
        ensure!(tree(&bench.out())? == bench.whole, "undisturbed, the run wrote something else");
        check_order(&calls.calls, &mut sweep);
        for (b, blow) in blows().into_iter().enumerate() {
            let calls = (0..calls.calls.len()).filter(|at| blow.meets(calls.calls[*at]));
            // Not the same calls for every sort of fault when not all are taken.
            for at in calls.skip(b % stride).step_by(stride) {
                bench.strike(replace, at, blow, &mut sweep)?;
            }
        }
    }
    Ok(sweep)
}

/// Everything that is tried.
fn blows() -> Vec<Blow> {
    vec![
        Blow::Kill,
        Blow::Fail(libc::ENOSPC),
        Blow::Fail(libc::EIO),
        Blow::Fail(libc::EROFS),
        Blow::Signal(libc::SIGINT),
        Blow::Signal(libc::SIGTERM),
        Blow::Truncate,
    ]
}

impl Blow {
    /// Whether it can happen at such a call.
    fn meets(self, kind: Kind) -> bool {
        match self {
            Self::Fail(libc::ENOSPC) => {
                matches!(kind, Kind::Write | Kind::Create | Kind::Sync | Kind::Rename)
            }
            Self::Fail(libc::EROFS) => matches!(kind, Kind::Create | Kind::Rename | Kind::Remove),
            _ => true,
        }
    }

    /// Exit codes with which a run may end that published nothing, and a word of its message.
    fn endings(self) -> (&'static [i32], &'static str) {
        match self {
            Self::Kill => (&[], ""),
            Self::Fail(libc::ENOSPC) => (&[4], "No space left on device"),
            Self::Fail(libc::EROFS) => (&[4], "Read-only file system"),
            Self::Fail(_) => (&[4], "Input/output error"),
            Self::Signal(_) => (&[5], "interrupted"),
            // What is no longer there is met by a read, or told in the end.
            Self::Truncate => (&[3, 4], "while it was being read"),
        }
    }
}

/// Every file is on disk before the directory gets its name, and the name is synced after.
fn check_order(calls: &[Kind], sweep: &mut Sweep) {
    let renames: Vec<_> = (0..calls.len()).filter(|i| calls[*i] == Kind::Rename).collect();
    let [rename] = renames[..] else {
        sweep.bad.push(format!("{} renames in a run, expected one", renames.len()));
        return;
    };
    if calls[..rename].last() != Some(&Kind::Sync) || !calls[rename..].contains(&Kind::Sync) {
        sweep.bad.push("the rename is not between two syncs".to_owned());
    }
    let last_write = calls.iter().rposition(|k| *k == Kind::Write);
    if last_write.is_none_or(|w| w > rename) {
        sweep.bad.push("a file is written after the rename".to_owned());
    }
}

impl Bench {
    fn new(binary: &Path) -> Result<Self> {
        let root = tempfile::tempdir()?;
        FixtureSpec::tiny().write(root.path().join("model"))?;
        let mut bench = Self { root, binary: binary.to_owned(), whole: Tree::new(), older: Tree::new() };
        for (options, older) in [(OPTIONS[0], false), (OPTIONS[1], true)] {
            let status = bench.quantize(options).arg("--force").output()?;
            ensure!(status.status.success(), "undisturbed: {status:?}");
            *(if older { &mut bench.older } else { &mut bench.whole }) = tree(&bench.out())?;
        }
        Ok(bench)
    }

    fn out(&self) -> PathBuf {
        self.root.path().join("new/out")
    }

    fn quantize(&self, options: &str) -> Command {
        let mut command = Command::new(&self.binary);
        command.current_dir(self.root.path()).env_remove("SPARK_CHECKPOINT");
        // One thread: the calls come in the same order every time.
        command.args([
            "quantize",
            "model",
            "--scheme",
            "w8a8",
            "--out",
            "new/out",
            "--threads",
            "1",
            options,
        ]);
        command
    }

    fn command(&self, replace: bool) -> Command {
        let mut command = self.quantize(OPTIONS[0]);
        if replace {
            command.arg("--force");
        }
        command
    }

    /// Nothing at the target, or the older artifact.
    fn lay_out(&self, replace: bool) -> Result<()> {
        let parent = self.root.path().join("new");
        if parent.exists() {
            fs::remove_dir_all(&parent)?;
        }
        if replace {
            fs::create_dir_all(self.out())?;
            for (name, bytes) in &self.older {
                fs::write(self.out().join(name), bytes)?;
            }
        }
        Ok(())
    }

    /// One fault, and everything that must be true afterwards.
    fn strike(&self, replace: bool, at: usize, blow: Blow, sweep: &mut Sweep) -> Result<()> {
        self.lay_out(replace)?;
        let shards = SHARDS.map(|name| self.root.path().join("model").join(name));
        let saved: Vec<_> = shards.iter().map(fs::read).collect::<Result<_, _>>()?;
        let truncate = || {
            for shard in &shards {
                // To less than a page: whatever is read from now on is not there.
                let cut = fs::File::options().write(true).open(shard).and_then(|file| file.set_len(100));
                assert!(cut.is_ok(), "{}: cannot be cut", shard.display());
            }
        };
        let fault = match blow {
            Blow::Kill => Fault::Kill,
            Blow::Fail(error) => Fault::Fail(error),
            Blow::Signal(signal) => Fault::Signal(signal),
            Blow::Truncate => Fault::Meanwhile(&truncate),
        };
        let traced = trace::run(&mut self.command(replace), Some((at, fault)))?;
        if blow == Blow::Truncate {
            for (shard, bytes) in shards.iter().zip(&saved) {
                fs::write(shard, bytes)?;
            }
        }
        sweep.faults += 1;
        let ending = match traced.ended {
            Ok(code) => format!("{blow:?}: exit {code}"),
            Err(signal) => format!("{blow:?}: signal {signal}"),
        };
        *sweep.endings.entry(ending).or_default() += 1;
        let found = if self.out().exists() { tree(&self.out())? } else { Tree::new() };
        for why in self.judge(replace, blow, &traced, &found) {
            sweep
                .bad
                .push(format!("{blow:?} at call {at} ({:?}), replace {replace}: {why}", traced.calls.last()));
        }
        let again = self.command(replace).output()?;
        if !again.status.success() {
            let said = String::from_utf8_lossy(&again.stderr).into_owned();
            sweep.bad.push(format!("{blow:?} at call {at}, replace {replace}: run again: {said}"));
        } else if tree(&self.root.path().join("new"))?.len() != 1 || tree(&self.out())? != self.whole {
            sweep.bad.push(format!("{blow:?} at call {at}, replace {replace}: run again, it is not whole"));
        }
        Ok(())
    }

    /// What is wrong with how a run ended and what it left.
    fn judge(&self, replace: bool, blow: Blow, traced: &Traced, found: &Tree) -> Vec<String> {
        let mut wrong = Vec::new();
        let before = if replace { &self.older } else { &Tree::new() };
        let published = *found == self.whole;
        if !published && found != before {
            wrong.push(format!("the target is neither what it was nor whole: {:?}", found.keys()));
        }
        let (codes, word) = blow.endings();
        let errors: Vec<_> = traced.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        match traced.ended {
            Ok(0) if !published => wrong.push("exit 0, and nothing was published".to_owned()),
            // What comes after the name was given, or is only tidying up, need not stop it.
            Ok(0) => {}
            Ok(code) if codes.contains(&code) => {
                if errors.len() != 1 || !errors[0].contains(word) {
                    wrong.push(format!("exit {code}, and no line that says {word:?}: {}", traced.stderr));
                }
            }
            Err(libc::SIGKILL) if blow == Blow::Kill => {}
            ended => wrong.push(format!("ended with {ended:?}: {}", traced.stderr)),
        }
        wrong
    }
}

/// Every file of a directory with its bytes; directories inside by name.
fn tree(dir: &Path) -> Result<Tree> {
    let mut found = Tree::new();
    for entry in fs::read_dir(dir).with_context(|| format!("{}", dir.display()))? {
        let path = entry?.path();
        let bytes = if path.is_dir() { Vec::new() } else { fs::read(&path)? };
        found.insert(path.strip_prefix(dir)?.to_owned(), bytes);
    }
    Ok(found)
}
