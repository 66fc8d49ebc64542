//! From a logical graph to the nodes of an ONNX graph, with or without encodings.
//!
//! With encodings every operator reads `DequantizeLinear` and is read by `QuantizeLinear`: a compiler
//! takes such a unit for one integer operation. Each reader gets a `DequantizeLinear` of its own, since
//! units must not share one. What a dialect writes as several operators is one reader.

mod decompose;

use std::collections::{BTreeMap, BTreeSet};

pub(super) use decompose::float_nodes;

use super::dialect::Dialect;
use super::encode::Encodings;
use super::encoding::Encoding;
use super::layout::{PlacedWeight, scale_name, zero_point_name};
use super::logical::{LogicalGraph, Op, Port, Step, TensorId};
use crate::onnx::{Attribute, AttributeValue, ElementType, Graph, Initializer, Node, ValueInfo};

/// The graph in ONNX, without the initializers of its weights. `encodings` is `None` for a graph of
/// float activations.
pub fn lower(
    graph: &LogicalGraph,
    weights: &[PlacedWeight],
    encodings: Option<&Encodings>,
    dialect: Dialect,
) -> Graph {
    let mut lowering = Lowering {
        graph,
        weights,
        encodings,
        dialect,
        out: Graph { name: graph.name.clone(), ..Graph::default() },
        constants: BTreeSet::new(),
        readers: BTreeMap::new(),
    };
    for step in &graph.steps {
        lowering.step(step);
    }
    let port = |port: &Port| {
        let tensor = graph.tensor(port.tensor);
        ValueInfo::new(&tensor.name, element(encodings.map(|e| e.of(port.tensor))), tensor.shape.clone())
    };
    let mut out = lowering.out;
    out.inputs = graph.inputs.iter().map(port).collect();
    out.outputs = graph.outputs.iter().map(port).collect();
    // What is an output is declared there.
    out.value_infos.retain(|info| !out.outputs.iter().any(|output| output.name == info.name));
    out
}

/// The element type of a tensor with this encoding, or without one.
pub(super) fn element(encoding: Option<Encoding>) -> ElementType {
    encoding.map_or(ElementType::F32, |e| e.element)
}

struct Lowering<'a> {
    graph: &'a LogicalGraph,
    weights: &'a [PlacedWeight],
    encodings: Option<&'a Encodings>,
    dialect: Dialect,
    out: Graph,
    /// Names of the constants that are there.
    constants: BTreeSet<String>,
    /// How often a tensor was read so far.
    readers: BTreeMap<TensorId, usize>,
}

impl Lowering<'_> {
    fn step(&mut self, step: &Step) {
        let mut inputs: Vec<String> = step.inputs.iter().map(|input| self.read(*input)).collect();
        let (op_type, attributes) = match step.op {
            op if self.dialect.decomposes() && decompose::applies(op) => {
                let result = self.result(step.output);
                self.decomposed(op, step.output, &inputs[0], &result);
                return self.write_computed(step.output, result);
            }
            Op::RmsNorm { weight, epsilon } => {
                inputs.push(self.read_weight(weight));
                let attributes = vec![
                    attribute("axis", AttributeValue::Int(-1)),
                    attribute("epsilon", AttributeValue::Float(epsilon)),
                ];
                ("RMSNormalization", attributes)
            }
            Op::Gemm { weight } => {
                inputs.push(self.read_weight(weight));
                ("Gemm", vec![attribute("transB", AttributeValue::Int(1))])
            }
            Op::MatMul => ("MatMul", Vec::new()),
            Op::Add => ("Add", Vec::new()),
            Op::Sub => ("Sub", Vec::new()),
            Op::Mul => ("Mul", Vec::new()),
            Op::Sigmoid => ("Sigmoid", Vec::new()),
            Op::Gelu => ("Gelu", vec![attribute("approximate", AttributeValue::String("none".to_owned()))]),
            Op::Softmax => ("Softmax", vec![attribute("axis", AttributeValue::Int(-1))]),
            Op::Reshape => {
                let shape: Vec<i64> =
                    self.graph.tensor(step.output).shape.iter().map(|d| whole(*d)).collect();
                inputs.push(self.integers(&shape));
                ("Reshape", Vec::new())
            }
            Op::Slice { axis, start, end } => {
                for value in [start, end, axis] {
                    inputs.push(self.integers(&[whole(value)]));
                }
                ("Slice", Vec::new())
            }
            Op::Transpose { first, second } => {
                let mut order: Vec<i64> =
                    (0..self.graph.tensor(step.output).shape.len()).map(whole).collect();
                order.swap(first, second);
                ("Transpose", vec![attribute("perm", AttributeValue::Ints(order))])
            }
            Op::Concat { axis } => ("Concat", vec![attribute("axis", AttributeValue::Int(whole(axis)))]),
            // From one encoding to another there is nothing between the two operators; without
            // encodings the value keeps its name as an output.
            Op::Recode => match self.encodings {
                Some(_) => return self.write(step.output, inputs.remove(0)),
                None => ("Identity", Vec::new()),
            },
        };
        let result = self.result(step.output);
        let tensor = self.graph.tensor(step.output);
        self.node(&tensor.name, op_type, inputs, &result, attributes);
        self.value(&result, ElementType::F32, tensor.shape.clone());
        self.write_computed(step.output, result);
    }

    /// The name of what an operator computes: the tensor itself, or the reals that become its codes.
    fn result(&self, id: TensorId) -> String {
        let name = &self.graph.tensor(id).name;
        if self.encodings.is_some() { format!("{name}_float") } else { name.clone() }
    }

    /// Encodes a computed result where tensors are codes.
    fn write_computed(&mut self, id: TensorId, result: String) {
        if self.encodings.is_some() {
            self.write(id, result);
        }
    }

    /// The name under which a tensor is read as reals.
    fn read(&mut self, id: TensorId) -> String {
        let tensor = self.graph.tensor(id);
        let Some(encodings) = self.encodings else { return tensor.name.clone() };
        let count = self.readers.entry(id).or_default();
        let name = format!("{}_real_{count}", tensor.name);
        *count += 1;
        let [scale, zero_point] = self.grid(encodings, id);
        let inputs = vec![tensor.name.clone(), scale, zero_point];
        self.node(&name, "DequantizeLinear", inputs, &name, Vec::new());
        self.value(&name, ElementType::F32, tensor.shape.clone());
        name
    }

    /// Encodes the reals named `real` as a tensor.
    fn write(&mut self, id: TensorId, real: String) {
        let tensor = self.graph.tensor(id);
        let Some(encodings) = self.encodings else { return };
        let [scale, zero_point] = self.grid(encodings, id);
        let name = format!("{}_codes", tensor.name);
        self.node(&name, "QuantizeLinear", vec![real, scale, zero_point], &tensor.name, Vec::new());
        self.value(&tensor.name, encodings.of(id).element, tensor.shape.clone());
    }

    /// Names of the scale and the zero point of a tensor, one pair for all that share its encoding.
    fn grid(&mut self, encodings: &Encodings, id: TensorId) -> [String; 2] {
        let leader = &self.graph.tensor(encodings.leader(id)).name;
        let names = [scale_name(leader), zero_point_name(leader)];
        if self.constants.insert(names[0].clone()) {
            let encoding = encodings.of(id);
            let zero_point = encoding.zero_point_bytes();
            self.out.initializers.push(Initializer::f32(&names[0], [], &[encoding.scale]));
            self.out.initializers.push(Initializer::inline(&names[1], encoding.element, [], zero_point));
        }
        names
    }

    /// The name under which a weight is read as reals.
    fn read_weight(&mut self, weight: usize) -> String {
        let PlacedWeight { codes, grid, .. } = &self.weights[weight];
        let Some([scale, zero_point]) = grid else { return codes.name.clone() };
        let name = format!("{}_real", codes.name);
        let axis = match scale.shape.is_empty() {
            true => Vec::new(),
            // Rows are output channels.
            false => vec![attribute("axis", AttributeValue::Int(0))],
        };
        let inputs = vec![codes.name.clone(), scale.name.clone(), zero_point.name.clone()];
        self.node(&name, "DequantizeLinear", inputs, &name, axis);
        self.value(&name, ElementType::F32, codes.shape.clone());
        name
    }

    /// The name of a vector of integers, made when it is first needed.
    fn integers(&mut self, values: &[i64]) -> String {
        let words: Vec<String> = values.iter().map(i64::to_string).collect();
        let name = format!("integers_{}", words.join("_"));
        if self.constants.insert(name.clone()) {
            self.out.initializers.push(Initializer::i64(&name, values));
        }
        name
    }

    /// The name of a real number, made when it is first needed.
    fn real(&mut self, name: &str, value: f32) -> String {
        if self.constants.insert(name.to_owned()) {
            self.out.initializers.push(Initializer::f32(name, [], &[value]));
        }
        name.to_owned()
    }

    fn node(
        &mut self,
        name: &str,
        op_type: &str,
        inputs: Vec<String>,
        output: &str,
        attributes: Vec<Attribute>,
    ) {
        self.out.nodes.push(Node {
            name: format!("{name}_{op_type}"),
            op_type: op_type.to_owned(),
            inputs,
            outputs: vec![output.to_owned()],
            attributes,
        });
    }

    fn value(&mut self, name: &str, element: ElementType, shape: Vec<usize>) {
        self.out.value_infos.push(ValueInfo::new(name, element, shape));
    }
}

fn attribute(name: &str, value: AttributeValue) -> Attribute {
    Attribute { name: name.to_owned(), value }
}

/// Dimensions are far below 2^63: `spark::config` and the options bound them.
fn whole(n: usize) -> i64 {
    i64::try_from(n).expect("a dimension is below 2^63")
}

#[cfg(test)]
#[path = "lower_tests.rs"]
mod tests;
