use super::*;
use crate::npu::encode::Blocked;
use crate::npu::layout::Layout;
use crate::npu::options::{Options, Precision};
use crate::npu::{step, test_config, test_ranges};
use crate::onnx::{PAGE, TensorData};

fn lowered(precision: Precision) -> (LogicalGraph, Layout, Graph) {
    lowered_with(|options| options.precision = precision)
}

fn lowered_with(edit: impl FnOnce(&mut Options)) -> (LogicalGraph, Layout, Graph) {
    let config = test_config(|_| ());
    let mut options = Options { context: 24, ..Options::default() };
    edit(&mut options);
    let graph = step::prefill_graphs(&config, &options).pop();
    let graph = graph.unwrap_or_else(|| step::graphs(&config, &options).remove(0));
    let layout = Layout::new(&graph, &options).unwrap();
    let encodings = options.is_quantized().then(|| {
        let ranges = test_ranges(&config, |_| None);
        Encodings::new(&graph, &options, &ranges, Blocked::new(&config, &options, Some(&ranges)))
    });
    let out = lower(&graph, &layout.weights, encodings.as_ref(), options.dialect);
    (graph, layout, out)
}

fn count(graph: &Graph, op_type: &str) -> usize {
    graph.nodes.iter().filter(|n| n.op_type == op_type).count()
}

#[test]
fn a_float_graph_has_no_quantization_and_the_operators_of_the_model() {
    let (_, _, graph) = lowered(Precision::Fp32);
    assert_eq!(count(&graph, "QuantizeLinear") + count(&graph, "DequantizeLinear"), 0);
    // Two layers of eight linears, and the head.
    assert_eq!(count(&graph, "Gemm"), 17);
    assert_eq!(
        (count(&graph, "RMSNormalization"), count(&graph, "Gelu"), count(&graph, "Softmax")),
        (5, 2, 2)
    );
    // Where a quantized graph re-codes entries of caches.
    assert_eq!(count(&graph, "Identity"), 4);
    assert!(graph.inputs.iter().chain(&graph.outputs).all(|v| v.element == ElementType::F32));
    // int8 weights between float activations are dequantized, one each.
    let (_, _, graph) = lowered(Precision::W8);
    assert_eq!((count(&graph, "QuantizeLinear"), count(&graph, "DequantizeLinear")), (0, 17));
}

#[test]
fn every_operator_of_a_quantized_graph_reads_and_is_read_by_codes() {
    for precision in [Precision::W8a16, Precision::W16a16, Precision::W8a8] {
        let (_, _, graph) = lowered(precision);
        let producer = |name: &String| graph.nodes.iter().find(|n| n.outputs.contains(name));
        let readers =
            |name: &String| graph.nodes.iter().filter(|n| n.inputs.contains(name)).collect::<Vec<_>>();
        let integer = |name: &String| {
            graph.initializers.iter().any(|i| i.name == *name && i.element == ElementType::I64)
        };
        for node in &graph.nodes {
            match node.op_type.as_str() {
                // Two encodings of one tensor follow each other only where a cache begins.
                "QuantizeLinear" => assert!(!integer(&node.inputs[0])),
                "DequantizeLinear" => assert_eq!(readers(&node.outputs[0]).len(), 1, "{}", node.name),
                _ => {
                    for input in node.inputs.iter().filter(|i| !integer(i)) {
                        let from = producer(input).map(|n| n.op_type.as_str());
                        assert_eq!(from, Some("DequantizeLinear"), "{} reads {input}", node.name);
                    }
                    let readers = readers(&node.outputs[0]);
                    assert!(readers.len() == 1 && readers[0].op_type == "QuantizeLinear", "{}", node.name);
                }
            }
        }
        let recoded = |n: &&Node| {
            n.op_type == "QuantizeLinear"
                && producer(&n.inputs[0]).is_some_and(|p| p.op_type == "DequantizeLinear")
        };
        // A key and a value in each of two layers.
        assert_eq!(graph.nodes.iter().filter(recoded).count(), 4);
    }
}

/// What older operator sets do not have is written out; between quantized edges it is float, and listed.
#[test]
fn norms_and_gelu_are_decomposed_and_float_inside() {
    let inner =
        [("Pow", 5), ("ReduceMean", 5), ("Sqrt", 5), ("Erf", 2), ("RMSNormalization", 0), ("Gelu", 0)];
    let (_, _, float) = lowered_with(|o| (o.dialect, o.precision) = (Dialect::Float18, Precision::Fp32));
    let (logical, _, codes) = lowered_with(|o| o.dialect = Dialect::Qdq21);
    for graph in [&float, &codes] {
        for (op_type, expected) in inner {
            assert_eq!(count(graph, op_type), expected, "{op_type}");
        }
    }
    let known =
        "Add Concat Div Erf Gemm Identity MatMul Mul Pow ReduceMean Reshape Sigmoid Slice Softmax Sqrt Sub";
    for node in &float.nodes {
        assert!(known.split(' ').any(|k| k == node.op_type), "{}", node.op_type);
    }
    // Six nodes a norm, five a GELU.
    let listed = float_nodes(&logical, Dialect::Qdq21);
    assert_eq!(listed.len(), 5 * 6 + 2 * 5);
    let is_listed = |node: &Node| listed.contains(&node.name);
    for node in &codes.nodes {
        for reader in codes.nodes.iter().filter(|n| n.inputs.contains(&node.outputs[0])) {
            let edge = ["QuantizeLinear", "DequantizeLinear"];
            let inside = is_listed(node) && is_listed(reader);
            let at_the_edge =
                edge.iter().any(|e| [&node.op_type, &reader.op_type].contains(&&(*e).to_owned()));
            assert!(inside || at_the_edge, "{} reads {}", reader.name, node.name);
        }
    }
    assert_eq!(codes.nodes.iter().filter(|n| is_listed(n)).count(), listed.len());
    assert!(float_nodes(&logical, Dialect::Qdq23).is_empty());
}

/// Several rows are moved between heads and tokens, and nothing else is new.
#[test]
fn a_prefill_graph_has_the_operators_of_the_step_and_transposes() {
    let (_, _, decode) = lowered(Precision::W8a16);
    let (_, _, prefill) = lowered_with(|o| o.prefill = Some(6));
    for op_type in ["MatMul", "Softmax", "Sigmoid", "Gelu", "Concat", "Slice"] {
        assert_eq!(count(&prefill, op_type), count(&decode, op_type), "{op_type}");
    }
    // Without the head.
    assert_eq!((count(&prefill, "Gemm"), count(&prefill, "RMSNormalization")), (16, 4));
    // Queries, keys, values, gates and heads of each layer, and keys into columns.
    assert_eq!(count(&prefill, "Transpose"), 2 * 6);
    assert!(prefill.value_infos.iter().all(|v| v.shape.len() <= 4));
}

#[test]
fn names_are_unique_and_every_input_is_there_before_it_is_read() {
    for (dialect, precision, prefill) in [
        (Dialect::Qdq23, Precision::W8a16, None),
        (Dialect::Qdq23, Precision::Fp32, None),
        (Dialect::Qdq21, Precision::W8a16, Some(5)),
        (Dialect::Float18, Precision::Fp32, Some(9)),
    ] {
        let (_, layout, graph) =
            lowered_with(|o| (o.dialect, o.precision, o.prefill) = (dialect, precision, prefill));
        let mut known: BTreeSet<&str> = BTreeSet::new();
        let mut add = |name| assert!(known.insert(name), "{name} is there twice");
        graph.inputs.iter().for_each(|v| add(&v.name));
        graph.initializers.iter().for_each(|i| add(&i.name));
        layout.weights.iter().flat_map(PlacedWeight::parts).for_each(|p| add(&p.name));
        for node in &graph.nodes {
            for input in &node.inputs {
                assert!(known.contains(input.as_str()), "{} reads {input}", node.name);
            }
            for output in &node.outputs {
                assert!(known.insert(output), "{output} is there twice");
            }
        }
        let nodes: BTreeSet<&str> = graph.nodes.iter().map(|n| n.name.as_str()).collect();
        assert_eq!(nodes.len(), graph.nodes.len());
        // Every result has a static shape, stated once.
        let stated = graph.value_infos.iter().chain(&graph.outputs);
        let stated: Vec<&str> = stated.map(|v| v.name.as_str()).collect();
        assert_eq!(stated.len(), graph.nodes.len());
        assert!(graph.nodes.iter().all(|n| stated.contains(&n.outputs[0].as_str())));
    }
}

#[test]
fn constants_that_shapes_depend_on_are_in_the_model_and_large_ones_on_pages() {
    let (graph, layout, lowered) = lowered(Precision::W8a16);
    assert!(lowered.initializers.iter().all(|i| matches!(i.data, TensorData::Inline(_))));
    let mut end = 0;
    for (weight, placed) in graph.weights.iter().zip(&layout.weights) {
        let [scale, zero_point] = placed.grid.as_ref().unwrap();
        assert_eq!(scale.shape, zero_point.shape);
        for part in placed.parts() {
            let Some(offset) = part.offset else {
                assert!(part.len_bytes() < 1024, "{}", part.name);
                continue;
            };
            assert!(offset % PAGE == 0 && offset >= end, "{}", part.name);
            end = offset + part.len_bytes();
        }
        let rows = weight.shape()[0];
        match weight.name.contains("g_proj") || weight.name.contains("norm") {
            true => assert!(scale.shape.is_empty(), "{}", weight.name),
            false => assert_eq!(scale.shape, [rows], "{}", weight.name),
        }
    }
    assert_eq!(layout.file_bytes, end);
}
