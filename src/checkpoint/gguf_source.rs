//! A GGUF file of floats in the place of a checkpoint's safetensors files.
//!
//! The file has the tensors under other names and the architecture as metadata; what a model directory
//! holds besides (config.json, the tokenizer of the Python libraries, the chat template) is not in it, so
//! it comes from a directory. llama.cpp's converter widens norms to F32 whatever the checkpoint had: they
//! get the dtype of the matrices back where that loses nothing. Everything else has the bytes of the file.

use std::collections::HashMap;
use std::path::Path;

use half::f16;
use serde::Deserialize;
use serde_json::Value;

use super::tensor_files::{Shard, TensorEntry, TensorFiles};
use super::{CONFIG_FILE, GgufFile, ModelDir, SINGLE_FILE, read_config};
use crate::error::{Failure, InputError, Result};
use crate::ggml::TensorType;
use crate::gguf::first_difference;
use crate::spark::SparkConfig;
use crate::tensor::Dtype;

/// The file of a tokenizer.
const TOKENIZER_FILE: &str = "tokenizer.json";

/// Anonymous memory, in bytes, that a token takes while vocabularies are compared: an entry in two tables
/// that are at least 7/16 full (76 bytes each), its spelling (32 or a little more) and its type (16).
const BYTES_PER_TOKEN: u64 = 256;

/// The parts of a checkpoint.
pub(super) struct Opened {
    pub(super) dir: ModelDir,
    pub(super) config_json: Value,
    pub(super) config: SparkConfig,
    /// The tensors under the checkpoint's names, in the order of the file.
    pub(super) files: TensorFiles,
}

/// The tensors of a file, and all else of a directory, `companions` or the one that the file lies in.
///
/// # Errors
/// When the file is quantized, or the directory has no config.json and tokenizer or those of another model.
pub(super) fn open(path: &Path, companions: Option<&Path>) -> Result<Opened> {
    let file = GgufFile::open(path)?;
    refuse_blocks(&file)?;
    let dir = companions.map_or_else(|| Ok(file.dir.clone()), ModelDir::open)?;
    for name in [CONFIG_FILE, TOKENIZER_FILE] {
        if !dir.has(name) {
            return Err(InputError::file(&file.file_name)
                .expected(format!("{name} of the checkpoint that it was made from"))
                .found(format!("none in {}", dir.path().display()))
                .hint("pass a directory with that checkpoint's other files with --tokenizer")
                .into());
        }
    }
    let (config_json, config) = read_config(&dir)?;
    if let Some(difference) = first_difference(&file.config, &config) {
        return Err(InputError::file(&file.file_name)
            .subject(difference.what)
            .expected(format!(
                "{}, as {} has it",
                difference.expected,
                dir.path().join(CONFIG_FILE).display()
            ))
            .found(difference.found)
            .hint(OTHER_MODEL)
            .into());
    }
    let mut notes = vec![format!("{}: the tensors; {}: all else", file.file_name, dir.path().display())];
    if !check_spelling(&file, &dir)? {
        notes.push(format!("{} has no vocabulary: the tokenizer was not compared with it", file.file_name));
    }
    let mut entries = Vec::new();
    for spec in &file.specs {
        let (Some(info), Some(view)) = (file.info(&spec.name), file.floats(&spec.name)) else { continue };
        let mut entry = TensorEntry {
            name: spec.name.clone(),
            dtype: view.dtype,
            shape: view.shape.to_vec(),
            range: info.range.clone(),
            held: None,
        };
        let matrices = file.floats("model.embedding.weight").map_or(view.dtype, |t| t.dtype);
        if spec.shape.len() < 2 && view.dtype == Dtype::F32 && matrices != Dtype::F32 {
            match narrowed(view.bytes, matrices) {
                Some(bytes) => (entry.dtype, entry.held) = (matrices, Some(bytes)),
                None => notes.push(format!("{}: stays F32, since {matrices} does not hold it", spec.name)),
            }
        }
        entries.push(entry);
    }
    entries.sort_by_key(|entry| entry.range.start);
    let metadata = file.file.metadata().map_err(|e| Failure::io(path, "cannot read", e))?;
    let mut shard = Shard::new(&file.file_name, entries, file.map, file.file, &metadata);
    SINGLE_FILE.clone_into(&mut shard.stored_as);
    let mut files = TensorFiles::of_shards(vec![shard], false)?;
    files.notes = notes;
    Ok(Opened { dir, config_json, config, files })
}

/// Anonymous memory that opening takes at most, in bytes: tokenizer.json and the tables of its tokens.
pub(super) fn peak_memory_bytes(dir: &ModelDir, vocab_size: usize) -> u64 {
    let length = dir.open_file(TOKENIZER_FILE).ok().and_then(|file| Some(file.metadata().ok()?.len()));
    length.unwrap_or(0) + vocab_size as u64 * BYTES_PER_TOKEN
}

const OTHER_MODEL: &str = "pass the directory of the checkpoint that it was made from with --tokenizer";

/// Codes are no weights to choose codes for: the error would be counted from the wrong place.
fn refuse_blocks(file: &GgufFile) -> Result<()> {
    let blocks = |kind| matches!(kind, TensorType::Blocks(_));
    let Some(first) = file.tensors().iter().find(|t| blocks(t.kind)) else { return Ok(()) };
    let others = file.tensors().iter().filter(|t| blocks(t.kind)).count() - 1;
    let more = if others > 0 { format!(" (and {others} more in blocks)") } else { String::new() };
    Err(InputError::file(&file.file_name)
        .subject(&first.name)
        .expected("weights in full precision: BF16, F16 or F32")
        .found(format!("{}{more}", first.kind.name()))
        .hint("take the checkpoint, or what llama.cpp's convert_hf_to_gguf.py --outtype bf16 makes of it")
        .into())
}

/// F32 numbers in a dtype of 16 bits, if it holds all of them.
fn narrowed(bytes: &[u8], dtype: Dtype) -> Option<Vec<u8>> {
    let numbers = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
    let halves: Option<Vec<[u8; 2]>> = match dtype {
        Dtype::BF16 => {
            numbers.map(|bits| (bits & 0xffff == 0).then_some(((bits >> 16) as u16).to_le_bytes())).collect()
        }
        Dtype::F16 => numbers
            .map(|bits| {
                let half = f16::from_f32(f32::from_bits(bits));
                (half.to_f32().to_bits() == bits).then_some(half.to_le_bytes())
            })
            .collect(),
        _ => None,
    };
    halves.map(|halves| halves.concat())
}

/// What is read of tokenizer.json.
#[derive(Deserialize)]
struct TokenizerJson {
    model: TokenizerModel,
}

#[derive(Deserialize)]
struct TokenizerModel {
    vocab: HashMap<String, u32>,
}

/// Compares the vocabulary of the file, if it has one, with the directory's tokenizer.
///
/// # Errors
/// The first token that is spelled differently, or a tokenizer without a vocabulary.
fn check_spelling(file: &GgufFile, dir: &ModelDir) -> Result<bool> {
    if !file.has_vocabulary() {
        return Ok(false);
    }
    let tokenizer: TokenizerJson = serde_json::from_slice(&dir.read(TOKENIZER_FILE)?)
        .map_err(|e| InputError::file(TOKENIZER_FILE).expected("model.vocab, tokens with ids").found(e))?;
    let mut spelled: HashMap<u32, String> = HashMap::with_capacity(tokenizer.model.vocab.len());
    spelled.extend(tokenizer.model.vocab.into_iter().map(|(token, id)| (id, token)));
    file.check_vocabulary(|id| spelled.get(&id).cloned())?;
    Ok(true)
}
