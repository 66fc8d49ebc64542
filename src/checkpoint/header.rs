//! The header of a safetensors file: the `safetensors` crate's validation, plus what it does not
//! tell: names stored twice, how many bytes are missing, Git LFS pointers.

use std::collections::HashSet;
use std::fmt;

use safetensors::tensor::{Metadata, SafeTensorError};
use safetensors::{Dtype, SafeTensors};
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::directory::{LFS_PREFIX, lfs_pointer};
use crate::error::InputError;

/// One tensor of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeaderEntry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Bytes of the file that hold the elements.
    pub(super) range: std::ops::Range<usize>,
}

/// Header of a whole file.
#[derive(Debug)]
pub(super) struct Header {
    /// In order of their data.
    pub(super) entries: Vec<HeaderEntry>,
    /// `format` of the free-form metadata.
    pub(super) format: Option<String>,
}

/// Parses and checks the header of `bytes`, the whole file.
///
/// # Errors
/// When the file is cut short, too long, not a safetensors file, holds a name twice, or its tensors
/// overlap, leave gaps or do not match their shapes.
pub(super) fn parse(file: &str, bytes: &[u8]) -> Result<Header, InputError> {
    let broken = |found: String| {
        InputError::file(file).expected("a safetensors file").found(found).hint("download it again")
    };
    if bytes.starts_with(LFS_PREFIX) {
        return Err(lfs_pointer(file));
    }
    let (length, metadata) = match SafeTensors::read_metadata(bytes) {
        Ok(read) => read,
        Err(SafeTensorError::HeaderTooSmall) => return Err(broken(format!("{} bytes", bytes.len()))),
        Err(SafeTensorError::InvalidHeaderLength) => {
            let (have, need) = (bytes.len(), declared_header_end(bytes));
            return Err(broken(format!("the file ends inside its header: {have} bytes of at least {need}")));
        }
        Err(SafeTensorError::MetadataIncompleteBuffer) => {
            let (have, need) = (bytes.len() as u64, declared_length(bytes));
            return Err(broken(match need {
                Some(need) if need > have => {
                    format!("a file cut short: {have} bytes of {need}, {} are missing", need - have)
                }
                Some(need) => format!("{} bytes more than the header describes ({need})", have - need),
                None => "a header that does not describe its data".to_owned(),
            }));
        }
        Err(other) => return Err(broken(other.to_string())),
    };
    let header_end = 8 + length;
    if let Some(name) = duplicate(&bytes[8..header_end]) {
        return Err(InputError::file(file).subject(name).found("a tensor stored twice in one header"));
    }
    Ok(Header { entries: entries(&metadata, header_end), format: format(&metadata) })
}

fn entries(metadata: &Metadata, header_end: usize) -> Vec<HeaderEntry> {
    let mut entries: Vec<_> = metadata
        .tensors()
        .into_iter()
        .map(|(name, info)| HeaderEntry {
            name,
            dtype: info.dtype,
            shape: info.shape.clone(),
            range: header_end + info.data_offsets.0..header_end + info.data_offsets.1,
        })
        .collect();
    // Names break ties between empty tensors, so that the order is always the same.
    entries.sort_by(|a, b| (a.range.start, a.range.end, &a.name).cmp(&(b.range.start, b.range.end, &b.name)));
    entries
}

fn format(metadata: &Metadata) -> Option<String> {
    metadata.metadata().as_ref()?.get("format").cloned()
}

fn declared_header_end(bytes: &[u8]) -> u64 {
    let mut length = [0; 8];
    length.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(length).saturating_add(8)
}

/// Length of the file that the header describes, if it can be read that far.
fn declared_length(bytes: &[u8]) -> Option<u64> {
    let end = declared_header_end(bytes);
    let header = bytes.get(8..usize::try_from(end).ok()?)?;
    let json: serde_json::Value = serde_json::from_slice(header).ok()?;
    let last = json
        .as_object()?
        .iter()
        .filter(|(name, _)| *name != "__metadata__")
        .filter_map(|(_, entry)| entry.get("data_offsets")?.get(1)?.as_u64())
        .max()?;
    end.checked_add(last)
}

/// The first name that occurs twice among the keys of a JSON object.
fn duplicate(header: &[u8]) -> Option<String> {
    struct Names;
    impl<'de> Visitor<'de> for Names {
        type Value = Option<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut seen = HashSet::new();
            let mut twice = None;
            while let Some(name) = map.next_key::<String>()? {
                map.next_value::<IgnoredAny>()?;
                if !seen.insert(name.clone()) {
                    twice.get_or_insert(name);
                }
            }
            Ok(twice)
        }
    }
    serde_json::Deserializer::from_slice(header).deserialize_map(Names).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    const TWO: &str = r#"{"b":{"dtype":"I8","shape":[3],"data_offsets":[0,3]},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[3,11]}}"#;

    #[test]
    fn tensors_come_in_data_order_at_their_place_in_the_file() {
        let header = parse("x", &file(TWO, 11)).unwrap();
        let start = 8 + TWO.len();
        assert_eq!(header.entries[0].name, "b");
        assert_eq!(header.entries[1].range, start + 3..start + 11);
        assert_eq!(header.entries[1].shape, [1, 2]);
        assert_eq!(header.format, None);
    }

    #[test]
    fn a_file_of_the_wrong_length_says_by_how_much() {
        let short = parse("x", &file(TWO, 7)).unwrap_err().to_string();
        assert!(short.contains("4 are missing"), "{short}");
        let long = parse("x", &file(TWO, 12)).unwrap_err().to_string();
        assert!(long.contains("1 bytes more"), "{long}");
        let header = parse("x", &file(TWO, 0)[..40]).unwrap_err().to_string();
        assert!(header.contains("ends inside its header"), "{header}");
        assert!(parse("x", b"1234567").is_err());
        assert!(parse("x", &[]).is_err());
    }

    #[test]
    fn malformed_headers_are_refused() {
        let entry = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        for header in [
            entry("F32", "[2]", "[0,4]"),
            entry("F32", "[1]", "[4,8]"),
            entry("F32", "[1]", "[8,4]"),
            entry("X9", "[4]", "[0,4]"),
            entry("I8", "[18446744073709551615,18446744073709551615]", "[0,4]"),
            entry("I8", "[-4]", "[0,4]"),
            "{".to_owned(),
            "[]".to_owned(),
            r#"{"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}"#.to_owned(),
        ] {
            assert!(parse("x", &file(&header, 4)).is_err(), "{header}");
        }
        let huge = [u64::MAX.to_le_bytes().to_vec(), vec![0; 16]].concat();
        assert!(parse("x", &huge).is_err());
    }

    #[test]
    fn an_lfs_pointer_is_recognised() {
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n";
        assert!(parse("x", pointer).unwrap_err().to_string().contains("Git LFS pointer"));
    }
}
