//! Work in progress that outlives a killed run: a hidden directory beside the target whose content is
//! used again if its fingerprint is that of the next run.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{Failure, Result};

/// Says what the rest is work towards.
const FINGERPRINT: &str = "fingerprint";

/// A directory `.NAME.KIND` beside a target.
#[derive(Debug)]
pub struct Scratch {
    dir: PathBuf,
    /// Held while the run lasts, so that no other works on the same.
    _lock: File,
}

impl Scratch {
    /// Opens or makes the directory; what another fingerprint left in it is removed.
    ///
    /// # Errors
    /// When another run works in it, or it cannot be made.
    pub fn open(target: &Path, kind: &str, fingerprint: &str) -> Result<Self> {
        let name = target.file_name().ok_or_else(|| Failure::usage("--out has no name"))?;
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{kind}"));
        let dir = target.with_file_name(hidden);
        let failed = |e| Failure::io(&dir, "cannot create", e);
        fs::create_dir_all(&dir).map_err(failed)?;
        let lock = File::open(&dir).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let what = format!("{}: another run is working in it; wait for it to end", dir.display());
                return Err(Failure::usage(what));
            }
            Err(TryLockError::Error(e)) => return Err(Failure::io(&dir, "cannot lock", e)),
        }
        let scratch = Self { dir, _lock: lock };
        if fs::read_to_string(scratch.dir.join(FINGERPRINT)).ok().as_deref() != Some(fingerprint) {
            for entry in
                fs::read_dir(&scratch.dir).map_err(|e| Failure::io(&scratch.dir, "cannot list", e))?
            {
                let path = entry.map_err(|e| Failure::io(&scratch.dir, "cannot list", e))?.path();
                fs::remove_file(&path).map_err(|e| Failure::io(&path, "cannot remove", e))?;
            }
            scratch.write(FINGERPRINT, fingerprint.as_bytes())?;
        }
        Ok(scratch)
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether a file was finished.
    pub fn has(&self, name: &str) -> bool {
        self.dir.join(name).is_file()
    }

    /// Starts a file under a name that does not count as finished.
    ///
    /// # Errors
    /// When that fails.
    pub fn create(&self, name: &str) -> Result<File> {
        let path = self.unfinished(name);
        File::create(&path).map_err(|e| Failure::io(&path, "cannot create", e))
    }

    /// Waits until the file is on disk and gives it its name.
    ///
    /// # Errors
    /// When that fails.
    pub fn finish(&self, name: &str, file: &File) -> Result<()> {
        let failed = |e| Failure::io(&self.dir.join(name), "cannot write", e);
        file.sync_all().map_err(failed)?;
        fs::rename(self.unfinished(name), self.dir.join(name)).map_err(failed)
    }

    /// Writes a whole file.
    ///
    /// # Errors
    /// When that fails.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let mut file = self.create(name)?;
        file.write_all(bytes).map_err(|e| Failure::io(&self.dir.join(name), "cannot write", e))?;
        self.finish(name, &file)
    }

    /// Removes a file that is no longer of use.
    ///
    /// # Errors
    /// When that fails.
    pub fn forget(&self, name: &str) -> Result<()> {
        let path = self.dir.join(name);
        fs::remove_file(&path).map_err(|e| Failure::io(&path, "cannot remove", e))
    }

    /// Removes everything, when the work has become an artifact.
    ///
    /// # Errors
    /// When that fails.
    pub fn remove(self) -> Result<()> {
        fs::remove_dir_all(&self.dir).map_err(|e| Failure::io(&self.dir, "cannot remove", e))
    }

    fn unfinished(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.unfinished"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_work_is_found_again_and_other_work_is_cleared() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("model");
        let first = Scratch::open(&target, "work", "a").unwrap();
        assert!(Scratch::open(&target, "work", "a").is_err(), "two at a time");
        first.write("layer", b"1").unwrap();
        drop(first.create("half").unwrap());
        drop(first);
        let again = Scratch::open(&target, "work", "a").unwrap();
        assert!(again.has("layer") && !again.has("half"));
        drop(again);
        let other = Scratch::open(&target, "work", "b").unwrap();
        assert!(!other.has("layer"));
        other.remove().unwrap();
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
