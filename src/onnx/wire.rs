//! The wire format, walked before anything is parsed.
//!
//! The protobuf crate skips unknown groups by recursion without a bound (RUSTSEC-2024-0437) and merges
//! what is given twice. This walk uses no recursion and passes only what [`fields`] lists: known
//! fields, with their wire type, singular ones once, every length inside its message. ONNX has no
//! groups, so a tag that starts or ends one is refused wherever it stands, and since the table has no
//! cycle, so is nesting of any depth: what could nest (subgraphs, sequence types) is not listed.

use super::MAX_MODEL_BYTES;
use crate::error::InputError;

/// Messages of a model; each becomes a struct many times its size.
const MAX_MESSAGES: usize = 1 << 20;

/// The messages that a model of ours consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    ValueInfo,
    Type,
    TensorType,
    Shape,
    Dimension,
    OperatorSet,
    StringPair,
}

/// What a field holds and how often it may come.
#[derive(Clone, Copy)]
enum Field {
    Varint,
    Fixed32,
    /// A string or bytes.
    Bytes,
    ManyBytes,
    /// Numbers one by one or packed.
    ManyVarints,
    /// Such a message, at most once.
    One(Message),
    /// Any number of them.
    Many(Message),
}

/// Field number, name in `onnx.proto`, contents.
type Entry = (u32, &'static str, Field);

/// The fields that are read; others are refused.
fn fields(message: Message) -> &'static [Entry] {
    use Field::{Bytes, Fixed32, Many, ManyBytes, ManyVarints, One, Varint};
    match message {
        Message::Model => &[
            (1, "ir_version", Varint),
            (2, "producer_name", Bytes),
            (3, "producer_version", Bytes),
            (4, "domain", Bytes),
            (5, "model_version", Varint),
            (6, "doc_string", Bytes),
            (7, "graph", One(Message::Graph)),
            (8, "opset_import", Many(Message::OperatorSet)),
            (14, "metadata_props", Many(Message::StringPair)),
        ],
        Message::Graph => &[
            (1, "node", Many(Message::Node)),
            (2, "name", Bytes),
            (5, "initializer", Many(Message::Tensor)),
            (10, "doc_string", Bytes),
            (11, "input", Many(Message::ValueInfo)),
            (12, "output", Many(Message::ValueInfo)),
            (13, "value_info", Many(Message::ValueInfo)),
            (16, "metadata_props", Many(Message::StringPair)),
        ],
        Message::Node => &[
            (1, "input", ManyBytes),
            (2, "output", ManyBytes),
            (3, "name", Bytes),
            (4, "op_type", Bytes),
            (5, "attribute", Many(Message::Attribute)),
            (6, "doc_string", Bytes),
            (7, "domain", Bytes),
            (9, "metadata_props", Many(Message::StringPair)),
        ],
        Message::Attribute => &[
            (1, "name", Bytes),
            (2, "f", Fixed32),
            (3, "i", Varint),
            (4, "s", Bytes),
            (8, "ints", ManyVarints),
            (13, "doc_string", Bytes),
            (20, "type", Varint),
        ],
        Message::Tensor => &[
            (1, "dims", ManyVarints),
            (2, "data_type", Varint),
            (8, "name", Bytes),
            (9, "raw_data", Bytes),
            (12, "doc_string", Bytes),
            (13, "external_data", Many(Message::StringPair)),
            (14, "data_location", Varint),
            (16, "metadata_props", Many(Message::StringPair)),
        ],
        Message::ValueInfo => &[
            (1, "name", Bytes),
            (2, "type", One(Message::Type)),
            (3, "doc_string", Bytes),
            (4, "metadata_props", Many(Message::StringPair)),
        ],
        Message::Type => &[(1, "tensor_type", One(Message::TensorType)), (6, "denotation", Bytes)],
        Message::TensorType => &[(1, "elem_type", Varint), (2, "shape", One(Message::Shape))],
        Message::Shape => &[(1, "dim", Many(Message::Dimension))],
        Message::Dimension => &[(1, "dim_value", Varint), (2, "dim_param", Bytes), (3, "denotation", Bytes)],
        Message::OperatorSet => &[(1, "domain", Bytes), (2, "version", Varint)],
        Message::StringPair => &[(1, "key", Bytes), (2, "value", Bytes)],
    }
}

/// A message that is being walked.
struct Frame {
    message: Message,
    end: usize,
    /// Singular fields met so far, a bit per field number.
    seen: u32,
}

/// Checks that `bytes` are a model whose fields are all known, or says which is not.
///
/// # Errors
/// At the first byte that is not as [`fields`] has it.
pub(super) fn check(bytes: &[u8]) -> Result<(), InputError> {
    let found = |at: usize, what: String| InputError::default().found(format!("at byte {at}: {what}"));
    if bytes.len() > MAX_MODEL_BYTES {
        return Err(InputError::default()
            .expected(format!("a model of at most {MAX_MODEL_BYTES} bytes beside its data file"))
            .found(bytes.len()));
    }
    let mut at = 0;
    let mut messages = 0;
    let mut stack = vec![Frame { message: Message::Model, end: bytes.len(), seen: 0 }];
    while let Some(frame) = stack.last_mut() {
        if at == frame.end {
            stack.pop();
            continue;
        }
        let start = at;
        let (message, end) = (frame.message, frame.end);
        let cut = |e: Varint| found(start, format!("{message:?}: {}", e.text()));
        let tag = varint(bytes, &mut at, end).map_err(cut)?;
        let (number, wire) = (tag >> 3, tag & 7);
        if wire == 3 || wire == 4 {
            return Err(found(start, format!("{message:?}: a group, which ONNX does not have")));
        }
        let entry = fields(message).iter().find(|(n, ..)| u64::from(*n) == number);
        let Some((number, name, field)) = entry else {
            return Err(found(start, format!("{message:?}: field {number}, which is not supported here")));
        };
        if !matches!(field, Field::ManyBytes | Field::ManyVarints | Field::Many(_)) {
            if frame.seen & (1 << number) != 0 {
                return Err(found(start, format!("{message:?}: {name} given twice")));
            }
            frame.seen |= 1 << number;
        }
        match (field, wire) {
            (Field::Varint | Field::ManyVarints, 0) => {
                varint(bytes, &mut at, end).map_err(cut)?;
            }
            (Field::Fixed32, 5) if end - at >= 4 => at += 4,
            (Field::Bytes | Field::ManyBytes | Field::ManyVarints | Field::One(_) | Field::Many(_), 2) => {
                let length = varint(bytes, &mut at, end).map_err(cut)?;
                let Some(inner_end) =
                    usize::try_from(length).ok().and_then(|l| at.checked_add(l)).filter(|e| *e <= end)
                else {
                    let left = end - at;
                    return Err(found(
                        start,
                        format!("{message:?}: {name} of {length} bytes where {left} are left"),
                    ));
                };
                match field {
                    Field::One(inner) | Field::Many(inner) => {
                        messages += 1;
                        if messages > MAX_MESSAGES {
                            return Err(InputError::default()
                                .expected(format!("a model of at most {MAX_MESSAGES} parts"))
                                .found("more"));
                        }
                        stack.push(Frame { message: *inner, end: inner_end, seen: 0 });
                    }
                    Field::ManyVarints => {
                        while at < inner_end {
                            varint(bytes, &mut at, inner_end).map_err(cut)?;
                        }
                    }
                    _ => at = inner_end,
                }
            }
            _ => return Err(found(start, format!("{message:?}: {name} with wire type {wire} or cut short"))),
        }
    }
    Ok(())
}

/// What is wrong with a variable-length number.
#[derive(Clone, Copy)]
enum Varint {
    Cut,
    TooLong,
}

impl Varint {
    fn text(self) -> &'static str {
        match self {
            Self::Cut => "a number that is cut short",
            Self::TooLong => "a number of more than 64 bits",
        }
    }
}

fn varint(bytes: &[u8], at: &mut usize, end: usize) -> Result<u64, Varint> {
    let mut value = 0u64;
    for shift in (0..70).step_by(7) {
        if *at >= end {
            return Err(Varint::Cut);
        }
        let byte = bytes[*at];
        *at += 1;
        if shift == 63 && byte > 1 {
            return Err(Varint::TooLong);
        }
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(Varint::TooLong)
}

#[cfg(test)]
mod tests;
