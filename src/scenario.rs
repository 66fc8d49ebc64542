//! What `verify` runs: prompts chosen for the architecture, as data under `calibration/suite/`.

use serde::Deserialize;
use serde_json::Value;

use crate::error::{InputError, Result};
use crate::spark::SparkConfig;
use crate::tokenize::{Chat, ChatTemplate, Tokenizer};

/// The bundled scenarios: name and file.
const BUNDLED: &[(&str, &str)] = &[
    ("short", include_str!("../calibration/suite/short.json")),
    ("long", include_str!("../calibration/suite/long.json")),
    ("tool-call", include_str!("../calibration/suite/tool-call.json")),
    ("chinese", include_str!("../calibration/suite/chinese.json")),
    ("code", include_str!("../calibration/suite/code.json")),
];

/// A prompt, and how many tokens are generated from it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// What it is called on the command line and in reports.
    pub name: String,
    /// What it tests, in a sentence.
    pub about: String,
    /// Plain text, or else a chat.
    text: Option<String>,
    chat: Option<ChatPrompt>,
    /// Cuts the prompt to so many sliding windows, plus `plus` tokens.
    windows: Option<usize>,
    #[serde(default)]
    plus: i64,
    /// Tokens of the greedy continuation.
    pub new_tokens: usize,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ChatPrompt {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    enable_thinking: Option<bool>,
}

/// The bundled scenarios, in the order they are reported.
///
/// # Errors
/// When one of them is malformed, which a test rules out.
pub fn bundled() -> Result<Vec<Scenario>> {
    BUNDLED
        .iter()
        .map(|(name, json)| {
            serde_json::from_str(json)
                .map_err(|e| InputError::file(format!("calibration/suite/{name}.json")).found(e).into())
        })
        .collect()
}

/// Names of the bundled scenarios.
pub fn names() -> impl Iterator<Item = &'static str> {
    BUNDLED.iter().map(|(name, _)| *name)
}

impl Scenario {
    /// Whether the prompt is a chat, which takes a template.
    pub fn is_chat(&self) -> bool {
        self.chat.is_some()
    }

    /// The tokens of the prompt.
    ///
    /// # Errors
    /// When it cannot be rendered or encoded, comes to nothing, or is shorter than the windows it is
    /// to be cut to.
    pub fn tokens(
        &self,
        config: &SparkConfig,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
    ) -> Result<Vec<u32>> {
        let bad =
            |what: &dyn std::fmt::Display| InputError::file(format!("scenario {}", self.name)).found(what);
        let mut tokens = match (&self.text, &self.chat, template) {
            (Some(text), None, _) => tokenizer.encode(text).map_err(|e| bad(&e))?,
            (None, Some(chat), Some(template)) => {
                let chat = Chat {
                    messages: &chat.messages,
                    tools: chat.tools.as_deref(),
                    add_generation_prompt: true,
                    enable_thinking: chat.enable_thinking,
                };
                let text = template.render(&chat).map_err(|e| bad(&e))?;
                tokenizer.encode_chat(&text).map_err(|e| bad(&e))?
            }
            (None, Some(_), None) => {
                return Err(bad(&"a chat, and the checkpoint has no chat template").into());
            }
            _ => return Err(bad(&"neither a text nor a chat, or both").into()),
        };
        if let Some(windows) = self.windows {
            // Without sliding layers there is no window to go beyond; the published one is taken.
            let window = if config.sliding_window == 0 { 512 } else { config.sliding_window };
            let wanted =
                i64::try_from(windows.saturating_mul(window)).unwrap_or(i64::MAX).saturating_add(self.plus);
            let wanted = usize::try_from(wanted).unwrap_or(0);
            if tokens.len() < wanted {
                return Err(
                    bad(&format!("{} tokens, and {windows} windows take {wanted}", tokens.len())).into()
                );
            }
            tokens.truncate(wanted);
        }
        if tokens.is_empty() {
            return Err(bad(&"no tokens").into());
        }
        Ok(tokens)
    }
}
