//! The container: a file that the Python package wrote, and headers that nobody should write.

use serde_json::Value as Json;
use sha2::{Digest, Sha256};

use super::*;
use crate::error::InputError;
use crate::ggml::{BlockMatrix, TensorType};
use crate::spark::{LayerType, RopeParameters, SparkConfig, tensor_specs};
use crate::tensor::widen;

/// Written by `tests/oracle/ggml_goldens.py`.
const SMALL: &[u8] = include_bytes!("../../fixtures/goldens/ggml/small.gguf");

fn small() -> Header {
    parse("small.gguf", SMALL).unwrap()
}

#[test]
fn tensors_are_where_the_package_put_them_with_the_values_that_it_decodes() {
    let expected: Json =
        serde_json::from_str(include_str!("../../fixtures/goldens/ggml/small.json")).unwrap();
    let header = small();
    assert_eq!(header.version, 3);
    assert_eq!(header.tensors.len(), expected.as_object().unwrap().len());
    for tensor in &header.tensors {
        let expected = &expected[&tensor.name];
        assert_eq!(expected["type"], tensor.kind.name(), "{}", tensor.name);
        assert_eq!(expected["shape"], Json::from(tensor.shape.clone()), "{}", tensor.name);
        let bytes = &SMALL[tensor.range.clone()];
        let mut values = vec![0.0; tensor.shape.iter().product()];
        match tensor.kind {
            TensorType::Float(dtype) => widen(dtype, bytes, &mut values),
            TensorType::Blocks(kind) => {
                let matrix = BlockMatrix::new(kind, [tensor.shape[0], tensor.shape[1]], bytes).unwrap();
                for (row, out) in values.chunks_mut(tensor.shape[1]).enumerate() {
                    matrix.decode_row(row, out);
                }
            }
        }
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let digest: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(expected["f32_sha256"], digest, "{}", tensor.name);
    }
}

#[test]
fn every_type_of_value_is_read() {
    let header = small();
    let get = |key: &str| header.metadata.get(key).cloned().unwrap();
    assert_eq!(get("general.name"), Value::Text("Small".to_owned()));
    assert_eq!(get("spark2_5.block_count"), Value::Whole(2));
    assert_eq!(get("test.i8"), Value::Whole(-7));
    assert_eq!(get("test.i64"), Value::Whole(-(1 << 60)));
    assert_eq!(get("test.u64"), Value::Whole(i128::from(u64::MAX)));
    assert_eq!(get("test.f64"), Value::Float(0.1));
    assert_eq!(get("test.bool"), Value::Bool(true));
    // Not 9.99999997e-7, which is what the f32 is.
    assert_eq!(get("spark2_5.attention.layer_norm_rms_epsilon"), Value::Float(1e-6));
    let list = |key: &str| header.metadata.list(key).unwrap();
    assert_eq!(list("spark2_5.attention.sliding_window_pattern").numbers(SMALL), Some(vec![1, 0]));
    assert_eq!(list("test.floats").numbers(SMALL), None);
    let tokens = list("tokenizer.ggml.tokens");
    assert_eq!((tokens.count(), tokens.numbers(SMALL)), (48, None));
    let texts: Vec<_> = tokens.texts(SMALL).collect();
    assert_eq!((texts.len(), texts[0], texts[47]), (48, b"t0".as_slice(), "世界".as_bytes()));
    assert_eq!(list("tokenizer.ggml.token_type").texts(SMALL).count(), 0);
}

#[test]
fn the_configuration_is_that_of_the_checkpoint() {
    let config = config("small.gguf", &small(), SMALL).unwrap();
    let expected = SparkConfig {
        hidden_size: 32,
        intermediate_size: 64,
        layer_types: vec![LayerType::Sliding, LayerType::Full],
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 16,
        vocab_size: 48,
        rms_norm_eps: 1e-6,
        sliding_window: 8,
        rope_sliding: Some(RopeParameters { theta: 1e4, rotary_dims: 16 }),
        rope_full: Some(RopeParameters { theta: 5e6, rotary_dims: 4 }),
        gate_activation: crate::spark::GateActivation::Sigmoid,
        tie_word_embeddings: true,
        max_position_embeddings: 4096,
        eos_token_ids: vec![1],
        notes: Vec::new(),
    };
    assert_eq!(config, expected);
    let found = check_inventory("small.gguf", &small(), &config).unwrap();
    assert_eq!(found.iter().map(|(spec, _)| spec.clone()).collect::<Vec<_>>(), tensor_specs(&config));
}

/// A header piece by piece.
#[derive(Clone)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn new(tensors: u64, pairs: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(3).u64(tensors).u64(pairs)
    }

    fn u32(mut self, n: u32) -> Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn u64(mut self, n: u64) -> Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn text(mut self, text: &str) -> Self {
        self = self.u64(text.len() as u64);
        self.0.extend(text.as_bytes());
        self
    }

    fn tensor(self, name: &str, dimensions: &[u64], kind: u32, offset: u64) -> Self {
        let start = self.text(name).u32(u32::try_from(dimensions.len()).unwrap());
        dimensions.iter().fold(start, |bytes, d| bytes.u64(*d)).u32(kind).u64(offset)
    }

    /// Data of so many bytes behind the header.
    fn data(mut self, length: usize) -> Self {
        let start = self.0.len().next_multiple_of(32);
        self.0.resize(start + length, 0);
        self
    }

    #[track_caller]
    fn refused(&self, words: &[&str]) {
        let error = parse("x.gguf", &self.0).unwrap_err().to_string();
        assert!(error.starts_with("x.gguf: "), "{error}");
        for word in words {
            assert!(error.contains(word), "{word:?} in {error}");
        }
    }
}

#[test]
fn what_is_no_header_is_refused_with_the_reason() {
    Bytes(Vec::new()).refused(&["GGUF", "0 bytes"]);
    Bytes(b"GGML\x03\0\0\0".to_vec()).refused(&["GGML"]);
    Bytes(b"GGUF".to_vec()).u32(1).refused(&["version 1"]);
    Bytes(b"GGUF".to_vec()).u32(4).refused(&["version 4"]);
    Bytes(b"GGUF\0\0\0\x03".to_vec()).refused(&["big-endian"]);
    Bytes::new(0, 0).refused(&["no tensors"]);
    Bytes::new(u64::MAX, 0).refused(&["at most", "tensors"]);
    Bytes::new(1, u64::MAX).refused(&["at most", "pairs"]);
    Bytes::new(1, 0).refused(&["ends inside its header"]);
    // A length that is more than there is, or more than can be counted.
    Bytes::new(1, 1).u64(1000).refused(&["ends inside its header", "1000"]);
    Bytes::new(1, 1).u64(u64::MAX).refused(&["at most"]);
    Bytes::new(1, 1).text("").refused(&["a key in UTF-8"]);
    Bytes::new(1, 1).text("k").u32(13).refused(&["k", "13"]);
    Bytes::new(1, 1).text("k").u32(8).u64(u64::MAX).refused(&["at most"]);
    Bytes::new(1, 1).text("k").u32(7).u32(2).refused(&["0 or 1", "2"]);
    // Lists: of lists, of too much, of texts that end early.
    Bytes::new(1, 1).text("k").u32(9).u32(9).u64(1).refused(&["list of lists"]);
    Bytes::new(1, 1).text("k").u32(9).u32(10).u64(u64::MAX).refused(&["ends inside its header"]);
    Bytes::new(1, 1).text("k").u32(9).u32(0).u64(u64::MAX).refused(&["ends inside its header"]);
    Bytes::new(1, 1).text("k").u32(9).u32(8).u64(u64::MAX).text("a").refused(&["ends inside its header"]);
    let pair = |bytes: Bytes| bytes.text("k").u32(4).u32(7);
    pair(pair(Bytes::new(1, 2))).refused(&["k", "twice"]);
    for alignment in [0, 3, 1 << 21] {
        Bytes::new(1, 1).text("general.alignment").u32(4).u32(alignment).refused(&["power of two"]);
    }
}

#[test]
fn what_is_no_table_of_tensors_is_refused_with_the_reason() {
    let one = |dimensions: &[u64], kind, offset| Bytes::new(1, 0).tensor("t", dimensions, kind, offset);
    assert!(parse("x.gguf", &one(&[8, 2], 0, 0).data(64).0).is_ok());
    assert!(parse("x.gguf", &one(&[256, 2], 12, 32).data(32 + 288).0).is_ok());
    one(&[8, 2], 0, 0).data(63).refused(&["cut short", "1 are missing"]);
    one(&[], 0, 0).refused(&["1 to 4 dimensions", "0"]);
    one(&[1, 1, 1, 1, 1], 0, 0).refused(&["1 to 4 dimensions", "5"]);
    one(&[0, 2], 0, 0).refused(&["t", "[0, 2]"]);
    one(&[u64::MAX, 2], 0, 0).refused(&["t", "18446744073709551615"]);
    one(&[1 << 32, 1 << 32], 0, 0).refused(&["t", "4294967296"]);
    one(&[255, 2], 12, 0).refused(&["Q4_K", "256", "255"]);
    one(&[32, 2], 2, 0).refused(&["Q4_0 (ggml type 2)", "Q4_K_M"]);
    one(&[32, 2], 40, 0).refused(&["ggml type 40"]);
    one(&[32, 2], 12345, 0).refused(&["ggml type 12345"]);
    one(&[8, 2], 0, 8).refused(&["multiple of 32", "8"]);
    one(&[8, 2], 0, u64::MAX - 31).refused(&["inside the file"]);
    one(&[8, 2], 0, 1 << 62).refused(&["cut short"]);
    let two = |name: &str, offset| Bytes::new(2, 0).tensor("t", &[16], 0, 0).tensor(name, &[16], 0, offset);
    assert!(parse("x.gguf", &two("u", 64).data(128).0).is_ok());
    two("t", 64).data(128).refused(&["t", "twice"]);
    two("u", 32).data(128).refused(&["u", "overlaps", "t"]);
}

/// Everything behind the header is fixed by it, so damage anywhere is found or harmless.
#[test]
fn no_damage_to_a_header_is_more_than_an_error() {
    let end = small().tensors[0].range.start;
    let all = |bytes: &[u8]| -> Result<(), InputError> {
        let header = parse("x.gguf", bytes)?;
        let config = config("x.gguf", &header, bytes)?;
        check_inventory("x.gguf", &header, &config).map(drop)
    };
    assert!(all(SMALL).is_ok());
    for length in 0..end {
        assert!(all(&SMALL[..length]).is_err(), "{length} bytes");
    }
    let mut bytes = SMALL.to_vec();
    let mut refused = 0;
    for at in 0..end {
        for damage in [0xff, 0x80, 0x01] {
            bytes[at] ^= damage;
            if let Err(error) = all(&bytes) {
                refused += 1;
                assert_eq!(error.to_string().lines().count(), 1);
            }
            bytes[at] ^= damage;
        }
    }
    assert!(refused > end, "{refused} of {}", 3 * end);
}

/// The header with one value put in the place of another, both of the same length.
#[track_caller]
fn changed(key: &str, value: &[u8]) -> String {
    let mut bytes = SMALL.to_vec();
    let at = bytes.windows(key.len()).position(|w| w == key.as_bytes()).unwrap() + key.len() + 4;
    bytes[at..at + value.len()].copy_from_slice(value);
    let header = parse("x.gguf", &bytes).unwrap();
    let config = config("x.gguf", &header, &bytes);
    config.and_then(|config| check_inventory("x.gguf", &header, &config)).unwrap_err().to_string()
}

#[test]
fn metadata_that_say_something_else_are_refused_by_key() {
    for (key, value, words) in [
        ("spark2_5.block_count", 3u32, &["attention.sliding_window_pattern", "list of 3"][..]),
        ("spark2_5.attention.head_count_kv", 3, &["spark2_5.attention.head_count_kv", "divisor"]),
        ("spark2_5.attention.value_length", 8, &["value_length", "16"]),
        ("spark2_5.attention.key_length", 0, &["value_length", "16"]),
        ("spark2_5.embedding_length", 64, &["token_embd.weight", "[48, 64]", "[48, 32]"]),
        ("spark2_5.vocab_size", 1 << 31, &["spark2_5.vocab_size"]),
        ("spark2_5.rope.dimension_count", 3, &["spark2_5.rope.dimension_count"]),
        ("spark2_5.rope.dimension_count", 0, &["spark2_5.rope.dimension_count"]),
        ("spark2_5.attention.layer_norm_rms_epsilon", f32::NAN.to_bits(), &["rms_epsilon", "NaN"]),
        ("spark2_5.rope.freq_base", 0, &["spark2_5.rope.freq_base", "above zero"]),
        ("tokenizer.ggml.eos_token_id", 48, &["eos_token_id", "48"]),
    ] {
        let error = changed(key, &value.to_le_bytes());
        for word in words {
            assert!(error.contains(word), "{word:?} in {error}");
        }
    }
    // Text: its length, then the text.
    let other = [8u64.to_le_bytes().as_slice(), b"mistral3"].concat();
    assert!(changed("general.architecture", &other).contains("mistral3"));
}

#[test]
fn rotary_dimensions_survive_the_way_through_a_factor() {
    for head_dim in 2..=300u64 {
        for dimensions in 1..=head_dim {
            let factor = super::config::rotary_factor(dimensions, head_dim);
            assert!(factor <= 1.0);
            assert_eq!((head_dim as f64 * factor) as u64, dimensions, "{dimensions} of {head_dim}");
        }
    }
}
