//! A checkpoint, an artifact or a GGUF file, opened so that it can run: weights, tokenizer, chat template.

use std::path::Path;

use crate::checkpoint::{CONFIG_FILE, Checkpoint, GgufFile, MANIFEST_FILE, ModelDir, TensorFiles, is_gguf};
use crate::error::{Failure, InputError, Result};
use crate::formats::{self, Fit, Format, Packed};
use crate::plan::{module_of, qkv_parts};
use crate::runtime::{
    BlockEmbedding, BlockLinear, Embedding, Linear, Model, PackedEmbedding, Rounding, StackedLinear,
    packed_linear, packed_linear_on_floats,
};
use crate::spark::{Module, SparkConfig, TensorSpec};
use crate::tokenize::{ChatError, ChatTemplate, Tokenizer};
use crate::verify::read_manifest;

/// Something that can run.
pub enum Opened {
    /// A full-precision checkpoint.
    Checkpoint(Box<Checkpoint>),
    /// An artifact of this tool.
    Artifact(Box<Artifact>),
    /// A model of llama.cpp's.
    Gguf(Box<GgufFile>),
}

/// The parts of an artifact that running it takes.
pub struct Artifact {
    dir: ModelDir,
    config: SparkConfig,
    files: TensorFiles,
    format: Box<dyn Format>,
}

/// What quantized modules are computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernels {
    /// The kernels that the scheme is named after.
    OfTheScheme,
    /// 4-bit weights times float activations, as vLLM does where the processor has no AMX; int8 modules
    /// as ever.
    FloatActivations,
}

impl Artifact {
    /// Opens the artifact in `dir`, of a format known from its manifest.
    ///
    /// # Errors
    /// When its configuration or weights cannot be read.
    pub fn open(dir: ModelDir, format: Box<dyn Format>) -> Result<Self> {
        let (config, _) = artifact_config(&dir)?;
        let files = TensorFiles::open(&dir)?;
        Ok(Self { dir, config, files, format })
    }

    /// The model, whose quantized modules stay packed.
    ///
    /// # Errors
    /// When a tensor is missing or is not what the format says.
    pub fn model(&self) -> Result<Model<'_>> {
        self.model_on(Kernels::OfTheScheme)
    }

    /// The model as a consumer with these kernels computes it.
    ///
    /// # Errors
    /// When a tensor is missing or is not what the format says.
    pub fn model_on(&self, kernels: Kernels) -> Result<Model<'_>> {
        let packed_linear = |packed| match kernels {
            Kernels::OfTheScheme => packed_linear(packed),
            Kernels::FloatActivations => packed_linear_on_floats(packed),
        };
        let read = |spec: &TensorSpec, name: &str, shape: [usize; 2]| -> Result<Option<Packed<'_>>> {
            let Some(codec) = self.format.codec_at(spec.module, spec.layer) else { return Ok(None) };
            if matches!(codec.fits(shape), Fit::Keep(_)) {
                return Ok(None);
            }
            codec.read(&self.files, name, shape).map(Some).map_err(|problems| {
                let first = problems.into_iter().next();
                let (tensor, what) = first.map(|p| (p.tensor, p.what)).unwrap_or_default();
                InputError::file(self.dir.path().display())
                    .subject(tensor)
                    .found(what)
                    .hint("verify tells more")
                    .into()
            })
        };
        let packed = |spec: &TensorSpec| -> Result<Option<Box<dyn Linear + '_>>> {
            let [out, input] = spec.shape[..] else { return Ok(None) };
            if spec.module == Module::QkvProj && self.format.splits_qkv() {
                let mut parts = Vec::new();
                for (name, rows) in qkv_parts(&spec.name, &self.config) {
                    match read(spec, &name, [rows.len(), input])? {
                        Some(part) => parts.push(packed_linear(part)?),
                        None => return Ok(None),
                    }
                }
                return Ok(Some(Box::new(StackedLinear::new(parts)?)));
            }
            read(spec, module_of(&spec.name), [out, input])?.map(packed_linear).transpose()
        };
        let embedding = |spec: &TensorSpec| -> Result<Option<Box<dyn Embedding + '_>>> {
            let [out, input] = spec.shape[..] else { return Ok(None) };
            match read(spec, module_of(&spec.name), [out, input])? {
                Some(Packed::Int4(matrix)) => Ok(Some(Box::new(PackedEmbedding::new(matrix)))),
                _ => Ok(None),
            }
        };
        Model::from_parts(self.config.clone(), Rounding::None, |name| self.files.get(name), packed, embedding)
    }
}

/// The configuration of an artifact: the source's, plus a quantization block that is returned beside it.
///
/// # Errors
/// When it cannot be read.
pub fn artifact_config(dir: &ModelDir) -> Result<(SparkConfig, Option<serde_json::Value>)> {
    let mut json = dir.read_json(CONFIG_FILE)?;
    let block = json.as_object_mut().and_then(|map| map.shift_remove("quantization_config"));
    let config = SparkConfig::parse(&json).map_err(|e| {
        InputError::file(CONFIG_FILE).subject(e.key).expected(e.expected).found(e.found).hint(e.hint)
    })?;
    Ok((config, block))
}

impl Opened {
    /// Opens a GGUF file, or a directory: an artifact if it has a manifest, else a checkpoint.
    ///
    /// # Errors
    /// When it is none of these, or not complete.
    pub fn open(path: &Path) -> Result<Self> {
        if is_gguf(path) {
            return Ok(Self::Gguf(Box::new(GgufFile::open(path)?)));
        }
        let dir = ModelDir::open(path)?;
        if !dir.has(MANIFEST_FILE) {
            return Ok(Self::Checkpoint(Box::new(Checkpoint::open(path)?)));
        }
        let manifest = read_manifest(&dir)?.map_err(|finding| {
            InputError::file(MANIFEST_FILE).found(finding.what).hint("write the artifact again")
        })?;
        let format = formats::from_manifest(&manifest.scheme, &manifest.options)
            .map_err(|what| InputError::file(MANIFEST_FILE).found(what))?;
        Ok(Self::Artifact(Box::new(Artifact::open(dir, format)?)))
    }

    /// The directory; that of a GGUF file is the one that it lies in.
    pub fn dir(&self) -> &ModelDir {
        match self {
            Self::Checkpoint(checkpoint) => &checkpoint.dir,
            Self::Artifact(artifact) => &artifact.dir,
            Self::Gguf(file) => &file.dir,
        }
    }

    /// The architecture.
    pub fn config(&self) -> &SparkConfig {
        match self {
            Self::Checkpoint(checkpoint) => &checkpoint.config,
            Self::Artifact(artifact) => &artifact.config,
            Self::Gguf(file) => &file.config,
        }
    }

    /// The model, in f32 arithmetic around whatever the weights are.
    ///
    /// # Errors
    /// When a tensor is missing or is not what it should be.
    pub fn model(&self) -> Result<Model<'_>> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint_model(checkpoint, Rounding::None),
            Self::Artifact(artifact) => artifact.model(),
            Self::Gguf(file) => gguf_model(file),
        }
    }
}

/// The model of a checkpoint.
///
/// # Errors
/// When a tensor is missing or is not what it should be.
pub fn checkpoint_model(checkpoint: &Checkpoint, rounding: Rounding) -> Result<Model<'_>> {
    Model::from_views(checkpoint.config.clone(), rounding, |name| checkpoint.files.get(name))
}

/// The model of a GGUF file: floats where they lie, blocks decoded as they are multiplied.
///
/// # Errors
/// When a tensor is not what it should be.
pub fn gguf_model(file: &GgufFile) -> Result<Model<'_>> {
    let linear = |spec: &TensorSpec| -> Result<Option<Box<dyn Linear + '_>>> {
        Ok(file
            .blocks(&spec.name)?
            .map(|blocks| -> Box<dyn Linear + '_> { Box::new(BlockLinear::new(blocks)) }))
    };
    let embedding = |spec: &TensorSpec| -> Result<Option<Box<dyn Embedding + '_>>> {
        let blocks = file.blocks(&spec.name)?;
        Ok(blocks.map(|blocks| -> Box<dyn Embedding + '_> { Box::new(BlockEmbedding::new(blocks)) }))
    };
    Model::from_parts(file.config.clone(), Rounding::None, |name| file.floats(name), linear, embedding)
}

/// The tokenizer of a model directory.
///
/// # Errors
/// When tokenizer.json is missing or not one.
pub fn tokenizer(dir: &ModelDir, config: &SparkConfig) -> Result<Tokenizer> {
    const FILE: &str = "tokenizer.json";
    let vocab_size = u32::try_from(config.vocab_size).map_err(|e| InputError::file(CONFIG_FILE).found(e))?;
    Tokenizer::from_json(&dir.read(FILE)?, vocab_size)
        .map_err(|e| InputError::file(FILE).found(e).hint("download the checkpoint's tokenizer again").into())
}

/// The chat template of a model directory, if it has one.
///
/// # Errors
/// When there is one that cannot be used.
pub fn chat_template(dir: &ModelDir) -> Result<Option<ChatTemplate>> {
    let jinja = match dir.has(TEMPLATE_FILE) {
        true => {
            let text = String::from_utf8(dir.read(TEMPLATE_FILE)?);
            Some(text.map_err(|e| Failure::from(InputError::file(TEMPLATE_FILE).expected("UTF-8").found(e)))?)
        }
        false => None,
    };
    if jinja.is_none() && !dir.has(TOKENIZER_CONFIG) {
        return Ok(None);
    }
    match ChatTemplate::from_config(&dir.read(TOKENIZER_CONFIG)?, jinja.as_deref()) {
        Ok(template) => Ok(Some(template)),
        Err(ChatError::Missing) => Ok(None),
        Err(e) => Err(InputError::file(TOKENIZER_CONFIG).found(e).into()),
    }
}

/// Says that a chat needs a template.
pub fn no_chat_template(hint: &str) -> Failure {
    InputError::file(TOKENIZER_CONFIG)
        .expected(format!("a chat_template, here or in {TEMPLATE_FILE}"))
        .found("none")
        .hint(hint)
        .into()
}

const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const TEMPLATE_FILE: &str = "chat_template.jinja";
