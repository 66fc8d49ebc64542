//! The operators, a file per family, and the table of them.

mod elementwise;
mod movement;
mod normalize;
mod product;
mod quantize;

pub(super) use quantize::dequantize;

use super::context::{Built, Context, Result};

type Build = fn(&Context<'_>) -> Result<Built>;

/// Operators, the operator set from which on they mean what is computed here, and how they are
/// checked and built. DequantizeLinear is not among them: the plan makes an encoding of it.
const OPERATORS: &[(&str, i64, Build)] = &[
    ("Add", 14, elementwise::binary),
    ("Concat", 13, movement::concat),
    ("Div", 14, elementwise::binary),
    ("Erf", 13, elementwise::unary),
    ("Gelu", 20, elementwise::gelu),
    ("Gemm", 13, product::gemm),
    ("Identity", 14, movement::identity),
    ("MatMul", 13, product::mat_mul),
    ("Mul", 14, elementwise::binary),
    ("Neg", 13, elementwise::unary),
    ("Pow", 15, elementwise::binary),
    ("QuantizeLinear", 13, quantize::quantize),
    ("RMSNormalization", 23, normalize::rms_normalization),
    ("ReduceMean", 18, normalize::reduce_mean),
    ("Reshape", 14, movement::reshape),
    ("Sigmoid", 13, elementwise::unary),
    ("Slice", 13, movement::slice),
    ("Softmax", 13, normalize::softmax),
    ("Sqrt", 13, elementwise::unary),
    ("Sub", 14, elementwise::binary),
    ("Transpose", 13, movement::transpose),
];

/// Checks a node and builds its operator.
pub(super) fn build(context: &Context<'_>) -> Result<Built> {
    let op_type = context.node.op_type.as_str();
    let entry = OPERATORS.iter().find(|(name, ..)| *name == op_type);
    let Some((_, since, build)) = entry else {
        let known = OPERATORS.iter().map(|(name, ..)| *name).chain(["DequantizeLinear"]);
        let expected = format!("one of {}", known.collect::<Vec<_>>().join(", "));
        return Err(context.error().expected(expected).found(op_type));
    };
    if context.opset < *since {
        let expected = format!("operator set {since} or newer");
        return Err(context.error().expected(expected).found(context.opset));
    }
    build(context)
}
