//! A graph as the rules look at it: who makes a tensor, who reads it, and in which encoding.

use std::collections::{HashMap, HashSet};

use super::ExportFiles;
use crate::onnx::{AttributeValue, ElementType, Graph, Initializer, Node};
use crate::verify::{Check, Finding};

/// A graph with its names resolved.
pub(super) struct View<'a> {
    /// The model's file, relative to the export.
    pub(super) file: &'a str,
    pub(super) graph: &'a Graph,
    pub(super) opset: i64,
    pub(super) data: &'a [u8],
    pub(super) initializers: HashMap<&'a str, &'a Initializer>,
    pub(super) producers: HashMap<&'a str, &'a Node>,
    pub(super) readers: HashMap<&'a str, Vec<&'a Node>>,
    shapes: HashMap<&'a str, &'a [usize]>,
    pub(super) inputs: HashSet<&'a str>,
    pub(super) outputs: HashSet<&'a str>,
}

/// Where an operand of a node comes from.
#[derive(Clone, Copy)]
pub(super) enum Origin<'a> {
    /// Codes that a DequantizeLinear makes reals of.
    Dequantized(&'a Node),
    Constant(&'a Initializer),
    Input,
    Computed(&'a Node),
    Missing,
}

/// An encoding as a QuantizeLinear or a DequantizeLinear states it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Grid {
    pub(super) element: ElementType,
    pub(super) scales: Vec<f32>,
    pub(super) zeros: Vec<i64>,
    /// Whether there is one scale for the whole tensor.
    pub(super) per_tensor: bool,
    /// The axis that scales go along; 1 where the node says nothing.
    pub(super) axis: i64,
}

impl Grid {
    /// The smallest and the largest real that have a code, of an encoding per tensor.
    pub(super) fn extent(&self) -> (f64, f64) {
        let (low, high) = code_range(self.element);
        let real = |code: i64| (code - self.zeros[0]) as f64 * f64::from(self.scales[0]);
        (real(low), real(high))
    }
}

/// The smallest and the largest code of a type.
pub(super) fn code_range(element: ElementType) -> (i64, i64) {
    match element {
        ElementType::U8 => (0, 255),
        ElementType::I8 => (-128, 127),
        ElementType::U16 => (0, 65535),
        ElementType::I16 => (-32768, 32767),
        ElementType::F32 | ElementType::I64 => (0, 0),
    }
}

impl<'a> View<'a> {
    /// The graph with this index, if it could be opened.
    pub(super) fn of(files: &'a ExportFiles, index: usize) -> Option<Self> {
        let opened = files.graphs[index].as_ref()?;
        let graph = &opened.model.graph;
        let mut readers: HashMap<&str, Vec<&Node>> = HashMap::new();
        for node in &graph.nodes {
            for input in &node.inputs {
                readers.entry(input).or_default().push(node);
            }
        }
        let infos = graph.inputs.iter().chain(&graph.outputs).chain(&graph.value_infos);
        let constants = graph.initializers.iter().map(|i| (i.name.as_str(), i.shape.as_slice()));
        Some(Self {
            file: &files.manifest().graphs[index].file,
            graph,
            opset: opened.model.opset,
            data: &opened.data,
            initializers: graph.initializers.iter().map(|i| (i.name.as_str(), i)).collect(),
            producers: graph
                .nodes
                .iter()
                .flat_map(|n| n.outputs.iter().map(move |o| (o.as_str(), n)))
                .collect(),
            readers,
            shapes: infos.map(|i| (i.name.as_str(), i.shape.as_slice())).chain(constants).collect(),
            inputs: graph.inputs.iter().map(|i| i.name.as_str()).collect(),
            outputs: graph.outputs.iter().map(|o| o.name.as_str()).collect(),
        })
    }

    /// A finding about a node or a tensor of the graph.
    pub(super) fn finding(&self, subject: &str, what: impl Into<String>, consequence: &str) -> Finding {
        Finding::new(Check::Contract, self.file, what).subject(subject).consequence(consequence)
    }

    pub(super) fn shape(&self, tensor: &str) -> Option<&'a [usize]> {
        self.shapes.get(tensor).copied()
    }

    pub(super) fn readers(&self, tensor: &str) -> &[&'a Node] {
        self.readers.get(tensor).map_or(&[], Vec::as_slice)
    }

    pub(super) fn origin(&self, tensor: &str) -> Origin<'a> {
        if let Some(initializer) = self.initializers.get(tensor) {
            return Origin::Constant(initializer);
        }
        if self.inputs.contains(tensor) {
            return Origin::Input;
        }
        match self.producers.get(tensor) {
            Some(node) if node.op_type == "DequantizeLinear" => Origin::Dequantized(node),
            Some(node) => Origin::Computed(node),
            None => Origin::Missing,
        }
    }

    /// The constant that a DequantizeLinear reads, if it is a weight's.
    pub(super) fn weight_of(&self, dequantize: &Node) -> Option<&'a Initializer> {
        self.initializers.get(dequantize.inputs.first()?.as_str()).copied()
    }

    /// The encoding of a QuantizeLinear or DequantizeLinear, unless its parts are no constants, lie outside
    /// the data file or don't fit together.
    pub(super) fn grid(&self, node: &Node) -> Option<Grid> {
        let constant = |i: usize| self.initializers.get(node.inputs.get(i)?.as_str()).copied();
        let (scale, zero) = (constant(1)?, constant(2)?);
        let (scale_bytes, zero_bytes) = (scale.bytes(self.data).ok()?, zero.bytes(self.data).ok()?);
        let scales: Vec<f32> = scale_bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let zeros = codes(zero.element, zero_bytes)?;
        let fits = scale.element == ElementType::F32
            && scale.shape == zero.shape
            && scale.shape.len() <= 1
            && scales.len() == zeros.len()
            && !scales.is_empty();
        let axis = match attribute(node, "axis") {
            Some(AttributeValue::Int(axis)) => *axis,
            _ => 1,
        };
        let per_tensor = scale.shape.is_empty();
        fits.then_some(Grid { element: zero.element, scales, zeros, per_tensor, axis })
    }

    /// The encoding in which the result of a node is stored.
    pub(super) fn output_grid(&self, node: &Node) -> Option<Grid> {
        let output = node.outputs.first()?;
        let quantize = self.readers(output).iter().find(|n| n.op_type == "QuantizeLinear")?;
        self.grid(quantize)
    }
}

/// An attribute of a node.
pub(super) fn attribute<'n>(node: &'n Node, name: &str) -> Option<&'n AttributeValue> {
    node.attributes.iter().find(|a| a.name == name).map(|a| &a.value)
}

/// Codes from their little-endian bytes; `None` of a type that is no code.
pub(super) fn codes(element: ElementType, bytes: &[u8]) -> Option<Vec<i64>> {
    Some(match element {
        ElementType::U8 => bytes.iter().map(|b| i64::from(*b)).collect(),
        ElementType::I8 => bytes.iter().map(|b| i64::from(b.cast_signed())).collect(),
        ElementType::U16 => bytes.as_chunks().0.iter().map(|b| i64::from(u16::from_le_bytes(*b))).collect(),
        ElementType::I16 => bytes.as_chunks().0.iter().map(|b| i64::from(i16::from_le_bytes(*b))).collect(),
        ElementType::F32 | ElementType::I64 => return None,
    })
}
