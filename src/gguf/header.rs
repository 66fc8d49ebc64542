//! The header of a GGUF file: every number is checked against the length of the file before it is used.

use std::collections::BTreeMap;
use std::collections::HashSet;
use std::ops::Range;

use super::metadata::{Metadata, Value};
use crate::error::InputError;
use crate::ggml::{SUPPORTED, TensorType, type_name};

/// Most key-value pairs that are taken; llama.cpp writes about 40.
const MAX_PAIRS: u64 = 1 << 12;
/// Most tensors: above those of the largest number of layers that a configuration may have.
const MAX_TENSORS: u64 = 1 << 16;
/// Longest key or name of a tensor; ggml keeps 64 bytes of a name.
const MAX_NAME: u64 = 1 << 12;
/// Most dimensions of a tensor, `GGML_MAX_DIMS`.
const MAX_DIMENSIONS: u32 = 4;
/// Where data starts when `general.alignment` does not say: at a multiple of this.
const ALIGNMENT: u64 = 32;
/// The largest alignment that is taken.
const MAX_ALIGNMENT: u64 = 1 << 20;

/// The header of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// 2 or 3; they differ in what byte order they allow.
    pub version: u32,
    /// Key-value pairs.
    pub metadata: Metadata,
    /// Tensors in order of their data.
    pub tensors: Vec<TensorInfo>,
}

/// One tensor of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Its type.
    pub kind: TensorType,
    /// Dimensions, slowest first (the file has them fastest first).
    pub shape: Vec<usize>,
    /// Where its data lies in the file.
    pub range: Range<usize>,
}

/// Parses and checks the header of `bytes`, the whole file of the name `file`.
///
/// # Errors
/// When the file is cut short, not a GGUF file of version 2 or 3 in little-endian order, holds a key or a
/// tensor twice or a tensor of a type that is not read, or its tensors overlap.
pub fn parse(file: &str, bytes: &[u8]) -> Result<Header, InputError> {
    let mut cursor = Cursor { file, bytes, at: 0 };
    let version = version(&mut cursor)?;
    let tensors = cursor.u64("the number of tensors")?;
    let pairs = cursor.u64("the number of key-value pairs")?;
    for (what, count, most) in [("tensors", tensors, MAX_TENSORS), ("key-value pairs", pairs, MAX_PAIRS)] {
        if count > most {
            return Err(cursor.error().expected(format!("at most {most} {what}")).found(count));
        }
    }
    let mut metadata = BTreeMap::new();
    for _ in 0..pairs {
        let key = cursor.name("a key")?;
        let value = Value::read(&mut cursor, &key)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(cursor.error().subject(key).found("a key that is there twice"));
        }
    }
    let metadata = Metadata(metadata);
    let alignment = alignment(&cursor, &metadata)?;
    let rows = (0..tensors).map(|_| Row::read(&mut cursor)).collect::<Result<Vec<_>, _>>()?;
    let start = (cursor.at as u64).next_multiple_of(alignment);
    let tensors = place(&cursor, rows, start, alignment)?;
    Ok(Header { version, metadata, tensors })
}

/// Magic number and version.
fn version(cursor: &mut Cursor<'_>) -> Result<u32, InputError> {
    let magic = cursor.bytes.get(..4);
    if magic != Some(b"GGUF".as_slice()) {
        let found = match magic {
            Some(magic) => format!("{:?}", String::from_utf8_lossy(magic)),
            None => format!("{} bytes", cursor.bytes.len()),
        };
        return Err(cursor.error().expected("a GGUF file, which begins with \"GGUF\"").found(found));
    }
    cursor.take(4, "the magic number")?;
    let version = cursor.u32("the version")?;
    match version {
        2 | 3 => Ok(version),
        _ if matches!(version.swap_bytes(), 1..=3) => Err(cursor
            .error()
            .expected("little-endian byte order")
            .found("a file for big-endian machines")
            .hint("convert the checkpoint again for this machine")),
        _ => Err(cursor
            .error()
            .expected("GGUF of version 2 or 3")
            .found(format!("version {version}"))
            .hint("convert the checkpoint again with a current llama.cpp")),
    }
}

fn alignment(cursor: &Cursor<'_>, metadata: &Metadata) -> Result<u64, InputError> {
    const KEY: &str = "general.alignment";
    let Some(value) = metadata.get(KEY) else { return Ok(ALIGNMENT) };
    let stated = match value {
        Value::Whole(n) => u64::try_from(*n).ok(),
        _ => None,
    };
    stated.filter(|n| n.is_power_of_two() && *n <= MAX_ALIGNMENT).ok_or_else(|| {
        let expected = format!("a power of two up to {MAX_ALIGNMENT}");
        cursor.error().subject(KEY).expected(expected).found(value.shown())
    })
}

/// A tensor as the table has it.
struct Row {
    name: String,
    kind: TensorType,
    shape: Vec<usize>,
    bytes: u64,
    offset: u64,
}

impl Row {
    fn read(cursor: &mut Cursor<'_>) -> Result<Self, InputError> {
        let name = cursor.name("the name of a tensor")?;
        let dimensions = cursor.u32("the number of dimensions")?;
        if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
            return Err(cursor
                .error()
                .subject(name)
                .expected(format!("1 to {MAX_DIMENSIONS} dimensions"))
                .found(dimensions));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(cursor.u64("the dimensions of a tensor")?);
        }
        let id = cursor.u32("the type of a tensor")?;
        let offset = cursor.u64("the place of a tensor")?;
        let Some(kind) = TensorType::from_id(id) else {
            return Err(cursor
                .error()
                .subject(name)
                .expected(SUPPORTED)
                .found(type_name(id))
                .hint("quantize to Q8_0, Q4_K_M, Q5_K_M or Q6_K to compare it"));
        };
        let sized: Option<Vec<usize>> =
            shape.iter().map(|d| usize::try_from(*d).ok().filter(|d| *d > 0)).collect();
        let bytes = sized.as_ref().and_then(|shape| {
            let row = kind.bytes_of(shape[0])?;
            let bytes = shape[1..].iter().try_fold(row, |n, d| n.checked_mul(*d))?;
            u64::try_from(bytes).ok()
        });
        let (Some(mut shape), Some(bytes)) = (sized, bytes) else {
            return Err(cursor
                .error()
                .subject(name)
                .expected(format!("rows of whole {} blocks ({} elements)", kind.name(), kind.block_len()))
                .found(format!("dimensions {shape:?}")));
        };
        shape.reverse();
        Ok(Self { name, kind, shape, bytes, offset })
    }
}

/// Puts the tensors in order of their data, and makes sure that it is all there and nothing is shared.
fn place(
    cursor: &Cursor<'_>,
    rows: Vec<Row>,
    start: u64,
    alignment: u64,
) -> Result<Vec<TensorInfo>, InputError> {
    let have = cursor.bytes.len() as u64;
    let mut seen = HashSet::new();
    let mut need = start;
    let mut tensors = Vec::with_capacity(rows.len());
    for Row { name, kind, shape, bytes, offset } in rows {
        let error = || cursor.error().subject(&name);
        if !offset.is_multiple_of(alignment) {
            return Err(error().expected(format!("data at a multiple of {alignment}")).found(offset));
        }
        let first = start.checked_add(offset);
        let Some((first, end)) = first.and_then(|first| Some((first, first.checked_add(bytes)?))) else {
            return Err(error().expected(format!("data inside the file ({have} bytes)")).found(offset));
        };
        if !seen.insert(name.clone()) {
            return Err(error().found("a tensor that is there twice"));
        }
        need = need.max(end);
        // What does not fit a usize does not fit the file: told below.
        let range = usize::try_from(first).unwrap_or(usize::MAX)..usize::try_from(end).unwrap_or(usize::MAX);
        tensors.push(TensorInfo { name, kind, shape, range });
    }
    if tensors.is_empty() {
        return Err(cursor.error().expected("a model").found("no tensors"));
    }
    if need > have {
        return Err(cursor
            .error()
            .found(format!("a file cut short: {have} bytes of {need}, {} are missing", need - have))
            .hint("download it again"));
    }
    tensors.sort_by_key(|t| t.range.start);
    for pair in tensors.windows(2) {
        if pair[1].range.start < pair[0].range.end {
            return Err(cursor
                .error()
                .subject(&pair[1].name)
                .found(format!("data that overlaps that of {}", pair[0].name)));
        }
    }
    Ok(tensors)
}

/// A place in the file.
pub(super) struct Cursor<'a> {
    file: &'a str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// Starts an error about the file.
    pub(super) fn error(&self) -> InputError {
        InputError::file(self.file)
    }

    /// Bytes from the start of the file.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// The next bytes.
    pub(super) fn take(&mut self, length: u64, what: &str) -> Result<&'a [u8], InputError> {
        let rest = &self.bytes[self.at..];
        let taken = usize::try_from(length).ok().and_then(|n| rest.get(..n)).ok_or_else(|| {
            let found = format!(
                "the file ends inside its header: {what} of {length} bytes at byte {} of {}",
                self.at,
                self.bytes.len()
            );
            self.error().found(found).hint("download it again")
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, InputError> {
        let mut number = [0; 4];
        number.copy_from_slice(self.take(4, what)?);
        Ok(u32::from_le_bytes(number))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, InputError> {
        let mut number = [0; 8];
        number.copy_from_slice(self.take(8, what)?);
        Ok(u64::from_le_bytes(number))
    }

    /// A length and as many bytes.
    pub(super) fn string(&mut self, what: &str, most: u64) -> Result<&'a [u8], InputError> {
        let length = self.u64(what)?;
        if length > most {
            let expected = format!("{what} of at most {most} bytes");
            return Err(self.error().expected(expected).found(format!("a length of {length}")));
        }
        self.take(length, what)
    }

    /// A key or a name: short, UTF-8, not empty.
    fn name(&mut self, what: &str) -> Result<String, InputError> {
        let at = self.at;
        let bytes = self.string(what, MAX_NAME)?;
        match std::str::from_utf8(bytes) {
            Ok(name) if !name.is_empty() => Ok(name.to_owned()),
            _ => Err(self
                .error()
                .expected(format!("{what} in UTF-8"))
                .found(format!("{:?} at byte {at}", String::from_utf8_lossy(bytes)))),
        }
    }
}
