//! The calibration texts and verification scenarios that come with the project.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};
use spark_convert::tokenize::{Chat, ChatTemplate, Tokenizer};

/// Bytes a token is taken to stand for when tokens are counted without the published vocabulary: more
/// than in most texts, so that there are at least as many tokens as this says.
const BYTES_PER_TOKEN: f64 = 4.5;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("calibration")
}

/// The files of a directory under `calibration/`, in order of name.
fn files(dir: &str) -> Vec<PathBuf> {
    let mut files: Vec<_> =
        fs::read_dir(root().join(dir)).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|e| e == extension)
}

/// Every scenario with the path it was read from.
fn scenarios() -> Vec<(PathBuf, Value)> {
    let read = |path: PathBuf| {
        let json = serde_json::from_slice(&fs::read(&path).unwrap())
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        (path, json)
    };
    files("suite").into_iter().map(read).collect()
}

/// The chats of a scenario.
fn chats(scenario: &Value) -> Vec<&Value> {
    let several = scenario["chats"].as_array().into_iter().flatten();
    scenario.get("chat").into_iter().chain(several).collect()
}

/// Every line of the chats among the texts, with where it stands.
fn chat_lines() -> Vec<(String, Value)> {
    let mut chats = Vec::new();
    for path in files("texts").iter().filter(|p| has_extension(p, "jsonl")) {
        for (i, line) in fs::read_to_string(path).unwrap().lines().enumerate() {
            let place = format!("{}:{}", path.display(), i + 1);
            let chat = serde_json::from_str(line).unwrap_or_else(|e| panic!("{place}: {e}"));
            chats.push((place, chat));
        }
    }
    chats
}

#[track_caller]
fn only_keys(place: &str, value: &Value, known: &[&str]) {
    let object = value.as_object().unwrap_or_else(|| panic!("{place}: not an object"));
    for key in object.keys() {
        assert!(known.contains(&key.as_str()), "{place}: unknown key {key:?}");
    }
}

/// The names of a chat's tools.
fn tool_names(chat: &Value) -> BTreeSet<&str> {
    let tools = chat["tools"].as_array().map_or(&[][..], Vec::as_slice);
    tools.iter().map(|tool| tool["function"]["name"].as_str().unwrap()).collect()
}

/// The form of the messages: roles, texts, and calls of tools that are on offer, each answered in turn.
#[track_caller]
fn well_formed(place: &str, chat: &Value) {
    let names = tool_names(chat);
    let mut unanswered = Vec::new();
    for message in chat["messages"].as_array().unwrap() {
        only_keys(place, message, &["role", "content", "reasoning_content", "tool_calls", "tool_call_id"]);
        assert!(message["content"].is_string(), "{place}: {message}");
        match message["role"].as_str() {
            Some("system" | "user") => assert!(unanswered.is_empty(), "{place}: {message}"),
            Some("tool") => {
                assert!(!unanswered.is_empty(), "{place}: {message}");
                assert_eq!(message["tool_call_id"], unanswered.remove(0), "{place}");
            }
            Some("assistant") => {
                assert!(unanswered.is_empty(), "{place}: {message}");
                for call in message["tool_calls"].as_array().into_iter().flatten() {
                    assert_eq!(call["type"], "function", "{place}: {call}");
                    let function = &call["function"];
                    assert!(names.contains(function["name"].as_str().unwrap()), "{place}: {call}");
                    assert!(function["arguments"].is_object(), "{place}: {call}");
                    unanswered.push(call["id"].clone());
                }
            }
            _ => panic!("{place}: {message}"),
        }
    }
}

#[test]
fn the_hashes_are_those_of_the_files() {
    let mut sums = String::new();
    for dir in ["suite", "texts"] {
        for path in files(dir) {
            for byte in Sha256::digest(fs::read(&path).unwrap()) {
                write!(sums, "{byte:02x}").unwrap();
            }
            writeln!(sums, "  {dir}/{}", path.file_name().unwrap().to_str().unwrap()).unwrap();
        }
    }
    let kept = fs::read_to_string(root().join("SHA256SUMS")).unwrap();
    assert!(kept == sums, "calibration/README.md says how SHA256SUMS is made; it should be:\n{sums}");
}

#[test]
fn every_scenario_has_the_form_of_one() {
    let (mut names, mut borrowed) = (Vec::new(), Vec::new());
    for (path, scenario) in scenarios() {
        let place = path.display().to_string();
        only_keys(
            &place,
            &scenario,
            &["name", "about", "text", "text_of", "chat", "chats", "windows", "plus", "new_tokens"],
        );
        let name = scenario["name"].as_str().unwrap();
        assert_eq!(Some(name), path.file_stem().unwrap().to_str(), "{place}");
        assert!(!scenario["about"].as_str().unwrap().is_empty(), "{place}");
        assert!(scenario["new_tokens"].as_u64().unwrap() > 0, "{place}");
        assert!(scenario.get("windows").is_none_or(Value::is_u64), "{place}: windows");
        assert!(scenario.get("plus").is_none_or(Value::is_i64), "{place}: plus");
        assert!(scenario.get("plus").is_none() || scenario.get("windows").is_some(), "{place}");
        let (text, text_of) = (scenario.get("text"), scenario.get("text_of"));
        let chats = chats(&scenario);
        match (text, text_of, chats.is_empty()) {
            (Some(text), None, true) => assert!(!text.as_str().unwrap().is_empty(), "{place}"),
            (None, Some(other), true) => borrowed.push(other.as_str().unwrap().to_owned()),
            (None, None, false) => {}
            _ => panic!("{place}: exactly one of text, text_of, chat and chats"),
        }
        for chat in chats {
            only_keys(&place, chat, &["messages", "tools", "enable_thinking", "expected"]);
            assert!(chat.get("enable_thinking").is_none_or(Value::is_boolean), "{place}");
            well_formed(&place, chat);
            let last = chat["messages"].as_array().unwrap().last().unwrap();
            assert_eq!(last["role"], "user", "{place}: the assistant is to speak next");
            if let Some(expected) = chat.get("expected") {
                only_keys(&place, expected, &["name", "arguments"]);
                assert!(expected["name"].is_string() && expected["arguments"].is_object(), "{place}");
            }
        }
        if name == "long" {
            let text = scenario["text"].as_str().unwrap();
            assert!(text.len() >= 18_000, "{place}: {} bytes", text.len());
            let tokens = text.len() as f64 / BYTES_PER_TOKEN;
            let needed = 512 * scenario["windows"].as_u64().unwrap();
            assert!(tokens > 1.2 * needed as f64, "{place}: {tokens} tokens for {needed}");
        }
        names.push(name.to_owned());
    }
    let all = [
        "agent-last-step",
        "agent-tools",
        "chinese",
        "code",
        "long",
        "short",
        "tool-call",
        "window+1",
        "window-1",
        "window",
    ];
    assert_eq!(names, all);
    assert!(borrowed.iter().all(|name| all.contains(&name.as_str())), "{borrowed:?}");
}

#[test]
fn the_texts_are_many_and_some_are_long() {
    let texts = files("texts");
    assert!(texts.len() >= 16, "{} texts", texts.len());
    let mut long = 0;
    for path in &texts {
        assert!(["txt", "md", "jsonl"].iter().any(|e| has_extension(path, e)), "{}", path.display());
        let text = fs::read_to_string(path).unwrap();
        assert!(text.ends_with('\n') && !text.contains('\r'), "{}", path.display());
        // A file of chats is many texts.
        let is_one = !has_extension(path, "jsonl");
        long += usize::from(is_one && text.len() as f64 / BYTES_PER_TOKEN > 600.0);
    }
    assert!(long >= 4, "{long} long texts");
}

#[test]
fn the_chats_call_tools_and_end_with_the_assistant() {
    let mut tools = BTreeSet::new();
    let mut calls = BTreeSet::new();
    let chats = chat_lines();
    for (place, chat) in &chats {
        only_keys(place, chat, &["messages", "tools"]);
        well_formed(place, chat);
        let messages = chat["messages"].as_array().unwrap();
        assert_eq!(messages.last().unwrap()["role"], "assistant", "{place}");
        tools.extend(tool_names(chat));
        for call in messages.iter().filter_map(|m| m["tool_calls"].as_array()).flatten() {
            calls.insert(call["function"]["name"].as_str().unwrap());
        }
    }
    assert!(tools.len() >= 30, "{} tools", tools.len());
    for name in ["tap", "type_text", "swipe", "task_complete"] {
        assert!(calls.contains(name), "nobody calls {name}");
    }
}

#[test]
fn every_chat_renders_and_every_text_encodes() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/spark-tiny");
    let read = |name: &str| fs::read(fixture.join(name)).unwrap();
    let config: Value = serde_json::from_slice(&read("config.json")).unwrap();
    let vocab_size = u32::try_from(config["vocab_size"].as_u64().unwrap()).unwrap();
    let tokenizer = Tokenizer::from_json(&read("tokenizer.json"), vocab_size).unwrap();
    let template = ChatTemplate::from_config(&read("tokenizer_config.json"), None).unwrap();
    let check = |place: &str, text: &str, ids: Vec<u32>| {
        assert!(!ids.is_empty(), "{place}");
        assert!(ids.iter().all(|&id| id < vocab_size), "{place}");
        // Every byte of the texts has a token, so nothing is lost on the way.
        assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{place}");
    };
    let render = |place: &str, chat: &Value, prompt: bool| {
        let text = template
            .render(&Chat {
                messages: chat["messages"].as_array().unwrap(),
                tools: chat["tools"].as_array().map(Vec::as_slice),
                add_generation_prompt: prompt,
                enable_thinking: chat["enable_thinking"].as_bool(),
            })
            .unwrap_or_else(|e| panic!("{place}: {e}"));
        for message in chat["messages"].as_array().unwrap() {
            assert!(text.contains(message["content"].as_str().unwrap()), "{place}: {message}");
        }
        check(place, &text, tokenizer.encode_chat(&text).unwrap());
    };
    for (path, scenario) in scenarios() {
        let place = path.display().to_string();
        if let Some(text) = scenario["text"].as_str() {
            check(&place, text, tokenizer.encode(text).unwrap());
        }
        chats(&scenario).into_iter().for_each(|chat| render(&place, chat, true));
    }
    for (place, chat) in chat_lines() {
        render(&place, &chat, false);
    }
    for path in files("texts").iter().filter(|p| !has_extension(p, "jsonl")) {
        let text = fs::read_to_string(path).unwrap();
        check(&path.display().to_string(), &text, tokenizer.encode(&text).unwrap());
    }
}
