use super::*;
use crate::npu::encode::Blocked;
use crate::npu::layout::Layout;
use crate::npu::options::{Options, Precision};
use crate::npu::{step, test_config, test_ranges};
use crate::onnx::{PAGE, TensorData};

fn lowered(precision: Precision) -> (LogicalGraph, Layout, Graph) {
    let config = test_config(|_| ());
    let options = Options { context: 24, precision, ..Options::default() };
    let graph = step::graphs(&config, &options).remove(0);
    let layout = Layout::new(&graph, precision).unwrap();
    let encodings = options.is_quantized().then(|| {
        let ranges = test_ranges(&config, |_| None);
        Encodings::new(&graph, &options, &ranges, Blocked::new(&config, Some(&ranges)))
    });
    let out = lower(&graph, &layout.weights, encodings.as_ref());
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

#[test]
fn names_are_unique_and_every_input_is_there_before_it_is_read() {
    for precision in [Precision::W8a16, Precision::Fp32] {
        let (_, layout, graph) = lowered(precision);
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
