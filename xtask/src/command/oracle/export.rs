//! Exports for NPUs: the referee checks their structure, and ONNX Runtime runs them past the window and
//! to the end of the context, against the float export and graph by graph.

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

const CASES: [Case; 7] = [
    Case { options: &[], check: &[] },
    Case { options: &["--precision", "w16a16"], check: &[] },
    Case { options: &["--split", "layer"], check: &["--per-graph"] },
    Case { options: &["--precision", "w16a16", "--split", "layer"], check: &["--per-graph"] },
    Case { options: &["--sliding-cache", "roll"], check: &[] },
    Case { options: &["--full-cache", "roll-cache"], check: &[] },
    Case { options: &["--full-cache", "ring"], check: &[] },
];

pub(super) fn check(dir: &Path, python: &str, binary: &Path) -> Result<()> {
    let temp = tempfile::tempdir()?;
    let mut sources = vec![root().join("fixtures/spark-tiny")];
    for (name, spec) in [("square", FixtureSpec::square()), ("wide", FixtureSpec::wide())] {
        let source = temp.path().join(name);
        spec.write(&source)?;
        sources.push(source);
    }
    for source in &sources {
        let twins = ["whole", "layer"].map(|split| temp.path().join(format!("twin-{split}")));
        for (twin, split) in twins.iter().zip(["whole", "layer"]) {
            export(binary, source, twin, &["--precision", "fp32", "--split", split, "--force"])?;
        }
        for Case { options, check } in &CASES {
            println!("check_npu.py {}: {options:?}", source.display());
            let out = temp.path().join("out");
            let calibrated = [*options, &["--calib-tokens", "4000", "--force"]].concat();
            export(binary, source, &out, &calibrated)?;
            let twin = &twins[usize::from(options.contains(&"layer"))];
            let mut referee = program(python);
            referee.arg(dir.join("check_npu.py")).arg(&out).arg("--ref-dir").arg(twin);
            run(referee.args(["--quiet", "--steps", CONTEXT]).args(*check))?;
        }
    }
    Ok(())
}

fn export(binary: &Path, source: &Path, out: &Path, options: &[&str]) -> Result<()> {
    let mut export = program(binary);
    export.arg("export-npu").arg(source).args(["--context", CONTEXT, "--progress", "none", "--quiet"]);
    output(export.args(options).arg("--out").arg(out)).map(drop)
}
