//! The program that users are given to run exports, `tests/consumers/npu_generate.py`, on the bundled
//! checkpoint: in every engine, and in one engine on every combination of options.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use spark_convert::opened::{Opened, tokenizer};
use spark_convert::runtime::State;

use super::super::process::{output, program, root, run};

/// Positions: more than a prompt and its continuation, and several windows.
const CONTEXT: &str = "128";
const PROMPT: usize = 60;
const NEW: usize = 40;

/// What an export is made with, and what each engine must come to: at least so many dB to the float export
/// in ONNX Runtime, or a refusal.
struct Case {
    options: &'static [&'static str],
    onnxruntime: f64,
    openvino: f64,
    mnn: Option<f64>,
}

const CASES: [Case; 6] = [
    Case { options: &["--dialect", "float18"], onnxruntime: 110.0, openvino: 100.0, mnn: Some(60.0) },
    Case { options: &["--dialect", "qdq23"], onnxruntime: 30.0, openvino: 30.0, mnn: None },
    Case {
        options: &["--dialect", "qdq23", "--precision", "fp32"],
        onnxruntime: 110.0,
        openvino: 100.0,
        mnn: None,
    },
    Case { options: &["--dialect", "qdq21"], onnxruntime: 30.0, openvino: 30.0, mnn: None },
    Case {
        options: &["--dialect", "float18", "--prefill", "8"],
        onnxruntime: 100.0,
        openvino: 100.0,
        mnn: Some(60.0),
    },
    Case { options: &["--dialect", "qdq23", "--prefill", "8"], onnxruntime: 30.0, openvino: 30.0, mnn: None },
];

/// The ids of a text that no training saw, and what the forward pass says next.
fn continuation() -> Result<(String, String)> {
    let source = Opened::open(&root().join("fixtures/spark-tiny"))?;
    let tokenizer = tokenizer(source.dir(), source.config())?;
    let mut tokens = tokenizer.encode(&fs::read_to_string(root().join("fixtures/heldout/english.txt"))?)?;
    tokens.truncate(PROMPT);
    let new = source.model()?.greedy(&mut State::new(source.config()), &tokens, NEW, |_| false)?;
    Ok((ids(&tokens), ids(&new)))
}

fn ids(tokens: &[u32]) -> String {
    tokens.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Every dialect in every engine.
pub(super) fn check(binary: &Path) -> Result<()> {
    let temp = tempfile::tempdir()?;
    let python = python()?;
    let (tokens, new) = continuation()?;
    let mut failed = 0;
    for (i, case) in CASES.iter().enumerate() {
        let out = temp.path().join(i.to_string());
        export(binary, &out, case.options)?;
        let mut table = program(&python);
        table.arg(root().join("tests/oracle/onnx_engines.py")).arg("--reference").arg(temp.path().join("0"));
        table.args(["--tokens", &tokens, "--new", &new]);
        for engine in ["onnxruntime", "openvino", "mnn"] {
            table.args(["--engine", engine]);
        }
        for line in output(table.arg(&out))?.lines() {
            let row: Value = serde_json::from_str(line)?;
            let least = match row["engine"].as_str().context("engine")? {
                "onnxruntime" => Some(case.onnxruntime),
                "openvino" => Some(case.openvino),
                _ => case.mnn,
            };
            let good = match least {
                // Equal to the bit is no number in JSON.
                Some(least) => {
                    row["failure"].is_null()
                        && row["snr_db"].as_f64().is_none_or(|db| db >= least)
                        && row["greedy"] == NEW
                }
                None => !row["failure"].is_null(),
            };
            failed += u32::from(!good);
            println!("{:?}: {row}{}", case.options, if good { "" } else { "  MISSED" });
        }
    }
    text(&python, binary, &temp.path().join("1"))?;
    ensure!(failed == 0, "{failed} engines did not do as they should");
    Ok(())
}

/// The program by itself, from a question to an answer, against `generate`.
fn text(python: &Path, binary: &Path, export: &Path) -> Result<()> {
    let prompt = ["--prompt", "What is a ring buffer?", "--max-new-tokens", "24"];
    let mut generate = program(binary);
    let expected = output(generate.arg("generate").arg("fixtures/spark-tiny").args(prompt).arg("--json"))?;
    let expected: Value = serde_json::from_str(&expected)?;
    let mut consumer = program(python);
    let said = output(consumer.arg("tests/consumers/npu_generate.py").arg(export).args(prompt))?;
    let said: Value = serde_json::from_str(&said)?;
    for (ours, theirs) in [("prompt_tokens", "prompt"), ("tokens", "new_tokens")] {
        ensure!(said[theirs] == expected[ours], "{theirs}: {} instead of {}", said[theirs], expected[ours]);
    }
    println!("npu_generate.py --prompt: the tokens of generate, {}", said["text"]);
    Ok(())
}

/// Every combination that the contract names: the referee's checks, and the same tokens from all of them.
pub(super) fn combinations(dir: &Path, python: &str, binary: &Path) -> Result<()> {
    let temp = tempfile::tempdir()?;
    let (tokens, new) = continuation()?;
    let out = temp.path().join("out");
    for split in ["whole", "layer", "block4"] {
        export(binary, &temp.path().join(split), &["--precision", "fp32", "--split", split])?;
    }
    let mut failed = Vec::new();
    for dialect in ["qdq23", "qdq21", "float18", "aimet"] {
        for split in ["whole", "layer", "block4"] {
            for sliding in ["ring", "roll"] {
                for full in ["roll", "ring", "roll-cache"] {
                    let options = [
                        "--dialect",
                        dialect,
                        "--split",
                        split,
                        "--sliding-cache",
                        sliding,
                        "--full-cache",
                        full,
                    ];
                    println!("{options:?}");
                    export(binary, &out, &options)?;
                    let mut referee = program(python);
                    referee
                        .arg(dir.join("check_npu.py"))
                        .arg(&out)
                        .arg("--ref-dir")
                        .arg(temp.path().join(split));
                    referee.args(["--quiet", "--steps", CONTEXT]);
                    let judged = run(&mut referee).is_ok();
                    let mut consumer = program(python);
                    consumer.arg("tests/consumers/npu_generate.py").arg(&out).args(["--tokens", &tokens]);
                    consumer.args(["--max-new-tokens", &NEW.to_string(), "--ignore-stop"]);
                    let said: Value = serde_json::from_str(&output(&mut consumer)?)?;
                    let got: Vec<String> = said["new_tokens"]
                        .as_array()
                        .context("new_tokens")?
                        .iter()
                        .map(Value::to_string)
                        .collect();
                    if !judged || got.join(",") != new {
                        println!("MISSED: referee {judged}, tokens {}", got.join(","));
                        failed.push(format!("{options:?}"));
                    }
                }
            }
        }
    }
    ensure!(failed.is_empty(), "{failed:?}");
    println!("72 combinations pass, all with the same {NEW} tokens");
    Ok(())
}

/// An export of the bundled checkpoint.
fn export(binary: &Path, out: &Path, options: &[&str]) -> Result<()> {
    super::export::export(binary, &root().join("fixtures/spark-tiny"), CONTEXT, out, options)
}

/// The interpreter of an environment with the engines, which is made once.
fn python() -> Result<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let dir = cache.context("neither XDG_CACHE_HOME nor HOME is set")?.join("spark-convert-engines");
    let (python, ready) = (dir.join("bin/python"), dir.join(".ready"));
    let wanted = fs::read_to_string(root().join("tests/consumers/requirements.txt"))?;
    if fs::read_to_string(&ready).is_ok_and(|made| made == wanted) {
        return Ok(python);
    }
    run(program("python3").args(["-m", "venv", "--clear"]).arg(&dir))?;
    let mut pip = program(&python);
    pip.args(["-m", "pip", "install", "--quiet", "-r", "tests/consumers/requirements.txt"]);
    if run(&mut pip).is_err() {
        bail!("the engines could not be installed: Python 3.10 to 3.13 is needed, and a package index");
    }
    fs::write(ready, wanted)?;
    Ok(python)
}
