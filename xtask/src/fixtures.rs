//! Synthetic Spark checkpoints in the published Hugging Face layout.
//!
//! The weights are random, with the statistics of a trained model: scales differ by row and by
//! column, a few channels are outliers, and the logits spread over a few units. The bytes depend
//! on the specification alone, not on the platform, the number of threads or the order of work.
//!
//! ```no_run
//! use xtask::fixtures::{Dtype, FixtureSpec};
//! # fn main() -> anyhow::Result<()> {
//! let dir = std::env::temp_dir().join("spark");
//! let made = FixtureSpec::tiny().seed(3).dtype_of("norm.weight", Dtype::F32).write(&dir)?;
//! println!("{} holds {} parameters", made.model_dir.display(), made.parameters);
//! # Ok(())
//! # }
//! ```

mod config;
mod geometry;
mod hub_cache;
mod plan;
mod safetensors;
mod spec;
#[cfg(test)]
mod tests;
mod tokenizer;
mod weights;
mod write;

pub use geometry::{Geometry, Preset};
pub use plan::{Plan, PlannedShard, PlannedTensor};
pub use spec::{ConfigEdit, Dtype, ExtraTensor, FixtureSpec, Head, WeightEdit};
pub use write::{Written, WrittenFile};
