use std::collections::BTreeMap;

use super::*;
use crate::npu::test_config;

fn shape_of(graph: &LogicalGraph, name: &str) -> Vec<usize> {
    let tensor = graph.tensors.iter().find(|t| t.name == name);
    tensor.unwrap_or_else(|| panic!("{name} is not in {}", graph.name)).shape.clone()
}

fn options(edit: impl FnOnce(&mut Options)) -> Options {
    let mut options = Options { context: 24, ..Options::default() };
    edit(&mut options);
    options
}

/// The table of the contract, with H 64, N 2, R 2, D 16, a window of 8, a context of 24 and rotary
/// dimensions 16 and 4.
#[test]
fn inputs_and_outputs_have_the_names_and_shapes_of_the_contract() {
    let graphs = graphs(&test_config(|_| ()), &options(|_| ()));
    let [step] = &graphs[..] else { panic!("{} graphs", graphs.len()) };
    let ports = |ports: &[Port]| -> Vec<(String, Vec<usize>)> {
        ports
            .iter()
            .map(|p| (step.tensor(p.tensor).name.clone(), step.tensor(p.tensor).shape.clone()))
            .collect()
    };
    let expected = |list: &[(&str, &[usize])]| -> Vec<(String, Vec<usize>)> {
        list.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())).collect()
    };
    let inputs = expected(&[
        ("hidden_in", &[1, 1, 64]),
        ("rope_cos_sliding", &[1, 1, 1, 8]),
        ("rope_sin_sliding", &[1, 1, 1, 8]),
        ("mask_sliding", &[1, 1, 1, 8]),
        ("rope_cos_full", &[1, 1, 1, 2]),
        ("rope_sin_full", &[1, 1, 1, 2]),
        ("mask_full", &[1, 1, 1, 24]),
        ("past_key_0_in", &[2, 1, 16, 7]),
        ("past_value_0_in", &[2, 1, 7, 16]),
        ("past_key_1_in", &[2, 1, 16, 23]),
        ("past_value_1_in", &[2, 1, 23, 16]),
    ]);
    assert_eq!(ports(&step.inputs), inputs);
    let outputs = expected(&[
        ("logits", &[1, 1, 96]),
        ("past_key_0_out", &[2, 1, 16, 1]),
        ("past_value_0_out", &[2, 1, 1, 16]),
        ("past_key_1_out", &[2, 1, 16, 1]),
        ("past_value_1_out", &[2, 1, 1, 16]),
    ]);
    assert_eq!(ports(&step.outputs), outputs);
    assert_eq!(shape_of(step, "layer_00_scores"), [2, 1, 2, 8]);
    assert_eq!(shape_of(step, "layer_01_probabilities"), [2, 1, 2, 24]);
    assert!(step.tensors.iter().all(|t| t.shape.len() <= 4 && t.shape.iter().all(|d| *d > 0)));
}

/// Counts of a step of one sliding layer (ring/entry), one full layer (roll/cache) and the head, as
/// Qualcomm's compiler counted them in a prototype of the contract.
#[test]
fn a_step_has_the_operators_that_were_measured() {
    let graphs = graphs(&test_config(|_| ()), &options(|o| o.full_cache = CacheKind::RollCache));
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for step in &graphs[0].steps {
        let name = match step.op {
            Op::RmsNorm { .. } => "RmsNorm",
            Op::Gemm { .. } => "FullyConnected",
            Op::MatMul => "MatMul",
            Op::Add => "Add",
            Op::Sub => "Subtract",
            Op::Mul => "Multiply",
            Op::Sigmoid => "Sigmoid",
            Op::Gelu => "Gelu",
            Op::Softmax => "Softmax",
            Op::Reshape => "Reshape",
            Op::Slice { .. } => "StridedSlice",
            Op::Concat { .. } => "Concat",
            Op::Transpose { .. } => "Transpose",
            Op::Recode => "Convert",
        };
        *counts.entry(name).or_default() += 1;
    }
    let expected = BTreeMap::from([
        ("FullyConnected", 17),
        ("MatMul", 4),
        ("RmsNorm", 5),
        ("Gelu", 2),
        ("Sigmoid", 2),
        ("Softmax", 2),
        ("Convert", 4),
        ("Multiply", 20),
        ("Add", 10),
        ("Subtract", 4),
        ("Concat", 8),
        ("StridedSlice", 12),
        ("Reshape", 14),
    ]);
    assert_eq!(counts, expected);
}

#[test]
fn a_split_by_layer_is_the_same_step_cut_at_the_residual() {
    let config = test_config(|_| ());
    let graphs = graphs(&config, &options(|o| o.split = Split::Layer));
    let names: Vec<_> = graphs.iter().map(|g| (g.name.as_str(), g.layers.clone(), g.head)).collect();
    assert_eq!(names, [("layer_00", 0..1, false), ("layer_01", 1..2, false), ("head", 2..2, true)]);
    let inputs = |g: &LogicalGraph| -> Vec<String> {
        g.inputs.iter().map(|p| g.tensor(p.tensor).name.clone()).collect()
    };
    // A layer takes the rotary tables and the mask of its own type only.
    assert_eq!(inputs(&graphs[1])[..4], ["hidden_in", "rope_cos_full", "rope_sin_full", "mask_full"]);
    assert_eq!(inputs(&graphs[2]), ["hidden_in"]);
    for (graph, site) in [
        (&graphs[0], Site::Embedding),
        (&graphs[1], Site::Layer(0, LayerSite::Output)),
        (&graphs[2], Site::Layer(1, LayerSite::Output)),
    ] {
        assert_eq!(graph.tensor(graph.inputs[0].tensor).values, Values::Seen(site, 1.0));
    }
    assert_eq!(graphs[0].tensor(graphs[0].outputs[0].tensor).name, "hidden_out");
    let whole = super::graphs(&config, &options(|_| ()));
    let weights =
        |graphs: &[LogicalGraph]| -> Vec<Weight> { graphs.iter().flat_map(|g| g.weights.clone()).collect() };
    assert_eq!(weights(&graphs), weights(&whole));
}

#[test]
fn weights_are_the_rows_of_the_checkpoint_and_queries_are_scaled() {
    let graphs = graphs(&test_config(|_| ()), &options(|_| ()));
    let find = |name: &str| graphs[0].weights.iter().find(|w| w.name == name).unwrap();
    let qkv = "model.layers.1.self_attn.q_k_v_proj.weight";
    // 4 heads and 2 key heads of 16: rows 0 to 64, 96 and 128; 1 / sqrt(16).
    for (name, rows, factor) in [("q", 0..64, 0.25), ("k", 64..96, 1.0), ("v", 96..128, 1.0)] {
        let weight = find(&format!("layer_01_{name}_proj_weight"));
        assert_eq!((weight.source.as_str(), weight.rows.clone(), weight.factor), (qkv, rows, factor));
        assert_eq!(weight.shape()[1], 64);
    }
    let head = find("head_weight");
    assert_eq!((head.source.as_str(), head.shape()), ("model.embedding.weight", vec![96, 64]));
    assert_eq!(find("layer_00_input_norm_weight").shape(), [64]);
    let untied = test_config(|json| json["tie_word_embeddings"] = false.into());
    let graphs = super::graphs(&untied, &options(|_| ()));
    assert_eq!(graphs[0].weights.last().unwrap().source, "lm_head.weight");
}

#[test]
fn a_whole_cache_is_returned_moved_by_one() {
    let all = options(|o| (o.sliding_cache, o.full_cache) = (CacheKind::RollCache, CacheKind::RollCache));
    let graphs = graphs(&test_config(|_| ()), &all);
    assert_eq!(shape_of(&graphs[0], "past_key_0_out"), [2, 1, 16, 7]);
    assert_eq!(shape_of(&graphs[0], "past_value_1_out"), [2, 1, 23, 16]);
    let output =
        |name: &str| graphs[0].steps.iter().find(|s| graphs[0].tensor(s.output).name == name).unwrap();
    assert_eq!(output("past_key_0_out").op, Op::Slice { axis: 3, start: 1, end: 8 });
    assert_eq!(output("past_value_1_out").op, Op::Slice { axis: 2, start: 1, end: 24 });
}

#[test]
fn dimensions_that_are_not_rotated_pass() {
    let full = |edit: fn(&mut serde_json::Value)| {
        let graphs = graphs(&test_config(edit), &options(|_| ()));
        graphs[0].tensors.iter().any(|t| t.name == "layer_01_key_passed")
    };
    assert!(full(|_| ()));
    assert!(!full(|json| json["rope_parameters"]["full_attention"]["partial_rotary_factor"] = 1.0.into()));
}

/// Six layers are cut into four and two.
#[test]
fn blocks_are_of_four_layers_and_what_is_left() {
    let config = test_config(|json| {
        json["num_hidden_layers"] = 6.into();
        json["layer_types"] = ["sliding_attention", "full_attention"].repeat(3).into();
    });
    let options = options(|o| (o.split, o.prefill) = (Split::Block4, Some(5)));
    let names = |graphs: &[LogicalGraph]| -> Vec<_> {
        graphs.iter().map(|g| (g.name.clone(), g.layers.clone(), g.head)).collect()
    };
    let expected = |prefix: &str| {
        [(format!("{prefix}block_00"), 0..4, false), (format!("{prefix}block_01"), 4..6, false)]
    };
    let decode = graphs(&config, &options);
    assert_eq!(names(&decode)[..2], expected(""));
    assert_eq!(names(&decode)[2], ("head".to_owned(), 6..6, true));
    assert_eq!(names(&prefill_graphs(&config, &options)), expected("prefill_"));
    let input = decode[1].tensor(decode[1].inputs[0].tensor);
    assert_eq!(input.values, Values::Seen(Site::Layer(3, LayerSite::Output), 1.0));
}

/// The table of the contract with five rows: names as in the decode graph, an axis of rows in the
/// residual stream, rotary tables and masks, five entries of every cache.
#[test]
fn prefill_graphs_have_rows_where_the_step_has_one() {
    let config = test_config(|_| ());
    let options = options(|o| o.prefill = Some(5));
    let decode = graphs(&config, &options).remove(0);
    let prefill = prefill_graphs(&config, &options).remove(0);
    let shapes = |graph: &LogicalGraph, ports: &[Port]| -> BTreeMap<String, Vec<usize>> {
        ports
            .iter()
            .map(|p| (graph.tensor(p.tensor).name.clone(), graph.tensor(p.tensor).shape.clone()))
            .collect()
    };
    let mut expected = shapes(&decode, &decode.inputs);
    for (name, shape) in &mut expected {
        match name.as_str() {
            "hidden_in" => shape[1] = 5,
            name if name.starts_with("rope") => shape[2] = 5,
            // The current token is counted already.
            name if name.starts_with("mask") => (shape[2], shape[3]) = (5, shape[3] + 4),
            _ => {}
        }
    }
    assert_eq!(shapes(&prefill, &prefill.inputs), expected);
    let outputs: &[(&str, &[usize])] = &[
        ("hidden_out", &[1, 5, 64]),
        ("past_key_0_out", &[2, 1, 16, 5]),
        ("past_value_0_out", &[2, 1, 5, 16]),
        ("past_key_1_out", &[2, 1, 16, 5]),
        ("past_value_1_out", &[2, 1, 5, 16]),
    ];
    let outputs: BTreeMap<String, Vec<usize>> =
        outputs.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())).collect();
    assert_eq!(shapes(&prefill, &prefill.outputs), outputs);
    // Heads, then tokens; for products all queries of a key head are one matrix.
    assert_eq!(shape_of(&prefill, "layer_01_query_heads"), [1, 4, 5, 16]);
    assert_eq!(shape_of(&prefill, "layer_01_scores"), [2, 1, 10, 28]);
    assert_eq!(shape_of(&prefill, "layer_01_masked_scores"), [1, 4, 5, 28]);
    assert_eq!(shape_of(&prefill, "layer_00_head_gates"), [1, 4, 5, 1]);
    assert_eq!(shape_of(&prefill, "layer_00_heads_in_a_row"), [5, 64]);
    assert!(prefill.tensors.iter().all(|t| t.shape.len() <= 4));
    // The weights of the layers are the first of the step.
    assert_eq!(prefill.weights[..], decode.weights[..prefill.weights.len()]);
    assert_eq!(prefill.weights.len() + 2, decode.weights.len());
}

/// A cache that is returned whole has moved by as many entries as went in.
#[test]
fn a_prefill_graph_moves_a_whole_cache_by_its_rows() {
    let options = options(|o| (o.prefill, o.full_cache) = (Some(5), CacheKind::RollCache));
    let graph = prefill_graphs(&test_config(|_| ()), &options).remove(0);
    let output = graph.steps.iter().find(|s| graph.tensor(s.output).name == "past_key_1_out").unwrap();
    assert_eq!(output.op, Op::Slice { axis: 3, start: 5, end: 28 });
    assert_eq!(shape_of(&graph, "past_value_1_out"), [2, 1, 23, 16]);
}
