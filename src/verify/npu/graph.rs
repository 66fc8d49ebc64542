//! The form of a written graph: what goes in and out, that nothing is left over, that the operators are
//! those that compile, and that attention is grouped.

use std::collections::{HashMap, HashSet};

use super::ExportFiles;
use super::view::{Origin, View, attribute};
use crate::npu::manifest::{GraphInfo, TensorInfo};
use crate::onnx::{AttributeValue, Node, TensorData, ValueInfo};
use crate::spark::SparkConfig;
use crate::verify::Finding;

/// Largest rank that the compilers take.
const MAX_RANK: usize = 4;

/// Operators that a step must not have, and why.
const FORBIDDEN: [(&str, &str); 13] = [
    ("Exp", "softmax must stay one node: in pieces it does not compile quantized"),
    ("ReduceMax", "softmax must stay one node: in pieces it does not compile quantized"),
    ("ReduceSum", "a product and a sum in place of a MatMul do not compile quantized"),
    ("Tile", "keys and values must not be repeated for the query heads of a group"),
    ("Expand", "keys and values must not be repeated for the query heads of a group"),
    ("Tanh", "GELU must be the exact form that the model was trained with"),
    ("ScatterND", "the graph must not write slots of a cache"),
    ("ScatterElements", "the graph must not write slots of a cache"),
    ("If", "control flow does not compile"),
    ("Loop", "control flow does not compile"),
    ("Scan", "control flow does not compile"),
    ("Shape", "shapes are static"),
    ("Range", "shapes are static"),
];

/// Everything about the form of a graph.
pub(super) fn check_graph(
    view: &View<'_>,
    files: &ExportFiles,
    index: usize,
    config: &SparkConfig,
) -> Vec<Finding> {
    let manifest = files.manifest();
    let info = &manifest.graphs[index];
    let mut findings = Vec::new();
    if view.opset != manifest.opset {
        let what = format!("operator set {}, the manifest says {}", view.opset, manifest.opset);
        findings.push(view.finding("opset_import", what, "converters pick other rules for the operators"));
    }
    findings.extend(check_shapes(view));
    findings.extend(check_ports(view, "input", &view.graph.inputs, &info.inputs));
    findings.extend(check_ports(view, "output", &view.graph.outputs, &info.outputs));
    findings.extend(check_leftovers(view));
    findings.extend(check_data(view));
    findings.extend(check_operators(view, info));
    findings.extend(check_attributes(view, config));
    findings.extend(check_attention(view, info, config));
    findings
}

/// Static shapes are the only ones that can be read; here that every tensor has one, of a rank that fits.
fn check_shapes(view: &View<'_>) -> Vec<Finding> {
    let graph = view.graph;
    let mut findings = Vec::new();
    let tensors = graph.inputs.iter().map(|i| &i.name);
    for name in tensors.chain(graph.nodes.iter().flat_map(|n| &n.outputs)) {
        match view.shape(name) {
            None => {
                findings.push(view.finding(name, "no shape is declared", "a compiler needs static shapes"))
            }
            Some(shape) if shape.len() > MAX_RANK => {
                let what = format!("rank {} of {shape:?}, expected at most {MAX_RANK}", shape.len());
                findings.push(view.finding(name, what, "HTP has no tensors of a higher rank"));
            }
            Some(_) => {}
        }
    }
    findings
}

fn check_ports(view: &View<'_>, side: &str, found: &[ValueInfo], expected: &[TensorInfo]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for info in expected {
        let Some(port) = found.iter().find(|p| p.name == info.name) else {
            let what = format!("no {side} of that name, and the manifest has one");
            findings.push(view.finding(&info.name, what, "a runtime cannot feed or read it"));
            continue;
        };
        if port.shape != info.shape || port.element.name() != info.dtype {
            let what = format!(
                "{} {:?}, the manifest says {} {:?}",
                port.element, port.shape, info.dtype, info.shape
            );
            findings.push(view.finding(&info.name, what, "a runtime feeds or reads the wrong bytes"));
        }
    }
    for port in found.iter().filter(|p| expected.iter().all(|info| info.name != p.name)) {
        let what = format!("an {side} that the manifest does not have");
        findings.push(view.finding(&port.name, what, "no runtime knows what it is"));
    }
    findings
}

/// Nodes, inputs and constants that nothing reads, and tensors that nothing makes.
fn check_leftovers(view: &View<'_>) -> Vec<Finding> {
    let graph = view.graph;
    let mut findings = Vec::new();
    let unread = |name: &str| view.readers(name).is_empty() && !view.outputs.contains(name);
    for node in &graph.nodes {
        if let Some(output) = node.outputs.iter().find(|o| unread(o)) {
            let what = format!("nothing reads its result {output}");
            findings.push(view.finding(
                &node.name,
                what,
                "a compiler drops the node, or a part of the step is cut off",
            ));
        }
        for input in node.inputs.iter().filter(|i| matches!(view.origin(i), Origin::Missing)) {
            findings.push(view.finding(
                &node.name,
                format!("nothing makes its input {input}"),
                "the graph does not load",
            ));
        }
    }
    for input in graph.inputs.iter().filter(|i| unread(&i.name)) {
        findings.push(view.finding(
            &input.name,
            "nothing reads this input",
            "what the runtime feeds has no effect",
        ));
    }
    for constant in graph.initializers.iter().filter(|i| unread(&i.name)) {
        findings.push(view.finding(&constant.name, "nothing reads this constant", "a weight is not in use"));
    }
    for output in graph.outputs.iter().filter(|o| matches!(view.origin(&o.name), Origin::Missing)) {
        findings.push(view.finding(&output.name, "nothing makes this output", "the graph does not load"));
    }
    let known: HashSet<&str> = graph.nodes.iter().flat_map(|n| &n.outputs).map(String::as_str).collect();
    for value in graph.value_infos.iter().filter(|v| !known.contains(v.name.as_str())) {
        findings.push(view.finding(&value.name, "declared, and no node makes it", "strict readers stop"));
    }
    findings
}

/// Constants lie inside the data file, each in bytes of its own.
fn check_data(view: &View<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut ranges = Vec::new();
    for constant in &view.graph.initializers {
        if let Err(e) = constant.bytes(view.data) {
            let what = format!("expected {}, found {}", e.expected, e.found);
            findings.push(view.finding(
                &constant.name,
                what,
                "the data is cut off: no consumer loads the graph",
            ));
        }
        if let TensorData::External { offset, length } = constant.data {
            ranges.push((offset, length, constant.name.as_str()));
        }
    }
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        // A reader has refused offsets and lengths whose sum is no offset.
        if pair[0].0 + pair[0].1 > pair[1].0 {
            let what = format!("lies over the bytes of {}", pair[0].2);
            findings.push(view.finding(pair[1].2, what, "two weights are one"));
        }
    }
    findings
}

fn check_operators(view: &View<'_>, info: &GraphInfo) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut kinds: HashMap<&str, usize> = HashMap::new();
    for node in &view.graph.nodes {
        *kinds.entry(&node.op_type).or_default() += 1;
        if let Some((_, why)) = FORBIDDEN.iter().find(|(op, _)| *op == node.op_type) {
            findings.push(view.finding(&node.name, format!("the operator {}", node.op_type), why));
        }
    }
    let count = |ops: &[&str]| ops.iter().map(|op| kinds.get(op).copied().unwrap_or(0)).sum::<usize>();
    let (layers, head) = (info.layers.len(), usize::from(info.head));
    for (what, found, expected, consequence) in [
        (
            "Softmax",
            count(&["Softmax"]),
            layers,
            "attention must have one of each layer, or it does not compile",
        ),
        ("Sigmoid", count(&["Sigmoid"]), layers, "each layer gates its heads once"),
        ("exact GELUs", count(&["Gelu", "Erf"]), layers, "each layer has one exact GELU"),
        (
            "RMS norms",
            count(&["RMSNormalization", "ReduceMean"]),
            2 * layers + head,
            "a layer has two, and the head has the last",
        ),
        ("linears (Gemm)", count(&["Gemm"]), 8 * layers + head, "a layer has eight, and the head is one"),
    ] {
        if found != expected {
            let what = format!("expected {expected} {what} for {layers} layers, found {found}");
            findings.push(view.finding(&info.name, what, consequence));
        }
    }
    findings
}

/// Attributes that change the arithmetic.
fn check_attributes(view: &View<'_>, config: &SparkConfig) -> Vec<Finding> {
    let mut findings = Vec::new();
    for node in &view.graph.nodes {
        let int = |name: &str| match attribute(node, name) {
            Some(AttributeValue::Int(i)) => Some(*i),
            _ => None,
        };
        let rank = node.outputs.first().and_then(|o| view.shape(o)).map_or(0, <[usize]>::len);
        let last = |axis: i64| axis == -1 || usize::try_from(axis).is_ok_and(|axis| axis + 1 == rank);
        let mut fail = |what: String, why: &str| findings.push(view.finding(&node.name, what, why));
        match node.op_type.as_str() {
            "Gelu" => match attribute(node, "approximate") {
                None => {}
                Some(AttributeValue::String(form)) if form.is_empty() || form == "none" => {}
                Some(form) => fail(
                    format!("expected the exact form, approximate none, found {form:?}"),
                    "the model was trained with the exact GELU, and tanh is slower on HTP",
                ),
            },
            "Softmax" if !int("axis").is_none_or(last) => {
                fail(
                    format!("axis {:?}, expected the last", int("axis")),
                    "probabilities are over the wrong axis",
                );
            }
            "RMSNormalization" => {
                #[expect(clippy::cast_possible_truncation, reason = "as the reference adds it")]
                let expected = config.rms_norm_eps as f32;
                let epsilon = match attribute(node, "epsilon") {
                    Some(AttributeValue::Float(epsilon)) => *epsilon,
                    _ => 1e-5,
                };
                if (epsilon - expected).abs() > 1e-6 * expected || !int("axis").is_none_or(last) {
                    let what =
                        format!("epsilon {epsilon}, axis {:?}; expected {expected}, the last", int("axis"));
                    fail(what, "the norm is another than the model was trained with");
                }
            }
            "Gemm" if int("transB") != Some(1) => {
                fail(
                    format!("transB {:?}, expected 1", int("transB")),
                    "weights are rows of output channels, and are read as columns",
                );
            }
            _ => {}
        }
    }
    findings
}

/// Products of two activations: scores and weighted values of each layer, heads of a group as rows.
fn check_attention(view: &View<'_>, info: &GraphInfo, config: &SparkConfig) -> Vec<Finding> {
    let heads = config.num_key_value_heads;
    let group = config.num_attention_heads / heads.max(1);
    let of_activations = |node: &&Node| {
        node.op_type == "MatMul"
            && !node.inputs.get(1).is_some_and(|input| match view.origin(input) {
                Origin::Constant(_) => true,
                Origin::Dequantized(dq) => view.weight_of(dq).is_some(),
                _ => false,
            })
    };
    let products: Vec<&Node> = view.graph.nodes.iter().filter(of_activations).collect();
    let mut findings = Vec::new();
    for node in &products {
        let shape = node.outputs.first().and_then(|o| view.shape(o)).unwrap_or_default();
        if !matches!(shape, [n, _, rows, _] if *n == heads && *rows == group) {
            let what =
                format!("shape {shape:?}, expected [{heads}, 1, {group}, ..]: the query heads of a key head");
            let consequence = "keys and values are repeated for every query head, or heads are mixed up";
            findings.push(view.finding(&node.name, what, consequence));
        }
    }
    if products.len() != 2 * info.layers.len() {
        let what =
            format!("expected {} products of activations, found {}", 2 * info.layers.len(), products.len());
        findings.push(view.finding(
            &info.name,
            what,
            "attention is one product with the keys and one with the values",
        ));
    }
    findings
}
