//! Running a plan.

use std::collections::BTreeMap;

use super::plan::{Plan, Source, plan};
use super::tensor::Tensor;
use crate::error::InputError;
use crate::onnx::{Model, ValueInfo};

/// Tensors by the names of the graph's inputs or outputs.
pub type Tensors = BTreeMap<String, Tensor>;

/// A checked model, ready to run. Large weights stay in the mapped data file.
pub struct Session<'a> {
    plan: Plan<'a>,
}

/// Where a computed value is.
enum Slot<'r> {
    Empty,
    Given(&'r Tensor),
    Made(Tensor),
}

impl<'a> Session<'a> {
    /// Checks a model: order, operators and their attributes, types, shapes, the data file's size.
    /// `data` is the whole file of external data; empty if there is none.
    ///
    /// # Errors
    /// At the first thing that is wrong or that is not implemented.
    pub fn new(model: &'a Model, data: &'a [u8]) -> Result<Self, InputError> {
        Ok(Self { plan: plan(model, data)? })
    }

    /// What [`Session::run`] has to be given.
    pub fn inputs(&self) -> impl Iterator<Item = &ValueInfo> {
        self.plan.values[..self.plan.inputs].iter().map(|v| &v.info)
    }

    /// What [`Session::run`] returns.
    pub fn outputs(&self) -> impl Iterator<Item = &ValueInfo> {
        self.plan.outputs.iter().map(|v| &self.plan.values[*v].info)
    }

    /// Computes the outputs.
    ///
    /// # Errors
    /// When an input is missing, has another type or shape, or is none of the graph's.
    pub fn run(&self, inputs: &Tensors) -> Result<Tensors, InputError> {
        self.run_with(inputs, |_, _| ())
    }

    /// Computes the outputs and passes every tensor that a node computes to `tap`, in the order of
    /// the graph. The tap may change elements: what follows is then computed from those, as when
    /// every node is compared on the inputs of a reference.
    ///
    /// What DequantizeLinear makes is not passed: it is the codes, which are.
    ///
    /// # Errors
    /// As [`Session::run`].
    ///
    /// # Panics
    /// When the tap replaces a tensor by one of another type or shape.
    pub fn run_with(
        &self,
        inputs: &Tensors,
        mut tap: impl FnMut(&str, &mut Tensor),
    ) -> Result<Tensors, InputError> {
        let mut slots = self.slots(inputs)?;
        for step in &self.plan.steps {
            let operands: Vec<_> =
                step.inputs.iter().map(|v| self.plan.operand(*v, |v| get(&slots, v))).collect();
            let mut made = step.operator.run(&operands);
            drop(operands);
            let info = &self.plan.values[step.output].info;
            tap(&info.name, &mut made);
            assert!(
                made.element() == info.element && made.shape() == info.shape,
                "{}: type or shape",
                info.name
            );
            slots[step.output] = Slot::Made(made);
            for value in &step.free {
                slots[*value] = Slot::Empty;
            }
        }
        let outputs = self.plan.outputs.iter().map(|value| {
            let tensor = self.plan.operand(*value, |v| get(&slots, v)).tensor().into_owned();
            (self.plan.values[*value].info.name.clone(), tensor)
        });
        Ok(outputs.collect())
    }

    /// The inputs in their slots, checked.
    fn slots<'r>(&self, inputs: &'r Tensors) -> Result<Vec<Slot<'r>>, InputError> {
        let mut slots: Vec<Slot<'r>> = self.plan.values.iter().map(|_| Slot::Empty).collect();
        for (slot, info) in slots.iter_mut().zip(self.inputs()) {
            let error = InputError::default().subject(&info.name);
            let error = error.expected(format!("{} {:?}", info.element, info.shape));
            let Some(tensor) = inputs.get(&info.name) else {
                return Err(error.found("no such input"));
            };
            if tensor.element() != info.element || tensor.shape() != info.shape {
                return Err(error.found(format!("{} {:?}", tensor.element(), tensor.shape())));
            }
            *slot = Slot::Given(tensor);
        }
        if inputs.len() > self.plan.inputs {
            let known: Vec<_> = self.inputs().map(|info| &*info.name).collect();
            let other = inputs.keys().find(|name| !known.contains(&name.as_str()));
            let error = InputError::default().subject(other.map_or("", String::as_str));
            return Err(error
                .expected(format!("one of {}", known.join(", ")))
                .found("an input of that name"));
        }
        Ok(slots)
    }
}

impl std::fmt::Debug for Session<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let in_file = self.plan.values.iter().filter(|v| matches!(v.source, Source::File(_))).count();
        f.debug_struct("Session")
            .field("values", &self.plan.values.len())
            .field("in_file", &in_file)
            .field("steps", &self.plan.steps.len())
            .finish()
    }
}

fn get<'s>(slots: &'s [Slot<'_>], value: usize) -> &'s Tensor {
    match &slots[value] {
        Slot::Given(tensor) => tensor,
        Slot::Made(tensor) => tensor,
        Slot::Empty => panic!("the plan frees value {value} too early"),
    }
}
