//! How long a run will take on this machine: samples of the same work, timed, and scaled up.
//!
//! Nothing is assumed of the machine, and a sample takes a fraction of a second. What waits for a disk is
//! not in it.

use std::collections::BTreeMap;
use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;

use crate::artifact::hash_bytes;
use crate::checkpoint::Checkpoint;
use crate::error::{Failure, InputError, Result};
use crate::formats::{Format, Inputs};
use crate::guidance::Guidance;
use crate::npu::Export;
use crate::npu::weights::{Coding, Weight, WeightEncoder};
use crate::opened::checkpoint_model;
use crate::plan::{Action, Plan, Step};
use crate::quant::gptq::Hessian;
use crate::runtime::{Rounding, State};
use crate::spark::Module;
use crate::tensor::NonFinite;

/// Weights of a module that are encoded for a sample.
const SAMPLE_WEIGHTS: usize = 4 << 20;
/// Bytes that are hashed for a sample.
const SAMPLE_BYTES: usize = 16 << 20;
/// Columns of a sample for GPTQ at most; the work on wider matrices is scaled by the power it grows with. Small
/// ones are not worth the name: a factor of 768 columns is found at a third of the speed of one of 3328.
const SAMPLE_COLUMNS: usize = 2048;
/// Tokens that go through a layer together, as in [`crate::solve`].
const PIECE: usize = 256;
/// Rows of a task, as in [`crate::solve`].
const TASK_ROWS: usize = 64;

/// Seconds of a phase of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Phase {
    /// What is done.
    pub phase: &'static str,
    /// How long it takes.
    pub seconds: f64,
}

/// The sum of phases, in seconds.
pub fn total(phases: &[Phase]) -> f64 {
    phases.iter().map(|phase| phase.seconds).sum()
}

/// Choosing and packing the codes of a plan, and hashing what is read and written beside that, on the
/// threads of the pool.
///
/// # Errors
/// A weight of a sample that is NaN or infinite.
pub fn quantizing(
    checkpoint: &Checkpoint,
    format: &dyn Format,
    plan: &Plan,
    guidance: &Guidance,
) -> Result<Phase> {
    // The work on a weight depends on the kind of module alone.
    let mut kinds: BTreeMap<(Module, Option<usize>), (&Step, u64)> = BTreeMap::new();
    for (_, step) in plan.steps().filter(|(_, step)| step.action == Action::Quantize) {
        let group_size = format.codec_at(step.module, step.layer).and_then(|codec| codec.group_size());
        kinds.entry((step.module, group_size)).or_insert((step, 0)).1 += step.weights();
    }
    let mut seconds = 0.0;
    for (step, weights) in kinds.into_values() {
        let Some(codec) = format.codec_at(step.module, step.layer) else { continue };
        let multiple = codec.row_multiple();
        let rows = (SAMPLE_WEIGHTS / step.shape[1].max(1) / multiple * multiple).max(multiple);
        let rows = step.rows.start..(step.rows.start + rows).min(step.rows.end);
        let source = checkpoint.tensor(&step.source);
        let mut encoder = codec.encoder(source, step.rows.clone(), guidance.choice(step));
        let mut bytes = Vec::new();
        let start = Instant::now();
        encoder.encode(rows.clone(), &mut bytes).map_err(|bad| non_finite(source.name, bad))?;
        seconds += scaled(start, weights as f64 / (rows.len() * step.shape[1]) as f64);
    }
    let hashed = checkpoint.files.total_bytes() + plan.sizes.tensor_bytes;
    Ok(Phase { phase: "quantize", seconds: seconds + hashing(hashed) / rayon::current_num_threads() as f64 })
}

/// Seconds of one thread for hashing so many bytes.
fn hashing(bytes: u64) -> f64 {
    let sample = vec![1u8; SAMPLE_BYTES];
    let start = Instant::now();
    std::hint::black_box(hash_bytes(&sample));
    scaled(start, bytes as f64 / SAMPLE_BYTES as f64)
}

/// `passes` times so many tokens through all layers of the checkpoint in f32.
///
/// # Errors
/// When the checkpoint is no model.
pub fn forward(checkpoint: &Checkpoint, tokens: usize, passes: usize) -> Result<f64> {
    let config = &checkpoint.config;
    let model = checkpoint_model(checkpoint, Rounding::None)?;
    let n = PIECE.min(tokens).max(1);
    let ids: Vec<u32> = (0..n).map(|i| u32::try_from(i % config.vocab_size).unwrap_or(0)).collect();
    let mut h = model.embed(&ids);
    let mut state = State::new(config);
    // The first piece brings the weights into memory.
    model.run_layer(0, &mut state, 0, &mut h, &mut |_, _| {});
    let start = Instant::now();
    model.run_layer(0, &mut state, n, &mut h, &mut |_, _| {});
    Ok(scaled(start, (tokens * passes * config.num_hidden_layers()) as f64 / n as f64))
}

/// Calibrating an export on so many tokens, encoding its weights and writing them.
///
/// # Errors
/// When the checkpoint is no model, or a weight of a sample is NaN or infinite.
pub fn exporting(checkpoint: &Checkpoint, export: &Export, tokens: usize) -> Result<Vec<Phase>> {
    // As for [`quantizing`]: the work on a weight depends on the kind of module alone.
    let mut kinds: BTreeMap<Module, (&Weight, Coding, u64)> = BTreeMap::new();
    for (graph, layout) in export.graphs.iter().zip(&export.layouts) {
        for (weight, placed) in graph.weights.iter().zip(&layout.weights) {
            kinds.entry(weight.module).or_insert((weight, placed.coding, 0)).2 += weight.count();
        }
    }
    let (mut encoding, mut written_bytes) = (0.0, 0);
    for (weight, coding, count) in kinds.into_values() {
        let source = checkpoint.tensor(&weight.source);
        let refuse = |bad| non_finite(source.name, bad);
        let rows = (SAMPLE_WEIGHTS / weight.columns.max(1)).clamp(1, weight.rows.len());
        let mut encoder =
            WeightEncoder::new(source, weight, coding, export.options.method).map_err(refuse)?;
        let mut bytes = Vec::new();
        let start = Instant::now();
        encoder.encode(0..rows, &mut bytes).map_err(refuse)?;
        encoding += scaled(start, count as f64 / (rows * weight.columns) as f64);
        written_bytes += count * coding.element().bytes() as u64;
    }
    let threads = rayon::current_num_threads();
    // Codes are hashed as a constant and as a part of their file, by one thread, while others encode.
    let codes = hashing(2 * written_bytes);
    let weights = codes.max(encoding + codes / threads as f64);
    let shards = checkpoint.files.shards.len().clamp(1, threads) as f64;
    let seconds = weights
        + hashing(export.data_bytes().saturating_sub(written_bytes))
        + hashing(checkpoint.files.total_bytes()) / shards;
    let mut phases = vec![Phase { phase: "write", seconds }];
    if tokens > 0 {
        phases.insert(0, Phase { phase: "calibrate", seconds: forward(checkpoint, tokens, 1)? });
    }
    Ok(phases)
}

fn non_finite(tensor: &str, bad: NonFinite) -> InputError {
    InputError::default()
        .subject(tensor)
        .expected("finite weights")
        .found(format!("{} NaN or infinite, the first at [{}, {}]", bad.count, bad.row, bad.column))
        .hint("the checkpoint is damaged, or training diverged")
}

/// Calibrating and solving by GPTQ, as [`crate::solve`] does it.
///
/// # Errors
/// When the checkpoint is no model.
pub fn solving(
    checkpoint: &Checkpoint,
    format: &dyn Format,
    plan: &Plan,
    tokens: usize,
) -> Result<Vec<Phase>> {
    let mut phases = vec![Phase { phase: "forward", seconds: forward(checkpoint, tokens, 2)? }];
    let steps: Vec<&Step> =
        plan.steps().map(|(_, step)| step).filter(|step| step.action == Action::Quantize).collect();
    let Some(sample) = steps.iter().find(|step| step.module == Module::QkvProj).or(steps.first()) else {
        return Ok(phases);
    };
    let Some(codec) = format.codec_at(sample.module, sample.layer) else { return Ok(phases) };
    let widths = distinct_inputs(&steps);
    // A group is whole in the sample.
    let k = widths.iter().copied().max().unwrap_or(1).min(SAMPLE_COLUMNS);
    let k = codec.group_size().map_or(k, |g| (k / g * g).max(g));
    let inputs: Vec<f32> = (0..PIECE * k).map(noise).collect();
    let mut hessian = Hessian::new(k);
    hessian.add(&inputs);
    let start = Instant::now();
    hessian.add(&inputs);
    let adding = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let solver = hessian.solver().map_err(|e| Failure::usage(e.to_string()))?;
    let factoring = start.elapsed().as_secs_f64();
    let importance = hessian.importance();
    let tasks = rayon::current_num_threads();
    let weights: Vec<f32> = (0..TASK_ROWS * k).map(noise).collect();
    let start = Instant::now();
    (0..tasks).into_par_iter().for_each(|_| {
        let inputs = Inputs { solver: &solver, importance: &importance };
        std::hint::black_box(codec.solve(&weights, &inputs));
    });
    let rounding = start.elapsed().as_secs_f64() / (tasks * TASK_ROWS) as f64;

    let wider = |columns: usize| columns as f64 / k as f64;
    let pieces = tokens as f64 / PIECE as f64;
    let hessians: f64 = widths.iter().map(|k| adding * wider(*k).powi(2) * pieces).sum();
    let factors: f64 = widths.iter().map(|k| factoring * wider(*k).powi(3)).sum();
    let rows: f64 = steps.iter().map(|s| rounding * s.shape[0] as f64 * wider(s.shape[1]).powi(2)).sum();
    phases.push(Phase { phase: "Hessians", seconds: hessians });
    phases.push(Phase { phase: "factors", seconds: factors });
    phases.push(Phase { phase: "solve", seconds: rows });
    // What the work in progress depends on is hashed before; in the end codes are only copied.
    let hashed = 2 * checkpoint.files.total_bytes() + plan.sizes.tensor_bytes;
    phases.push(Phase { phase: "hash", seconds: hashing(hashed) });
    Ok(phases)
}

/// Widths of the inputs that have a Hessian, one for every layer.
fn distinct_inputs(steps: &[&Step]) -> Vec<usize> {
    let mut seen = BTreeMap::new();
    for step in steps {
        seen.insert((step.layer, step.module.first_reader()), step.shape[1]);
    }
    seen.into_values().collect()
}

fn scaled(start: Instant, times: f64) -> f64 {
    start.elapsed().as_secs_f64() * times
}

/// Values without pattern in -1..1.
fn noise(i: usize) -> f32 {
    let x = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x >> 40) as f32 / (1u32 << 23) as f32 - 1.0
}
