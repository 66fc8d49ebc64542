//! The checkpoint's own forward passes on a prompt: what it says, and what its head makes logits from.

use crate::error::Result;
use crate::interrupt::Interrupt;
use crate::runtime::{Model, State, argmax};
use crate::scenario::Prompt;

/// All that running the checkpoint on a prompt yields. Logits are made from hidden states when they are
/// needed: they would be as much larger as the vocabulary is than the hidden size.
#[derive(Clone, Debug, PartialEq)]
pub struct Passes {
    /// The greedy continuation in f32, at least one token; an end token is its last.
    pub(super) continuation: Vec<u32>,
    /// Final-norm hidden states in f32 of the prompt and the continuation less its last token, `[tokens,
    /// hidden]`.
    pub(super) hidden: Vec<f32>,
    /// The same of the same tokens in bf16 arithmetic.
    pub(super) floor: Vec<f32>,
}

/// Tokens that are fed: the last one of the continuation would only be fed to find one more.
pub(super) fn tokens_fed(prompt: usize, continuation: usize) -> usize {
    prompt + continuation - 1
}

impl Passes {
    /// Runs the f32 model on the prompt, lets it continue greedily until a token of `stop` or the prompt's
    /// limit, and runs the floor on the same tokens.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, or on an interrupt.
    pub fn run(
        prompt: &Prompt,
        model: &Model<'_>,
        floor: &Model<'_>,
        stop: &[u32],
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let mut state = State::new(model.config());
        let mut hidden = model.forward(&mut state, &prompt.tokens)?;
        let width = model.config().hidden_size;
        let mut continuation = Vec::new();
        loop {
            interrupt.check()?;
            let next = argmax(&model.logits(&hidden[hidden.len() - width..]));
            continuation.push(next);
            if continuation.len() >= prompt.new_tokens || stop.contains(&next) {
                break;
            }
            hidden.extend(model.forward(&mut state, &[next])?);
        }
        let mut state = State::new(floor.config());
        let mut rounded = floor.forward(&mut state, &prompt.tokens)?;
        if continuation.len() > 1 {
            interrupt.check()?;
            rounded.extend(floor.forward(&mut state, &continuation[..continuation.len() - 1])?);
        }
        Ok(Self { continuation, hidden, floor: rounded })
    }
}
