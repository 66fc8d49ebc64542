//! Bars, where they come from, and what passes them.

use super::*;
use crate::metrics::{Comparison, Position};

fn bar(metric: Metric, scenario: Option<&str>, bar: f64) -> Bar {
    Bar { metric, scenario: scenario.map(str::to_owned), bar, asked: true }
}

fn summary(positions: usize) -> Summary {
    let mut comparison = Comparison::default();
    for _ in 0..positions {
        comparison.add(Position::before(&[1.0, 2.0], &[1.0, 1.5], Some(1)));
    }
    comparison.summary(2)
}

fn behaviour(positions: usize) -> Behaviour {
    let mut greedy = Greedy::start();
    greedy.add(&[1.0, 2.0], &[1.0, 1.5]);
    Behaviour {
        scenarios: Vec::new(),
        total: summary(positions),
        greedy,
        greedy_share: greedy.share(),
        floor_total: summary(0),
        floor_greedy: Greedy::start(),
        actions: None,
        layers: None,
        kl_histogram: Comparison::default().kl_histogram(),
        floor_kl_histogram: Comparison::default().kl_histogram(),
        seconds: 0.0,
    }
}

fn file(text: &str) -> Result<GateFile, String> {
    GateFile::parse("gates.toml", text).map_err(|e| e.to_string())
}

#[test]
fn the_command_line_wins_over_the_scheme_and_the_scheme_over_all() {
    let file = file(
        "max_kld = 0.05\nmin_greedy = 0\n[scenario.long]\nmin_greedy = 0.5\n[scheme.w8a8]\nmax_kld = 0.01\n\
         [scheme.w8a8.scenario.long]\nmin_greedy = 0.75",
    )
    .unwrap();
    assert_eq!(
        file.bars("w4a8"),
        [
            bar(Metric::Kld, None, 0.05),
            bar(Metric::Greedy, None, 0.0),
            bar(Metric::Greedy, Some("long"), 0.5)
        ]
    );
    let mut bars = default_bars(Gates {
        min_weight_snr_db: 1.0,
        min_snr_db: 2.0,
        max_kld: 3.0,
        min_greedy: 0.25,
        min_actions: 0.5,
    });
    overlay(&mut bars, &file.bars("w8a8"));
    overlay(&mut bars, &[bar(Metric::Kld, None, 0.02)]);
    let found: Vec<_> = bars.iter().map(|b| (b.metric, b.scenario.as_deref(), b.bar, b.asked)).collect();
    assert_eq!(
        found,
        [
            (Metric::WeightSnrDb, None, 1.0, false),
            (Metric::SnrDb, None, 2.0, false),
            (Metric::Kld, None, 0.02, true),
            (Metric::Greedy, None, 0.0, true),
            (Metric::Actions, None, 0.5, false),
            (Metric::Greedy, Some("long"), 0.75, true),
        ]
    );
}

#[test]
fn mistakes_in_a_file_are_told_in_one_line() {
    for (text, words) in [
        ("", &["no gate"][..]),
        ("[scheme.w8a8]", &["no gate"]),
        ("max_kld = ", &["line 1", "TOML"]),
        ("max_kld = 1\n\nmin_greedy = x", &["line 3"]),
        ("max_kl = 1", &["max_kl:", "max_kld"]),
        ("max_kld = -1", &["max_kld", "nats", "-1"]),
        ("min_greedy = 2", &["from 0 to 1", "2"]),
        ("min_snr_db = nan", &["decibels", "NaN"]),
        ("max_kld = \"1\"", &["a number", "string"]),
        ("max_perplexity_ratio = 0.5", &["from 1 on"]),
        ("scheme = 3", &["scheme", "integer"]),
        ("[scheme]\nw8a8 = 3", &["scheme.w8a8", "a table"]),
        ("[scheme.w9]\nmax_kld = 1", &["scheme.w9", "w4a16"]),
        ("[scenario.long]\nmin_weight_snr_db = 3", &["scenario.long.min_weight_snr_db", "another key"]),
        ("[scenario.long.scenario.x]\nmax_kld = 3", &["scenario.long.scenario"]),
    ] {
        let error = file(text).unwrap_err();
        for word in words {
            assert!(error.contains(word), "{word:?} in {error}");
        }
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn what_is_asked_for_and_missing_has_failed() {
    let all: Vec<Bar> = Metric::ALL
        .into_iter()
        .map(|metric| Bar {
            metric,
            scenario: None,
            bar: if metric.at_most() { 1e9 } else { 0.0 },
            asked: true,
        })
        .collect();
    // Not run, run on nothing that could be compared, and run.
    for (behaviour, passed) in
        [(None, vec![]), (Some(behaviour(0)), vec![]), (Some(behaviour(3)), vec![2, 3, 4, 5, 6, 7])]
    {
        let gates = judge(&all, &[], behaviour.as_ref());
        assert_eq!(gates.len(), all.len());
        for (i, gate) in gates.iter().enumerate() {
            assert_eq!(gate.passed, passed.contains(&i), "{gate:?}");
            assert_eq!(gate.reason.is_some(), !gate.passed, "{gate:?}");
        }
    }
    // The scheme's own bars are left out where nothing was run.
    let own: Vec<Bar> = all.iter().cloned().map(|bar| Bar { asked: false, ..bar }).collect();
    assert_eq!(judge(&own, &[], None).len(), 1);
    let missing = judge(&[bar(Metric::Kld, Some("long"), 1.0)], &[], Some(&behaviour(3)));
    assert_eq!(missing[0].reason.as_deref(), Some("the scenario was not run"));
}

#[test]
fn bars_are_passed_from_the_right_side() {
    let kl = summary(3).kl.mean;
    for (metric, at, passed) in [
        (Metric::Kld, kl, true),
        (Metric::Kld, kl * 0.99, false),
        (Metric::SameTop, 1.0, true),
        (Metric::Greedy, 1.0, true),
        (Metric::SnrDb, 50.0, false),
    ] {
        assert_eq!(judge(&[bar(metric, None, at)], &[], Some(&behaviour(3)))[0].passed, passed, "{metric:?}");
    }
    let module = |snr_db| ModuleSnr { module: "m".into(), snr_db, zero_rows: 0 };
    let weight =
        |modules: &[ModuleSnr]| judge(&[bar(Metric::WeightSnrDb, None, 20.0)], modules, None)[0].passed;
    assert!(weight(&[module(None), module(Some(20.0))]) && weight(&[module(None)]));
    assert!(!weight(&[module(Some(30.0)), module(Some(19.9))]));
    assert!(!weight(&[module(Some(f64::NAN))]));
}

/// A share of few calls is luck: the scheme's own bar waits for ten of them, the user's does not.
#[test]
fn the_schemes_bar_on_tool_calls_counts_from_ten_on() {
    let with = |same, of| Behaviour {
        actions: Some(ActionTally {
            same,
            same_tool: same,
            of,
            recovered: 0,
            reference_right: 0,
            artifact_right: 0,
            known: 0,
        }),
        ..behaviour(3)
    };
    let own = Bar { asked: false, ..bar(Metric::Actions, None, 0.5) };
    let passed = |bar: &Bar, b: &Behaviour| {
        judge(std::slice::from_ref(bar), &[], Some(b)).into_iter().map(|g| g.passed).collect::<Vec<_>>()
    };
    assert_eq!(passed(&own, &with(0, 9)), [false; 0]);
    assert_eq!(passed(&own, &with(4, 10)), [false]);
    assert_eq!(passed(&own, &with(5, 10)), [true]);
    assert_eq!(passed(&own, &behaviour(3)), [false; 0]);
    assert_eq!(passed(&bar(Metric::Actions, None, 0.5), &with(0, 1)), [false]);
    assert_eq!(passed(&bar(Metric::Actions, None, 0.5), &behaviour(3)), [false]);
}
