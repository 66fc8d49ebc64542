//! Runs the ONNX graphs that the exporter writes, from the written bytes.
//!
//! The semantics are those of the specification at operator sets 18 to 23: DequantizeLinear gives
//! f32, the operator computes in f32, QuantizeLinear rounds half to even and saturates. A
//! [`Session`] holds a graph to that before anything runs: every operator, attribute, type and shape
//! is checked, and whatever the exporter does not emit is refused by name.
//!
//! DequantizeLinear is no step of its own. Operators get the codes together with their encoding, so
//! that no weight matrix is ever widened whole and products of two quantized tensors are exact
//! integers, scaled once. That is closer to the specification's real numbers than a sum in f32, and
//! it is what an integer processor computes.
//!
//! Results depend on the model and the inputs only, not on the number of threads.

mod codes;
mod context;
mod ops;
mod plan;
mod session;
mod tensor;

pub use session::{Session, Tensors};
pub use tensor::{Data, SliceMut, Tensor};

#[cfg(test)]
mod tests;
