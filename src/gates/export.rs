//! Bars of NPU exports.

use super::{Bar, Figure, Gate, Metric, weights};
use crate::verify::ModuleSnr;
use crate::verify::npu::{ExportBehaviour, ExportGates};

/// The bars of an export's precision.
pub fn default_export_bars(gates: ExportGates) -> Vec<Bar> {
    let bar = |metric, bar| Bar { metric, scenario: None, bar, asked: false };
    vec![
        bar(Metric::WeightSnrDb, gates.min_weight_snr_db),
        bar(Metric::SnrDb, gates.min_snr_db),
        bar(Metric::StepSnrDb, gates.min_step_snr_db),
        bar(Metric::KvSnrDb, gates.min_kv_snr_db),
        bar(Metric::GraphSnrDb, gates.min_graph_snr_db),
        bar(Metric::Greedy, gates.min_greedy),
    ]
}

/// Holds an export against its bars. Without a `behaviour` the precision's own bars on it are left out, and
/// those that were asked for have failed. A step in one graph has no bar for graphs by themselves.
pub fn judge_export(bars: &[Bar], modules: &[ModuleSnr], behaviour: Option<&ExportBehaviour>) -> Vec<Gate> {
    let whole = behaviour.is_some_and(|b| b.lowest_graph().is_none());
    bars.iter()
        .filter(|bar| bar.asked || behaviour.is_some() || !bar.metric.is_behaviour())
        .filter(|bar| !(whole && bar.metric == Metric::GraphSnrDb))
        .map(|bar| {
            let figure = match behaviour {
                _ if bar.metric == Metric::WeightSnrDb => weights(modules),
                _ if bar.scenario.is_some() => Figure::Missing("an export runs all scenarios in a row"),
                None => Figure::Missing("the export was not run"),
                Some(behaviour) => measure(bar.metric, behaviour),
            };
            bar.against(figure)
        })
        .collect()
}

fn measure(metric: Metric, behaviour: &ExportBehaviour) -> Figure {
    let decibels = |db: f64| Figure::Value(crate::artifact::rounded(db));
    match metric {
        Metric::SnrDb => behaviour.logits.logits_snr_db.map_or(Figure::Exact, decibels),
        Metric::StepSnrDb => decibels(behaviour.worst_step.snr_db),
        Metric::KvSnrDb => decibels(behaviour.lowest_kv()),
        Metric::GraphSnrDb => behaviour.lowest_graph().map_or(Figure::Missing("it is one graph"), decibels),
        Metric::Kld => Figure::Value(behaviour.logits.kl.mean),
        Metric::Greedy => Figure::Value(behaviour.greedy_share),
        _ => Figure::Missing("an export has no such figure"),
    }
}
