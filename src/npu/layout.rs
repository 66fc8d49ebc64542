//! Where the constants of a graph lie: which of them are in the data file, and at what offset. Depends on
//! shapes and options alone, so that a plan can tell every byte before anything is read.

use super::logical::LogicalGraph;
use super::options::Options;
use super::weights::{Coding, Weight};
use crate::error::{InputError, Result};
use crate::onnx::{DataLayout, ElementType, INLINE_LIMIT, TensorData};

/// One of the constants that stand for a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name of the initializer.
    pub name: String,
    /// Element type.
    pub element: ElementType,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// First byte in the data file; `None` when it is in the model.
    pub offset: Option<u64>,
}

impl Part {
    /// Bytes of the elements.
    pub fn len_bytes(&self) -> u64 {
        self.shape.iter().map(|d| *d as u64).product::<u64>() * self.element.bytes() as u64
    }
}

/// The constants of a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedWeight {
    /// How it is stored.
    pub coding: Coding,
    /// The codes, or the floats.
    pub codes: Part,
    /// Scale and zero point, unless it is stored as floats.
    pub grid: Option<[Part; 2]>,
}

impl PlacedWeight {
    /// All constants, in the order they lie in the file.
    pub fn parts(&self) -> impl Iterator<Item = &Part> {
        std::iter::once(&self.codes).chain(self.grid.iter().flatten())
    }

    /// Bytes of all constants.
    pub fn len_bytes(&self) -> u64 {
        self.parts().map(Part::len_bytes).sum()
    }
}

/// The constants of a graph's weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// In the order of the graph's weights, which is that of the file.
    pub weights: Vec<PlacedWeight>,
    /// Bytes of the data file.
    pub file_bytes: u64,
}

impl Layout {
    /// Lays out the weights of a graph.
    ///
    /// # Errors
    /// When the file would be larger than offsets can say.
    pub fn new(graph: &LogicalGraph, options: &Options) -> Result<Self> {
        let mut data = DataLayout::default();
        let mut place = |name: String, element: ElementType, shape: Vec<usize>| -> Result<Part> {
            let mut part = Part { name, element, shape, offset: None };
            let length = part.len_bytes();
            if length >= INLINE_LIMIT {
                let placed = data.place(length).ok_or_else(|| {
                    InputError::file(&graph.name).subject(&part.name).found("more bytes than a file can have")
                })?;
                if let TensorData::External { offset, .. } = placed {
                    part.offset = Some(offset);
                }
            }
            Ok(part)
        };
        let mut placed = |weight: &Weight| -> Result<PlacedWeight> {
            let coding = Coding::stored(weight.role, options);
            let codes = place(weight.name.clone(), coding.element(), weight.shape())?;
            let grid = match coding.scale_shape(weight) {
                None => None,
                Some(shape) => Some([
                    place(scale_name(&weight.name), ElementType::F32, shape.clone())?,
                    place(zero_point_name(&weight.name), coding.element(), shape)?,
                ]),
            };
            Ok(PlacedWeight { coding, codes, grid })
        };
        let weights = graph.weights.iter().map(&mut placed).collect::<Result<_>>()?;
        Ok(Self { weights, file_bytes: data.file_bytes() })
    }

    /// Bytes of the data file up to the end of the first weights.
    pub fn bytes_of_first(&self, weights: usize) -> u64 {
        let parts = self.weights[..weights].iter().flat_map(PlacedWeight::parts);
        parts.filter_map(|part| Some(part.offset? + part.len_bytes())).max().unwrap_or(0)
    }
}

/// Name of the scale of a tensor.
pub(super) fn scale_name(tensor: &str) -> String {
    format!("{tensor}_scale")
}

/// Name of the zero point of a tensor.
pub(super) fn zero_point_name(tensor: &str) -> String {
    format!("{tensor}_zero_point")
}
