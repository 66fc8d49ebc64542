//! Replies as models give them, and every way they were seen to break.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn call(name: &str, arguments: Value) -> Call {
    Call::new(name, arguments.as_object().unwrap())
}

/// Spark's own form.
fn spark(call: &Call) -> String {
    let pairs: String = call
        .arguments
        .iter()
        .map(|(k, v)| format!("<arg_key>{k}</arg_key><arg_value>{v}</arg_value>"))
        .collect();
    format!("<tool_call>{}{pairs}</tool_call>", call.name)
}

#[track_caller]
fn reads(text: &str, calls: &[Call], recoveries: &[Recovery]) {
    let reading = read(text, false);
    assert_eq!((&reading.calls[..], &reading.recoveries[..]), (calls, recoveries), "{text}");
}

#[test]
fn the_published_form_needs_no_recovery() {
    let tap = call("tap", json!({"element": "Send [7]"}));
    let alarm = call("set_alarm", json!({"hour": 7, "minute": 30, "days": ["Mon", "Tue"], "loud": true}));
    reads(&spark(&tap), std::slice::from_ref(&tap), &[]);
    reads(&format!("on: NFC [7] switch off</think>{}", spark(&tap)), std::slice::from_ref(&tap), &[]);
    reads(&format!("I will. {}{} Done.", spark(&alarm), spark(&tap)), &[alarm, tap], &[]);
    reads("<tool_call>press_back</tool_call>", &[call("press_back", json!({}))], &[]);
    reads("Nothing has to be done: {x} [y]", &[], &[]);
    reads("", &[], &[]);
}

/// As the published model left the format on the screen where a switch's state decides.
#[test]
fn a_bracketed_name_with_open_json_is_read_and_said() {
    reads(
        "[tap]\n{\"tool\": \"tap\", \"parameters\": {\"index\": 1}",
        &[call("tap", json!({"index": 1}))],
        &[Recovery::Bracketed, Recovery::Unbalanced],
    );
    reads("[tap] {\"index\": 1} ok", &[call("tap", json!({"index": 1}))], &[Recovery::Bracketed]);
}

#[test]
fn json_is_read_alone_in_lists_in_fences_and_in_tags() {
    let tap = call("tap", json!({"index": 1}));
    let bare = r#"{"name": "tap", "arguments": {"index": 1}}"#;
    reads(bare, std::slice::from_ref(&tap), &[Recovery::BareJson]);
    reads(&format!("```json\n{bare}\n```"), std::slice::from_ref(&tap), &[Recovery::BareJson]);
    reads(&format!("[{bare}, {bare}]"), &[tap.clone(), tap.clone()], &[Recovery::BareJson]);
    reads(&format!("<tool_call>\n{bare}\n</tool_call>"), std::slice::from_ref(&tap), &[Recovery::JsonInTags]);
    reads("<tool_call>tap {\"index\": 1}</tool_call>", std::slice::from_ref(&tap), &[Recovery::JsonInTags]);
    // As OpenAI's interface has it, arguments in a string.
    let nested = r#"{"type": "function", "function": {"name": "tap", "arguments": "{\"index\": 1}"}}"#;
    reads(nested, &[tap], &[Recovery::BareJson]);
    // JSON that is no call.
    for text in [
        r#"{"name": "tap"}"#,
        r#"{"arguments": {}}"#,
        r#"{"name": "", "args": {}}"#,
        r#"{"name": 3, "args": {}}"#,
    ] {
        reads(text, &[], &[]);
    }
}

#[test]
fn broken_tags_are_read_and_said() {
    let tap = call("tap", json!({"element": "Send [7]"}));
    let one = std::slice::from_ref(&tap);
    for (text, recoveries) in [
        ("<tool_call>tap<arg_key>element</arg_key><arg_value>Send [7]</arg_value>", &[Recovery::NoEnd][..]),
        (
            "<tool_call>tap<arg_key>element</arg_key><arg_value>Send [7]",
            &[Recovery::NoEnd, Recovery::BrokenArgument],
        ),
        (
            "<tool_call>tap<arg_key>element<arg_value>Send [7]</arg_value></tool_call>",
            &[Recovery::BrokenArgument],
        ),
        (
            "<tool_call>tap<arg_key>element</arg_key><arg_value>Send [7]</arg_value><arg_key>x</arg_key></tool_call>",
            &[Recovery::BrokenArgument],
        ),
        ("tap<arg_key>element</arg_key><arg_value>Send [7]</arg_value></tool_call>", &[Recovery::NoStart]),
    ] {
        reads(text, one, recoveries);
    }
    reads("<tool_call></tool_call><tool_call> </tool_call>", &[], &[]);
}

#[test]
fn a_call_in_a_thought_is_none_and_an_open_thought_is_said() {
    let tap = spark(&call("tap", json!({"element": "a"})));
    assert_eq!(read(&format!("I could {tap} but no</think>Hello"), true), Reading::default());
    let open = read(&tap, true);
    assert_eq!((open.calls.len(), &open.recoveries[..]), (1, &[Recovery::OpenThought][..]));
    assert_eq!(read("I think and think", true), Reading::default());
    assert_eq!(read(&format!("<think>hm {tap}"), false).recoveries, [Recovery::OpenThought]);
}

#[test]
fn values_have_one_spelling() {
    let same = [json!({"a": 5}), json!({"a": 5.0}), json!({"a": "5"})];
    for other in &same {
        assert_eq!(call("t", other.clone()), call("t", same[0].clone()));
    }
    assert_eq!(
        call("t", json!({"a": {"y": 1, "x": [true, null]}})).arguments["a"],
        r#"{"x":[true,null],"y":1}"#
    );
    assert_eq!(call("t", json!({"a": "{\"y\": 1, \"x\": 2}"})).arguments["a"], r#"{"x":2,"y":1}"#);
    for (a, b) in [(json!("x"), json!("x ")), (json!(5), json!(5.5)), (json!("\"x\""), json!("x"))] {
        assert_ne!(call("t", json!({"a": a})), call("t", json!({"a": b})));
    }
    // A large integer stays what it is.
    assert_eq!(call("t", json!({"a": u64::MAX})).arguments["a"], u64::MAX.to_string());
}

#[test]
fn agreement_looks_at_tools_then_arguments() {
    let (a, b) = (call("tap", json!({"i": 1})), call("tap", json!({"i": 2})));
    let c = call("swipe", json!({"i": 1}));
    let of = |x: &[&Call], y: &[&Call]| {
        let own = |calls: &[&Call]| calls.iter().map(|c| (*c).clone()).collect::<Vec<_>>();
        Agreement::of(&own(x), &own(y))
    };
    assert_eq!(of(&[&a], &[&a]), Agreement::Same);
    assert_eq!(of(&[&a], &[&b]), Agreement::SameTool);
    assert_eq!(of(&[&a], &[&c]), Agreement::Different);
    assert_eq!(of(&[&a, &c], &[&c, &a]), Agreement::Different);
    assert_eq!(of(&[&a], &[]), Agreement::Different);
}

/// Names, keys and texts that hold no tag of their own.
fn calls() -> impl Strategy<Value = Call> {
    let argument = ("[a-z_]{1,8}", "[ a-zA-Z0-9.,:\\[\\]\u{4e00}-\u{4e20}]{0,12}");
    ("[a-z_]{1,10}", prop::collection::vec(argument, 0..4)).prop_map(|(name, arguments)| {
        let arguments = arguments.into_iter().map(|(k, v)| (k, Value::from(v))).collect();
        Call::new(&name, &arguments)
    })
}

proptest! {
    /// The three forms mirror each other.
    #[test]
    fn every_form_reads_as_the_same_call(wanted in calls()) {
        let arguments: serde_json::Map<String, Value> =
            wanted.arguments.iter().map(|(k, v)| (k.clone(), Value::from(v.as_str()))).collect();
        let one = std::slice::from_ref(&wanted);
        let spark_form = read(&spark(&wanted), false);
        prop_assert_eq!(&spark_form.calls[..], one);
        prop_assert!(spark_form.recoveries.is_empty());
        let json = json!({"name": wanted.name, "arguments": arguments}).to_string();
        prop_assert_eq!(&read(&json, false).calls[..], one);
        let bracketed = format!("[{}]\n{}", wanted.name, json!({"tool": wanted.name, "parameters": arguments}));
        // However many of the last braces are missing.
        for missing in 0..=2 {
            let cut = &bracketed[..bracketed.len() - missing];
            let reading = read(cut, false);
            prop_assert_eq!(&reading.calls[..], one, "{}", cut);
            prop_assert_eq!(reading.is_cut(), missing > 0);
        }
    }

    /// Text of any kind, and calls cut anywhere, are read without a panic; what was cut is said.
    #[test]
    fn no_text_is_too_broken(
        text in "([<>/{}\\[\\]\",:\\\\ a\u{e9}\u{4e2d}]|<tool_call>|</tool_call>|<arg_key>|</arg_key>|<arg_value>|</arg_value>|</?think>){0,40}",
        wanted in calls(),
        cut in 0usize..400,
    ) {
        read(&text, false);
        read(&text, true);
        let whole = spark(&wanted);
        let cut = (0..=cut.min(whole.len())).rev().find(|at| whole.is_char_boundary(*at)).unwrap_or(0);
        let reading = read(&whole[..cut], false);
        prop_assert!(reading.calls.len() <= 1);
        if cut < whole.len() && !reading.calls.is_empty() {
            prop_assert!(reading.is_cut());
        }
    }
}
