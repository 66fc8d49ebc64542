//! Artifact formats: which tensors stand for a module, how rows become bytes, and how to read them back.
//!
//! One file per artifact kind, one trait. A format decides names, dtypes, shapes and the
//! configuration block; it opens nothing and creates nothing.

mod compressed_tensors;

use std::ops::Range;

use serde_json::{Map, Value};

pub use compressed_tensors::{Int8Matrix, W8a8};

use crate::checkpoint::TensorFiles;
use crate::quant::ErrorSums;
use crate::quant::int8;
use crate::spark::Module;
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
}

/// What becomes of the output head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// Left as the source has it: tied, or its own unquantized tensor.
    Source,
    /// Untied and quantized by the scheme.
    Quantized,
}

/// One kind of artifact with its options.
pub trait Format: Send + Sync {
    /// Name on the command line and in the manifest.
    fn scheme(&self) -> &'static str;

    /// The normalised options that have an effect on bytes, for the manifest.
    fn options(&self) -> Map<String, Value>;

    /// What the default output name says beyond the scheme: everything that is not the default.
    fn name_suffix(&self) -> String;

    /// What becomes of the head.
    fn head(&self) -> Head;

    /// Whether the scheme quantizes this kind of module (the head is asked for separately).
    fn quantizes(&self, module: Module) -> bool;

    /// The tensors that stand for a quantized module of `[out, in]` weights, in file order; the
    /// first takes its bytes row block by row block.
    fn outputs(&self, module: &str, shape: [usize; 2]) -> Vec<OutputTensor>;

    /// Starts to encode a module.
    fn encoder<'a>(&self, source: TensorView<'a>) -> Box<dyn Encoder + 'a>;

    /// Writes the quantization block, and whatever else has to change, into the source's config.json.
    fn patch_config(&self, config: &mut Map<String, Value>);

    /// What a consumer does when the configuration differs at this dotted path.
    fn config_consequence(&self, path: &str) -> &'static str;

    /// What a consumer does without one of the tensors of a module.
    fn missing_consequence(&self, tensor: &str) -> &'static str;

    /// The bars that `verify` holds an artifact to when none are given.
    fn default_gates(&self) -> Gates;

    /// Reads a quantized module back from an artifact's files.
    ///
    /// # Errors
    /// What does not fit the format.
    fn read<'a>(
        &self,
        files: &'a TensorFiles,
        module: &str,
        shape: [usize; 2],
    ) -> Result<Packed<'a>, Vec<Problem>>;
}

/// Turns the rows of one module into the bytes of its output tensors.
pub trait Encoder: Send {
    /// Encodes the next rows and appends the bytes of the first output tensor to `bytes`. The error
    /// sums are of the decoded bytes against the source.
    ///
    /// # Errors
    /// When a weight is NaN or infinite.
    fn encode(&mut self, rows: Range<usize>, bytes: &mut Vec<u8>) -> Result<ErrorSums, NonFinite>;

    /// The bytes of the output tensors after the first, each as a whole.
    fn finish(self: Box<Self>) -> Vec<Vec<u8>>;
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

/// A quantized module as an artifact stores it: borrowed bytes, nothing expanded.
#[derive(Clone, Debug)]
pub enum Packed<'a> {
    /// Symmetric int8 with a scale per row.
    Int8(Int8Matrix<'a>),
}

impl Packed<'_> {
    /// Decodes a row of weights, `[in]`.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::Int8(matrix) => int8::decode_row(matrix.row_codes(row), matrix.scales[row], out),
        }
    }

    /// Squared error of a row against its source, whose largest absolute value is `amax`; `None` when
    /// it is more than any encoder of this format can have left.
    pub fn row_error(&self, row: usize, source: &[f32], amax: f32) -> Option<ErrorSums> {
        match self {
            Self::Int8(matrix) => {
                let sums = int8::row_error(source, matrix.row_codes(row), matrix.scales[row]);
                (sums.noise <= int8::rounding_bound(source.len(), amax)).then_some(sums)
            }
        }
    }
}

/// The format of a manifest's scheme and options.
///
/// # Errors
/// What is not known to this version.
pub fn from_manifest(scheme: &str, options: &Map<String, Value>) -> Result<Box<dyn Format>, String> {
    match scheme {
        W8a8::SCHEME => W8a8::from_options(options).map(|format| Box::new(format) as Box<dyn Format>),
        other => Err(format!("scheme {other:?} is not known to this version")),
    }
}
