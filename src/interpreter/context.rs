//! A node while the plan is made: what it is applied to and what it says.

use super::codes::{Operand, View};
use super::tensor::{Data, Tensor};
use crate::error::InputError;
use crate::onnx::{AttributeValue, ElementType, Node, element_count};

/// Largest computed tensor.
const MAX_ELEMENTS: usize = 1 << 30;

/// One result of checking a node.
pub(super) type Result<T> = std::result::Result<T, InputError>;

/// A checked operator, ready to run.
pub(super) trait Operator: Send + Sync {
    /// Computes the output. The inputs are as they were when the operator was built.
    fn run(&self, inputs: &[Operand<'_>]) -> Tensor;
}

/// What an operator becomes: the type and shape of its output, and how to compute it.
pub(super) struct Built {
    pub(super) element: ElementType,
    pub(super) shape: Vec<usize>,
    pub(super) operator: Box<dyn Operator>,
}

/// Type, shape and, if it is known, value of a node's input.
#[derive(Clone, Copy)]
pub(super) struct Argument<'c> {
    pub(super) name: &'c str,
    /// F32 for what a DequantizeLinear makes.
    pub(super) element: ElementType,
    pub(super) shape: &'c [usize],
    /// For initializers.
    pub(super) constant: Option<View<'c>>,
    /// Whether it is dequantized, so that its codes can be had.
    pub(super) quantized: bool,
}

/// A node, its inputs and the operator set.
pub(super) struct Context<'c> {
    pub(super) node: &'c Node,
    pub(super) inputs: Vec<Argument<'c>>,
    pub(super) opset: i64,
}

impl<'c> Context<'c> {
    /// The beginning of a refusal.
    pub(super) fn error(&self) -> InputError {
        InputError::default().subject(format!("node {} ({})", self.node.name, self.node.op_type))
    }

    /// The inputs, as many as the operator takes.
    pub(super) fn arguments<const N: usize>(&self) -> Result<[Argument<'c>; N]> {
        <[Argument<'c>; N]>::try_from(&*self.inputs)
            .map_err(|_| self.error().expected(format!("{N} inputs")).found(self.inputs.len()))
    }

    /// Refuses attributes that the operator does not have here.
    pub(super) fn known(&self, names: &[&str]) -> Result<()> {
        match self.node.attributes.iter().find(|a| !names.contains(&a.name.as_str())) {
            Some(attribute) => {
                Err(self.error().found(format!("the attribute {}, which is not supported", attribute.name)))
            }
            None => Ok(()),
        }
    }

    /// An attribute.
    pub(super) fn attribute(&self, name: &str) -> Option<&'c AttributeValue> {
        self.node.attributes.iter().find(|a| a.name == name).map(|a| &a.value)
    }

    fn wrong(&self, name: &str, expected: &str, found: &AttributeValue) -> InputError {
        self.error().expected(format!("the attribute {name} to be {expected}")).found(format!("{found:?}"))
    }

    /// An integer attribute or its default.
    pub(super) fn int(&self, name: &str, default: i64) -> Result<i64> {
        match self.attribute(name) {
            None => Ok(default),
            Some(AttributeValue::Int(value)) => Ok(*value),
            Some(other) => Err(self.wrong(name, "an integer", other)),
        }
    }

    /// A float attribute or its default.
    pub(super) fn float(&self, name: &str, default: f32) -> Result<f32> {
        match self.attribute(name) {
            None => Ok(default),
            Some(AttributeValue::Float(value)) => Ok(*value),
            Some(other) => Err(self.wrong(name, "a float", other)),
        }
    }

    /// A string attribute or its default.
    pub(super) fn string(&self, name: &str, default: &'c str) -> Result<&'c str> {
        match self.attribute(name) {
            None => Ok(default),
            Some(AttributeValue::String(value)) => Ok(value),
            Some(other) => Err(self.wrong(name, "a string", other)),
        }
    }

    /// An attribute of integers, if it is there.
    pub(super) fn ints(&self, name: &str) -> Result<Option<&'c [i64]>> {
        match self.attribute(name) {
            None => Ok(None),
            Some(AttributeValue::Ints(values)) => Ok(Some(values)),
            Some(other) => Err(self.wrong(name, "a list of integers", other)),
        }
    }

    /// Requires an integer attribute, given or by default, to have this value.
    pub(super) fn fixed_int(&self, name: &str, default: i64, value: i64) -> Result<()> {
        match self.int(name, default)? {
            found if found == value => Ok(()),
            found => Err(self.error().expected(format!("the attribute {name} to be {value}")).found(found)),
        }
    }

    /// An axis of a tensor of that rank; negative ones count from the end.
    pub(super) fn axis(&self, axis: i64, rank: usize) -> Result<usize> {
        let signed = i64::try_from(rank).unwrap_or(i64::MAX);
        let counted = if axis < 0 { axis.checked_add(signed) } else { Some(axis) };
        counted
            .and_then(|a| usize::try_from(a).ok())
            .filter(|a| *a < rank)
            .ok_or_else(|| self.error().expected(format!("an axis of {rank} dimensions")).found(axis))
    }

    /// Requires an input to be f32.
    pub(super) fn float_input(&self, argument: Argument<'_>) -> Result<()> {
        if argument.element == ElementType::F32 {
            return Ok(());
        }
        Err(self.error().expected(format!("{} to be float32", argument.name)).found(argument.element))
    }

    /// The elements of an input that must be a vector of i64 known in advance.
    pub(super) fn constant_ints(&self, argument: Argument<'_>) -> Result<Vec<i64>> {
        match self.constant(argument)?.data() {
            Data::I64(values) if argument.shape.len() == 1 => Ok(values.clone()),
            other => {
                let found = format!("{} {:?}", other.element(), argument.shape);
                Err(self.error().expected(format!("{} to be a vector of int64", argument.name)).found(found))
            }
        }
    }

    /// The value of an input that must be known in advance.
    pub(super) fn constant(&self, argument: Argument<'_>) -> Result<Tensor> {
        match argument.constant {
            Some(view) => Ok(view.tensor().into_owned()),
            None => Err(self
                .error()
                .expected(format!("{} to be an initializer", argument.name))
                .found("a computed tensor")),
        }
    }

    /// Refuses outputs that no graph of ours comes near.
    pub(super) fn check_size(&self, shape: &[usize]) -> Result<()> {
        if element_count(shape).is_some_and(|n| n <= MAX_ELEMENTS) {
            return Ok(());
        }
        let expected = format!("an output of at most {MAX_ELEMENTS} elements");
        Err(self.error().expected(expected).found(format!("{shape:?}")))
    }

    /// A refusal because of an input's shape.
    pub(super) fn wrong_shape(&self, argument: Argument<'_>, expected: impl std::fmt::Display) -> InputError {
        let found = format!("{:?}", argument.shape);
        self.error().expected(format!("{} to be {expected}", argument.name)).found(found)
    }
}
