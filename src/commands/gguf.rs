//! What commands do with GGUF files: `inspect`, and the form of GELU.

use serde_json::json;

use super::inspect::{architecture_json, architecture_text};
use super::{print, print_json, table};
use crate::checkpoint::GgufFile;
use crate::cli::{GeluArg, InspectArgs};
use crate::error::Failure;
use crate::gguf::Value;
use crate::runtime::Gelu;

/// The form that was asked for.
pub(super) fn gelu(argument: Option<GeluArg>) -> Gelu {
    match argument {
        Some(GeluArg::Tanh) => Gelu::Tanh,
        Some(GeluArg::Exact) | None => Gelu::Exact,
    }
}

/// Checkpoints and artifacts say which form they are for.
pub(super) fn gelu_of_others() -> Failure {
    Failure::usage(
        "--gelu is for GGUF files: checkpoints and artifacts run with the GELU of their config.json",
    )
}

/// `140 Q4_K, 29 Q6_K, 57 F32`.
pub(super) fn types_text(file: &GgufFile) -> String {
    let types: Vec<_> = file.by_type().iter().map(|(name, (count, _))| format!("{count} {name}")).collect();
    types.join(", ")
}

/// Tensors by type, for JSON.
pub(super) fn types_json(file: &GgufFile) -> serde_json::Value {
    file.by_type()
        .into_iter()
        .map(|(name, (count, bytes))| (name.to_owned(), json!({"tensors": count, "bytes": bytes})))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// Says what a file is, from its header.
pub(super) fn inspect(file: &GgufFile, args: &InspectArgs) -> anyhow::Result<()> {
    let parameters: usize = file.specs.iter().map(|s| s.shape.iter().product::<usize>()).sum();
    let path = file.dir.path().join(&file.file_name);
    let notes = &file.config.notes;
    if args.json {
        let metadata: serde_json::Map<_, _> =
            file.metadata().iter().map(|(key, value)| (key.to_owned(), value_json(value))).collect();
        return print_json(&json!({
            "kind": "gguf", "model": path, "version": file.version(),
            "architecture": architecture_json(&file.config), "parameters": parameters,
            "bytes": file.bytes().len(), "tensor_bytes": file.tensor_bytes(),
            "bytes_per_token": file.bytes_per_token(), "types": types_json(file),
            "tensors": args.tensors.then(|| tensors_json(file)), "metadata": metadata, "notes": notes,
        }));
    }
    let mut text = format!(
        "{}: Spark-X2.5 in GGUF version {}, {parameters} parameters in {} tensors, {}, {} read per token\n",
        path.display(),
        file.version(),
        file.tensors().len(),
        table::bytes(file.tensor_bytes()),
        table::bytes(file.bytes_per_token()),
    );
    text += &architecture_text(&file.config);
    let types: Vec<_> = (file.by_type().into_iter())
        .map(|(name, (count, bytes))| format!("{count} of {name} ({})", table::bytes(bytes)))
        .collect();
    text += &format!("  tensors by type: {}\n", types.join(", "));
    for note in notes {
        text += &format!("note: {note}\n");
    }
    if args.tensors {
        let rows: Vec<_> = (file.tensors().iter())
            .map(|t| {
                vec![
                    t.name.clone(),
                    t.kind.name().to_owned(),
                    format!("{:?}", t.shape),
                    t.range.len().to_string(),
                ]
            })
            .collect();
        text += &table::table(&rows);
    }
    Ok(print(&text)?)
}

fn tensors_json(file: &GgufFile) -> serde_json::Value {
    file.tensors()
        .iter()
        .map(|t| {
            json!({
                "name": t.name, "type": t.kind.name(), "shape": t.shape, "offset": t.range.start,
                "bytes": t.range.len(),
            })
        })
        .collect()
}

/// A value of the metadata; of a list only its length, of a text its beginning.
fn value_json(value: &Value) -> serde_json::Value {
    match value {
        Value::Whole(n) => i64::try_from(*n).map_or_else(|_| json!(n.to_string()), |n| json!(n)),
        Value::Float(x) => json!(x),
        Value::Bool(b) => json!(b),
        Value::Text(text) if text.chars().count() <= 200 => json!(text),
        Value::Text(text) => json!({"characters": text.chars().count()}),
        Value::List(list) => json!({"elements": list.count()}),
    }
}
