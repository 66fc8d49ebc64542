//! Tensors in memory.

use crate::error::InputError;
use crate::onnx::{ElementType, element_count};

/// The elements of a tensor, slowest dimension first.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// float32
    F32(Vec<f32>),
    /// uint8
    U8(Vec<u8>),
    /// int8
    I8(Vec<i8>),
    /// uint16
    U16(Vec<u16>),
    /// int16
    I16(Vec<i16>),
    /// int64
    I64(Vec<i64>),
}

/// Evaluates an expression on the elements, whatever their type; `wrap` makes [`Data`] of a vector
/// of the same type.
macro_rules! for_each_type {
    ($data:expr, $elements:ident, $wrap:ident => $body:expr) => {
        match $data {
            $crate::interpreter::tensor::Data::F32($elements) => {
                let $wrap = $crate::interpreter::tensor::Data::F32;
                $body
            }
            $crate::interpreter::tensor::Data::U8($elements) => {
                let $wrap = $crate::interpreter::tensor::Data::U8;
                $body
            }
            $crate::interpreter::tensor::Data::I8($elements) => {
                let $wrap = $crate::interpreter::tensor::Data::I8;
                $body
            }
            $crate::interpreter::tensor::Data::U16($elements) => {
                let $wrap = $crate::interpreter::tensor::Data::U16;
                $body
            }
            $crate::interpreter::tensor::Data::I16($elements) => {
                let $wrap = $crate::interpreter::tensor::Data::I16;
                $body
            }
            $crate::interpreter::tensor::Data::I64($elements) => {
                let $wrap = $crate::interpreter::tensor::Data::I64;
                $body
            }
        }
    };
}
pub(super) use for_each_type;

impl Data {
    /// The type of the elements.
    pub fn element(&self) -> ElementType {
        match self {
            Self::F32(_) => ElementType::F32,
            Self::U8(_) => ElementType::U8,
            Self::I8(_) => ElementType::I8,
            Self::U16(_) => ElementType::U16,
            Self::I16(_) => ElementType::I16,
            Self::I64(_) => ElementType::I64,
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        for_each_type!(self, elements, _wrap => elements.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements from their little-endian bytes; a remainder that is no element is left out.
    pub(super) fn from_le_bytes(element: ElementType, bytes: &[u8]) -> Self {
        match element {
            ElementType::F32 => {
                Self::F32(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
            }
            ElementType::U8 => Self::U8(bytes.to_vec()),
            ElementType::I8 => Self::I8(bytes.iter().map(|b| b.cast_signed()).collect()),
            ElementType::U16 => {
                Self::U16(bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect())
            }
            ElementType::I16 => {
                Self::I16(bytes.as_chunks().0.iter().map(|b| i16::from_le_bytes(*b)).collect())
            }
            ElementType::I64 => {
                Self::I64(bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect())
            }
        }
    }
}

/// A type of elements.
pub(super) trait Element: Copy {
    /// The elements, if they are of this type.
    fn slice(data: &Data) -> Option<&[Self]>;
}

macro_rules! element {
    ($($type:ty => $variant:ident),*) => {
        $(impl Element for $type {
            fn slice(data: &Data) -> Option<&[Self]> {
                match data {
                    Data::$variant(elements) => Some(elements),
                    _ => None,
                }
            }
        })*
    };
}
element!(f32 => F32, u8 => U8, i8 => I8, u16 => U16, i16 => I16, i64 => I64);

/// A tensor: as many elements as the product of its dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    shape: Vec<usize>,
    data: Data,
}

impl Tensor {
    /// A tensor of these elements.
    ///
    /// # Errors
    /// When there are not as many as the shape says.
    pub fn new(shape: impl Into<Vec<usize>>, data: Data) -> Result<Self, InputError> {
        let shape = shape.into();
        if element_count(&shape) == Some(data.len()) {
            return Ok(Self { shape, data });
        }
        let expected = format!("the elements of {shape:?}");
        Err(InputError::default().expected(expected).found(format!("{} elements", data.len())))
    }

    /// A tensor from the little-endian bytes of its elements.
    ///
    /// # Errors
    /// When they are not as many as type and shape say.
    pub fn from_le_bytes(
        element: ElementType,
        shape: impl Into<Vec<usize>>,
        bytes: &[u8],
    ) -> Result<Self, InputError> {
        if !bytes.len().is_multiple_of(element.bytes()) {
            let expected = format!("elements of {} bytes", element.bytes());
            return Err(InputError::default().expected(expected).found(format!("{} bytes", bytes.len())));
        }
        Self::new(shape, Data::from_le_bytes(element, bytes))
    }

    /// What an operator has made; the caller knows that the lengths fit.
    pub(super) fn made(shape: &[usize], data: Data) -> Self {
        debug_assert_eq!(element_count(shape), Some(data.len()));
        Self { shape: shape.to_vec(), data }
    }

    /// Dimensions, slowest first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of the elements.
    pub fn element(&self) -> ElementType {
        self.data.element()
    }

    /// The elements.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// The elements, to be changed in place.
    pub fn slice_mut(&mut self) -> SliceMut<'_> {
        match &mut self.data {
            Data::F32(x) => SliceMut::F32(x),
            Data::U8(x) => SliceMut::U8(x),
            Data::I8(x) => SliceMut::I8(x),
            Data::U16(x) => SliceMut::U16(x),
            Data::I16(x) => SliceMut::I16(x),
            Data::I64(x) => SliceMut::I64(x),
        }
    }

    /// The elements, if they are f32.
    pub fn floats(&self) -> Option<&[f32]> {
        f32::slice(&self.data)
    }

    /// The elements alone.
    pub(super) fn into_data(self) -> Data {
        self.data
    }

    /// The elements, if they are f32.
    pub(super) fn into_floats(self) -> Option<Vec<f32>> {
        match self.data {
            Data::F32(floats) => Some(floats),
            _ => None,
        }
    }

    /// The little-endian bytes of the elements.
    pub fn to_le_bytes(&self) -> Vec<u8> {
        for_each_type!(&self.data, elements, _wrap => elements.iter().flat_map(|x| x.to_le_bytes()).collect())
    }
}

/// Elements that may change while their number stays.
#[derive(Debug)]
pub enum SliceMut<'a> {
    /// float32
    F32(&'a mut [f32]),
    /// uint8
    U8(&'a mut [u8]),
    /// int8
    I8(&'a mut [i8]),
    /// uint16
    U16(&'a mut [u16]),
    /// int16
    I16(&'a mut [i16]),
    /// int64
    I64(&'a mut [i64]),
}
