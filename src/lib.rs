//! Offline converter for Spark-X2.5 checkpoints (`Spark2_5ForCausalLM`).

pub mod error;
pub mod runtime;
mod simd;
pub mod spark;
pub mod tensor;
