//! Prefill graphs: several tokens of a prompt at once are the same as one by one.

use std::fs;

use serde_json::json;
use spark_convert::npu::runner::{OpenedExport, Runner};
use spark_convert::runtime::argmax;
use xtask::fixtures::FixtureSpec;

use crate::export_npu_run::{CONTEXT, export, forward, snr_db, tokens, with_texts};
use crate::runs::{Model, read_json, tree};

/// Tokens that go through the prefill graphs at once, in a window of 8.
const ROWS: usize = 6;
/// Decode steps after a prompt.
const STEPS: usize = 6;
/// One less than the rows, as many and one more, past the window, and several calls.
const PROMPTS: [usize; 6] = [ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 1, 2 * ROWS + 3, 5 * ROWS + 2];

fn embedded(export: &OpenedExport, tokens: &[u32]) -> Vec<Vec<f32>> {
    tokens.iter().map(|t| export.embedding(*t).unwrap()).collect()
}

/// Logits after the prompt and after each further token.
fn after_prompt(export: &OpenedExport, tokens: &[u32], prompt: usize) -> Vec<Vec<f32>> {
    let mut runner = export.runner().unwrap();
    let rows = embedded(export, tokens);
    let mut logits = vec![runner.prompt(&rows[..prompt]).unwrap().logits];
    logits.extend(rows[prompt..].iter().map(|row| runner.step(row).unwrap().logits));
    assert_eq!(runner.position(), tokens.len());
    logits
}

/// The same with every token through the decode graphs.
fn step_by_step(export: &OpenedExport, tokens: &[u32], prompt: usize) -> Vec<Vec<f32>> {
    let mut runner = export.runner().unwrap();
    let logits: Vec<_> =
        embedded(export, tokens).iter().map(|row| runner.step(row).unwrap().logits).collect();
    logits[prompt - 1..].to_vec()
}

#[test]
fn prefill_and_decode_are_the_forward_pass() {
    let model = with_texts(FixtureSpec::tiny());
    let tokens = tokens(CONTEXT, 448);
    let expected = forward(&model.dir, &tokens);
    for (out, rows, options) in [
        ("a", ROWS, &["--precision", "fp32"][..]),
        ("b", ROWS, &["--precision", "fp32", "--split", "layer", "--full-cache", "ring"]),
        ("c", ROWS, &["--precision", "fp32", "--sliding-cache", "roll", "--full-cache", "roll-cache"]),
        ("d", ROWS, &["--dialect", "float18", "--split", "block4"]),
        ("e", ROWS, &["--dialect", "aimet", "--calib", "texts.jsonl"]),
        // More rows than the window.
        ("f", 19, &["--precision", "fp32"]),
        ("g", 11, &["--precision", "fp32", "--sliding-cache", "roll"]),
    ] {
        let rows = rows.to_string();
        let opened = export(&model, out, &[&["--prefill", &rows], options].concat());
        assert_eq!(opened.runner().unwrap().prefill_rows().map(|n| n.to_string()), Some(rows));
        for prompt in PROMPTS.into_iter().chain([CONTEXT]) {
            let end = (prompt + STEPS).min(CONTEXT);
            let found = after_prompt(&opened, &tokens[..end], prompt);
            let db = snr_db(&expected[prompt - 1..end].concat(), &found.concat());
            assert!(db >= 110.0, "{options:?}, prompt of {prompt}: {db} dB");
        }
    }
}

/// In codes the softmax has more terms and rounds differently, no more.
#[test]
fn quantized_prefill_gives_the_tokens_of_single_steps() {
    let model = with_texts(FixtureSpec::tiny());
    let tokens = tokens(CONTEXT, 448);
    for (out, options) in [
        ("a", &[][..]),
        ("b", &["--dialect", "qdq21", "--split", "layer"]),
        ("c", &["--cache-type", "u16sym", "--sliding-cache", "roll"]),
        ("d", &["--full-cache", "ring"]),
    ] {
        let options = [&["--calib", "texts.jsonl", "--prefill", "6"], options].concat();
        let opened = export(&model, out, &options);
        for prompt in PROMPTS {
            let tokens = &tokens[..prompt + STEPS];
            let expected = step_by_step(&opened, tokens, prompt);
            let found = after_prompt(&opened, tokens, prompt);
            for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(argmax(found), argmax(expected), "{options:?}, prompt of {prompt}, step {step}");
            }
            let db = snr_db(&expected.concat(), &found.concat());
            assert!(db >= 50.0, "{options:?}, prompt of {prompt}: {db} dB");
        }
    }
}

/// What padding rows and unwritten slots hold is nobody's business: filled with garbage, the tokens of a
/// short call give what they gave.
#[test]
fn padding_is_invisible() {
    let model = with_texts(FixtureSpec::tiny());
    let opened = export(&model, "out", &["--precision", "fp32", "--prefill", "6"]);
    let rows = embedded(&opened, &tokens(ROWS, 448));
    let residual = |count: usize| {
        let mut runner = opened.runner().unwrap();
        let stream = runner.prefill(&rows[..count]).unwrap().residual.pop().unwrap();
        stream[..4 * opened.manifest().model.hidden].to_vec()
    };
    // Two rows of zeros, two rows of other tokens.
    let db = snr_db(&residual(6), &residual(4));
    assert!(db >= 110.0, "{db} dB");
}

#[test]
fn both_kinds_of_graphs_share_weights_caches_and_encodings() {
    let model = with_texts(FixtureSpec::tiny());
    let options = ["--calib", "texts.jsonl", "--prefill", "6", "--split", "layer"];
    let opened = export(&model, "out", &options);
    let out = model.root.path().join("out");
    let manifest = opened.manifest();
    let prefill = manifest.prefill.as_ref().unwrap();
    assert!(prefill.partial_chunks);
    assert_eq!(prefill.graphs.len(), 4);
    for (prefill, decode) in prefill.graphs.iter().zip(&manifest.graphs) {
        assert_eq!(prefill.name, format!("prefill_{}", decode.name));
        assert_eq!(prefill.data_is_start_of.as_ref(), Some(&decode.name));
        let [a, b] = [&prefill.data, &decode.data].map(|file| fs::read(out.join(file)).unwrap());
        assert_eq!(a, b, "{}", prefill.name);
        assert_eq!(tree(&out.join(&prefill.name)).len(), 2);
        let decode_ports = || decode.inputs.iter().chain(&decode.outputs);
        for port in prefill.inputs.iter().chain(&prefill.outputs) {
            let same = decode_ports().find(|p| p.name == port.name).unwrap();
            assert_eq!((&port.encoding, &port.role, &port.dtype), (&same.encoding, &same.role, &same.dtype));
        }
    }
    // A window of 8, a context of 40.
    for (kind, capacity) in [("sliding", 7), ("full", 39)] {
        let mask = &prefill.masks[kind];
        assert_eq!((mask.rows, mask.length, mask.current_index), (6, capacity + 6, capacity));
        assert_eq!(mask.blocked, manifest.masks[kind].blocked);
    }
    // The record of the artifact has them, too.
    let record = read_json(&out.join("spark-convert.json"));
    assert_eq!(record["options"]["prefill"], 6);
    for file in ["prefill_layer_03/model.onnx", "prefill_layer_03/model.data"] {
        assert!(record["files"][file]["sha256"].is_string(), "{file}");
    }
    // Of a whole step the head comes last, and is left out.
    export(&model, "whole", &["--precision", "fp32", "--prefill", "6"]);
    let data =
        |graph: &str| fs::read(model.root.path().join("whole").join(graph).join("model.data")).unwrap();
    let (prefill, decode) = (data("prefill"), data("step"));
    assert!(decode.starts_with(&prefill));
    // The head has 448 rows of 128.
    assert_eq!(decode.len(), prefill.len().next_multiple_of(4096) + 448 * 128 * 4);
    // A second run finds everything as it was.
    let mut args = vec!["export-npu", model.dir.to_str().unwrap(), "--out", "out", "--context", "40"];
    args.extend(options);
    assert!(crate::runs::run(model.root.path(), args).expect(0).stdout.contains("up to date"));
}

#[test]
fn calls_that_cannot_be_are_refused() {
    let model = Model::new(FixtureSpec::tiny());
    let fp32 = ["--precision", "fp32"];
    let without = export(&model, "a", &fp32);
    let whole = export(&model, "b", &[&fp32[..], &["--prefill", "6", "--full-cache", "roll-cache"]].concat());
    let entries = export(&model, "c", &[&fp32[..], &["--prefill", "6"]].concat());
    assert_eq!(
        read_json(&model.root.path().join("b/manifest.json"))["prefill"]["partial_chunks"],
        json!(false)
    );
    let rows = embedded(&entries, &tokens(CONTEXT, 448));
    let refused = |runner: &mut Runner<'_>, count: usize, words: &str| {
        let error = runner.prefill(&rows[..count]).unwrap_err().to_string();
        assert!(error.contains(words), "{words:?} in {error}");
    };
    refused(&mut without.runner().unwrap(), 6, "prefill graphs");
    refused(&mut whole.runner().unwrap(), 5, "5 tokens at once, expected 6");
    let mut runner = entries.runner().unwrap();
    refused(&mut runner, 0, "0 tokens at once, expected 1 to 6");
    refused(&mut runner, 7, "7 tokens at once");
    assert!(runner.prompt(&[]).unwrap_err().to_string().contains("no tokens"));
    assert_eq!(runner.position(), 0);
    runner.prompt(&rows[..CONTEXT - 2]).unwrap();
    refused(&mut runner, 3, "the context of 40 tokens is full");
    // Up to the end of the context the last entry has no slot and needs none.
    runner.prefill(&rows[..2]).unwrap();
    assert_eq!(runner.position(), CONTEXT);
}
