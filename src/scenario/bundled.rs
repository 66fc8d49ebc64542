//! The scenarios that come with the program.

use serde::Deserialize;

use super::{ChatPrompt, Scenario, Source};
use crate::error::{InputError, Result};

macro_rules! bundled {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../calibration/suite/", $name, ".json")))),*]
    };
}

/// Name and file, in the order they are reported.
const BUNDLED: &[(&str, &str)] = bundled![
    "short",
    "window-1",
    "window",
    "window+1",
    "long",
    "tool-call",
    "agent-last-step",
    "agent-tools",
    "chinese",
    "code",
];

/// A file of `calibration/suite/`, as its README describes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    about: String,
    text: Option<String>,
    /// The text of another scenario.
    text_of: Option<String>,
    chat: Option<ChatPrompt>,
    chats: Option<Vec<ChatPrompt>>,
    windows: Option<usize>,
    #[serde(default)]
    plus: i64,
    new_tokens: usize,
}

/// The bundled scenarios, in the order they are reported.
///
/// # Errors
/// When one of them is malformed, which a test rules out.
pub fn bundled() -> Result<Vec<Scenario>> {
    let files = BUNDLED.iter().map(|(name, json)| parse(name, json)).collect::<Result<Vec<_>>>()?;
    let text_of = |name: &str| files.iter().find(|f| f.name == name).and_then(|f| f.text.clone());
    files
        .iter()
        .map(|file| {
            let borrowed = file.text_of.as_deref().map(text_of);
            let mut sources: Vec<Source> = file.text.clone().into_iter().map(Source::Text).collect();
            sources.extend(borrowed.flatten().map(Source::Text));
            sources.extend(file.chat.clone().into_iter().map(Source::Chat));
            sources.extend(file.chats.clone().into_iter().flatten().map(Source::Chat));
            if sources.is_empty() {
                return Err(bad(&file.name, &"no text and no chat"));
            }
            let several = sources.len() > 1;
            let name =
                |i: usize| if several { format!("{}:{}", file.name, i + 1) } else { file.name.clone() };
            Ok(Scenario {
                name: file.name.clone(),
                about: file.about.clone(),
                sources: sources.into_iter().enumerate().map(|(i, source)| (name(i), source)).collect(),
                windows: file.windows,
                plus: file.plus,
                new_tokens: file.new_tokens,
            })
        })
        .collect()
}

fn parse(name: &str, json: &str) -> Result<File> {
    serde_json::from_str(json).map_err(|e| bad(name, &e))
}

fn bad(name: &str, what: &dyn std::fmt::Display) -> crate::error::Failure {
    InputError::file(format!("calibration/suite/{name}.json")).found(what).into()
}
