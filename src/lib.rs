//! Offline converter for Spark-X2.5 checkpoints (`Spark2_5ForCausalLM`).
//!
//! The library behind the `spark-convert` binary: [`checkpoint`] reads model directories, [`plan`]
//! decides what an artifact consists of, [`convert`] streams it through one of the [`formats`],
//! [`artifact`] writes it all or nothing, [`runtime`] runs checkpoints and artifacts, and [`verify`]
//! judges the written bytes.

pub mod actions;
pub mod artifact;
pub mod calibrate;
pub mod checkpoint;
pub mod cli;
pub mod commands;
pub mod convert;
pub mod device;
pub mod error;
pub mod estimate;
pub mod formats;
pub mod gates;
pub mod ggml;
pub mod gguf;
pub mod guidance;
pub mod interpreter;
pub mod interrupt;
pub mod logging;
pub mod metrics;
pub mod npu;
pub mod onnx;
pub mod opened;
pub mod pack;
pub mod plan;
pub mod progress;
pub mod quant;
pub mod report;
pub mod runtime;
pub mod scenario;
pub mod sensitivity;
mod simd;
pub mod smooth;
pub mod solve;
pub mod spark;
mod table;
pub mod tensor;
pub mod tokenize;
pub mod verify;
