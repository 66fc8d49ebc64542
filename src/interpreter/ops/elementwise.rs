//! Operators on one element, or on a pair of elements with broadcasting.

use std::borrow::Cow;

use rayon::prelude::*;

use crate::interpreter::codes::{CHUNK, Operand};
use crate::interpreter::context::{Built, Context, Operator, Result};
use crate::interpreter::tensor::{Data, Tensor};
use crate::onnx::ElementType;
use crate::runtime::kernels::activation;
use crate::simd::multiversion;

/// A function of an element.
struct Unary(fn(&mut [f32]));

pub(super) fn unary(context: &Context<'_>) -> Result<Built> {
    let [x] = context.arguments()?;
    context.known(&[])?;
    context.float_input(x)?;
    let function: fn(&mut [f32]) = match context.node.op_type.as_str() {
        "Erf" => erf,
        "Neg" => negate,
        "Sigmoid" => sigmoid,
        _ => square_root,
    };
    Ok(Built { element: ElementType::F32, shape: x.shape.to_vec(), operator: Box::new(Unary(function)) })
}

pub(super) fn gelu(context: &Context<'_>) -> Result<Built> {
    let [x] = context.arguments()?;
    context.known(&["approximate"])?;
    context.float_input(x)?;
    let form = context.string("approximate", "none")?;
    if form != "none" {
        return Err(context.error().expected("the exact form, approximate none").found(form));
    }
    let operator = Box::new(Unary(activation::gelu));
    Ok(Built { element: ElementType::F32, shape: x.shape.to_vec(), operator })
}

impl Operator for Unary {
    fn run(&self, inputs: &[Operand<'_>]) -> Tensor {
        let mut x = inputs[0].floats().into_owned();
        x.par_chunks_mut(CHUNK).for_each(self.0);
        Tensor::made(inputs[0].shape(), Data::F32(x))
    }
}

multiversion! {
    fn sigmoid(x: &mut [f32]) {
        for x in x.iter_mut() {
            *x = activation::sigmoid(*x);
        }
    }
}

multiversion! {
    fn erf(x: &mut [f32]) {
        for x in x.iter_mut() {
            *x = activation::erf(*x);
        }
    }
}

fn negate(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = -*x);
}

fn square_root(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = x.sqrt());
}

/// A function of two elements; shapes are aligned at their ends, and a dimension of 1 is repeated.
struct Binary {
    function: fn(f32, f32) -> f32,
    shape: Vec<usize>,
}

pub(super) fn binary(context: &Context<'_>) -> Result<Built> {
    let [a, b] = context.arguments()?;
    context.known(&[])?;
    context.float_input(a)?;
    context.float_input(b)?;
    let function: fn(f32, f32) -> f32 = match context.node.op_type.as_str() {
        "Add" => |a, b| a + b,
        "Div" => |a, b| a / b,
        "Mul" => |a, b| a * b,
        "Pow" => power,
        _ => |a, b| a - b,
    };
    let shape = broadcast(a.shape, b.shape).ok_or_else(|| {
        let found = format!("{:?} and {:?}", a.shape, b.shape);
        context.error().expected("shapes that broadcast").found(found)
    })?;
    let operator = Box::new(Binary { function, shape: shape.clone() });
    Ok(Built { element: ElementType::F32, shape, operator })
}

/// A square is a product, as in the runtimes; other powers come from `libm`, the same everywhere.
fn power(base: f32, exponent: f32) -> f32 {
    if exponent == 2.0 { base * base } else { libm::powf(base, exponent) }
}

/// The common shape of two.
pub(super) fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let dim = |shape: &[usize], i: usize| (i + shape.len()).checked_sub(rank).map_or(1, |i| shape[i]);
    (0..rank)
        .map(|i| match (dim(a, i), dim(b, i)) {
            (a, b) if a == b => Some(a),
            (1, d) | (d, 1) => Some(d),
            _ => None,
        })
        .collect()
}

/// Elements to move by per step along each dimension of `to`, reading a tensor of shape `from`: 0
/// where it is repeated.
pub(super) fn broadcast_strides(from: &[usize], to: &[usize]) -> Vec<usize> {
    let mut strides = vec![0; to.len()];
    let mut stride = 1;
    for (i, d) in from.iter().enumerate().rev() {
        if *d != 1 {
            strides[i + to.len() - from.len()] = stride;
        }
        stride *= d;
    }
    strides
}

impl Operator for Binary {
    fn run(&self, inputs: &[Operand<'_>]) -> Tensor {
        let (a, b) = (inputs[0].floats(), inputs[1].floats());
        let spread = |x: Cow<'_, [f32]>, shape: &[usize]| {
            if shape == self.shape { x.into_owned() } else { repeat(&x, shape, &self.shape) }
        };
        let mut out = spread(a, inputs[0].shape());
        if inputs[1].shape() == self.shape {
            out.iter_mut().zip(&*b).for_each(|(a, b)| *a = (self.function)(*a, *b));
        } else if let [b] = *b {
            out.iter_mut().for_each(|a| *a = (self.function)(*a, b));
        } else {
            let b = repeat(&b, inputs[1].shape(), &self.shape);
            out.iter_mut().zip(&b).for_each(|(a, b)| *a = (self.function)(*a, *b));
        }
        Tensor::made(&self.shape, Data::F32(out))
    }
}

/// The elements of `x`, repeated to fill `to`.
fn repeat(x: &[f32], from: &[usize], to: &[usize]) -> Vec<f32> {
    let strides = broadcast_strides(from, to);
    let mut out = Vec::with_capacity(to.iter().product());
    super::movement::for_each_row(to, &strides, |start, len, stride| match stride {
        1 => out.extend_from_slice(&x[start..start + len]),
        _ => out.extend((0..len).map(|i| x[start + i * stride])),
    });
    out
}
