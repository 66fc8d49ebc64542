//! A single file, all or nothing.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use crate::error::{Failure, Result};

/// Writes a whole file beside its target, waits until it is on disk, and puts it in the target's place.
///
/// # Errors
/// When there is no such directory, or writing fails; the target is as it was then.
pub fn write_file(target: &Path, bytes: &[u8]) -> Result<()> {
    let name = target
        .file_name()
        .ok_or_else(|| Failure::usage(format!("{}: expected the name of a file", target.display())))?;
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(".partial");
    let partial = target.with_file_name(hidden);
    let written = File::create(&partial)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&partial, target));
    written.map_err(|e| {
        // What is left of it would only be in the way.
        let _ = fs::remove_file(&partial);
        Failure::io(target, "cannot write", e)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_or_not_at_all() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("x.xml");
        for content in ["1", "22"] {
            write_file(&target, content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&target).unwrap(), content);
        }
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
        assert!(matches!(write_file(&root.path().join("no/x.xml"), b"3"), Err(Failure::Io { .. })));
        fs::create_dir(root.path().join("d")).unwrap();
        assert!(write_file(&root.path().join("d"), b"3").is_err());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
    }
}
