//! Mistakes that runtimes make, made here through configuration and weights: each is far from the
//! golden, so the tests against the golden would find it.

use std::collections::HashMap;
use std::ops::Range;

use spark_convert::checkpoint::Checkpoint;
use spark_convert::runtime::{
    Edge, FloatEmbedding, FloatLinear, LayerEdge, LayerParts, Linear, Model, ModelParts, Rounding, State,
};
use spark_convert::spark::LayerType;
use spark_convert::tensor::TensorView;
use tempfile::TempDir;
use xtask::fixtures::FixtureSpec;

use super::{Case, WINDOW, same_bits, snr};
use crate::runs::edit_json;

/// Farther than this is a mistake, not rounding.
const MISTAKE_DB: f64 = 40.0;

/// Bytes in the place of a checkpoint's own, by tensor name.
type Replaced = HashMap<String, Vec<u8>>;

/// The model of a checkpoint with other bytes in some tensors.
fn model_with<'a>(case: &'a Case, replaced: &'a Replaced) -> Model<'a> {
    let lookup = |name: &str| {
        let view = case.view(name)?;
        Some(replaced.get(name).map_or(view, |bytes| TensorView { bytes, ..view }))
    };
    Model::from_views(case.config().clone(), Rounding::None, lookup).unwrap()
}

fn attention(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.self_attn.{part}.weight")
}

/// The rows of a tensor in another order.
fn rows(view: TensorView<'_>, order: impl Iterator<Item = usize>) -> Vec<u8> {
    order.flat_map(|i| view.row_range(i..i + 1)).copied().collect()
}

/// Query heads in another order, each with its gate and its columns of the output projection: only
/// the key head that a query head reads changes.
fn reorder_query_heads(case: &Case, order: &[usize]) -> Replaced {
    let c = case.config();
    let mut replaced = Replaced::new();
    for layer in 0..c.num_hidden_layers() {
        let name = attention(layer, "q_k_v_proj");
        let queries = order.iter().flat_map(|head| head * c.head_dim..(head + 1) * c.head_dim);
        let all = queries.chain(c.q_rows()..c.q_rows() + 2 * c.kv_rows());
        replaced.insert(name.clone(), rows(case.checkpoint.tensor(&name), all));
        let name = attention(layer, "g_proj");
        replaced.insert(name.clone(), rows(case.checkpoint.tensor(&name), order.iter().copied()));
        let name = attention(layer, "out_proj");
        let view = case.checkpoint.tensor(&name);
        let head = view.row_bytes() / order.len();
        let columns = |row: &[u8]| -> Vec<u8> {
            order.iter().flat_map(|i| row[i * head..(i + 1) * head].to_vec()).collect()
        };
        replaced.insert(name.clone(), view.bytes.chunks(view.row_bytes()).flat_map(columns).collect());
    }
    replaced
}

/// The mistake shows from the first position that sees too few or too many keys, and not before.
#[test]
fn a_window_off_by_one_is_seen() {
    for (preset, case) in Case::both() {
        for window in [WINDOW - 1, WINDOW + 1] {
            edit_json(&case.dir.join("config.json"), |c| c["sliding_window"] = window.into());
            let config = Checkpoint::open(&case.dir).unwrap().config;
            assert_eq!(config.sliding_window, window);
            let model = Model::from_views(config, Rounding::None, |name| case.view(name)).unwrap();
            let found = case.logits(&model);
            let first = window.min(WINDOW);
            let before = case.snr(&found, 0..first);
            assert!(before >= 110.0, "{preset}, window {window}: {before} dB before position {first}");
            for positions in [first..first + 1, 17..18, 79..80, first..80] {
                let db = case.snr(&found, positions.clone());
                println!("{preset}, window {window}, positions {positions:?}: {db:.1} dB");
                assert!(db < MISTAKE_DB, "{preset}, window {window}, positions {positions:?}: {db} dB");
            }
        }
    }
}

#[test]
fn gate_and_up_swapped_are_seen() {
    for (preset, case) in Case::both() {
        let swapped = |name: &str| {
            let (gate, up) = ("mlp.gate_proj", "mlp.up_proj");
            case.view(&if name.contains(gate) { name.replace(gate, up) } else { name.replace(up, gate) })
        };
        let model = Model::from_views(case.config().clone(), Rounding::None, swapped).unwrap();
        let db = case.snr(&case.logits(&model), 0..80);
        println!("{preset}: {db:.1} dB");
        assert!(db < MISTAKE_DB, "{preset}: {db} dB");
    }
}

/// Pairs `(2i, 2i + 1)` are the half-split pairs of rows in another order; what is rotated is only
/// ever multiplied with each other, so its order is free otherwise.
#[test]
fn interleaved_rotary_pairs_are_seen() {
    for (preset, case) in Case::both() {
        let c = case.config();
        let reorder = |place: &dyn Fn(usize, usize) -> usize| -> Replaced {
            let layer = |(layer, kind): (usize, &LayerType)| {
                let rope = if *kind == LayerType::Full { c.rope_full } else { c.rope_sliding };
                let rotated = rope.unwrap().rotary_dims;
                let name = attention(layer, "q_k_v_proj");
                let turned = (0..c.q_rows() + c.kv_rows())
                    .map(|i| i / c.head_dim * c.head_dim + place(i % c.head_dim, rotated));
                let values = c.q_rows() + c.kv_rows()..c.q_rows() + 2 * c.kv_rows();
                let bytes = rows(case.checkpoint.tensor(&name), turned.chain(values));
                (name, bytes)
            };
            c.layer_types.iter().enumerate().map(layer).collect()
        };
        // The instrument itself: reversing the dimensions that are not rotated changes nothing.
        let same = reorder(&|i, rotated| if i < rotated { i } else { c.head_dim - 1 - (i - rotated) });
        let db = case.snr(&case.logits(&model_with(&case, &same)), 0..80);
        assert!(db >= 110.0, "{preset}: {db} dB");
        let interleaved = reorder(&|i, rotated| match i {
            i if i >= rotated => i,
            i if i < rotated / 2 => 2 * i,
            i => 2 * (i - rotated / 2) + 1,
        });
        let db = case.snr(&case.logits(&model_with(&case, &interleaved)), 0..80);
        println!("{preset}: {db:.1} dB");
        assert!(db < MISTAKE_DB, "{preset}: {db} dB");
    }
}

/// Key head `h % kv_heads` instead of `h / group`.
#[test]
fn key_heads_dealt_round_robin_are_seen() {
    for (preset, case) in Case::both() {
        let (heads, keys) = (case.config().num_attention_heads, case.config().num_key_value_heads);
        // The instrument: reversed within each group, every head keeps its key head.
        let group = heads / keys;
        let within: Vec<usize> = (0..heads).map(|h| h / group * group + group - 1 - h % group).collect();
        let db = case.snr(&case.logits(&model_with(&case, &reorder_query_heads(&case, &within))), 0..80);
        assert!(db >= 110.0, "{preset}: {db} dB");
        let dealt: Vec<usize> = (0..keys).flat_map(|k| (k..heads).step_by(keys)).collect();
        let db = case.snr(&case.logits(&model_with(&case, &reorder_query_heads(&case, &dealt))), 0..80);
        println!("{preset}: {db:.1} dB");
        assert!(db < MISTAKE_DB, "{preset}: {db} dB");
    }
}

/// `sigmoid(0) = 1/2`: the quick test for a gate that is left out, or that has another activation.
#[test]
fn kf24_gates_of_zero_halve_the_attention_exactly() {
    let root = TempDir::new().unwrap();
    let mut spec = FixtureSpec::square();
    for layer in 0..spec.geometry.layers {
        spec = spec.zero_rows(&format!("model.layers.{layer}.self_attn.g_proj.weight"), 0..4);
    }
    let checkpoint = Checkpoint::open(&spec.write(root.path().join("model")).unwrap().model_dir).unwrap();
    let model =
        Model::from_views(checkpoint.config.clone(), Rounding::None, |name| checkpoint.files.get(name))
            .unwrap();
    let (mut heads, mut compared) = (Vec::new(), 0);
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 512).collect();
    model
        .run(&mut State::new(model.config()), &tokens, &mut |edge, _, rows| match edge {
            Edge::Layer(_, LayerEdge::Heads) => heads = rows.to_vec(),
            Edge::Layer(_, LayerEdge::GatedHeads) => {
                let halves: Vec<f32> = heads.iter().map(|x| x / 2.0).collect();
                assert!(same_bits(rows, &halves) && rows.iter().any(|x| *x != 0.0));
                compared += 1;
            }
            _ => {}
        })
        .unwrap();
    assert_eq!(compared, 8);
}

/// The two forms are at most 4.8e-4 apart, which is looked for where it arises.
#[test]
fn the_activation_is_the_exact_gelu_not_its_tanh_form() {
    let case = Case::new("square");
    let (mut gates, mut activated) = (Vec::new(), Vec::new());
    let model = case.model();
    model
        .run(&mut State::new(case.config()), &case.golden.tokens, &mut |edge, _, rows| match edge {
            Edge::Layer(_, LayerEdge::MlpGate) => gates.extend(rows.iter().map(|x| f64::from(*x))),
            Edge::Layer(_, LayerEdge::MlpActivated) => activated.extend_from_slice(rows),
            _ => {}
        })
        .unwrap();
    assert_eq!(gates.len(), 8 * 80 * case.config().intermediate_size);
    let exact: Vec<f64> = gates.iter().copied().map(gelu).collect();
    let tanh: Vec<f64> = gates.iter().copied().map(gelu_tanh).collect();
    // 1 + erf has an error of 2 units at its own scale, whatever is left of it.
    for ((x, exact), found) in gates.iter().zip(&exact).zip(&activated) {
        let units = (f64::from(*found) - exact).abs() / (x.abs() * f64::from(f32::EPSILON));
        assert!(units <= 2.0, "gelu({x}): {found}, not {exact}: {units} units of x");
    }
    let f32s = |values: &[f64]| -> Vec<f32> { values.iter().map(|x| *x as f32).collect() };
    assert!(snr(&f32s(&exact), &activated) >= 130.0, "{}", snr(&f32s(&exact), &activated));
    let db = snr(&f32s(&tanh), &activated);
    assert!(db < 100.0, "{db} dB");
    let farthest = tanh.iter().zip(&activated).map(|(t, f)| (t - f64::from(*f)).abs()).fold(0.0, f64::max);
    println!("tanh form: {db:.1} dB, at most {farthest:e}");
    assert!(farthest > 1e-5);
}

fn gelu(x: f64) -> f64 {
    x / 2.0 * (1.0 + libm::erf(x / 2f64.sqrt()))
}

fn gelu_tanh(x: f64) -> f64 {
    let inside = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
    x / 2.0 * (1.0 + libm::tanh(inside))
}

/// An up projection that turns the exact activation it will be multiplied with into another form.
struct OtherGelu<'a> {
    gate: FloatLinear<'a>,
    up: FloatLinear<'a>,
    /// What the gate projection goes through instead.
    form: fn(f64) -> f64,
}

impl Linear for OtherGelu<'_> {
    fn in_features(&self) -> usize {
        self.up.in_features()
    }

    fn out_features(&self) -> usize {
        self.up.out_features()
    }

    fn forward_rows(&self, x: &[f32], rows: Range<usize>, y: &mut [f32]) {
        let mut gate = vec![0.0; y.len()];
        self.gate.forward_rows(x, rows.clone(), &mut gate);
        self.up.forward_rows(x, rows, y);
        for (y, gate) in y.iter_mut().zip(gate) {
            let exact = gelu(f64::from(gate));
            if exact != 0.0 {
                *y = (f64::from(*y) * (self.form)(f64::from(gate)) / exact) as f32;
            }
        }
    }
}

#[test]
fn the_tanh_form_is_seen_in_the_logits() {
    for (preset, case) in Case::both() {
        let linear = |name: &str| FloatLinear::new(case.checkpoint.tensor(name), Rounding::None).unwrap();
        let norm = |name: &str| {
            let mut weight = vec![0.0; case.config().hidden_size];
            case.checkpoint.tensor(name).decode_row(0, &mut weight);
            weight
        };
        let with = |form| {
            let layer = |i: usize| {
                let mlp = |part: &str| linear(&format!("model.layers.{i}.mlp.{part}.weight"));
                LayerParts {
                    input_norm: norm(&format!("model.layers.{i}.input_layernorm.weight")),
                    qkv: Box::new(linear(&attention(i, "q_k_v_proj"))),
                    head_gate: Box::new(linear(&attention(i, "g_proj"))),
                    out: Box::new(linear(&attention(i, "out_proj"))),
                    post_attention_norm: norm(&format!("model.layers.{i}.post_attention_layernorm.weight")),
                    mlp_gate: Box::new(mlp("gate_proj")),
                    mlp_up: Box::new(OtherGelu { gate: mlp("gate_proj"), up: mlp("up_proj"), form }),
                    mlp_down: Box::new(mlp("down_proj")),
                }
            };
            let embedding = "model.embedding.weight";
            let model = Model::new(ModelParts {
                config: case.config().clone(),
                embedding: Box::new(FloatEmbedding::new(case.checkpoint.tensor(embedding)).unwrap()),
                layers: (0..case.config().num_hidden_layers()).map(layer).collect(),
                final_norm: norm("model.norm.weight"),
                head: Box::new(linear(embedding)),
                rounding: Rounding::None,
            })
            .unwrap();
            case.snr(&case.logits(&model), 0..80)
        };
        // The instrument: the exact form in place of itself.
        let db = with(gelu);
        assert!(db >= 110.0, "{preset}: {db} dB");
        let db = with(gelu_tanh);
        println!("{preset}: {db:.1} dB");
        assert!(db < 100.0, "{preset}: {db} dB");
    }
}
