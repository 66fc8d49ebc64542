//! What `verify` runs: prompts chosen for the architecture, as data under `calibration/suite/`, or the
//! user's own.

mod bundled;
mod suite;

use serde::Deserialize;
use serde_json::Value;

use crate::actions::Call;
use crate::error::{InputError, Result};
use crate::spark::SparkConfig;
use crate::tokenize::{Chat, ChatTemplate, Tokenizer};

pub use bundled::bundled;
pub use suite::read_suite;

/// The window that a length is counted in where a model has no sliding layers: the published one.
const PUBLISHED_WINDOW: usize = 512;

/// One or several prompts that are reported as one line, and how they are continued.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// What it is called on the command line and in reports.
    pub name: String,
    /// What it tests, in a sentence.
    pub about: String,
    /// What is fed, with the name of each.
    sources: Vec<(String, Source)>,
    /// Cuts each prompt to so many sliding windows, plus `plus` tokens.
    windows: Option<usize>,
    plus: i64,
    /// Most tokens of each greedy continuation.
    new_tokens: usize,
}

/// What a prompt is made from.
#[derive(Clone, Debug)]
enum Source {
    Text(String),
    Chat(ChatPrompt),
}

/// A chat that the model is to go on with.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ChatPrompt {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    enable_thinking: Option<bool>,
    /// The call that is right, `{"name": .., "arguments": {..}}`, where there is one.
    expected: Option<Value>,
}

/// A prompt as a model reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The scenario's name; of several prompts, also which.
    pub name: String,
    /// Its tokens, at least one.
    pub tokens: Vec<u32>,
    /// Most tokens of the greedy continuation, at least one.
    pub new_tokens: usize,
    /// Of a chat, whether the prompt ends inside a thought.
    pub thinking: Option<bool>,
    /// The call that is right, where one is known.
    pub expected: Option<Call>,
}

impl Prompt {
    /// Tokens without a meaning beyond themselves.
    pub fn of_tokens(tokens: &[u32], new_tokens: usize) -> Self {
        Self { name: String::new(), tokens: tokens.to_vec(), new_tokens, thinking: None, expected: None }
    }
}

impl Scenario {
    /// Whether a prompt is a chat, which takes a template.
    pub fn is_chat(&self) -> bool {
        self.sources.iter().any(|(_, source)| matches!(source, Source::Chat(_)))
    }

    /// The prompts, in order.
    ///
    /// # Errors
    /// When one cannot be rendered or encoded, comes to nothing, or is shorter than the windows it is
    /// to be cut to.
    pub fn prompts(
        &self,
        config: &SparkConfig,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
    ) -> Result<Vec<Prompt>> {
        self.sources
            .iter()
            .map(|(name, source)| -> Result<Prompt> {
                let at = Place { name };
                let mut prompt = match source {
                    Source::Text(text) => Prompt {
                        name: name.clone(),
                        tokens: tokenizer.encode(text).map_err(|e| at.bad(&e))?,
                        new_tokens: self.new_tokens,
                        thinking: None,
                        expected: None,
                    },
                    Source::Chat(chat) => {
                        let template = template
                            .ok_or_else(|| at.bad(&"a chat, and the checkpoint has no chat template"))?;
                        chat.prompt(name, self.new_tokens, tokenizer, template)?
                    }
                };
                if let Some(length) = self.length(config) {
                    let have = prompt.tokens.len();
                    if have < length {
                        return Err(at.bad(&format!("{have} tokens, and {length} are wanted")).into());
                    }
                    prompt.tokens.truncate(length);
                }
                match prompt.tokens.is_empty() {
                    true => Err(at.bad(&"no tokens").into()),
                    false => Ok(prompt),
                }
            })
            .collect()
    }

    /// The length that prompts are cut to.
    fn length(&self, config: &SparkConfig) -> Option<usize> {
        let window = if config.sliding_window == 0 { PUBLISHED_WINDOW } else { config.sliding_window };
        let whole = i64::try_from(self.windows?.saturating_mul(window)).unwrap_or(i64::MAX);
        Some(usize::try_from(whole.saturating_add(self.plus)).unwrap_or(0))
    }
}

impl ChatPrompt {
    fn prompt(
        &self,
        name: &str,
        new_tokens: usize,
        tokenizer: &Tokenizer,
        template: &ChatTemplate,
    ) -> Result<Prompt> {
        let at = Place { name };
        let chat = Chat {
            messages: &self.messages,
            tools: self.tools.as_deref(),
            add_generation_prompt: true,
            enable_thinking: self.enable_thinking,
        };
        let text = template.render(&chat).map_err(|e| at.bad(&e))?;
        let expected = match &self.expected {
            None => None,
            Some(json) => Some(Call::from_json(json).ok_or_else(|| {
                at.bad(&"expected: a call has a \"name\" and \"arguments\", and this has not")
            })?),
        };
        Ok(Prompt {
            name: name.to_owned(),
            tokens: tokenizer.encode_chat(&text).map_err(|e| at.bad(&e))?,
            new_tokens,
            thinking: Some(text.trim_end().ends_with("<think>")),
            expected,
        })
    }
}

/// Where a prompt comes from, for errors.
struct Place<'a> {
    name: &'a str,
}

impl Place<'_> {
    fn bad(&self, what: &dyn std::fmt::Display) -> InputError {
        InputError::file(format!("scenario {}", self.name)).found(what)
    }
}
