//! How much each input column of each matrix counts, as llama.cpp's `llama-imatrix` measures it.
//!
//! For a matrix with inputs `x` it is the sum of `x[k]^2` over the texts that the program ran, which is the
//! diagonal of the Hessian that [`crate::quant::gptq`] works with. Two forms are read. Files of GGUF hold,
//! for a matrix of the name `N`, `N.in_sum2` f32 `[k]` and `N.counts`; those before them a list of names and
//! averages. Only the proportions within a matrix matter, so counts don't.
//!
//! Source: `tools/imatrix/imatrix.cpp` of llama.cpp, which writes and reads both.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use crate::artifact::{Sha256Hex, hash_bytes};
use crate::checkpoint::ModelDir;
use crate::error::{InputError, Result, one_line};
use crate::ggml::TensorType;
use crate::gguf::{self, tensor_name};
use crate::spark::{Module, SparkConfig, tensor_specs};
use crate::tensor::Dtype;

/// Entries of a file in the older form at most; the largest model of the family has some 400.
const MAX_ENTRIES: usize = 1 << 16;
/// Longest name in a file of the older form; ggml keeps 64 bytes.
const MAX_NAME: usize = 1 << 12;
/// What a column counts at least, as a part of the largest: one that no text reached still has to be
/// something when another text does.
const FLOOR: f32 = 1e-4;

/// The head goes by the embedding's name where it is tied.
const HEAD_NAMES: [&str; 2] = ["output.weight", "token_embd.weight"];

/// Importance of the input columns of a model's matrices.
#[derive(Clone, Debug, PartialEq)]
pub struct Importance {
    /// By the checkpoint's name of the tensor.
    tensors: BTreeMap<String, Vec<f32>>,
    head: Option<Vec<f32>>,
    /// Hash of the file.
    pub sha256: Sha256Hex,
    /// What the user should know, one sentence each.
    pub notes: Vec<String>,
}

impl Importance {
    /// Reads a file.
    ///
    /// # Errors
    /// See [`Importance::parse`]; and when the file is missing.
    pub fn read(path: &Path, config: &SparkConfig) -> Result<Self> {
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if !path.is_file() {
            let error = InputError::file(path.display()).expected("an importance matrix of llama-imatrix");
            return Err(error.found("no such file").into());
        }
        let bytes = ModelDir::open(parent)?.map(name)?;
        Ok(Self::parse(&path.display().to_string(), &bytes, config)?)
    }

    /// Reads the bytes of a file.
    ///
    /// # Errors
    /// When they are of neither form, a projection is missing or of another length, or a value is negative
    /// or not finite.
    pub fn parse(file: &str, bytes: &[u8], config: &SparkConfig) -> Result<Self, InputError> {
        let mut entries =
            if bytes.starts_with(b"GGUF") { of_gguf(file, bytes)? } else { of_list(file, bytes)? };
        let (mut tensors, mut notes) = (BTreeMap::new(), Vec::new());
        for spec in tensor_specs(config).into_iter().filter(|spec| spec.module.is_projection()) {
            let name = tensor_name(&spec);
            let Some(values) = entries.remove(&name) else {
                return Err(InputError::file(file)
                    .subject(&name)
                    .expected("every matrix of every layer")
                    .found("nothing of this one")
                    .hint("make it with llama-imatrix from this model's GGUF"));
            };
            let relative = relative(file, &name, values, spec.shape[1])?;
            if relative.is_none() {
                notes.push(format!(
                    "{name}: the importance matrix is zero, so all of its columns count alike"
                ));
            }
            tensors.extend(relative.map(|values| (spec.name, values)));
        }
        let head = HEAD_NAMES.into_iter().find_map(|name| Some((name, entries.remove(name)?)));
        let head = match head {
            Some((name, values)) => relative(file, name, values, config.hidden_size)?,
            None => None,
        };
        if let Some(name) = entries.keys().min() {
            notes.push(format!(
                "the importance matrix has {} tensors that are not quantized here, {} among them",
                entries.len(),
                one_line(name)
            ));
        }
        Ok(Self { tensors, head, sha256: hash_bytes(bytes), notes })
    }

    /// Of a matrix of the checkpoint, `[in]`; the largest is 1.
    pub fn of(&self, module: Module, tensor: &str) -> Option<&[f32]> {
        match module {
            Module::LmHead => self.head.as_deref(),
            _ => self.tensors.get(tensor).map(Vec::as_slice),
        }
    }

    /// Whether it says something of the output head.
    pub fn has_head(&self) -> bool {
        self.head.is_some()
    }
}

/// Values relative to the largest, none below [`FLOOR`]; `None` when all are zero.
fn relative(
    file: &str,
    name: &str,
    mut values: Vec<f32>,
    columns: usize,
) -> Result<Option<Vec<f32>>, InputError> {
    let error = || InputError::file(file).subject(name);
    if values.len() != columns {
        let found = format!("{}: it was made of another model", values.len());
        return Err(error().expected(format!("{columns} columns")).found(found));
    }
    if let Some(at) = values.iter().position(|v| !v.is_finite() || *v < 0.0) {
        return Err(error().expected("sums of squares").found(format!("{} in column {at}", values[at])));
    }
    let largest = values.iter().copied().fold(0.0, f32::max);
    if largest == 0.0 {
        return Ok(None);
    }
    for value in &mut values {
        *value = (*value / largest).max(FLOOR);
    }
    Ok(Some(values))
}

/// Sums by the name of the matrix.
fn of_gguf(file: &str, bytes: &[u8]) -> Result<HashMap<String, Vec<f32>>, InputError> {
    const SUMS: &str = ".in_sum2";
    let header = gguf::parse(file, bytes)?;
    let mut entries = HashMap::new();
    for tensor in &header.tensors {
        let Some(name) = tensor.name.strip_suffix(SUMS) else { continue };
        if tensor.kind != TensorType::Float(Dtype::F32) {
            return Err(InputError::file(file)
                .subject(&tensor.name)
                .expected("F32")
                .found(tensor.kind.name()));
        }
        let values = bytes[tensor.range.clone()].as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
        entries.insert(name.to_owned(), values.collect());
    }
    if entries.is_empty() {
        return Err(InputError::file(file)
            .expected("an importance matrix: tensors whose names end in .in_sum2")
            .found(format!("a GGUF file of {} others", header.tensors.len())));
    }
    Ok(entries)
}

/// Averages by the name of the matrix, from the form before GGUF: a count, then for each a name behind its
/// length, a number of calls, a number of values and the values. What follows says where it was made.
fn of_list(file: &str, bytes: &[u8]) -> Result<HashMap<String, Vec<f32>>, InputError> {
    let error = |found: String| {
        InputError::file(file).expected("an importance matrix of llama-imatrix, as GGUF or .dat").found(found)
    };
    let mut reader = Reader { rest: bytes };
    let short = || error(format!("{} bytes, which end within an entry", bytes.len()));
    let mut entries = HashMap::new();
    let count = reader.count(MAX_ENTRIES).ok_or_else(short)?;
    for _ in 0..count {
        let name = reader.count(MAX_NAME).and_then(|n| reader.take(n)).ok_or_else(short)?;
        let name = std::str::from_utf8(name).map_err(|_| error("a name that is not UTF-8".to_owned()))?;
        reader.take(4).ok_or_else(short)?;
        let values = reader.count(bytes.len() / 4).and_then(|n| reader.take(4 * n)).ok_or_else(short)?;
        let values = values.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        entries.insert(name.to_owned(), values);
    }
    if entries.is_empty() {
        return Err(error("no entry".to_owned()));
    }
    Ok(entries)
}

/// What is left of a file.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(bytes)?;
        self.rest = rest;
        Some(taken)
    }

    /// An i32 that is a count of at most `most`.
    fn count(&mut self, most: usize) -> Option<usize> {
        let bytes = self.take(4)?.try_into().ok()?;
        usize::try_from(i32::from_le_bytes(bytes)).ok().filter(|n| *n <= most)
    }
}

#[cfg(test)]
#[path = "importance_tests.rs"]
mod tests;
