//! Damage: a file as it should be, changed in a few places.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// What parsers stumble over when it stands in place of a number or a text.
const TOKENS: [&str; 28] = [
    "0",
    "-1",
    "1",
    "2",
    "7",
    "1e308",
    "-0.0",
    "0.5",
    "1048577",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "1e999",
    "null",
    "true",
    "[]",
    "{}",
    "[[[[[[[[",
    "\"\"",
    "\"../x\"",
    "\"\\u0000\"",
    "\"F64\"",
    "\"BF16\"",
    "\"full_attention\"",
    ",",
    "}",
];

/// What is put in place of numbers and texts, as a dictionary in libFuzzer's format.
pub fn dictionary() -> String {
    TOKENS.iter().map(|token| format!("\"{}\"\n", token.replace('\\', "\\\\").replace('"', "\\\""))).collect()
}

/// Draws damage; the same seed draws the same.
#[derive(Debug)]
pub struct Damage(ChaCha8Rng);

impl Damage {
    /// Damage of a seed.
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// A number below `limit`, or 0.
    fn below(&mut self, limit: usize) -> usize {
        let random = self.0.next_u64();
        usize::try_from(random % (limit.max(1) as u64)).unwrap_or(0)
    }

    /// One of some values.
    fn one_of<'a, T>(&mut self, values: &'a [T]) -> &'a T {
        &values[self.below(values.len())]
    }

    /// The bytes with one to five changes, most of them small.
    pub fn damaged(&mut self, whole: &[u8]) -> Vec<u8> {
        let mut bytes = whole.to_vec();
        for _ in 0..=self.below(5) {
            self.change(&mut bytes);
        }
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        let at = self.below(bytes.len() + 1).min(bytes.len());
        match self.below(9) {
            0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
            1 if at < bytes.len() => bytes[at] = self.0.next_u32().to_le_bytes()[0],
            2 => {
                // The lengths and offsets of a binary file.
                let value =
                    *self.one_of(&[0, 1, 255, 1 << 31, u64::from(u32::MAX), 1 << 40, 1 << 63, u64::MAX]);
                let width = *self.one_of(&[1, 2, 4, 8]);
                let end = (at + width).min(bytes.len());
                bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            }
            3 => {
                let end = (at + 1 + self.below(16)).min(bytes.len());
                bytes.drain(at..end);
            }
            4 => {
                let end = (at + 1 + self.below(64)).min(bytes.len());
                let copy = bytes[at..end].to_vec();
                let to = self.below(bytes.len() + 1);
                bytes.splice(to..to, copy);
            }
            5 => {
                let token = self.one_of(&TOKENS).bytes();
                bytes.splice(at..at, token);
            }
            6 if self.below(8) == 0 => bytes.truncate(at),
            _ => self.replace_number(bytes, at),
        }
    }

    /// Puts something else in place of the first number of the text at or behind `at`.
    fn replace_number(&mut self, bytes: &mut Vec<u8>, at: usize) {
        let Some(start) = bytes[at..].iter().position(u8::is_ascii_digit).map(|i| at + i) else { return };
        let end = bytes[start..].iter().position(|b| !b.is_ascii_digit()).map_or(bytes.len(), |i| start + i);
        let token = self.one_of(&TOKENS).bytes();
        bytes.splice(start..end, token);
    }
}
