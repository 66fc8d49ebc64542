//! A graph before it has encodings: operators of the model on named tensors of static shape, each of
//! which says where its values come from. Lowering it with encodings gives the quantized graph,
//! without them the float one.

use std::ops::Range;

use super::weights::Weight;
use crate::calibrate::Site;
use crate::spark::LayerType;

/// A tensor of a [`LogicalGraph`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(pub(super) usize);

/// What is known of the values of a tensor, from which its encoding follows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Values {
    /// What was seen at a site, times a factor above zero.
    Seen(Site, f32),
    /// Moved from elsewhere: encoded like the tensors it is moved from or with.
    Moved,
    /// Entries of a cache, in its own signed encoding.
    Cache,
    /// Cosines or sines.
    Unit,
    /// Probabilities.
    Probability,
    /// Results of Sigmoid.
    Sigmoid,
    /// `g sigmoid(g)` of what was seen at a site.
    Silu(Site),
    /// The additive mask of a layer type.
    Mask(LayerType),
    /// The scores of the layer with this number, plus the mask.
    MaskedScores(usize),
}

/// A tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Unique in the graph; names of inputs and outputs are the contract's.
    pub name: String,
    /// Dimensions, slowest first, at most four.
    pub shape: Vec<usize>,
    /// Where its values come from.
    pub values: Values,
}

/// An operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// Root-mean-square norm over the last axis, times the weight with this index.
    RmsNorm {
        /// Index of the weight.
        weight: usize,
        /// Added to the mean square.
        epsilon: f32,
    },
    /// Product with the transpose of the weight with this index.
    Gemm {
        /// Index of the weight.
        weight: usize,
    },
    /// Product of two activations, batched over the leading axes.
    MatMul,
    /// Sum.
    Add,
    /// Difference.
    Sub,
    /// Product, element by element.
    Mul,
    /// Logistic function.
    Sigmoid,
    /// Exact GELU.
    Gelu,
    /// Softmax over the last axis.
    Softmax,
    /// The same elements in another shape.
    Reshape,
    /// A range of an axis.
    Slice {
        /// The axis.
        axis: usize,
        /// First index.
        start: usize,
        /// One past the last.
        end: usize,
    },
    /// One behind the other along an axis.
    Concat {
        /// The axis.
        axis: usize,
    },
    /// Two axes exchanged.
    Transpose {
        /// The one.
        first: usize,
        /// The other.
        second: usize,
    },
    /// The same values in another encoding; in a float graph, nothing.
    Recode,
}

impl Op {
    /// Whether the operator only moves elements, so that its tensors have one encoding.
    pub fn moves(self) -> bool {
        matches!(self, Self::Reshape | Self::Slice { .. } | Self::Concat { .. } | Self::Transpose { .. })
    }
}

/// An operator and what it is applied to.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The operator.
    pub op: Op,
    /// Activations; weights are part of the operator.
    pub inputs: Vec<TensorId>,
    /// The result.
    pub output: TensorId,
}

/// What an input or an output is to the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The residual stream.
    Hidden,
    /// Cosines for a layer type.
    RopeCos(LayerType),
    /// Sines for a layer type.
    RopeSin(LayerType),
    /// Additive mask for a layer type.
    Mask(LayerType),
    /// Keys of a layer.
    KeyCache(usize),
    /// Values of a layer.
    ValueCache(usize),
    /// Logits.
    Logits,
}

/// An input or an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// The tensor.
    pub tensor: TensorId,
    /// What it is.
    pub role: Role,
}

/// A graph.
#[derive(Clone, Debug, PartialEq)]
pub struct LogicalGraph {
    /// `step`, `layer_07`, `prefill`, `head`: also the name of its directory.
    pub name: String,
    /// Layers it holds.
    pub layers: Range<usize>,
    /// Whether it ends in logits.
    pub head: bool,
    /// Tensors.
    pub tensors: Vec<Tensor>,
    /// Operators in topological order.
    pub steps: Vec<Step>,
    /// Weights, in the order of use.
    pub weights: Vec<Weight>,
    /// Inputs, in the order of the contract.
    pub inputs: Vec<Port>,
    /// Outputs, in the order of the contract.
    pub outputs: Vec<Port>,
}

impl LogicalGraph {
    /// A graph of nothing.
    pub fn new(name: String, layers: Range<usize>, head: bool) -> Self {
        Self {
            name,
            layers,
            head,
            tensors: Vec::new(),
            steps: Vec::new(),
            weights: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
        }
    }

    /// A tensor.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.0]
    }

    /// Adds a tensor.
    pub fn add(&mut self, name: impl Into<String>, shape: impl Into<Vec<usize>>, values: Values) -> TensorId {
        self.tensors.push(Tensor { name: name.into(), shape: shape.into(), values });
        TensorId(self.tensors.len() - 1)
    }

    /// Adds an input.
    pub fn input(
        &mut self,
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        values: Values,
        role: Role,
    ) -> TensorId {
        let tensor = self.add(name, shape, values);
        self.inputs.push(Port { tensor, role });
        tensor
    }

    /// Adds an operator and its result, which is a new tensor.
    pub fn apply(
        &mut self,
        op: Op,
        inputs: &[TensorId],
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        values: Values,
    ) -> TensorId {
        let output = self.add(name, shape, values);
        self.steps.push(Step { op, inputs: inputs.to_vec(), output });
        output
    }

    /// The same elements in another shape.
    pub fn reshape(
        &mut self,
        x: TensorId,
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
    ) -> TensorId {
        self.apply(Op::Reshape, &[x], name, shape, Values::Moved)
    }

    /// A range of an axis.
    pub fn slice(
        &mut self,
        x: TensorId,
        name: impl Into<String>,
        axis: usize,
        range: Range<usize>,
    ) -> TensorId {
        let mut shape = self.tensor(x).shape.clone();
        shape[axis] = range.len();
        let op = Op::Slice { axis, start: range.start, end: range.end };
        self.apply(op, &[x], name, shape, Values::Moved)
    }

    /// Tensors one behind the other along an axis.
    pub fn concat(
        &mut self,
        parts: &[TensorId],
        name: impl Into<String>,
        axis: usize,
        values: Values,
    ) -> TensorId {
        let mut shape = self.tensor(parts[0]).shape.clone();
        shape[axis] = parts.iter().map(|part| self.tensor(*part).shape[axis]).sum();
        self.apply(Op::Concat { axis }, parts, name, shape, values)
    }

    /// Two axes exchanged.
    pub fn transpose(
        &mut self,
        x: TensorId,
        name: impl Into<String>,
        first: usize,
        second: usize,
    ) -> TensorId {
        let mut shape = self.tensor(x).shape.clone();
        shape.swap(first, second);
        self.apply(Op::Transpose { first, second }, &[x], name, shape, Values::Moved)
    }

    /// A product with a weight, `[rows, in]` to `[rows, out]`.
    pub fn gemm(&mut self, x: TensorId, weight: Weight, name: impl Into<String>, values: Values) -> TensorId {
        let shape = [self.tensor(x).shape[0], weight.rows.len()];
        self.weights.push(weight);
        let op = Op::Gemm { weight: self.weights.len() - 1 };
        self.apply(op, &[x], name, shape, values)
    }

    /// A norm, `[rows, hidden]` to the same.
    pub fn rms_norm(
        &mut self,
        x: TensorId,
        weight: Weight,
        epsilon: f32,
        name: impl Into<String>,
        values: Values,
    ) -> TensorId {
        let shape = self.tensor(x).shape.clone();
        self.weights.push(weight);
        let op = Op::RmsNorm { weight: self.weights.len() - 1, epsilon };
        self.apply(op, &[x], name, shape, values)
    }
}
