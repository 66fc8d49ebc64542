//! What `verify` reports of artifacts, against numpy: another forward pass, another reader of the formats,
//! another arithmetic of the figures (`tests/oracle/end_to_end.py`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use spark_convert::artifact::hash_bytes;
use spark_convert::checkpoint::Checkpoint;
use spark_convert::opened::tokenizer;
use spark_convert::scenario::bundled;

use crate::runs::{run, shards};

/// How far a figure may be from numpy's, in parts of it, where nothing jumps.
const NEAR: f64 = 1e-5;
/// Divergences below this are left to the floor of f32.
const SMALLEST_KL: f64 = 1e-4;
/// Where activations become codes, a last bit decides some of them, and numpy's own figures spread: how many standard
/// deviations of its seven runs one more run may be off. Student's t of six degrees exceeds 5.6 in one of 800 cases, and
/// there are forty comparisons.
const DEVIATIONS: f64 = 6.0;
/// The most that this may come to, in parts of a mean KL: a wider bar would pass anything.
const WIDEST: f64 = 0.25;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn golden() -> Value {
    serde_json::from_slice(&fs::read(root().join("fixtures/goldens/end-to-end/figures.json")).unwrap())
        .unwrap()
}

#[track_caller]
fn near(place: &str, found: &Value, expected: &Value, bar: f64) {
    let (f, e) = (found.as_f64().unwrap(), expected.as_f64().unwrap());
    assert!((f - e).abs() <= bar * e.abs(), "{place}: {f}, and numpy has {e}");
}

/// A figure of verify, and as numpy calls it among those of perturbed runs.
const FIGURES: [(&str, &str); 5] = [
    ("/kl/mean", "kl"),
    ("/logits_snr_db", "logits_snr_db"),
    ("/same_top", "same_top"),
    ("/top20_overlap", "top20_overlap"),
    ("/perplexity/other", "perplexity"),
];

/// Figures of a text, or of all of them, against numpy's, and where there are any its perturbed runs.
#[track_caller]
fn compare(place: &str, found: &Value, expected: &Value, perturbed: &Value) {
    assert_eq!(found["positions"], expected["positions"], "{place}");
    assert_eq!(found["perplexity"]["tokens"], expected["perplexity"]["tokens"], "{place}");
    // The reference has no codes.
    near(
        &format!("{place}: perplexity of the reference"),
        &found["perplexity"]["reference"],
        &expected["perplexity"]["reference"],
        1e-6,
    );
    let kl = expected["kl"]["mean"].as_f64().unwrap();
    assert!(kl > SMALLEST_KL, "{place}: {kl} tells nothing");
    // Of shares, a position whose best logits are as good as equal.
    let one = 1.0 / expected["positions"].as_f64().unwrap();
    for (at, name) in FIGURES {
        let of = |figures: &Value| figures.pointer(at).unwrap().as_f64().unwrap();
        let (found, expected) = (of(found), of(expected));
        let floor = if name.starts_with("same") || name.starts_with("top") { one } else { 0.0 };
        let (middle, bar) = match perturbed.as_array() {
            None => (expected, NEAR * expected.abs()),
            Some(runs) => {
                let runs: Vec<f64> =
                    runs.iter().map(|run| run[name].as_f64().unwrap()).chain([expected]).collect();
                let n = runs.len() as f64;
                let mean = runs.iter().sum::<f64>() / n;
                let variance = runs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
                (mean, DEVIATIONS * (variance * (1.0 + 1.0 / n)).sqrt())
            }
        };
        assert!(name != "kl" || bar <= WIDEST * middle, "{place}: {name}: a bar of {bar} is none");
        let off = (found - middle).abs();
        assert!(off <= bar + floor, "{place}: {name} {found}, and numpy has {middle} within {bar}");
    }
}

fn judge(scheme: &str) {
    let golden = golden();
    let expected = &golden["artifacts"][scheme];
    let temp = tempfile::tempdir().unwrap();
    let source = root().join("fixtures/spark-tiny").display().to_string();
    run(temp.path(), ["quantize", &source, "--scheme", scheme, "--out", "out"]).expect(0);
    let written: BTreeMap<String, String> = shards(&temp.path().join("out"))
        .iter()
        .map(|path| {
            (path.file_name().unwrap().to_string_lossy().into_owned(), hash_bytes(&fs::read(path).unwrap()))
        })
        .collect();
    assert_eq!(
        json!(written),
        expected["shards"],
        "another artifact than numpy has read: make the goldens again"
    );
    let mut args = vec!["verify", "out", "--reference", &source, "--json"];
    let names: Vec<&str> = golden["prompts"].as_object().unwrap().keys().map(String::as_str).collect();
    names.iter().for_each(|name| args.extend(["--scenario", name]));
    let report = run(temp.path(), args).expect(0).json();
    let behaviour = &report["artifacts"][0]["behaviour"];
    let scenarios = behaviour["scenarios"].as_array().unwrap();
    assert_eq!(scenarios.len(), names.len());
    for found in scenarios {
        let name = found["scenario"].as_str().unwrap();
        let place = format!("{scheme}, {name}");
        let perturbed = &expected["perturbed"][name];
        let expected = &expected["scenarios"][name];
        compare(&place, &found["artifact"], &expected["artifact"], perturbed);
        for key in ["matched", "kept", "of"] {
            assert_eq!(found["greedy"][key], expected["greedy"][key], "{place}: greedy {key}");
        }
        let (found, expected) = (&found["greedy"]["divergence"], &expected["greedy"]["divergence"]);
        for key in ["index", "reference_token", "other_token", "tie"] {
            assert_eq!(found[key], expected[key], "{place}: divergence {key}");
        }
        // The reference's margin at the first token that differs.
        if let Some(margin) = expected["margin_nats"].as_f64() {
            let found = found["margin_nats"].as_f64().unwrap();
            assert!((found - margin).abs() <= 1e-4, "{place}: margin {found}, and numpy has {margin}");
        }
    }
    compare(
        &format!("{scheme}, all"),
        &behaviour["total"],
        &expected["total"],
        &expected["perturbed"]["total"],
    );
}

#[test]
fn w4a16_is_as_far_from_its_checkpoint_as_numpy_finds() {
    assert!(
        golden()["artifacts"]["w4a16"]["perturbed"].is_null(),
        "it has no codes of activations, and no spread"
    );
    judge("w4a16");
}

#[test]
fn w8a8_is_as_far_from_its_checkpoint_as_numpy_finds() {
    judge("w8a8");
}

#[test]
fn w4a8_is_as_far_from_its_checkpoint_as_numpy_finds() {
    judge("w4a8");
}

/// What is fed is what the Python library's tokenizer makes of the suite's texts.
#[test]
fn prompts_are_those_of_the_python_library() {
    let checkpoint = Checkpoint::open(&root().join("fixtures/spark-tiny")).unwrap();
    let tokenizer = tokenizer(&checkpoint.dir, &checkpoint.config).unwrap();
    let golden = golden();
    let mut compared = 0;
    for scenario in bundled().unwrap() {
        let Some(expected) = golden["prompts"].get(&scenario.name) else { continue };
        let prompts = scenario.prompts(&checkpoint.config, &tokenizer, None).unwrap();
        assert_eq!(prompts.len(), 1);
        assert_eq!(json!(prompts[0].tokens), expected["tokens"], "{}", scenario.name);
        assert_eq!(json!(prompts[0].new_tokens), expected["new_tokens"], "{}", scenario.name);
        compared += 1;
    }
    assert_eq!(compared, golden["prompts"].as_object().unwrap().len());
}
