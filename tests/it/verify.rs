//! `verify`: what is wrong with an artifact is found, named and ends in exit 1.

use std::fs;

use serde_json::{Value, json};
use xtask::fixtures::FixtureSpec;

use crate::runs::{Model, Tensors, edit_json, run, shards};
use crate::tamper::{fails_with, repair_hashes, tamper};

const SCALE: &str = "model.layers.1.mlp.gate_proj.weight_scale";
const WEIGHT: &str = "model.layers.1.mlp.gate_proj.weight";

fn artifact(head: &str) -> Model {
    let model = Model::tiny();
    model.quantize(&["--head", head]).expect(0);
    model
}

#[test]
fn repairing_the_hashes_of_an_unchanged_artifact_changes_nothing() {
    let model = artifact("bf16");
    tamper(&model, |_| {});
    model.verify(&[]).expect(0);
}

/// A byte of every file, at the front, in the middle and at the end; in tensors the tensor is named.
#[test]
fn one_flipped_byte_anywhere_is_found() {
    let model = artifact("int8");
    for entry in fs::read_dir(model.out()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let right = fs::read(&path).unwrap();
        for at in [0, 9, right.len() / 3, right.len() / 2, right.len() - 1] {
            for bit in [0, 6] {
                let mut flipped = right.clone();
                flipped[at] ^= 1 << bit;
                fs::write(&path, &flipped).unwrap();
                let run = fails_with(&model, &[&name]);
                run.error();
            }
        }
        fs::write(&path, &right).unwrap();
    }
    model.verify(&[]).expect(0);
}

#[test]
fn a_flipped_byte_of_data_names_its_tensor() {
    let model = artifact("bf16");
    for path in shards(&model.out()) {
        let right = Tensors::read(&path);
        let bytes = fs::read(&path).unwrap();
        for (name, _, _, _) in &right.tensors {
            let mut file = Tensors::read(&path);
            file.get(name).unwrap()[5] ^= 1;
            file.write(&path);
            let file_name = path.file_name().unwrap().to_str().unwrap();
            fails_with(&model, &[&format!("{file_name}: {name}: ")]);
        }
        fs::write(&path, &bytes).unwrap();
    }
}

#[test]
fn a_cut_or_missing_file_is_found() {
    let model = artifact("bf16");
    let path = shards(&model.out())[1].clone();
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 7]).unwrap();
    fails_with(&model, &["model-00002-of-00002.safetensors", "7 are missing"]);
    fs::remove_file(&path).unwrap();
    fails_with(&model, &["model-00002-of-00002.safetensors"]);
    fs::write(&path, &bytes).unwrap();
    fs::remove_file(model.out().join("tokenizer.json")).unwrap();
    fails_with(&model, &["tokenizer.json"]);
}

#[test]
fn with_the_hashes_repaired_a_scaled_row_is_found() {
    for (head, scale) in [("bf16", SCALE), ("int8", "lm_head.weight_scale")] {
        for factor in [64.0, 1.0 / 64.0, 2.0] {
            let model = artifact(head);
            tamper(&model, |file| {
                if let Some(bytes) = file.get(scale) {
                    let value = f32::from_le_bytes(bytes[40..44].try_into().unwrap()) * factor;
                    bytes[40..44].copy_from_slice(&value.to_le_bytes());
                }
            });
            fails_with(&model, &[scale.trim_end_matches("_scale"), "row 10"]);
        }
    }
}

#[test]
fn with_the_hashes_repaired_bad_scales_are_found() {
    for (value, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (0.0, "found 0"), (-0.01, "-0.01")] {
        let model = artifact("bf16");
        tamper(&model, |file| {
            if let Some(bytes) = file.get(SCALE) {
                bytes[8..12].copy_from_slice(&value.to_le_bytes());
            }
        });
        fails_with(&model, &[SCALE, "row 2", shown]);
    }
}

#[test]
fn with_the_hashes_repaired_missing_and_foreign_tensors_are_found() {
    let model = artifact("bf16");
    tamper(&model, |file| file.tensors.retain(|t| t.0 != SCALE));
    fails_with(&model, &[SCALE, "missing", "garbage"]);

    let model = artifact("bf16");
    tamper(&model, |file| {
        if file.get(SCALE).is_some() {
            file.tensors.push((
                "model.layers.1.self_attn.k_proj.weight".into(),
                "BF16".into(),
                json!([1]),
                vec![0, 0],
            ));
        }
    });
    fails_with(&model, &["model.layers.1.self_attn.k_proj.weight"]);

    // An int8 gate, which the consumer has no scale for.
    let model = artifact("bf16");
    let gate = "model.layers.0.self_attn.g_proj.weight";
    tamper(&model, |file| {
        for tensor in file.tensors.iter_mut().filter(|t| t.0 == gate) {
            tensor.1 = "I8".into();
            tensor.3.truncate(tensor.3.len() / 2);
        }
    });
    fails_with(&model, &[gate, "I8"]);
}

#[test]
fn with_the_hashes_repaired_wrong_forms_are_found() {
    type Edit = fn(&mut (String, String, Value, Vec<u8>));
    let cases: [(&str, Edit, &str); 4] = [
        (SCALE, |t| t.2 = json!([192]), "[192, 1]"),
        (SCALE, |t| t.1 = "I32".into(), "I32"),
        (WEIGHT, |t| t.2 = json!([128, 192]), "[192, 128]"),
        (WEIGHT, |t| t.3[0] = 0x80, "-128"),
    ];
    for (name, edit, word) in cases {
        let model = artifact("bf16");
        tamper(&model, |file| file.tensors.iter_mut().filter(|t| t.0 == name).for_each(edit));
        fails_with(&model, &[name, word]);
    }
    // Metadata that transformers wants.
    let model = artifact("bf16");
    tamper(&model, |file| file.metadata = Value::Null);
    fails_with(&model, &["format", "transformers"]);
}

#[test]
fn with_the_hashes_repaired_swapped_rows_and_norms_are_found() {
    let model = artifact("bf16");
    tamper(&model, |file| {
        if let Some(codes) = file.get(WEIGHT) {
            let (a, b) = codes.split_at_mut(128);
            a.swap_with_slice(&mut b[..128]);
        }
    });
    fails_with(&model, &[WEIGHT, "row 0"]);
    let model = artifact("bf16");
    tamper(&model, |file| {
        if let Some(norm) = file.get("model.norm.weight") {
            norm[0] ^= 1;
        }
    });
    fails_with(&model, &["model.norm.weight", "differs from the source"]);
}

#[test]
fn with_the_hashes_repaired_every_config_key_the_consumer_reads_is_checked() {
    type Edit = fn(&mut Value);
    let edits: [(&str, Edit); 10] = [
        ("tie_word_embeddings", |c| c["tie_word_embeddings"] = json!(false)),
        ("quantization_config", |c| drop(c.as_object_mut().unwrap().remove("quantization_config"))),
        ("quantization_config.ignore", |c| c["quantization_config"]["ignore"] = json!(["lm_head"])),
        ("quantization_config.format", |c| c["quantization_config"]["format"] = json!("pack-quantized")),
        ("quantization_config.quant_method", |c| c["quantization_config"]["quant_method"] = json!("gptq")),
        ("weights.strategy", |c| {
            c["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = json!("tensor")
        }),
        ("weights.scale_dtype", |c| {
            c["quantization_config"]["config_groups"]["group_0"]["weights"]["scale_dtype"] = Value::Null
        }),
        ("input_activations.dynamic", |c| {
            c["quantization_config"]["config_groups"]["group_0"]["input_activations"]["dynamic"] =
                json!(false)
        }),
        ("targets", |c| c["quantization_config"]["config_groups"]["group_0"]["targets"] = json!(["lm_head"])),
        ("sliding_window", |c| c["sliding_window"] = json!(9)),
    ];
    for (key, edit) in edits {
        let model = artifact("bf16");
        edit_json(&model.out().join("config.json"), edit);
        repair_hashes(&model.out());
        fails_with(&model, &["config.json", key]);
    }
}

#[test]
fn a_stray_weights_file_in_the_artifact_is_found() {
    let model = artifact("bf16");
    fs::copy(shards(&model.out())[0].clone(), model.out().join("extra.safetensors")).unwrap();
    fails_with(&model, &["extra.safetensors"]);
}

#[test]
fn the_reference_must_be_the_source() {
    let model = artifact("bf16");
    let other = Model::new(FixtureSpec::tiny().seed(7));
    let dir = other.dir.to_str().unwrap();
    let wrong = run(model.root.path(), ["verify", "out", "--reference", dir]).expect(3);
    assert!(wrong.error().contains("model-00001-of-00002.safetensors"), "{}", wrong.error());
    let single = Model::new(FixtureSpec::tiny().single_file());
    run(model.root.path(), ["verify", "out", "--reference", single.dir.to_str().unwrap()]).expect(3);
    run(model.root.path(), ["verify", "model", "--reference", "model"]).expect(3);
}

#[test]
fn gates_decide_the_exit_code() {
    let model = artifact("bf16");
    let report = model.verify(&["--json", "--min-weight-snr-db", "30"]).expect(0).json();
    let gate = &report["artifacts"][0]["gates"][0];
    assert_eq!((&gate["bar"], &gate["passed"]), (&json!(30.0), &json!(true)));
    let lowest = gate["measured"].as_f64().unwrap();
    let bar = (lowest + 0.01).to_string();
    let failed = model.verify(&["--min-weight-snr-db", &bar]).expect(1);
    assert!(failed.stdout.contains("FAIL"), "{}", failed.stdout);
    for wrong in
        [["--min-weight-snr-db", "NaN"], ["--min-greedy", "1.5"], ["--max-kld", "-1"], ["--min-snr-db", "20"]]
    {
        model.verify(&wrong).expect(2);
    }
}

#[test]
fn without_arguments_every_artifact_of_the_directory_is_taken() {
    let model = Model::tiny();
    let root = model.root.path();
    run(root, ["verify", "--reference", "model"]).expect(2);
    run(root, ["quantize", "model", "--scheme", "w8a8"]).expect(0);
    run(root, ["quantize", "model", "--scheme", "w8a8", "--head", "int8"]).expect(0);
    fs::create_dir(root.join("artifacts/.half.partial")).unwrap();
    let report =
        run(root, ["verify", "--reference", "model", "--scenario", "none", "--json"]).expect(0).json();
    let names: Vec<_> =
        report["artifacts"].as_array().unwrap().iter().map(|a| a["artifact"].clone()).collect();
    assert_eq!(names, ["artifacts/model-w8a8", "artifacts/model-w8a8-head8"]);
    // One bad artifact fails the run, and only that one.
    fs::write(root.join("artifacts/model-w8a8/tokenizer.json"), "{}").unwrap();
    let report =
        run(root, ["verify", "--reference", "model", "--scenario", "none", "--json"]).expect(1).json();
    assert_eq!(report["artifacts"][0]["passed"], false);
    assert_eq!(report["artifacts"][1]["passed"], true);
}
