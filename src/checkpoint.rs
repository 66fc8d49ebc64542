//! Reading model directories. The only place that opens inputs.
//!
//! [`ModelDir`] guards which files may be opened, [`TensorFiles`] maps the safetensors files and
//! proves that they agree with their index, [`Checkpoint`] adds what makes a directory a Spark-X2.5
//! checkpoint. Artifacts are read back through the first two. [`GgufFile`] is a model in one file, as
//! llama.cpp has it; one of floats also gives the tensors of a [`Checkpoint`].
//!
//! Inputs must not change while they are mapped: a file that shrinks under the map ends the process
//! (with a word, see [`crate::interrupt::end_on_shortened_input`]). [`TensorFiles::check_unchanged`] tells
//! a changed file afterwards.

mod directory;
mod gguf_file;
mod gguf_source;
mod header;
mod inventory;
mod tensor_files;

use std::fs::File;
use std::path::{Path, PathBuf};

pub use directory::ModelDir;
pub use gguf_file::{GgufFile, is_gguf};
pub use tensor_files::{Shard, TensorEntry, TensorFiles};

use crate::error::{InputError, Result, one_line};
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
    /// The GGUF file that the tensors come from, as the user named it; `dir` has all else.
    pub gguf: Option<PathBuf>,
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
        if is_gguf(path) {
            return Err(InputError::file(path.display())
                .expected("a checkpoint in safetensors")
                .found("a GGUF file")
                .hint("quantize, plan and verify --reference take one of floats; export-npu does not")
                .into());
        }
        let dir = ModelDir::open(path)?;
        let (config_json, config) = read_config(&dir)?;
        let files = TensorFiles::open(&dir)?;
        Self::new(dir, None, (config_json, config), files)
    }

    /// Opens the tensors of a GGUF file of floats, with the configuration, tokenizer and all else of the
    /// model directory `companions`, or of the directory that the file lies in. Of tensors, it reads norms
    /// only.
    ///
    /// # Errors
    /// As [`GgufFile::open`] and [`Self::open`], and when the file is quantized or of another model than
    /// the directory.
    pub fn open_gguf(path: &Path, companions: Option<&Path>) -> Result<Self> {
        let gguf_source::Opened { dir, config_json, config, files } = gguf_source::open(path, companions)?;
        Self::new(dir, Some(path.to_owned()), (config_json, config), files)
    }

    /// Anonymous memory that opening took at most, beyond headers, in bytes.
    pub fn opening_bytes(&self) -> u64 {
        match &self.gguf {
            Some(_) => gguf_source::peak_memory_bytes(&self.dir, self.config.vocab_size),
            None => 0,
        }
    }

    fn new(
        dir: ModelDir,
        gguf: Option<PathBuf>,
        (config_json, config): (serde_json::Value, SparkConfig),
        files: TensorFiles,
    ) -> Result<Self> {
        let inventory = inventory::check(&config, &files)?;
        let (side_files, mut notes) = dir.side_files(&files)?;
        notes.splice(0..0, config.notes.iter().cloned());
        notes.extend(files.notes.iter().cloned());
        let dropped = inventory.dropped.iter();
        notes.extend(dropped.map(|(name, why)| format!("{}: not carried over: {why}", one_line(name))));
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
            gguf,
            config,
            config_json,
            files,
            specs: inventory.specs,
            dropped: inventory.dropped,
            side_files,
            notes,
        })
    }

    /// What the user named: the directory, or the GGUF file.
    pub fn path(&self) -> &Path {
        self.gguf.as_deref().unwrap_or_else(|| self.dir.path())
    }

    /// A name for the model, that of the directory or the GGUF file.
    pub fn model_name(&self) -> String {
        let stem = self.gguf.as_deref().and_then(Path::file_stem);
        stem.map_or_else(|| self.dir.model_name(), |stem| directory::tame(&stem.to_string_lossy()))
    }

    /// The path of a file that artifacts of this checkpoint were made from: config.json, or one that
    /// has tensors.
    pub fn path_of(&self, source: &str) -> PathBuf {
        match &self.gguf {
            Some(path) if source != CONFIG_FILE => path.clone(),
            _ => self.dir.path().join(source),
        }
    }

    /// Opens a file that artifacts of this checkpoint were made from.
    ///
    /// # Errors
    /// As [`ModelDir::open_file`].
    pub fn open_source(&self, name: &str) -> Result<File> {
        match &self.gguf {
            Some(path) if name != CONFIG_FILE => gguf_file::open_named(path),
            _ => self.dir.open_file(name),
        }
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
