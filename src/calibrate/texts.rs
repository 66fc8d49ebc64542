//! Calibration texts: from files, or those that come with the program, to tokens.

use std::path::Path;

use serde_json::Value;

use crate::checkpoint::ModelDir;
use crate::error::{InputError, Result};
use crate::tokenize::{Chat, ChatTemplate, Tokenizer};

/// Fewer tokens than this say nothing about a model: the attention has hardly a key to look at.
pub const MIN_TEXT_TOKENS: usize = 8;

/// Kinds of files that are read.
const EXTENSIONS: [&str; 3] = ["txt", "md", "jsonl"];

/// What a large file is in a repository that was cloned without its large files.
const LFS_PREFIX: &[u8] = b"version https://git-lfs.github.com/spec/";

macro_rules! bundled {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../calibration/texts/", $name)))),*]
    };
}

/// The texts that come with the program, by name.
const BUNDLED: &[(&str, &[u8])] = bundled![
    "chinese-home-network.md",
    "chinese-market-talk.txt",
    "chinese-river-clinic.txt",
    "code-python-ledger.txt",
    "code-rust-timers.txt",
    "code-shell-photos.txt",
    "numbers-tables.md",
    "prose-ferry.txt",
    "prose-letters.txt",
    "prose-orchard.txt",
    "screens-chinese.jsonl",
    "screens-errands.jsonl",
    "screens-messages.jsonl",
    "screens-settings.jsonl",
    "technical-backpressure.md",
    "technical-battery-gauge.md",
    "tools-chinese.jsonl",
    "tools-daily.jsonl",
    "tools-leisure.jsonl",
    "tools-work.jsonl",
];

/// A text as the model reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// The file, and for a line of a .jsonl its number: `chats.jsonl:3`.
    pub name: String,
    /// Its tokens, at least [`MIN_TEXT_TOKENS`].
    pub tokens: Vec<u32>,
}

/// What turns texts into tokens: the checkpoint's own tokenizer and chat template.
#[derive(Clone, Copy, Debug)]
pub struct TextEncoder<'a> {
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The chat template, if there is one.
    pub template: Option<&'a ChatTemplate>,
}

/// The texts that come with the program. Chats need a template: without one they are passed over,
/// which the second part tells.
///
/// # Errors
/// When the tokenizer cannot encode one of them.
pub fn bundled(encoder: TextEncoder<'_>) -> Result<(Vec<Text>, Vec<String>)> {
    let mut texts = Vec::new();
    let mut notes = Vec::new();
    let usable = |name: &str| encoder.template.is_some() || !name.ends_with(".jsonl");
    for (name, bytes) in BUNDLED.iter().filter(|(name, _)| usable(name)) {
        encoder.read(name, bytes, &mut texts)?;
    }
    if encoder.template.is_none() {
        let chats = BUNDLED.iter().filter(|(name, _)| !usable(name)).count();
        notes.push(format!(
            "the checkpoint has no chat template: {chats} of the bundled calibration files, which hold chats, \
             were passed over"
        ));
    }
    Ok((texts, notes))
}

/// The texts of a file, or of every .txt, .md and .jsonl file of a directory, in order of name.
///
/// # Errors
/// When there is no such file, or one that is empty, blank, too short, not UTF-8, or not what its name
/// says; and when a chat meets a checkpoint without a template.
pub fn read(path: &Path, encoder: TextEncoder<'_>) -> Result<Vec<Text>> {
    let error = || InputError::file(path.display());
    if path.as_os_str().is_empty() {
        return Err(InputError::file("--calib").found("is empty; is a variable not set?").into());
    }
    if !path.exists() {
        return Err(error().found("no such file or directory").into());
    }
    let mut texts = Vec::new();
    if path.is_dir() {
        let dir = ModelDir::open(path)?;
        let (names, others): (Vec<String>, Vec<String>) =
            dir.file_names()?.into_iter().partition(|name| is_text(name));
        if names.is_empty() {
            let found = match others.len() {
                0 => "none".to_owned(),
                n => format!("{n} other files"),
            };
            return Err(error().expected("files that end in .txt, .md or .jsonl").found(found).into());
        }
        if !others.is_empty() {
            tracing::info!("--calib: left aside, not a .txt, .md or .jsonl: {}", others.join(", "));
        }
        for name in names {
            encoder.read(&path.join(&name).display().to_string(), &dir.read(&name)?, &mut texts)?;
        }
        return Ok(texts);
    }
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    if !is_text(&name) {
        return Err(error().expected("a name that ends in .txt, .md or .jsonl").found("another").into());
    }
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    encoder.read(&path.display().to_string(), &ModelDir::open(parent)?.read(&name)?, &mut texts)?;
    Ok(texts)
}

fn is_text(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|e| EXTENSIONS.iter().any(|known| e.eq_ignore_ascii_case(known)))
}

impl TextEncoder<'_> {
    /// Appends the texts of a file.
    fn read(self, name: &str, bytes: &[u8], texts: &mut Vec<Text>) -> Result<()> {
        let error = || InputError::file(name);
        if bytes.is_empty() {
            return Err(error().found("an empty file").hint("calibration needs text").into());
        }
        if bytes.starts_with(LFS_PREFIX) {
            return Err(error()
                .expected("text")
                .found("a Git LFS pointer")
                .hint("fetch the file itself (git lfs pull)")
                .into());
        }
        let text = std::str::from_utf8(bytes).map_err(|e| {
            let at = e.valid_up_to();
            error()
                .expected("UTF-8")
                .found(format!("byte {:#04x} at offset {at}", bytes[at]))
                .hint("convert the file to UTF-8; nothing is replaced quietly")
        })?;
        // A byte order mark is not part of the text.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        if text.trim().is_empty() {
            return Err(error().found("nothing but white space").hint("calibration needs text").into());
        }
        if !name.to_ascii_lowercase().ends_with(".jsonl") {
            texts.push(self.plain(name.to_owned(), text)?);
            return Ok(());
        }
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            texts.push(self.json_line(format!("{name}:{}", i + 1), line)?);
        }
        Ok(())
    }

    fn plain(self, name: String, text: &str) -> Result<Text> {
        if text.trim().is_empty() {
            return Err(InputError::file(name).found("nothing but white space").into());
        }
        match self.tokenizer.encode(text) {
            Ok(tokens) => long_enough(Text { name, tokens }),
            Err(e) => Err(InputError::file(name).found(e).into()),
        }
    }

    /// A line of a .jsonl: `{"text": ..}`, or a chat `{"messages": [..], "tools": [..]}`.
    fn json_line(self, name: String, line: &str) -> Result<Text> {
        let error = || InputError::file(&name);
        let json: Value = serde_json::from_str(line).map_err(|e| error().expected("JSON").found(e))?;
        match (&json["text"], &json["messages"]) {
            (Value::String(text), Value::Null) => self.plain(name, text),
            (Value::Null, Value::Array(messages)) => {
                let tools = match &json["tools"] {
                    Value::Null => None,
                    Value::Array(tools) => Some(tools.as_slice()),
                    _ => return Err(error().subject("tools").expected("a list").found("no list").into()),
                };
                let template = self.template.ok_or_else(|| {
                    error().found("a chat, and the checkpoint has no chat template").hint(
                        "give plain texts, or a checkpoint with chat_template.jinja or a chat_template in \
                         tokenizer_config.json",
                    )
                })?;
                let chat = Chat { messages, tools, add_generation_prompt: false, enable_thinking: None };
                let rendered = template.render(&chat).map_err(|e| error().found(e))?;
                let tokens = self.tokenizer.encode_chat(&rendered).map_err(|e| error().found(e))?;
                long_enough(Text { name, tokens })
            }
            _ => Err(error()
                .expected("an object with either \"text\", a string, or \"messages\", a list")
                .found("another form")
                .into()),
        }
    }
}

fn long_enough(text: Text) -> Result<Text> {
    match text.tokens.len() >= MIN_TEXT_TOKENS {
        true => Ok(text),
        false => Err(InputError::file(&text.name)
            .expected(format!("at least {MIN_TEXT_TOKENS} tokens"))
            .found(text.tokens.len())
            .hint("so short a text says nothing about the model")
            .into()),
    }
}

#[cfg(test)]
#[path = "texts_tests.rs"]
mod tests;
