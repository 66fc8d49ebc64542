//! Where two JSON values differ.

use serde_json::Value;

/// One difference, at a dotted path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    pub(super) path: String,
    pub(super) expected: String,
    pub(super) found: String,
}

/// Every difference, objects key by key. Numbers are compared by value: `1` is `1.0`.
pub(super) fn diff(expected: &Value, found: &Value) -> Vec<Difference> {
    let mut differences = Vec::new();
    walk("", Some(expected), Some(found), &mut differences);
    differences
}

fn walk(path: &str, expected: Option<&Value>, found: Option<&Value>, out: &mut Vec<Difference>) {
    match (expected, found) {
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            for key in a.keys().chain(b.keys().filter(|k| !a.contains_key(*k))) {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                walk(&path, a.get(key), b.get(key), out);
            }
        }
        (Some(a), Some(b)) if a == b || (a.is_number() && a.as_f64() == b.as_f64()) => {}
        (a, b) => {
            let shown = |v: Option<&Value>| v.map_or_else(|| "nothing".to_owned(), Value::to_string);
            out.push(Difference { path: path.to_owned(), expected: shown(a), found: shown(b) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn differences_are_found_in_both_directions() {
        let a = json!({"same": 1, "a": {"x": [1, 2], "gone": true}});
        let b = json!({"same": 1.0, "a": {"x": [1, 3]}, "new": null});
        let paths: Vec<_> = diff(&a, &b).into_iter().map(|d| (d.path, d.expected, d.found)).collect();
        let row = |p: &str, e: &str, f: &str| (p.to_owned(), e.to_owned(), f.to_owned());
        assert_eq!(
            paths,
            [row("a.x", "[1,2]", "[1,3]"), row("a.gone", "true", "nothing"), row("new", "nothing", "null")]
        );
        assert!(diff(&a, &a).is_empty());
    }
}
