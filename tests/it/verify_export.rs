//! `verify` on NPU exports: what is right passes, and what is wrong is found, named and ends in exit 1.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use spark_convert::npu::runner::OpenedExport;
use spark_convert::onnx::{Attribute, AttributeValue, ElementType, Graph, Initializer, TensorData};
use xtask::fixtures::FixtureSpec;

use crate::export_npu_run::{forward, logits, snr_db, tokens, with_texts};
use crate::runs::{Model, Run, edit_json, read_json, run, tree};
use crate::tamper::{edit_onnx, repair_export_hashes};

/// Exports with a context of 40, five windows of the small presets.
fn export_to(model: &Model, out: &str, options: &[&str]) {
    let mut args = vec!["export-npu", model.dir.to_str().unwrap(), "--out", out, "--context", "40"];
    args.extend(options);
    run(model.root.path(), args).expect(0);
}

/// An export of codes, at `out`.
fn exported(options: &[&str]) -> Model {
    let model = with_texts(FixtureSpec::tiny());
    export_to(&model, "out", &[&["--calib", "texts.jsonl"], options].concat());
    model
}

fn verify(model: &Model, out: &str, more: &[&str]) -> Run {
    let args = ["verify", out, "--reference", model.dir.to_str().unwrap()];
    run(model.root.path(), args.iter().chain(more))
}

/// Changes an export, repairs its hashes, and expects a finding with all of `words`, without any step run.
/// Afterwards everything is as it was.
#[track_caller]
fn found(model: &Model, edit: impl FnOnce(&Path), words: &[&str]) {
    let out = model.out();
    let right = tree(&out);
    edit(&out);
    repair_export_hashes(&out);
    let run = model.verify(&[]).expect(1);
    for (path, bytes) in right.iter().filter(|(path, _)| out.join(path).is_file()) {
        fs::write(out.join(path), bytes).unwrap();
    }
    let line = run.stdout.lines().find(|l| l.starts_with("FAIL ") && words.iter().all(|w| l.contains(w)));
    assert!(line.is_some(), "{words:?} in {}", run.stdout);
}

fn edit_manifest(edit: impl FnOnce(&mut Value)) -> impl FnOnce(&Path) {
    |out| edit_json(&out.join("manifest.json"), edit)
}

fn edit_step(edit: impl FnOnce(&mut Graph)) -> impl FnOnce(&Path) {
    |out| edit_onnx(out, "step", edit)
}

fn constant<'g>(graph: &'g mut Graph, name: &str) -> &'g mut Initializer {
    graph.initializers.iter_mut().find(|i| i.name == name).unwrap_or_else(|| panic!("{name}"))
}

/// Writes a constant inside the model anew.
fn set(graph: &mut Graph, name: &str, bytes: &[u8]) {
    let TensorData::Inline(old) = &mut constant(graph, name).data else {
        panic!("{name} is in the data file")
    };
    assert_eq!(old.len(), bytes.len(), "{name}");
    *old = bytes.to_vec();
}

/// Multiplies a scale of a constant inside the model.
fn scale(graph: &mut Graph, name: &str, index: usize, factor: f32) {
    let TensorData::Inline(bytes) = &mut constant(graph, name).data else {
        panic!("{name} is in the data file")
    };
    let bytes: &mut [u8; 4] = (&mut bytes[4 * index..4 * index + 4]).try_into().unwrap();
    *bytes = (f32::from_le_bytes(*bytes) * factor).to_le_bytes();
}

#[test]
fn fresh_exports_pass_whole_and_split_in_every_precision_but_one() {
    let model = with_texts(FixtureSpec::tiny());
    let figures = |out: &str, options: &[&str], code: i32| -> Value {
        export_to(&model, out, options);
        let report = verify(&model, out, &["--json"]).expect(code).json();
        report["artifacts"][0].clone()
    };
    let texts = ["--calib", "texts.jsonl"];
    let snr = |report: &Value| report["export"]["logits"]["logits_snr_db"].as_f64().unwrap();
    let whole = figures("whole", &texts, 0);
    assert_eq!(whole["findings"], json!([]));
    let export = &whole["export"];
    // Three windows of 8 from the start, and the last eight of the context.
    assert_eq!(export["stretches"]["run"], json!([{"from": 0, "to": 24}, {"from": 32, "to": 40}]));
    assert_eq!(export["steps"].as_array().unwrap().len(), 32);
    assert!(export["full_window_snr_db"].is_f64() && export["full_cache_snr_db"].is_f64());
    // What lies in unwritten slots is hidden altogether: its probability has code 0.
    assert_eq!(export["unwritten_slots_snr_db"], 300.0);
    assert_eq!(export["keys_values"].as_array().unwrap().len(), 4);
    assert_eq!(export["graphs"], json!([]));
    assert_eq!(whole["modules"].as_array().unwrap().len(), 4 * 10 + 2);

    let split = figures("split", &[&texts[..], &["--split", "layer"]].concat(), 0);
    // Bit for bit the same step; the figures of steps are the same.
    assert_eq!(split["export"]["steps"], export["steps"]);
    let types: Vec<_> = split["export"]["graph_types"].as_array().unwrap().iter().collect();
    let counts: Vec<_> = types.iter().map(|t| (t["layer_type"].clone(), t["graphs"].clone())).collect();
    assert_eq!(counts, [(json!("sliding"), json!(3)), (json!("full"), json!(1)), (json!("head"), json!(1))]);
    let others = [
        &["--precision", "w8"][..],
        &["--precision", "fp32", "--split", "layer"],
        &["--precision", "w16a16", "--calib", "texts.jsonl"],
        &["--calib", "texts.jsonl", "--sliding-cache", "roll", "--full-cache", "roll-cache"],
        &["--calib", "texts.jsonl", "--full-cache", "ring", "--split", "layer"],
    ];
    for (i, options) in others.into_iter().enumerate() {
        figures(&format!("other{i}"), options, 0);
    }
    // 8-bit activations ruin the step, and the default gates say so.
    let coarse = figures("coarse", &[&texts[..], &["--precision", "w8a8"]].concat(), 1);
    assert_eq!(coarse["findings"], json!([]));
    assert!(snr(&coarse) <= snr(&whole) - 10.0, "{} and {}", snr(&coarse), snr(&whole));
    let gate = &coarse["gates"][1];
    assert_eq!((&gate["name"], &gate["passed"]), (&json!("snr_db"), &json!(false)));
}

/// The bundled checkpoint in f32: three windows and the end of the context, every token the same.
#[test]
fn a_float_export_of_the_bundled_checkpoint_is_its_forward_pass() {
    let root = tempfile::tempdir().unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/spark-tiny");
    let fixture = fixture.to_str().unwrap();
    let export = ["export-npu", fixture, "--precision", "fp32", "--context", "120", "--out", "out"];
    run(root.path(), export).expect(0);
    let gates = ["--min-snr-db", "110", "--min-kv-snr-db", "110", "--min-greedy", "1"];
    let args = ["verify", "out", "--reference", fixture, "--json"];
    let report = run(root.path(), args.iter().chain(&gates)).expect(0).json();
    let export = &report["artifacts"][0]["export"];
    assert_eq!(export["stretches"]["run"], json!([{"from": 0, "to": 96}, {"from": 112, "to": 120}]));
}

#[test]
fn an_artifact_and_an_export_are_judged_in_one_run() {
    let model = with_texts(FixtureSpec::tiny());
    let root = model.root.path();
    run(root, ["quantize", "model", "--scheme", "w8a8"]).expect(0);
    run(root, ["export-npu", "model", "--calib", "texts.jsonl", "--context", "24"]).expect(0);
    let report =
        run(root, ["verify", "--reference", "model", "--scenario", "none", "--json"]).expect(0).json();
    let schemes: Vec<_> =
        report["artifacts"].as_array().unwrap().iter().map(|a| a["scheme"].clone()).collect();
    assert_eq!(schemes, ["npu", "w8a8"]);
    // Another checkpoint is no reference, and is told before anything is judged.
    let other = Model::new(FixtureSpec::tiny().seed(7));
    run(root, ["verify", "--reference", other.dir.to_str().unwrap()]).expect(3);
}

#[test]
fn gates_decide_and_those_without_effect_are_usage_errors() {
    let model = exported(&[]);
    for (gate, bar) in
        [("--min-snr-db", "90"), ("--min-step-snr-db", "90"), ("--min-kv-snr-db", "90"), ("--max-kld", "0")]
    {
        let failed = verify(&model, "out", &[gate, bar]).expect(1);
        assert_eq!(failed.stdout.matches("FAIL gate ").count(), 1, "{}", failed.stdout);
    }
    let error = |args: &[&str]| verify(&model, "out", args).expect(2).error().to_owned();
    assert!(error(&["--min-graph-snr-db", "30"]).contains("no export is split"));
    assert!(error(&["--min-kv-snr-db", "30", "--scenario", "none"]).contains("no effect"));
    assert!(error(&["--min-step-snr-db", "NaN"]).contains("--min-step-snr-db"));
    let aimet = exported(&["--dialect", "aimet"]);
    assert!(verify(&aimet, "out", &[]).expect(2).error().contains("aimet"));
    let quantized = Model::tiny();
    quantized.quantize(&[]).expect(0);
    let error = quantized.verify_scenario("long", &["--min-kv-snr-db", "20"]).expect(2);
    assert!(error.error().contains("no artifact is an NPU export"), "{}", error.error());
}

#[test]
fn one_flipped_byte_anywhere_is_found() {
    let model = exported(&["--split", "layer"]);
    for name in
        ["layer_02/model.onnx", "layer_02/model.data", "head/model.data", "embed_tokens.bin", "manifest.json"]
    {
        let path = model.out().join(name);
        let right = fs::read(&path).unwrap();
        for at in [5, right.len() / 2, right.len() - 1] {
            let mut flipped = right.clone();
            flipped[at] ^= 1;
            fs::write(&path, &flipped).unwrap();
            let run = model.verify(&[]).expect(1);
            assert!(run.stdout.contains(&format!("FAIL {name}")), "{name} {at}: {}", run.stdout);
        }
        fs::write(&path, right).unwrap();
    }
    model.verify(&[]).expect(0);
    fs::write(model.out().join("head/notes.txt"), "").unwrap();
    assert!(model.verify(&[]).expect(1).stdout.contains("head/notes.txt: not a file of this export"));
}

#[test]
fn repairing_the_hashes_of_an_unchanged_export_changes_nothing() {
    let model = exported(&[]);
    repair_export_hashes(&model.out());
    model.verify(&[]).expect(0);
}

#[test]
fn a_manifest_that_is_not_the_models_is_found() {
    let model = exported(&[]);
    let blocked = |m: &mut Value| m["masks"]["sliding"]["blocked"] = json!(-65504.0);
    found(&model, edit_manifest(blocked), &["masks.sliding.blocked", "-65504"]);
    let theta = |m: &mut Value| m["rope"]["full"]["theta"] = json!(10000.0);
    found(&model, edit_manifest(theta), &["rope.full.theta", "found 10000"]);
    let dims = |m: &mut Value| m["rope"]["sliding"]["rotary_dim"] = json!(8);
    found(&model, edit_manifest(dims), &["rope.sliding.rotary_dim"]);
    let capacity = |m: &mut Value| m["caches"][3]["capacity"] = json!(38);
    found(&model, edit_manifest(capacity), &["caches.3.capacity", "expected 39, found 38"]);
    let entry = |m: &mut Value| (0..3).for_each(|i| m["caches"][i]["layout"] = json!("roll"));
    found(&model, edit_manifest(entry), &["caches.0", "a sliding layer cannot be roll/entry"]);
    let one = |m: &mut Value| m["caches"][1]["returns"] = json!("cache");
    found(&model, edit_manifest(one), &["caches.1"]);
    let mask = |m: &mut Value| m["masks"]["full"]["length"] = json!(41);
    found(&model, edit_manifest(mask), &["masks.full.length"]);
    let context = |m: &mut Value| m["context"] = json!(41);
    found(&model, edit_manifest(context), &["manifest.json: context"]);
    let gone = |m: &mut Value| drop(m["caches"][0].as_object_mut().unwrap().remove("layout"));
    found(&model, edit_manifest(gone), &["manifest.json", "layout"]);
    let seam = |m: &mut Value| {
        let scale = &mut m["graphs"][2]["inputs"][0]["encoding"]["scale"];
        *scale = json!(2.0 * scale.as_f64().unwrap());
    };
    found(&exported(&["--split", "layer"]), edit_manifest(seam), &["layer_02.hidden_in", "seam"]);
}

#[test]
fn weights_that_are_not_the_checkpoints_are_found() {
    // 192 rows of 128.
    const WEIGHT: &str = "layer_01_gate_proj_weight";
    let model = exported(&[]);
    let swap = |out: &Path| {
        let graph = crate::tamper::read_onnx(out, "step").graph;
        let weight = graph.initializers.into_iter().find(|i| i.name == WEIGHT).unwrap();
        let TensorData::External { offset, .. } = weight.data else { panic!("{:?}", weight.shape) };
        let path = out.join("step/model.data");
        let mut data = fs::read(&path).unwrap();
        let (a, b) = data[offset as usize..].split_at_mut(weight.shape[1]);
        a.swap_with_slice(&mut b[..weight.shape[1]]);
        fs::write(&path, data).unwrap();
    };
    found(&model, swap, &[WEIGHT, "row 0", "larger than rounding can make it"]);
    for factor in [2.0, 0.25] {
        let edit = edit_step(|g| scale(g, "layer_01_gate_proj_weight_scale", 7, factor));
        found(&model, edit, &[WEIGHT, "row 7"]);
    }
    found(
        &model,
        edit_step(|g| scale(g, "layer_02_g_proj_weight_scale", 0, 2.0)),
        &["layer_02_g_proj_weight", "row 0"],
    );
    let norm = edit_step(|g| scale(g, "final_norm_weight_scale", 0, 1.5));
    found(&model, norm, &["final_norm_weight"]);
    let cut = |out: &Path| {
        let path = out.join("step/model.data");
        let data = fs::read(&path).unwrap();
        fs::write(&path, &data[..data.len() - 100]).unwrap();
    };
    found(&model, cut, &["step/model.onnx", "head_weight", "cut off"]);
    let rows = |out: &Path| {
        let path = out.join("embed_tokens.bin");
        let mut bytes = fs::read(&path).unwrap();
        let (a, b) = bytes.split_at_mut(256);
        a.swap_with_slice(&mut b[..256]);
        fs::write(&path, bytes).unwrap();
    };
    found(&model, rows, &["embed_tokens.bin", "row 0"]);
}

#[test]
fn a_graph_that_computes_something_else_or_does_not_compile_is_found() {
    let model = exported(&[]);
    let node = |g: &mut Graph, name: &str| g.nodes.iter().position(|n| n.name == name).unwrap();
    let tanh = edit_step(|g| {
        let gelu = node(g, "layer_02_mlp_activated_Gelu");
        g.nodes[gelu].attributes[0].value = AttributeValue::String("tanh".into());
    });
    found(&model, tanh, &["layer_02_mlp_activated_Gelu", "approximate none", "tanh"]);
    let axis = edit_step(|g| {
        let softmax = node(g, "layer_00_probabilities_Softmax");
        g.nodes[softmax].attributes[0].value = AttributeValue::Int(2);
    });
    found(&model, axis, &["layer_00_probabilities_Softmax", "axis"]);
    let epsilon = edit_step(|g| {
        let norm = node(g, "final_norm_RMSNormalization");
        let attribute = Attribute { name: "epsilon".into(), value: AttributeValue::Float(1e-5) };
        g.nodes[norm].attributes[1] = attribute;
    });
    found(&model, epsilon, &["final_norm_RMSNormalization", "epsilon"]);
    let orphan = edit_step(|g| g.initializers.push(Initializer::f32("left_over", [2], &[1.0, 2.0])));
    found(&model, orphan, &["left_over", "nothing reads this constant"]);
    let dropped = edit_step(|g| {
        let exp = node(g, "layer_00_mlp_activated_Gelu");
        g.nodes[exp].op_type = "Exp".into();
        g.nodes[exp].attributes.clear();
    });
    found(&model, dropped, &["layer_00_mlp_activated_Gelu", "Exp", "softmax"]);
    let renamed = edit_step(|g| g.outputs[0].shape = vec![1, 448]);
    found(&model, renamed, &["step/model.onnx: logits", "[1, 1, 448]"]);
    let rank = edit_step(|g| {
        let residual = g.value_infos.iter().position(|v| v.name == "residual").unwrap();
        g.value_infos[residual].shape = vec![1, 1, 1, 1, 128];
    });
    found(&model, rank, &["residual", "rank 5"]);
}

#[test]
fn encodings_that_break_the_rules_are_found() {
    let model = exported(&[]);
    let with_scale = |g: &mut Graph, name: &str| {
        g.initializers.push(Initializer::f32(name, [], &[0.001]));
    };
    // The entry is returned on another grid than the cache is read on, in graph and manifest.
    let cache = |out: &Path| {
        edit_onnx(out, "step", |g| {
            with_scale(g, "other_scale");
            let quantize = g.nodes.iter_mut().find(|n| n.outputs[0] == "past_key_1_out").unwrap();
            quantize.inputs[1] = "other_scale".into();
        });
        edit_json(&out.join("manifest.json"), |m| {
            let outputs = m["graphs"][0]["outputs"].as_array_mut().unwrap();
            let output = outputs.iter_mut().find(|o| o["name"] == "past_key_1_out").unwrap();
            output["encoding"]["scale"] = json!(f64::from(0.001f32));
        });
    };
    found(&model, cache, &["past_key_1_out", "the runtime moves codes"]);
    found(&model, cache, &["past_key_1_out_codes_QuantizeLinear", "a shift of their codes"]);
    let moved = edit_step(|g| {
        with_scale(g, "other_scale");
        let quantize = g.nodes.iter_mut().find(|n| n.outputs[0] == "residual").unwrap();
        quantize.inputs[1] = "other_scale".into();
    });
    found(&model, moved, &["residual_Reshape", "must keep their encoding"]);
    let sigmoid = edit_step(|g| scale(g, "layer_00_head_gate_sigmoid_scale", 0, 2.0));
    found(&model, sigmoid, &["layer_00_head_gate_sigmoid_Sigmoid", "HTP fixes"]);
    let softmax = edit_step(|g| scale(g, "layer_03_probabilities_scale", 0, 0.5));
    found(&model, softmax, &["layer_03_probabilities_Softmax", "probabilities are clipped"]);
    let stream = edit_step(|g| scale(g, "hidden_in_scale", 0, 2.0));
    found(&model, stream, &["step/model.onnx: hidden_in", "the graph has uint16"]);
    let float = edit_step(|g| {
        let product = g.nodes.iter().position(|n| n.name == "layer_00_mlp_product_Mul").unwrap();
        g.nodes[product].inputs[0] = "layer_00_mlp_activated_float".into();
    });
    found(&model, float, &["layer_00_mlp_product_Mul", "has no encoding"]);
    let zero = edit_step(|g| {
        let weight = constant(g, "layer_00_g_proj_weight_zero_point");
        assert_eq!(weight.element, ElementType::I16);
        weight.data = TensorData::Inline(vec![3, 0]);
    });
    found(&model, zero, &["layer_00_g_proj_weight", "symmetric"]);
    let unlisted = edit_manifest(|m| m["graphs"][0]["high_precision_weights"] = json!([]));
    found(&model, unlisted, &["layer_03_g_proj_weight", "int16"]);
}

/// Known failure 26: scores and mask share a range, and a constant like -65504 leaves the scores a few steps.
#[test]
fn kf26_the_mask_leaves_the_scores_their_steps_and_a_wide_one_is_found() {
    const WIDE: f32 = 65504.0;
    let model = exported(&[]);
    let (out, layers) = (model.out(), ["00", "01", "02", "03"]);
    let ranges = read_json(&out.join("calibration.json"))["ranges"].clone();
    let scores = |layer: usize| -> (f64, f64) {
        let site = format!("layer {layer}: scores");
        let range = ranges.as_array().unwrap().iter().find(|r| r["site"] == site).unwrap();
        (range["min"].as_f64().unwrap(), range["max"].as_f64().unwrap())
    };
    // exp(-24) is nothing, and ranges are widened by a quarter: no more than this may lie below the scores.
    let bound = |layer| 1.25 * (scores(layer).1.max(0.0) - scores(layer).0.min(0.0)) + 25.0;
    let widest = (0..layers.len()).map(bound).fold(0.0, f64::max);
    edit_onnx(&out, "step", |g| {
        for (layer, name) in layers.iter().enumerate() {
            let TensorData::Inline(step) = &constant(g, &format!("layer_{name}_masked_scores_scale")).data
            else {
                panic!("a scalar is inside the model")
            };
            let step = f32::from_le_bytes(step.as_slice().try_into().unwrap());
            assert!(f64::from(step) <= (bound(layer) + widest) / 65535.0, "layer {layer}: a step of {step}");
        }
    });
    let opened = OpenedExport::open(&out).unwrap();
    let masks = &opened.manifest().masks;
    assert!(masks.len() == 2 && masks.values().all(|m| m.blocked < -24.0 && -m.blocked <= widest + 25.0));
    // The first step sees empty caches, in which every slot is blocked; the last ones see full ones.
    let tokens = tokens(40, opened.manifest().model.vocab);
    let expected = forward(&model.dir, &tokens);
    let found = logits(&opened, &mut opened.runner().unwrap(), &tokens);
    let (first, all) = (snr_db(&expected[0], &found[0]), snr_db(&expected.concat(), &found.concat()));
    assert!(first >= 25.0 && all >= 25.0, "{first:.1} dB at the first step, {all:.1} dB over all");

    // The same export with the constant of float models, consistent throughout.
    edit_onnx(&out, "step", |g| {
        for kind in ["sliding", "full"] {
            set(g, &format!("mask_{kind}_scale"), &(WIDE / 65535.0).to_le_bytes());
        }
        for name in layers {
            set(g, &format!("layer_{name}_masked_scores_scale"), &((WIDE + 64.0) / 65535.0).to_le_bytes());
            set(g, &format!("layer_{name}_masked_scores_zero_point"), &65471u16.to_le_bytes());
        }
    });
    edit_json(&out.join("manifest.json"), |m| {
        for kind in ["sliding", "full"] {
            m["masks"][kind]["blocked"] = json!(-WIDE);
        }
        for input in m["graphs"][0]["inputs"].as_array_mut().unwrap() {
            if input["role"] == "mask" {
                input["encoding"]["scale"] = json!(f64::from(WIDE / 65535.0));
            }
        }
    });
    repair_export_hashes(&out);
    let opened = OpenedExport::open(&out).unwrap();
    let wide = logits(&opened, &mut opened.runner().unwrap(), &tokens);
    let wide = snr_db(&expected.concat(), &wide.concat());
    assert!(wide < all - 6.0, "{wide:.1} dB with a mask of -{WIDE}, {all:.1} dB without");
    let run = model.verify(&[]).expect(1);
    assert!(run.stdout.contains("masks.sliding.blocked") && run.stdout.contains("-65504"), "{}", run.stdout);
}

/// A range that is consistent everywhere and too small breaks no rule: the step says it.
#[test]
fn clipped_activations_and_wrong_tables_fail_the_gates() {
    let model = exported(&[]);
    edit_onnx(&model.out(), "step", |g| scale(g, "layer_01_after_attention_scale", 0, 0.2));
    repair_export_hashes(&model.out());
    model.verify(&[]).expect(0);
    let run = verify(&model, "out", &[]).expect(1);
    assert!(run.stdout.contains("gate snr_db >= 22") && run.stdout.contains("FAIL"), "{}", run.stdout);
}

/// What a runner makes room for, and what it divides by, is refused before it does.
#[test]
fn numbers_of_a_manifest_that_its_graphs_do_not_have_are_refused() {
    let model = exported(&["--prefill", "2"]);
    let path = model.out().join("manifest.json");
    let whole = std::fs::read(&path).unwrap();
    let input = |m: &Value, role: &str| -> usize {
        m["graphs"][0]["inputs"].as_array().unwrap().iter().position(|i| i["role"] == role).unwrap()
    };
    type Damage = fn(&mut Value, usize);
    let cases: [(&str, Damage, &str); 10] = [
        ("mask", |m, _| m["masks"]["sliding"]["length"] = json!(1u64 << 62), "masks"),
        ("mask", |m, _| m["prefill"]["masks"]["full"]["length"] = json!(1u64 << 62), "masks"),
        ("mask", |m, i| m["graphs"][0]["inputs"][i]["shape"][0] = json!(1_048_577), "mask_sliding"),
        ("hidden", |m, _| m["prefill"]["rows"] = json!(u64::MAX / 2), "model.hidden"),
        ("rope_cos", |m, _| m["rope"]["full"]["rotary_dim"] = json!(u64::MAX), "rope"),
        ("hidden", |m, i| m["graphs"][0]["inputs"][i]["encoding"]["zero_point"] = json!(i64::MAX), "65535"),
        ("hidden", |m, i| m["graphs"][0]["inputs"][i]["encoding"]["scale"] = json!(0.0), "positive scale"),
        ("hidden", |m, i| m["graphs"][0]["inputs"][i]["encoding"]["dtype"] = json!("int36"), "int36"),
        ("hidden", |m, i| m["graphs"][0]["inputs"][i]["name"] = json!("other"), "other"),
        ("key_cache", |m, i| m["graphs"][0]["inputs"][i]["dtype"] = json!("uint16"), "uint16"),
    ];
    for (role, damage, named) in cases {
        let mut manifest: Value = serde_json::from_slice(&whole).unwrap();
        let at = input(&manifest, role);
        damage(&mut manifest, at);
        std::fs::write(&path, serde_json::to_vec(&manifest).unwrap()).unwrap();
        let opened = OpenedExport::open(&model.out()).and_then(|export| export.runner().map(drop));
        let refusal = opened.unwrap_err().to_string();
        assert!(refusal.contains(named), "{role}, {named}: {refusal}");
    }
    std::fs::write(&path, whole).unwrap();
    OpenedExport::open(&model.out()).unwrap().runner().unwrap();
}
