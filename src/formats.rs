//! Artifact formats: which tensors stand for a module, how rows become bytes, and how to read them back.
//!
//! Two levels. A [`Codec`] is one way to store one matrix: tensors, bytes, checks. A [`Format`] is one
//! kind of artifact: which module takes which codec, and the configuration that tells the consumer so.
//! One file each; neither opens nor creates anything.

mod compressed_tensors;
mod int4;
mod int8;
mod overrides;
mod packed;
mod read;
mod solved;
mod w4a16;
mod w4a8;
mod w8a8;

use std::ops::Range;

use serde_json::{Map, Value};

pub use int4::{Int4, Signs};
pub use int8::{Activations, Int8, Int8Matrix};
pub use overrides::{Overrides, Width};
pub use packed::{Packed, Tolerance};
pub use solved::{Choice, Inputs, SolvedRows};
pub use w4a8::{Packing, QkvTensors, W4a8};
pub use w4a16::{Layout, W4a16};
pub use w8a8::W8a8;

use crate::checkpoint::TensorFiles;
use crate::quant::{ErrorSums, Method};
use crate::spark::{Module, SparkConfig, tensor_specs};
use crate::tensor::{Dtype, NonFinite, TensorView, element_bytes};

/// A tensor that an artifact stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputTensor {
    /// Full name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
}

impl OutputTensor {
    /// Bytes of its data.
    pub fn len_bytes(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product::<u64>() * element_bytes(self.dtype) as u64
    }
}

/// Bars for the figures that `verify` measures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gates {
    /// Lowest weight SNR of any module.
    pub min_weight_snr_db: f64,
    /// Lowest SNR of the logits over all scenarios.
    pub min_snr_db: f64,
    /// Highest mean KL divergence over all scenarios, in nats per token.
    pub max_kld: f64,
    /// Lowest share of the greedy tokens kept.
    pub min_greedy: f64,
    /// Lowest share of the tool calls kept, where there are enough to tell (`gates::FEW_CALLS`).
    pub min_actions: f64,
}

/// How many bits the output head gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// Left as the source has it: tied, or its own unquantized tensor.
    Source,
    /// Untied, 8 bits per weight.
    Int8,
    /// Untied, 4 bits per weight.
    Int4,
}

impl Head {
    /// As options spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "4bit",
        }
    }

    /// The inverse of [`Head::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Source, Self::Int8, Self::Int4].into_iter().find(|head| head.name() == name)
    }
}

/// Whether a codec can store a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fit {
    /// It can.
    Fits,
    /// The matrix does not tile: it is left as the source has it, and listed.
    Keep(String),
    /// The options do not go with the model: what would be needed.
    Refuse(String),
}

/// One kind of artifact with its options.
pub trait Format: Send + Sync {
    /// Name on the command line and in the manifest.
    fn scheme(&self) -> &'static str;

    /// The normalised options that have an effect on bytes, for the manifest.
    fn options(&self) -> Map<String, Value>;

    /// What the default output name says beyond the scheme: everything that is not the default.
    fn name_suffix(&self) -> String;

    /// How a kind of module is stored; `None` leaves it as the source has it. For the head, whether it
    /// is stored apart from the embedding.
    fn codec(&self, module: Module) -> Option<&dyn Codec>;

    /// The same for one layer's module: some may be overridden.
    fn codec_at(&self, module: Module, _layer: Option<usize>) -> Option<&dyn Codec> {
        self.codec(module)
    }

    /// Whether q, k and v are modules of their own.
    fn splits_qkv(&self) -> bool {
        false
    }

    /// Writes the quantization block, and whatever else has to change, into the source's config.json.
    /// `kept` are the modules that have a codec and don't fit it.
    fn patch_config(&self, config: &mut Map<String, Value>, kept: &[String]);

    /// Further files, from the patched config.json: name and content.
    fn further_files(&self, _config: &Map<String, Value>) -> Vec<(&'static str, Value)> {
        Vec::new()
    }

    /// What a consumer does when the configuration differs at this dotted path.
    fn config_consequence(&self, path: &str) -> &'static str;

    /// The bars that `verify` holds an artifact to when none are given.
    fn default_gates(&self) -> Gates;

    /// How codes and grids are chosen.
    fn method(&self) -> Method;

    /// Whether the head is stored as a module of its own.
    fn unties_head(&self) -> bool {
        self.codec(Module::LmHead).is_some()
    }
}

/// One way to store a matrix.
pub trait Codec: Send + Sync {
    /// The scheme of a module, for the manifest.
    fn scheme(&self) -> &'static str;

    /// Weights per scale along a row; `None` where a scale covers the row.
    fn group_size(&self) -> Option<usize>;

    /// Whether a matrix `[out, in]` can be stored.
    fn fits(&self, shape: [usize; 2]) -> Fit;

    /// Rows are encoded in blocks of a multiple of this (but for the last block).
    fn row_multiple(&self) -> usize {
        1
    }

    /// The tensors that stand for a module of `[out, in]` weights, in file order.
    fn outputs(&self, module: &str, shape: [usize; 2]) -> Vec<OutputTensor>;

    /// Starts to encode some rows of a source tensor as a module.
    fn encoder<'a>(
        &'a self,
        source: TensorView<'a>,
        rows: Range<usize>,
        choice: Choice<'a>,
    ) -> Box<dyn Encoder + 'a>;

    /// Chooses grids and codes of rows of weights `[n, in]` for the inputs that `solver` has seen.
    fn solve(&self, weights: &[f32], inputs: &Inputs) -> SolvedRows;

    /// Bytes of a row of [`SolvedRows::bytes`].
    fn solved_row_bytes(&self, in_features: usize) -> usize;

    /// Rows of weights `[n, in]` as they come back once they are stored, each chosen by itself. The squared
    /// error of each column `[in]` counts by `importance`, as in [`Choice::Weighted`].
    fn round(&self, weights: &[f32], in_features: usize, importance: Option<&[f32]>) -> Vec<f32>;

    /// Whether the consumer rounds inputs to int8 with a scale per token.
    fn rounds_inputs(&self) -> bool;

    /// Whether [`Choice::Weighted`] makes a difference.
    fn takes_importance(&self) -> bool;

    /// Anonymous bytes that an encoder of this shape holds beyond a block of rows.
    fn encoder_bytes(&self, shape: [usize; 2]) -> u64;

    /// What a consumer does without one of the tensors of a module.
    fn missing_consequence(&self, tensor: &str) -> &'static str;

    /// Reads a module back from an artifact's files.
    ///
    /// # Errors
    /// What does not fit the codec.
    fn read<'a>(
        &self,
        files: &'a TensorFiles,
        module: &str,
        shape: [usize; 2],
    ) -> Result<Packed<'a>, Vec<Problem>>;
}

/// Turns the rows of one module into the bytes of its output tensors, which are asked for in file
/// order: what [`encode`](Encoder::encode) appends belongs to the first, the rest comes from
/// [`finish`](Encoder::finish).
pub trait Encoder: Send {
    /// Encodes the next rows. The error sums are of the decoded bytes against the source.
    ///
    /// # Errors
    /// When a weight is NaN or infinite.
    fn encode(&mut self, rows: Range<usize>, bytes: &mut Vec<u8>) -> Result<ErrorSums, NonFinite>;

    /// Appends the next bytes, of one tensor only; whether there may be more.
    fn finish(&mut self, bytes: &mut Vec<u8>) -> bool;
}

/// Something in an artifact that its consumer would stumble over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The tensor.
    pub tensor: String,
    /// What was expected and what was found.
    pub what: String,
    /// What the consumer does.
    pub consequence: &'static str,
}

/// The matrices that a format quantizes in general but cannot tile, with the reason.
pub fn kept_modules(format: &dyn Format, config: &SparkConfig) -> Vec<(String, String)> {
    let specs = tensor_specs(config);
    let kept = |spec: &crate::spark::TensorSpec| {
        let [out, input] = spec.shape[..] else { return None };
        match format.codec_at(spec.module, spec.layer)?.fits([out, input]) {
            Fit::Keep(why) => Some((crate::plan::module_of(&spec.name).to_owned(), why)),
            _ => None,
        }
    };
    specs.iter().filter_map(kept).collect()
}

/// The format of a manifest's scheme and options.
///
/// # Errors
/// What is not known to this version.
pub fn from_manifest(scheme: &str, options: &Map<String, Value>) -> Result<Box<dyn Format>, String> {
    match scheme {
        W8a8::SCHEME => W8a8::from_options(options).map(|format| Box::new(format) as Box<dyn Format>),
        W4a8::SCHEME => W4a8::from_options(options).map(|format| Box::new(format) as Box<dyn Format>),
        W4a16::SCHEME => W4a16::from_options(options).map(|format| Box::new(format) as Box<dyn Format>),
        other => Err(format!("scheme {other:?} is not known to this version")),
    }
}

/// Options as a manifest has them, read back key by key; whatever is left over is an error.
struct Options<'a> {
    options: &'a Map<String, Value>,
    taken: Vec<&'static str>,
}

impl<'a> Options<'a> {
    fn new(options: &'a Map<String, Value>) -> Self {
        Self { options, taken: Vec::new() }
    }

    /// The value of `key`, as `parse` understands it.
    fn take<T>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, String> {
        self.taken.push(key);
        let value = self.options.get(key).unwrap_or(&Value::Null);
        parse(value).ok_or_else(|| format!("options.{key} {value} is not known to this version"))
    }

    fn text<T>(&mut self, key: &'static str, parse: impl FnOnce(&str) -> Option<T>) -> Result<T, String> {
        self.take(key, |value| value.as_str().and_then(parse))
    }

    fn finish(self) -> Result<(), String> {
        match self.options.keys().find(|key| !self.taken.contains(&key.as_str())) {
            Some(key) => Err(format!("options.{key} is not known to this version")),
            None => Ok(()),
        }
    }
}
