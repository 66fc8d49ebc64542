//! Text to token ids and back, and chats to text.
//!
//! [`Tokenizer`] reads a `tokenizer.json`, [`ChatTemplate`] the Jinja template beside it. Both take
//! bytes and text: nothing in here opens a file or a connection.
//!
//! What this room promises, pinned by goldens from the Python libraries:
//!
//! * the same ids as Python for the same text, whatever the regular expression engine underneath;
//! * the same prompt text as Python for the same messages and tools, spaces in JSON included,
//!   because one space more makes other tokens;
//! * nothing depends on the day, the machine or the order of a hash map.

mod chat;
mod error;
mod generation;
mod python;
mod stream;
mod tojson;

#[cfg(test)]
mod goldens;

pub use chat::{Chat, ChatTemplate};
pub use error::{ChatError, TokenizeError};
pub use stream::DecodeStream;

/// The parts of a `tokenizer.json` that the `tokenizers` crate unwraps where it should refuse: a decoder that
/// is not JSON, and a `Precompiled` normalizer whose table is damaged. No Spark tokenizer has such a table,
/// so none is taken.
fn check_fragile_parts(tokenizer_json: &[u8]) -> Result<(), String> {
    #[derive(serde::Deserialize)]
    struct Fragile {
        #[serde(default)]
        normalizer: serde_json::Value,
        #[serde(default)]
        decoder: serde_json::Value,
    }
    fn is_precompiled(part: &serde_json::Value) -> bool {
        match part {
            serde_json::Value::Object(map) => {
                map.get("type").is_some_and(|t| t == "Precompiled") || map.values().any(is_precompiled)
            }
            serde_json::Value::Array(parts) => parts.iter().any(is_precompiled),
            _ => false,
        }
    }
    let parts: Fragile = serde_json::from_slice(tokenizer_json).map_err(|e| error::one_line(&e))?;
    match is_precompiled(&parts.normalizer) || is_precompiled(&parts.decoder) {
        true => Err("a Precompiled normalizer is not supported".to_owned()),
        false => Ok(()),
    }
}

/// A tokenizer bound to the vocabulary size of the model it feeds.
///
/// Every id that goes in or out is compared with that size, so that a file that does not belong to
/// the model is an error with a number in it and not a read past the end of the embedding. The
/// ids 0 to `vocab_size - 1` are all ordinary; in particular 0, which is the start token of
/// Spark-X2.5, is never taken for "none".
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocab_size: u32,
}

impl Tokenizer {
    /// Builds a tokenizer from the bytes of a `tokenizer.json`.
    ///
    /// `vocab_size` is the model's (the rows of its embedding), which may be larger than the number
    /// of tokens in the file. A file with larger ids is accepted: only using one is an error.
    ///
    /// Truncation and padding settings in the file are left aside, as `transformers` does: a
    /// calibration text must not be shortened in silence.
    pub fn from_json(tokenizer_json: &[u8], vocab_size: u32) -> Result<Self, TokenizeError> {
        check_fragile_parts(tokenizer_json).map_err(TokenizeError::Load)?;
        let mut inner = tokenizers::Tokenizer::from_bytes(tokenizer_json)
            .map_err(|e| TokenizeError::Load(error::one_line(&e)))?;
        inner.with_truncation(None).map_err(|e| TokenizeError::Load(error::one_line(&e)))?;
        inner.with_padding(None);
        Ok(Self { inner, vocab_size })
    }

    /// The vocabulary size ids are checked against.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// Ids of a plain text, with the start and end tokens the file's post-processor asks for.
    ///
    /// This is `tokenizer(text)` of `transformers`. The post-processor of Spark-X2.5 asks for none,
    /// so nothing is added; other models get their start token here.
    ///
    /// Added tokens written out in the text (`<tool_call>`, `<|User|>`) become their single id. A
    /// byte that has no token of its own becomes the unknown token, one per byte: in Spark-X2.5
    /// that is 0x06, which comes back from [`decode`](Self::decode) as the text `<unk>`.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizeError> {
        self.encode_with(text, true)
    }

    /// Ids of a text that a [`ChatTemplate`] has rendered: the post-processor adds nothing.
    ///
    /// This is what `apply_chat_template(tokenize=True)` does in `transformers`. Templates write
    /// the start token themselves (that of Spark-X2.5 does so at every turn), so a post-processor
    /// that adds one would double it.
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>, TokenizeError> {
        self.encode_with(rendered, false)
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizeError> {
        let encoding =
            self.inner.encode_fast(text, special).map_err(|e| TokenizeError::Encode(error::one_line(&e)))?;
        for &id in encoding.get_ids() {
            self.check(id)?;
        }
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of a run of ids, added tokens written out.
    ///
    /// Bytes that are not UTF-8 become U+FFFD. An id below the vocabulary size that the file gives
    /// no token to becomes nothing, as in the Python library.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizeError> {
        self.decode_with(ids, false)
    }

    /// Text of a run of ids without the tokens marked `special` in the file.
    ///
    /// Not every added token is special: Spark-X2.5 marks its start, end and padding tokens, but
    /// neither the role markers nor `<think>` and `<tool_call>`, so those stay.
    pub fn decode_skip_special(&self, ids: &[u32]) -> Result<String, TokenizeError> {
        self.decode_with(ids, true)
    }

    fn decode_with(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizeError> {
        for &id in ids {
            self.check(id)?;
        }
        self.inner.decode(ids, skip_special).map_err(|e| TokenizeError::Decode(error::one_line(&e)))
    }

    /// A decoder for ids that arrive one at a time.
    ///
    /// With `skip_special` the tokens marked `special` print nothing, as in
    /// [`decode_skip_special`](Self::decode_skip_special).
    pub fn decode_stream(&self, skip_special: bool) -> DecodeStream<'_> {
        DecodeStream::new(self, skip_special)
    }

    /// The id of a token given by its exact content, such as `<tool_call>`.
    pub fn token_id(&self, content: &str) -> Option<u32> {
        self.inner.token_to_id(content)
    }

    /// The content of a token as the file spells it: byte-level tokens in their printable stand-ins.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    fn check(&self, id: u32) -> Result<(), TokenizeError> {
        if id < self.vocab_size {
            return Ok(());
        }
        Err(TokenizeError::IdOutOfRange { id, token: self.token(id), vocab_size: self.vocab_size })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"{
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"},
        "added_tokens": [
            {"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
             "normalized": false, "special": true},
            {"id": 9, "content": "<far>", "single_word": false, "lstrip": false, "rstrip": false,
             "normalized": false, "special": false}],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": {"<s>": 0, "a": 1, "b": 2, "c": 3, "<far>": 9}, "merges": []}
    }"#;

    #[test]
    fn start_token_only_where_the_post_processor_writes_it() {
        let tok = Tokenizer::from_json(SMALL.as_bytes(), 10).unwrap();
        assert_eq!(tok.encode("ab").unwrap(), [0, 1, 2]);
        assert_eq!(tok.encode_chat("ab").unwrap(), [1, 2]);
        assert_eq!(tok.encode_chat("<s>ab").unwrap(), [0, 1, 2]);
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_left_aside() {
        let tok = Tokenizer::from_json(SMALL.as_bytes(), 10).unwrap();
        assert_eq!(tok.encode_chat("abcabc").unwrap(), [1, 2, 3, 1, 2, 3]);
    }

    #[test]
    fn an_id_past_the_vocabulary_names_itself_and_the_limit() {
        let tok = Tokenizer::from_json(SMALL.as_bytes(), 4).unwrap();
        assert_eq!(tok.encode_chat("abc").unwrap(), [1, 2, 3]);
        let e = tok.encode_chat("ab<far>").unwrap_err().to_string();
        assert_eq!(e, "token id 9 (`<far>`) is not below the model's vocabulary size 4");
        let e = tok.decode(&[0, 4]).unwrap_err().to_string();
        assert_eq!(e, "token id 4 is not below the model's vocabulary size 4");
        assert!(tok.decode_stream(false).push(4).is_err());
    }

    #[test]
    fn ids_without_a_token_print_nothing() {
        let tok = Tokenizer::from_json(SMALL.as_bytes(), 10).unwrap();
        assert_eq!(tok.decode(&[1, 7, 2]).unwrap(), "ab");
        assert_eq!(tok.token(7), None);
    }

    #[test]
    fn the_start_token_is_an_ordinary_id() {
        let tok = Tokenizer::from_json(SMALL.as_bytes(), 10).unwrap();
        assert_eq!(tok.token_id("<s>"), Some(0));
        assert_eq!(tok.decode(&[0, 1]).unwrap(), "<s>a");
        assert_eq!(tok.decode_skip_special(&[0, 1]).unwrap(), "a");
    }

    #[test]
    fn a_broken_file_is_an_error_of_one_line() {
        for bytes in [&b""[..], b"{", b"[]", b"{\"version\":\"1.0\"}", &[0xff, 0xfe]] {
            let e = Tokenizer::from_json(bytes, 10).unwrap_err().to_string();
            assert!(e.starts_with("tokenizer.json can't be read: "), "{e}");
            assert!(!e.contains('\n'), "{e}");
        }
    }
}
