//! `plan`: what to make for which machine, and what it costs.

use std::path::Path;

use serde_json::{Value, json};
use xtask::fixtures::FixtureSpec;

use crate::runs::{Model, Run, run};

fn bundled() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/spark-tiny").display().to_string()
}

/// `plan` of the bundled checkpoint, which every build fits.
#[track_caller]
fn plan(more: &[&str]) -> Value {
    let here = tempfile::tempdir().unwrap();
    let model = bundled();
    let mut args = vec!["plan", model.as_str(), "--json"];
    args.extend(more);
    run(here.path(), args).expect(0).json()
}

fn candidate<'a>(plan: &'a Value, options: &str) -> &'a Value {
    let ends = |c: &&Value| c["command"].as_str().is_some_and(|line| line.ends_with(options));
    plan["candidates"].as_array().unwrap().iter().find(ends).unwrap_or_else(|| panic!("no {options}: {plan}"))
}

#[test]
fn the_figures_are_those_of_the_command_that_makes_it() {
    let here = tempfile::tempdir().unwrap();
    let plan = plan(&["--target", "x86-amx", "--threads", "2"]);
    let mut seen = 0;
    for candidate in plan["candidates"].as_array().unwrap() {
        let Some(line) = candidate["command"].as_str() else { continue };
        let mut args: Vec<&str> = line.strip_prefix("spark-convert ").unwrap().split(' ').collect();
        args.extend(["--dry-run", "--json", "--threads", "2"]);
        if args[0] == "export-npu" {
            args.extend(["--calib-tokens", "64"]);
        }
        let dry = run(here.path(), args).expect(0).json();
        assert_eq!(candidate["bytes_per_token"], dry["sizes"]["bytes_per_token"], "{line}");
        assert_eq!(candidate["making_peak_bytes"], dry["peak_memory_bytes"], "{line}");
        assert_eq!(candidate["bits_per_weight"], dry["sizes"]["bits_per_weight"], "{line}");
        let bytes = if dry["bytes"].is_null() { &dry["sizes"]["tensor_bytes"] } else { &dry["bytes"] };
        assert_eq!(&candidate["disk_bytes"], bytes, "{line}");
        seen += 1;
    }
    assert_eq!(seen, 7);
}

#[test]
fn a_target_gets_its_artifact_and_how_that_is_known() {
    for (options, ends, measured) in [
        (&["--target", "x86-amx", "--priority", "speed"][..], "quantize --scheme w4a8", true),
        (&["--target", "x86-amx"], "--scheme w4a8 --asymmetric --head int8", false),
        (&["--target", "x86-amx", "--sessions", "16"], "--scheme w8a8", true),
        (&["--target", "x86-vnni"], "--scheme w8a8", true),
        (
            &["--target", "x86-avx2", "--consumer", "pytorch"],
            "--layout tinygemm-avx2-n32 --group-size 64 --head int8",
            false,
        ),
        (&["--target", "arm64"], "--layout row-major --group-size 64", false),
        (&["--target", "hexagon", "--context", "512"], "--context 512", true),
    ] {
        let plan = plan(options);
        let recommended = &plan["recommendation"];
        let command = recommended["command"].as_str().unwrap();
        assert!(command.replace(&format!(" {}", bundled()), "").ends_with(ends), "{options:?}: {command}");
        assert_eq!(recommended["measured"], measured, "{options:?}");
        assert!(recommended["needed_bytes"].as_u64().unwrap() > 0);
        assert_eq!(plan["machine"], Value::Null);
    }
    let gpu = plan(&["--target", "gpu"]);
    assert_eq!(gpu["recommendation"]["command"], Value::Null);
}

#[test]
fn int8_on_avx2_is_warned_of_and_not_recommended() {
    let plan = plan(&["--target", "x86-avx2"]);
    assert_eq!(plan["recommendation"]["command"], Value::Null);
    assert_eq!(plan["recommendation"]["measured"], true);
    assert!(candidate(&plan, "--scheme w8a8")["caveat"].as_str().unwrap().contains("saturate"));
    let warnings = plan["warnings"].as_array().unwrap();
    assert!(warnings.iter().any(|w| w.as_str().unwrap().starts_with("w8a8: do not serve")), "{warnings:?}");
}

/// The bundled model: 8 layers, 6 sliding with a window of 32 and 2 full, two key heads of 64, 4096
/// positions; the rotary tables are 64 wide in sliding layers and 16 in full ones.
#[test]
fn caches_and_tables_are_what_their_arithmetic_says() {
    let plan = plan(&["--target", "x86-vnni", "--context", "100", "--sessions", "3"]);
    let per_entry = 2 * 64 * 2 * 2;
    let kv = &plan["kv_cache"];
    assert_eq!(kv["bytes_per_token_and_layer"], per_entry);
    assert_eq!(kv["flat_bytes"], 3 * 8 * 112 * per_entry);
    assert_eq!(kv["flat_padded_bytes"], 3 * 8 * 112 * per_entry * 5 / 4);
    assert_eq!(kv["hybrid_bytes"], 3 * (6 * 32 + 2 * 112) * per_entry);
    assert_eq!(kv["npu_bytes"], 3 * (6 * 31 + 2 * 99) * per_entry);
    let rotary = &plan["rotary_tables"];
    assert_eq!(rotary["max_positions"], 4096);
    assert_eq!(rotary["bytes_at_max"], 4096 * (64 + 16) * 2);
    assert_eq!(rotary["bytes_served"], 100 * (64 + 16) * 2);
}

#[test]
fn this_machine_is_probed_or_the_user_is_asked() {
    let here = tempfile::tempdir().unwrap();
    let Run { code, stdout, stderr } = run(here.path(), ["plan", &bundled(), "--json"]);
    match code {
        0 => {
            let plan: Value = serde_json::from_str(&stdout).unwrap();
            assert_eq!(plan["machine"]["architecture"], std::env::consts::ARCH);
            assert!(plan["machine"]["memory_bytes"].as_u64().is_none_or(|bytes| bytes > 64 << 20));
            let text = run(here.path(), ["plan", &bundled()]).expect(0).stdout;
            assert!(
                text.contains("this machine") && text.contains(plan["target"].as_str().unwrap()),
                "{text}"
            );
        }
        _ => assert!(code == 2 && stderr.contains("name a target"), "{stderr}"),
    }
}

#[test]
fn what_does_not_fit_a_checkpoint_is_said_and_what_has_no_effect_is_refused() {
    // Two heads of 32 are not made of groups of 128.
    let model = Model::tiny();
    let plan = |more: &[&str]| {
        let mut args = vec!["plan", "model"];
        args.extend(more);
        run(model.root.path(), args)
    };
    let found = plan(&["--target", "x86-amx", "--priority", "speed", "--json"]).expect(0).json();
    let why = candidate(&found, "--scheme w4a8")["not_possible"].as_str().unwrap();
    assert!(why.contains("out_proj") && why.contains("rows of 64"), "{why}");
    assert!(found["warnings"][0].as_str().unwrap().contains("out_proj"), "{}", found["warnings"]);
    assert_eq!(candidate(&found, "--scheme w8a8")["not_possible"], json!(null));
    for (args, word) in [
        (&["--target", "hexagon", "--consumer", "vllm"][..], "--consumer"),
        (&["--target", "x86-amx", "--context", "1"], "--context"),
        (&["--target", "x86-amx", "--context", "4000000000"], "--context"),
        (&["--target", "abacus"], "abacus"),
    ] {
        let refused = plan(args).expect(2);
        assert!(refused.stderr.contains(word), "{}", refused.stderr);
    }
    let broken = Model::new(FixtureSpec::tiny());
    std::fs::remove_file(broken.file("model-00002-of-00002.safetensors")).unwrap();
    run(broken.root.path(), ["plan", "model", "--target", "gpu"]).expect(3);
}
