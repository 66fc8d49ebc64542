//! The room against goldens of the Python libraries (`tests/oracle/tokenizer_goldens.py`).

use serde_json::Value as Json;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use super::{Chat, ChatError, ChatTemplate, Tokenizer};

const TOKENIZER: &[u8] = include_bytes!("../../fixtures/goldens/tokenizer/tokenizer.json");
const SPARK: &str = include_str!("../../fixtures/goldens/tokenizer/spark.jinja");
const DIALECT: &str = include_str!("../../fixtures/goldens/tokenizer/dialect.jinja");
const ENCODE: &str = include_str!("../../fixtures/goldens/tokenizer/encode.json");
const CHAT: &str = include_str!("../../fixtures/goldens/tokenizer/chat.json");
const EXPRESSIONS: &str = include_str!("../../fixtures/goldens/tokenizer/expressions.json");
const SPECIAL: [(&str, &str); 4] = [
    ("bos_token", "<｜start▁of▁sentence｜>"),
    ("eos_token", "<｜end▁of▁sentence｜>"),
    ("pad_token", "<｜▁pad▁｜>"),
    ("unk_token", "<unk>"),
];

fn tokenizer() -> Tokenizer {
    Tokenizer::from_json(TOKENIZER, 512).unwrap()
}

fn rows(text: &str) -> Vec<Json> {
    serde_json::from_str(text).unwrap()
}

fn ids_of(row: &Json) -> Vec<u32> {
    serde_json::from_value(row["ids"].clone()).unwrap()
}

/// Compares all rows before it complains, so that one run shows the whole picture.
fn none_of(failures: Vec<String>) {
    assert!(failures.is_empty(), "{} differ:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn ids_are_those_of_python() {
    let tok = tokenizer();
    let rows = rows(ENCODE);
    assert!(rows.len() > 150);
    let mut failures = Vec::new();
    for row in rows {
        let text = row["text"].as_str().unwrap();
        let (want, got) = (ids_of(&row), tok.encode_chat(text).unwrap());
        if got != want || tok.encode(text).unwrap() != want {
            failures.push(format!("{}: {text:?}\n  want {want:?}\n  got  {got:?}", row["name"]));
        }
    }
    none_of(failures);
}

/// The merges of a small tokenizer hide most of what the regular expressions do; this does not.
#[test]
fn pieces_are_those_of_python() {
    let tok = tokenizer();
    let pre = tok.inner.get_pre_tokenizer().unwrap();
    let mut failures = Vec::new();
    for row in rows(ENCODE) {
        let text = row["text"].as_str().unwrap();
        let mut pieces = PreTokenizedString::from(text);
        pre.pre_tokenize(&mut pieces).unwrap();
        let got: Vec<u64> = pieces
            .get_splits(OffsetReferential::Original, OffsetType::Byte)
            .iter()
            .map(|(_, (start, end), _)| (end - start) as u64)
            .collect();
        let want: Vec<u64> = serde_json::from_value(row["pieces"].clone()).unwrap();
        if got != want {
            failures.push(format!("{}: {text:?}\n  want {want:?}\n  got  {got:?}", row["name"]));
        }
    }
    none_of(failures);
}

#[test]
fn decoded_text_is_that_of_python() {
    let tok = tokenizer();
    let mut failures = Vec::new();
    for row in rows(ENCODE) {
        let ids = ids_of(&row);
        let text = row["text"].as_str().unwrap();
        for (key, got) in [("decoded", tok.decode(&ids)), ("skipped", tok.decode_skip_special(&ids))] {
            let want = row.get(key).map_or(text, |t| t.as_str().unwrap());
            let got = got.unwrap();
            if got != want {
                failures.push(format!("{} {key}\n  want {want:?}\n  got  {got:?}", row["name"]));
            }
        }
    }
    none_of(failures);
}

#[test]
fn streamed_text_is_the_decoded_text() {
    let tok = tokenizer();
    for row in rows(ENCODE) {
        let ids = ids_of(&row);
        for skip in [false, true] {
            let mut stream = tok.decode_stream(skip);
            let mut text = String::new();
            for &id in &ids {
                let piece = stream.push(id).unwrap();
                assert!(!piece.ends_with('\u{fffd}'), "{}", row["name"]);
                text += &piece;
            }
            text += &stream.finish().unwrap();
            assert_eq!(text, tok.decode_with(&ids, skip).unwrap(), "{}", row["name"]);
        }
    }
}

/// Ids as a broken model could give them: cut-off characters, lone bytes, special tokens between.
#[test]
fn streams_of_any_ids_are_the_decoded_text() {
    let tok = tokenizer();
    let mut state = 1u64;
    for round in 0..400 {
        let ids: Vec<u32> = (0..1 + round % 60)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) as u32 % tok.vocab_size()
            })
            .collect();
        for skip in [false, true] {
            let mut stream = tok.decode_stream(skip);
            let mut text: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
            text += &stream.finish().unwrap();
            assert_eq!(text, tok.decode_with(&ids, skip).unwrap(), "{ids:?}");
        }
    }
}

#[test]
fn a_stream_waits_for_the_rest_of_a_character() {
    let tok = tokenizer();
    let ids = tok.encode("a👍b").unwrap();
    assert_eq!(ids.len(), 6);
    let mut stream = tok.decode_stream(false);
    let pieces: Vec<_> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    assert_eq!(pieces, ["a", "", "", "", "👍", "b"]);
    assert_eq!(stream.finish().unwrap(), "");

    let mut stream = tok.decode_stream(false);
    let pieces: Vec<_> = ids[..3].iter().map(|&id| stream.push(id).unwrap()).collect();
    assert_eq!(pieces, ["a", "", ""]);
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
    assert_eq!(tok.decode_stream(true).finish().unwrap(), "");
}

#[test]
fn added_tokens_are_found_by_content() {
    let tok = tokenizer();
    assert_eq!(tok.token_id("<｜start▁of▁sentence｜>"), Some(0));
    let call = tok.token_id("<tool_call>").unwrap();
    assert_eq!(tok.token(call).as_deref(), Some("<tool_call>"));
    assert_eq!(tok.encode("a<tool_call>b").unwrap()[1], call);
    assert_eq!(tok.token_id("<no such token>"), None);
    assert_eq!(tok.encode("\u{6}").unwrap(), [tok.token_id("<unk>").unwrap()]);
}

fn render(template: &ChatTemplate, row: &Json) -> Result<String, ChatError> {
    template.render(&Chat {
        messages: row["messages"].as_array().unwrap(),
        tools: row.get("tools").map(|t| t.as_array().unwrap().as_slice()),
        add_generation_prompt: row.get("add_generation_prompt").is_some_and(|b| b == true),
        enable_thinking: row.get("enable_thinking").map(|b| b == true),
    })
}

#[test]
fn prompts_are_those_of_python() {
    let tok = tokenizer();
    let spark = ChatTemplate::from_source(SPARK, SPECIAL).unwrap();
    let dialect = ChatTemplate::from_source(DIALECT, SPECIAL).unwrap();
    let rows = rows(CHAT);
    assert!(rows.len() > 30);
    let mut failures = Vec::new();
    for row in rows {
        let template = if row["template"] == "spark" { &spark } else { &dialect };
        let want = row["rendered"].as_str().unwrap();
        match render(template, &row) {
            Ok(got) if got == want => {}
            got => failures.push(format!("{}\n  want {want:?}\n  got  {got:?}", row["name"])),
        }
        if row.get("ids").is_some() {
            assert_eq!(tok.encode_chat(want).unwrap(), ids_of(&row), "{}", row["name"]);
        }
    }
    none_of(failures);
}

#[test]
fn values_print_as_in_python() {
    let mut failures = Vec::new();
    let mut compared = 0;
    for row in rows(EXPRESSIONS) {
        let source = row["template"].as_str().unwrap();
        let template = ChatTemplate::from_source(source, SPECIAL);
        let values = row["values"].as_array().unwrap();
        for (value, want) in values.iter().zip(row["printed"].as_array().unwrap()) {
            let chat = Chat { messages: std::slice::from_ref(value), ..Chat::default() };
            let got = template.as_ref().map_err(ToString::to_string);
            let got = got.and_then(|t| t.render(&chat).map_err(|e| e.to_string()));
            compared += 1;
            if got.as_deref().ok() != want.as_str() {
                failures.push(format!("{source:?} of {value}\n  want {want}\n  got  {got:?}"));
            }
        }
    }
    assert!(compared > 700, "{compared}");
    none_of(failures);
}
