//! A Spark GGUF, mapped: a file that is a whole model.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use super::ModelDir;
use super::directory::{LFS_PREFIX, lfs_pointer};
use super::tensor_files::map_file;
use crate::error::{Failure, InputError, Result};
use crate::ggml::{BlockMatrix, TensorType};
use crate::gguf::{self, Header, Metadata, TensorInfo};
use crate::spark::{SparkConfig, TensorSpec};
use crate::tensor::{Dtype, TensorView};

/// A GGUF file of the architecture, header checked; its tensors are reached by the names that the
/// checkpoint has for them.
#[derive(Debug)]
pub struct GgufFile {
    /// The directory that it lies in.
    pub dir: ModelDir,
    /// Its bare name.
    pub file_name: String,
    /// What its metadata says.
    pub config: SparkConfig,
    /// Every tensor the architecture needs, in published order.
    pub specs: Vec<TensorSpec>,
    pub(super) map: Mmap,
    /// What `map` maps.
    pub(super) file: File,
    header: Header,
    by_name: HashMap<String, usize>,
}

/// The key of the vocabulary.
const TOKENS: &str = "tokenizer.ggml.tokens";

/// Whether a path is taken for a GGUF file: by its name, so that a missing one is missed as such.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) && !path.is_dir()
}

/// The directory of a file, and its name if that is UTF-8.
fn split(path: &Path) -> Option<(&Path, &str)> {
    let parent = path.parent()?;
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    Some((parent, path.file_name()?.to_str()?))
}

/// Opens the bytes of a file that the user named. Nothing else names it, so a link may lead anywhere.
///
/// # Errors
/// When it is missing or not a regular file.
pub(super) fn open_named(path: &Path) -> Result<File> {
    let missing = || InputError::file(path.display()).expected("a GGUF file").found("no such file");
    let target = path.canonicalize().map_err(|_| missing())?;
    let (parent, name) = split(&target).ok_or_else(missing)?;
    ModelDir::open(parent)?.open_file(name)
}

impl GgufFile {
    /// Opens a file. Reads the header only.
    ///
    /// # Errors
    /// When it is missing, not a GGUF file, damaged, of another architecture, not complete, or holds a
    /// tensor of a type that is not read.
    pub fn open(path: &Path) -> Result<Self> {
        let missing = || InputError::file(path.display()).expected("a GGUF file").found("no such file");
        let file = open_named(path)?;
        let map = map_file(&file).map_err(|e| Failure::io(path, "cannot map", e))?;
        let (parent, name) = split(path).ok_or_else(missing)?;
        let (dir, file_name) = (ModelDir::open(parent)?, name.to_owned());
        if map.starts_with(LFS_PREFIX) {
            return Err(lfs_pointer(&file_name).into());
        }
        let header = gguf::parse(&file_name, &map)?;
        let config = gguf::config(&file_name, &header, &map)?;
        let found = gguf::check_inventory(&file_name, &header, &config)?;
        let by_name = found.iter().map(|(spec, i)| (spec.name.clone(), *i)).collect();
        let specs = found.into_iter().map(|(spec, _)| spec).collect();
        Ok(Self { dir, file_name, config, specs, map, file, header, by_name })
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Its key-value pairs.
    pub fn metadata(&self) -> &Metadata {
        &self.header.metadata
    }

    /// The version of the container.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// Its table of tensors, in order of their data, under the names of the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.header.tensors
    }

    /// How many tensors there are of each type, and their bytes; in order of the types' names.
    pub fn by_type(&self) -> BTreeMap<&'static str, (usize, u64)> {
        let mut by_type: BTreeMap<_, (usize, u64)> = BTreeMap::new();
        for tensor in self.tensors() {
            let entry = by_type.entry(tensor.kind.name()).or_default();
            entry.0 += 1;
            entry.1 += tensor.range.len() as u64;
        }
        by_type
    }

    /// The table's entry of a tensor by the checkpoint's name.
    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|i| &self.header.tensors[*i])
    }

    /// A tensor of floats by the checkpoint's name.
    pub fn floats(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, i) = self.by_name.get_key_value(name)?;
        let tensor = &self.header.tensors[*i];
        let TensorType::Float(dtype) = tensor.kind else { return None };
        Some(view(name, dtype, tensor, &self.map))
    }

    /// A matrix of blocks by the checkpoint's name; `None` for one of floats.
    ///
    /// # Errors
    /// Never of a file that was opened, whose shapes and bytes are checked.
    pub fn blocks(&self, name: &str) -> Result<Option<BlockMatrix<'_>>> {
        let Some(tensor) = self.info(name) else { return Ok(None) };
        match (tensor.kind, &tensor.shape[..]) {
            (TensorType::Blocks(kind), [out, input]) => {
                BlockMatrix::new(kind, [*out, *input], &self.map[tensor.range.clone()]).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors().iter().map(|t| t.range.len() as u64).sum()
    }

    /// Bytes read per decoded token: all, but of an embedding beside a head of its own one row.
    pub fn bytes_per_token(&self) -> u64 {
        let lookup_only = self.info("model.embedding.weight").filter(|_| !self.config.tie_word_embeddings);
        let unread = lookup_only.map_or(0, |t| t.range.len() - t.range.len() / self.config.vocab_size.max(1));
        self.tensor_bytes() - unread as u64
    }

    /// Whether the file carries a vocabulary.
    pub fn has_vocabulary(&self) -> bool {
        self.metadata().list(TOKENS).is_some()
    }

    /// Compares the vocabulary that the file carries with a tokenizer, of which `token` gives the spelling
    /// of an id. Special and unused tokens are left out: converters respell those.
    ///
    /// # Errors
    /// The first id that the two spell differently.
    pub fn check_vocabulary(&self, token: impl Fn(u32) -> Option<String>) -> Result<()> {
        const NORMAL: i128 = 1;
        let Some(tokens) = self.metadata().list(TOKENS) else { return Ok(()) };
        let types = self.metadata().list("tokenizer.ggml.token_type");
        let types = types.and_then(|types| types.numbers(&self.map)).unwrap_or_default();
        for (id, (text, kind)) in (0u32..).zip(tokens.texts(&self.map).zip(types)) {
            let other = token(id).filter(|other| kind == NORMAL && other.as_bytes() != text);
            if let Some(other) = other {
                return Err(InputError::file("tokenizer.json")
                    .subject(format!("token {id}"))
                    .expected(format!("{:?}, as {} has it", String::from_utf8_lossy(text), self.file_name))
                    .found(format!("{other:?}"))
                    .hint("pass the checkpoint that the file was made from with --tokenizer")
                    .into());
            }
        }
        Ok(())
    }
}

fn view<'a>(name: &'a str, dtype: Dtype, tensor: &'a TensorInfo, file: &'a [u8]) -> TensorView<'a> {
    TensorView { name, dtype, shape: &tensor.shape, bytes: &file[tensor.range.clone()] }
}
