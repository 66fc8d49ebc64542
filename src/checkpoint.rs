//! Reading model directories. The only place that opens inputs.
//!
//! [`ModelDir`] guards which files may be opened, [`TensorFiles`] maps the safetensors files and
//! proves that they agree with their index, [`Checkpoint`] adds what makes a directory a Spark-X2.5
//! checkpoint. Artifacts are read back through the first two. [`GgufFile`] is a model in one file, as
//! llama.cpp has it.
//!
//! Inputs must not change while they are mapped: a file that shrinks under the map ends the process
//! (with a word, see [`crate::interrupt::end_on_shortened_input`]). [`TensorFiles::check_unchanged`] tells
//! a changed file afterwards.

mod directory;
mod gguf_file;
mod header;
mod inventory;
mod tensor_files;

use std::path::Path;

pub use directory::ModelDir;
pub use gguf_file::{GgufFile, is_gguf};
pub use tensor_files::{Shard, TensorEntry, TensorFiles};

use crate::error::{InputError, Result};
use crate::spark::{SparkConfig, TensorSpec};
use crate::tensor::TensorView;

/// Name of the configuration file.
pub const CONFIG_FILE: &str = "config.json";
/// Name of the shard index.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// Name of the weights file of a checkpoint without shards.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Name of the manifest every artifact carries.
pub const MANIFEST_FILE: &str = "spark-convert.json";

/// A full-precision Spark-X2.5 checkpoint: configuration, and every tensor the architecture needs.
#[derive(Debug)]
pub struct Checkpoint {
    /// The directory.
    pub dir: ModelDir,
    /// What config.json says.
    pub config: SparkConfig,
    /// config.json as it stands, key order kept.
    pub config_json: serde_json::Value,
    /// The mapped weights.
    pub files: TensorFiles,
    /// Every tensor the architecture needs, in published order.
    pub specs: Vec<TensorSpec>,
    /// Stored tensors that are passed over, with the reason.
    pub dropped: Vec<(String, String)>,
    /// Files copied beside the weights, in name order.
    pub side_files: Vec<String>,
    /// What the user should know, one sentence each.
    pub notes: Vec<String>,
}

impl Checkpoint {
    /// Opens `path`: a directory, its config.json, or a hub-cache snapshot. Reads headers only.
    ///
    /// # Errors
    /// Anything that is missing, malformed, incomplete, unknown or not full precision.
    pub fn open(path: &Path) -> Result<Self> {
        let dir = ModelDir::open(path)?;
        let (config_json, config) = read_config(&dir)?;
        let files = TensorFiles::open(&dir)?;
        let inventory = inventory::check(&config, &files)?;
        let (side_files, mut notes) = dir.side_files(&files)?;
        notes.splice(0..0, config.notes.iter().cloned());
        notes.extend(files.notes.iter().cloned());
        notes.extend(inventory.dropped.iter().map(|(name, why)| format!("{name}: not carried over: {why}")));
        let mut dtypes: Vec<_> =
            inventory.specs.iter().filter_map(|s| files.get(&s.name)).map(|t| t.dtype).collect();
        dtypes.sort_by_key(|d| d.to_string());
        dtypes.dedup();
        if dtypes.len() > 1 {
            let list: Vec<_> = dtypes.iter().map(ToString::to_string).collect();
            notes.push(format!(
                "the tensors are of several dtypes ({}): each is read by its own header, and those that are not \
                 quantized keep theirs",
                list.join(", ")
            ));
        }
        Ok(Self {
            dir,
            config,
            config_json,
            files,
            specs: inventory.specs,
            dropped: inventory.dropped,
            side_files,
            notes,
        })
    }

    /// A required tensor.
    ///
    /// # Panics
    /// When the architecture has no tensor of that name; `open` has checked all that it has.
    pub fn tensor(&self, name: &str) -> TensorView<'_> {
        self.files.get(name).unwrap_or_else(|| panic!("{name} is not a tensor of the architecture"))
    }
}

/// Reads and parses config.json.
///
/// # Errors
/// When it is missing, not JSON, or refused by [`SparkConfig::parse`].
pub fn read_config(dir: &ModelDir) -> Result<(serde_json::Value, SparkConfig)> {
    let json = dir.read_json(CONFIG_FILE)?;
    let config = SparkConfig::parse(&json).map_err(|e| {
        InputError::file(CONFIG_FILE).subject(e.key).expected(e.expected).found(e.found).hint(e.hint)
    })?;
    Ok((json, config))
}
