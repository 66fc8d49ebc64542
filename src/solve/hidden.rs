//! The residual stream of all texts between two layers, on disk in bf16.

use std::fs::File;
use std::io::Write;
use std::ops::Range;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use crate::artifact::Scratch;
use crate::checkpoint::ModelDir;
use crate::error::{Failure, InputError, Result};
use crate::tensor::to_bf16;

/// Bytes of the stream of so many tokens.
pub(super) fn bytes(tokens: usize, hidden_size: usize) -> u64 {
    tokens as u64 * hidden_size as u64 * 2
}

pub(super) struct HiddenWriter<'a> {
    scratch: &'a Scratch,
    name: &'a str,
    file: File,
}

impl<'a> HiddenWriter<'a> {
    pub(super) fn new(scratch: &'a Scratch, name: &'a str) -> Result<Self> {
        Ok(Self { scratch, name, file: scratch.create(name)? })
    }

    pub(super) fn append(&mut self, rows: &[f32]) -> Result<()> {
        let bytes: Vec<u8> = rows.iter().flat_map(|x| to_bf16(*x).to_le_bytes()).collect();
        let failed = |e| Failure::io(&self.scratch.dir().join(self.name), "cannot write", e);
        self.file.write_all(&bytes).map_err(failed)
    }

    pub(super) fn finish(self) -> Result<()> {
        self.scratch.finish(self.name, &self.file)
    }
}

pub(super) struct HiddenReader {
    name: String,
    map: memmap2::Mmap,
}

impl HiddenReader {
    pub(super) fn open(scratch: &Scratch, name: &str) -> Result<Self> {
        Ok(Self { name: name.to_owned(), map: ModelDir::open(scratch.dir())?.map(name)? })
    }

    /// Elements of the stream, widened.
    pub(super) fn rows(&self, range: Range<usize>) -> Result<Vec<f32>> {
        let Some(bytes) = self.map.get(2 * range.start..2 * range.end) else {
            let error = InputError::file(&self.name).expected(format!("{} bytes", 2 * range.end));
            return Err(error.found(self.map.len()).hint("remove the directory and start again").into());
        };
        let halves: Vec<bf16> = bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b)).collect();
        Ok(halves.to_f32_vec())
    }
}
