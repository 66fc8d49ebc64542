//! The Spark-X2.5 architecture: what config.json says and which tensors follow from it.
//!
//! Pure data: nothing here opens a file. Sources: the published `configuration_spark.py` and
//! `modeling_spark.py` of the Spark-X2.5 release.

mod config;
mod tensors;
mod unread_keys;

pub use config::{ConfigError, GateActivation, LayerType, RopeParameters, SparkConfig};
pub use tensors::{Module, TensorSpec, is_known_buffer, tensor_specs};

#[cfg(test)]
pub(crate) use config::tests::published as published_config;
