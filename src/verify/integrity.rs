//! Hashes: the manifest's own, every file's, every tensor's, and those of the source.

use std::collections::BTreeMap;

use rayon::prelude::*;

use super::{Check, Finding};
use crate::artifact::{FileRecord, Manifest, Sha256Hex, hash_bytes, hash_file};
use crate::checkpoint::{Checkpoint, MANIFEST_FILE, ModelDir, TensorFiles};
use crate::error::{Failure, InputError, Result};

/// Reads the manifest of an artifact.
///
/// # Errors
/// When there is none: then the directory is not an artifact of this tool. A manifest that was
/// changed is a finding, not an error.
pub fn read_manifest(dir: &ModelDir) -> Result<Result<Manifest, Finding>> {
    if !dir.has(MANIFEST_FILE) {
        return Err(InputError::file(dir.path().display())
            .expected(format!("an artifact with a {MANIFEST_FILE}"))
            .found("none")
            .hint("verify reads directories that quantize or export-npu wrote")
            .into());
    }
    let bytes = dir.read(MANIFEST_FILE)?;
    Ok(Manifest::unseal(&bytes).map_err(|e| {
        Finding::new(Check::Integrity, MANIFEST_FILE, e.to_string())
            .consequence("nothing else in the directory can be trusted to be what was written")
    }))
}

/// Compares every file and tensor with the manifest.
///
/// `tensors` is `None` when the weights could not be opened (which is a finding of its own).
///
/// # Errors
/// When the directory cannot be listed.
pub fn check_integrity(
    dir: &ModelDir,
    manifest: &Manifest,
    tensors: Option<&TensorFiles>,
) -> Result<Vec<Finding>> {
    let mut findings = check_files(dir, manifest);
    for name in dir.file_names()? {
        if name.ends_with(".safetensors") && !manifest.files.contains_key(&name) {
            findings.push(
                Finding::new(Check::Integrity, name, "not a file of this artifact")
                    .consequence("loaders that take every .safetensors file read it as part of the model"),
            );
        }
    }
    if let Some(tensors) = tensors {
        let wrong = manifest.tensors.par_iter().filter_map(|record| {
            let finding =
                |what: String| Finding::new(Check::Integrity, &record.file, what).subject(&record.name);
            let Some(tensor) = tensors.get(&record.name) else {
                return Some(finding("missing, and the manifest lists it".to_owned()));
            };
            if tensor.bytes.len() as u64 != record.bytes {
                return Some(finding(format!(
                    "expected {} bytes, found {}",
                    record.bytes,
                    tensor.bytes.len()
                )));
            }
            let found = hash_bytes(tensor.bytes);
            (found != record.sha256).then(|| finding(differs(&record.sha256, &found)))
        });
        findings.par_extend(wrong);
    }
    Ok(findings)
}

/// Every file that the manifest lists.
pub(super) fn check_files(dir: &ModelDir, manifest: &Manifest) -> Vec<Finding> {
    manifest.files.par_iter().filter_map(|(name, record)| check_file(dir, name, record)).collect()
}

fn check_file(dir: &ModelDir, name: &str, record: &FileRecord) -> Option<Finding> {
    let finding = |what: String| Some(Finding::new(Check::Integrity, name, what));
    // Graphs of an export have a directory each.
    let opened = match name.split_once('/') {
        None => dir.open_file(name),
        Some((sub, name)) => dir.sub_dir(sub).and_then(|sub| sub.open_file(name)),
    };
    let mut file = match opened {
        Ok(file) => file,
        Err(e) => return finding(e.to_string()),
    };
    match hash_file(&mut file) {
        Ok((sha256, bytes)) if sha256 == record.sha256 && bytes == record.bytes => None,
        Ok((_, bytes)) if bytes != record.bytes => {
            finding(format!("expected {} bytes, found {bytes}", record.bytes))
        }
        Ok((sha256, _)) => finding(differs(&record.sha256, &sha256)),
        Err(e) => finding(format!("cannot be read: {e}")),
    }
}

pub(super) fn differs(expected: &str, found: &str) -> String {
    format!("its bytes were changed: expected SHA-256 {expected}, found {found}")
}

/// Hashes config.json and every shard of a checkpoint, by name: what it is.
///
/// # Errors
/// When one cannot be read.
pub fn source_hashes(checkpoint: &Checkpoint) -> Result<BTreeMap<String, Sha256Hex>> {
    let shards = checkpoint.files.shards.iter().map(|s| s.file_name.as_str());
    let names: Vec<&str> = shards.chain([crate::checkpoint::CONFIG_FILE]).collect();
    let hash = |name: &&str| {
        let failed = |e| Failure::io(&checkpoint.dir.path().join(name), "cannot read", e);
        let (sha256, _) = hash_file(&mut checkpoint.dir.open_file(name)?).map_err(failed)?;
        Ok(((*name).to_owned(), sha256))
    };
    names.par_iter().map(hash).collect()
}

/// Proves that `checkpoint` is what the artifact was made from.
///
/// # Errors
/// The first file that is not.
pub fn check_source(checkpoint: &Checkpoint, recorded: &BTreeMap<String, FileRecord>) -> Result<()> {
    let mut names: Vec<&str> = checkpoint.files.shards.iter().map(|s| s.file_name.as_str()).collect();
    names.push(crate::checkpoint::CONFIG_FILE);
    names.sort_unstable();
    let expected: Vec<&str> = recorded.keys().map(String::as_str).collect();
    let other = |file: &str, what: String| {
        Failure::from(
            InputError::file(checkpoint.path_of(file).display())
                .expected("the checkpoint that the artifact was made from")
                .found(what)
                .hint("pass that one with --reference"),
        )
    };
    if names != expected {
        return Err(other("", format!("files {names:?}; the artifact was made from {expected:?}")));
    }
    let wrong = recorded.par_iter().find_map_first(|(name, record)| {
        let found = hash_file(&mut checkpoint.open_source(name).ok()?).ok()?.0;
        (found != record.sha256)
            .then(|| other(name, format!("SHA-256 {found}; the artifact says {}", record.sha256)))
    });
    wrong.map_or(Ok(()), Err)
}
