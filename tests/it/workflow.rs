//! The workflow file that users call: its scripts are run as they stand, but for those that need a network.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use xtask::fixtures::FixtureSpec;

/// The steps of the one job.
fn steps() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(".github/workflows/convert.yml");
    let text = std::fs::read_to_string(path).unwrap();
    let workflow: Value = serde_yaml_ng::from_str(&text).unwrap();
    workflow["jobs"]["convert"]["steps"].as_array().unwrap().clone()
}

fn script(name: &str) -> String {
    let steps = steps();
    let step = steps.iter().find(|step| step["name"] == name).unwrap_or_else(|| panic!("no step {name:?}"));
    step["run"].as_str().unwrap().to_owned()
}

/// Runs a step as the runner does, with the built binary on the path.
fn run(dir: &Path, step: &str, env: &[(&str, &str)]) -> Output {
    let binary = assert_cmd::cargo::cargo_bin!("spark-convert");
    let path = format!("{}:{}", binary.parent().unwrap().display(), std::env::var("PATH").unwrap());
    Command::new("bash")
        .args(["--noprofile", "--norc", "-eo", "pipefail", "-c", &script(step)])
        .current_dir(dir)
        .env_remove("SPARK_CHECKPOINT")
        .env("PATH", path)
        .envs(env.iter().copied())
        .output()
        .unwrap()
}

#[test]
fn the_workflow_converts_verifies_and_stops_at_a_gate() {
    let dir = tempfile::tempdir().unwrap();
    FixtureSpec::tiny().write(dir.path().join("checkpoint")).unwrap();
    // Random weights decide little: gates of their own.
    let gates = "--min-snr-db 5 --max-kld 1 --min-greedy 0";
    let env = [("SCHEME", "w4a8"), ("OPTIONS", "--group-size 64"), ("GATES", gates)];
    let quantized = run(dir.path(), "Quantize", &env);
    assert!(quantized.status.success(), "{}", String::from_utf8_lossy(&quantized.stderr));
    let verified = run(dir.path(), "Verify", &env);
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
    let report = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(dir.path().join("report").join(name)).unwrap()).unwrap()
    };
    assert_eq!(report("quantize.json")["status"], "written");
    assert_eq!(report("verify.json")["artifacts"][0]["passed"], true);
    assert_eq!(report("checkpoint.json")["kind"], "checkpoint");
    // A gate that fails ends the step with its own code, and the report is there.
    let failed = run(dir.path(), "Verify", &[("GATES", "--min-weight-snr-db 90 --scenario none")]);
    assert_eq!(failed.status.code(), Some(1));
    assert_eq!(report("verify.json")["artifacts"][0]["passed"], false);
    // Without options and gates the lists are empty, not one empty word.
    let plain = run(dir.path(), "Quantize", &[("SCHEME", "w8a8"), ("OPTIONS", "")]);
    assert_eq!(plain.status.code(), Some(2), "another scheme's artifact is in the way");
}

#[test]
fn no_input_reaches_a_script_but_through_the_environment() {
    for step in steps() {
        if let Some(script) = step["run"].as_str() {
            assert!(!script.contains("${{"), "{script}");
        }
    }
    let names: Vec<String> = steps().iter().map(|s| s["name"].as_str().unwrap().to_owned()).collect();
    let at = |name: &str| names.iter().position(|n| n == name).unwrap();
    assert!(at("Quantize") < at("Verify") && at("Verify") < at("Keep the artifact"));
}
