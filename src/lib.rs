//! Offline converter for Spark-X2.5 checkpoints (`Spark2_5ForCausalLM`).

pub mod checkpoint;
pub mod error;
pub mod formats;
pub mod plan;
pub mod quant;
mod simd;
pub mod spark;
pub mod tensor;
