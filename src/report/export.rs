//! The steps of an NPU export, in the document.

use super::document::{Content, Document, Row, Table};
use crate::table::decibels;
use crate::verify::npu::ExportBehaviour;

/// What the steps came to.
pub(super) fn steps(document: &mut Document, export: &ExportBehaviour) {
    let run: Vec<String> =
        export.stretches.run.iter().map(|s| format!("{} to {}", s.from, s.to.saturating_sub(1))).collect();
    let mut text = format!("steps at positions {}", run.join(", "));
    if run.len() > 1 {
        text += ", all but the first from the checkpoint's keys and values";
    }
    if let Some(left_out) = &export.stretches.left_out {
        text += &format!(" ({left_out})");
    }
    document.push(Content::Heading { level: 3, text: "Steps, against f32".to_owned() });
    document.push(Content::Paragraph(text));
    let db = |db: f64| decibels(Some(db));
    let row = |name: &str, figure: String| Row::new(vec![name.to_owned(), figure]);
    let mut rows = vec![
        row("logits, all steps", decibels(export.logits.logits_snr_db)),
        row(&format!("worst step, at {}", export.worst_step.position), db(export.worst_step.snr_db)),
        row("empty caches", db(export.empty_cache_snr_db)),
    ];
    for (name, figure) in [
        ("full window", export.full_window_snr_db),
        ("full context, the last step", export.full_cache_snr_db),
        ("unwritten slots changed", export.unwritten_slots_snr_db),
    ] {
        rows.extend(figure.map(|figure| row(name, db(figure))));
    }
    rows.push(row("KL mean, nats", format!("{:.5}", export.logits.kl.mean)));
    rows.push(row("same token", format!("{:.1} %", 100.0 * export.greedy_share)));
    let own = format!("{:.1} %", 100.0 * export.continuation_greedy_share);
    rows.push(row("same token, continuing its own text", own));
    document.push(Content::Table(Table { rows, ..Table::default() }));
    let layers = export.keys_values.iter().map(|l| {
        Row::new(vec![
            format!("layer {}", l.layer),
            l.layer_type.clone(),
            db(l.key_snr_db),
            db(l.value_snr_db),
        ])
    });
    document.push(Content::Table(Table {
        caption: "Entries returned to the caches".to_owned(),
        header: ["layer", "type", "keys", "values"].map(str::to_owned).to_vec(),
        rows: layers.collect(),
    }));
    if export.graph_types.is_empty() {
        return;
    }
    let types = export.graph_types.iter().map(|t| {
        Row::new(vec![t.layer_type.clone(), t.graphs.to_string(), db(t.min_snr_db), db(t.mean_snr_db)])
    });
    document.push(Content::Table(Table {
        caption: "Graphs by themselves, fed what the checkpoint feeds them".to_owned(),
        header: ["type", "graphs", "lowest", "mean"].map(str::to_owned).to_vec(),
        rows: types.collect(),
    }));
    let graphs =
        export.graphs.iter().map(|g| Row::new(vec![g.graph.clone(), g.layer_type.clone(), db(g.snr_db)]));
    document.detail(Content::Table(Table {
        caption: "Each graph".to_owned(),
        header: ["graph", "type", "SNR"].map(str::to_owned).to_vec(),
        rows: graphs.collect(),
    }));
}
