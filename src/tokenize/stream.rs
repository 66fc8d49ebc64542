//! Text of ids that arrive one at a time.

use super::error::one_line;
use super::{TokenizeError, Tokenizer};

/// Turns ids into text as they arrive, and never hands out half a character.
///
/// A character may be spread over several tokens; [`push`](Self::push) holds its bytes back until
/// it is complete. What the calls return, joined, is what [`Tokenizer::decode`] says about all ids
/// at once, provided [`finish`](Self::finish) is called at the end.
#[derive(Debug)]
pub struct DecodeStream<'t> {
    tokenizer: &'t Tokenizer,
    skip_special: bool,
    ids: Vec<u32>,
    prefix: String,
    prefix_index: usize,
}

impl<'t> DecodeStream<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, ids: Vec::new(), prefix: String::new(), prefix_index: 0 }
    }

    /// Takes one id and returns the text that is complete by now, which may be empty.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizeError> {
        self.tokenizer.check(id)?;
        tokenizers::step_decode_stream(
            &self.tokenizer.inner,
            vec![id],
            self.skip_special,
            &mut self.ids,
            &mut self.prefix,
            &mut self.prefix_index,
        )
        .map(Option::unwrap_or_default)
        .map_err(|e| TokenizeError::Decode(one_line(&e)))
    }

    /// Ends the stream and returns what was still held back.
    ///
    /// That is empty unless the last character was cut off, which shows as U+FFFD.
    pub fn finish(self) -> Result<String, TokenizeError> {
        let text = self
            .tokenizer
            .inner
            .decode(&self.ids, self.skip_special)
            .map_err(|e| TokenizeError::Decode(one_line(&e)))?;
        // The prefix is what earlier calls have returned of these ids.
        Ok(text.strip_prefix(self.prefix.as_str()).unwrap_or_default().to_owned())
    }
}
