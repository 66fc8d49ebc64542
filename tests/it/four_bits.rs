//! The 4-bit schemes: every form is written, verified and decoded by the written rule; what is damaged
//! with its hashes repaired is named.

use std::collections::BTreeMap;

use half::bf16;
use serde_json::{Value, json};
use xtask::fixtures::FixtureSpec;

use crate::runs::{Model, all_tensors, edit_json, read_json, run, tree};
use crate::tamper::{fails_with, repair_hashes, tamper};

type Words = &'static [&'static str];
type TensorMap = BTreeMap<String, (String, Value, Vec<u8>)>;

const UP: &str = "model.layers.1.mlp.up_proj";

/// Every form, with the tensors of a module and of the head.
const FORMS: [(&str, Words, Words, Words); 13] = [
    ("w4a8", &[], GPTQ, GPTQ),
    ("w4a8", &["--method", "rtn"], GPTQ, GPTQ),
    ("w4a8", &["--no-negative-scales", "--head", "bf16"], GPTQ, &[]),
    ("w4a8", &["--qkv", "split"], GPTQ, GPTQ),
    ("w4a8", &["--packing", "compressed-tensors"], PACKED, PACKED),
    ("w4a8", &["--asymmetric"], ZEROS, ZEROS),
    ("w4a8", &["--asymmetric", "--head", "int8"], ZEROS, INT8),
    ("w4a8", &["--head", "int8"], PACKED, INT8),
    ("w4a16", &[], BLOCKS, BLOCKS),
    ("w4a16", &["--layout", "tinygemm-avx2-n32", "--head", "int8"], BLOCKS, INT8),
    ("w4a16", &["--layout", "row-major"], ROWS, ROWS),
    ("w4a16", &["--layout", "row-major", "--quantize-embedding"], ROWS, &[]),
    ("w4a16", &["--head", "bf16", "--method", "rtn"], BLOCKS, &[]),
];
const GPTQ: Words = &["g_idx", "qweight", "qzeros", "scales"];
const PACKED: Words = &["weight_packed", "weight_scale", "weight_shape"];
const ZEROS: Words = &["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"];
const BLOCKS: Words = &["scales_and_zeros", "weight_packed"];
const ROWS: Words = &["weight_packed", "weight_scale", "weight_zero"];
const INT8: Words = &["weight", "weight_scale"];

fn artifact(scheme: &str, more: &[&str]) -> Model {
    let model = Model::tiny();
    let args: Vec<&str> = ["--group-size", "32"].iter().chain(more).copied().collect();
    model.quantize_to(scheme, &args).expect(0);
    model
}

fn tensors_of(tensors: &TensorMap, module: &str) -> Vec<String> {
    let prefix = format!("{module}.");
    tensors.keys().filter_map(|name| name.strip_prefix(&prefix)).map(str::to_owned).collect()
}

fn bf16s(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<2>().0.iter().map(|b| f64::from(bf16::from_le_bytes(*b).to_f32())).collect()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

fn snr_db(source: &[f64], decoded: &[f64]) -> f64 {
    assert_eq!(source.len(), decoded.len());
    let signal: f64 = source.iter().map(|w| w * w).sum();
    let noise: f64 = source.iter().zip(decoded).map(|(w, d)| (w - d).powi(2)).sum();
    10.0 * (signal / noise).log10()
}

#[test]
fn every_form_is_written_verified_and_the_same_at_any_thread_count() {
    for (scheme, options, module, head) in FORMS {
        let model = artifact(scheme, options);
        let tensors = all_tensors(&model.out());
        assert_eq!(tensors_of(&tensors, UP), module, "{scheme} {options:?}");
        assert_eq!(tensors_of(&tensors, "lm_head"), head, "{scheme} {options:?}");
        let source = all_tensors(&model.dir);
        let gate = "model.layers.2.self_attn.g_proj.weight";
        assert_eq!(tensors[gate], source[gate]);
        let loose = ["--min-snr-db", "0", "--max-kld", "9", "--min-greedy", "0", "--json"];
        let report = model.verify_scenario("short", &loose).expect(0).json();
        let report = &report["artifacts"][0];
        assert!(
            report["behaviour"]["total"]["logits_snr_db"].as_f64().unwrap() > 5.0,
            "{options:?} {report}"
        );
        let written = tree(&model.out());
        for threads in ["1", "3"] {
            let more: Vec<&str> = ["--group-size", "32", "--force", "--threads", threads]
                .iter()
                .chain(options)
                .copied()
                .collect();
            model.quantize_to(scheme, &more).expect(0);
            assert!(tree(&model.out()) == written, "{scheme} {options:?} with {threads} threads");
        }
    }
}

#[test]
fn the_manifest_says_bits_and_bytes_by_exact_arithmetic() {
    let model = artifact("w4a8", &[]);
    let manifest = read_json(&model.out().join("spark-convert.json"));
    let entry = |name: &str| {
        let tensors = manifest["tensors"].as_array().unwrap();
        tensors.iter().find(|t| t["name"] == name).unwrap().clone()
    };
    // up_proj is [192, 128]: 4 bits a code, and per group of 32 a bf16 scale and a 4-bit zero point.
    assert_eq!(entry(&format!("{UP}.qweight"))["bytes"], 192 * 128 / 2);
    assert_eq!(entry(&format!("{UP}.scales"))["bytes"], 192 * 4 * 2);
    assert_eq!(entry(&format!("{UP}.qzeros"))["bytes"], 192 * 4 / 2);
    assert_eq!(entry(&format!("{UP}.g_idx"))["bytes"], 128 * 4);
    assert_eq!(entry(&format!("{UP}.qweight"))["group_size"], 32);
    assert_eq!(entry(&format!("{UP}.qweight"))["scheme"], "w4a8");
    // A token reads everything but the embedding, and of that one row of 128 bf16.
    let total = manifest["sizes"]["tensor_bytes"].as_u64().unwrap();
    let embedding = entry("model.embedding.weight")["bytes"].as_u64().unwrap();
    assert_eq!(manifest["sizes"]["bytes_per_token"], total - embedding + 256);
    let stated: u64 =
        manifest["tensors"].as_array().unwrap().iter().map(|t| t["bytes"].as_u64().unwrap()).sum();
    assert_eq!(stated, total);
}

/// 22: GPTQ's zero points. The file decodes by the written rule, and by the other reading it is far off.
#[test]
fn kf22_zero_points_follow_the_checkpoint_format() {
    let model = artifact("w4a8", &[]);
    let config = read_json(&model.out().join("config.json"));
    assert_eq!(config["quantization_config"]["checkpoint_format"], "gptq");
    assert_eq!(config["quantization_config"]["desc_act"], false);
    assert_eq!(read_json(&model.out().join("quantize_config.json")), config["quantization_config"]);
    let (tensors, source) = (all_tensors(&model.out()), all_tensors(&model.dir));
    for (module, original) in [(UP, format!("{UP}.weight")), ("lm_head", "model.embedding.weight".to_owned())]
    {
        let get = |name: &str| &tensors[&format!("{module}.{name}")].2;
        let weights = bf16s(&source[&original].2);
        let k = 128;
        let n = weights.len() / k;
        let (qweight, qzeros, scales) = (words(get("qweight")), words(get("qzeros")), bf16s(get("scales")));
        let g_idx = words(get("g_idx"));
        let decode = |stored_minus: u32| -> Vec<f64> {
            let element = |i: usize| {
                let (row, column) = (i / k, i % k);
                let group = g_idx[column] as usize;
                let code = qweight[column / 8 * n + row] >> (4 * (column % 8)) & 15;
                let zero = (qzeros[group * (n / 8) + row / 8] >> (4 * (row % 8)) & 15) + stored_minus;
                (f64::from(code) - f64::from(zero)) * scales[group * n + row]
            };
            (0..n * k).map(element).collect()
        };
        // A step is about a third of the weights' spread, so the other reading is 8 to 9 dB.
        assert!(snr_db(&weights, &decode(1)) > 15.0, "{module}");
        assert!(snr_db(&weights, &decode(0)) < 10.0, "{module}: the other reading");
    }
}

/// 23: the tied head. The 4-bit build has a head of its own, says so, and keeps the table in bf16; the
/// plain tied form is there for the asking.
#[test]
fn kf23_the_head_is_untied_and_quantized() {
    for (scheme, options, listed) in [
        ("w4a8", [].as_slice(), true),
        ("w4a8", &["--head", "bf16"], false),
        ("w4a8", &["--asymmetric"], true),
        ("w4a16", &[], true),
    ] {
        let model = artifact(scheme, options);
        let config = read_json(&model.out().join("config.json"));
        assert_eq!(config["tie_word_embeddings"], !listed, "{scheme} {options:?}");
        let block = &config["quantization_config"];
        match block["quant_method"].as_str().unwrap() {
            "gptq" => {
                assert_eq!(block["lm_head"], listed);
                let modules = block["modules_in_block_to_quantize"].as_array().unwrap();
                assert_eq!(modules.contains(&json!("lm_head")), listed);
            }
            "cpu_int4" => assert_eq!(block["lm_head"], listed),
            _ => {
                let targets = block["config_groups"]["group_0"]["targets"].as_array().unwrap();
                assert_eq!(targets.contains(&json!("lm_head")), listed);
                assert!(!block["ignore"].as_array().unwrap().contains(&json!("lm_head")));
            }
        }
        let (tensors, source) = (all_tensors(&model.out()), all_tensors(&model.dir));
        assert_eq!(tensors["model.embedding.weight"], source["model.embedding.weight"]);
        assert_eq!(tensors.keys().any(|name| name.starts_with("lm_head.")), listed);
    }
}

/// 24: the head gate stays as it is and no consumer's list reaches it; gate_proj and up_proj are alike.
#[test]
fn kf24_the_head_gate_is_never_quantized() {
    for (scheme, options) in [("w4a8", [].as_slice()), ("w4a8", &["--asymmetric"]), ("w4a16", &[])] {
        let model = artifact(scheme, options);
        let (tensors, source) = (all_tensors(&model.out()), all_tensors(&model.dir));
        for layer in 0..4 {
            let module = format!("model.layers.{layer}.self_attn.g_proj");
            assert_eq!(tensors_of(&tensors, &module), ["weight"]);
            let name = format!("{module}.weight");
            assert_eq!(tensors[&name], source[&name]);
            let parts = |m: &str| tensors_of(&tensors, &format!("model.layers.{layer}.mlp.{m}"));
            assert_eq!(parts("gate_proj"), parts("up_proj"));
        }
        let block = read_json(&model.out().join("config.json"))["quantization_config"].clone();
        match block["modules_in_block_to_quantize"].as_array() {
            Some(list) => {
                let reaches =
                    |entry: &Value| "model.layers.0.self_attn.g_proj".contains(entry.as_str().unwrap());
                assert!(!list.iter().any(reaches));
            }
            None => assert!(block["ignore"].as_array().unwrap().contains(&json!("re:.*g_proj$"))),
        }
    }
}

/// 14: weights beyond what float16 can hold as a scale. bf16 holds every scale, and nothing overflows.
#[test]
fn kf14_scales_beyond_float16_stay_finite() {
    let name = "model.layers.1.mlp.up_proj.weight";
    for (scheme, options) in [("w4a8", [].as_slice()), ("w4a8", &["--asymmetric"]), ("w4a16", &[])] {
        for value in [1e7f32, 3e38] {
            let spec = FixtureSpec::tiny().set_value(name, 5, value).set_value(name, 7, -value);
            let model = Model::new(spec);
            let args: Vec<&str> = ["--group-size", "32"].iter().chain(options).copied().collect();
            model.quantize_to(scheme, &args).expect(0);
            model.verify(&["--min-weight-snr-db", "-1"]).expect(0);
            let tensors = all_tensors(&model.out());
            for part in ["scales", "weight_scale", "scales_and_zeros"] {
                if let Some(scales) = tensors.get(&format!("{UP}.{part}")) {
                    assert!(bf16s(&scales.2).iter().all(|s| s.is_finite()), "{scheme} {options:?} {value}");
                }
            }
        }
    }
}

/// 15: rows that groups do not divide are refused before anything is written.
#[test]
fn kf15_group_sizes_that_do_not_divide_are_refused() {
    let model = Model::tiny();
    for scheme in ["w4a8", "w4a16"] {
        let before = tree(model.root.path());
        let run = model.quantize_to(scheme, &["--group-size", "128"]).expect(3);
        for word in ["out_proj.weight", "64", "128", "--group-size 32 or 64"] {
            assert!(run.error().contains(word), "{word:?} in {}", run.error());
        }
        assert_eq!(tree(model.root.path()), before);
    }
    let wide = Model::new(FixtureSpec::tiny().sizes(|g| g.ffn = 320));
    wide.quantize_to("w4a8", &["--group-size", "64"]).expect(0);
}

#[test]
fn what_does_not_tile_is_kept_listed_and_runs() {
    // 160 rows of the MLP are not a multiple of 64; 32 divides them.
    let model = Model::new(FixtureSpec::tiny().sizes(|g| g.ffn = 160));
    let plan = model.quantize_to("w4a16", &["--group-size", "32", "--json"]).expect(0).json();
    let notes = plan["notes"].as_array().unwrap();
    assert!(notes.iter().any(|n| n.as_str().unwrap().contains(UP) && n.as_str().unwrap().contains("160")));
    let tensors = all_tensors(&model.out());
    assert_eq!(tensors_of(&tensors, UP), ["weight"]);
    assert_eq!(tensors_of(&tensors, "model.layers.1.mlp.down_proj"), BLOCKS);
    let ignore = &read_json(&model.out().join("config.json"))["quantization_config"]["ignore"];
    assert!(ignore.as_array().unwrap().contains(&json!(UP)));
    model.verify_scenario("short", &["--min-snr-db", "0", "--max-kld", "9", "--min-greedy", "0"]).expect(0);
    // A head that does not tile would stay four times as large in silence.
    let odd = Model::new(FixtureSpec::tiny().sizes(|g| g.vocab = 464));
    let refused = odd.quantize_to("w4a16", &["--group-size", "32"]).expect(3);
    assert!(refused.error().contains("model.embedding.weight") && refused.error().contains("464"));
    odd.quantize_to("w4a16", &["--group-size", "32", "--head", "bf16"]).expect(0);
}

#[test]
fn options_without_effect_are_refused() {
    let model = Model::tiny();
    for (scheme, options, word) in [
        ("w8a8", ["--group-size", "64"].as_slice(), "--group-size"),
        ("w8a8", &["--head", "4bit"], "--head"),
        ("w8a8", &["--asymmetric"], "--asymmetric"),
        ("w8a8", &["--layout", "row-major"], "--layout"),
        ("w4a8", &["--group-size", "256"], "256"),
        ("w4a8", &["--layout", "row-major"], "--layout"),
        ("w4a8", &["--quantize-embedding"], "--quantize-embedding"),
        ("w4a8", &["--packing", "gptq", "--asymmetric"], "--asymmetric"),
        ("w4a8", &["--packing", "gptq", "--head", "int8"], "--head int8"),
        ("w4a8", &["--asymmetric", "--qkv", "split"], "--qkv"),
        ("w4a8", &["--asymmetric", "--no-negative-scales"], "--no-negative-scales"),
        ("w4a8", &["--method", "rtn", "--no-negative-scales"], "--no-negative-scales"),
        ("w4a16", &["--asymmetric"], "--asymmetric"),
        ("w4a16", &["--packing", "gptq"], "--packing"),
        ("w4a16", &["--quantize-embedding"], "--quantize-embedding"),
        ("w4a16", &["--layout", "row-major", "--head", "int8"], "--head int8"),
        ("w4a16", &["--layout", "row-major", "--quantize-embedding", "--head", "4bit"], "--head"),
        ("w4a16", &["--group-size", "16"], "16"),
    ] {
        let run = model.quantize_to(scheme, options).expect(2);
        assert!(run.error().contains(word), "{scheme} {options:?}: {}", run.error());
        assert!(!model.out().exists());
    }
}

/// Doubles as many times as it says the bf16 at an element of a tensor.
fn scale_bf16(bytes: &mut [u8], at: usize, factor: f32) {
    let value = bf16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32() * factor;
    bytes[2 * at..2 * at + 2].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
}

#[test]
fn with_the_hashes_repaired_a_wrong_scale_is_found() {
    let cases: [(&str, Words, &str, &str, usize); 6] = [
        ("w4a8", &[], "scales", "qweight", 1),
        ("w4a8", &["--asymmetric"], "weight_scale", "weight_packed", 1),
        ("w4a16", &[], "scales_and_zeros", "weight_packed", 2),
        ("w4a16", &["--layout", "row-major"], "weight_scale", "weight_packed", 1),
        ("w4a16", &["--head", "int8"], "weight_scale", "weight", 1),
        ("w4a8", &["--head", "int8"], "weight_scale", "weight", 1),
    ];
    for (scheme, options, scales, codes, step) in cases {
        let module = if codes == "weight" { "lm_head" } else { UP };
        let scales = format!("{module}.{scales}");
        for (factor, word) in [(64.0, format!("{module}.{codes}")), (f32::NAN, scales.clone())] {
            let model = artifact(scheme, options);
            tamper(&model, |file| {
                let Some(bytes) = file.get(&scales) else { return };
                if scheme == "w4a8" && module == "lm_head" {
                    let value = f32::from_le_bytes(bytes[40..44].try_into().unwrap()) * factor;
                    bytes[40..44].copy_from_slice(&value.to_le_bytes());
                } else {
                    scale_bf16(bytes, 10 * step, factor);
                }
            });
            fails_with(&model, &[&word]);
        }
    }
}

#[test]
fn with_the_hashes_repaired_wrong_zeros_nibbles_and_groups_are_found() {
    type Edit = fn(&mut [u8]);
    let swap_nibbles: Edit = |bytes| bytes.iter_mut().for_each(|b| *b = b.rotate_left(4));
    let cases: [(&str, Words, &str, Edit, Words); 10] = [
        ("w4a8", &[], "model.layers.1.mlp.up_proj.qzeros", |b| b[5] = 0x78, &["0x77777777", "version 1"]),
        ("w4a8", &[], "lm_head.qzeros", |b| b.fill(0x88), &["version 1"]),
        ("w4a8", &[], "lm_head.g_idx", |b| b[0] = 1, &["[0]", "reordered"]),
        ("w4a8", &[], "model.layers.1.mlp.up_proj.qweight", swap_nibbles, &["row"]),
        ("w4a8", &["--asymmetric"], "model.layers.1.mlp.up_proj.weight_packed", swap_nibbles, &["row"]),
        ("w4a8", &["--asymmetric"], "lm_head.weight_shape", |b| b[0] ^= 1, &["449"]),
        (
            "w4a8",
            &["--asymmetric"],
            "model.layers.1.mlp.up_proj.weight_zero_point",
            |b| b[3] ^= 0x30,
            &["weight_packed"],
        ),
        ("w4a16", &[], "model.layers.1.mlp.up_proj.weight_packed", swap_nibbles, &["row"]),
        ("w4a16", &[], "lm_head.scales_and_zeros", |b| b[2..4].copy_from_slice(&[0x80, 0x7f]), &["inf"]),
        ("w4a16", &["--layout", "row-major"], "lm_head.weight_packed", swap_nibbles, &["row"]),
    ];
    for (scheme, options, tensor, edit, words) in cases {
        let model = artifact(scheme, options);
        tamper(&model, |file| {
            if let Some(bytes) = file.get(tensor) {
                edit(bytes);
            }
        });
        let named = tensor.replace("weight_zero_point", "");
        fails_with(&model, &[&named]);
        fails_with(&model, words);
    }
}

#[test]
fn with_the_hashes_repaired_a_missing_head_or_key_is_found() {
    for (scheme, options, tensor) in [
        ("w4a8", [].as_slice(), "lm_head.qweight"),
        ("w4a8", &["--asymmetric"], "lm_head.weight_scale"),
        ("w4a16", &[], "lm_head.weight_packed"),
    ] {
        let model = artifact(scheme, options);
        tamper(&model, |file| file.tensors.retain(|t| t.0 != tensor));
        fails_with(&model, &[tensor, "missing"]);
    }
    type Edit = fn(&mut Value);
    let edits: [(&str, &str, Edit); 7] = [
        ("w4a8", "tie_word_embeddings", |c| c["tie_word_embeddings"] = json!(true)),
        ("w4a8", "lm_head", |c| c["quantization_config"]["lm_head"] = json!(false)),
        ("w4a8", "checkpoint_format", |c| c["quantization_config"]["checkpoint_format"] = json!("gptq_v2")),
        ("w4a8", "modules_in_block_to_quantize", |c| {
            drop(c["quantization_config"].as_object_mut().unwrap().remove("modules_in_block_to_quantize"));
        }),
        ("w4a8", "group_size", |c| c["quantization_config"]["group_size"] = json!(64)),
        ("w4a16", "layout", |c| c["quantization_config"]["layout"] = json!("tinygemm-avx2-n32")),
        ("w4a16", "direct_dequant", |c| c["quantization_config"]["direct_dequant"] = json!(false)),
    ];
    for (scheme, key, edit) in edits {
        let model = artifact(scheme, &[]);
        edit_json(&model.out().join("config.json"), edit);
        repair_hashes(&model.out());
        fails_with(&model, &["config.json", key]);
    }
    let model = artifact("w4a8", &[]);
    edit_json(&model.out().join("quantize_config.json"), |c| c["bits"] = json!(8));
    repair_hashes(&model.out());
    fails_with(&model, &["quantize_config.json", "bits"]);
}

#[test]
fn text_comes_out_of_every_form() {
    for (scheme, options, ..) in FORMS {
        let model = artifact(scheme, options);
        let out = model.out();
        let args =
            ["generate", out.to_str().unwrap(), "--tokens", "3,17,42", "--max-new-tokens", "4", "--json"];
        let said = run(model.root.path(), args).expect(0).json();
        assert_eq!(said["tokens"].as_array().unwrap().len(), 4, "{scheme} {options:?}");
    }
}
