//! Scale folding: the function stays, the artifact is judged against the checkpoint as it was, and a
//! checkpoint with spiked channels comes back to what it is without them.

use std::fs;
use std::path::Path;

use half::bf16;
use serde_json::Value;
use spark_convert::opened::Opened;
use spark_convert::runtime::State;
use xtask::fixtures::FixtureSpec;

use crate::runs::{Model, Tensors, all_tensors, edit_json, read_json, run, shards, tree};
use crate::tamper::repair_hashes;

const TOKENS: [u32; 12] = [3, 17, 42, 5, 9, 100, 200, 300, 400, 447, 0, 1];

fn texts(model: &Model) -> String {
    let text = |i: usize| -> String {
        (0..60).map(|j| char::from(b' ' + ((j * 37 + i * 11 + j * j * (i + 1)) % 95) as u8)).collect()
    };
    let lines: Vec<String> = (0..8).map(|i| serde_json::json!({"text": text(i)}).to_string()).collect();
    let path = model.root.path().join("texts.jsonl");
    fs::write(&path, lines.join("\n")).unwrap();
    path.to_str().unwrap().to_owned()
}

fn hidden(path: &Path) -> Vec<f32> {
    let opened = Opened::open(path).unwrap();
    let model = opened.model().unwrap();
    model.forward(&mut State::new(model.config()), &TOKENS).unwrap()
}

/// Multiplies every 16th channel of both norms by 16, and divides the columns that read it: the same
/// function, whose inputs are hard to round.
fn spike(dir: &Path) {
    for path in shards(dir) {
        let mut file = Tensors::read(&path);
        for (name, _, shape, bytes) in &mut file.tensors {
            let factor = match name.rsplit('.').nth(1).unwrap() {
                "input_layernorm" | "post_attention_layernorm" => 16.0,
                "q_k_v_proj" | "g_proj" | "gate_proj" | "up_proj" => 1.0 / 16.0,
                _ => continue,
            };
            let columns = shape.as_array().unwrap().last().unwrap().as_u64().unwrap() as usize;
            for (i, b) in bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                if i % columns % 16 == 5 {
                    *b = bf16::from_f32(bf16::from_le_bytes(*b).to_f32() * factor).to_le_bytes();
                }
            }
        }
        file.write(&path);
    }
}

/// SNR of the logits over the bundled scenario `code`, as `verify` says.
fn snr_db(model: &Model) -> f64 {
    let run = model
        .verify_scenario("code", &["--json", "--min-snr-db", "0", "--max-kld", "99", "--min-greedy", "0"]);
    let json: Value = serde_json::from_str(&run.stdout).unwrap();
    let gates = json["artifacts"][0]["gates"].as_array().unwrap();
    gates.iter().find(|gate| gate["name"] == "snr_db").unwrap()["measured"].as_f64().unwrap()
}

#[test]
fn folding_is_exact_verified_against_the_checkpoint_as_it_was_and_the_same_on_any_threads() {
    let model = Model::new(FixtureSpec::tiny());
    spike(&model.dir);
    let texts = texts(&model);
    let folded = model.root.path().join("folded");
    let base = ["--smooth", "--calib", &texts, "--group-size", "64"];
    let with = [&base[..], &["--write-folded", folded.to_str().unwrap(), "--threads", "1"]].concat();
    let run_one = model.quantize_to("w4a8", &with).expect(0);
    assert!(run_one.stderr.contains("scales were moved in"), "{}", run_one.stderr);
    let one = tree(&model.out());
    model.verify(&[]).expect(0);
    let manifest = read_json(&model.out().join("spark-convert.json"));
    assert_eq!(manifest["smoothing"].as_array().unwrap().len(), 4);
    assert!(manifest["smoothing"][0]["attention"].is_string(), "{}", manifest["smoothing"]);

    // The folded checkpoint is the same function to the bit, in other tensors, and a whole checkpoint.
    assert_eq!(hidden(&folded), hidden(&model.dir));
    let (before, after) = (all_tensors(&model.dir), all_tensors(&folded));
    assert!(before.keys().eq(after.keys()) && before != after);
    assert!(tree(&model.dir).keys().eq(tree(&folded).keys()));
    let directly = run(
        model.root.path(),
        ["quantize", "folded", "--scheme", "w4a8", "--group-size", "64", "--out", "direct"],
    );
    directly.expect(0);
    assert!(all_tensors(&model.root.path().join("direct")) == all_tensors(&model.out()));

    // Nothing stays behind, and other threads make the same.
    let names: Vec<_> = fs::read_dir(model.root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(names.iter().all(|n| !n.to_string_lossy().starts_with('.')), "{names:?}");
    assert!(model.quantize_to("w4a8", &base).expect(0).stdout.contains("up to date"));
    model.quantize_to("w4a8", &[&base[..], &["--threads", "3", "--force"]].concat()).expect(0);
    assert!(tree(&model.out()) == one, "1 and 3 threads wrote different bytes");
    assert!(
        model.quantize_to("w4a8", &["--group-size", "64"]).expect(2).error().contains("with other texts")
    );

    // A manifest that says other folds is found.
    let manifest = model.out().join("spark-convert.json");
    edit_json(&manifest, |m| m["smoothing"][1] = serde_json::json!({}));
    repair_hashes(&model.out());
    let run = model.verify(&[]).expect(1);
    assert!(run.stdout.contains("model.layers.1."), "{}", run.stdout);
}

#[test]
fn a_spiked_checkpoint_comes_back_to_the_plain_one() {
    for (scheme, more) in [("w8a8", &[][..]), ("w4a8", &["--group-size", "64"])] {
        let figures = |spiked: bool, smooth: bool| {
            let model = Model::new(FixtureSpec::tiny());
            if spiked {
                spike(&model.dir);
            }
            let texts = texts(&model);
            let smooth = if smooth { vec!["--smooth", "--calib", &texts] } else { Vec::new() };
            model.quantize_to(scheme, &[more, &smooth].concat()).expect(0);
            snr_db(&model)
        };
        let (plain, smoothed) = (figures(false, false), figures(false, true));
        let (spiked, recovered) = (figures(true, false), figures(true, true));
        let said = format!(
            "{scheme}: {plain:.2} plain, {smoothed:.2} smoothed; {spiked:.2} spiked, {recovered:.2} recovered"
        );
        println!("{said}");
        assert!(spiked < plain - 3.0, "{said}");
        assert!(recovered > plain - 1.0, "{said}");
        assert!(smoothed > plain - 0.3, "{said}");
    }
}

#[test]
fn options_without_effect_are_refused() {
    let model = Model::tiny();
    let folded = model.root.path().join("folded");
    let folded = folded.to_str().unwrap();
    let run = model.quantize_to("w8a8", &["--write-folded", folded]).expect(2);
    assert!(run.stderr.contains("--smooth"), "{}", run.stderr);
    let run = model.quantize_to("w8a8", &["--calib", "texts"]).expect(2);
    assert!(run.error().contains("--smooth"), "{}", run.error());
    let here = model.dir.to_str().unwrap();
    model.quantize_to("w8a8", &["--smooth", "--write-folded", here]).expect(2);
}
