//! Operators that move elements and compute nothing. They take any type; what is dequantized moves as
//! f32, which rounding to the same encoding brings back to the same codes.

use crate::interpreter::codes::Operand;
use crate::interpreter::context::{Argument, Built, Context, Operator, Result};
use crate::interpreter::tensor::{Data, Element, Tensor, for_each_type};
use crate::onnx::element_count;

/// Elements from `start` on, `strides` apart along each dimension of `shape`.
struct Gather {
    shape: Vec<usize>,
    start: usize,
    strides: Vec<usize>,
}

impl Gather {
    fn built(self, x: Argument<'_>) -> Built {
        Built { element: x.element, shape: self.shape.clone(), operator: Box::new(self) }
    }
}

impl Operator for Gather {
    fn run(&self, inputs: &[Operand<'_>]) -> Tensor {
        let x = inputs[0].tensor();
        let data = for_each_type!(x.data(), x, wrap => {
            let mut out = Vec::with_capacity(self.shape.iter().product());
            for_each_row(&self.shape, &self.strides, |start, len, stride| {
                let start = self.start + start;
                match stride {
                    1 => out.extend_from_slice(&x[start..start + len]),
                    _ => out.extend((0..len).map(|i| x[start + i * stride])),
                }
            });
            wrap(out)
        });
        Tensor::made(&self.shape, data)
    }
}

/// Calls `row(start, length, stride)` for every row along the last dimension, in order.
pub(super) fn for_each_row(shape: &[usize], strides: &[usize], mut row: impl FnMut(usize, usize, usize)) {
    let (Some((len, outer)), Some((stride, outer_strides))) = (shape.split_last(), strides.split_last())
    else {
        return row(0, 1, 1);
    };
    let mut index = vec![0; outer.len()];
    let mut start = 0;
    loop {
        row(start, *len, *stride);
        // The next row: like an odometer.
        let mut d = outer.len();
        loop {
            if d == 0 {
                return;
            }
            d -= 1;
            index[d] += 1;
            start += outer_strides[d];
            if index[d] < outer[d] {
                break;
            }
            start -= outer_strides[d] * outer[d];
            index[d] = 0;
        }
    }
}

/// Strides of a tensor without gaps.
fn dense_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}

pub(super) fn identity(context: &Context<'_>) -> Result<Built> {
    let [x] = context.arguments()?;
    context.known(&[])?;
    Ok(Gather { shape: x.shape.to_vec(), start: 0, strides: dense_strides(x.shape) }.built(x))
}

pub(super) fn transpose(context: &Context<'_>) -> Result<Built> {
    let [x] = context.arguments()?;
    context.known(&["perm"])?;
    let rank = x.shape.len();
    let order: Vec<usize> = match context.ints("perm")? {
        None => (0..rank).rev().collect(),
        Some(order) => order.iter().map(|d| context.axis(*d, rank)).collect::<Result<_>>()?,
    };
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if !sorted.iter().copied().eq(0..rank) {
        let expected = format!("each of {rank} dimensions once in perm");
        return Err(context.error().expected(expected).found(format!("{order:?}")));
    }
    let strides = dense_strides(x.shape);
    let shape = order.iter().map(|d| x.shape[*d]).collect();
    Ok(Gather { shape, start: 0, strides: order.iter().map(|d| strides[*d]).collect() }.built(x))
}

pub(super) fn slice(context: &Context<'_>) -> Result<Built> {
    context.known(&[])?;
    let (x, starts, ends, axes) = match *context.inputs {
        [x, starts, ends, axes] => (x, starts, ends, axes),
        [x, starts, ends, axes, steps] => {
            if context.constant_ints(steps)?.iter().any(|s| *s != 1) {
                return Err(context.error().expected("steps of 1").found("others"));
            }
            (x, starts, ends, axes)
        }
        _ => return Err(context.error().expected("data, starts, ends, axes").found(context.inputs.len())),
    };
    let starts = context.constant_ints(starts)?;
    let ends = context.constant_ints(ends)?;
    let axes = context.constant_ints(axes)?;
    if starts.len() != axes.len() || ends.len() != axes.len() {
        let found = format!("{}, {} and {}", starts.len(), ends.len(), axes.len());
        return Err(context.error().expected("as many starts and ends as axes").found(found));
    }
    let strides = dense_strides(x.shape);
    let mut shape = x.shape.to_vec();
    let mut first = 0;
    let mut seen = vec![false; shape.len()];
    for ((axis, start), end) in axes.iter().zip(&starts).zip(&ends) {
        let axis = context.axis(*axis, shape.len())?;
        if std::mem::replace(&mut seen[axis], true) {
            return Err(context.error().expected("each axis once").found(format!("{axes:?}")));
        }
        let (start, end) = (bound(*start, x.shape[axis]), bound(*end, x.shape[axis]));
        if start >= end {
            let expected = format!("at least one element of {} along axis {axis}", x.shape[axis]);
            return Err(context.error().expected(expected).found(format!("{start}..{end}")));
        }
        shape[axis] = end - start;
        first += start * strides[axis];
    }
    Ok(Gather { shape, start: first, strides }.built(x))
}

/// A bound of a slice: negative ones count from the end, and what is outside is moved to the edge.
fn bound(bound: i64, len: usize) -> usize {
    let signed = i64::try_from(len).unwrap_or(i64::MAX);
    let counted = if bound < 0 { bound.saturating_add(signed) } else { bound };
    usize::try_from(counted.clamp(0, signed)).unwrap_or(len)
}

/// The same elements in another shape.
struct Reshape {
    shape: Vec<usize>,
}

pub(super) fn reshape(context: &Context<'_>) -> Result<Built> {
    let [x, shape] = context.arguments()?;
    context.known(&["allowzero"])?;
    context.fixed_int("allowzero", 0, 0)?;
    let asked = context.constant_ints(shape)?;
    let refusal = || {
        let found = format!("{asked:?} for {:?}", x.shape);
        context.error().expected("a shape of as many elements").found(found)
    };
    let count: usize = x.shape.iter().product();
    let mut shape = Vec::with_capacity(asked.len());
    let mut open = None;
    for (i, d) in asked.iter().enumerate() {
        shape.push(match *d {
            0 => *x.shape.get(i).ok_or_else(refusal)?,
            -1 if open.is_none() => {
                open = Some(i);
                1
            }
            d => usize::try_from(d).map_err(|_| refusal())?,
        });
    }
    let given = element_count(&shape).filter(|n| *n > 0).ok_or_else(refusal)?;
    if let Some(open) = open {
        if !count.is_multiple_of(given) {
            return Err(refusal());
        }
        shape[open] = count / given;
    } else if given != count {
        return Err(refusal());
    }
    Ok(Built { element: x.element, shape: shape.clone(), operator: Box::new(Reshape { shape }) })
}

impl Operator for Reshape {
    fn run(&self, inputs: &[Operand<'_>]) -> Tensor {
        Tensor::made(&self.shape, inputs[0].tensor().into_owned().into_data())
    }
}

/// Tensors one after another along an axis.
struct Concat {
    shape: Vec<usize>,
    axis: usize,
}

pub(super) fn concat(context: &Context<'_>) -> Result<Built> {
    context.known(&["axis"])?;
    let Some((first, rest)) = context.inputs.split_first() else {
        return Err(context.error().expected("at least one input").found("none"));
    };
    if context.attribute("axis").is_none() {
        return Err(context.error().expected("the attribute axis").found("none"));
    }
    let axis = context.axis(context.int("axis", 0)?, first.shape.len())?;
    let mut shape = first.shape.to_vec();
    for x in rest {
        let fits = x.element == first.element
            && x.shape.len() == shape.len()
            && x.shape.iter().zip(first.shape).enumerate().all(|(d, (a, b))| d == axis || a == b);
        let sum = fits.then(|| shape[axis].checked_add(x.shape[axis])).flatten();
        let Some(sum) = sum else {
            let expected = format!("{} {:?} except along axis {axis}", first.element, first.shape);
            return Err(context.error().expected(expected).found(format!("{} {:?}", x.element, x.shape)));
        };
        shape[axis] = sum;
    }
    Ok(Built { element: first.element, shape: shape.clone(), operator: Box::new(Concat { shape, axis }) })
}

impl Operator for Concat {
    fn run(&self, inputs: &[Operand<'_>]) -> Tensor {
        let tensors: Vec<_> = inputs.iter().map(Operand::tensor).collect();
        let outer: usize = self.shape[..self.axis].iter().product();
        let inner = |shape: &[usize]| shape[self.axis..].iter().product::<usize>();
        let data = for_each_type!(tensors[0].data(), first, wrap => {
            let mut out = first[..0].to_vec();
            out.reserve_exact(self.shape.iter().product());
            for i in 0..outer {
                for tensor in &tensors {
                    let len = inner(tensor.shape());
                    out.extend_from_slice(&elements_like(first, tensor.data())[i * len..][..len]);
                }
            }
            wrap(out)
        });
        Tensor::made(&self.shape, data)
    }
}

/// The elements, which are of the type of `like`.
fn elements_like<'d, T: Element>(_like: &[T], data: &'d Data) -> &'d [T] {
    T::slice(data).expect("the plan has checked the type")
}
