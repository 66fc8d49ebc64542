//! The reader: Spark's tags, a bracketed name, or JSON alone, in this order.

use serde_json::Value;

use super::span::leading_json;
use super::{Call, Reading, Recovery, canonical_text};

const START: &str = "<tool_call>";
const END: &str = "</tool_call>";
const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";
const THOUGHT_END: &str = "</think>";

/// Bytes that are looked at; no reply to a prompt is as long.
const MAX_TEXT: usize = 1 << 20;

/// Braces that are tried as the beginning of JSON: a text of nothing but braces is no work.
const MAX_TRIES: usize = 64;

/// Reads the calls of a reply. `thinking` says that the prompt ended inside a thought, which the reply
/// is to close; what stands in the thought is no call.
pub fn read(text: &str, thinking: bool) -> Reading {
    let mut reading = Reading::default();
    let end = (0..=MAX_TEXT.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    let text = &text[..end];
    let reply = match text.rfind(THOUGHT_END) {
        Some(at) => &text[at + THOUGHT_END.len()..],
        None => text,
    };
    let open = reply.contains("<think>") || (thinking && reply.len() == text.len());
    if reply.contains(START) || reply.contains(KEY) {
        tagged(reply, &mut reading);
    } else {
        untagged(reply, &mut reading);
    }
    if open && !reading.calls.is_empty() {
        reading.note(Recovery::OpenThought);
    }
    reading
}

/// Everything between tags.
fn tagged(reply: &str, reading: &mut Reading) {
    let mut rest = reply;
    // Arguments before the first tag belong to a call whose tag was left out.
    let first = rest.find(START).unwrap_or(rest.len());
    if rest[..first].contains(KEY) {
        reading.note(Recovery::NoStart);
        let call = &rest[..first];
        one_call(call.find(END).map_or(call, |at| &call[..at]), reading);
    }
    rest = &rest[first..];
    while let Some(after) = rest.strip_prefix(START) {
        let next = after.find(START).unwrap_or(after.len());
        let content = match after[..next].find(END) {
            Some(at) => &after[..at],
            None => {
                reading.note(Recovery::NoEnd);
                &after[..next]
            }
        };
        one_call(content, reading);
        rest = &after[next..];
    }
}

/// What stands between `<tool_call>` and `</tool_call>`.
fn one_call(content: &str, reading: &mut Reading) {
    let content = content.trim();
    let name_end = content.find(KEY).unwrap_or(content.len());
    let name = content[..name_end].trim();
    // Before the first key JSON can only be the call itself, or its arguments.
    if let Some(at) = content.find('{').filter(|at| *at < name_end) {
        reading.note(Recovery::JsonInTags);
        let Some(found) = leading_json(&content[at..]) else { return };
        if found.repaired {
            reading.note(Recovery::Unbalanced);
        }
        let before = content[..at].trim();
        let call = Call::from_json(&found.value).or_else(|| match &found.value {
            Value::Object(arguments) if !before.is_empty() => Some(Call::new(before, arguments)),
            _ => None,
        });
        reading.calls.extend(call);
        return;
    }
    if name.is_empty() {
        return;
    }
    let mut call = Call { name: name.to_owned(), arguments: std::collections::BTreeMap::new() };
    let mut rest = &content[name_end..];
    while let Some(at) = rest.find(KEY) {
        if !rest[..at].trim().is_empty() {
            reading.note(Recovery::BrokenArgument);
        }
        let after = &rest[at + KEY.len()..];
        // A pair ends where the next begins.
        let pair = &after[..after.find(KEY).unwrap_or(after.len())];
        rest = &after[pair.len()..];
        let Some((key, value)) = pair.split_once(VALUE) else {
            reading.note(Recovery::BrokenArgument);
            continue;
        };
        let key = match key.trim_end().strip_suffix(KEY_END) {
            Some(key) => key,
            None => {
                reading.note(Recovery::BrokenArgument);
                key
            }
        };
        let value = match value.split_once(VALUE_END) {
            Some((value, trailing)) => {
                if !trailing.trim().is_empty() {
                    reading.note(Recovery::BrokenArgument);
                }
                value
            }
            None => {
                reading.note(Recovery::BrokenArgument);
                value
            }
        };
        call.arguments.insert(key.trim().to_owned(), canonical_text(value));
    }
    reading.calls.push(call);
}

/// JSON in a reply without tags, with a bracketed name before it or not.
fn untagged(reply: &str, reading: &mut Reading) {
    let (mut at, mut tries) = (0, 0);
    while let Some(next) = reply[at..].find(['{', '[']).filter(|_| tries < MAX_TRIES) {
        let start = at + next;
        tries += 1;
        if let Some((name, json_at)) = bracketed(&reply[start..])
            && let Some(found) = leading_json(&reply[start + json_at..])
        {
            let call = Call::from_json(&found.value).or_else(|| match &found.value {
                Value::Object(arguments) => Some(Call::new(name, arguments)),
                _ => None,
            });
            take(call, Recovery::Bracketed, found.repaired, reading);
            at = start + json_at + found.len;
            continue;
        }
        match leading_json(&reply[start..]) {
            Some(found) => {
                let calls: Vec<Option<Call>> = match &found.value {
                    Value::Array(items) => items.iter().map(Call::from_json).collect(),
                    value => vec![Call::from_json(value)],
                };
                for call in calls {
                    take(call, Recovery::BareJson, found.repaired, reading);
                }
                at = start + found.len;
            }
            None => at = start + 1,
        }
    }
}

fn take(call: Option<Call>, form: Recovery, repaired: bool, reading: &mut Reading) {
    let Some(call) = call else { return };
    reading.note(form);
    if repaired {
        reading.note(Recovery::Unbalanced);
    }
    reading.calls.push(call);
}

/// `[name]` with a `{` behind it: the name, and where the JSON begins.
fn bracketed(text: &str) -> Option<(&str, usize)> {
    let (name, after) = text.strip_prefix('[')?.split_once(']')?;
    let is_name = |c: char| c.is_alphanumeric() || "_-. ".contains(c);
    if name.trim().is_empty() || !name.chars().all(is_name) {
        return None;
    }
    let json = after.trim_start();
    json.starts_with('{').then_some((name.trim(), text.len() - json.len()))
}
