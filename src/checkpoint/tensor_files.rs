//! The safetensors files of a directory, mapped, and proven to agree with their index.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::time::SystemTime;

use memmap2::Mmap;
use serde_json::Value;

use super::header::{self, HeaderEntry};
use super::{INDEX_FILE, ModelDir, SINGLE_FILE};
use crate::error::{Failure, InputError, Result, one_line};
use crate::tensor::{Dtype, TensorView};

/// One mapped file of tensors: safetensors, or a GGUF file that stands for a checkpoint's only one.
#[derive(Debug)]
pub struct Shard {
    /// Bare name.
    pub file_name: String,
    /// Bare name of the safetensors file that an artifact has for it.
    pub stored_as: String,
    /// Its tensors, in order of their data.
    pub tensors: Vec<TensorEntry>,
    /// `format` of the header's free-form metadata ("pt" where transformers should read it).
    pub format: Option<String>,
    map: Mmap,
    file: File,
    length: u64,
    modified: Option<SystemTime>,
}

/// Where a tensor lies in its shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Full name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    pub(super) range: std::ops::Range<usize>,
    /// Its data, where that is another form of what the file has at `range`.
    pub(super) held: Option<Vec<u8>>,
}

impl TensorEntry {
    /// Bytes of its data.
    pub fn len_bytes(&self) -> u64 {
        self.held.as_ref().map_or(self.range.len(), Vec::len) as u64
    }

    /// Where its data starts in the file.
    pub fn offset(&self) -> u64 {
        self.range.start as u64
    }
}

impl Shard {
    fn open(dir: &ModelDir, file_name: &str) -> Result<Self> {
        let file = dir.open_file(file_name)?;
        let path = dir.path().join(file_name);
        let metadata = file.metadata().map_err(|e| Failure::io(&path, "cannot read", e))?;
        if metadata.len() < 8 {
            return Err(InputError::file(file_name)
                .expected("a safetensors file")
                .found(format!("{} bytes", metadata.len()))
                .hint("download it again")
                .into());
        }
        let map = map_file(&file).map_err(|e| Failure::io(&path, "cannot map", e))?;
        let header = header::parse(file_name, &map)?;
        let entry =
            |HeaderEntry { name, dtype, shape, range }| TensorEntry { name, dtype, shape, range, held: None };
        let tensors = header.entries.into_iter().map(entry).collect();
        let mut shard = Self::new(file_name, tensors, map, file, &metadata);
        shard.format = header.format;
        Ok(shard)
    }

    /// A mapped file whose tensors are known. `file` is what `map` maps, `metadata` what was known of it
    /// when it was opened.
    pub(super) fn new(
        file_name: &str,
        tensors: Vec<TensorEntry>,
        map: Mmap,
        file: File,
        metadata: &std::fs::Metadata,
    ) -> Self {
        Self {
            file_name: file_name.to_owned(),
            stored_as: file_name.to_owned(),
            tensors,
            format: None,
            length: metadata.len(),
            modified: metadata.modified().ok(),
            map,
            file,
        }
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The tensor of an entry of this shard.
    pub fn view<'a>(&'a self, entry: &'a TensorEntry) -> TensorView<'a> {
        TensorView {
            name: &entry.name,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: entry.held.as_deref().unwrap_or_else(|| &self.map[entry.range.clone()]),
        }
    }
}

/// Maps a file for reading.
#[allow(unsafe_code)]
pub(super) fn map_file(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is only read, and through `&[u8]`, for which every byte value is valid. The
    // contract that the file does not change meanwhile is the user's; a file that shrinks ends the
    // process, one that changes is told by `check_unchanged`.
    let map = unsafe { Mmap::map(file)? };
    // Advice only: a system without it maps as well.
    #[cfg(unix)]
    let _ = map.advise(memmap2::Advice::Sequential);
    Ok(map)
}

/// All files of tensors that make up a model.
#[derive(Debug)]
pub struct TensorFiles {
    /// In order of their names.
    pub shards: Vec<Shard>,
    /// Whether there is an index (and so several shards, or one under a shard's name).
    pub indexed: bool,
    /// What the user should know, one sentence each.
    pub notes: Vec<String>,
    by_name: HashMap<String, (usize, usize)>,
}

impl TensorFiles {
    /// Maps the shards that the index names, or the one `model.safetensors` where there is no index.
    ///
    /// # Errors
    /// A shard that is missing or cut short, an index that does not agree with its shards, a name
    /// stored twice, or an index that is missing.
    pub fn open(dir: &ModelDir) -> Result<Self> {
        let indexed = dir.has(INDEX_FILE);
        let (names, index) = if indexed {
            let index = Index::parse(&dir.read_json(INDEX_FILE)?)?;
            (index.shards(), Some(index))
        } else {
            (vec![single_file(dir)?], None)
        };
        for name in &names {
            if !dir.path().join(name).is_symlink() && !dir.has(name) && !name.contains(['/', '\\']) {
                return Err(InputError::file(name)
                    .expected(format!("a file, since {INDEX_FILE} names it"))
                    .found("nothing of that name")
                    .hint("the download is not complete; download it again")
                    .into());
            }
        }
        let shards = names.iter().map(|name| Shard::open(dir, name)).collect::<Result<Vec<_>>>()?;
        let mut files = Self::of_shards(shards, indexed)?;
        if let Some(index) = index {
            index.agrees_with(&mut files)?;
        }
        Ok(files)
    }

    /// # Errors
    /// When a tensor is in two of them.
    pub(super) fn of_shards(shards: Vec<Shard>, indexed: bool) -> Result<Self> {
        let mut by_name = HashMap::new();
        for (s, shard) in shards.iter().enumerate() {
            for (t, tensor) in shard.tensors.iter().enumerate() {
                if let Some((other, _)) = by_name.insert(tensor.name.clone(), (s, t)) {
                    let other: &Shard = &shards[other];
                    return Err(InputError::file(&shard.file_name)
                        .subject(&tensor.name)
                        .found(format!("a tensor that is also in {}", other.file_name))
                        .into());
                }
            }
        }
        Ok(Self { shards, indexed, notes: Vec::new(), by_name })
    }

    /// A tensor by name.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        let &(shard, tensor) = self.by_name.get(name)?;
        let shard = &self.shards[shard];
        Some(shard.view(&shard.tensors[tensor]))
    }

    /// The shard that holds a tensor.
    pub fn shard_of(&self, name: &str) -> Option<&Shard> {
        self.by_name.get(name).map(|&(shard, _)| &self.shards[shard])
    }

    /// Every tensor, shard by shard, in order of the data.
    pub fn iter(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.shards.iter().flat_map(|shard| shard.tensors.iter().map(|entry| shard.view(entry)))
    }

    /// Bytes of all tensors, without headers.
    pub fn total_bytes(&self) -> u64 {
        self.shards.iter().flat_map(|s| &s.tensors).map(TensorEntry::len_bytes).sum()
    }

    /// Tells a file that was changed since it was opened.
    ///
    /// # Errors
    /// The first file whose length or modification time differs.
    pub fn check_unchanged(&self) -> Result<()> {
        for shard in &self.shards {
            let now = shard.file.metadata().ok();
            let same = now.is_some_and(|m| m.len() == shard.length && m.modified().ok() == shard.modified);
            if !same {
                return Err(InputError::file(&shard.file_name)
                    .found("changed while it was being read")
                    .hint("run again when nothing else writes to the checkpoint")
                    .into());
            }
        }
        Ok(())
    }
}

/// The name of the weights file of a directory without an index.
fn single_file(dir: &ModelDir) -> Result<String> {
    let others: Vec<_> =
        dir.file_names()?.into_iter().filter(|n| n.ends_with(".safetensors") && (n != SINGLE_FILE)).collect();
    let link = dir.path().join(SINGLE_FILE).is_symlink();
    if dir.has(SINGLE_FILE) || link {
        return Ok(SINGLE_FILE.to_owned());
    }
    let found = match others.is_empty() {
        true => "neither".to_owned(),
        false => format!("{} without an index", one_line(&others.join(", "))),
    };
    Err(InputError::file(dir.path().display())
        .expected(format!("{INDEX_FILE} and its shards, or {SINGLE_FILE}"))
        .found(found)
        .hint("the download is not complete; download it again")
        .into())
}

/// `model.safetensors.index.json`.
struct Index {
    weight_map: BTreeMap<String, String>,
    total_size: Option<f64>,
}

impl Index {
    fn parse(json: &Value) -> Result<Self> {
        let bad = |expected: &str| InputError::file(INDEX_FILE).subject("weight_map").expected(expected);
        let map = json
            .get("weight_map")
            .and_then(Value::as_object)
            .ok_or_else(|| bad("an object from tensor names to shards").found("none"))?;
        if map.is_empty() {
            return Err(bad("at least one tensor").found("none").into());
        }
        let weight_map = map
            .iter()
            .map(|(tensor, file)| match file.as_str() {
                Some(file) => Ok((tensor.clone(), file.to_owned())),
                None => Err(bad("file names").subject(format!("weight_map.{tensor}")).found(file).into()),
            })
            .collect::<Result<_>>()?;
        let total_size = json.get("metadata").and_then(|m| m.get("total_size")).and_then(Value::as_f64);
        Ok(Self { weight_map, total_size })
    }

    fn shards(&self) -> Vec<String> {
        let mut names: Vec<_> = self.weight_map.values().cloned().collect();
        names.sort();
        names.dedup();
        names
    }

    fn agrees_with(&self, files: &mut TensorFiles) -> Result<()> {
        for (tensor, file) in &self.weight_map {
            match files.shard_of(tensor) {
                Some(shard) if shard.file_name == *file => {}
                Some(shard) => {
                    return Err(InputError::file(INDEX_FILE)
                        .subject(tensor)
                        .expected(format!("the shard that holds it, {}", shard.file_name))
                        .found(file)
                        .into());
                }
                None => {
                    return Err(InputError::file(file)
                        .subject(tensor)
                        .expected(format!("a tensor, since {INDEX_FILE} says that it is here"))
                        .found("no such tensor in any shard")
                        .hint(
                            "index and shards are of different checkpoints, or the download is not complete",
                        )
                        .into());
                }
            }
        }
        for shard in &files.shards {
            if let Some(tensor) = shard.tensors.iter().find(|t| !self.weight_map.contains_key(&t.name)) {
                return Err(InputError::file(&shard.file_name)
                    .subject(&tensor.name)
                    .expected(format!("an entry in {INDEX_FILE}"))
                    .found("none")
                    .hint("index and shards are of different checkpoints")
                    .into());
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
        let actual = files.total_bytes() as f64;
        if let Some(stated) = self.total_size.filter(|stated| *stated != actual) {
            files.notes.push(format!(
                "{INDEX_FILE}: metadata.total_size says {stated}, the tensors hold {actual} bytes; every tensor was \
                 found, so this is only noted"
            ));
        }
        Ok(())
    }
}
