//! Which files of a model directory may be opened, and the opening itself.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use super::{CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, TensorFiles};
use crate::error::{Failure, InputError, Result, one_line};

/// Largest JSON file read into memory; the published tokenizer.json has about 10 MB.
const MAX_JSON_BYTES: u64 = 256 << 20;

/// A model directory. Files are opened by bare name only, and a symbolic link may lead elsewhere in
/// the directory or into the blob folder of a hub cache, nowhere else: the names come from files
/// that somebody else wrote, and what they name is copied into artifacts.
#[derive(Clone, Debug)]
pub struct ModelDir {
    path: PathBuf,
    canonical: PathBuf,
}

impl ModelDir {
    /// Takes a directory, or the path of the config.json in it.
    ///
    /// # Errors
    /// When there is no such directory.
    pub fn open(path: &Path) -> Result<Self> {
        let path = match path.file_name() {
            Some(name) if name == CONFIG_FILE && !path.is_dir() => match path.parent() {
                Some(parent) if !parent.as_os_str().is_empty() => parent,
                _ => Path::new("."),
            },
            _ => path,
        };
        let canonical = fs::canonicalize(path).map_err(|_| {
            InputError::file(path.display())
                .found("no such model directory")
                .hint("pass a directory that holds config.json")
        })?;
        if !canonical.is_dir() {
            return Err(InputError::file(path.display())
                .expected("a model directory or its config.json")
                .found("a file")
                .into());
        }
        Ok(Self { path: path.to_owned(), canonical })
    }

    /// The path as the user gave it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path with links resolved.
    pub fn canonical(&self) -> &Path {
        &self.canonical
    }

    /// A name for this model: that of the directory, or of the repository for a hub-cache snapshot
    /// (`models--OWNER--NAME/snapshots/REVISION`).
    pub fn model_name(&self) -> String {
        let name_of = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned());
        let repository = self.hub_repository().and_then(name_of);
        let name = repository
            .as_deref()
            .and_then(|r| r.rsplit("--").next())
            .map(str::to_owned)
            .or_else(|| name_of(&self.canonical))
            .unwrap_or_else(|| "model".to_owned());
        tame(&name)
    }

    /// Whether a file of that name is there.
    pub fn has(&self, name: &str) -> bool {
        self.path.join(name).exists()
    }

    /// A directory inside this one.
    ///
    /// # Errors
    /// When the name is not a bare one, there is no such directory, or a link leaves this one.
    pub fn sub_dir(&self, name: &str) -> Result<Self> {
        let found = |found: &str| {
            InputError::file(name).expected("a directory inside the model directory").found(found)
        };
        let mut components = Path::new(name).components();
        let bare = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
        if !bare || name.contains(['/', '\\', '\0']) {
            return Err(found("a path").into());
        }
        let path = self.path.join(name);
        let canonical = fs::canonicalize(&path).map_err(|_| found("none of that name"))?;
        if !canonical.starts_with(&self.canonical) {
            return Err(found(&format!("a link to {}", canonical.display())).into());
        }
        if !canonical.is_dir() {
            return Err(found("a file").into());
        }
        Ok(Self { path, canonical })
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// When the name is not a bare file name, the file is missing or not a regular file, or a link
    /// leaves the model.
    pub fn open_file(&self, name: &str) -> Result<File> {
        let path = self.locate(name)?;
        File::open(&path).map_err(|e| Failure::io(&path, "cannot open", e))
    }

    /// The resolved path of a file of the directory. Errors as [`Self::open_file`].
    fn locate(&self, name: &str) -> Result<PathBuf> {
        let mut components = Path::new(name).components();
        let bare = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
        if !bare || name.contains(['/', '\\', '\0']) {
            return Err(InputError::file(name)
                .expected("a bare file name inside the model directory")
                .found("a path")
                .into());
        }
        let path = self.path.join(name);
        let canonical = fs::canonicalize(&path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound if path.is_symlink() => InputError::file(name)
                .found("a link to a file that is not there")
                .hint("download it again")
                .into(),
            std::io::ErrorKind::NotFound => {
                InputError::file(name).found(format!("missing in {}", self.path.display())).into()
            }
            _ => Failure::io(&path, "cannot open", e),
        })?;
        if !canonical.starts_with(&self.canonical) && !self.is_hub_blob(&canonical) {
            return Err(InputError::file(name)
                .expected("a file inside the model directory (or a hub cache's blobs)")
                .found(format!("a link to {}", canonical.display()))
                .hint("copy the file into the directory")
                .into());
        }
        if !canonical.is_file() {
            return Err(InputError::file(name).expected("a regular file").found("something else").into());
        }
        Ok(canonical)
    }

    /// `models--OWNER--NAME` when this is `models--OWNER--NAME/snapshots/REVISION` (or laid out like it).
    fn hub_repository(&self) -> Option<&Path> {
        let snapshots = self.canonical.parent()?;
        let repository = snapshots.parent()?;
        (snapshots.file_name()? == "snapshots" && repository.join("blobs").is_dir()).then_some(repository)
    }

    fn is_hub_blob(&self, target: &Path) -> bool {
        let Some(folder) = target.parent() else { return false };
        if self.hub_repository().is_some_and(|repository| folder == repository.join("blobs")) {
            return true;
        }
        // Older clients link a local directory into the shared cache.
        let hub = |p: &Path| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("models--"));
        folder.file_name().is_some_and(|n| n == "blobs") && folder.parent().is_some_and(hub)
    }

    /// Reads a whole (JSON or text) file.
    ///
    /// # Errors
    /// As [`Self::open_file`], and when it is larger than any such file should be.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let file = self.open_file(name)?;
        let path = self.path.join(name);
        let length = file.metadata().map_err(|e| Failure::io(&path, "cannot read", e))?.len();
        if length > MAX_JSON_BYTES {
            return Err(InputError::file(name)
                .expected(format!("at most {MAX_JSON_BYTES} bytes"))
                .found(format!("{length} bytes"))
                .into());
        }
        let mut bytes = Vec::new();
        // One byte more than the limit, should the file grow while it is read.
        file.take(MAX_JSON_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(|e| Failure::io(&path, "cannot read", e))?;
        Ok(bytes)
    }

    /// Maps a whole file, which must not change meanwhile (see the module).
    ///
    /// # Errors
    /// As [`Self::open_file`], and when it cannot be mapped.
    pub fn map(&self, name: &str) -> Result<memmap2::Mmap> {
        let file = self.open_file(name)?;
        super::tensor_files::map_file(&file).map_err(|e| Failure::io(&self.path.join(name), "cannot map", e))
    }

    /// Reads and parses a JSON file.
    ///
    /// # Errors
    /// As [`Self::read`], and when it is not JSON.
    pub fn read_json(&self, name: &str) -> Result<serde_json::Value> {
        let bytes = self.read(name)?;
        if bytes.starts_with(LFS_PREFIX) {
            return Err(lfs_pointer(name).into());
        }
        serde_json::from_slice(&bytes).map_err(|e| InputError::file(name).expected("JSON").found(e).into())
    }

    /// The names of all regular files, sorted.
    ///
    /// # Errors
    /// When the directory cannot be listed.
    pub fn file_names(&self) -> Result<Vec<String>> {
        let failed = |e| Failure::io(&self.path, "cannot list", e);
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            // metadata() follows links, which entry.metadata() does not.
            if fs::metadata(entry.path()).is_ok_and(|m| m.is_file()) {
                match entry.file_name().into_string() {
                    Ok(name) => names.push(name),
                    Err(name) => {
                        return Err(InputError::file(name.to_string_lossy())
                            .found("a file name that is not UTF-8")
                            .into());
                    }
                }
            }
        }
        names.sort();
        Ok(names)
    }

    /// Files that go with the weights (tokenizer, template, generation config, remote code, licence),
    /// and notes about those left behind.
    ///
    /// # Errors
    /// When the directory cannot be listed, or one of them may not be opened.
    pub(super) fn side_files(&self, tensors: &TensorFiles) -> Result<(Vec<String>, Vec<String>)> {
        let mut side = Vec::new();
        let mut stray = Vec::new();
        for name in self.file_names()? {
            if tensors.shards.iter().any(|s| s.file_name == name)
                || is_of_this_tool(&name)
                || name.starts_with('.')
            {
                continue;
            }
            if is_weights(&name) {
                stray.push(name);
            } else {
                self.locate(&name)?;
                side.push(name);
            }
        }
        let notes = match stray.is_empty() {
            true => Vec::new(),
            false => {
                vec![format!("left aside, not part of this checkpoint: {}", one_line(&stray.join(", ")))]
            }
        };
        Ok((side, notes))
    }
}

/// A name for directories, of the letters of another name.
pub(super) fn tame(name: &str) -> String {
    name.chars().map(|c| if c.is_alphanumeric() || "._-".contains(c) { c } else { '-' }).collect()
}

/// Files that conversion writes anew, or that describe weights it replaces.
fn is_of_this_tool(name: &str) -> bool {
    [
        CONFIG_FILE,
        INDEX_FILE,
        MANIFEST_FILE,
        "quantize_config.json",
        "quant_config.json",
        "quantization_config.json",
    ]
    .contains(&name)
}

fn is_weights(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    [
        ".safetensors",
        ".safetensors.index.json",
        ".bin",
        ".bin.index.json",
        ".pt",
        ".pth",
        ".ckpt",
        ".gguf",
        ".onnx",
        ".h5",
        ".msgpack",
    ]
    .iter()
    .any(|suffix| lower.ends_with(suffix))
}

/// How a Git LFS pointer begins: what is downloaded when the large files are not.
pub(super) const LFS_PREFIX: &[u8] = b"version https://git-lfs";

pub(super) fn lfs_pointer(name: &str) -> InputError {
    InputError::file(name)
        .found("a Git LFS pointer, not the file itself")
        .hint("fetch the large files (git lfs pull), or download the checkpoint again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bare_names_are_opened() {
        let dir = ModelDir::open(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        assert!(dir.open_file("Cargo.toml").is_ok());
        for name in
            ["../Cargo.toml", "/etc/hostname", "src/lib.rs", "./Cargo.toml", "..", ".", "", "a\\b", "a\0b"]
        {
            assert!(matches!(dir.open_file(name), Err(Failure::Input(_))), "{name:?}");
        }
        assert!(matches!(dir.open_file("src"), Err(Failure::Input(_))), "a directory");
        assert!(dir.sub_dir("src").unwrap().open_file("lib.rs").is_ok());
        for name in ["../src", "/etc", "src/npu", "..", ".", "", "Cargo.toml", "none"] {
            assert!(matches!(dir.sub_dir(name), Err(Failure::Input(_))), "{name:?}");
        }
    }
}
