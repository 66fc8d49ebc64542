//! JUnit XML, which every CI server shows: a suite per artifact, a case per gate and per question.

use super::{Report, Verdict};
use crate::gates::Gate;
use crate::verify::Check;

/// The report as JUnit XML.
pub fn junit(report: &Report) -> String {
    let suites: String = report.artifacts.iter().map(suite).collect();
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"spark-convert verify\">\n{suites}</testsuites>\n"
    )
}

fn suite(verdict: &Verdict) -> String {
    let class = escaped(&verdict.artifact.display().to_string());
    let mut cases = Vec::new();
    for (check, name) in [
        (Check::Integrity, "integrity"),
        (Check::Contract, "contract"),
        (Check::Weights, "weights"),
        (Check::Behaviour, "behaviour"),
    ] {
        let found: Vec<String> =
            verdict.findings.iter().filter(|f| f.check == check).map(ToString::to_string).collect();
        cases.push((name.to_owned(), found));
    }
    for gate in &verdict.gates {
        let failed = if gate.passed { Vec::new() } else { vec![gate_text(gate)] };
        cases.push((gate_name(gate), failed));
    }
    let failures = cases.iter().filter(|(_, failed)| !failed.is_empty()).count();
    let mut out =
        format!("  <testsuite name=\"{class}\" tests=\"{}\" failures=\"{failures}\">\n", cases.len());
    for (name, failed) in cases {
        let name = escaped(&name);
        let head = format!("    <testcase classname=\"{class}\" name=\"{name}\"");
        out += &match failed.first() {
            None => format!("{head}/>\n"),
            Some(first) => format!(
                "{head}>\n      <failure message=\"{}\">{}</failure>\n    </testcase>\n",
                escaped(first),
                escaped(&failed.join("\n"))
            ),
        };
    }
    out + "  </testsuite>\n"
}

/// The name of a gate, with the scenario that it belongs to.
pub(super) fn gate_name(gate: &Gate) -> String {
    match &gate.scenario {
        Some(scenario) => format!("gate {scenario}: {}", gate.name.name()),
        None => format!("gate {}", gate.name.name()),
    }
}

/// A gate in a line: the figure, the bar, and what was measured.
pub(super) fn gate_text(gate: &Gate) -> String {
    let sign = if gate.at_most { "<=" } else { ">=" };
    let measured = match (&gate.reason, gate.measured) {
        (Some(reason), _) => format!("not measured: {reason}"),
        (None, Some(measured)) => format!("{measured:.4}"),
        (None, None) => "exact".to_owned(),
    };
    format!("{} {sign} {}: {measured}", gate_name(gate), gate.bar)
}

/// Text as XML holds it, in attributes too; what XML 1.0 cannot hold at all is replaced.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            '\n' => out.push('\n'),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
