//! The `tojson` filter as `transformers` defines it: `json.dumps` with its own defaults.
//!
//! The engine's filter is of no use here. It escapes `<`, `>`, `&` and `'` for web pages and writes
//! floats its own way; either gives a tool schema other tokens than the model was trained on.

use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, State};

use super::python::{MAX_DEPTH, Meter, as_float, float_repr, invalid};

struct Style {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// `value | tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(state: &State, value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let (positional, kwargs): (&[Value], Kwargs) = from_args(&args)?;
    if positional.len() > 4 {
        return Err(invalid("tojson: too many arguments"));
    }
    let option = |place: usize, name: &str| -> Result<Option<Value>, Error> {
        let named = kwargs.get::<Option<Value>>(name)?;
        Ok(positional.get(place).cloned().or(named).filter(|v| !v.is_none()))
    };
    let ensure_ascii = option(0, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = option(1, "indent")?.map(|v| indent_text(&v)).transpose()?;
    let separators = option(2, "separators")?;
    let sort_keys = option(3, "sort_keys")?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;

    let (item_separator, key_separator) = match separators {
        Some(v) => separator_pair(&v)?,
        // With line breaks Python leaves out the space before them.
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let style = Style { ensure_ascii, indent, item_separator, key_separator, sort_keys };
    let mut out = String::new();
    write_value(&mut out, value, &style, 0, &mut Meter::new(state))?;
    Ok(Value::from(out))
}

fn indent_text(value: &Value) -> Result<String, Error> {
    if let Some(s) = value.as_str() {
        return Ok(s.to_owned());
    }
    let width = match value.kind() {
        ValueKind::Bool => i64::from(value.is_true()),
        _ => value.as_i64().ok_or_else(|| invalid("tojson: indent is a number or a string"))?,
    };
    if width > 64 {
        return Err(invalid("tojson: indent is larger than 64"));
    }
    Ok(" ".repeat(usize::try_from(width).unwrap_or(0)))
}

fn separator_pair(value: &Value) -> Result<(String, String), Error> {
    let parts: Vec<Value> = value.try_iter()?.take(3).collect();
    match parts.as_slice() {
        [item, key] => match (item.as_str(), key.as_str()) {
            (Some(item), Some(key)) => Ok((item.to_owned(), key.to_owned())),
            _ => Err(invalid("tojson: separators are two strings")),
        },
        _ => Err(invalid("tojson: separators are two strings")),
    }
}

fn write_value(
    out: &mut String,
    value: &Value,
    style: &Style,
    depth: usize,
    meter: &mut Meter,
) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(invalid("tojson: value is nested too deeply"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&number_text(value)),
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style),
        ValueKind::Seq => {
            out.push('[');
            let mut any = false;
            for item in value.try_iter()? {
                start_item(out, style, depth, any);
                any = true;
                write_value(out, &item, style, depth + 1, meter)?;
                meter.charge(out.len())?;
            }
            end_items(out, style, depth, any);
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            let mut any = false;
            for key in map_keys(value, style)? {
                start_item(out, style, depth, any);
                any = true;
                write_string(out, &key_text(&key)?, style);
                out.push_str(&style.key_separator);
                write_value(out, &value.get_item(&key)?, style, depth + 1, meter)?;
                meter.charge(out.len())?;
            }
            end_items(out, style, depth, any);
            out.push('}');
        }
        kind => return Err(invalid(format!("tojson: {kind} can't be written as JSON"))),
    }
    Ok(())
}

fn start_item(out: &mut String, style: &Style, depth: usize, any: bool) {
    if any {
        out.push_str(&style.item_separator);
    }
    new_line(out, style, depth + 1);
}

fn end_items(out: &mut String, style: &Style, depth: usize, any: bool) {
    if any {
        new_line(out, style, depth);
    }
}

fn new_line(out: &mut String, style: &Style, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
}

fn map_keys(map: &Value, style: &Style) -> Result<Vec<Value>, Error> {
    let mut keys: Vec<Value> = map.try_iter()?.collect();
    if style.sort_keys {
        let strings = keys.iter().filter(|k| k.as_str().is_some()).count();
        if strings != 0 && strings != keys.len() {
            return Err(invalid("tojson: keys of several types can't be sorted"));
        }
        // Strings compare by code point, as UTF-8 bytes do.
        keys.sort();
    }
    Ok(keys)
}

fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number => Ok(number_text(key)),
        kind => Err(invalid(format!("tojson: {kind} can't be a key"))),
    }
}

fn number_text(value: &Value) -> String {
    match as_float(value) {
        Some(x) if x.is_nan() => "NaN".into(),
        Some(x) if x.is_infinite() => if x > 0.0 { "Infinity" } else { "-Infinity" }.into(),
        Some(x) => float_repr(x),
        None => value.to_string(),
    }
}

fn write_string(out: &mut String, text: &str, style: &Style) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (style.ensure_ascii && !(' '..='~').contains(&c)) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
