//! `inspect`: what a model is, from its headers.

use std::collections::BTreeMap;

use serde_json::json;

use super::{gguf, model_arg, print, print_json, table};
use crate::checkpoint::{Checkpoint, GgufFile, MANIFEST_FILE, ModelDir, TensorFiles, is_gguf};
use crate::cli::InspectArgs;
use crate::error::{Exit, InputError};
use crate::opened::artifact_config;
use crate::plan::stored_bytes_per_token;
use crate::spark::{LayerType, SparkConfig};
use crate::verify::read_manifest;

pub(super) fn run(args: &InspectArgs) -> anyhow::Result<Exit> {
    let path = model_arg::resolve(args.path.as_deref(), "MODEL|ARTIFACT")?;
    if is_gguf(&path) {
        gguf::inspect(&GgufFile::open(&path)?, args)?;
        return Ok(Exit::Done);
    }
    let dir = ModelDir::open(&path)?;
    match dir.has(MANIFEST_FILE) {
        true => artifact(&dir, args)?,
        false => checkpoint(&Checkpoint::open(&path)?, args)?,
    }
    Ok(Exit::Done)
}

fn checkpoint(checkpoint: &Checkpoint, args: &InspectArgs) -> anyhow::Result<()> {
    let parameters: usize = checkpoint.specs.iter().map(|s| s.shape.iter().product::<usize>()).sum();
    let per_token = stored_bytes_per_token(&checkpoint.files, &checkpoint.config);
    if args.json {
        return print_json(&json!({
            "kind": "checkpoint", "model": checkpoint.dir.path(), "architecture": architecture_json(&checkpoint.config),
            "parameters": parameters, "tensor_bytes": checkpoint.files.total_bytes(), "bytes_per_token": per_token,
            "files": files_json(&checkpoint.files), "tensors": args.tensors.then(|| tensors_json(&checkpoint.files)),
            "side_files": checkpoint.side_files, "notes": checkpoint.notes,
        }));
    }
    let mut text = format!(
        "{}: Spark-X2.5 checkpoint, {parameters} parameters in {} tensors, {}, {} read per token\n",
        checkpoint.dir.path().display(),
        checkpoint.files.iter().count(),
        table::bytes(checkpoint.files.total_bytes()),
        table::bytes(per_token),
    );
    text += &architecture_text(&checkpoint.config);
    text += &files_text(&checkpoint.files);
    for note in &checkpoint.notes {
        text += &format!("note: {note}\n");
    }
    if args.tensors {
        text += &tensors_text(&checkpoint.files);
    }
    Ok(print(&text)?)
}

fn artifact(dir: &ModelDir, args: &InspectArgs) -> anyhow::Result<()> {
    let manifest = read_manifest(dir)?.map_err(|finding| {
        InputError::file(MANIFEST_FILE).found(finding.what).hint("write the artifact again")
    });
    let manifest = manifest.map_err(crate::error::Failure::from)?;
    let files = TensorFiles::open(dir)?;
    let (config, quantization) = artifact_config(dir)?;
    if args.json {
        return print_json(&json!({
            "kind": "artifact", "artifact": dir.path(), "scheme": manifest.scheme, "options": manifest.options,
            "made_by": manifest.tool, "architecture": architecture_json(&config), "sizes": manifest.sizes,
            "quantization_config": quantization, "source_files": manifest.source.files, "files": files_json(&files),
            "tensors": args.tensors.then(|| tensors_json(&files)), "notes": manifest.notes,
        }));
    }
    let sizes = manifest.sizes;
    let shown = |v: &serde_json::Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    let options: Vec<_> = manifest.options.iter().map(|(k, v)| format!("{k} {}", shown(v))).collect();
    let mut text = format!(
        "{}: {} artifact ({}) by {} {}, {}, {} read per token, {:.2} bits per weight, {} modules quantized\n",
        dir.path().display(),
        manifest.scheme,
        options.join(", "),
        manifest.tool.name,
        manifest.tool.version,
        table::bytes(sizes.tensor_bytes),
        table::bytes(sizes.bytes_per_token),
        sizes.bits_per_weight,
        sizes.quantized_modules,
    );
    text += &architecture_text(&config);
    text += &files_text(&files);
    for note in &manifest.notes {
        text += &format!("note: {note}\n");
    }
    if args.tensors {
        text += &tensors_text(&files);
    }
    text += "its bytes were not checked; verify does that\n";
    Ok(print(&text)?)
}

pub(super) fn architecture_json(config: &SparkConfig) -> serde_json::Value {
    let count = |kind| config.layer_types.iter().filter(|t| **t == kind).count();
    json!({
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers(), "sliding_layers": count(LayerType::Sliding),
        "full_layers": count(LayerType::Full), "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "vocab_size": config.vocab_size, "sliding_window": config.sliding_window,
        "tie_word_embeddings": config.tie_word_embeddings,
    })
}

pub(super) fn architecture_text(config: &SparkConfig) -> String {
    let count = |kind| config.layer_types.iter().filter(|t| **t == kind).count();
    format!(
        "  hidden {}, MLP {}, {} layers ({} sliding with window {}, {} full), {} query and {} key-value heads of {}, \
         vocabulary {}, {} head\n",
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers(),
        count(LayerType::Sliding),
        config.sliding_window,
        count(LayerType::Full),
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.vocab_size,
        if config.tie_word_embeddings { "tied" } else { "own" },
    )
}

fn files_json(files: &TensorFiles) -> serde_json::Value {
    files
        .shards
        .iter()
        .map(|s| json!({"file": s.file_name, "bytes": s.bytes().len(), "tensors": s.tensors.len()}))
        .collect()
}

fn files_text(files: &TensorFiles) -> String {
    let mut by_dtype: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for tensor in files.iter() {
        let entry = by_dtype.entry(tensor.dtype.to_string()).or_default();
        entry.0 += 1;
        entry.1 += tensor.bytes.len() as u64;
    }
    let mut text = String::new();
    for shard in &files.shards {
        text += &format!(
            "  {}: {} tensors, {}\n",
            shard.file_name,
            shard.tensors.len(),
            table::bytes(shard.bytes().len() as u64)
        );
    }
    let dtypes: Vec<_> =
        by_dtype.iter().map(|(d, (n, b))| format!("{n} of {d} ({})", table::bytes(*b))).collect();
    text + &format!("  tensors by dtype: {}\n", dtypes.join(", "))
}

fn tensors_json(files: &TensorFiles) -> serde_json::Value {
    files
        .iter()
        .map(|t| json!({"name": t.name, "dtype": t.dtype.to_string(), "shape": t.shape, "bytes": t.bytes.len()}))
        .collect()
}

fn tensors_text(files: &TensorFiles) -> String {
    let rows: Vec<_> = files
        .iter()
        .map(|t| {
            vec![t.name.to_owned(), t.dtype.to_string(), format!("{:?}", t.shape), t.bytes.len().to_string()]
        })
        .collect();
    table::table(&rows)
}
