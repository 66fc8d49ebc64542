//! The forms of an export: whatever operators, encodings, cuts and caches it is written with, it is the
//! same step. And their options.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use spark_convert::checkpoint::Checkpoint;
use spark_convert::npu::runner::OpenedExport;
use spark_convert::onnx::{ElementType, Model as Onnx};
use spark_convert::opened::tokenizer;
use spark_convert::runtime::argmax;
use tempfile::TempDir;
use xtask::fixtures::FixtureSpec;

use crate::export_npu_run::{CONTEXT, export, forward, logits, snr_db, tokens, with_texts};
use crate::runs::{Model, read_json, run};

const CALIBRATED: [&str; 2] = ["--calib", "texts.jsonl"];

/// Every float form is the forward pass, whatever its operator set.
#[test]
fn float_forms_are_the_forward_pass() {
    let model = with_texts(FixtureSpec::tiny());
    let tokens = tokens(CONTEXT, 448);
    let expected = forward(&model.dir, &tokens);
    for (out, options) in [
        ("a", &["--dialect", "float18"][..]),
        ("b", &["--dialect", "float18", "--split", "block4", "--sliding-cache", "roll"]),
        ("c", &["--dialect", "qdq21", "--precision", "fp32", "--full-cache", "roll-cache"]),
        ("d", &["--dialect", "aimet", "--calib", "texts.jsonl"]),
        ("e", &["--dialect", "aimet", "--cache-type", "s16", "--split", "layer", "--calib", "texts.jsonl"]),
    ] {
        let opened = export(&model, out, options);
        let found = logits(&opened, &mut opened.runner().unwrap(), &tokens);
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(argmax(found), argmax(expected), "{options:?} step {step}");
        }
        let db = snr_db(&expected.concat(), &found.concat());
        assert!(db >= 110.0, "{options:?}: {db} dB");
    }
}

/// Cuts are the same to the bit. A decomposed norm has its weight in float, and a symmetric cache is coarser
/// where its range is not: both are small beside what int8 weights cost, some 33 dB.
#[test]
fn quantized_forms_agree() {
    let model = with_texts(FixtureSpec::tiny());
    let tokens = tokens(CONTEXT, 448);
    let run = |out: &str, options: &[&str]| {
        let opened = export(&model, out, &[&CALIBRATED, options].concat());
        logits(&opened, &mut opened.runner().unwrap(), &tokens)
    };
    let default = run("default", &[]);
    assert_eq!(run("block4", &["--split", "block4"]), default);
    let qdq21 = run("qdq21", &["--dialect", "qdq21"]);
    for (out, options) in [
        ("a", &["--dialect", "qdq21", "--split", "layer"][..]),
        ("b", &["--dialect", "qdq21", "--split", "block4"]),
    ] {
        assert_eq!(run(out, options), qdq21, "{options:?}");
    }
    let float = forward(&model.dir, &tokens).concat();
    let cost = snr_db(&float, &default.concat());
    for (out, options) in [
        ("c", &["--dialect", "qdq21", "--cache-type", "u16sym", "--full-cache", "ring"][..]),
        ("d", &["--cache-type", "u16sym"]),
        ("e", &["--cache-type", "u16sym", "--sliding-cache", "roll", "--full-cache", "roll-cache"]),
    ] {
        let found = run(out, options).concat();
        let db = snr_db(&default.concat(), &found);
        assert!(db >= cost + 3.0, "{options:?}: {db} dB from the default, which is {cost} dB from float");
        assert!(snr_db(&float, &found) >= cost - 1.0, "{options:?}");
    }
    let db = snr_db(&default.concat(), &qdq21.concat());
    assert!(db >= cost + 3.0, "qdq21: {db} dB from the default, which is {cost} dB from float");
}

/// The trained checkpoint says the same in every form of a precision. To the first prompt int8 weights say
/// what floats say; to the second they differ after eleven tokens, where two are 0.23 apart in the logits.
#[test]
fn all_forms_of_the_bundled_checkpoint_generate_the_same_tokens() {
    const STEPS: usize = 24;
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/spark-tiny");
    let checkpoint = Checkpoint::open(&fixture).unwrap();
    let tokenizer = tokenizer(&checkpoint.dir, &checkpoint.config).unwrap();
    let prompts = ["She opened the door and", "The history of the town begins in"];
    let root = TempDir::new().unwrap();
    let generate = |out: &str, options: &[&str]| -> [Vec<u32>; 2] {
        let mut args = vec!["export-npu", fixture.to_str().unwrap(), "--context", "64", "--out", out];
        args.extend(options);
        run(root.path(), args).expect(0);
        let opened = OpenedExport::open(&root.path().join(out)).unwrap();
        prompts.map(|prompt| {
            let mut runner = opened.runner().unwrap();
            let prompt = tokenizer.encode(prompt).unwrap();
            let rows: Vec<Vec<f32>> = prompt.iter().map(|t| opened.embedding(*t).unwrap()).collect();
            let mut logits = runner.prompt(&rows).unwrap().logits;
            let mut generated = Vec::new();
            for _ in 0..STEPS {
                let token = argmax(&logits) as u32;
                generated.push(token);
                logits = runner.step(&opened.embedding(token).unwrap()).unwrap().logits;
            }
            generated
        })
    };
    let float = generate("float", &["--dialect", "float18"]);
    assert!(float[0].iter().collect::<BTreeSet<_>>().len() > 8, "too dull to tell: {float:?}");
    let calib = ["--calib-tokens", "1500"];
    assert_eq!(generate("aimet", &[&calib[..], &["--dialect", "aimet", "--prefill", "3"]].concat()), float);
    let codes = generate("codes", &[&calib[..], &["--prefill", "4"]].concat());
    assert_eq!(codes[0], float[0]);
    for (out, options) in [
        ("a", &["--dialect", "qdq21", "--split", "block4", "--prefill", "3"][..]),
        ("b", &["--cache-type", "u16sym", "--sliding-cache", "roll", "--full-cache", "ring"]),
    ] {
        assert_eq!(generate(out, &[&calib, options].concat()), codes, "{options:?}");
    }
}

fn onnx(out: &Path, graph: &str) -> Onnx {
    Onnx::decode(&fs::read(out.join(graph).join("model.onnx")).unwrap(), "model.data").unwrap()
}

#[test]
fn manifests_say_which_form_it_is() {
    let model = with_texts(FixtureSpec::tiny());
    for (out, options, expected) in [
        ("a", &["--dialect", "qdq21", "--calib", "texts.jsonl"][..], ("qdq21", "w8a16", 21, 10, "quantized")),
        ("b", &["--dialect", "float18"], ("float18", "fp32", 18, 8, "float")),
        ("c", &["--dialect", "aimet", "--calib", "texts.jsonl"], ("aimet", "fp32", 18, 8, "float")),
    ] {
        let (dialect, precision, opset, ir_version, io) = expected;
        export(&model, out, options);
        let out = model.root.path().join(out);
        let manifest = read_json(&out.join("manifest.json"));
        assert_eq!((&manifest["dialect"], &manifest["precision"]), (&json!(dialect), &json!(precision)));
        assert_eq!((&manifest["opset"], &manifest["io"]), (&json!(opset), &json!(io)));
        let onnx = onnx(&out, "step");
        assert_eq!((onnx.opset, onnx.ir_version), (opset, ir_version));
        // The nodes that stay float are those of the norms and the GELUs, and there.
        let listed = manifest["graphs"][0]["float_nodes"].as_array().cloned().unwrap_or_default();
        assert_eq!(listed.len(), if dialect == "qdq21" { 9 * 6 + 4 * 5 } else { 0 });
        let nodes: BTreeSet<&str> = onnx.graph.nodes.iter().map(|n| n.name.as_str()).collect();
        assert!(listed.iter().all(|n| nodes.contains(n.as_str().unwrap())), "{listed:?}");
        let record = read_json(&out.join("spark-convert.json"));
        assert_eq!(record["options"]["dialect"], dialect);
    }
}

/// The file beside the float graph names every tensor and every weight of it, with the encodings that the
/// integer graph has; what is inside a decomposed operator is left to the converter.
#[test]
fn aimet_encodings_are_those_of_the_integer_graph() {
    let model = with_texts(FixtureSpec::tiny());
    let options = ["--calib", "texts.jsonl", "--prefill", "4"];
    let codes = export(&model, "codes", &[&options[..], &["--cache-type", "u16sym"]].concat());
    let aimet = export(&model, "aimet", &[&options[..], &["--dialect", "aimet"]].concat());
    let root = model.root.path().join("aimet");
    assert_eq!(aimet.manifest().encodings_precision.as_deref(), Some("w8a16"));
    let phases = [("step", false), ("prefill", true)];
    for (graph, is_prefill) in phases {
        let encodings = read_json(&root.join(graph).join("model.encodings"));
        assert_eq!(encodings["version"], "1.0.0");
        assert_eq!(fs::read_dir(root.join(graph)).unwrap().count(), 3);
        let by_name = |key: &str| -> BTreeMap<String, Value> {
            let entries = encodings[key].as_array().unwrap().iter();
            entries.map(|e| (e["name"].as_str().unwrap().to_owned(), e.clone())).collect()
        };
        let (activations, weights) = (by_name("activation_encodings"), by_name("param_encodings"));
        let onnx = onnx(&root, graph);
        let mut floats: BTreeSet<&str> = onnx.graph.inputs.iter().map(|v| v.name.as_str()).collect();
        floats.extend(onnx.graph.nodes.iter().map(|n| n.outputs[0].as_str()));
        assert!(activations.keys().all(|name| floats.contains(name.as_str())));
        // Five inner tensors of each norm and four of each GELU have none.
        let norms = if is_prefill { 8 } else { 9 };
        assert_eq!(floats.len(), activations.len() + norms * 5 + 4 * 4);
        for initializer in onnx.graph.initializers.iter().filter(|i| i.name.ends_with("_weight")) {
            let weight = &weights[&initializer.name];
            let count = weight["scale"].as_array().unwrap().len();
            let per_tensor = initializer.name.contains("norm") || initializer.name.contains("g_proj");
            assert_eq!(count, if per_tensor { 1 } else { initializer.shape[0] }, "{}", initializer.name);
            assert_eq!(initializer.element, ElementType::F32);
        }
        // Inputs and outputs as the integer export has them.
        let info = |export: &OpenedExport| match is_prefill {
            false => export.manifest().graphs[0].clone(),
            true => export.manifest().prefill.as_ref().unwrap().graphs[0].clone(),
        };
        let (integer, float) = (info(&codes), info(&aimet));
        for (integer, float) in
            integer.inputs.iter().chain(&integer.outputs).zip(float.inputs.iter().chain(&float.outputs))
        {
            assert_eq!((&integer.name, &integer.encoding), (&float.name, &float.encoding));
            assert_eq!((integer.dtype.as_str(), float.dtype.as_str()), ("uint16", "float32"));
            let encoding = integer.encoding.as_ref().unwrap();
            let entry = &activations[&float.name];
            assert_eq!(entry["scale"][0].as_f64(), Some(encoding.scale), "{}", float.name);
            assert_eq!(entry["offset"][0].as_i64(), Some(-encoding.zero_point), "{}", float.name);
            assert_eq!(entry["bw"], 16);
        }
        assert_eq!(activations["past_key_1_in"]["is_sym"], true);
    }
}

#[test]
fn options_without_effect_are_usage_errors() {
    let model = Model::new(FixtureSpec::tiny());
    for (options, words) in [
        (
            &["--dialect", "float18", "--precision", "w8a16"][..],
            "--precision w8a16 has no effect with --dialect float18",
        ),
        (
            &["--dialect", "aimet", "--precision", "fp32"],
            "--precision fp32 has no effect with --dialect aimet",
        ),
        (&["--dialect", "aimet", "--precision", "w8"], "--precision w8 has no effect with --dialect aimet"),
        (
            &["--dialect", "float18", "--cache-type", "s16"],
            "--cache-type has no effect with --precision fp32",
        ),
        (
            &["--precision", "w8a8", "--cache-type", "u16sym"],
            "--cache-type has no effect with --precision w8a8",
        ),
        (&["--dialect", "float18", "--method", "rtn"], "--method has no effect"),
        (&["--dialect", "float18", "--calib", "texts"], "--calib has no effect"),
        (&["--dialect", "qdq22"], "invalid value 'qdq22' for '--dialect"),
        (&["--split", "block8"], "invalid value 'block8' for '--split"),
        (&["--full-cache", "roll/cache"], "invalid value 'roll/cache' for '--full-cache"),
        (&["--sliding-cache", "roll-cache"], "invalid value 'roll-cache' for '--sliding-cache"),
        (&["--cache-type", "u8"], "invalid value 'u8' for '--cache-type"),
        (&["--prefill", "1"], "1 is not in 2.."),
        (&["--prefill", "41", "--context", "40"], "--prefill 41: expected 2 to 40"),
    ] {
        let mut args = vec!["export-npu", model.dir.to_str().unwrap(), "--out", "out"];
        args.extend(options);
        let run = run(model.root.path(), args).expect(2);
        assert!(run.stderr.contains(words), "{words:?} in {}", run.stderr);
        assert!(!model.out().exists());
    }
}
