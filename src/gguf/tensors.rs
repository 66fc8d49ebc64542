//! Which tensor of a Spark GGUF is which of the checkpoint.

use std::collections::HashMap;

use super::{Header, TensorInfo};
use crate::error::InputError;
use crate::ggml::TensorType;
use crate::spark::{Module, SparkConfig, TensorSpec, tensor_specs};

/// The output head, where it is not the embedding.
pub(super) const HEAD: &str = "output.weight";

/// What the file calls a tensor of the checkpoint. Rows and columns are those of the checkpoint: q, k and
/// v are fused in this order and not permuted, since the rotary pairs are those of the published code.
pub fn tensor_name(spec: &TensorSpec) -> String {
    let part = match spec.module {
        Module::Embedding => "token_embd",
        Module::QkvProj => "attn_qkv",
        Module::HeadGate => "attn_gate",
        Module::OutProj => "attn_output",
        Module::MlpGate => "ffn_gate",
        Module::MlpUp => "ffn_up",
        Module::MlpDown => "ffn_down",
        Module::InputNorm => "attn_norm",
        Module::PostAttentionNorm => "ffn_norm",
        Module::FinalNorm => "output_norm",
        Module::LmHead => return HEAD.to_owned(),
    };
    match spec.layer {
        Some(layer) => format!("blk.{layer}.{part}.weight"),
        None => format!("{part}.weight"),
    }
}

/// Compares the tensors of the file with those of the architecture, and returns the index of each of the
/// latter in [`Header::tensors`], in the order of [`tensor_specs`].
///
/// # Errors
/// The first tensor that is missing, of another shape, unknown, or a norm in blocks.
pub fn check_inventory(
    file: &str,
    header: &Header,
    config: &SparkConfig,
) -> Result<Vec<(TensorSpec, usize)>, InputError> {
    let mut stored: HashMap<&str, usize> =
        header.tensors.iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect();
    let mut found = Vec::new();
    for spec in tensor_specs(config) {
        let name = tensor_name(&spec);
        let error = || InputError::file(file).subject(&name);
        let Some(i) = stored.remove(name.as_str()) else {
            let expected = format!("a tensor of shape {:?}", spec.shape);
            return Err(error().expected(expected).found("no such tensor").hint(missing_hint(header, &spec)));
        };
        let tensor = &header.tensors[i];
        if tensor.shape != spec.shape {
            let expected = format!("shape {:?} (from the metadata, rows first)", spec.shape);
            return Err(error().expected(expected).found(format!("{:?}", tensor.shape)));
        }
        if spec.shape.len() < 2 && !matches!(tensor.kind, TensorType::Float(_)) {
            return Err(error().expected("a norm in F32, F16 or BF16").found(tensor.kind.name()));
        }
        found.push((spec, i));
    }
    let unknown: Vec<&TensorInfo> =
        header.tensors.iter().filter(|t| stored.contains_key(t.name.as_str())).collect();
    if let Some(first) = unknown.first() {
        let others =
            if unknown.len() > 1 { format!(" (and {} more)", unknown.len() - 1) } else { String::new() };
        return Err(InputError::file(file)
            .subject(&first.name)
            .expected("only tensors of the Spark-X2.5 architecture")
            .found(format!("a tensor of shape {:?} that it does not have{others}", first.shape)));
    }
    Ok(found)
}

/// A loader also takes q, k and v apart; no converter writes them so.
fn missing_hint(header: &Header, spec: &TensorSpec) -> &'static str {
    let split = header.tensors.iter().any(|t| t.name.ends_with(".attn_q.weight"));
    match spec.module {
        Module::QkvProj if split => "q, k and v are stored apart; convert with llama.cpp's own script",
        _ => "the file is not complete, or its metadata belong to another model",
    }
}
