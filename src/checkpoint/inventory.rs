//! The tensors of a checkpoint against those of the architecture: all there, of the right shape and
//! of a float dtype; nothing unknown.

use std::collections::HashSet;

use super::TensorFiles;
use crate::error::{InputError, Result};
use crate::spark::{SparkConfig, TensorSpec, is_known_buffer, tensor_specs};
use crate::tensor::dtype_name;

/// What a checkpoint holds.
pub(super) struct Inventory {
    /// Every tensor the architecture needs.
    pub(super) specs: Vec<TensorSpec>,
    /// Stored tensors that are passed over, with the reason.
    pub(super) dropped: Vec<(String, String)>,
}

/// Compares the stored tensors with the architecture.
///
/// # Errors
/// The first tensor that is missing, of another shape or dtype, or unknown, with the number of
/// others like it.
pub(super) fn check(config: &SparkConfig, files: &TensorFiles) -> Result<Inventory> {
    let specs = tensor_specs(config);
    refuse_quantized(files)?;

    let missing: Vec<_> = specs.iter().filter(|s| files.get(&s.name).is_none()).collect();
    if let Some(first) = missing.first() {
        let hint = match first.name.as_str() {
            "lm_head.weight" => "tie_word_embeddings is false, so the head needs its own tensor",
            _ => "the checkpoint is not complete, or config.json belongs to another one",
        };
        return Err(InputError::file(place(files))
            .subject(&first.name)
            .expected(format!("a tensor of shape {:?}", first.shape))
            .found(format!("no such tensor{}", and_others(missing.len())))
            .hint(hint)
            .into());
    }
    for spec in &specs {
        let Some(tensor) = files.get(&spec.name) else { continue };
        let file = files.shard_of(&spec.name).map_or("", |s| s.file_name.as_str());
        if tensor.shape != spec.shape {
            return Err(InputError::file(file)
                .subject(&spec.name)
                .expected(format!("shape {:?} (from config.json)", spec.shape))
                .found(format!("{:?}", tensor.shape))
                .into());
        }
        if !tensor.is_float() {
            return Err(InputError::file(file)
                .subject(&spec.name)
                .expected("BF16, F16 or F32")
                .found(dtype_name(tensor.dtype))
                .hint("use the full-precision checkpoint")
                .into());
        }
    }

    let mut dropped = Vec::new();
    let mut unknown = Vec::new();
    let known: HashSet<&str> = specs.iter().map(|s| s.name.as_str()).collect();
    for tensor in files.iter() {
        if known.contains(tensor.name) {
            continue;
        }
        if is_known_buffer(tensor.name) {
            dropped.push((tensor.name.to_owned(), "a rotary buffer, which loaders compute".to_owned()));
        } else if tensor.name == "lm_head.weight" {
            redundant_head(files, &mut dropped)?;
        } else {
            unknown.push(tensor);
        }
    }
    if let Some(first) = unknown.first() {
        return Err(InputError::file(files.shard_of(first.name).map_or("", |s| s.file_name.as_str()))
            .subject(first.name)
            .expected("only tensors of the Spark-X2.5 architecture")
            .found(format!(
                "a tensor of shape {:?} that it does not have{}",
                first.shape,
                and_others(unknown.len())
            ))
            .hint("an adapter has to be merged first; a changed architecture is not supported")
            .into());
    }
    Ok(Inventory { specs, dropped })
}

/// A stored head beside `tie_word_embeddings: true` is redundant when it equals the embedding.
/// When it differs, following the flag would quietly throw a trained head away.
fn redundant_head(files: &TensorFiles, dropped: &mut Vec<(String, String)>) -> Result<()> {
    let (Some(head), Some(embedding)) = (files.get("lm_head.weight"), files.get("model.embedding.weight"))
    else {
        return Ok(());
    };
    if head.dtype != embedding.dtype || head.shape != embedding.shape || head.bytes != embedding.bytes {
        return Err(InputError::file(files.shard_of(head.name).map_or("", |s| s.file_name.as_str()))
            .subject(head.name)
            .expected("a copy of model.embedding.weight, since tie_word_embeddings is true")
            .found("other values")
            .hint("set tie_word_embeddings to false to use it, or remove it")
            .into());
    }
    dropped.push((head.name.to_owned(), "a copy of the tied embedding".to_owned()));
    Ok(())
}

/// Names that only quantized checkpoints have.
fn refuse_quantized(files: &TensorFiles) -> Result<()> {
    const SUFFIXES: &[&str] = &[
        ".weight_scale",
        ".weight_scale_inv",
        ".weight_zero_point",
        ".weight_packed",
        ".qweight",
        ".qzeros",
        ".scales",
        ".g_idx",
        ".scales_and_zeros",
        ".SCB",
        ".absmax",
        ".quant_map",
        ".quant_state.bitsandbytes__nf4",
        ".biases",
    ];
    for tensor in files.iter() {
        let by_name = SUFFIXES.iter().any(|s| tensor.name.ends_with(s));
        let by_dtype = tensor.name.ends_with(".weight") && !tensor.is_float();
        if by_name || by_dtype {
            return Err(InputError::file(files.shard_of(tensor.name).map_or("", |s| s.file_name.as_str()))
                .subject(tensor.name)
                .expected("a full-precision checkpoint")
                .found(format!("an already quantized one ({} tensor)", dtype_name(tensor.dtype)))
                .hint("use the checkpoint it was made from")
                .into());
        }
    }
    Ok(())
}

fn place(files: &TensorFiles) -> String {
    match files.shards.as_slice() {
        [one] => one.file_name.clone(),
        _ => super::INDEX_FILE.to_owned(),
    }
}

fn and_others(count: usize) -> String {
    if count > 1 { format!(" (and {} more like it)", count - 1) } else { String::new() }
}
