//! From a report to a document: which figures stand where, and how they are spelled.

use super::document::{Chart, Content, Document, Figure, Line, Prefix, Row, Table};
use super::figures;
use super::junit::gate_text;
use super::{Contestant, Report, SizesOnDisk, Verdict};
use crate::actions::{Call, Recovery};
use crate::error::one_line;
use crate::metrics::{Greedy, Mean, Summary, TIE_NATS};
use crate::table::{bytes, decibels};
use crate::verify::{ActionReport, ActionTally, Behaviour, Layers, PromptReport, Said, layer_kind};

/// Modules and prompts that a terminal is shown.
const WORST: usize = 10;

/// Characters of a call that are shown; the JSON has all of it.
const LONGEST_CALL: usize = 48;

/// The document of a report.
pub fn document(report: &Report) -> Document {
    let failed = report.artifacts.iter().filter(|v| !v.passed).count();
    let title = match (report.passed, report.artifacts.len()) {
        (true, 1) => "verify: passed".to_owned(),
        (true, n) => format!("verify: all {n} artifacts passed"),
        (false, 1) => "verify: failed".to_owned(),
        (false, n) => format!("verify: {failed} of {n} artifacts failed"),
    };
    let mut document = Document { passed: report.passed, title, blocks: Vec::new() };
    document.detail(Content::Paragraph(format!(
        "Compared with {} in f32: {}.",
        report.reference.path.display(),
        sizes(report.reference.sizes)
    )));
    if !report.skipped_scenarios.is_empty() {
        document.detail(Content::Paragraph(format!(
            "Skipped, since the checkpoint has no chat template: {}.",
            report.skipped_scenarios.join(", ")
        )));
    }
    side_by_side(&mut document, report);
    for verdict in &report.artifacts {
        artifact(&mut document, verdict);
    }
    document
}

fn side_by_side(document: &mut Document, report: &Report) {
    if report.comparison.is_empty() {
        return;
    }
    let several = report.comparison.len() > 1;
    let rows = report.comparison.iter().map(contestant).collect();
    let header = [
        "artifact",
        "scheme",
        "on disk",
        "per token",
        "KL mean",
        "same top",
        "greedy",
        "actions",
        "time",
        "verdict",
    ];
    let table = Content::Table(Table {
        caption: "Side by side".to_owned(),
        header: header.map(str::to_owned).to_vec(),
        rows,
    });
    let heading = Content::Heading { level: 2, text: "Artifacts side by side".to_owned() };
    let note = Content::Paragraph(
        "* no other one reads at most as many bytes per token and diverges at most as far".to_owned(),
    );
    if several {
        document.push(heading);
        document.push(table);
        document.push(note);
    } else {
        document.detail(heading);
        document.detail(table);
    }
    if let Some(plane) = figures::sizes_and_fidelity(report) {
        document.detail(Content::Figure(plane));
    }
}

fn contestant(c: &Contestant) -> Row {
    Row::new(vec![
        c.artifact.clone(),
        c.scheme.clone().unwrap_or_default(),
        bytes(c.tensor_bytes),
        bytes(c.bytes_per_token),
        with_error(c.kl_mean, c.kl_sem, 5),
        percent(c.same_top, None),
        percent(c.greedy_share, None),
        c.actions.map_or_else(|| "-".to_owned(), |[same, of]| format!("{same}/{of}")),
        format!("{:.1} s", c.seconds),
        if c.passed { "passed" } else { "failed" }.to_owned(),
    ])
    .marked(c.pareto)
}

fn artifact(document: &mut Document, verdict: &Verdict) {
    let scheme = verdict.scheme.as_deref().unwrap_or("unknown scheme");
    document.push(Content::Heading { level: 2, text: format!("{}  {scheme}", verdict.artifact.display()) });
    for note in &verdict.notes {
        document.push(Content::Paragraph(note.clone()));
    }
    if let Some(own) = verdict.sizes {
        document.detail(Content::Paragraph(format!("{}.", sizes(own))));
    }
    modules(document, verdict);
    if let Some(behaviour) = &verdict.behaviour {
        says(document, behaviour);
    }
    if let Some(export) = &verdict.export {
        super::export::steps(document, export);
    }
    let mut lines: Vec<Line> =
        verdict.findings.iter().map(|f| Line { passed: false, text: f.to_string() }).collect();
    lines.extend(verdict.gates.iter().map(|g| Line { passed: g.passed, text: gate_text(g) }));
    let word = if verdict.passed { "passed" } else { "failed" };
    lines.push(Line { passed: verdict.passed, text: word.to_owned() });
    document.push(Content::Lines(lines));
    other_modules(document, verdict);
}

fn modules(document: &mut Document, verdict: &Verdict) {
    let rows = by_weight_snr(verdict);
    if rows.is_empty() {
        return;
    }
    let shown = WORST.min(rows.len());
    let caption = format!("weight SNR, lowest {shown} of {} modules", rows.len());
    document.push(Content::Heading { level: 3, text: caption });
    document.push(Content::Table(Table { rows: rows[..shown].to_vec(), ..Table::default() }));
    let zero_rows: usize = verdict.modules.iter().map(|m| m.zero_rows).sum();
    if zero_rows > 0 {
        document.push(Content::Paragraph(format!("{zero_rows} rows are all zero in the source")));
    }
}

/// What is left of the modules, at the end of an artifact's part.
fn other_modules(document: &mut Document, verdict: &Verdict) {
    let rows = by_weight_snr(verdict);
    if rows.len() > WORST {
        document.detail(Content::Table(Table {
            caption: "The other modules".to_owned(),
            header: vec!["module".to_owned(), "weight SNR".to_owned()],
            rows: rows[WORST..].to_vec(),
        }));
    }
}

/// The modules, the worst first.
fn by_weight_snr(verdict: &Verdict) -> Vec<Row> {
    let mut worst: Vec<_> = verdict.modules.iter().collect();
    worst.sort_by(|a, b| a.snr_db.unwrap_or(f64::INFINITY).total_cmp(&b.snr_db.unwrap_or(f64::INFINITY)));
    worst.iter().map(|m| Row::new(vec![m.module.clone(), decibels(m.snr_db)])).collect()
}

fn says(document: &mut Document, behaviour: &Behaviour) {
    let mut short = Vec::new();
    let mut long = Vec::new();
    for s in &behaviour.scenarios {
        let tokens = s.prompt_tokens.to_string();
        short.push(Row::new(short_cells(&s.scenario, &tokens, &s.artifact, &s.greedy, s.actions)));
        short.push(Row::new(short_cells("bf16 floor", &tokens, &s.floor, &s.floor_greedy, None)).muted());
        long.push(Row::new(long_cells(&s.scenario, &s.artifact)));
        long.push(Row::new(long_cells("bf16 floor", &s.floor)).muted());
    }
    let prompts: usize = behaviour.scenarios.iter().map(|s| s.prompt_tokens).sum();
    let tokens = prompts.to_string();
    let mut total = short_cells("total", &tokens, &behaviour.total, &behaviour.greedy, behaviour.actions);
    let mut floor = short_cells("bf16 floor", &tokens, &behaviour.floor_total, &behaviour.floor_greedy, None);
    // Where the first of all prompts parts says nothing about all of them.
    for cells in [&mut total, &mut floor] {
        cells.pop();
    }
    short.push(Row::new(total));
    short.push(Row::new(floor).muted());
    long.push(Row::new(long_cells("total", &behaviour.total)));
    long.push(Row::new(long_cells("bf16 floor", &behaviour.floor_total)).muted());
    let header = [
        "scenario",
        "tokens",
        "logits SNR",
        "KL mean",
        "99.9 %",
        "same top",
        "greedy",
        "actions",
        "first divergence",
    ];
    document.detail(Content::Heading { level: 3, text: "What it says, against f32".to_owned() });
    document.push(Content::Table(Table {
        caption: "KL in nats per token, with the standard error of the mean; greedy: tokens of the f32 \
                  continuation that the artifact chooses as well"
            .to_owned(),
        header: header.map(str::to_owned).to_vec(),
        rows: short,
    }));
    let header = [
        "scenario",
        "positions",
        "KL median",
        "99 %",
        "max",
        "top-20",
        "max dlogp",
        "perplexity f32",
        "artifact",
        "ln ratio",
    ];
    document.detail(Content::Table(Table {
        caption: "Tails, top 20, and perplexity on the prompts".to_owned(),
        header: header.map(str::to_owned).to_vec(),
        rows: long,
    }));
    document.detail(Content::Figure(figures::divergence_spread(behaviour)));
    prompts_one_by_one(document, behaviour);
    if let Some(layers) = &behaviour.layers {
        by_layer(document, layers);
    }
}

fn short_cells(
    name: &str,
    tokens: &str,
    s: &Summary,
    greedy: &Greedy,
    actions: Option<ActionTally>,
) -> Vec<String> {
    vec![
        name.to_owned(),
        tokens.to_owned(),
        decibels(s.logits_snr_db),
        with_error(s.kl.mean, s.kl.sem, 5),
        format!("{:.4}", s.kl.p999),
        percent(s.same_top, s.same_top_sem),
        format!("{}/{}", greedy.matched, greedy.of),
        actions.map_or_else(|| "-".to_owned(), |a| format!("{}/{}", a.same, a.of)),
        parting(greedy),
    ]
}

fn long_cells(name: &str, s: &Summary) -> Vec<String> {
    let mut cells = vec![
        name.to_owned(),
        s.positions.to_string(),
        format!("{:.5}", s.kl.median),
        format!("{:.4}", s.kl.p99),
        format!("{:.4}", s.kl.max),
        percent(s.top20_overlap, s.top20_overlap_sem),
        format!("{:.3}", s.max_logprob_diff),
    ];
    if let Some(p) = s.perplexity {
        let Mean { mean, sem } = p.ln_ratio;
        cells.extend([format!("{:.3}", p.reference), format!("{:.3}", p.other), with_error(mean, sem, 4)]);
    }
    cells
}

/// Where and how decidedly a continuation leaves the reference's.
fn parting(greedy: &Greedy) -> String {
    greedy.divergence.map_or_else(
        || "-".to_owned(),
        |d| format!("token {}, margin {:.3}{}", d.index, d.margin_nats, if d.tie { " (tie)" } else { "" }),
    )
}

fn prompts_one_by_one(document: &mut Document, behaviour: &Behaviour) {
    let prompts: Vec<&PromptReport> = behaviour.scenarios.iter().flat_map(|s| &s.prompts).collect();
    let bar = |p: &&PromptReport| Prefix {
        name: p.prompt.clone(),
        matched: p.greedy.matched,
        of: p.greedy.of,
        parting: p.greedy.divergence.map(|d| (d.tie, format!("{:.3}", d.margin_nats))),
    };
    document.detail(Content::Figure(Figure {
        caption: format!(
            "How far each greedy continuation goes along with that of f32, and the margin in nats with which \
             f32 chose the first token that differs; at most {TIE_NATS} is a tie"
        ),
        chart: Chart::Prefixes(prompts.iter().map(bar).collect()),
    }));
    let rows = prompts.iter().map(|p| {
        Row::new(vec![
            p.prompt.clone(),
            p.prompt_tokens.to_string(),
            format!("{}/{}", p.greedy.matched, p.greedy.of),
            parting(&p.greedy),
        ])
    });
    document.detail(Content::Table(Table {
        caption: "Prompt by prompt".to_owned(),
        header: ["prompt", "tokens", "greedy", "first divergence"].map(str::to_owned).to_vec(),
        rows: rows.collect(),
    }));
    let actions: Vec<(&str, &ActionReport)> =
        prompts.iter().filter_map(|p| Some((p.prompt.as_str(), p.action.as_ref()?))).collect();
    let header =
        ["prompt", "f32 wants", "artifact wants", "that is", "read with"].map(str::to_owned).to_vec();
    let counted = actions.iter().filter(|(_, a)| a.agreement.is_some());
    let rows: Vec<Row> = counted.map(|(prompt, a)| action_row(prompt, a)).collect();
    if rows.is_empty() {
        return;
    }
    let differing: Vec<Row> = actions
        .iter()
        .filter(|(_, a)| a.agreement.is_some() && a.reference.reading.calls != a.artifact.reading.calls)
        .map(|(prompt, a)| action_row(prompt, a))
        .take(WORST)
        .collect();
    if !differing.is_empty() {
        let (caption, header) = ("Actions that differ from those of f32".to_owned(), header.clone());
        document.push(Content::Heading { level: 3, text: caption.to_lowercase() });
        document.push(Content::Table(Table { caption, header, rows: differing }));
    }
    document.detail(Content::Table(Table { caption: "All actions".to_owned(), header, rows }));
    if let Some(tally) = behaviour.actions.filter(|t| t.known > 0) {
        document.detail(Content::Paragraph(format!(
            "Of {} prompts whose right action is known, f32 gets {} right and the artifact {}.",
            tally.known, tally.reference_right, tally.artifact_right
        )));
    }
}

fn action_row(prompt: &str, action: &ActionReport) -> Row {
    let recoveries: Vec<String> =
        action.artifact.reading.recoveries.iter().map(Recovery::to_string).collect();
    Row::new(vec![
        prompt.to_owned(),
        wants(&action.reference),
        wants(&action.artifact),
        action.agreement.map_or("", |a| a.name()).to_owned(),
        recoveries.join(", "),
    ])
}

fn wants(said: &Said) -> String {
    match said.reading.calls.as_slice() {
        [] => "nothing".to_owned(),
        calls => {
            let calls = one_line(&calls.iter().map(Call::to_string).collect::<Vec<_>>().join("; "));
            match calls.char_indices().nth(LONGEST_CALL) {
                Some((at, _)) => format!("{}…", &calls[..at]),
                None => calls,
            }
        }
    }
}

fn by_layer(document: &mut Document, layers: &Layers) {
    let mut kinds: Vec<&str> = layers.layers.iter().map(|l| l.kind.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let row = |kind: &&str| {
        let of = || layers.layers.iter().filter(move |l| l.kind == **kind);
        let lowest = |values: Vec<f64>| values.into_iter().min_by(f64::total_cmp);
        let mean = |values: Vec<f64>| (!values.is_empty()).then(|| Mean::of(values.into_iter()).mean);
        let outputs = || of().filter_map(|l| l.output_snr_db).collect::<Vec<_>>();
        let updates = || of().filter_map(|l| l.update_snr_db).collect::<Vec<_>>();
        Row::new(vec![
            layer_kind(kind).to_owned(),
            of().count().to_string(),
            decibels(lowest(outputs())),
            decibels(mean(outputs())),
            decibels(lowest(updates())),
            decibels(mean(updates())),
        ])
    };
    let header = ["layers", "number", "output SNR, lowest", "mean", "update SNR, lowest", "mean"];
    document.detail(Content::Heading { level: 3, text: "Layer by layer".to_owned() });
    document.push(Content::Table(Table {
        caption: format!(
            "Each layer alone, fed what f32 feeds it: {} tokens of {}. Update is what it adds to the residual \
             stream",
            layers.tokens, layers.scenario
        ),
        header: header.map(str::to_owned).to_vec(),
        rows: kinds.iter().map(row).collect(),
    }));
    document.detail(Content::Figure(figures::layer_levels(layers)));
    let rows = layers.layers.iter().map(|l| {
        Row::new(vec![
            format!("layer {}", l.layer),
            layer_kind(&l.kind).to_owned(),
            decibels(l.output_snr_db),
            decibels(l.update_snr_db),
        ])
    });
    document.detail(Content::Table(Table {
        caption: "All layers".to_owned(),
        header: ["layer", "type", "output SNR", "update SNR"].map(str::to_owned).to_vec(),
        rows: rows.collect(),
    }));
}

fn sizes(sizes: SizesOnDisk) -> String {
    format!("{} on disk, {} read per token", bytes(sizes.tensor_bytes), bytes(sizes.bytes_per_token))
}

fn with_error(value: f64, sem: Option<f64>, digits: usize) -> String {
    match sem {
        Some(sem) => format!("{value:.digits$} ± {sem:.digits$}"),
        None => format!("{value:.digits$}"),
    }
}

fn percent(share: f64, sem: Option<f64>) -> String {
    match sem {
        Some(sem) => format!("{:.1} ± {:.1} %", 100.0 * share, 100.0 * sem),
        None => format!("{:.1} %", 100.0 * share),
    }
}
