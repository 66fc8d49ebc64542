//! What a model's text asks to be done: tool calls, read tolerantly, and whether two texts ask for the same.
//!
//! Spark's own form is
//!
//! ```text
//! <tool_call>tap<arg_key>element</arg_key><arg_value>Send [7]</arg_value></tool_call>
//! ```
//!
//! with the name right after the tag, strings as they are and other values as JSON (the form of GLM-4.5).
//! Small and quantized models leave it now and then: they write a bracketed name with JSON behind it, JSON
//! alone, or forget the last braces. A strict reader sees no call there; this one sees it and says what it
//! had to assume, so that nothing is repaired in silence.
//!
//! Text in, values out: no file, no schema, no panic on any text.

mod parse;
mod span;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use parse::read;

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The tool.
    pub name: String,
    /// Values by name, in one spelling: a string as it is, anything else as compact JSON with sorted keys.
    /// Spark's form does not tell `5` from `"5"`, so they are the same here.
    pub arguments: BTreeMap<String, String>,
}

/// A departure from Spark's form that was read all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recovery {
    /// The thought is not closed, so a strict reader takes all of the text for thought.
    OpenThought,
    /// `<arg_key>` without a `<tool_call>` before it.
    NoStart,
    /// `<tool_call>` without its end.
    NoEnd,
    /// A key or value without its end, or a key without a value.
    BrokenArgument,
    /// JSON between the tags.
    JsonInTags,
    /// `[name]` and JSON instead of tags.
    Bracketed,
    /// JSON without anything around it.
    BareJson,
    /// Braces, brackets or quotes at the end were missing.
    Unbalanced,
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OpenThought => "the thought is not closed",
            Self::NoStart => "no <tool_call> before the arguments",
            Self::NoEnd => "no </tool_call>",
            Self::BrokenArgument => "an argument is broken",
            Self::JsonInTags => "JSON inside <tool_call>",
            Self::Bracketed => "a bracketed name instead of <tool_call>",
            Self::BareJson => "JSON without <tool_call>",
            Self::Unbalanced => "braces added at the end",
        })
    }
}

/// What was read from a text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// The calls, in order.
    pub calls: Vec<Call>,
    /// What had to be assumed, each kind once, in the order met.
    pub recoveries: Vec<Recovery>,
}

impl Reading {
    /// Whether the text breaks off inside a call.
    pub fn is_cut(&self) -> bool {
        self.recoveries.iter().any(|r| matches!(r, Recovery::NoEnd | Recovery::Unbalanced))
    }

    fn note(&mut self, recovery: Recovery) {
        if !self.recoveries.contains(&recovery) {
            self.recoveries.push(recovery);
        }
    }
}

impl Call {
    /// A call whose arguments are JSON values.
    pub fn new(name: &str, arguments: &serde_json::Map<String, Value>) -> Self {
        let arguments = arguments.iter().map(|(key, value)| (key.clone(), canonical(value))).collect();
        Self { name: name.to_owned(), arguments }
    }

    /// The call that a JSON object describes: `name`, `tool` or `function` (a text, or an object with both
    /// parts), and `arguments`, `parameters` or `args`; arguments may be JSON in a string, as in the
    /// OpenAI interface. `None` when it is no call.
    pub fn from_json(json: &Value) -> Option<Self> {
        let object = json.as_object()?;
        if let Some(inner) = object.get("function").filter(|f| f.is_object()) {
            return Self::from_json(inner);
        }
        let first = |keys: [&str; 3]| keys.into_iter().find_map(|key| object.get(key));
        let name = first(["name", "tool", "function"])?.as_str()?.trim();
        if name.is_empty() {
            return None;
        }
        match first(["arguments", "parameters", "args"])? {
            Value::Object(arguments) => Some(Self::new(name, arguments)),
            Value::String(text) => match serde_json::from_str(text) {
                Ok(Value::Object(arguments)) => Some(Self::new(name, &arguments)),
                _ => None,
            },
            _ => None,
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arguments: Vec<_> = self.arguments.iter().map(|(key, value)| format!("{key}={value}")).collect();
        write!(f, "{}({})", self.name, arguments.join(", "))
    }
}

/// How far two readings ask for the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Agreement {
    /// The same tools with the same arguments, in the same order.
    Same,
    /// The same tools, with other arguments.
    SameTool,
    /// Other tools, more, fewer, or none.
    Different,
}

impl Agreement {
    /// Of two lists of calls.
    pub fn of(reference: &[Call], other: &[Call]) -> Self {
        let tools = |calls: &[Call]| calls.iter().map(|c| c.name.clone()).collect::<Vec<_>>();
        match (reference == other, tools(reference) == tools(other)) {
            (true, _) => Self::Same,
            (false, true) => Self::SameTool,
            (false, false) => Self::Different,
        }
    }

    /// As reports spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Same => "same",
            Self::SameTool => "same tool, other arguments",
            Self::Different => "another",
        }
    }
}

/// One spelling for a JSON value; see [`Call::arguments`].
fn canonical(value: &Value) -> String {
    match value {
        Value::String(text) => canonical_text(text),
        Value::Number(number) => canonical_number(number),
        _ => compact(value),
    }
}

/// One spelling for a value as Spark's form has it: JSON unless it is a string.
fn canonical_text(text: &str) -> String {
    match serde_json::from_str::<Value>(text) {
        // A text in quotes is another text than the one without.
        Ok(Value::String(_)) | Err(_) => text.to_owned(),
        Ok(value) => canonical(&value),
    }
}

/// `5` and `5.0` are the same number.
fn canonical_number(number: &serde_json::Number) -> String {
    // Up to 2^53 every whole f64 is the integer it looks like.
    match number.as_f64() {
        Some(x) if !number.is_i64() && !number.is_u64() && x.fract() == 0.0 && x.abs() < 9e15 => {
            format!("{x:.0}")
        }
        _ => number.to_string(),
    }
}

/// JSON without spaces, keys sorted. The depth is bounded: what is in here was read by serde_json.
fn compact(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(compact).collect();
            format!("[{}]", items.join(","))
        }
        Value::Object(map) => {
            let sorted: BTreeMap<_, _> = map.iter().collect();
            let items: Vec<_> = sorted
                .into_iter()
                .map(|(key, value)| format!("{}:{}", Value::from(key.as_str()), compact(value)))
                .collect();
            format!("{{{}}}", items.join(","))
        }
        Value::Number(number) => canonical_number(number),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests;
