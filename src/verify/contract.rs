//! What the consumer needs, read from the written files: configuration, names, dtypes, shapes,
//! alignment, completeness. Each finding says what the consumer would do.

use std::collections::HashSet;

use serde_json::Value;

use super::json_diff::diff;
use super::{Check, Finding};
use crate::checkpoint::{CONFIG_FILE, Checkpoint, INDEX_FILE, MANIFEST_FILE, ModelDir, TensorFiles};
use crate::convert::{further_files, patched_config};
use crate::formats::Format;
use crate::plan::{Action, Step, steps_of};
use crate::smooth::Smoothing;
use crate::tensor::element_bytes;

/// Checks an artifact of `format` against the checkpoint it was made from.
pub fn check_contract(
    dir: &ModelDir,
    files: &TensorFiles,
    checkpoint: &Checkpoint,
    smoothing: Option<&Smoothing>,
    format: &dyn Format,
) -> Vec<Finding> {
    let mut findings = check_config(dir, checkpoint, format);
    findings.extend(check_headers(files));
    let fitting = smoothing.filter(|s| s.fits(&checkpoint.config));
    if smoothing.is_some() && fitting.is_none() {
        let what = "the folds are of a model of other sizes";
        findings.push(Finding::new(Check::Contract, MANIFEST_FILE, what).subject("smoothing"));
    }
    findings.extend(check_tensors(files, checkpoint, fitting, format));
    for name in &checkpoint.side_files {
        if !dir.has(name) {
            findings.push(
                Finding::new(Check::Contract, name, "missing, and the source has it")
                    .consequence("the directory does not load by itself: tokenizer, template and defaults come from such files"),
            );
        }
    }
    findings
}

/// Every step of an artifact of this format, in the architecture's order.
pub(super) fn expected_steps(checkpoint: &Checkpoint, format: &dyn Format) -> Vec<Step> {
    let of = |spec| steps_of(spec, checkpoint.tensor(&spec.name).dtype, &checkpoint.config, format);
    checkpoint.specs.iter().flat_map(of).collect()
}

fn check_config(dir: &ModelDir, checkpoint: &Checkpoint, format: &dyn Format) -> Vec<Finding> {
    // What this format makes of the source's configuration, by the same rule that a conversion follows.
    let expected = Value::Object(patched_config(checkpoint, format));
    let consequence = |path: &str| format.config_consequence(path);
    let mut findings = check_json(dir, CONFIG_FILE, &expected, "no loader starts", consequence);
    for (name, expected) in further_files(checkpoint, format) {
        let consequence = |path: &str| format.config_consequence(&format!("quantization_config.{path}"));
        findings.extend(check_json(
            dir,
            name,
            &expected,
            "readers that look for this file stop",
            consequence,
        ));
    }
    findings
}

/// Every difference between what a JSON file should hold and what it does.
fn check_json(
    dir: &ModelDir,
    name: &str,
    expected: &Value,
    unreadable: &'static str,
    consequence: impl Fn(&str) -> &'static str,
) -> Vec<Finding> {
    match dir.read_json(name) {
        Err(e) => vec![Finding::new(Check::Contract, name, e.to_string()).consequence(unreadable)],
        Ok(written) => diff(expected, &written)
            .into_iter()
            .map(|d| {
                Finding::new(Check::Contract, name, format!("expected {}, found {}", d.expected, d.found))
                    .consequence(consequence(&d.path))
                    .subject(d.path)
            })
            .collect(),
    }
}

fn check_headers(files: &TensorFiles) -> Vec<Finding> {
    let mut findings = Vec::new();
    for shard in &files.shards {
        if shard.format.as_deref() != Some("pt") {
            findings.push(
                Finding::new(
                    Check::Contract,
                    &shard.file_name,
                    "the header's metadata does not say \"format\": \"pt\"",
                )
                .consequence("transformers refuses the file"),
            );
        }
        for tensor in &shard.tensors {
            if tensor.offset() % element_bytes(tensor.dtype) as u64 != 0 {
                findings.push(
                    Finding::new(
                        Check::Contract,
                        &shard.file_name,
                        format!("starts at byte {}", tensor.offset()),
                    )
                    .subject(&tensor.name)
                    .consequence("readers that map the file cannot cast it to its elements"),
                );
            }
        }
    }
    findings.extend(files.notes.iter().map(|note| {
        Finding::new(Check::Contract, INDEX_FILE, note.clone())
            .consequence("readers that trust the total misjudge the size")
    }));
    findings
}

fn check_tensors(
    files: &TensorFiles,
    checkpoint: &Checkpoint,
    smoothing: Option<&Smoothing>,
    format: &dyn Format,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut expected = HashSet::new();
    for step in expected_steps(checkpoint, format) {
        expected.extend(step.outputs.iter().map(|o| o.name.clone()));
        match format.codec_at(step.module, step.layer).filter(|_| step.action == Action::Quantize) {
            None => findings.extend(check_copy(files, checkpoint, smoothing, &step)),
            Some(codec) => {
                let read = codec.read(files, step.module_name(), step.shape);
                findings.extend(read.err().into_iter().flatten().map(|problem| {
                    Finding::new(Check::Contract, file_of(files, &problem.tensor), problem.what)
                        .subject(problem.tensor)
                        .consequence(problem.consequence)
                }));
            }
        }
    }
    findings.extend(files.iter().filter(|t| !expected.contains(t.name)).map(|t| {
        Finding::new(
            Check::Contract,
            file_of(files, t.name),
            format!("a tensor of shape {:?} that the model does not have", t.shape),
        )
        .subject(t.name)
        .consequence("strict loaders stop at it")
    }));
    findings
}

/// An unquantized tensor is the source's, bit for bit, once scales that were moved are moved.
fn check_copy(
    files: &TensorFiles,
    checkpoint: &Checkpoint,
    smoothing: Option<&Smoothing>,
    step: &Step,
) -> Option<Finding> {
    let source = checkpoint.tensor(&step.source);
    let name = &step.outputs[0].name;
    let finding =
        |what: String| Some(Finding::new(Check::Contract, file_of(files, name), what).subject(name));
    let Some(written) = files.get(name) else {
        return finding("missing".to_owned())
            .map(|f| f.consequence("the loader leaves the module at its start values or stops"));
    };
    if written.dtype != source.dtype || written.shape != source.shape {
        return finding(format!(
            "expected {} {:?}, found {} {:?}",
            source.dtype, source.shape, written.dtype, written.shape
        ))
        .map(|f| f.consequence("the loader stops, or looks for codes and scales that are not there"));
    }
    let scaling = smoothing.and_then(|s| s.of(step.module, step.layer, &checkpoint.config));
    let same = match scaling {
        None => written.bytes == source.bytes,
        Some(scaling) => scaling.bytes(source, 0..source.rows()).is_ok_and(|bytes| bytes == written.bytes),
    };
    if !same {
        return finding("differs from the source, and is not quantized".to_owned())
            .map(|f| f.consequence("the model computes with other values than it was trained to"));
    }
    None
}

fn file_of(files: &TensorFiles, tensor: &str) -> String {
    files.shard_of(tensor).map_or_else(|| INDEX_FILE.to_owned(), |s| s.file_name.clone())
}
