//! The report of `verify`: one source, five forms.

use std::fs;

use serde_json::{Value, json};
use spark_convert::report::document::Content;
use spark_convert::report::{Report, document, html, junit, markdown, text};

use crate::runs::{Model, run};

/// Two artifacts of a checkpoint, in `out` and `out-rtn`.
fn two() -> Model {
    let model = Model::tiny();
    model.quantize(&[]).expect(0);
    let root = model.root.path();
    let args = ["quantize", "model", "--scheme", "w4a8", "--method", "rtn", "--group-size", "32"];
    run(root, args.iter().chain(&["--out", "out-rtn"])).expect(0);
    model
}

const VERIFY: [&str; 5] = ["verify", "out", "out-rtn", "--reference", "model"];

#[test]
fn every_form_says_the_same() {
    let model = two();
    let root = model.root.path();
    // A bar that one of them misses, so that there is a failure to be told.
    let bars = ["--min-greedy", "0", "--min-snr-db", "0", "--max-kld", "1e-2"];
    let more = ["--scenario", "code", "--scenario", "window+1", "--report", "rep", "--junit", "verify.xml"];
    let shown = run(root, VERIFY.iter().chain(&bars).chain(&more)).expect(1);
    let read = |name: &str| fs::read_to_string(root.join(name)).unwrap();
    let report: Report = serde_json::from_str(&read("rep/report.json")).unwrap();
    let document = document(&report);
    // The JSON holds all that is shown anywhere.
    assert_eq!(shown.stdout, text(&document) + "\n");
    assert_eq!(read("rep/report.md"), markdown(&document));
    assert_eq!(read("rep/report.html"), html(&document));
    assert_eq!(read("verify.xml"), junit(&report));
    assert_eq!(serde_json::from_str::<Value>(&report.json().unwrap()).unwrap()["passed"], false);
    assert_eq!(fs::read_dir(root.join("rep")).unwrap().count(), 3);

    // And every cell is in every form that is meant to have it.
    let plain = |markdown: String| markdown.replace('\\', "");
    let (md, page) = (plain(read("rep/report.md")), unescaped(&read("rep/report.html")));
    let (mut cells, mut figures) = (0, 0);
    for block in &document.blocks {
        let mut words: Vec<String> = Vec::new();
        match &block.content {
            Content::Table(table) => {
                words.extend(table.rows.iter().flat_map(|r| r.cells.clone()).chain(table.header.clone()));
            }
            Content::Lines(lines) => words.extend(lines.iter().map(|l| l.text.clone())),
            Content::Heading { text, .. } | Content::Paragraph(text) => words.push(text.clone()),
            Content::Figure(_) => figures += 1,
        }
        for word in words {
            assert!(md.contains(&word), "{word:?} in Markdown");
            assert!(page.contains(&word), "{word:?} in HTML");
            assert!(block.detail || shown.stdout.contains(&word), "{word:?} on screen");
            cells += 1;
        }
    }
    // Size against fidelity, and of each artifact the spread, the partings and the layers.
    assert_eq!(figures, 7);
    assert_eq!(page.matches("<svg ").count(), figures);
    assert!(cells > 200, "{cells}");
}

fn unescaped(html: &str) -> String {
    html.replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", "\"")
        .replace("&#39;", "'")
        .replace("&amp;", "&")
}

#[test]
fn the_page_needs_nothing_else() {
    let model = two();
    let root = model.root.path();
    let more = [
        "--scenario",
        "code",
        "--min-greedy",
        "0",
        "--max-kld",
        "10",
        "--min-snr-db",
        "0",
        "--report",
        "rep",
        "-q",
    ];
    run(root, VERIFY.iter().chain(&more)).expect(0);
    let page = fs::read_to_string(root.join("rep/report.html")).unwrap();
    for word in ["http", "src=", "<script", "<link", "url(", "@import"] {
        assert!(!page.contains(word), "{word}");
    }
    assert!(page.contains("prefers-color-scheme:dark") && page.contains("width=device-width"));
    well_nested(&page, &["meta"]);
    assert!(!page.contains("NaN") && !page.contains("\"inf"), "a coordinate is no number");
    // A report may be replaced, anything else not.
    run(root, VERIFY.iter().chain(&more)).expect(0);
    fs::create_dir(root.join("mine")).unwrap();
    fs::write(root.join("mine/notes"), "x").unwrap();
    for args in [["--report", "mine"], ["--report", "/"], ["--junit", "no/x.xml"], ["--junit", "mine"]] {
        run(root, VERIFY.iter().chain(&["--scenario", "none"]).chain(&args)).expect(2);
    }
    assert_eq!(fs::read_dir(root.join("mine")).unwrap().count(), 1);
}

/// Every element is closed in the order it was opened.
#[track_caller]
fn well_nested(text: &str, void: &[&str]) {
    let mut open: Vec<&str> = Vec::new();
    for tag in text.split('<').skip(1).map(|rest| rest.split('>').next().unwrap()) {
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        if tag.starts_with(['!', '?']) || tag.ends_with('/') || void.contains(&name) {
            continue;
        }
        match tag.starts_with('/') {
            true => assert_eq!(open.pop(), Some(name)),
            false => open.push(name),
        }
    }
    assert_eq!(open, [""; 0]);
}

#[test]
fn artifacts_are_compared_and_the_best_marked() {
    let model = two();
    let root = model.root.path();
    // The same bytes once more: equal ones are both best.
    fs::create_dir(root.join("again")).unwrap();
    for entry in fs::read_dir(root.join("out")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, root.join("again").join(path.file_name().unwrap())).unwrap();
    }
    let args = ["--scenario", "code", "--min-greedy", "0", "--max-kld", "10", "--min-snr-db", "0"];
    let all = VERIFY.iter().chain(&["again"]).chain(&args);
    let report = run(root, all.clone().chain(&["--json"])).expect(0).json();
    let rows = report["comparison"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    let figure = |i: usize, key: &str| rows[i][key].as_f64().unwrap();
    for (i, row) in rows.iter().enumerate() {
        let total = &report["artifacts"][i]["behaviour"]["total"];
        assert_eq!((&row["kl_mean"], &row["same_top"]), (&total["kl"]["mean"], &total["same_top"]));
        let beaten = (0..3).any(|j| {
            let (a, b) = (figure(j, "bytes_per_token"), figure(i, "bytes_per_token"));
            let (k, l) = (figure(j, "kl_mean"), figure(i, "kl_mean"));
            a <= b && k <= l && (a < b || k < l)
        });
        assert_eq!(row["pareto"], !beaten);
    }
    assert_eq!(rows[0]["pareto"], true, "w8a8 is the closest");
    assert_eq!((&rows[0]["kl_mean"], &rows[0]["pareto"]), (&rows[2]["kl_mean"], &rows[2]["pareto"]));
    // Bytes are those that inspect counts.
    let inspected = run(root, ["inspect", "out", "--json"]).expect(0).json();
    assert_eq!(rows[0]["bytes_per_token"], inspected["sizes"]["bytes_per_token"]);
    assert_eq!(rows[0]["tensor_bytes"], inspected["sizes"]["tensor_bytes"]);
    let shown = run(root, all).expect(0).stdout;
    assert!(shown.starts_with("Artifacts side by side\n"), "{shown}");
}

#[test]
fn junit_has_a_case_for_every_gate_and_every_question() {
    let model = two();
    let root = model.root.path();
    fs::write(root.join("out/tokenizer.json"), "{}").unwrap();
    let more = ["--scenario", "none", "--min-weight-snr-db", "100", "--junit", "verify.xml"];
    run(root, VERIFY.iter().chain(&more)).expect(1);
    let xml = fs::read_to_string(root.join("verify.xml")).unwrap();
    well_nested(&xml, &[]);
    // Four questions and one gate, of two artifacts; a gate fails in both, the bytes of one.
    assert_eq!((xml.matches("<testcase ").count(), xml.matches("<failure ").count()), (10, 3), "{xml}");
    assert!(xml.contains("testsuite name=\"out\" tests=\"5\" failures=\"2\""), "{xml}");
    assert!(xml.contains("name=\"gate weight_snr_db\"") && xml.contains("tokenizer.json"), "{xml}");
}

#[test]
fn the_json_on_screen_is_the_report() {
    let model = two();
    let root = model.root.path();
    let more = ["--scenario", "none", "--report", "rep", "--json"];
    let shown = run(root, VERIFY.iter().chain(&more)).expect(0);
    assert_eq!(shown.stdout, fs::read_to_string(root.join("rep/report.json")).unwrap());
    let json = shown.json();
    assert_eq!((&json["schema_version"], &json["passed"]), (&json!(2), &json!(true)));
    assert_eq!(json["artifacts"][1]["scheme"], "w4a8");
}
