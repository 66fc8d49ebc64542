//! Operators that work on the rows along the last dimension.

use rayon::prelude::*;

use crate::interpreter::codes::Operand;
use crate::interpreter::context::{Argument, Built, Context, Operator, Result};
use crate::interpreter::tensor::{Data, Tensor};
use crate::onnx::ElementType;
use crate::runtime::Rounding;
use crate::runtime::kernels::activation;
use crate::runtime::norm::rms_norm;

/// Requires an axis to be the last one; returns how long it is.
fn last_axis(context: &Context<'_>, axis: i64, x: Argument<'_>) -> Result<usize> {
    let rank = x.shape.len();
    let axis = context.axis(axis, rank)?;
    if axis + 1 != rank {
        return Err(context.error().expected(format!("the last axis, {}", rank - 1)).found(axis));
    }
    Ok(x.shape[axis])
}

/// `e^x / sum of e^x`, after the largest is subtracted.
struct Softmax {
    len: usize,
}

pub(super) fn softmax(context: &Context<'_>) -> Result<Built> {
    let [x] = context.arguments()?;
    context.known(&["axis"])?;
    context.float_input(x)?;
    let len = last_axis(context, context.int("axis", -1)?, x)?;
    Ok(Built { element: ElementType::F32, shape: x.shape.to_vec(), operator: Box::new(Softmax { len }) })
}

impl Operator for Softmax {
    fn run(&self, inputs: &[Operand<'_>]) -> Tensor {
        let mut x = inputs[0].floats().into_owned();
        x.par_chunks_mut(self.len).for_each(|row| activation::softmax(row, 1.0, Rounding::None));
        Tensor::made(inputs[0].shape(), Data::F32(x))
    }
}

/// `scale * x / sqrt(mean(x^2) + epsilon)`.
struct RmsNormalization {
    epsilon: f32,
}

pub(super) fn rms_normalization(context: &Context<'_>) -> Result<Built> {
    let [x, scale] = context.arguments()?;
    context.known(&["axis", "epsilon", "stash_type"])?;
    context.fixed_int("stash_type", 1, 1)?;
    context.float_input(x)?;
    context.float_input(scale)?;
    let len = last_axis(context, context.int("axis", -1)?, x)?;
    if scale.shape != [len] {
        return Err(context.wrong_shape(scale, format!("a vector of {len}")));
    }
    let epsilon = context.float("epsilon", 1e-5)?;
    if !epsilon.is_finite() || epsilon < 0.0 {
        return Err(context.error().expected("a finite epsilon of at least 0").found(epsilon));
    }
    let operator = Box::new(RmsNormalization { epsilon });
    Ok(Built { element: ElementType::F32, shape: x.shape.to_vec(), operator })
}

impl Operator for RmsNormalization {
    fn run(&self, inputs: &[Operand<'_>]) -> Tensor {
        let (x, scale) = (inputs[0].floats(), inputs[1].floats());
        let mut out = vec![0.0; x.len()];
        rms_norm(&x, &scale, self.epsilon, Rounding::None, &mut out);
        Tensor::made(inputs[0].shape(), Data::F32(out))
    }
}

/// Means along the last dimension.
struct ReduceMean {
    shape: Vec<usize>,
    len: usize,
}

pub(super) fn reduce_mean(context: &Context<'_>) -> Result<Built> {
    let [x, axes] = context.arguments()?;
    context.known(&["keepdims", "noop_with_empty_axes"])?;
    context.fixed_int("noop_with_empty_axes", 0, 0)?;
    context.fixed_int("keepdims", 1, 1)?;
    context.float_input(x)?;
    let axes = context.constant_ints(axes)?;
    let [axis] = *axes else {
        return Err(context.error().expected("one axis").found(format!("{axes:?}")));
    };
    let len = last_axis(context, axis, x)?;
    let mut shape = x.shape.to_vec();
    shape[x.shape.len() - 1] = 1;
    let operator = Box::new(ReduceMean { shape: shape.clone(), len });
    Ok(Built { element: ElementType::F32, shape, operator })
}

impl Operator for ReduceMean {
    fn run(&self, inputs: &[Operand<'_>]) -> Tensor {
        let x = inputs[0].floats();
        let mean = |row: &[f32]| {
            // In f64 the order of a sum this long does not show in the f32 result.
            #[expect(clippy::cast_precision_loss, reason = "row lengths are far below 2^53")]
            let mean = row.iter().copied().map(f64::from).sum::<f64>() / row.len() as f64;
            #[expect(clippy::cast_possible_truncation, reason = "rounding once is the point")]
            let mean = mean as f32;
            mean
        };
        let out = x.chunks_exact(self.len).map(mean).collect();
        Tensor::made(&self.shape, Data::F32(out))
    }
}
