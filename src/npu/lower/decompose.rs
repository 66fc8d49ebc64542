//! Norms and GELU as several plain operators, for readers that do not know the newer ones.
//!
//! Nothing inside is encoded, in a quantized graph either: a reader that looks for these patterns finds
//! them as they are in float models, and the manifest lists the nodes as float.

use super::{Lowering, attribute, whole};
use crate::npu::dialect::Dialect;
use crate::npu::logical::{LogicalGraph, Op, TensorId};
use crate::onnx::{AttributeValue, ElementType};

/// `x / sqrt(mean(x^2) + epsilon) * weight`: what each node gives, and its operator. The last gives the
/// result itself.
const RMS_NORM: [(&str, &str); 6] = [
    ("squares", "Pow"),
    ("mean_square", "ReduceMean"),
    ("mean_square_plus", "Add"),
    ("root", "Sqrt"),
    ("quotient", "Div"),
    ("", "Mul"),
];

/// `x (1 + erf(x / sqrt(2))) / 2`.
const GELU: [(&str, &str); 5] =
    [("argument", "Div"), ("erf", "Erf"), ("erf_plus", "Add"), ("doubled", "Mul"), ("", "Mul")];

fn parts(op: Op) -> &'static [(&'static str, &'static str)] {
    match op {
        Op::RmsNorm { .. } => &RMS_NORM,
        Op::Gelu => &GELU,
        _ => &[],
    }
}

/// Whether an operator is written as several.
pub(super) fn applies(op: Op) -> bool {
    !parts(op).is_empty()
}

/// Name of what a node of a decomposed tensor gives; of the last, the tensor's.
fn part_name(tensor: &str, part: &str) -> String {
    if part.is_empty() { tensor.to_owned() } else { format!("{tensor}_{part}") }
}

/// Names of the nodes of a quantized graph that are float.
pub(in crate::npu) fn float_nodes(graph: &LogicalGraph, dialect: Dialect) -> Vec<String> {
    if !dialect.decomposes() {
        return Vec::new();
    }
    let nodes = graph.steps.iter().flat_map(|step| {
        let tensor = &graph.tensor(step.output).name;
        parts(step.op).iter().map(move |(part, op_type)| format!("{}_{op_type}", part_name(tensor, part)))
    });
    nodes.collect()
}

impl Lowering<'_> {
    /// The nodes of a norm or a GELU from `x` to `result`, the reals of the tensor `id`.
    pub(super) fn decomposed(&mut self, op: Op, id: TensorId, x: &str, result: &str) {
        let tensor = self.graph.tensor(id);
        let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
        let last_axis = shape.len() - 1;
        let mut value = x.to_owned();
        let mut reduced = shape.clone();
        for (part, op_type) in parts(op) {
            // On the right of the value that runs through.
            let other = match (op, *part) {
                (Op::RmsNorm { .. }, "squares") => Some(self.real("two", 2.0)),
                (Op::RmsNorm { .. }, "mean_square") => {
                    reduced[last_axis] = 1;
                    Some(self.integers(&[whole(last_axis)]))
                }
                (Op::RmsNorm { epsilon, .. }, "mean_square_plus") => Some(self.real("epsilon", epsilon)),
                (Op::RmsNorm { weight, .. }, "") => Some(self.read_weight(weight)),
                (Op::Gelu, "argument") => Some(self.real("root_of_two", std::f32::consts::SQRT_2)),
                (Op::Gelu, "erf_plus") => Some(self.real("one", 1.0)),
                (Op::Gelu, "") => Some(self.real("half", 0.5)),
                (_, "quotient" | "doubled") => {
                    reduced.clone_from(&shape);
                    // x over the root, x times the sum: x is on the left.
                    Some(std::mem::replace(&mut value, x.to_owned()))
                }
                _ => None,
            };
            let attributes = match *op_type {
                "ReduceMean" => vec![attribute("keepdims", AttributeValue::Int(1))],
                _ => Vec::new(),
            };
            let output = if part.is_empty() { result.to_owned() } else { part_name(&name, part) };
            let inputs = [Some(value), other].into_iter().flatten().collect();
            self.node(&part_name(&name, part), op_type, inputs, &output, attributes);
            self.value(&output, ElementType::F32, reduced.clone());
            value = output;
        }
    }
}
