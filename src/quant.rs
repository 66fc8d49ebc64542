//! Quantization maths: slices in, slices out. Knows no file, no tensor name and no configuration.

pub mod int8;
mod snr;

pub use snr::ErrorSums;
