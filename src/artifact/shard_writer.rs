//! A safetensors file written front to back: header first, then every tensor in order, hashed as it
//! goes. The `safetensors` crate's own writer cannot fail half-way, orders tensors and metadata its
//! own way, makes files that only their owner can read, and leaves hashing for a second pass.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use sha2::{Digest, Sha256};

use super::hash::{Sha256Hex, hex};
use crate::error::{Failure, Result};
use crate::formats::OutputTensor;

/// A shard being written.
#[derive(Debug)]
pub struct ShardWriter {
    path: PathBuf,
    file: File,
    file_hash: Sha256,
    tensor_hash: Sha256,
    tensor_hashes: Vec<Sha256Hex>,
    /// Bytes of each tensor, as planned.
    lengths: Vec<u64>,
    /// Bytes of the current tensor that are still to come.
    missing: u64,
    written: u64,
}

/// A shard that is complete and on disk.
#[derive(Clone, Debug)]
pub struct WrittenShard {
    /// Length of the file.
    pub bytes: u64,
    /// Hash of the file.
    pub sha256: Sha256Hex,
    /// Hash of every tensor's data, in file order.
    pub tensors: Vec<Sha256Hex>,
}

impl ShardWriter {
    /// Writes the header of `tensors` to a new file.
    ///
    /// # Errors
    /// When writing fails.
    pub fn start(path: PathBuf, file: File, tensors: &[OutputTensor]) -> Result<Self> {
        let lengths: Vec<u64> = tensors.iter().map(OutputTensor::len_bytes).collect();
        let missing = lengths.first().copied().unwrap_or(0);
        let mut this = Self {
            path,
            file,
            file_hash: Sha256::new(),
            tensor_hash: Sha256::new(),
            tensor_hashes: Vec::with_capacity(tensors.len()),
            lengths,
            missing,
            written: 0,
        };
        this.write(&header(tensors))?;
        this.close_complete_tensors();
        Ok(this)
    }

    /// Appends data of the current tensor. The hashes and the write run side by side.
    ///
    /// # Errors
    /// When writing fails.
    ///
    /// # Panics
    /// When the data goes beyond the end of the current tensor: the plan and the encoder disagree.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        assert!(bytes.len() as u64 <= self.missing, "{}: more bytes than planned", self.path.display());
        let (file_hash, tensor_hash, mut file) = (&mut self.file_hash, &mut self.tensor_hash, &self.file);
        let (written, ()) = rayon::join(
            || {
                file_hash.update(bytes);
                file.write_all(bytes)
            },
            || tensor_hash.update(bytes),
        );
        written.map_err(|e| Failure::io(&self.path, "cannot write", e))?;
        self.written += bytes.len() as u64;
        self.missing -= bytes.len() as u64;
        self.close_complete_tensors();
        Ok(())
    }

    /// Waits until the file is on disk.
    ///
    /// # Errors
    /// When that fails.
    ///
    /// # Panics
    /// When a tensor is not complete: the plan and the encoder disagree.
    pub fn finish(self) -> Result<WrittenShard> {
        assert_eq!(
            self.tensor_hashes.len(),
            self.lengths.len(),
            "{}: fewer bytes than planned",
            self.path.display()
        );
        self.file.sync_all().map_err(|e| Failure::io(&self.path, "cannot write", e))?;
        Ok(WrittenShard { bytes: self.written, sha256: hex(self.file_hash), tensors: self.tensor_hashes })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file_hash.update(bytes);
        self.file.write_all(bytes).map_err(|e| Failure::io(&self.path, "cannot write", e))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Takes the hash of every tensor that has all its bytes (empty ones have none to wait for).
    fn close_complete_tensors(&mut self) {
        while self.missing == 0 && self.tensor_hashes.len() < self.lengths.len() {
            self.tensor_hashes.push(hex(std::mem::take(&mut self.tensor_hash)));
            self.missing = self.lengths.get(self.tensor_hashes.len()).copied().unwrap_or(0);
        }
    }
}

/// Length and header as they stand at the front of the file. The metadata says `"format": "pt"`,
/// without which transformers refuses the file; blanks pad the data to a multiple of 64 bytes.
fn header(tensors: &[OutputTensor]) -> Vec<u8> {
    let mut json = serde_json::Map::new();
    json.insert("__metadata__".to_owned(), serde_json::json!({"format": "pt"}));
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + tensor.len_bytes();
        json.insert(
            tensor.name.clone(),
            serde_json::json!({
                "dtype": tensor.dtype.to_string(),
                "shape": tensor.shape,
                "data_offsets": [offset, end],
            }),
        );
        offset = end;
    }
    let mut text = serde_json::Value::Object(json).to_string().into_bytes();
    text.resize((text.len() + 8).next_multiple_of(64) - 8, b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Dtype;

    #[test]
    fn the_reference_reader_takes_the_file_and_the_hashes_are_of_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let tensor = |name: &str, dtype, shape: &[usize]| OutputTensor {
            name: name.into(),
            dtype,
            shape: shape.into(),
        };
        let tensors = [
            tensor("b", Dtype::I8, &[4, 6]),
            tensor("none", Dtype::F32, &[0]),
            tensor("a", Dtype::F32, &[2, 1]),
        ];
        let mut writer = ShardWriter::start(path.clone(), File::create(&path).unwrap(), &tensors).unwrap();
        let codes: Vec<u8> = (0..24).collect();
        writer.append(&codes[..10]).unwrap();
        writer.append(&codes[10..]).unwrap();
        writer.append(&[0, 0, 128, 63, 0, 0, 0, 64]).unwrap();
        let written = writer.finish().unwrap();

        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(written.bytes, bytes.len() as u64);
        assert_eq!(written.sha256, super::super::hash_bytes(&bytes));
        assert_eq!(written.tensors[0], super::super::hash_bytes(&codes));
        assert_eq!(written.tensors[1], super::super::hash_bytes(&[]));
        let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(read.tensor("b").unwrap().data(), codes);
        assert_eq!(read.tensor("a").unwrap().shape(), [2, 1]);
        let (length, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        assert_eq!((length + 8) % 64, 0);
    }

    #[test]
    #[should_panic(expected = "fewer bytes than planned")]
    fn a_tensor_cut_short_is_a_bug() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let tensor = OutputTensor { name: "a".into(), dtype: Dtype::I8, shape: vec![2] };
        let mut writer = ShardWriter::start(path.clone(), File::create(&path).unwrap(), &[tensor]).unwrap();
        writer.append(&[1]).unwrap();
        let _ = writer.finish();
    }
}
