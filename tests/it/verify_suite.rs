//! What `verify` runs, and what it holds artifacts to: the user's own prompts and gates.

use std::fs;

use serde_json::{Value, json};

use crate::runs::{Model, run};

fn artifact() -> Model {
    let model = Model::tiny();
    model.quantize(&[]).expect(0);
    model
}

/// Runs verify on `out` with bars that anything passes.
fn verify(model: &Model, more: &[&str]) -> crate::runs::Run {
    let args = ["verify", "out", "--reference", "model", "--min-greedy", "0"];
    run(model.root.path(), args.iter().chain(more))
}

#[test]
fn the_users_own_prompts_take_the_place_of_the_bundled() {
    let model = artifact();
    let suite = model.root.path().join("prompts");
    fs::create_dir(&suite).unwrap();
    fs::write(suite.join("letter.txt"), "Dear Ann, the boat is in the harbour.").unwrap();
    let chats = [
        json!({"messages": [{"role": "user", "content": "Where is it?"}]}),
        json!({"messages": [{"role": "user", "content": "Tap Send [3]."}, {"role": "assistant", "content": "no"}],
               "enable_thinking": false, "expected": {"name": "tap", "arguments": {"element": "Send [3]"}}}),
    ];
    let lines: String = chats.iter().map(|chat| format!("{chat}\n")).collect();
    fs::write(suite.join("chats.jsonl"), lines).unwrap();
    let report = verify(&model, &["--suite", "prompts", "--json"]).expect(0).json();
    let scenarios = report["artifacts"][0]["behaviour"]["scenarios"].as_array().unwrap().clone();
    let names: Vec<_> = scenarios.iter().map(|s| s["scenario"].as_str().unwrap()).collect();
    assert_eq!(names, ["chats", "letter"]);
    let prompts = |s: &Value| s["prompts"].as_array().unwrap().clone();
    assert_eq!(prompts(&scenarios[0])[1]["prompt"], "chats:2");
    assert_eq!(prompts(&scenarios[1])[0]["prompt"], "letter");
    // A random model calls no tool, so there is none to keep; what both say is in the report.
    let action = &prompts(&scenarios[0])[1]["action"];
    assert_eq!((&action["agreement"], &action["reference_is_right"]), (&Value::Null, &json!(false)));
    assert!(action["reference"]["text"].is_string() && action["artifact"]["text"].is_string());
    assert_eq!(scenarios[0]["actions"], Value::Null);
    // One of them alone.
    let one = verify(&model, &["--suite", "prompts", "--scenario", "letter", "--json"]).expect(0).json();
    assert_eq!(one["artifacts"][0]["behaviour"]["scenarios"][0]["artifact"], scenarios[1]["artifact"]);
    for (args, code, word) in [
        (["--suite", "prompts", "--scenario", "code"], 2, "chats, letter"),
        (["--suite", "prompts", "--scenario", "none"], 2, "no effect"),
        (["--suite", "nowhere", "--scenario", "x"], 3, "nowhere"),
    ] {
        let refused = verify(&model, &args).expect(code);
        assert!(refused.error().contains(word), "{}", refused.error());
    }
}

#[test]
fn a_gate_on_a_figure_that_is_missing_fails() {
    let model = artifact();
    // Text has no tool calls, and a random model makes none.
    for scenario in ["code", "tool-call"] {
        let run = verify(&model, &["--scenario", scenario, "--min-actions", "0"]).expect(1);
        assert!(run.stdout.contains("FAIL gate actions >= 0: not measured"), "{}", run.stdout);
    }
    verify(&model, &["--min-actions", "2"]).expect(2);
    // Nothing was run, since the bytes are wrong: what was asked for is not measured either.
    fs::write(model.out().join("tokenizer.json"), "{}").unwrap();
    let run = verify(&model, &["--scenario", "code"]).expect(1);
    assert!(
        run.stdout.contains("gate greedy >= 0: not measured: the artifact was not run"),
        "{}",
        run.stdout
    );
}

#[test]
fn gates_of_a_file() {
    let model = artifact();
    let write = |text: &str| fs::write(model.root.path().join("gates.toml"), text).unwrap();
    let verify = |more: &[&str]| {
        let args = ["verify", "out", "--reference", "model", "--gates", "gates.toml"];
        run(model.root.path(), args.iter().chain(&["--scenario", "code", "--scenario", "short"]).chain(more))
    };
    write("min_greedy = 0\nmin_snr_db = 10\n[scheme.w8a8.scenario.code]\nmax_kld = 1.0\nmin_same_top = 0.1");
    let report = verify(&["--json"]).expect(0).json();
    let gates = report["artifacts"][0]["gates"].as_array().unwrap().clone();
    let named: Vec<_> = gates
        .iter()
        .map(|g| (g["name"].as_str().unwrap(), g["scenario"].as_str(), g["bar"].as_f64().unwrap()))
        .collect();
    // The scheme's own bars, two of them replaced, and those of a scenario.
    assert_eq!(named.len(), 6);
    assert_eq!(named[1], ("snr_db", None, 10.0));
    assert_eq!(named[3], ("greedy", None, 0.0));
    assert!(named.contains(&("kld", Some("code"), 1.0)) && named.contains(&("same_top", Some("code"), 0.1)));
    let code = &report["artifacts"][0]["behaviour"]["scenarios"][1];
    assert_eq!(code["scenario"], "code");
    let kld = gates.iter().find(|g| g["name"] == "kld" && g["scenario"] == "code").unwrap();
    assert_eq!(kld["measured"], code["artifact"]["kl"]["mean"]);
    // The command line wins.
    assert!(verify(&["--min-snr-db", "200"]).expect(1).stdout.contains("FAIL gate snr_db >= 200"));
    // A scenario that fails, by name.
    write("min_greedy = 0\n[scenario.code]\nmax_kld = 0");
    assert!(verify(&[]).expect(1).stdout.contains("FAIL gate code: kld <= 0"));
    for (text, code, word) in [
        ("[scenario.long]\nmax_kld = 1", 2, "scenario.long.max_kld"),
        ("max_kl = 1", 3, "max_kl"),
        ("max_kld 1", 3, "line 1"),
        ("", 3, "no gate"),
    ] {
        write(text);
        let refused = verify(&[]).expect(code);
        assert!(refused.error().contains(word), "{}", refused.error());
    }
    write("max_kld = 1");
    let args = ["verify", "out", "--reference", "model", "--scenario", "none", "--gates"];
    run(model.root.path(), args.iter().chain(&["gates.toml"])).expect(2);
    run(model.root.path(), args.iter().chain(&["nowhere.toml"])).expect(3);
}
