//! JSON inside a text: where an object or list ends, and what is missing when it does not.

use serde_json::Value;

/// A value found in a text.
#[derive(Debug, PartialEq)]
pub(super) struct Found {
    pub(super) value: Value,
    /// Bytes of the text it takes up.
    pub(super) len: usize,
    /// Whether closing quotes, brackets or braces had to be added.
    pub(super) repaired: bool,
}

/// The JSON object or list that `text` starts with. When the text ends first, what is open is closed.
pub(super) fn leading_json(text: &str) -> Option<Found> {
    if !text.starts_with(['{', '[']) {
        return None;
    }
    let (mut open, mut in_string, mut escaped) = (Vec::new(), false, false);
    for (at, c) in text.char_indices() {
        match (in_string, c) {
            (true, _) if escaped => escaped = false,
            (true, '\\') => escaped = true,
            (_, '"') => in_string = !in_string,
            (false, '{') => open.push('}'),
            (false, '[') => open.push(']'),
            (false, '}' | ']') => {
                // The other kind of bracket: no JSON, whatever follows.
                if open.pop() != Some(c) {
                    return None;
                }
                if open.is_empty() {
                    let value = serde_json::from_str(&text[..=at]).ok()?;
                    return Some(Found { value, len: at + 1, repaired: false });
                }
            }
            _ => {}
        }
    }
    // An escape that was cut off stands for nothing.
    let text = if escaped { &text[..text.len() - 1] } else { text };
    let mut whole = text.trim_end().trim_end_matches(',').to_owned();
    if in_string {
        whole = format!("{text}\"");
    }
    whole.extend(open.iter().rev());
    let value = serde_json::from_str(&whole).ok()?;
    Some(Found { value, len: text.len(), repaired: true })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn whole_values_end_where_they_end() {
        let found = leading_json(r#"{"a": "}]\"", "b": [1, {}]} and more }"#).unwrap();
        assert_eq!((found.value, found.len, found.repaired), (json!({"a": "}]\"", "b": [1, {}]}), 27, false));
        for none in ["", "x", " {}", "{]}", r#"{"a": }"#, "[1,, 2]", r#"{"a""#] {
            assert_eq!(leading_json(none), None, "{none}");
        }
    }

    #[test]
    fn what_is_open_is_closed() {
        for (cut, whole) in [
            (r#"{"a": {"b": [1"#, json!({"a": {"b": [1]}})),
            (r#"{"a": "x"#, json!({"a": "x"})),
            (r#"{"a": "x\"#, json!({"a": "x"})),
            (r#"{"a": "x y, "#, json!({"a": "x y, "})),
            (r#"{"a": 1, "#, json!({"a": 1})),
        ] {
            let found = leading_json(cut).unwrap_or_else(|| panic!("{cut}"));
            assert_eq!((found.value, found.repaired), (whole, true), "{cut}");
        }
    }
}
