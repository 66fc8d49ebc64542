//! The GGUF container as llama.cpp writes Spark-X2.5 into it: header, configuration, names of tensors.
//!
//! Bytes in, nothing opened: [`crate::checkpoint::GgufFile`] maps the file. A file of this kind carries
//! everything that the arithmetic depends on but the activation, which its readers take to be the tanh
//! form of GELU; see [`crate::runtime::Gelu`].
//!
//! Source: `gguf.md` of ggml for the container; for the architecture `conversion/spark2_5.py`, which
//! writes it, and `src/models/spark2-5.cpp`, which reads it, both of llama.cpp.

mod config;
mod header;
mod metadata;
mod same_model;
mod tensors;

pub use config::{config, config_json};
pub use header::{Header, TensorInfo, parse};
pub use metadata::{List, Metadata, Value};
pub use same_model::{Difference, first_difference};
pub use tensors::{check_inventory, tensor_name};

#[cfg(test)]
mod tests;
