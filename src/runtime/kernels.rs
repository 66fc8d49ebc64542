//! Leaf kernels: slices in, slices out.
//!
//! **Order of summation.** A float dot product of length K is cut into blocks of [`dot::K_BLOCK`] and
//! those into segments of 128. Inside a segment, element k is added by a fused multiply-add to lane
//! k mod 8; the lanes of the segments are added in order, then the lanes of a block halves onto
//! halves, then the blocks' sums in order. Weighted sums of value rows ([`mix`]) run over the positions
//! one by one. Nothing in this depends on how many rows are multiplied together, so one token and a
//! batch of tokens give the same bits. Products with integer weights are exact sums of integers inside a block or a
//! row ([`int8`], [`int4`], [`fixed_point`]), in any order; what is added up in floats is added in order.

// Kernels walk over rows, lanes and words by number: the closures of iterators over arrays of vectors are
// compiled without the features of the function around them, and called for every element.
#![allow(clippy::needless_range_loop)]

pub(crate) mod activation;
pub(crate) mod dot;
pub(crate) mod fixed_point;
pub(crate) mod int4;
pub(crate) mod int8;
pub(crate) mod mix;
pub(crate) mod rows;
pub(crate) mod words;
