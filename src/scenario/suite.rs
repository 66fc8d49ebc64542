//! The user's own prompts: a directory of .txt, .md and .jsonl files, each a scenario.

use std::path::Path;

use serde_json::Value;

use super::{ChatPrompt, Scenario, Source};
use crate::checkpoint::ModelDir;
use crate::error::{InputError, Result};

/// Most tokens of a greedy continuation, where a suite does not say.
const NEW_TOKENS: usize = 32;

/// Most tokens after a chat: a call with the thought before it takes more than the beginning of a text.
const NEW_TOKENS_OF_CHAT: usize = 96;

/// Kinds of files that are read.
const EXTENSIONS: [&str; 3] = ["txt", "md", "jsonl"];

/// Reads a directory: a .txt or .md file is one prompt, every line of a .jsonl is one: `{"text": ..}`, or a
/// chat `{"messages": [..]}` with, if wanted, `tools`, `enable_thinking` and the call that is `expected`.
/// What the assistant says last in a chat is left out: it is what is asked for.
///
/// # Errors
/// When there is no such directory, nothing to read in it, or something that is not what its name says.
pub fn read_suite(path: &Path) -> Result<Vec<Scenario>> {
    let error = || InputError::file(path.display());
    if !path.is_dir() {
        let found = if path.exists() { "a file" } else { "no such directory" };
        return Err(error().expected("a directory of .txt, .md and .jsonl files").found(found).into());
    }
    let dir = ModelDir::open(path)?;
    let (names, others): (Vec<String>, Vec<String>) =
        dir.file_names()?.into_iter().partition(|name| extension(name).is_some());
    if names.is_empty() {
        return Err(error()
            .expected("files that end in .txt, .md or .jsonl")
            .found(format!("{} other files", others.len()))
            .into());
    }
    if !others.is_empty() {
        tracing::info!("--suite: left aside, not a .txt, .md or .jsonl: {}", others.join(", "));
    }
    let mut suite: Vec<Scenario> = Vec::new();
    for file in names {
        let text = String::from_utf8(dir.read(&file)?).map_err(|e| {
            InputError::file(path.join(&file).display()).expected("UTF-8").found(e).hint("convert the file")
        })?;
        let scenario = scenario(&path.join(&file), text.strip_prefix('\u{feff}').unwrap_or(&text))?;
        if let Some(other) = suite.iter().find(|s| s.name == scenario.name) {
            return Err(InputError::file(path.join(&file).display())
                .found(format!("a second scenario of the name {}", other.name))
                .hint("rename one of the files")
                .into());
        }
        suite.push(scenario);
    }
    Ok(suite)
}

fn extension(name: &str) -> Option<&'static str> {
    let found = Path::new(name).extension()?;
    EXTENSIONS.into_iter().find(|known| found.eq_ignore_ascii_case(known))
}

fn scenario(path: &Path, text: &str) -> Result<Scenario> {
    if text.trim().is_empty() {
        return Err(InputError::file(path.display()).found("nothing but white space").into());
    }
    let name = path.file_stem().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let about = format!("{}, of the user's suite.", path.display());
    if extension(&path.to_string_lossy()) != Some("jsonl") {
        let sources = vec![(name.clone(), Source::Text(text.to_owned()))];
        return Ok(Scenario { name, about, sources, windows: None, plus: 0, new_tokens: NEW_TOKENS });
    }
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let sources = lines
        .map(|(i, line)| Ok((format!("{name}:{}", i + 1), json_line(path, i + 1, line)?)))
        .collect::<Result<Vec<_>>>()?;
    let chats = sources.iter().any(|(_, source)| matches!(source, Source::Chat(_)));
    let new_tokens = if chats { NEW_TOKENS_OF_CHAT } else { NEW_TOKENS };
    Ok(Scenario { name, about, sources, windows: None, plus: 0, new_tokens })
}

fn json_line(path: &Path, number: usize, line: &str) -> Result<Source> {
    let error = || InputError::file(format!("{}:{number}", path.display()));
    let json: Value = serde_json::from_str(line).map_err(|e| error().expected("JSON").found(e))?;
    match (json.get("text"), json.get("messages")) {
        (Some(Value::String(text)), None) if !text.trim().is_empty() => Ok(Source::Text(text.clone())),
        (None, Some(Value::Array(_))) => chat(&json, &error).map(Source::Chat),
        _ => Err(error()
            .expected("an object with either \"text\", a string, or \"messages\", a list")
            .found("another form")
            .into()),
    }
}

fn chat(json: &Value, error: &dyn Fn() -> InputError) -> Result<ChatPrompt> {
    let tools = match &json["tools"] {
        Value::Null => None,
        Value::Array(tools) => Some(tools.clone()),
        _ => return Err(error().subject("tools").expected("a list").found("no list").into()),
    };
    let enable_thinking = match &json["enable_thinking"] {
        Value::Null => None,
        Value::Bool(thinking) => Some(*thinking),
        other => {
            return Err(error().subject("enable_thinking").expected("true or false").found(other).into());
        }
    };
    let expected = json.get("expected").filter(|e| !e.is_null()).cloned();
    let mut messages = json["messages"].as_array().cloned().unwrap_or_default();
    while messages.last().is_some_and(|m| m["role"] == "assistant") {
        messages.pop();
    }
    match messages.is_empty() {
        true => {
            Err(error().subject("messages").expected("a message that is to be answered").found("none").into())
        }
        false => Ok(ChatPrompt { messages, tools, enable_thinking, expected }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(files: &[(&str, &str)]) -> Result<Vec<Scenario>> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        read_suite(dir.path())
    }

    #[test]
    fn every_file_is_a_scenario_and_every_line_a_prompt() {
        let suite = read(&[
            ("b.txt", "Hello there.\n"),
            ("a.jsonl", "{\"text\": \"x y\"}\n\n{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"a\"}]}\n"),
            ("c.md", "\u{feff}# Title"),
            ("notes.pdf", "no"),
        ])
        .unwrap();
        let names: Vec<_> = suite.iter().map(|s| (s.name.as_str(), s.is_chat(), s.sources.len())).collect();
        assert_eq!(names, [("a", true, 2), ("b", false, 1), ("c", false, 1)]);
        let (name, Source::Chat(chat)) = &suite[0].sources[1] else { panic!("a chat") };
        assert_eq!((name.as_str(), chat.messages.len()), ("a:3", 1), "the answer is left out");
        let Source::Text(text) = &suite[2].sources[0].1 else { panic!("a text") };
        assert_eq!(text, "# Title");
    }

    #[test]
    fn what_is_no_prompt_is_refused_in_one_line() {
        for (files, word) in [
            (&[][..], "0 other files"),
            (&[("a.txt", " \n")][..], "white space"),
            (&[("a.jsonl", "{]")][..], "a.jsonl:1"),
            (&[("a.jsonl", "{}")][..], "another form"),
            (&[("a.jsonl", "{\"text\": \" \"}")][..], "another form"),
            (
                &[("a.jsonl", "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}")][..],
                "answered",
            ),
            (&[("a.jsonl", "{\"messages\": [{}], \"tools\": 3}")][..], "tools"),
            (&[("a.jsonl", "{\"messages\": [{}], \"enable_thinking\": 3}")][..], "enable_thinking"),
            (&[("a.txt", "x"), ("a.md", "y")][..], "second scenario"),
        ] {
            let error = read(files).unwrap_err().to_string();
            assert!(error.contains(word) && error.lines().count() == 1, "{error}");
        }
    }
}
