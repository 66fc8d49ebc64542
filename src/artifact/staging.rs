//! All or nothing: an artifact grows in a hidden directory beside its target and is renamed when it
//! is whole and on disk. A crash, a full disk or a kill leaves no directory that looks finished.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::hash::{Sha256Hex, hash_bytes};
use super::manifest::FileRecord;
use crate::error::{Failure, Result};

/// An artifact that is being written. Dropped without [`Staging::publish`], it disappears.
#[derive(Debug)]
pub struct Staging {
    dir: PathBuf,
    target: PathBuf,
    /// Held while the run lasts: tells a run that is going on from the remains of one that was killed.
    lock: File,
    /// Parents of the target that did not exist before, outermost first.
    created_parents: Vec<PathBuf>,
    finished: bool,
}

impl Staging {
    /// Makes the staging directory `.NAME.partial` beside `target`, clearing what a killed run left.
    ///
    /// # Errors
    /// When another run writes to the same target, or the directory cannot be made.
    pub fn begin(target: &Path) -> Result<Self> {
        let name = target.file_name().ok_or_else(|| {
            Failure::usage(format!("--out {}: expected the name of a directory to make", target.display()))
        })?;
        let parent = parent_of(target);
        let created_parents = missing_parents(parent);
        fs::create_dir_all(parent).map_err(|e| Failure::io(parent, "cannot create", e))?;
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(".partial");
        let dir = parent.join(hidden);
        let failed = |e| Failure::io(&dir, "cannot create", e);

        let mut lock = None;
        match fs::create_dir(&dir) {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                let metadata = fs::symlink_metadata(&dir).map_err(failed)?;
                if !metadata.is_dir() {
                    return Err(Failure::usage(format!("{}: is in the way; remove it", dir.display())));
                }
                lock = Some(lock_directory(&dir, target)?);
                for entry in fs::read_dir(&dir).map_err(failed)? {
                    let path = entry.map_err(failed)?.path();
                    remove(&path).map_err(|e| Failure::io(&path, "cannot remove", e))?;
                }
                tracing::info!("cleared what an interrupted run had left in {}", dir.display());
            }
            Err(e) => return Err(failed(e)),
        }
        let lock = match lock {
            Some(lock) => lock,
            None => lock_directory(&dir, target)?,
        };
        Ok(Self { dir, target: target.to_owned(), lock, created_parents, finished: false })
    }

    /// The staged path of a file.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Makes a directory inside; files in it are named `DIR/FILE`.
    ///
    /// # Errors
    /// When that fails, or there is one of that name.
    pub fn create_dir(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        fs::create_dir(&path).map_err(|e| Failure::io(&path, "cannot create", e))
    }

    /// Waits until the entries of a directory inside are on disk.
    ///
    /// # Errors
    /// When that fails.
    pub fn sync_dir(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        File::open(&path).and_then(|d| d.sync_all()).map_err(|e| Failure::io(&path, "cannot sync", e))
    }

    /// Creates a file; it gets the mode that the umask leaves.
    ///
    /// # Errors
    /// When that fails, or there is one of that name.
    pub fn create(&self, name: &str) -> Result<File> {
        let path = self.path(name);
        File::options()
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(|e| Failure::io(&path, "cannot create", e))
    }

    /// Writes a whole file and waits until it is on disk.
    ///
    /// # Errors
    /// When writing fails.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<FileRecord> {
        let mut file = self.create(name)?;
        let failed = |e| Failure::io(&self.path(name), "cannot write", e);
        file.write_all(bytes).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        Ok(FileRecord { bytes: bytes.len() as u64, sha256: hash_bytes(bytes) })
    }

    /// Copies an open file byte for byte, whatever its size, and waits until it is on disk.
    ///
    /// # Errors
    /// When reading or writing fails.
    pub fn copy(&self, name: &str, from: File) -> Result<FileRecord> {
        self.fill(name, from)
    }

    fn fill(&self, name: &str, mut from: impl Read) -> Result<FileRecord> {
        let mut to = self.create(name)?;
        let failed = |e| Failure::io(&self.path(name), "cannot copy", e);
        std::io::copy(&mut from, &mut to).map_err(failed)?;
        to.sync_all().map_err(failed)?;
        // The written file is what gets hashed.
        let mut written = File::open(self.path(name)).map_err(failed)?;
        let (sha256, bytes): (Sha256Hex, u64) = super::hash_file(&mut written).map_err(failed)?;
        Ok(FileRecord { bytes, sha256 })
    }

    /// Writes a file that is the beginning of another one here, and waits until it is on disk.
    ///
    /// # Errors
    /// When reading or writing fails, or there is a file of that name.
    pub fn copy_start(&self, name: &str, of: &str, bytes: u64) -> Result<FileRecord> {
        let path = self.path(of);
        let from = File::open(&path).map_err(|e| Failure::io(&path, "cannot open", e))?;
        self.fill(name, from.take(bytes))
    }

    /// Gives the directory its name. With `replace`, an artifact of that name is exchanged for this
    /// one in one step and then removed.
    ///
    /// # Errors
    /// When the target appeared meanwhile, or renaming fails.
    pub fn publish(mut self, replace: bool) -> Result<()> {
        let failed = |e: std::io::Error| Failure::io(&self.target, "cannot publish", e);
        self.lock.sync_all().map_err(failed)?;
        let rename = |flags| renameat_with(CWD, &self.dir, CWD, &self.target, flags);
        let exists = fs::symlink_metadata(&self.target).is_ok();
        let empty = exists && fs::read_dir(&self.target).is_ok_and(|mut entries| entries.next().is_none());
        if !exists {
            match rename(RenameFlags::NOREPLACE) {
                Ok(()) => {}
                Err(Errno::EXIST) => {
                    return Err(Failure::usage(format!(
                        "{}: appeared while this run was going on",
                        self.target.display()
                    )));
                }
                // Not every file system knows the flag.
                Err(Errno::INVAL | Errno::NOSYS) => fs::rename(&self.dir, &self.target).map_err(failed)?,
                Err(e) => return Err(failed(e.into())),
            }
        } else if empty {
            fs::rename(&self.dir, &self.target).map_err(failed)?;
        } else if replace {
            self.exchange()?;
        } else {
            return Err(Failure::usage(format!(
                "{}: appeared while this run was going on",
                self.target.display()
            )));
        }
        self.finished = true;
        let parent = parent_of(&self.target);
        File::open(parent).and_then(|d| d.sync_all()).map_err(|e| Failure::io(parent, "cannot sync", e))
    }

    /// Swaps the staged directory and the target, and removes what was there.
    fn exchange(&self) -> Result<()> {
        let failed = |e: std::io::Error| Failure::io(&self.target, "cannot replace", e);
        match renameat_with(CWD, &self.dir, CWD, &self.target, RenameFlags::EXCHANGE) {
            // The staging name now holds the old artifact.
            Ok(()) => remove(&self.dir).map_err(failed),
            Err(Errno::INVAL | Errno::NOSYS) => {
                let old = self.dir.with_extension("old");
                fs::rename(&self.target, &old).map_err(failed)?;
                if let Err(e) = fs::rename(&self.dir, &self.target) {
                    // Put the old artifact back; the rename's own error is the one to report.
                    let _ = fs::rename(&old, &self.target);
                    return Err(failed(e));
                }
                remove(&old).map_err(failed)
            }
            Err(e) => Err(failed(e.into())),
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        // Best effort: what cannot be removed is cleared by the next run.
        let _ = remove(&self.dir);
        for parent in self.created_parents.iter().rev() {
            let _ = fs::remove_dir(parent);
        }
    }
}

fn lock_directory(dir: &Path, target: &Path) -> Result<File> {
    let file = File::open(dir).map_err(|e| Failure::io(dir, "cannot open", e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Failure::usage(format!(
            "{}: another run is writing to it; wait for it to end",
            target.display()
        ))),
        Err(TryLockError::Error(e)) => Err(Failure::io(dir, "cannot lock", e)),
    }
}

fn remove(path: &Path) -> std::io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

fn parent_of(target: &Path) -> &Path {
    match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn missing_parents(parent: &Path) -> Vec<PathBuf> {
    let mut missing: Vec<_> = parent
        .ancestors()
        .take_while(|p| !p.as_os_str().is_empty() && !p.exists())
        .map(Path::to_owned)
        .collect();
    missing.reverse();
    missing
}

/// Refuses a target that is the source, or that holds it: publishing would destroy the weights that
/// are being read. Compares resolved paths and file identities, so no link or mount hides it.
///
/// # Errors
/// A usage error that says which.
pub fn refuse_overlap(target: &Path, source: &Path) -> Result<()> {
    let identity = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(path).ok().map(|m| (m.dev(), m.ino()))
    };
    let target_identity = identity(target);
    let resolved = fs::canonicalize(source).map_err(|e| Failure::io(source, "cannot open", e))?;
    let hit = target_identity.is_some() && resolved.ancestors().any(|a| identity(a) == target_identity);
    if hit {
        return Err(Failure::usage(format!(
            "--out {}: is or contains the input {}; choose another directory",
            target.display(),
            source.display()
        )));
    }
    Ok(())
}

/// Checks that the file system of `target` has room for `needed_bytes` and five per cent.
///
/// # Errors
/// [`Failure::Space`] when it has not.
pub fn check_space(target: &Path, needed_bytes: u64) -> Result<()> {
    // A file system that does not tell is found out by writing.
    let Some((existing, free_bytes)) = free_space(target) else { return Ok(()) };
    let needed_bytes = needed_bytes.saturating_add(needed_bytes / 20);
    if free_bytes < needed_bytes {
        return Err(Failure::Space { path: existing.to_owned(), needed_bytes, free_bytes });
    }
    Ok(())
}

/// Free bytes of the file system that `target` would be on, where it tells.
pub fn free_bytes(target: &Path) -> Option<u64> {
    free_space(target).map(|(_, free_bytes)| free_bytes)
}

/// The directory that is there already, and the free bytes of its file system.
fn free_space(target: &Path) -> Option<(&Path, u64)> {
    let existing = target.ancestors().skip(1).map(or_here).find(|p| p.exists())?;
    let stat = rustix::fs::statvfs(existing).ok()?;
    Some((existing, stat.f_bavail.saturating_mul(stat.f_frsize)))
}

fn or_here(path: &Path) -> &Path {
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_published_disappears_with_the_parents_it_made() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("a/b/model");
        let staging = Staging::begin(&target).unwrap();
        staging.write("x", b"1").unwrap();
        drop(staging);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_start_of_a_file_is_copied_and_nothing_is_replaced() {
        let root = tempfile::tempdir().unwrap();
        let staging = Staging::begin(&root.path().join("model")).unwrap();
        staging.create_dir("sub").unwrap();
        staging.write("x", b"12345").unwrap();
        let record = staging.copy_start("sub/x", "x", 3).unwrap();
        assert_eq!((record.bytes, record.sha256), (3, hash_bytes(b"123")));
        assert_eq!(fs::read(staging.path("sub/x")).unwrap(), b"123");
        assert!(staging.copy_start("sub/x", "x", 5).is_err());
        assert_eq!(fs::read(staging.path("sub/x")).unwrap(), b"123");
    }

    #[test]
    fn publishing_renames_and_replaces() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("model");
        for (content, replace) in [("1", false), ("2", true)] {
            let staging = Staging::begin(&target).unwrap();
            staging.write("x", content.as_bytes()).unwrap();
            staging.publish(replace).unwrap();
            assert_eq!(fs::read_to_string(target.join("x")).unwrap(), content);
            assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
        }
        let staging = Staging::begin(&target).unwrap();
        assert!(matches!(staging.publish(false), Err(Failure::Usage(_))));
        assert_eq!(fs::read_to_string(target.join("x")).unwrap(), "2");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_second_run_waits_for_nothing_and_a_killed_one_is_cleared() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("model");
        let running = Staging::begin(&target).unwrap();
        assert!(Staging::begin(&target).unwrap_err().to_string().contains("another run"));
        drop(running);
        let remains = root.path().join(".model.partial");
        fs::create_dir_all(remains.join("deeper")).unwrap();
        fs::write(remains.join("x"), "old").unwrap();
        let staging = Staging::begin(&target).unwrap();
        staging.write("x", b"new").unwrap();
        staging.publish(false).unwrap();
        assert_eq!(fs::read_to_string(target.join("x")).unwrap(), "new");
        assert!(!target.join("deeper").exists());
    }

    #[test]
    fn the_source_and_what_holds_it_are_refused_by_whatever_path() {
        let root = tempfile::tempdir().unwrap();
        let source = root.path().join("models/spark");
        fs::create_dir_all(&source).unwrap();
        std::os::unix::fs::symlink(&source, root.path().join("link")).unwrap();
        for target in
            ["models/spark", "models", "link", "models/../models/spark/.", "models/spark/../../link"]
        {
            assert!(refuse_overlap(&root.path().join(target), &source).is_err(), "{target}");
        }
        for target in ["models/spark/artifacts/x", "models/other", "elsewhere"] {
            assert!(refuse_overlap(&root.path().join(target), &source).is_ok(), "{target}");
        }
        assert!(refuse_overlap(&source, &root.path().join("link")).is_err(), "source by a link");
    }

    #[test]
    fn space_is_checked_on_the_nearest_parent_that_exists() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("a/b");
        assert!(check_space(&target, 1).is_ok());
        assert!(matches!(check_space(&target, u64::MAX / 4), Err(Failure::Space { .. })));
    }
}
