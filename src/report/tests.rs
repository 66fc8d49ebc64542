//! Names and texts of anybody's making, in every form.

use super::*;
use crate::gates::Metric;
use crate::verify::Check;

fn report(name: &str) -> Report {
    let mut verdict = Verdict::new(PathBuf::from(name));
    verdict.scheme = Some(name.to_owned());
    verdict.findings.push(Finding {
        check: Check::Contract,
        file: name.to_owned(),
        subject: None,
        what: name.to_owned(),
        consequence: None,
    });
    verdict.gates.push(Gate {
        name: Metric::Kld,
        scenario: Some(name.to_owned()),
        at_most: true,
        bar: 0.5,
        measured: None,
        passed: false,
        reason: Some(name.to_owned()),
    });
    let sizes = SizesOnDisk { tensor_bytes: 1, bytes_per_token: 1 };
    Report::new(ReferenceModel { path: PathBuf::from(name), sizes }, vec![name.to_owned()], vec![verdict])
}

#[test]
fn hostile_names_stay_text() {
    let name = "a<script>\"'&|*_]]>\u{1b}[31m";
    let report = report(name);
    let document = document(&report);
    for form in [html(&document), junit(&report)] {
        assert!(!form.contains("<script>") && !form.contains('\u{1b}'), "{form}");
        assert!(form.contains("&lt;script&gt;&quot;&#39;&amp;|*_]]&gt;"), "{form}");
    }
    let markdown = markdown(&document);
    assert!(
        markdown.contains("a\\<script\\>\"'&\\|\\*\\_\\]\\]\\>") && !markdown.contains('\u{1b}'),
        "{markdown}"
    );
}

#[test]
fn a_report_comes_back_from_its_json() {
    let report = report("x");
    let back: Report = serde_json::from_str(&report.json().unwrap()).unwrap();
    assert_eq!(document(&back), document(&report));
    assert!(!back.passed);
}
