//! QuantizeLinear and DequantizeLinear.

use crate::interpreter::codes::{Encoding, Operand, for_each_run};
use crate::interpreter::context::{Argument, Built, Context, Operator, Result};
use crate::interpreter::tensor::{Data, Tensor};
use crate::onnx::ElementType;
use crate::simd::multiversion;

/// First operator set whose quantized types have 16 bits.
const SIXTEEN_BITS_SINCE: i64 = 21;

/// Reads scale and zero point of a node whose quantized side has shape `shape`; returns the quantized
/// type as well.
fn encoding(
    context: &Context<'_>,
    shape: &[usize],
    scale: Argument<'_>,
    zero: Argument<'_>,
) -> Result<(Encoding, ElementType)> {
    context.known(&["axis"])?;
    let scales = match context.constant(scale)?.into_floats() {
        Some(scales) => scales,
        None => {
            return Err(context
                .error()
                .expected(format!("{} to be float32", scale.name))
                .found(scale.element));
        }
    };
    if let Some(bad) = scales.iter().find(|s| !s.is_normal() || **s < 0.0) {
        let expected = format!("positive, finite and normal scales in {}", scale.name);
        return Err(context.error().expected(expected).found(bad));
    }
    let element = zero.element;
    if !element.is_quantized() {
        let expected = format!("{} to be of 8 or 16 bits", zero.name);
        return Err(context.error().expected(expected).found(element));
    }
    if element.bytes() == 2 && context.opset < SIXTEEN_BITS_SINCE {
        let expected = format!("operator set {SIXTEEN_BITS_SINCE} or newer for {element}");
        return Err(context.error().expected(expected).found(context.opset));
    }
    if zero.shape != scale.shape {
        return Err(context.wrong_shape(zero, format!("of shape {:?}, like its scale", scale.shape)));
    }
    let zeros = context.constant(zero)?;
    let zeros = match zeros.data() {
        Data::U8(z) => z.iter().map(|z| i32::from(*z)).collect(),
        Data::I8(z) => z.iter().map(|z| i32::from(*z)).collect(),
        Data::U16(z) => z.iter().map(|z| i32::from(*z)).collect(),
        Data::I16(z) => z.iter().map(|z| i32::from(*z)).collect(),
        Data::F32(_) | Data::I64(_) => Vec::new(),
    };
    let axis = context.int("axis", 1)?;
    let (axis, per_axis) = match *scale.shape {
        [] => (0, false),
        [n] => {
            let axis = context.axis(axis, shape.len())?;
            if shape[axis] != n {
                return Err(context.wrong_shape(scale, format!("a scalar or {} scales", shape[axis])));
            }
            (axis, true)
        }
        _ => return Err(context.wrong_shape(scale, "a scalar or a vector")),
    };
    Ok((Encoding { scales, zeros, axis, per_axis }, element))
}

/// Checks a DequantizeLinear; it is an encoding of its input, not a step.
pub(in crate::interpreter) fn dequantize(context: &Context<'_>) -> Result<Encoding> {
    let [codes, scale, zero] = context.arguments()?;
    let (encoding, element) = encoding(context, codes.shape, scale, zero)?;
    if codes.quantized || codes.element != element {
        let expected = format!("{} to be {element}, like its zero point", codes.name);
        return Err(context.error().expected(expected).found(codes.element));
    }
    Ok(encoding)
}

/// `saturate(round(x / scale) + zero)`, half to even.
struct Quantize {
    encoding: Encoding,
    element: ElementType,
}

pub(super) fn quantize(context: &Context<'_>) -> Result<Built> {
    let [x, scale, zero] = context.arguments()?;
    context.float_input(x)?;
    let (encoding, element) = encoding(context, x.shape, scale, zero)?;
    Ok(Built { element, shape: x.shape.to_vec(), operator: Box::new(Quantize { encoding, element }) })
}

impl Operator for Quantize {
    fn run(&self, inputs: &[Operand<'_>]) -> Tensor {
        let x = inputs[0].floats();
        let shape = inputs[0].shape();
        macro_rules! codes {
            ($quantize:ident) => {{
                let mut codes = vec![0; x.len()];
                for_each_run(shape, &self.encoding, &mut codes, |range, scale, zero, codes| {
                    $quantize(&x[range], scale, zero, codes);
                });
                codes
            }};
        }
        let data = match self.element {
            ElementType::U8 => Data::U8(codes!(quantize_u8)),
            ElementType::I8 => Data::I8(codes!(quantize_i8)),
            ElementType::I16 => Data::I16(codes!(quantize_i16)),
            _ => Data::U16(codes!(quantize_u16)),
        };
        Tensor::made(shape, data)
    }
}

macro_rules! quantize {
    ($name:ident, $code:ty) => {
        multiversion! {
            /// A NaN becomes the zero point.
            fn $name(x: &[f32], scale: f32, zero: i32, codes: &mut [$code]) {
                let lowest = (i32::from(<$code>::MIN) - zero) as f32;
                let highest = (i32::from(<$code>::MAX) - zero) as f32;
                for (code, x) in codes.iter_mut().zip(x) {
                    // Bounds of at most 17 bits: exact, and so is all that follows.
                    let steps = (x / scale).round_ties_even().clamp(lowest, highest);
                    #[expect(clippy::cast_possible_truncation, reason = "clamped to the range of the type")]
                    let rounded = (steps as i32 + zero) as $code;
                    *code = rounded;
                }
            }
        }
    };
}
quantize!(quantize_u8, u8);
quantize!(quantize_i8, i8);
quantize!(quantize_u16, u16);
quantize!(quantize_i16, i16);
