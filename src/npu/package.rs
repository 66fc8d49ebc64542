//! The artifact around the graphs: what ties it to its source, and what it was calibrated with.

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde_json::{Value, json};

use super::Export;
use super::encode::WIDENING;
use super::manifest::{DECODE_MANIFEST_FILE, EMBEDDING_FILE};
use super::options::{Options, Precision};
use super::write::Writer;
use crate::artifact::{
    FileRecord, MANIFEST_VERSION, Manifest, ManifestSizes, Source, Tool, hash_bytes, rounded,
};
use crate::calibrate::{Coverage, Ranges};
use crate::checkpoint::{CONFIG_FILE, Checkpoint, MANIFEST_FILE};
use crate::error::{InputError, Result};

/// Name of the file with the ranges that encodings were made from.
pub const CALIBRATION_FILE: &str = "calibration.json";

/// What encodings were made from.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// Ranges by site.
    pub ranges: Ranges,
    /// How much was seen.
    pub coverage: Coverage,
    /// What the user should know, one sentence each.
    pub notes: Vec<String>,
}

/// Writes the whole artifact of an export, the manifest last, and returns the manifest. `samples` are
/// files that are there already.
///
/// # Errors
/// As [`Writer::write`], and when the source changed meanwhile.
pub fn write_artifact(
    writer: &Writer<'_>,
    calibration: Option<&Calibration>,
    samples: BTreeMap<String, FileRecord>,
) -> Result<Manifest> {
    let Writer { checkpoint, export, staging, interrupt, .. } = *writer;
    let written = writer.write()?;
    let mut files = written.files;
    files.extend(samples);
    let mut notes = notes(checkpoint, export);
    notes.extend(written.notes);
    for name in side_files(checkpoint, export) {
        interrupt.check()?;
        files.insert(name.to_owned(), staging.copy(name, checkpoint.dir.open_file(name)?)?);
    }
    let config = checkpoint.dir.read(CONFIG_FILE)?;
    files.insert(CONFIG_FILE.to_owned(), staging.write(CONFIG_FILE, &config)?);
    if let Some(calibration) = calibration {
        notes.extend(calibration.notes.iter().cloned());
        notes.extend(calibration.coverage.notes());
        notes.extend(degenerate_note(export));
        let text = format!("{:#}\n", calibration_json(calibration, export));
        files.insert(CALIBRATION_FILE.to_owned(), staging.write(CALIBRATION_FILE, text.as_bytes())?);
    }
    let source = source_files(checkpoint, &config);
    checkpoint.files.check_unchanged()?;
    interrupt.check()?;

    let manifest = Manifest {
        smoothing: None,
        allocation: None,
        self_sha256: String::new(),
        manifest_version: MANIFEST_VERSION,
        tool: Tool::this(),
        scheme: Options::SCHEME.to_owned(),
        options: export.options.to_json(),
        source: Source { files: source },
        sizes: sizes(export),
        calibration_sha256: calibration.map(|c| c.coverage.tokens_sha256.clone()),
        notes,
        files,
        tensors: written.tensors,
    };
    let sealed = manifest.seal().map_err(|e| InputError::file(MANIFEST_FILE).found(e))?;
    staging.write(MANIFEST_FILE, &sealed)?;
    Manifest::unseal(&sealed).map_err(|e| InputError::file(MANIFEST_FILE).found(e).into())
}

/// What the user should know before anything is run.
pub fn notes(checkpoint: &Checkpoint, export: &Export) -> Vec<String> {
    let mut notes = checkpoint.notes.clone();
    let left: Vec<&str> =
        checkpoint.side_files.iter().map(String::as_str).filter(|name| is_ours(name, export)).collect();
    if !left.is_empty() {
        notes.push(format!("not carried over, an export has files of that name: {}", left.join(", ")));
    }
    notes
}

/// Files of the source that go along.
pub fn side_files<'a>(checkpoint: &'a Checkpoint, export: &Export) -> impl Iterator<Item = &'a str> {
    checkpoint.side_files.iter().map(String::as_str).filter(|name| !is_ours(name, export))
}

fn is_ours(name: &str, export: &Export) -> bool {
    [DECODE_MANIFEST_FILE, EMBEDDING_FILE, CALIBRATION_FILE].contains(&name)
        || export.graphs.iter().chain(&export.prefill).any(|g| g.name == name)
        || super::samples::file_names(export).iter().any(|file| file == name)
}

fn degenerate_note(export: &Export) -> Option<String> {
    const SHOWN: usize = 8;
    let degenerate = export.degenerate();
    let more = match degenerate.len().saturating_sub(SHOWN) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    let shown = degenerate.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    (!degenerate.is_empty())
        .then(|| format!("calibration: never other than zero, given the range of 1: {shown}{more}"))
}

/// Figures of an export, as the manifest has them.
pub fn sizes(export: &Export) -> ManifestSizes {
    let weights = || export.graphs.iter().flat_map(|g| &g.weights);
    let count: u64 = weights().map(super::weights::Weight::count).sum();
    let linears = weights().filter(|w| w.role != super::weights::WeightRole::Norm).count();
    #[expect(clippy::cast_precision_loss, reason = "a ratio to three decimals")]
    let bits_per_weight = rounded(export.weight_bytes() as f64 * 8.0 / count as f64);
    ManifestSizes {
        tensor_bytes: export.weight_bytes() + export.embedding_bytes(),
        bytes_per_token: export.bytes_per_token(),
        bits_per_weight,
        quantized_modules: if export.options.stored() == Precision::Fp32 { 0 } else { linears },
    }
}

fn source_files(checkpoint: &Checkpoint, config: &[u8]) -> BTreeMap<String, FileRecord> {
    let shard = |shard: &crate::checkpoint::Shard| {
        let record = FileRecord { bytes: shard.bytes().len() as u64, sha256: hash_bytes(shard.bytes()) };
        (shard.file_name.clone(), record)
    };
    let mut files: BTreeMap<_, _> = checkpoint.files.shards.par_iter().map(shard).collect();
    let record = FileRecord { bytes: config.len() as u64, sha256: hash_bytes(config) };
    files.insert(CONFIG_FILE.to_owned(), record);
    files
}

/// The content of [`CALIBRATION_FILE`]: what was seen, and the range of every site as it was seen.
pub fn calibration_json(calibration: &Calibration, export: &Export) -> Value {
    let sites: Vec<Value> = calibration
        .ranges
        .iter()
        .map(|(site, seen)| {
            json!({
                "site": site.to_string(),
                "min": f64::from(seen.range.min),
                "max": f64::from(seen.range.max),
                "last_sequence_that_widened_it": seen.last_growth,
            })
        })
        .collect();
    json!({
        "coverage": calibration.coverage,
        "widening": WIDENING,
        "degenerate": export.degenerate(),
        "ranges": sites,
    })
}
