//! The screens of `fixtures/agent-suite`: what they are, and that they tell builds apart.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::runs::run;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Nothing but the held-out screens, sorted by whether something is left to do.
#[test]
fn it_is_the_held_out_screens() {
    let screens = lines(&fixtures().join("heldout/screens.jsonl"));
    let mut files = 0;
    for (name, done) in [("done", true), ("to-do", false)] {
        for (suffix, thinking) in [("", true), ("-at-once", false)] {
            let expected: Vec<Value> = screens
                .iter()
                .filter(|s| (s["state"] == "done") == done)
                .map(|s| json!({"messages": s["messages"], "enable_thinking": thinking, "expected": s["expected"]}))
                .collect();
            assert_eq!(
                lines(&fixtures().join(format!("agent-suite/{name}{suffix}.jsonl"))),
                expected,
                "{name}{suffix}"
            );
            files += 1;
        }
    }
    assert_eq!(fs::read_dir(fixtures().join("agent-suite")).unwrap().count(), files);
}

/// One bar on the tool calls that f32 makes, and two builds on either side of it: 8 bits keep all 21 of the screens on
/// which the task is done, rounding to 4 bits two thirds of them.
#[test]
fn a_bar_on_tool_calls_tells_builds_apart() {
    let temp = tempfile::tempdir().unwrap();
    let source = fixtures().join("spark-tiny").display().to_string();
    let suite = fixtures().join("agent-suite").display().to_string();
    for (name, options) in [("eight", &["w8a8"][..]), ("four", &["w4a8", "--method", "rtn"])] {
        let args = ["quantize", &source, "--out", name, "--scheme"];
        run(temp.path(), args.iter().chain(options)).expect(0);
    }
    let args = ["verify", "eight", "four", "--reference", &source, "--suite", &suite, "--min-actions", "0.9"];
    let report =
        run(temp.path(), args.iter().chain(&["--scenario", "done-at-once", "--json"])).expect(1).json();
    let gates = |i: usize| {
        let gates = report["artifacts"][i]["gates"].as_array().unwrap().clone();
        gates.into_iter().map(|g| (g["name"].clone(), g["passed"].clone())).collect::<Vec<_>>()
    };
    assert!(gates(0).iter().all(|(_, passed)| *passed == true), "{:?}", gates(0));
    let failed: Vec<_> = gates(1).into_iter().filter(|(_, passed)| *passed == false).map(|g| g.0).collect();
    assert_eq!(failed, ["actions"]);
    for artifact in report["artifacts"].as_array().unwrap() {
        assert_eq!(artifact["behaviour"]["actions"]["of"], 21);
        assert_eq!(artifact["behaviour"]["actions"]["known"], 21);
    }
}
