//! Written exports, run by the bundled interpreter with the caches owned by their manifests, against the
//! forward pass and against each other.

use std::path::Path;

use spark_convert::checkpoint::Checkpoint;
use spark_convert::npu::runner::{OpenedExport, Runner, decode, encode};
use spark_convert::opened::checkpoint_model;
use spark_convert::runtime::{Rounding, State, argmax};
use xtask::fixtures::FixtureSpec;

use crate::runs::{Model, run};

pub(crate) const CONTEXT: usize = 40;

/// `10 log10(sum r^2 / sum (r - y)^2)`.
pub(crate) fn snr_db(reference: &[f32], other: &[f32]) -> f64 {
    assert_eq!(reference.len(), other.len());
    let signal: f64 = reference.iter().map(|r| f64::from(*r).powi(2)).sum();
    let noise: f64 = reference.iter().zip(other).map(|(r, y)| (f64::from(*r) - f64::from(*y)).powi(2)).sum();
    if noise == 0.0 { 300.0 } else { 10.0 * (signal / noise).log10() }
}

pub(crate) fn tokens(count: usize, vocab: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * 131 + i * i * 7 + 3) % vocab) as u32).collect()
}

pub(crate) fn export(model: &Model, out: &str, options: &[&str]) -> OpenedExport {
    let mut args = vec!["export-npu", model.dir.to_str().unwrap(), "--out", out, "--context", "40"];
    args.extend(options);
    run(model.root.path(), args).expect(0);
    OpenedExport::open(&model.root.path().join(out)).unwrap()
}

/// Texts of tokens like those that the tests run.
pub(crate) fn with_texts(spec: FixtureSpec) -> Model {
    let model = Model::new(spec);
    let text = |i: usize| -> String {
        (0..60).map(|j| char::from(b' ' + ((j * 37 + i * 11 + j * j * (i + 1)) % 95) as u8)).collect()
    };
    let lines: Vec<String> = (0..12).map(|i| serde_json::json!({"text": text(i)}).to_string()).collect();
    std::fs::write(model.root.path().join("texts.jsonl"), lines.join("\n")).unwrap();
    model
}

/// Logits of every step.
pub(crate) fn logits(export: &OpenedExport, runner: &mut Runner<'_>, tokens: &[u32]) -> Vec<Vec<f32>> {
    tokens.iter().map(|t| runner.step(&export.embedding(*t).unwrap()).unwrap().logits).collect()
}

pub(crate) fn forward(dir: &Path, tokens: &[u32]) -> Vec<Vec<f32>> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let model = checkpoint_model(&checkpoint, Rounding::None).unwrap();
    let hidden = model.forward(&mut State::new(model.config()), tokens).unwrap();
    hidden.chunks(model.config().hidden_size).map(|h| model.logits(h)).collect()
}

/// The step is the model: past the window of 8 by far, to the end of the context, in every form.
#[test]
fn a_float_export_is_the_forward_pass() {
    for (spec, options) in [
        (FixtureSpec::tiny(), &["--split", "whole"][..]),
        (FixtureSpec::tiny(), &["--split", "layer", "--sliding-cache", "roll", "--full-cache", "roll-cache"]),
        (FixtureSpec::tiny(), &["--full-cache", "ring"]),
        (FixtureSpec::square(), &[]),
        (FixtureSpec::wide(), &[]),
        (
            FixtureSpec::tiny().edit_config(|c| drop(c.insert("gate_attn_act_mode".into(), "silu".into()))),
            &[],
        ),
    ] {
        let model = Model::new(spec);
        let opened = export(&model, "out", &[&["--precision", "fp32"], options].concat());
        let tokens = tokens(CONTEXT, opened.manifest().model.vocab);
        let found = logits(&opened, &mut opened.runner().unwrap(), &tokens);
        let expected = forward(&model.dir, &tokens);
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(argmax(found), argmax(expected), "{options:?} step {step}");
        }
        let db = snr_db(&expected.concat(), &found.concat());
        assert!(db >= 110.0, "{options:?}: {db} dB");
    }
}

#[test]
fn the_context_ends() {
    let model = Model::new(FixtureSpec::tiny());
    let opened = export(&model, "out", &["--precision", "fp32"]);
    let mut runner = opened.runner().unwrap();
    logits(&opened, &mut runner, &tokens(CONTEXT, 448));
    let error = runner.step(&opened.embedding(3).unwrap()).unwrap_err();
    assert!(error.to_string().contains("the context of 40 tokens is full"), "{error}");
    runner.reset().unwrap();
    assert_eq!(runner.position(), 0);
}

/// Fed the same tokens, integer and float graphs differ by what quantization costs: int8 weights set it,
/// 16-bit activations add nothing to speak of, 8-bit activations ruin it.
#[test]
fn precisions_rank_as_they_were_measured() {
    let model = with_texts(FixtureSpec::square());
    let tokens = tokens(CONTEXT, 512);
    let expected = forward(&model.dir, &tokens).concat();
    let db = |precision: &str| {
        let mut options = vec!["--precision", precision];
        if precision != "w8" {
            options.extend(["--calib", "texts.jsonl"]);
        }
        let opened = export(&model, precision, &options);
        snr_db(&expected, &logits(&opened, &mut opened.runner().unwrap(), &tokens).concat())
    };
    let [w8, w8a16, w16a16, w8a8] = ["w8", "w8a16", "w16a16", "w8a8"].map(db);
    let all = format!("w8 {w8:.2}, w8a16 {w8a16:.2}, w16a16 {w16a16:.2}, w8a8 {w8a8:.2} dB");
    assert!(w8a16 >= w8 - 1.0 && w8a16 >= 18.0, "{all}");
    assert!(w16a16 >= w8a16 + 10.0, "{all}");
    assert!(w8a8 <= w8a16 - 10.0, "{all}");
}

/// Slots may be written in any order, and whole caches moved: the numbers are the same.
#[test]
fn kinds_of_caches_and_splits_agree() {
    let model = with_texts(FixtureSpec::tiny());
    let tokens = tokens(CONTEXT, 448);
    let run = |out: &str, options: &[&str]| {
        let opened = export(&model, out, &[&["--calib", "texts.jsonl"], options].concat());
        logits(&opened, &mut opened.runner().unwrap(), &tokens)
    };
    let default = run("default", &[]);
    assert_eq!(run("layer", &["--split", "layer"]), default);
    for (out, options) in [
        ("a", &["--full-cache", "ring"][..]),
        ("b", &["--full-cache", "roll-cache"]),
        ("c", &["--sliding-cache", "roll"]),
        ("d", &["--sliding-cache", "roll", "--full-cache", "roll-cache"]),
    ] {
        let db = snr_db(&default.concat(), &run(out, options).concat());
        assert!(db >= 60.0, "{options:?}: {db} dB");
    }
}

/// Graph by graph on the float twin's inputs: within a decibel of what int8 weights alone cost.
#[test]
fn every_graph_alone_costs_what_its_weights_cost() {
    let model = with_texts(FixtureSpec::wide());
    let split = ["--split", "layer"];
    let float = export(&model, "float", &[&split[..], &["--precision", "fp32"]].concat());
    let weights = export(&model, "w8", &[&split[..], &["--precision", "w8"]].concat());
    let codes = export(&model, "w8a16", &[&split[..], &["--calib", "texts.jsonl"]].concat());
    let tokens = tokens(CONTEXT, 512);
    let graphs = float.manifest().graphs.len();
    let mut sums = vec![[0.0f64; 3]; graphs];
    let mut reference = float.runner().unwrap();
    let others = [weights.runner().unwrap(), codes.runner().unwrap()];
    for token in tokens {
        let before = Sequence::of(&float, &reference);
        let result = reference.step(&float.embedding(token).unwrap()).unwrap();
        let embedded = float.embedding(token).unwrap();
        for (graph, sums) in sums.iter_mut().enumerate().take(graphs) {
            let hidden = if graph == 0 { &embedded } else { &result.residual[graph - 1] };
            let truth = if graph + 1 == graphs { &result.logits } else { &result.residual[graph] };
            sums[0] += truth.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
            for (i, (export, runner)) in [&weights, &codes].into_iter().zip(&others).enumerate() {
                let found = before.run(export, runner, graph, hidden);
                let noise = truth.iter().zip(&found).map(|(r, y)| (f64::from(*r) - f64::from(*y)).powi(2));
                sums[1 + i] += noise.sum::<f64>();
            }
        }
    }
    for (graph, [signal, weights, codes]) in sums.into_iter().enumerate() {
        let [weights, codes] = [weights, codes].map(|noise| 10.0 * (signal / noise).log10());
        assert!(
            codes >= weights - 1.0,
            "graph {graph}: {codes:.2} dB, and {weights:.2} dB with float activations"
        );
    }
}

/// What a float export feeds its graphs at a position, as reals by name of the input.
struct Sequence(std::collections::BTreeMap<String, Vec<f32>>);

impl Sequence {
    fn of(export: &OpenedExport, runner: &Runner<'_>) -> Self {
        let mut reals = std::collections::BTreeMap::new();
        for (index, graph) in export.manifest().graphs.iter().enumerate() {
            let hidden = graph.inputs.iter().find(|i| i.role == "hidden").unwrap();
            let zeros = encode(hidden, &vec![0.0; export.manifest().model.hidden]).unwrap();
            let inputs = runner.inputs(index, &zeros).unwrap();
            for info in graph.inputs.iter().filter(|i| i.role != "hidden") {
                reals.insert(info.name.clone(), decode(info, &inputs[&info.name]).unwrap());
            }
        }
        Self(reals)
    }

    /// Runs a graph of another export on these inputs; masks are its own, cut to what is seen.
    fn run(&self, export: &OpenedExport, runner: &Runner<'_>, graph: usize, hidden: &[f32]) -> Vec<f32> {
        let info = &export.manifest().graphs[graph];
        let mut inputs = spark_convert::interpreter::Tensors::new();
        for input in &info.inputs {
            let values: Vec<f32> = match input.role.as_str() {
                "hidden" => hidden.to_vec(),
                "mask" => {
                    let blocked = export.manifest().masks[input.layer_type.as_ref().unwrap()].blocked as f32;
                    self.0[&input.name].iter().map(|m| if *m == 0.0 { 0.0 } else { blocked }).collect()
                }
                _ => self.0[&input.name].clone(),
            };
            inputs.insert(input.name.clone(), encode(input, &values).unwrap());
        }
        let outputs = runner.run_graph(graph, &inputs).unwrap();
        let output = info.outputs.iter().find(|o| ["hidden", "logits"].contains(&o.role.as_str())).unwrap();
        decode(output, &outputs[&output.name]).unwrap()
    }
}
