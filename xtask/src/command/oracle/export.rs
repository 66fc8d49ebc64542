//! Exports for NPUs: the referee checks their structure, and ONNX Runtime runs them past the window and
//! to the end of the context, against the float export and graph by graph. Prefill graphs are run by a
//! program of our own, a prompt at once against the same prompt token by token.

use std::path::Path;

use anyhow::Result;
use xtask::fixtures::FixtureSpec;

use super::super::process::{output, program, root, run};

/// Positions of the exports: several windows of the presets.
const CONTEXT: &str = "72";

/// An export and how the referee is to look at it.
struct Case {
    options: &'static [&'static str],
    check: &'static [&'static str],
}

const fn case(options: &'static [&'static str], check: &'static [&'static str]) -> Case {
    Case { options, check }
}

/// On every source.
const CASES: [Case; 7] = [
    case(&[], &[]),
    case(&["--precision", "w16a16"], &[]),
    case(&["--split", "layer"], &["--per-graph"]),
    case(&["--precision", "w16a16", "--split", "layer"], &["--per-graph"]),
    case(&["--sliding-cache", "roll"], &[]),
    case(&["--full-cache", "roll-cache"], &[]),
    case(&["--full-cache", "ring"], &[]),
];

/// Forms of the same graphs, on the first source.
const FORMS: [Case; 12] = [
    case(&["--split", "block4"], &["--per-graph"]),
    case(&["--sliding-cache", "roll", "--full-cache", "roll-cache"], &[]),
    case(&["--cache-type", "u16sym"], &[]),
    case(&["--dialect", "qdq21"], &[]),
    case(&["--dialect", "qdq21", "--split", "layer", "--precision", "w16a16"], &["--per-graph"]),
    case(&["--dialect", "qdq21", "--split", "block4", "--cache-type", "u16sym"], &["--per-graph"]),
    case(&["--dialect", "float18"], &[]),
    case(&["--dialect", "float18", "--split", "block4", "--full-cache", "ring"], &["--per-graph"]),
    case(&["--dialect", "float18", "--sliding-cache", "roll", "--full-cache", "roll-cache"], &[]),
    case(&["--dialect", "aimet"], &[]),
    case(&["--dialect", "aimet", "--split", "layer", "--cache-type", "s16"], &["--per-graph"]),
    case(&["--dialect", "aimet", "--precision", "w16a16", "--sliding-cache", "roll"], &[]),
];

/// Prefill graphs of as many rows as none of the windows has, in contexts that leave steps after a prompt.
const PREFILL: [&[&str]; 3] = [
    &["--prefill", "12"],
    &["--prefill", "12", "--dialect", "qdq21", "--split", "layer", "--cache-type", "u16sym"],
    &["--prefill", "12", "--sliding-cache", "roll", "--full-cache", "ring"],
];

/// All of them, or for the gate's sake the first prefill, every third form and, on the presets, every third
/// case.
pub(super) fn check(dir: &Path, python: &str, binary: &Path, all: bool) -> Result<()> {
    let every = if all { 1 } else { 3 };
    let temp = tempfile::tempdir()?;
    let mut sources = vec![root().join("fixtures/spark-tiny")];
    for (name, spec) in [("square", FixtureSpec::square()), ("wide", FixtureSpec::wide())] {
        let source = temp.path().join(name);
        spec.write(&source)?;
        sources.push(source);
    }
    let (out, twins) = (temp.path().join("out"), temp.path().join("twins"));
    for (number, source) in sources.iter().enumerate() {
        for split in ["whole", "layer", "block4"] {
            export(binary, source, CONTEXT, &twins.join(split), &["--precision", "fp32", "--split", split])?;
        }
        let cases = CASES.iter().step_by(if number == 0 { 1 } else { every });
        for Case { options, check } in cases.chain(FORMS.iter().step_by(every).filter(|_| number == 0)) {
            println!("check_npu.py {}: {options:?}", source.display());
            export(binary, source, CONTEXT, &out, options)?;
            let split = ["layer", "block4"].into_iter().find(|split| options.contains(split));
            let mut referee = program(python);
            referee.arg(dir.join("check_npu.py")).arg(&out);
            referee.arg("--ref-dir").arg(twins.join(split.unwrap_or("whole")));
            run(referee.args(["--quiet", "--steps", CONTEXT]).args(*check))?;
        }
    }
    for options in PREFILL.iter().step_by(every) {
        println!("onnx_prefill.py {}: {options:?}", sources[0].display());
        export(binary, &sources[0], CONTEXT, &out, options)?;
        run(program(python).arg(root().join("tests/oracle/onnx_prefill.py")).arg(&out))?;
    }
    Ok(())
}

/// Writes an export; quantized ones are calibrated on a part of the bundled texts.
pub(super) fn export(
    binary: &Path,
    source: &Path,
    context: &str,
    out: &Path,
    options: &[&str],
) -> Result<()> {
    let mut export = program(binary);
    export.arg("export-npu").arg(source).args(["--context", context]);
    export.args(["--progress", "none", "--quiet", "--force"]);
    if !options.contains(&"fp32") && !options.contains(&"float18") {
        export.args(["--calib-tokens", "4000"]);
    }
    output(export.args(options).arg("--out").arg(out)).map(drop)
}
