//! An artifact that is spoilt, with every hash made to fit, never passes, however low the bars are.

use serde_json::{Value, json};

use crate::runs::{Model, Tensors, edit_json, shards};
use crate::tamper::{repair_hashes, tamper};

/// Bars that anything passes that is measured.
const LOWEST: [&str; 8] =
    ["--min-weight-snr-db", "-1000", "--min-snr-db", "-1000", "--max-kld", "1e30", "--min-greedy", "0"];

/// Every scheme, with the sort of tensor that holds its scales.
const SCHEMES: [(&str, &[&str], &str); 4] = [
    ("w8a8", &[], "gate_proj.weight_scale"),
    ("w4a8", &["--group-size", "32"], "gate_proj.scales"),
    ("w4a8", &["--group-size", "32", "--asymmetric"], "gate_proj.weight_scale"),
    ("w4a16", &["--group-size", "32"], "gate_proj.scales_and_zeros"),
];

fn artifact(scheme: &str, more: &[&str]) -> Model {
    let model = Model::tiny();
    model.quantize_to(scheme, more).expect(0);
    model
}

#[track_caller]
fn never_passes(model: &Model, what: &str) {
    let run = model.verify_scenario("code", &LOWEST);
    assert_eq!(run.code, 1, "{what}: {}\n{}", run.stdout, run.stderr);
    assert!(run.stdout.contains("FAIL"), "{what}: {}", run.stdout);
    assert!(!run.stderr.contains("panicked"), "{what}: {}", run.stderr);
}

#[test]
fn what_is_not_spoilt_passes_the_lowest_bars() {
    for (scheme, more, _) in SCHEMES {
        let model = artifact(scheme, more);
        tamper(&model, |_| {});
        model.verify_scenario("code", &LOWEST).expect(0);
    }
}

/// NaN and infinity as the first scale of a module.
#[test]
fn scales_that_are_no_numbers() {
    for (scheme, more, suffix) in SCHEMES {
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let model = artifact(scheme, more);
            let mut met = 0;
            tamper(&model, |file| {
                for (name, dtype, _, bytes) in &mut file.tensors {
                    if name.ends_with(suffix) && name.contains("layers.1.") {
                        let value = match dtype.as_str() {
                            "F32" => poison.to_le_bytes().to_vec(),
                            // The upper half of an f32.
                            "BF16" => poison.to_le_bytes()[2..].to_vec(),
                            other => panic!("{name}: {other}"),
                        };
                        bytes[..value.len()].copy_from_slice(&value);
                        met += 1;
                    }
                }
            });
            assert_eq!(met, 1, "{scheme} {more:?}: {suffix}");
            never_passes(&model, &format!("{scheme} {more:?} {poison}"));
        }
    }
}

/// All tensors of two layers of the same type exchanged: every name, dtype and shape is right.
#[test]
fn layers_that_are_swapped() {
    for (scheme, more, _) in SCHEMES {
        let model = artifact(scheme, more);
        let mut all: Vec<(String, Vec<u8>)> = Vec::new();
        for shard in shards(&model.out()) {
            all.extend(Tensors::read(&shard).tensors.into_iter().map(|t| (t.0, t.3)));
        }
        let of = |name: &str| all.iter().find(|t| t.0 == name).map(|t| t.1.clone());
        let mut swapped = 0;
        tamper(&model, |file| {
            for tensor in &mut file.tensors {
                let other = match tensor.0.split("layers.").nth(1).and_then(|rest| rest.split_once('.')) {
                    Some(("0", rest)) => format!("model.layers.1.{rest}"),
                    Some(("1", rest)) => format!("model.layers.0.{rest}"),
                    _ => continue,
                };
                tensor.3 = of(&other).unwrap();
                swapped += 1;
            }
        });
        assert!(swapped >= 16, "{scheme}: {swapped}");
        never_passes(&model, &format!("{scheme} {more:?}: layers 0 and 1"));
    }
}

/// What the architecture is, changed in the artifact's config.json alone.
#[test]
fn another_architecture_in_the_configuration() {
    type Edit = fn(&mut Value);
    let edits: [(&str, Edit); 6] = [
        ("one key more in sight", |c| c["sliding_window"] = json!(c["sliding_window"].as_u64().unwrap() + 1)),
        ("tanh GELU", |c| c["hidden_act"] = json!("gelu_pytorch_tanh")),
        ("silu gate", |c| c["gate_attn_act_mode"] = json!("silu")),
        ("full layers turned like sliding ones", |c| {
            c["rope_parameters"]["full_attention"] = c["rope_parameters"]["sliding_attention"].clone();
        }),
        ("a full layer called sliding", |c| {
            let types = c["layer_types"].as_array_mut().unwrap();
            let full = types.iter().position(|t| t == "full_attention").unwrap();
            types[full] = json!("sliding_attention");
        }),
        ("another epsilon", |c| c["rms_norm_eps"] = json!(1e-5)),
    ];
    for (scheme, more, _) in SCHEMES {
        let model = artifact(scheme, more);
        let path = model.out().join("config.json");
        let right = std::fs::read(&path).unwrap();
        for (what, edit) in edits {
            edit_json(&path, edit);
            repair_hashes(&model.out());
            never_passes(&model, &format!("{scheme} {more:?}: {what}"));
            std::fs::write(&path, &right).unwrap();
        }
    }
}

/// A norm of infinity or NaN, which the format leaves as it is.
#[test]
fn norms_that_are_no_numbers() {
    for poison in [0x7f80u16, 0x7fc0] {
        let model = artifact("w4a8", &["--group-size", "32"]);
        tamper(&model, |file| {
            if let Some(norm) = file.get("model.layers.0.input_layernorm.weight") {
                norm[..2].copy_from_slice(&poison.to_le_bytes());
            }
        });
        never_passes(&model, &format!("{poison:#x}"));
    }
}
