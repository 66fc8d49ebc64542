//! `spark-convert.json`: what ties an artifact to its source, and every byte to a hash.
//!
//! No time, host, path, thread count or command line: the same input and options give the same bytes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::hash::{Sha256Hex, hash_bytes};
use crate::plan::{Action, Sizes};
use crate::sensitivity::Allocation;
use crate::smooth::Smoothing;

/// Version of the manifest's layout.
pub(crate) const MANIFEST_VERSION: u32 = 1;

/// What stands in `self_sha256` while the file is hashed.
const BLANK: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// A length and a hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Length.
    pub bytes: u64,
    /// SHA-256 of the content.
    pub sha256: Sha256Hex,
}

/// The program that wrote an artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tool {
    /// `spark-convert`.
    pub name: String,
    /// Its version.
    pub version: String,
}

impl Tool {
    /// This program.
    pub fn this() -> Self {
        Self { name: env!("CARGO_PKG_NAME").to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() }
    }
}

/// What an artifact was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// config.json and every shard, by name.
    pub files: BTreeMap<String, FileRecord>,
}

/// One tensor of an artifact.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRecord {
    /// Name in the artifact.
    pub name: String,
    /// The file that holds it.
    pub file: String,
    /// The source tensor it was made from.
    pub source: String,
    /// Copied or quantized.
    pub action: TensorAction,
    /// The scheme, if quantized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheme: Option<String>,
    /// Weights per scale along a row; absent where a scale covers the row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_size: Option<u32>,
    /// Bytes of its data.
    pub bytes: u64,
    /// SHA-256 of its data.
    pub sha256: Sha256Hex,
    /// Weight SNR of the module, on its first tensor; null where nothing was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snr_db: Option<f64>,
    /// SNR of the module's outputs on the calibration inputs, on its first tensor, where codes were
    /// chosen for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_snr_db: Option<f64>,
}

/// [`Action`] as the manifest spells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorAction {
    /// Bit for bit the source's.
    Copied,
    /// Written by the scheme.
    Quantized,
}

impl From<Action> for TensorAction {
    fn from(action: Action) -> Self {
        match action {
            Action::Copy => Self::Copied,
            Action::Quantize => Self::Quantized,
        }
    }
}

/// The manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// SHA-256 of this file with these 64 digits replaced by zeros.
    pub self_sha256: Sha256Hex,
    /// Version of the layout of this file.
    pub manifest_version: u32,
    /// Who wrote it.
    pub tool: Tool,
    /// The scheme.
    pub scheme: String,
    /// Its normalised options that have an effect on bytes.
    pub options: Map<String, Value>,
    /// What it was made from.
    pub source: Source,
    /// Bytes and bits.
    pub sizes: ManifestSizes,
    /// Hash of the calibration tokens or of the importance matrix, where there was one.
    pub calibration_sha256: Option<Sha256Hex>,
    /// Powers of two that were moved between the source's matrices before they were quantized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub smoothing: Option<Smoothing>,
    /// How the widths of modules were chosen for a budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation: Option<Allocation>,
    /// What was assumed, passed over, clipped or fell back, and why.
    pub notes: Vec<String>,
    /// Every file beside this one.
    pub files: BTreeMap<String, FileRecord>,
    /// Every tensor, in file order.
    pub tensors: Vec<TensorRecord>,
}

/// [`Sizes`] as the manifest spells them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestSizes {
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes read per decoded token.
    pub bytes_per_token: u64,
    /// Bits per weight, to three decimals.
    pub bits_per_weight: f64,
    /// Modules quantized.
    pub quantized_modules: usize,
}

impl From<Sizes> for ManifestSizes {
    fn from(sizes: Sizes) -> Self {
        Self {
            tensor_bytes: sizes.tensor_bytes,
            bytes_per_token: sizes.bytes_per_token,
            bits_per_weight: rounded(sizes.bits_per_weight),
            quantized_modules: sizes.quantized_modules,
        }
    }
}

/// Three decimals: enough for decibels and bits, and stable in print.
pub(crate) fn rounded(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}

/// Why bytes are not a manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// Not JSON of this layout.
    #[error("not a manifest of this version: {0}")]
    Malformed(String),
    /// The bytes are not those that were hashed.
    #[error("the file was changed: its bytes hash to {found}, and it says {stated}")]
    Changed {
        /// Hash of the bytes.
        found: Sha256Hex,
        /// `self_sha256`.
        stated: Sha256Hex,
    },
}

impl Manifest {
    /// The bytes of the file, with `self_sha256` filled in.
    ///
    /// # Errors
    /// When it cannot be written as JSON, which no manifest made here is.
    pub fn seal(mut self) -> Result<Vec<u8>, ManifestError> {
        self.self_sha256 = BLANK.to_owned();
        let mut text =
            serde_json::to_string_pretty(&self).map_err(|e| ManifestError::Malformed(e.to_string()))?;
        text.push('\n');
        let hash = hash_bytes(text.as_bytes());
        Ok(text.replacen(BLANK, &hash, 1).into_bytes())
    }

    /// Reads the bytes of a file, and proves that they are those that were written.
    ///
    /// # Errors
    /// See [`ManifestError`].
    pub fn unseal(bytes: &[u8]) -> Result<Self, ManifestError> {
        let malformed = |e: &dyn std::fmt::Display| ManifestError::Malformed(e.to_string());
        let manifest: Self = serde_json::from_slice(bytes).map_err(|e| malformed(&e))?;
        if manifest.manifest_version != MANIFEST_VERSION {
            return Err(malformed(&format!("manifest_version {}", manifest.manifest_version)));
        }
        let text = std::str::from_utf8(bytes).map_err(|e| malformed(&e))?;
        let found = match manifest.self_sha256.len() {
            64 => hash_bytes(text.replacen(&manifest.self_sha256, BLANK, 1).as_bytes()),
            _ => String::new(),
        };
        if found != manifest.self_sha256 {
            return Err(ManifestError::Changed { found, stated: manifest.self_sha256 });
        }
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        Manifest {
            smoothing: None,
            allocation: None,
            self_sha256: String::new(),
            manifest_version: MANIFEST_VERSION,
            tool: Tool::this(),
            scheme: "w8a8".into(),
            options: Map::new(),
            source: Source { files: BTreeMap::new() },
            sizes: Sizes::default().into(),
            calibration_sha256: None,
            notes: vec!["a note".into()],
            files: BTreeMap::new(),
            tensors: Vec::new(),
        }
    }

    #[test]
    fn every_flipped_byte_is_found() {
        let sealed = manifest().seal().unwrap();
        assert_eq!(Manifest::unseal(&sealed).unwrap().notes, ["a note"]);
        for at in 0..sealed.len() {
            let mut flipped = sealed.clone();
            flipped[at] ^= 1;
            assert!(Manifest::unseal(&flipped).is_err(), "byte {at} ({:?})", char::from(sealed[at]));
        }
    }

    #[test]
    fn the_bytes_hold_nothing_that_changes_from_run_to_run() {
        assert_eq!(manifest().seal(), manifest().seal());
    }
}
