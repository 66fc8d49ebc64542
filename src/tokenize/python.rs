//! How Python prints: numbers, containers, and a date that stands still.

use minijinja::value::{Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Containers may be nested this deep; deeper ones are the template's doing.
pub(super) const MAX_DEPTH: usize = 128;

pub(super) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// The value as a float, if it is one: integers are not.
pub(super) fn as_float(value: &Value) -> Option<f64> {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        f64::try_from(value.clone()).ok()
    } else {
        None
    }
}

/// `repr` of a finite float: the shortest digits that read back the same, in scientific notation
/// below 1e-4 and from 1e16 on.
pub(super) fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{x:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    let Ok(exponent) = exponent.parse::<i32>() else { return scientific };
    if (-4..16).contains(&exponent) || x == 0.0 {
        return format!("{x:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

/// Takes steps off the budget for text the engine can't see growing.
///
/// The engine counts a text when a filter returns it. By then a list that holds the same list twice,
/// and that one another twice, has been written out in full.
pub(super) struct Meter<'a, 't, 'e> {
    state: &'a State<'t, 'e>,
    counted: usize,
}

impl<'a, 't, 'e> Meter<'a, 't, 'e> {
    pub(super) fn new(state: &'a State<'t, 'e>) -> Self {
        Self { state, counted: 0 }
    }

    /// Call after every item, with the length of the text: one step for it and one for 64 bytes.
    pub(super) fn charge(&mut self, written: usize) -> Result<(), Error> {
        let blocks = (written - self.counted) / 64;
        self.counted += blocks * 64;
        self.state.consume_fuel(1 + blocks as u64)
    }
}

/// `str(value)`.
pub(super) fn str_of(state: &State, value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    print(&mut out, value, 0, &mut Meter::new(state))?;
    Ok(out)
}

/// Appends `str(value)`, or `repr(value)` where it stands in a container.
fn print(out: &mut String, value: &Value, depth: usize, meter: &mut Meter) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(invalid("value is nested too deeply to be printed"));
    }
    if let Some(x) = as_float(value) {
        out.push_str(&float_repr(x));
        return Ok(());
    }
    match value.kind() {
        ValueKind::Seq => {
            let tuple = value.downcast_object_ref::<Tuple>().is_some();
            out.push(if tuple { '(' } else { '[' });
            let mut count = 0;
            for item in value.try_iter()? {
                if count > 0 {
                    out.push_str(", ");
                }
                print(out, &item, depth + 1, meter)?;
                meter.charge(out.len())?;
                count += 1;
            }
            if tuple && count == 1 {
                out.push(',');
            }
            out.push(if tuple { ')' } else { ']' });
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                print(out, &key, depth + 1, meter)?;
                out.push_str(": ");
                print(out, &value.get_item(&key)?, depth + 1, meter)?;
                meter.charge(out.len())?;
            }
            out.push('}');
        }
        ValueKind::String if depth > 0 => {
            string_repr(out, value.as_str().unwrap_or_default());
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// Appends `repr` of a string.
fn string_repr(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote || c == '\\' => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c if c <= '\u{ff}' => out.push_str(&format!("\\x{:02x}", c as u32)),
            c if c <= '\u{ffff}' => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push_str(&format!("\\U{:08x}", c as u32)),
        }
    }
    out.push(quote);
}

/// `str.isprintable`: the standard library's debug escapes go by the same Unicode categories, but
/// also escape combining marks at the start of a string; hence the letter before.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    ['x', c].iter().collect::<String>().escape_debug().nth(1) == Some(c)
}

/// `str.title`: the first letter of every run of letters, apostrophes ending a run.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        inside = c.is_alphabetic();
    }
    out
}

/// Python's methods on strings, lists and dicts.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    match (value.as_str(), name) {
        (Some(text), "title") => {
            let () = from_args(args)?;
            Ok(Value::from(title(text)))
        }
        (Some(text), "removeprefix") => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        (Some(text), "removesuffix") => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        _ => unknown_method_callback(state, value, name, args),
    }
}

/// `value is iterable`: the engine would say yes to none as well.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// `strftime` of the one day templates get to see: 2025-01-01 00:00:00, a Wednesday.
///
/// A prompt with today's date in it would calibrate differently every day.
pub(super) fn strftime_fixed(format: &str) -> Result<String, Error> {
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let unpadded = directive == Some('-');
        if unpadded {
            directive = chars.next();
        }
        let text = match directive {
            Some('Y') => "2025",
            Some('y') => "25",
            Some('m' | 'd') => "01",
            Some('e') => " 1",
            Some('B') => "January",
            Some('b' | 'h') => "Jan",
            Some('A') => "Wednesday",
            Some('a') => "Wed",
            Some('H' | 'M' | 'S') => "00",
            Some('I') => "12",
            Some('p') => "AM",
            Some('j') => "001",
            Some('F') => "2025-01-01",
            Some('T') => "00:00:00",
            Some('D') => "01/01/25",
            Some('%') => "%",
            other => {
                let other = other.map(String::from).unwrap_or_default();
                return Err(invalid(format!("strftime_now doesn't know `%{other}`")));
            }
        };
        match text.trim_start_matches(['0', ' ']) {
            "" if unpadded => out.push('0'),
            short if unpadded && short.len() < 3 => out.push_str(short),
            _ => out.push_str(text),
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_in_python() {
        for (x, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (9999999999999998.0, "9999999999999998.0"),
            (1e16, "1e+16"),
            (-1e16, "-1e+16"),
            (1e22, "1e+22"),
            (5e-324, "5e-324"),
            (f64::MAX, "1.7976931348623157e+308"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(float_repr(x), text);
        }
    }

    #[test]
    fn dates_stand_still() {
        assert_eq!(strftime_fixed("%d %b %Y, 100%%").unwrap(), "01 Jan 2025, 100%");
        assert_eq!(strftime_fixed("%-d %B %-H").unwrap(), "1 January 0");
        assert!(strftime_fixed("%Q").unwrap_err().to_string().contains("`%Q`"));
        assert!(strftime_fixed("%").is_err());
    }
}
