//! Finished files that outlive the runs that fill a directory: each is there as a whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use super::Staging;
use crate::error::{Failure, Result};

/// Ends the names of files that are being written.
const UNFINISHED: &str = ".partial";

/// A directory of its own, known by a tag in it.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    /// Held while the run lasts, so that no other writes the same files.
    _lock: File,
}

impl Store {
    /// Opens a directory that has the tag, or makes it where there is none or an empty one. `tag` is a file's
    /// name and content. What a killed run had begun is removed.
    ///
    /// # Errors
    /// When another run is using it, or it cannot be made.
    pub fn open(path: &Path, tag: (&str, &str)) -> Result<Self> {
        // "dir/." has no name to be made under.
        let dir: PathBuf = path.components().collect();
        let failed = |e| Failure::io(&dir, "cannot open", e);
        match fs::symlink_metadata(dir.join(tag.0)) {
            Ok(_) => {}
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                let staging = Staging::begin(&dir)?;
                staging.write(tag.0, tag.1.as_bytes())?;
                staging.publish(false)?;
            }
            Err(e) => return Err(failed(e)),
        }
        let lock = File::open(&dir).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let what = format!("{}: another run is using it; wait for it to end", dir.display());
                return Err(Failure::usage(what));
            }
            Err(TryLockError::Error(e)) => return Err(Failure::io(&dir, "cannot lock", e)),
        }
        for entry in fs::read_dir(&dir).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with('.') && name.ends_with(UNFINISHED) {
                let path = entry.path();
                fs::remove_file(&path).map_err(|e| Failure::io(&path, "cannot remove", e))?;
            }
        }
        Ok(Self { dir, _lock: lock })
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes a file as `fill` streams it, waits until it is on disk, and puts it in the place of an older one
    /// of that name.
    ///
    /// # Errors
    /// When that fails; an older one is as it was then.
    pub fn write(&self, name: &str, fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<()> {
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(UNFINISHED);
        let (partial, target) = (self.dir.join(hidden), self.dir.join(name));
        let written = File::create(&partial).and_then(|file| {
            let mut writer = BufWriter::new(file);
            fill(&mut writer)?;
            writer.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
            fs::rename(&partial, &target)
        });
        written.map_err(|e| {
            // What is left of it would only take space.
            let _ = fs::remove_file(&partial);
            Failure::io(&target, "cannot write", e)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAG: (&str, &str) = ("TAG", "of a test\n");

    #[test]
    fn files_stay_and_are_whole() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/store/.");
        let store = Store::open(&path, TAG).unwrap();
        assert!(Store::open(&path, TAG).unwrap_err().to_string().contains("another run"));
        store.write("x", |to| to.write_all(b"1")).unwrap();
        let broken = store.write("x", |to| {
            to.write_all(b"22")?;
            Err(std::io::Error::other("full"))
        });
        assert!(matches!(broken, Err(Failure::Io { .. })));
        assert_eq!(fs::read(store.dir().join("x")).unwrap(), b"1");
        // As a kill leaves it.
        fs::write(store.dir().join(".y.partial"), "half").unwrap();
        drop(store);
        let store = Store::open(&path, TAG).unwrap();
        let mut names: Vec<_> = fs::read_dir(store.dir()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["TAG", "x"]);
        assert_eq!(fs::read_to_string(store.dir().join("TAG")).unwrap(), TAG.1);
    }

    #[test]
    fn what_is_there_already_is_not_taken_over() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("thesis.txt"), "x").unwrap();
        assert!(Store::open(root.path(), TAG).is_err());
        assert!(Store::open(&root.path().join("thesis.txt"), TAG).is_err());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }
}
