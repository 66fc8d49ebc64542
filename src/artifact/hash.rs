//! SHA-256 as lower-case hex: what `sha256sum` and model hubs understand.

use std::fs::File;
use std::io::Read;

use sha2::{Digest, Sha256};

/// A digest as 64 lower-case hex digits.
pub type Sha256Hex = String;

/// Hex of a finished hash.
pub(crate) fn hex(hash: Sha256) -> Sha256Hex {
    use std::fmt::Write;
    hash.finalize().iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Hash of a slice.
pub fn hash_bytes(bytes: &[u8]) -> Sha256Hex {
    let mut hash = Sha256::new();
    hash.update(bytes);
    hex(hash)
}

/// Hash and length of what is left of a file.
///
/// # Errors
/// When reading fails.
pub fn hash_file(file: &mut File) -> std::io::Result<(Sha256Hex, u64)> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut length = 0;
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((hex(hash), length)),
            n => {
                hash.update(&buffer[..n]);
                length += n as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_hash_is_sha256() {
        // FIPS 180-2, appendix B.1.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(super::hash_bytes(b"abc"), expected);
    }
}
