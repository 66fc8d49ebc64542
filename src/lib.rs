//! Offline converter for Spark-X2.5 checkpoints (`Spark2_5ForCausalLM`).

pub mod artifact;
pub mod checkpoint;
pub mod cli;
pub mod commands;
pub mod convert;
pub mod error;
pub mod formats;
pub mod interrupt;
pub mod logging;
pub mod plan;
pub mod progress;
pub mod quant;
mod simd;
pub mod spark;
pub mod tensor;
pub mod verify;
//! x
pub mod tokenize;
