//! Chat templates: messages and tools to one prompt text.

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State};
use serde_json::Value as Json;

use super::ChatError;
use super::error::one_line;
use super::generation::replace_generation_tags;
use super::python;
use super::tojson::tojson;

/// Bytes a template may have. Published ones stay below 30 kB.
const MAX_TEMPLATE: usize = 256 << 10;
/// Bytes a rendered chat may have.
const MAX_OUTPUT: usize = 16 << 20;
/// Steps a rendering may take: about one an instruction and one for 64 bytes of data. A message
/// takes one or two hundred.
const MAX_STEPS: u64 = 500_000;
/// Stack for the engine, in address space; pages that aren't touched cost nothing.
///
/// The engine parses, prints, compares and frees nested values by recursion without a limit of its
/// own, and a process that runs out of stack is aborted. A template of `MAX_TEMPLATE` bytes holds
/// fewer than 2^18 nested operators and `MAX_STEPS` buy fewer than 2^19 nested lists, so this
/// leaves 1 KiB for each; the largest frame seen, in a build for tests, took 0.6 KiB.
const STACK: usize = 512 << 20;
/// Macros and loops may recurse this deep.
const MAX_RECURSION: usize = 100;
/// The name under which the engine knows the template, and under which its errors show it.
const NAME: &str = "chat_template";

/// What a template is asked to render.
///
/// Messages and tools are the JSON objects of a chat request, handed to the template as they are:
/// `role`, `content` (text or null), `reasoning_content`, `tool_calls` and whatever else it knows.
/// Keys keep the order they were written in.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chat<'a> {
    /// The messages, oldest first.
    pub messages: &'a [Json],
    /// The tools on offer. `None` and an empty list are what Python's `None` and `[]` are: most
    /// templates treat them alike.
    pub tools: Option<&'a [Json]>,
    /// Whether the text ends with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// The template's `enable_thinking`; with `None` it stays undefined and the template's own
    /// default holds.
    pub enable_thinking: Option<bool>,
}

/// A model's chat template, parsed once.
///
/// Renders as `apply_chat_template(tokenize=False)` of `transformers` does: blocks are trimmed,
/// `tojson` writes Python's JSON, `raise_exception` refuses, loops know `break` and `continue`,
/// Python's methods on strings and dicts work. Differences that remain, all of them deliberate or
/// out of reach of any known template:
///
/// * `strftime_now` always tells 2025-01-01 00:00:00, so that the same input gives the same prompt;
/// * `{% generation %}` prints its content and marks nothing;
/// * floats joined with `~` follow the engine, not Python (`{{ x }}` and `tojson` follow Python);
/// * integers beyond 64 bits were already floats when the JSON was read.
///
/// Templates come with a model and are not trusted: they can open nothing, and their size, steps,
/// recursion and output are limited. One hole is known: a list that holds a list twice, that one
/// another twice and so on, is small to make but long to walk, and where the engine itself walks
/// it (to join it with `~` or to compare it) it does not count the steps.
pub struct ChatTemplate {
    env: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("special_tokens", &self.special_tokens).finish()
    }
}

impl ChatTemplate {
    /// Takes the template from `tokenizer_config.json`, or from `chat_template.jinja` if given.
    ///
    /// In the config `chat_template` is a text, or a list of `{name, template}` of which `default`
    /// is taken. The special tokens of the config (`bos_token`, `eos_token` and the like, as text
    /// or as objects with a `content`) become variables of the template.
    pub fn from_config(
        tokenizer_config: &[u8],
        chat_template_jinja: Option<&str>,
    ) -> Result<Self, ChatError> {
        let config: Json =
            serde_json::from_slice(tokenizer_config).map_err(|e| ChatError::Config(one_line(&e)))?;
        if !config.is_object() {
            return Err(ChatError::Config("it isn't a JSON object".into()));
        }
        let source = match chat_template_jinja {
            Some(text) => text,
            None => template_in(&config)?,
        };
        Self::from_source(source, special_tokens(&config)?)
    }

    /// Takes the template's text and the special tokens it may name, such as
    /// `("bos_token", "<s>")`.
    pub fn from_source<K, V>(
        template: &str,
        special_tokens: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ChatError>
    where
        K: Into<String>,
        V: Into<String>,
    {
        if template.len() > MAX_TEMPLATE {
            return Err(ChatError::TemplateTooLarge { size: template.len(), limit: MAX_TEMPLATE });
        }
        let env = with_deep_stack(|| {
            let mut env = environment()?;
            env.add_template_owned(NAME, replace_generation_tags(template))
                .map_err(|e| ChatError::Syntax(one_line(&e)))?;
            Ok(env)
        })?;
        let special_tokens = special_tokens.into_iter().map(|(k, v)| (k.into(), v.into())).collect();
        Ok(Self { env, special_tokens })
    }

    /// Renders a chat to the text the model reads, to be tokenized with
    /// [`Tokenizer::encode_chat`](super::Tokenizer::encode_chat).
    pub fn render(&self, chat: &Chat<'_>) -> Result<String, ChatError> {
        with_deep_stack(|| self.render_here(chat))
    }

    fn render_here(&self, chat: &Chat<'_>) -> Result<String, ChatError> {
        let template = self.env.get_template(NAME).map_err(|e| ChatError::Render(one_line(&e)))?;
        let mut out = Bounded::default();
        match template.render_captured_to(self.context(chat), &mut out) {
            Ok(_) => {}
            Err(_) if out.full => return Err(ChatError::OutputTooLarge(MAX_OUTPUT)),
            Err(e) => return Err(render_error(&e)),
        }
        String::from_utf8(out.bytes).map_err(|e| ChatError::Render(one_line(&e)))
    }

    fn context(&self, chat: &Chat<'_>) -> Value {
        let special = self.special_tokens.iter().map(|(k, v)| (k.as_str(), Value::from(v.as_str())));
        let tools = chat.tools.map_or_else(|| Value::from(()), list);
        Value::from_pairs(
            special
                .chain([
                    ("messages", list(chat.messages)),
                    ("tools", tools),
                    ("documents", Value::from(())),
                    ("add_generation_prompt", Value::from(chat.add_generation_prompt)),
                ])
                .chain(chat.enable_thinking.map(|on| ("enable_thinking", Value::from(on)))),
        )
    }
}

/// Runs the engine where it may recurse as deep as its limits allow.
fn with_deep_stack<T: Send>(work: impl FnOnce() -> Result<T, ChatError> + Send) -> Result<T, ChatError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name(NAME.into())
            .stack_size(STACK)
            .spawn_scoped(scope, work)
            .map_err(ChatError::Thread)?;
        thread.join().unwrap_or_else(|_| Err(ChatError::Render("the engine panicked".into())))
    })
}

/// The template a `tokenizer_config.json` carries.
fn template_in(config: &Json) -> Result<&str, ChatError> {
    let list = match config.get("chat_template") {
        None | Some(Json::Null) => return Err(ChatError::Missing),
        Some(Json::String(text)) => return Ok(text),
        Some(Json::Array(list)) => list,
        Some(_) => {
            return Err(ChatError::Config("chat_template is neither a text nor a list".into()));
        }
    };
    let text = |entry: &'_ Json, key: &str| entry.get(key).and_then(Json::as_str).map(str::to_owned);
    list.iter()
        .find(|entry| entry.get("name").and_then(Json::as_str) == Some("default"))
        .and_then(|entry| entry.get("template").and_then(Json::as_str))
        .ok_or_else(|| {
            let names: Vec<_> = list.iter().filter_map(|e| text(e, "name")).collect();
            ChatError::Config(format!(
                "chat_template has no template named `default`, only [{}]",
                one_line(&names.join(", "))
            ))
        })
}

/// The entries of a `tokenizer_config.json` that name a special token.
fn special_tokens(config: &Json) -> Result<Vec<(String, String)>, ChatError> {
    let mut found = Vec::new();
    for name in ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"] {
        let content = match config.get(name) {
            None | Some(Json::Null) => continue,
            Some(Json::String(text)) => text,
            Some(other) => match other.get("content") {
                Some(Json::String(text)) => text,
                _ => {
                    return Err(ChatError::Config(format!(
                        "{name} is neither a text nor an object with a `content`"
                    )));
                }
            },
        };
        found.push((name.to_owned(), content.clone()));
    }
    Ok(found)
}

fn list(items: &[Json]) -> Value {
    items.iter().map(to_value).collect()
}

fn to_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::from(i),
            (None, Some(u)) => Value::from(u),
            (None, None) => Value::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(s) => Value::from(s.as_str()),
        Json::Array(items) => list(items),
        Json::Object(map) => Value::from_pairs(map.iter().map(|(k, v)| (k.as_str(), to_value(v)))),
    }
}

/// The engine, set up the way `transformers` sets up its own.
fn environment() -> Result<Environment<'static>, ChatError> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|e| ChatError::Syntax(one_line(&e)))?;
    env.set_syntax(syntax);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_formatter(print);
    env.set_fuel(Some(MAX_STEPS));
    env.set_recursion_limit(MAX_RECURSION);
    env.set_unknown_method_callback(python::method);
    env.add_test("iterable", python::is_iterable);
    // Indents by depth, so its output grows with the square of it, and isn't Python's anyway.
    env.remove_filter("pprint");
    env.add_filter("tojson", tojson);
    env.add_filter("string", string);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", |format: &str| python::strftime_fixed(format));
    Ok(env)
}

/// `{{ value }}`, printed as Python prints it.
fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&python::str_of(state, value)?),
    };
    written.map_err(|e| Error::new(ErrorKind::WriteFailure, e.to_string()))
}

/// `value | string`.
fn string(state: &State, value: &Value) -> Result<String, Error> {
    python::str_of(state, value)
}

/// What a template said when it called `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(python::invalid(message.clone()).with_source(Raised(message)))
}

fn render_error(e: &Error) -> ChatError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(e);
    while let Some(c) = cause {
        if let Some(Raised(message)) = c.downcast_ref() {
            return ChatError::Refused(one_line(message));
        }
        if c.downcast_ref::<Error>().is_some_and(|e| e.kind() == ErrorKind::OutOfFuel) {
            return ChatError::OutOfSteps(MAX_STEPS);
        }
        cause = c.source();
    }
    ChatError::Render(one_line(e))
}

/// Collects the rendered text and refuses to grow without end.
#[derive(Default)]
struct Bounded {
    bytes: Vec<u8>,
    full: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + text.len() > MAX_OUTPUT {
            self.full = true;
            return Err(io::Error::other("output limit"));
        }
        self.bytes.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn none() -> [(&'static str, &'static str); 0] {
        []
    }

    fn render(source: &str, messages: &Json) -> Result<String, ChatError> {
        let messages = messages.as_array().unwrap();
        ChatTemplate::from_source(source, none())?.render(&Chat { messages, ..Chat::default() })
    }

    fn error(source: &str) -> String {
        let e = render(source, &json!([])).unwrap_err().to_string();
        assert!(!e.contains('\n'), "{e}");
        e
    }

    fn from_config(config: &Json, jinja: Option<&str>) -> Result<String, ChatError> {
        ChatTemplate::from_config(config.to_string().as_bytes(), jinja)?.render(&Chat::default())
    }

    #[test]
    fn the_separate_template_comes_first() {
        let config = json!({"chat_template": "config", "bos_token": "<s>"});
        assert_eq!(from_config(&config, None).unwrap(), "config");
        assert_eq!(from_config(&config, Some("{{ bos_token }}file")).unwrap(), "<s>file");
    }

    #[test]
    fn of_several_templates_the_default_is_taken() {
        let tool = json!({"name": "tool_use", "template": "tool"});
        let config = json!({"chat_template": [tool, {"name": "default", "template": "plain"}]});
        assert_eq!(from_config(&config, None).unwrap(), "plain");
        let e = from_config(&json!({"chat_template": [tool]}), None).unwrap_err().to_string();
        assert!(e.ends_with("no template named `default`, only [tool_use]"), "{e}");
    }

    #[test]
    fn names_of_templates_cannot_break_the_line() {
        let config = json!({"chat_template": [{"name": "a\n\u{1b}[31mb", "template": ""}]});
        let e = from_config(&config, None).unwrap_err().to_string();
        assert!(e.ends_with("only [a \u{fffd}[31mb]"), "{e:?}");
    }

    #[test]
    fn special_tokens_are_texts_or_objects() {
        let config = json!({
            "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}|{{ unk_token is defined }}",
            "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": false},
            "eos_token": "</s>", "unk_token": null});
        assert_eq!(from_config(&config, None).unwrap(), "<s></s>|False");
        let e = from_config(&json!({"bos_token": 3}), Some("x")).unwrap_err().to_string();
        assert!(e.contains("bos_token is neither a text nor an object"), "{e}");
    }

    #[test]
    fn a_config_without_a_template_says_so() {
        for config in [json!({}), json!({"chat_template": null})] {
            assert!(matches!(from_config(&config, None), Err(ChatError::Missing)));
        }
        for config in [json!([]), json!({"chat_template": 3})] {
            assert!(matches!(from_config(&config, None), Err(ChatError::Config(_))));
        }
        assert!(matches!(ChatTemplate::from_config(b"{", None), Err(ChatError::Config(_))));
    }

    #[test]
    fn a_refusal_carries_the_words_of_the_template() {
        assert_eq!(
            error("{% macro m() %}{{ raise_exception('roles must\nalternate') }}{% endmacro %}{{ m() }}"),
            "the chat template refuses these messages: roles must alternate"
        );
    }

    #[test]
    fn errors_name_the_line() {
        assert!(error("a\nb\n{{ x.y.z }}").ends_with("(in chat_template:3)"));
        assert!(error("a\n{% if %}").ends_with("(in chat_template:2)"));
        assert!(error("{% nonsense %}").starts_with("the chat template can't be parsed: "));
        assert!(error("{{ [] | nonsense }}").contains("nonsense"));
    }

    #[test]
    fn templates_open_nothing() {
        for source in [
            "{% include '/etc/passwd' %}",
            "{% import '/etc/passwd' as x %}",
            "{% from '/etc/passwd' import x %}",
            "{% extends '/etc/passwd' %}",
        ] {
            assert!(matches!(render(source, &json!([])), Err(ChatError::Syntax(_))), "{source}");
        }
    }

    #[test]
    fn endless_templates_are_stopped() {
        let loops = "{% for a in range(99999) %}".repeat(3) + &"{% endfor %}".repeat(3);
        let doubling = "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(99) %}\
                        {% set n.x = n.x ~ n.x %}{% endfor %}";
        for source in [
            loops.as_str(),
            doubling,
            "{{ 'x' * 1000000000 }}",
            "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
            "{% for i in range(9999) %}{% set x = ['y' * 9999] | tojson %}{% endfor %}",
        ] {
            assert!(matches!(render(source, &json!([])), Err(ChatError::OutOfSteps(_))), "{source}");
        }
        let long = "{% set x = 'x' * 999999 %}{% for i in range(18) %}{{ x }}{% endfor %}";
        assert!(matches!(render(long, &json!([])), Err(ChatError::OutputTooLarge(_))));
        assert!(error("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}").contains("recursion"));
        let e = render(&" ".repeat(MAX_TEMPLATE + 1), &json!([]));
        assert!(matches!(e, Err(ChatError::TemplateTooLarge { .. })));
    }

    #[test]
    fn shared_lists_are_not_written_out_without_end() {
        for tail in ["{{ n.x }}", "{{ n.x | string }}", "{{ n.x | tojson }}"] {
            let source = format!(
                "{{% set n = namespace(x=['x']) %}}{{% for i in range(60) %}}\
                 {{% set n.x = [n.x, n.x] %}}{{% endfor %}}{tail}"
            );
            let result = render(&source, &json!([]));
            assert!(matches!(result, Err(ChatError::OutOfSteps(_))), "{tail}");
        }
    }

    /// On an ordinary stack several of these end the process.
    #[test]
    fn deep_nesting_is_survived() {
        let nest = format!(
            "{{% set n = namespace(x=[]) %}}{{% for i in range(99999) %}}{{% set n.x = {}n.x{} %}}",
            "[".repeat(50),
            "]".repeat(50)
        );
        let full = format!("{nest}{{% endfor %}}");
        assert!(matches!(render(&full, &json!([])), Err(ChatError::OutOfSteps(_))));
        for tail in [
            "{{ n.x }}",
            "{{ n.x | string }}",
            "{{ n.x | tojson }}",
            "{{ ('a' ~ n.x) | length }}",
            "{{ n.x == [n.x] }}",
            "{{ [n.x, n.x] | sort | length }}",
            "{{ {n.x: 1} | length }}",
            "{{ n.x | pprint }}",
        ] {
            // Deep enough to matter, with steps left for the tail.
            let source = format!("{nest}{{% if i == 4000 %}}{{% break %}}{{% endif %}}{{% endfor %}}{tail}");
            let result = render(&source, &json!([]));
            assert!(!matches!(result, Err(ChatError::OutOfSteps(_))), "{tail}");
        }
        let size = MAX_TEMPLATE / 2 - 100;
        for (open, unit, close) in [
            ("{{ 1", "+1", " }}"),
            ("{{ x", ".a", " }}"),
            ("{{ x", "|e", " }}"),
            ("{{ ", "-", "1 }}"),
            ("{{ ", "[", ""),
            ("{{ ", "(", ""),
            ("{{ 1", "if 1 else 1 ", " }}"),
            ("{{ 1", " < 1", " }}"),
            ("", "{% if 1 %}", ""),
            ("{% if 1 %}", "{% elif 1 %}", "{% endif %}"),
            ("{{ x", "[0]", " }}"),
            ("{{ x", "()", " }}"),
        ] {
            let source = format!("{open}{}{close}", unit.repeat(size * 2 / unit.len()));
            let _ = render(&source, &json!([]));
        }
    }

    #[test]
    fn key_order_and_sixty_four_bit_numbers_survive() {
        let message = json!([{"z": 18446744073709551615u64, "a": -9223372036854775808i64, "m": 1.0}]);
        assert_eq!(
            render("{{ messages[0] | tojson }}", &message).unwrap(),
            r#"{"z": 18446744073709551615, "a": -9223372036854775808, "m": 1.0}"#
        );
    }
}
