//! The ONNX container: the part of the format that the exporter writes, as plain types, and the way
//! to bytes and back.
//!
//! Shapes are static, operators are of the default domain, an initializer is either inside the model
//! or a page-aligned range of one data file beside it. What is beyond that (dynamic dimensions,
//! subgraphs, functions, sparse tensors, other domains) is refused by name when a model is read. The
//! bytes depend on the model alone.

mod convert;
mod wire;

use std::fmt;

use crate::error::InputError;

/// Initializers of fewer bytes, and everything that shape inference reads, stay in the model.
pub const INLINE_LIMIT: u64 = 1024;
/// Offsets of external data are multiples of this, so that readers can map them.
pub const PAGE: u64 = 4096;
/// Largest model without its external data; the exporter's are some megabytes.
pub const MAX_MODEL_BYTES: usize = 256 << 20;

/// The element types that the exporter emits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ElementType {
    /// IEEE binary32.
    F32,
    /// Unsigned 8 bits.
    U8,
    /// Signed 8 bits.
    I8,
    /// Unsigned 16 bits.
    U16,
    /// Signed 16 bits.
    I16,
    /// Signed 64 bits: shapes, bounds and axes.
    I64,
}

impl ElementType {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::F32 => 4,
            Self::I64 => 8,
        }
    }

    /// Whether it is one of the quantized types.
    pub fn is_quantized(self) -> bool {
        matches!(self, Self::U8 | Self::I8 | Self::U16 | Self::I16)
    }

    /// The name numpy and the manifest use.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::U8 => "uint8",
            Self::I8 => "int8",
            Self::U16 => "uint16",
            Self::I16 => "int16",
            Self::I64 => "int64",
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Name, type and static shape of a graph input, a graph output or an intermediate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueInfo {
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub element: ElementType,
    /// Dimensions, slowest first; empty for a scalar.
    pub shape: Vec<usize>,
}

impl ValueInfo {
    /// A value of that name, type and shape.
    pub fn new(name: impl Into<String>, element: ElementType, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), element, shape: shape.into() }
    }
}

/// Where the elements of an initializer are; little endian in either place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorData {
    /// In the model.
    Inline(Vec<u8>),
    /// In the data file beside the model.
    External {
        /// First byte, a multiple of [`PAGE`].
        offset: u64,
        /// Number of bytes.
        length: u64,
    },
}

/// A constant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Initializer {
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub element: ElementType,
    /// Dimensions, slowest first; empty for a scalar.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: TensorData,
}

impl Initializer {
    /// An f32 constant inside the model.
    pub fn f32(name: impl Into<String>, shape: impl Into<Vec<usize>>, values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self::inline(name, ElementType::F32, shape, bytes)
    }

    /// An i64 vector inside the model: a shape, bounds, axes.
    pub fn i64(name: impl Into<String>, values: &[i64]) -> Self {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self::inline(name, ElementType::I64, [values.len()], bytes)
    }

    /// A constant inside the model.
    pub fn inline(
        name: impl Into<String>,
        element: ElementType,
        shape: impl Into<Vec<usize>>,
        bytes: Vec<u8>,
    ) -> Self {
        Self { name: name.into(), element, shape: shape.into(), data: TensorData::Inline(bytes) }
    }

    /// The bytes of the elements; `data` is the whole data file.
    ///
    /// # Errors
    /// When they reach past the end of the file.
    pub fn bytes<'a>(&'a self, data: &'a [u8]) -> Result<&'a [u8], InputError> {
        match &self.data {
            TensorData::Inline(bytes) => Ok(bytes),
            TensorData::External { offset, length } => {
                let range = usize::try_from(*offset).ok().zip(usize::try_from(*length).ok());
                let range = range.and_then(|(start, length)| Some(start..start.checked_add(length)?));
                range.and_then(|range| data.get(range)).ok_or_else(|| {
                    InputError::default()
                        .subject(&self.name)
                        .expected(format!("{length} bytes of external data from byte {offset}"))
                        .found(format!("a data file of {} bytes", data.len()))
                })
            }
        }
    }
}

/// A value of a node's attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum AttributeValue {
    /// INT
    Int(i64),
    /// FLOAT
    Float(f32),
    /// INTS
    Ints(Vec<i64>),
    /// STRING
    String(String),
}

/// A named attribute of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Attribute {
    /// Name.
    pub name: String,
    /// Value.
    pub value: AttributeValue,
}

/// An operator of the default domain and what it is applied to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Node {
    /// Unique in the graph.
    pub name: String,
    /// The operator.
    pub op_type: String,
    /// Names of tensors.
    pub inputs: Vec<String>,
    /// Names of tensors.
    pub outputs: Vec<String>,
    /// Attributes.
    pub attributes: Vec<Attribute>,
}

/// Nodes in topological order and what flows between them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// Name of the graph.
    pub name: String,
    /// What the caller supplies, without the initializers.
    pub inputs: Vec<ValueInfo>,
    /// What the caller gets.
    pub outputs: Vec<ValueInfo>,
    /// Types and shapes of intermediates.
    pub value_infos: Vec<ValueInfo>,
    /// Constants.
    pub initializers: Vec<Initializer>,
    /// Operators.
    pub nodes: Vec<Node>,
}

/// A model: a graph and the version of the operators it is written in.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Model {
    /// Version of the container format.
    pub ir_version: i64,
    /// Version of the default operator set.
    pub opset: i64,
    /// The program that wrote it.
    pub producer_name: String,
    /// The version of that program.
    pub producer_version: String,
    /// The graph.
    pub graph: Graph,
}

/// Assigns ranges of a data file, in the order of the calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct DataLayout {
    end: u64,
}

impl DataLayout {
    /// The next page-aligned range of that many bytes; `None` past the end of a file's range.
    pub fn place(&mut self, length: u64) -> Option<TensorData> {
        let offset = self.end.checked_next_multiple_of(PAGE)?;
        self.end = offset.checked_add(length)?;
        i64::try_from(self.end).ok()?;
        Some(TensorData::External { offset, length })
    }

    /// Bytes of the file so far; the gaps before page-aligned ranges are zeros.
    pub fn file_bytes(self) -> u64 {
        self.end
    }
}

/// Product of the dimensions, if it can be the length of something.
pub fn element_count(shape: &[usize]) -> Option<usize> {
    let count = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
    isize::try_from(count).ok()?;
    Some(count)
}

/// Whether `name` is a file name and nothing else: no directory, no parent, no drive.
pub fn is_bare_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', ':', '\0'])
}

#[cfg(test)]
mod tests;
