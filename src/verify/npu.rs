//! Judging an NPU export, from its bytes on disk and the checkpoint they were made from.
//!
//! The questions are those of every artifact. Are these the bytes that were written (`files`)? Would a
//! runtime and a compiler read them as meant: the manifest (`contract`), the form of each graph (`graph`)
//! and its encodings (`encodings`)? How far are the weights from the source (`weights`)? And what does the
//! step say, run by the bundled interpreter with the caches owned by the manifest (`behaviour`)?
//!
//! What is expected follows from the architecture and the rules of the export, not from the code that
//! wrote the graphs: node by node a graph may look as it likes, as long as it keeps the rules.

mod behaviour;
mod contract;
mod encodings;
mod files;
mod graph;
mod reference;
mod stretches;
mod view;
mod weights;

pub use behaviour::{ExportBehaviour, ExportRun, GraphSnr, LayerSnr, StepSnr, TypeSnr};
pub use files::ExportFiles;
pub use stretches::{Stretch, Stretches};
pub use weights::check_export_weights;

use super::Finding;
use crate::artifact::Manifest;
use crate::checkpoint::Checkpoint;
use crate::npu::options::Precision;

/// Bars for the figures of an export.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExportGates {
    /// Lowest weight SNR of any weight.
    pub min_weight_snr_db: f64,
    /// Lowest SNR of the logits over all steps.
    pub min_snr_db: f64,
    /// Lowest SNR of the logits of a step.
    pub min_step_snr_db: f64,
    /// Lowest SNR of the keys or values that a layer returns.
    pub min_kv_snr_db: f64,
    /// Lowest SNR of a graph that is fed what the checkpoint feeds it.
    pub min_graph_snr_db: f64,
    /// Lowest share of steps with the checkpoint's token.
    pub min_greedy: f64,
}

impl ExportGates {
    /// The bars of a precision when none are given. Logits of exports with int8 weights were measured at 25 to
    /// 36 dB, with 8-bit activations at 10 to 20 dB, which must not pass; what has 16 bits throughout is held
    /// to more, and floats to what an order of summation costs.
    pub fn of(precision: Precision) -> Self {
        let bars = |weight, total, step, graph, greedy| Self {
            min_weight_snr_db: weight,
            min_snr_db: total,
            min_step_snr_db: step,
            min_kv_snr_db: total,
            min_graph_snr_db: graph,
            min_greedy: greedy,
        };
        match precision {
            Precision::W8a16 | Precision::W8 | Precision::W8a8 => bars(25.0, 22.0, 14.0, 30.0, 0.9),
            Precision::W16a16 => bars(70.0, 30.0, 22.0, 36.0, 0.95),
            Precision::Fp32 => bars(120.0, 100.0, 90.0, 100.0, 0.99),
        }
    }
}

/// Holds manifest and graphs to the rules of an export.
pub fn check_export_contract(
    files: &ExportFiles,
    manifest: &Manifest,
    checkpoint: &Checkpoint,
) -> Vec<Finding> {
    let mut findings = contract::check_manifest(files, manifest, &checkpoint.config);
    for index in 0..files.manifest().graphs.len() {
        let Some(view) = view::View::of(files, index) else { continue };
        findings.extend(graph::check_graph(&view, files, index, &checkpoint.config));
        findings.extend(encodings::check_encodings(&view, files, index));
    }
    findings
}
