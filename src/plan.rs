//! What an artifact will consist of, before anything is read beyond headers or written.
//!
//! The plan decides every name, shape and byte count; the writer holds what arrives to it.

use std::collections::HashMap;

use serde::Serialize;

use crate::checkpoint::{Checkpoint, TensorFiles};
use crate::error::{InputError, Result};
use crate::formats::{Format, Head, OutputTensor};
use crate::spark::{Module, SparkConfig, TensorSpec};
use crate::tensor::element_bytes;

/// What happens to a source tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Written bit for bit.
    Copy,
    /// Written as the format's tensors.
    Quantize,
}

/// One source tensor and the output tensors made of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Name in the source.
    pub source: String,
    /// Its layer, if it belongs to one.
    pub layer: Option<usize>,
    /// What happens to it.
    pub action: Action,
    /// What is written, in file order.
    pub outputs: Vec<OutputTensor>,
}

impl Step {
    /// The module's name: the first output without `.weight`.
    pub fn module(&self) -> &str {
        module_of(&self.outputs[0].name)
    }

    /// Bytes written.
    pub fn len_bytes(&self) -> u64 {
        self.outputs.iter().map(OutputTensor::len_bytes).sum()
    }
}

/// A tensor name without `.weight` (or whatever its last part is).
pub fn module_of(tensor: &str) -> &str {
    tensor.rsplit_once('.').map_or(tensor, |(module, _)| module)
}

/// One file of weights to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedShard {
    /// Bare name, that of the source's shard.
    pub file_name: String,
    /// In file order.
    pub steps: Vec<Step>,
}

/// Everything about an artifact that headers decide.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// One per source shard that has something left to write.
    pub shards: Vec<PlannedShard>,
    /// Sizes.
    pub sizes: Sizes,
}

/// How large the artifact is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Sizes {
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes read per decoded token: every linear, norm and the head; of the embedding one row.
    pub bytes_per_token: u64,
    /// Bits per weight over the tensors, scales included.
    pub bits_per_weight: f64,
    /// Modules quantized.
    pub quantized_modules: usize,
}

impl Plan {
    /// Plans `checkpoint` in `format`.
    ///
    /// # Errors
    /// When a tensor would start at an offset that its elements cannot be read from.
    pub fn new(checkpoint: &Checkpoint, format: &dyn Format) -> Result<Self> {
        let specs: HashMap<&str, &TensorSpec> =
            checkpoint.specs.iter().map(|s| (s.name.as_str(), s)).collect();
        let mut shards = Vec::new();
        for shard in &checkpoint.files.shards {
            let mut steps = Vec::new();
            for entry in &shard.tensors {
                // Stored buffers and a redundant head have no spec: they are left behind, as noted.
                if let Some(spec) = specs.get(entry.name.as_str()) {
                    steps.extend(steps_of(spec, entry.dtype, &checkpoint.config, format));
                }
            }
            if !steps.is_empty() {
                check_alignment(&shard.file_name, &steps)?;
                shards.push(PlannedShard { file_name: shard.file_name.clone(), steps });
            }
        }
        let sizes = sizes(&shards, checkpoint, format);
        Ok(Self { shards, sizes })
    }

    /// Every step with the file it goes to.
    pub fn steps(&self) -> impl Iterator<Item = (&str, &Step)> {
        self.shards.iter().flat_map(|shard| shard.steps.iter().map(|step| (shard.file_name.as_str(), step)))
    }
}

/// The tensors that an artifact of this format holds for one source tensor.
pub fn steps_of(
    spec: &TensorSpec,
    dtype: crate::tensor::Dtype,
    config: &SparkConfig,
    format: &dyn Format,
) -> Vec<Step> {
    let step = |action, outputs| Step { source: spec.name.clone(), layer: spec.layer, action, outputs };
    let copy = || {
        let output = OutputTensor { name: spec.name.clone(), dtype, shape: spec.shape.clone() };
        step(Action::Copy, vec![output])
    };
    let quantize = |module: &str| match spec.shape[..] {
        [out, input] => step(Action::Quantize, format.outputs(module, [out, input])),
        _ => unreachable!("only matrices are quantized"),
    };
    let quantized_head = format.head() == Head::Quantized;
    match spec.module {
        Module::Embedding if config.tie_word_embeddings && quantized_head => {
            vec![copy(), quantize("lm_head")]
        }
        Module::LmHead if quantized_head => vec![quantize("lm_head")],
        module if format.quantizes(module) => vec![quantize(module_of(&spec.name))],
        _ => vec![copy()],
    }
}

/// Readers map the file and cast: an element must not straddle its alignment.
fn check_alignment(file: &str, steps: &[Step]) -> Result<()> {
    let mut offset = 0u64;
    for output in steps.iter().flat_map(|s| &s.outputs) {
        if !offset.is_multiple_of(element_bytes(output.dtype) as u64) {
            return Err(InputError::file(file)
                .subject(&output.name)
                .expected("sizes that keep every tensor aligned to its elements")
                .found(format!("{} at offset {offset}", output.dtype))
                .hint("odd dimensions are not supported by the readers of this format")
                .into());
        }
        offset += output.len_bytes();
    }
    Ok(())
}

fn sizes(shards: &[PlannedShard], checkpoint: &Checkpoint, format: &dyn Format) -> Sizes {
    let steps = || shards.iter().flat_map(|s| &s.steps);
    let tensor_bytes = steps().map(Step::len_bytes).sum();
    let tied_after = checkpoint.config.tie_word_embeddings && format.head() == Head::Source;
    // An untied embedding is only looked up: one row of it.
    let lookup_only: u64 = steps()
        .filter(|s| s.action == Action::Copy && s.source == "model.embedding.weight" && !tied_after)
        .map(|s| s.len_bytes() - s.len_bytes() / checkpoint.config.vocab_size as u64)
        .sum();
    let elements: u64 = steps().map(|s| s.outputs[0].shape.iter().map(|&d| d as u64).product::<u64>()).sum();
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    let bits_per_weight = tensor_bytes as f64 * 8.0 / elements.max(1) as f64;
    Sizes {
        tensor_bytes,
        bytes_per_token: tensor_bytes - lookup_only,
        bits_per_weight,
        quantized_modules: steps().filter(|s| s.action == Action::Quantize).count(),
    }
}

/// Bytes read per decoded token of a stored model, by the same rule as [`Sizes::bytes_per_token`].
pub fn stored_bytes_per_token(files: &TensorFiles, config: &SparkConfig) -> u64 {
    let untied = files.iter().any(|t| t.name.starts_with("lm_head."));
    let lookup_only = files.get("model.embedding.weight").filter(|_| untied).map_or(0, |t| {
        let bytes = t.bytes.len() as u64;
        bytes - bytes / config.vocab_size.max(1) as u64
    });
    files.total_bytes() - lookup_only
}
