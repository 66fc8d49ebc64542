//! The forward pass against the referee's PyTorch model, on the referee's own checkpoints and on the
//! bundled one.
//!
//! The referee's checkpoints amplify rounding more than the project's: PyTorch in f32 is itself 108.8 to
//! 115.9 dB from the same model in f64, so that even the exact logits would be below 110 dB from it.
//! Therefore the bar of 110 dB is measured from f64, computed by the project's own PyTorch model, and
//! the distance to f32 may be less than that only as far as PyTorch's own error explains it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use spark_convert::checkpoint::Checkpoint;
use spark_convert::runtime::{Model, Rounding, State};

use crate::command::process::{output, program, root};

/// Least SNR of logits at lengths around the window and up to five of it.
const SHORT_DB: f64 = 110.0;
/// How much farther from PyTorch than from the truth we may be found: what our error adds to one of
/// PyTorch that is three times as large.
const SLACK_DB: f64 = 1.5;
const LONG: usize = 2500;
/// Least SNR of the f32 logits at the end of the long prompt, where the last bit of an angle counts.
const LONG_DB: f64 = 90.0;
/// Tokens of each greedy continuation.
const GREEDY: usize = 24;
/// How much the bf16 arithmetic of the two may differ in its distance from f64.
const BF16_DB: f64 = 3.0;

/// The referee's program and where its files go.
struct Referee<'a> {
    python: &'a str,
    script: PathBuf,
    model: PathBuf,
    logits: PathBuf,
}

/// Compares logits and greedy tokens on the referee's checkpoints.
pub(super) fn check(dir: &Path, python: &str) -> Result<()> {
    let temp = tempfile::tempdir()?;
    for preset in ["tiny", "tiny-wide"] {
        let referee = Referee {
            python,
            script: dir.join("ref_spark.py"),
            model: temp.path().join(preset),
            logits: temp.path().join("logits.npy"),
        };
        let mut make = program(python);
        make.arg(&referee.script).args(["make", "--preset", preset, "--out"]).arg(&referee.model);
        output(&mut make)?;
        compare(preset, &referee)?;
    }
    Ok(())
}

/// The same on the bundled checkpoint.
pub(super) fn check_bundled(dir: &Path, python: &str) -> Result<()> {
    let temp = tempfile::tempdir()?;
    let referee = Referee {
        python,
        script: dir.join("ref_spark.py"),
        model: root().join("fixtures/spark-tiny"),
        logits: temp.path().join("logits.npy"),
    };
    compare("the bundled checkpoint", &referee)
}

fn compare(preset: &str, referee: &Referee<'_>) -> Result<()> {
    let checkpoint = Checkpoint::open(&referee.model)?;
    let build =
        |rounding| Model::from_views(checkpoint.config.clone(), rounding, |name| checkpoint.files.get(name));
    let (model, rounded) = (build(Rounding::None)?, build(Rounding::Bf16)?);
    let vocab = checkpoint.config.vocab_size;
    let logits = |model: &Model<'_>, tokens: &[u32]| -> Result<Vec<f32>> {
        Ok(model.logits(&model.forward(&mut State::new(model.config()), tokens)?))
    };
    let mut missed = Vec::new();
    // Every figure is printed before one that is too low ends the comparison.
    let mut judge = |what: &str, [ours, torch, apart]: [f64; 3], bar: f64| {
        println!("{what}: {apart:.1} dB from PyTorch; from f64 {ours:.1} dB, PyTorch {torch:.1} dB");
        let near = bar.min(torch - SLACK_DB);
        if ours.is_nan() || apart.is_nan() || ours < bar || apart < near {
            missed.push(format!("{what}: expected {bar} dB from f64 and {near:.1} dB from PyTorch"));
        }
    };
    let window = checkpoint.config.sliding_window;
    let whole = prompt(5 * window, vocab);
    let truth = referee.truth(&whole)?;
    for n in [window - 1, window, window + 1, 3 * window, 5 * window] {
        let tokens = &whole[..n];
        let truth = &truth[..n * vocab];
        let theirs = referee.logits(tokens, "f32", vocab)?;
        let ours = logits(&model, tokens)?;
        let distances = [snr_db(truth, &ours), snr_db(truth, &theirs), snr_db(&widen(&theirs), &ours)];
        judge(&format!("{preset}, {n} tokens"), distances, SHORT_DB);

        let expected = referee.greedy(tokens)?;
        let found = model.greedy(&mut State::new(model.config()), tokens, GREEDY, |_| false)?;
        ensure!(found == expected, "{preset}, {n} tokens: {found:?}, the referee has {expected:?}");

        println!("    {GREEDY} greedy tokens equal");
    }
    // Both round to bf16 in the same places, but sum in different orders: a value between two bf16
    // numbers falls either way, so the two are not compared with each other.
    let theirs = snr_db(&truth, &referee.logits(&whole, "bf16", vocab)?);
    let ours = snr_db(&truth, &logits(&rounded, &whole)?);
    println!("{preset}, {} tokens in bf16: from f64 {ours:.1} dB, PyTorch {theirs:.1} dB", whole.len());
    ensure!((ours - theirs).abs() <= BF16_DB, "{preset}: bf16 differs by more than {BF16_DB} dB");
    let tokens = prompt(LONG, vocab);
    let (truth, theirs) = (referee.truth(&tokens)?, referee.logits(&tokens, "f32", vocab)?);
    let last = (LONG - 1) * vocab;
    let (truth, theirs) = (&truth[last..], &theirs[last..]);
    let ours = model.logits(&model.forward_last(&mut State::new(model.config()), &tokens)?);
    let distances = [snr_db(truth, &ours), snr_db(truth, theirs), snr_db(&widen(theirs), &ours)];
    judge(&format!("{preset}, position {LONG}"), distances, LONG_DB);
    ensure!(missed.is_empty(), "{}", missed.join("; "));
    Ok(())
}

/// Tokens without a short period.
fn prompt(count: usize, vocab: usize) -> Vec<u32> {
    let token = |i: usize| u32::try_from((i * i * 31 + i * 17 + 7) % vocab).unwrap_or_default();
    (0..count).map(token).collect()
}

fn list(tokens: &[u32]) -> String {
    tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

impl Referee<'_> {
    fn command(&self, verb: &str, tokens: &[u32], dtype: &str) -> std::process::Command {
        let mut command = program(self.python);
        command.arg(&self.script).arg(verb).arg("--model").arg(&self.model);
        command.args(["--tokens", &list(tokens), "--dtype", dtype]);
        command
    }

    /// Logits `[tokens, vocab]`.
    fn logits(&self, tokens: &[u32], dtype: &str, vocab: usize) -> Result<Vec<f32>> {
        output(self.command("logits", tokens, dtype).arg("--out").arg(&self.logits))?;
        let (shape, values) = read_npy(&fs::read(&self.logits)?)?;
        ensure!(shape == format!("({}, {vocab})", tokens.len()), "the referee's logits are {shape}");
        Ok(values)
    }

    /// Logits in f64, `[tokens, vocab]`.
    fn truth(&self, tokens: &[u32]) -> Result<Vec<f64>> {
        let mut command = program(self.python);
        command.arg(root().join("tests/oracle/spark_goldens.py")).arg("--model").arg(&self.model);
        output(command.arg("--truth").arg(&self.logits).args(["--tokens", &list(tokens)]))?;
        let bytes = fs::read(&self.logits)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect())
    }

    fn greedy(&self, prompt: &[u32]) -> Result<Vec<u32>> {
        let said = output(self.command("greedy", prompt, "f32").args(["-n", &GREEDY.to_string()]))?;
        let tokens = said.split_whitespace().map(str::parse).collect::<Result<Vec<u32>, _>>();
        let tokens = tokens.with_context(|| format!("tokens: {said:?}"))?;
        ensure!(tokens.len() == GREEDY, "{} tokens instead of {GREEDY}", tokens.len());
        Ok(tokens)
    }
}

/// Shape, as it is written, and values of a little-endian f32 .npy file in row order.
fn read_npy(bytes: &[u8]) -> Result<(String, Vec<f32>)> {
    let rest = bytes.strip_prefix(b"\x93NUMPY\x01\x00").context("not a .npy file of version 1")?;
    let (length, rest) = rest.split_first_chunk::<2>().context("cut short")?;
    let (header, data) =
        rest.split_at_checked(usize::from(u16::from_le_bytes(*length))).context("cut short")?;
    let header = std::str::from_utf8(header)?;
    let after = |key: &str| header.split_once(key).map(|(_, rest)| rest.trim_start());
    if !after("'descr':").is_some_and(|v| v.starts_with("'<f4'"))
        || !after("'fortran_order':").is_some_and(|v| v.starts_with("False"))
    {
        bail!("not f32 in row order: {header}");
    }
    let shape = after("'shape':").and_then(|v| v.split_inclusive(')').next()).context("no shape")?;
    let (values, rest) = data.as_chunks::<4>();
    ensure!(rest.is_empty(), "cut short");
    Ok((shape.to_owned(), values.iter().map(|b| f32::from_le_bytes(*b)).collect()))
}

/// Signal to noise in dB.
fn snr_db(signal: &[f64], found: &[f32]) -> f64 {
    assert_eq!(signal.len(), found.len(), "logits of different lengths");
    let noise: f64 = signal.iter().zip(found).map(|(s, f)| (s - f64::from(*f)).powi(2)).sum();
    10.0 * (signal.iter().map(|s| s * s).sum::<f64>() / noise).log10()
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn npy_files_are_read_by_their_header() {
        let file = |header: &str| {
            let length = u16::try_from(header.len()).unwrap().to_le_bytes();
            [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), &1.5f32.to_le_bytes(), &[0; 4]].concat()
        };
        let right = file("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }  \n");
        assert_eq!(read_npy(&right).unwrap(), ("(1, 2)".to_owned(), vec![1.5, 0.0]));
        assert!(read_npy(&right[..right.len() - 1]).is_err());
        assert!(read_npy(&file("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }\n")).is_err());
        assert!(read_npy(&file("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 2), }\n")).is_err());
        assert!(read_npy(b"\x93NUMPY\x01\x00\xff").is_err());
    }
}
