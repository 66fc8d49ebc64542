//! From a model to steps: everything is checked here, so that running cannot fail on the graph.

use std::collections::HashMap;

use super::codes::{Encoding, Operand, Raw, View};
use super::context::{Argument, Context, Operator, Result};
use super::ops;
use super::tensor::{Data, Tensor};
use crate::error::InputError;
use crate::onnx::{ElementType, Graph, Initializer, Model, Node, ValueInfo};

/// Operator sets whose semantics are implemented.
const OPSETS: std::ops::RangeInclusive<i64> = 18..=23;
/// Container formats that can hold them.
const IR_VERSIONS: std::ops::RangeInclusive<i64> = 8..=11;
/// Most dimensions of a tensor.
const MAX_RANK: usize = 8;
/// Constants of up to this many bytes are decoded once; larger ones stay where they are.
const DECODE_LIMIT: usize = 1 << 16;

/// Where a value comes from.
pub(super) enum Source<'a> {
    /// The caller, or a step.
    Computed,
    /// An initializer in the mapped file.
    File(Raw<'a>),
    /// An initializer in memory.
    Constant(Tensor),
    /// The codes of another value, with what they mean.
    Dequantized { codes: usize, encoding: Encoding },
}

/// A tensor of the graph.
pub(super) struct Value<'a> {
    pub(super) info: ValueInfo,
    pub(super) source: Source<'a>,
}

/// One operator, in the order of the graph.
pub(super) struct Step {
    pub(super) operator: Box<dyn Operator>,
    pub(super) inputs: Vec<usize>,
    pub(super) output: usize,
    /// Values that nothing reads after this step.
    pub(super) free: Vec<usize>,
}

/// A checked graph.
pub(super) struct Plan<'a> {
    pub(super) values: Vec<Value<'a>>,
    pub(super) steps: Vec<Step>,
    /// The first values.
    pub(super) inputs: usize,
    pub(super) outputs: Vec<usize>,
}

impl<'a> Plan<'a> {
    /// The value that holds the elements: the codes of what is dequantized, or the value itself.
    pub(super) fn stored(&self, value: usize) -> usize {
        match self.values[value].source {
            Source::Dequantized { codes, .. } => codes,
            _ => value,
        }
    }

    /// What an operator reads; `slot` finds the values that were computed.
    pub(super) fn operand<'v>(&'v self, value: usize, slot: impl Fn(usize) -> &'v Tensor) -> Operand<'v> {
        let encoding = match &self.values[value].source {
            Source::Dequantized { encoding, .. } => Some(encoding),
            _ => None,
        };
        let stored = self.stored(value);
        let view = match &self.values[stored].source {
            Source::File(raw) => View::Raw(raw),
            Source::Constant(tensor) => View::Tensor(tensor),
            Source::Computed | Source::Dequantized { .. } => View::Tensor(slot(stored)),
        };
        Operand { view, encoding }
    }
}

/// Checks `model` and makes its plan; `data` is the whole data file.
pub(super) fn plan<'a>(model: &'a Model, data: &'a [u8]) -> Result<Plan<'a>> {
    model.check()?;
    for (what, version, known) in
        [("operator set", model.opset, OPSETS), ("IR version", model.ir_version, IR_VERSIONS)]
    {
        if !known.contains(&version) {
            let expected = format!("{what} {} to {}", known.start(), known.end());
            return Err(InputError::default().expected(expected).found(version));
        }
    }
    let mut planner = Planner {
        opset: model.opset,
        by_name: HashMap::new(),
        plan: Plan {
            values: Vec::new(),
            steps: Vec::new(),
            inputs: model.graph.inputs.len(),
            outputs: Vec::new(),
        },
    };
    for info in &model.graph.inputs {
        planner.add(&info.name, info.clone(), Source::Computed)?;
    }
    for initializer in &model.graph.initializers {
        planner.add_initializer(initializer, data)?;
    }
    for node in &model.graph.nodes {
        planner.add_node(node)?;
    }
    planner.finish(&model.graph)
}

struct Planner<'a> {
    opset: i64,
    by_name: HashMap<&'a str, usize>,
    plan: Plan<'a>,
}

impl<'a> Planner<'a> {
    fn add_initializer(&mut self, initializer: &'a Initializer, data: &'a [u8]) -> Result<()> {
        let (element, shape) = (initializer.element, initializer.shape.clone());
        let bytes = initializer.bytes(data)?;
        let info = ValueInfo::new(&initializer.name, element, shape.clone());
        // Model::check has compared the number of bytes with the shape.
        let source = if bytes.len() > DECODE_LIMIT {
            Source::File(Raw { element, shape, bytes })
        } else {
            Source::Constant(Tensor::made(&shape, Data::from_le_bytes(element, bytes)))
        };
        self.add(&initializer.name, info, source)
    }

    /// Adds a value that nodes may read from here on.
    fn add(&mut self, name: &'a str, info: ValueInfo, source: Source<'a>) -> Result<()> {
        if info.shape.len() > MAX_RANK {
            let expected = format!("at most {MAX_RANK} dimensions");
            return Err(InputError::default().subject(name).expected(expected).found(info.shape.len()));
        }
        self.by_name.insert(name, self.plan.values.len());
        self.plan.values.push(Value { info, source });
        Ok(())
    }

    fn add_node(&mut self, node: &'a Node) -> Result<()> {
        let error = || InputError::default().subject(format!("node {} ({})", node.name, node.op_type));
        let inputs: Vec<usize> = node
            .inputs
            .iter()
            .map(|name| {
                let value = self.by_name.get(name.as_str()).copied();
                value.ok_or_else(|| error().expected("inputs that are computed before").found(name))
            })
            .collect::<Result<_>>()?;
        let [output] = &*node.outputs else {
            return Err(error().expected("one output").found(node.outputs.len()));
        };
        let context = Context {
            node,
            opset: self.opset,
            inputs: inputs.iter().map(|value| self.argument(*value)).collect(),
        };
        if node.op_type == "DequantizeLinear" {
            let encoding = ops::dequantize(&context)?;
            let info = ValueInfo::new(output, ElementType::F32, context.inputs[0].shape);
            return self.add(output, info, Source::Dequantized { codes: inputs[0], encoding });
        }
        let built = ops::build(&context)?;
        context.check_size(&built.shape)?;
        self.add(output, ValueInfo::new(output, built.element, built.shape), Source::Computed)?;
        let output = self.plan.values.len() - 1;
        self.plan.steps.push(Step { operator: built.operator, inputs, output, free: Vec::new() });
        Ok(())
    }

    fn argument(&self, value: usize) -> Argument<'_> {
        let Value { info, source } = &self.plan.values[value];
        let constant = match source {
            Source::File(raw) => Some(View::Raw(raw)),
            Source::Constant(tensor) => Some(View::Tensor(tensor)),
            Source::Computed | Source::Dequantized { .. } => None,
        };
        let quantized = matches!(source, Source::Dequantized { .. });
        Argument { name: &info.name, element: info.element, shape: &info.shape, constant, quantized }
    }

    /// Holds everything to what the model declares of it and finds the outputs.
    fn finish(mut self, graph: &Graph) -> Result<Plan<'a>> {
        for declared in graph.value_infos.iter().chain(&graph.outputs) {
            let error = InputError::default().subject(&declared.name);
            let Some(value) = self.by_name.get(declared.name.as_str()) else {
                let found = format!("none of {} nodes", graph.nodes.len());
                return Err(error.expected("a node that makes it").found(found));
            };
            let info = &self.plan.values[*value].info;
            if declared != info {
                let expected = format!("{} {:?}, as declared", declared.element, declared.shape);
                return Err(error.expected(expected).found(format!("{} {:?}", info.element, info.shape)));
            }
        }
        self.plan.outputs = graph.outputs.iter().map(|output| self.by_name[output.name.as_str()]).collect();
        self.plan_frees();
        Ok(self.plan)
    }

    /// Lists with every step what is read there for the last time. Outputs live on.
    fn plan_frees(&mut self) {
        let mut live: Vec<bool> = vec![false; self.plan.values.len()];
        for output in &self.plan.outputs {
            live[self.plan.stored(*output)] = true;
        }
        for i in (0..self.plan.steps.len()).rev() {
            let step = &self.plan.steps[i];
            let touched = step.inputs.iter().chain([&step.output]).map(|v| self.plan.stored(*v));
            let mut free = Vec::new();
            for value in touched {
                if !std::mem::replace(&mut live[value], true) {
                    free.push(value);
                }
            }
            self.plan.steps[i].free = free;
        }
    }
}
