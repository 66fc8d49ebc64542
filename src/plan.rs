//! What an artifact will consist of, before anything is read beyond headers or written.
//!
//! The plan decides every name, shape and byte count; the writer holds what arrives to it.

use std::collections::HashMap;
use std::ops::Range;

use serde::Serialize;

use crate::checkpoint::{Checkpoint, TensorFiles};
use crate::error::{InputError, Result};
use crate::formats::{Fit, Format, OutputTensor, kept_modules};
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

/// A source tensor, or some rows of it, and the output tensors made of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Name in the source.
    pub source: String,
    /// The rows of the source that go into it.
    pub rows: Range<usize>,
    /// What the outputs are to the model; the embedding makes a head of its own, too.
    pub module: Module,
    /// Its layer, if it belongs to one.
    pub layer: Option<usize>,
    /// What happens to it.
    pub action: Action,
    /// `[out, in]`, or `[1, hidden]` of a norm.
    pub shape: [usize; 2],
    /// What is written, in file order.
    pub outputs: Vec<OutputTensor>,
}

impl Step {
    /// The module's name: the first output without its last part.
    pub fn module_name(&self) -> &str {
        module_of(&self.outputs[0].name)
    }

    /// Bytes written.
    pub fn len_bytes(&self) -> u64 {
        self.outputs.iter().map(OutputTensor::len_bytes).sum()
    }

    /// Weights that the outputs stand for.
    pub fn weights(&self) -> u64 {
        self.shape[0] as u64 * self.shape[1] as u64
    }
}

/// A tensor name without `.weight` (or whatever its last part is).
pub fn module_of(tensor: &str) -> &str {
    tensor.rsplit_once('.').map_or(tensor, |(module, _)| module)
}

/// One file of weights to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedShard {
    /// Bare name, that of the source's shard; `model.safetensors` for a GGUF file.
    pub file_name: String,
    /// In file order.
    pub steps: Vec<Step>,
}

/// Everything about an artifact that headers decide.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// One per source shard that has something left to write.
    pub shards: Vec<PlannedShard>,
    /// Matrices that the format cannot tile and that are left as they are: module and reason.
    pub kept: Vec<(String, String)>,
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
    /// When a matrix does not go with the format's options, or a tensor would start at an offset that
    /// its elements cannot be read from.
    pub fn new(checkpoint: &Checkpoint, format: &dyn Format) -> Result<Self> {
        check_fit(checkpoint, format)?;
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
                shards.push(PlannedShard { file_name: shard.stored_as.clone(), steps });
            }
        }
        let sizes = sizes(&shards, checkpoint, format);
        Ok(Self { shards, kept: kept_modules(format, &checkpoint.config), sizes })
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
    let shape = match spec.shape[..] {
        [out, input] => [out, input],
        _ => [1, spec.shape.iter().product()],
    };
    let step = |module, rows: Range<usize>, action, outputs| Step {
        source: spec.name.clone(),
        shape: [rows.len(), shape[1]],
        rows,
        module,
        layer: spec.layer,
        action,
        outputs,
    };
    let copy = || {
        let output = OutputTensor { name: spec.name.clone(), dtype, shape: spec.shape.clone() };
        step(spec.module, 0..shape[0], Action::Copy, vec![output])
    };
    let quantize = |module: Module, name: &str, rows: Range<usize>| {
        let codec =
            format.codec_at(module, spec.layer).filter(|codec| !matches!(codec.fits(shape), Fit::Keep(_)))?;
        let outputs = codec.outputs(name, [rows.len(), shape[1]]);
        Some(step(module, rows, Action::Quantize, outputs))
    };
    let whole = 0..shape[0];
    match spec.module {
        Module::Embedding if config.tie_word_embeddings && format.unties_head() => {
            [copy()].into_iter().chain(quantize(Module::LmHead, "lm_head", whole)).collect()
        }
        Module::QkvProj if format.splits_qkv() => qkv_parts(&spec.name, config)
            .into_iter()
            .filter_map(|(name, rows)| quantize(Module::QkvProj, &name, rows))
            .collect(),
        module => vec![quantize(module, module_of(&spec.name), whole).unwrap_or_else(copy)],
    }
}

/// The modules q, k and v of a fused `q_k_v_proj` tensor, with their rows.
pub fn qkv_parts(fused: &str, config: &SparkConfig) -> [(String, Range<usize>); 3] {
    let (q, kv) = (config.q_rows(), config.kv_rows());
    let attention = module_of(module_of(fused));
    [("q_proj", 0..q), ("k_proj", q..q + kv), ("v_proj", q + kv..q + 2 * kv)]
        .map(|(part, rows)| (format!("{attention}.{part}"), rows))
}

/// Refuses a checkpoint whose matrices the format's options do not go with, before anything is written.
fn check_fit(checkpoint: &Checkpoint, format: &dyn Format) -> Result<()> {
    let config = &checkpoint.config;
    let refuse = |tensor: &str, why: String, hint: &str| {
        Err(InputError::file(crate::checkpoint::CONFIG_FILE).subject(tensor).found(why).hint(hint).into())
    };
    if format.codec(Module::Embedding).is_some() && !config.tie_word_embeddings {
        let why = "the checkpoint has a head of its own, and a quantized embedding is for tied ones";
        return refuse("tie_word_embeddings", why.to_owned(), "leave --quantize-embedding out");
    }
    for spec in &checkpoint.specs {
        let [_, input] = spec.shape[..] else { continue };
        let head = match spec.module {
            Module::Embedding if config.tie_word_embeddings => format.codec(Module::LmHead),
            _ => None,
        };
        if let Some(Fit::Keep(why) | Fit::Refuse(why)) = head.map(|c| c.fits([spec.shape[0], input])) {
            return refuse(&spec.name, why, "--head bf16 leaves the head tied to the embedding");
        }
        let whole = [(String::new(), 0..spec.shape[0])];
        let parts = match spec.module {
            Module::QkvProj if format.splits_qkv() => qkv_parts(&spec.name, config).to_vec(),
            _ => whole.to_vec(),
        };
        for (_, rows) in parts {
            let fit = format.codec_at(spec.module, spec.layer).map(|codec| codec.fits([rows.len(), input]));
            match (fit, spec.module) {
                (Some(Fit::Refuse(why)), _) => {
                    return refuse(&spec.name, why, "choose options that fit, or --scheme w8a8");
                }
                (Some(Fit::Keep(why)), Module::LmHead | Module::Embedding) => {
                    return refuse(&spec.name, why, "--head bf16 leaves the head as it is");
                }
                _ => {}
            }
        }
    }
    Ok(())
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
    let tied_after = checkpoint.config.tie_word_embeddings && !format.unties_head();
    // An untied embedding is only looked up: one row of it.
    let lookup_only: u64 = steps()
        .filter(|s| s.action == Action::Copy && s.source == "model.embedding.weight" && !tied_after)
        .map(|s| s.len_bytes() - s.len_bytes() / checkpoint.config.vocab_size as u64)
        .sum();
    let elements: u64 = steps().map(Step::weights).sum();
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
