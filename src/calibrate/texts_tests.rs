use std::fs;

use super::*;
use crate::error::Exit;

/// The tokenizer of the bundled checkpoint.
fn tokenizer() -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/spark-tiny/tokenizer.json");
    Tokenizer::from_json(&fs::read(path).unwrap(), 4096).unwrap()
}

fn template() -> ChatTemplate {
    let source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    ChatTemplate::from_source::<&str, &str>(source, []).unwrap()
}

/// Texts of one file of that name.
fn read_one(name: &str, bytes: &[u8], template: Option<&ChatTemplate>) -> Result<Vec<Text>> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(name), bytes).unwrap();
    read(&dir.path().join(name), TextEncoder { tokenizer: &tokenizer(), template })
}

#[track_caller]
fn refused(name: &str, bytes: &[u8], expected: &[&str]) {
    let failure = read_one(name, bytes, Some(&template())).unwrap_err();
    assert_eq!(failure.exit(), Exit::Input);
    let message = failure.to_string();
    for part in expected.iter().chain([&name]) {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

#[test]
fn texts_that_say_nothing_are_refused_by_name() {
    refused("a.txt", b"", &["an empty file"]);
    refused("a.txt", b" \n\t\r\n ", &["white space"]);
    refused("a.md", "\u{feff} \n".as_bytes(), &["white space"]);
    refused("a.txt", b"one", &["at least 8 tokens"]);
    refused("a.jsonl", b"{\"text\": \"  \"}\n", &["a.jsonl:1", "white space"]);
    refused("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", &["Git LFS"]);
    refused("a.csv", b"enough text to be read as one", &[".txt, .md or .jsonl"]);
}

#[test]
fn bytes_that_are_not_utf8_are_told_with_their_offset() {
    refused("latin1.txt", b"a caf\xe9 in the rain", &["byte 0xe9 at offset 5", "UTF-8"]);
    // A character cut off at the end of the file.
    refused("cut.txt", "plain text and then \u{4e2d}".as_bytes().split_last().unwrap().1, &["offset 20"]);
}

#[test]
fn a_line_of_a_jsonl_is_a_text_or_a_chat() {
    let lines = concat!(
        "{\"text\": \"the first text of all, 1234567\", \"id\": 7}\n",
        "\n",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"hello there, 1234567\"}]}\n",
    );
    let texts = read_one("a.jsonl", lines.as_bytes(), Some(&template())).unwrap();
    let tokenizer = tokenizer();
    assert_eq!(texts.len(), 2);
    assert_eq!(texts[0].tokens, tokenizer.encode("the first text of all, 1234567").unwrap());
    assert_eq!(texts[1].tokens, tokenizer.encode_chat("user: hello there, 1234567\n").unwrap());
    assert!(texts[1].name.ends_with("a.jsonl:3"), "{}", texts[1].name);

    refused("a.jsonl", b"{\"text\": \"the first text of all, 1234567\"}\nnot json\n", &["a.jsonl:2", "JSON"]);
    for line in ["{}", "[]", "{\"text\": 1}", "{\"text\": \"a\", \"messages\": []}", "{\"messages\": \"a\"}"]
    {
        refused("a.jsonl", line.as_bytes(), &["a.jsonl:1", "either \"text\""]);
    }
    let chat = b"{\"messages\": [{\"role\": \"user\", \"content\": \"hello there, 1234567\"}]}";
    let message = read_one("a.jsonl", chat, None).unwrap_err().to_string();
    assert!(message.contains("a.jsonl:1: a chat, and the checkpoint has no chat template"), "{message}");
}

#[test]
fn a_directory_is_read_in_order_of_name() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer();
    let encoder = TextEncoder { tokenizer: &tokenizer, template: None };
    let message = read(dir.path(), encoder).unwrap_err().to_string();
    assert!(message.contains(".txt, .md or .jsonl, found none"), "{message}");
    for (name, text) in
        [("b.MD", "the text of b, 1234567"), ("a.txt", "the text of a, 1234567"), ("notes.rst", "not read")]
    {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let texts = read(dir.path(), encoder).unwrap();
    let names: Vec<_> = texts.iter().map(|t| t.name.rsplit('/').next().unwrap()).collect();
    assert_eq!(names, ["a.txt", "b.MD"]);
    assert_eq!(texts[1].tokens, tokenizer.encode("the text of b, 1234567").unwrap());
    // A byte order mark is no token.
    fs::write(dir.path().join("a.txt"), "\u{feff}the text of a, 1234567").unwrap();
    assert_eq!(read(dir.path(), encoder).unwrap()[0].tokens, texts[0].tokens);
    let missing = read(&dir.path().join("none"), encoder).unwrap_err().to_string();
    assert!(missing.contains("no such file or directory"), "{missing}");
}

#[test]
fn the_bundled_texts_are_all_there() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("calibration/texts");
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(BUNDLED.iter().map(|(name, _)| *name).collect::<Vec<_>>(), names);

    let tokenizer = tokenizer();
    let template = template();
    let (texts, notes) = bundled(TextEncoder { tokenizer: &tokenizer, template: Some(&template) }).unwrap();
    assert!(notes.is_empty() && texts.len() > 20, "{} texts", texts.len());
    let (plain, notes) = bundled(TextEncoder { tokenizer: &tokenizer, template: None }).unwrap();
    // Eight of the twenty files are chats.
    assert_eq!(plain.len(), 12);
    assert!(notes[0].contains("8 of the bundled calibration files"), "{notes:?}");
}
