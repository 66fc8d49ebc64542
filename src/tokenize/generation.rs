//! `{% generation %}`, which `transformers` knows and the template engine does not.
//!
//! The tag marks the assistant's words for training masks and prints nothing. Each pair becomes a
//! `{% with %}` block, which opens a scope as the original does and obeys the same whitespace rules.

/// The template with every `generation` block turned into a `with` block.
pub(super) fn replace_generation_tags(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = next_opening(rest) {
        let (text, from) = rest.split_at(at);
        out.push_str(text);
        let end = match from.as_bytes()[1] {
            b'#' => from.find("#}").map_or(from.len(), |i| i + 2),
            b'{' => end_of_code(from, "}}"),
            _ => end_of_code(from, "%}"),
        };
        let (tag, after) = from.split_at(end);
        rest = after;
        let name = tag_name(tag);
        match name {
            Some("generation") => out.push_str(&tag.replacen("generation", "with", 1)),
            Some("endgeneration") => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => out.push_str(tag),
        }
        if name == Some("raw") {
            let end = end_of_raw(rest);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    out.push_str(rest);
    out
}

/// Where the next `{#`, `{{` or `{%` stands.
fn next_opening(text: &str) -> Option<usize> {
    text.as_bytes().windows(2).position(|w| w[0] == b'{' && matches!(w[1], b'#' | b'{' | b'%'))
}

/// Length of a tag up to and including `close`, skipping string literals.
fn end_of_code(tag: &str, close: &str) -> usize {
    let bytes = tag.as_bytes();
    let mut quote = None;
    let mut i = 2;
    while i < bytes.len() {
        match (quote, bytes[i]) {
            (Some(_), b'\\') => i += 1,
            (Some(q), b) if q == b => quote = None,
            (None, b @ (b'"' | b'\'')) => quote = Some(b),
            (None, _) if bytes[i..].starts_with(close.as_bytes()) => return i + close.len(),
            _ => {}
        }
        i += 1;
    }
    tag.len()
}

/// Length of a raw block's body up to its `endraw` tag.
fn end_of_raw(body: &str) -> usize {
    let mut from = 0;
    while let Some(i) = body[from..].find("{%") {
        let at = from + i;
        if tag_name(&body[at..]) == Some("endraw") {
            return at;
        }
        from = at + 2;
    }
    body.len()
}

/// The first word of a `{% %}` tag.
fn tag_name(tag: &str) -> Option<&str> {
    let inner = tag.strip_prefix("{%")?;
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).trim_start();
    let end = inner.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(inner.len());
    Some(&inner[..end])
}

#[cfg(test)]
mod tests {
    use super::replace_generation_tags as replace;

    #[test]
    fn tags_keep_their_whitespace_marks() {
        assert_eq!(
            replace("a{%- generation -%} b {% endgeneration %}\nc"),
            "a{%- with -%} b {% endwith %}\nc"
        );
        assert_eq!(replace("{%generation%}x{%+endgeneration-%}"), "{%with%}x{%+endwith-%}");
    }

    #[test]
    fn only_tags_change() {
        for same in [
            "generation {{ generation }} {{ '{% generation %}' }}",
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{% endraw %}",
            "{% if generation %}{% endif %}",
            "{% set x = '%} {% generation %}' %}",
            "{{ \"\\\"}} {% generation %}\" }}",
            "{%",
            "{{ 'open",
            "é{",
        ] {
            assert_eq!(replace(same), same);
        }
        assert_eq!(
            replace("{% raw %}{% generation %}{%- endraw %}{% generation %}é{% endgeneration %}"),
            "{% raw %}{% generation %}{%- endraw %}{% with %}é{% endwith %}"
        );
    }
}
