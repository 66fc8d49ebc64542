//! The key-value pairs of a GGUF header.

use std::collections::BTreeMap;
use std::ops::Range;

use super::header::Cursor;
use crate::error::InputError;

/// Longest text that is taken; the chat template of Spark-X2.5 has 5 KB.
const MAX_TEXT: u64 = 16 << 20;

/// Longest list that is decoded as numbers: an entry per layer, or per token of a vocabulary.
const MAX_NUMBERS: usize = 1 << 20;

/// Key-value pairs by key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata(pub(super) BTreeMap<String, Value>);

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A whole number of any width.
    Whole(i128),
    /// A float; one of 32 bits as the shortest decimal that stands for it, which is what it was made from.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// Text.
    Text(String),
    /// A list, which stays in the file.
    List(List),
}

/// A list of values of one type: where it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List {
    element: Element,
    count: usize,
    range: Range<usize>,
}

/// Types of values, by their number in the file; 9 is a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    Unsigned(usize),
    Signed(usize),
    F32,
    F64,
    Bool,
    Text,
}

const LIST: u32 = 9;

impl Element {
    fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::Unsigned(1),
            1 => Self::Signed(1),
            2 => Self::Unsigned(2),
            3 => Self::Signed(2),
            4 => Self::Unsigned(4),
            5 => Self::Signed(4),
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::Text,
            10 => Self::Unsigned(8),
            11 => Self::Signed(8),
            12 => Self::F64,
            _ => return None,
        })
    }

    /// Bytes, or `None` of text, which has a length of its own.
    fn width(self) -> Option<usize> {
        match self {
            Self::Unsigned(width) | Self::Signed(width) => Some(width),
            Self::F32 => Some(4),
            Self::F64 => Some(8),
            Self::Bool => Some(1),
            Self::Text => None,
        }
    }

    /// The value of an element of fixed width.
    fn decode(self, bytes: &[u8]) -> Option<Value> {
        let mut wide = [0; 8];
        wide.get_mut(..bytes.len())?.copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(wide);
        Some(match self {
            Self::Unsigned(_) => Value::Whole(i128::from(unsigned)),
            Self::Signed(width) => {
                let unused = 64 - 8 * width;
                #[expect(clippy::cast_possible_wrap, reason = "extends the sign")]
                let signed = ((unsigned << unused) as i64) >> unused;
                Value::Whole(i128::from(signed))
            }
            #[expect(clippy::cast_possible_truncation, reason = "the upper half is zero")]
            Self::F32 => Value::Float(shortest_decimal(f32::from_bits(unsigned as u32))),
            Self::F64 => Value::Float(f64::from_bits(unsigned)),
            Self::Bool => Value::Bool(match unsigned {
                0 => false,
                1 => true,
                _ => return None,
            }),
            Self::Text => return None,
        })
    }
}

/// The f64 nearest to the shortest decimal that reads as `x`: 1e-6 is stored as 9.99999997e-7.
fn shortest_decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| f64::from(x))
}

impl Value {
    /// Reads a value with its type in front.
    pub(super) fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Self, InputError> {
        let id = cursor.u32("the type of a value")?;
        if id == LIST {
            return Ok(Self::List(List::read(cursor, key)?));
        }
        let element = Element::from_id(id).ok_or_else(|| unknown_type(cursor, key, id))?;
        match element.width() {
            Some(width) => {
                let bytes = cursor.take(width as u64, "a value")?;
                element
                    .decode(bytes)
                    .ok_or_else(|| cursor.error().subject(key).expected("a boolean, 0 or 1").found(bytes[0]))
            }
            None => {
                let text = cursor.string("a text", MAX_TEXT)?;
                // Only keys and names have to be exact; what else is not UTF-8 is for people.
                Ok(Self::Text(String::from_utf8_lossy(text).into_owned()))
            }
        }
    }

    /// What it is, for messages.
    pub fn shown(&self) -> String {
        match self {
            Self::Whole(n) => n.to_string(),
            Self::Float(x) => x.to_string(),
            Self::Bool(b) => b.to_string(),
            Self::Text(text) if text.chars().count() > 60 => {
                format!("{:?}...", text.chars().take(57).collect::<String>())
            }
            Self::Text(text) => format!("{text:?}"),
            Self::List(list) => format!("a list of {}", list.count),
        }
    }
}

fn unknown_type(cursor: &Cursor<'_>, key: &str, id: u32) -> InputError {
    cursor.error().subject(key).expected("a type of value from 0 to 12").found(id).hint("download it again")
}

impl List {
    fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Self, InputError> {
        let id = cursor.u32("the type of a list")?;
        let element = Element::from_id(id).ok_or_else(|| match id {
            LIST => cursor.error().subject(key).found("a list of lists, which the format does not have"),
            _ => unknown_type(cursor, key, id),
        })?;
        let count = cursor.u64("the length of a list")?;
        let start = cursor.at();
        match element.width() {
            Some(width) => {
                let bytes = count.saturating_mul(width as u64);
                cursor.take(bytes, "a list")?;
            }
            None => {
                for _ in 0..count {
                    cursor.string("a text of a list", MAX_TEXT)?;
                }
            }
        }
        // Every element has at least a byte, so the count is below the length of the file.
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        Ok(Self { element, count, range: start..cursor.at() })
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Its elements, when they are whole numbers or booleans (0 and 1), and not more than the largest
    /// dimension of a model. `file` is the whole file.
    pub fn numbers(&self, file: &[u8]) -> Option<Vec<i128>> {
        let width = self.element.width().filter(|_| self.count <= MAX_NUMBERS)?;
        let number = |bytes: &[u8]| match self.element.decode(bytes)? {
            Value::Whole(n) => Some(n),
            Value::Bool(b) => Some(i128::from(b)),
            _ => None,
        };
        file.get(self.range.clone())?.chunks_exact(width).map(number).collect()
    }

    /// Its elements one after the other, when they are texts; none else. `file` is the whole file.
    pub fn texts<'f>(&self, file: &'f [u8]) -> impl Iterator<Item = &'f [u8]> {
        let bytes = match self.element {
            Element::Text => file.get(self.range.clone()).unwrap_or_default(),
            _ => &[],
        };
        let mut rest = bytes;
        std::iter::from_fn(move || {
            let (length, after) = rest.split_first_chunk::<8>()?;
            let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
            let (text, after) = after.split_at_checked(length)?;
            rest = after;
            Some(text)
        })
    }
}

impl Metadata {
    /// A value by its key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// A text by its key.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.get(key) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// A list by its key.
    pub fn list(&self, key: &str) -> Option<&List> {
        match self.get(key) {
            Some(Value::List(list)) => Some(list),
            _ => None,
        }
    }

    /// Every pair, in order of the keys.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }
}
