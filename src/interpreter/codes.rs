//! What operators read: tensors, constants that stay in the mapped file, and quantized tensors
//! together with their encoding.

use std::borrow::Cow;
use std::ops::Range;

use rayon::prelude::*;

use super::tensor::{Data, Tensor};
use crate::onnx::ElementType;
use crate::simd::multiversion;

/// Elements that one task converts; no effect on results.
pub(super) const CHUNK: usize = 1 << 14;

/// A constant as it lies in the model or its data file.
#[derive(Clone, Debug)]
pub(super) struct Raw<'a> {
    pub(super) element: ElementType,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: &'a [u8],
}

/// A tensor in memory or in a file.
#[derive(Clone, Copy, Debug)]
pub(super) enum View<'v> {
    Tensor(&'v Tensor),
    Raw(&'v Raw<'v>),
}

impl<'v> View<'v> {
    pub(super) fn shape(self) -> &'v [usize] {
        match self {
            Self::Tensor(tensor) => tensor.shape(),
            Self::Raw(raw) => &raw.shape,
        }
    }

    /// In memory.
    pub(super) fn tensor(self) -> Cow<'v, Tensor> {
        match self {
            Self::Tensor(tensor) => Cow::Borrowed(tensor),
            Self::Raw(raw) => {
                Cow::Owned(Tensor::made(&raw.shape, Data::from_le_bytes(raw.element, raw.bytes)))
            }
        }
    }

    /// The codes, if the type is a quantized one.
    pub(super) fn codes(self) -> Option<Codes<'v>> {
        Some(match self {
            Self::Tensor(tensor) => match tensor.data() {
                Data::U8(x) => Codes::U8(x),
                Data::I8(x) => Codes::I8(x),
                Data::U16(x) => Codes::U16(x),
                Data::I16(x) => Codes::I16(x),
                Data::F32(_) | Data::I64(_) => return None,
            },
            Self::Raw(raw) => match raw.element {
                ElementType::U8 => Codes::U8(raw.bytes),
                ElementType::I8 => Codes::I8(bytemuck::cast_slice(raw.bytes)),
                ElementType::U16 => Codes::U16Bytes(raw.bytes.as_chunks().0),
                ElementType::I16 => Codes::I16Bytes(raw.bytes.as_chunks().0),
                ElementType::F32 | ElementType::I64 => return None,
            },
        })
    }
}

/// Codes of a quantized tensor; those of a file need not be aligned.
#[derive(Clone, Copy, Debug)]
pub(super) enum Codes<'v> {
    U8(&'v [u8]),
    I8(&'v [i8]),
    U16(&'v [u16]),
    I16(&'v [i16]),
    U16Bytes(&'v [[u8; 2]]),
    I16Bytes(&'v [[u8; 2]]),
}

impl Codes<'_> {
    pub(super) fn len(self) -> usize {
        match self {
            Self::U8(x) => x.len(),
            Self::I8(x) => x.len(),
            Self::U16(x) => x.len(),
            Self::I16(x) => x.len(),
            Self::U16Bytes(x) | Self::I16Bytes(x) => x.len(),
        }
    }

    /// Writes `code - zero` of some of the elements.
    pub(super) fn centred(self, range: Range<usize>, zero: i32, out: &mut [i32]) {
        match self {
            Self::U8(x) => centre_u8(&x[range], zero, out),
            Self::I8(x) => centre_i8(&x[range], zero, out),
            Self::U16(x) => centre_u16(&x[range], zero, out),
            Self::I16(x) => centre_i16(&x[range], zero, out),
            Self::U16Bytes(x) => centre_u16_bytes(&x[range], zero, out),
            Self::I16Bytes(x) => centre_i16_bytes(&x[range], zero, out),
        }
    }

    /// Writes `(code - zero) * scale` of some of the elements: one rounding, since the difference
    /// is exact.
    pub(super) fn dequantize(self, range: Range<usize>, scale: f32, zero: i32, out: &mut [f32]) {
        /// A piece of this length is in the first-level cache between the two steps.
        const PIECE: usize = 1024;
        let mut centred = [0; PIECE];
        for (i, out) in out.chunks_mut(PIECE).enumerate() {
            let start = range.start + i * PIECE;
            let centred = &mut centred[..out.len()];
            self.centred(start..start + out.len(), zero, centred);
            scale_all(centred, scale, out);
        }
    }
}

macro_rules! centre {
    ($name:ident, $code:ty, $widen:expr) => {
        multiversion! {
            fn $name(codes: &[$code], zero: i32, out: &mut [i32]) {
                for (out, code) in out.iter_mut().zip(codes) {
                    *out = $widen(*code) - zero;
                }
            }
        }
    };
}
centre!(centre_u8, u8, i32::from);
centre!(centre_i8, i8, i32::from);
centre!(centre_u16, u16, i32::from);
centre!(centre_i16, i16, i32::from);
centre!(centre_u16_bytes, [u8; 2], |code| i32::from(u16::from_le_bytes(code)));
centre!(centre_i16_bytes, [u8; 2], |code| i32::from(i16::from_le_bytes(code)));

multiversion! {
    fn scale_all(centred: &[i32], scale: f32, out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(centred) {
            #[expect(clippy::cast_precision_loss, reason = "differences of 16-bit codes are exact in f32")]
            let x = *x as f32;
            *out = x * scale;
        }
    }
}

/// Scales and zero points: one of each, or as many as an axis is long.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Encoding {
    pub(super) scales: Vec<f32>,
    /// As many as scales, each a code of the quantized type.
    pub(super) zeros: Vec<i32>,
    /// The axis; without meaning when there is one scale for all.
    pub(super) axis: usize,
    pub(super) per_axis: bool,
}

impl Encoding {
    /// The scale and the zero point of a whole tensor, if there is just one of each.
    pub(super) fn per_tensor(&self) -> Option<(f32, i32)> {
        (!self.per_axis).then(|| (self.scales[0], self.zeros[0]))
    }

    /// Whether each row of a matrix has one scale and one zero point: those with its number.
    pub(super) fn is_by_rows(&self) -> bool {
        !self.per_axis || self.axis == 0
    }

    /// Elements in a row that share scale and zero point.
    pub(super) fn run_length(&self, shape: &[usize]) -> usize {
        if self.per_axis { shape[self.axis + 1..].iter().product() } else { shape.iter().product() }
    }

    /// Scale and zero point of the run with that number.
    pub(super) fn of_run(&self, run: usize) -> (f32, i32) {
        let i = run % self.scales.len();
        (self.scales[i], self.zeros[i])
    }
}

/// Calls `task(elements, scale, zero, out)` for pieces of a tensor that share an encoding, on all
/// threads.
pub(super) fn for_each_run<T: Send>(
    shape: &[usize],
    encoding: &Encoding,
    out: &mut [T],
    task: impl Fn(Range<usize>, f32, i32, &mut [T]) + Sync,
) {
    let run = encoding.run_length(shape);
    let pieces: Vec<(usize, &mut [T])> = out
        .chunks_mut(run)
        .enumerate()
        .flat_map(|(r, out)| {
            out.chunks_mut(CHUNK).enumerate().map(move |(i, out)| (r * run + i * CHUNK, out))
        })
        .collect();
    pieces.into_par_iter().with_min_len((CHUNK / run.max(1)).max(1)).for_each(|(start, out)| {
        let (scale, zero) = encoding.of_run(start / run);
        task(start..start + out.len(), scale, zero, out);
    });
}

/// What an operator reads: a tensor, or codes that mean f32 through an encoding.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand<'v> {
    pub(super) view: View<'v>,
    pub(super) encoding: Option<&'v Encoding>,
}

impl<'v> Operand<'v> {
    pub(super) fn shape(&self) -> &'v [usize] {
        self.view.shape()
    }

    /// In memory, and dequantized if it is quantized.
    pub(super) fn tensor(&self) -> Cow<'v, Tensor> {
        match self.quantized() {
            Some((codes, encoding)) => {
                let mut out = vec![0.0; codes.len()];
                for_each_run(self.shape(), encoding, &mut out, |range, scale, zero, out| {
                    codes.dequantize(range, scale, zero, out);
                });
                Cow::Owned(Tensor::made(self.shape(), Data::F32(out)))
            }
            None => self.view.tensor(),
        }
    }

    /// The elements as f32.
    ///
    /// # Panics
    /// When they are neither f32 nor quantized with an encoding; the plan has made sure of that.
    pub(super) fn floats(&self) -> Cow<'v, [f32]> {
        match self.tensor() {
            Cow::Borrowed(tensor) => Cow::Borrowed(tensor.floats().expect("the plan has checked the type")),
            Cow::Owned(tensor) => Cow::Owned(tensor.into_floats().expect("the plan has checked the type")),
        }
    }

    /// Codes and encoding, if it is quantized.
    pub(super) fn quantized(&self) -> Option<(Codes<'v>, &'v Encoding)> {
        Some((self.view.codes()?, self.encoding?))
    }

    /// Codes, scale and zero point, if there is one of each for the whole tensor.
    pub(super) fn per_tensor(&self) -> Option<(Codes<'v>, (f32, i32))> {
        let (codes, encoding) = self.quantized()?;
        Some((codes, encoding.per_tensor()?))
    }
}
