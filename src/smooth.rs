//! Scale folding: powers of two moved from the inputs of a matrix into its columns, where that lowers the
//! error of its outputs.
//!
//! A factor per input column goes into the tensor before, so that the function stays what it was:
//!
//! | fold | inputs of | divided | multiplied |
//! |---|---|---|---|
//! | attention | `q_k_v_proj`, `g_proj` | input norm | their columns |
//! | values | `out_proj` | rows of v in `q_k_v_proj` | its columns, those of all query heads of a key head alike |
//! | mlp | `gate_proj`, `up_proj` | post-attention norm | their columns |
//! | product | `down_proj` | rows of `up_proj` | its columns |
//!
//! The head's inputs stay: its matrix is the embedding, which is looked up as well. Norms are used as they
//! stand, GEGLU is linear in `up`, and the head gate is one number per head, so it commutes. Dividing a row
//! by a power of two changes no code of it, so the folds of a layer do not touch each other.
//!
//! Texts run through the model once, in f32. Of every fold's inputs the extremes of all columns are kept,
//! and a sample of rows, on which candidates are tried: the outputs of the quantized matrix on the quantized
//! inputs against the exact ones. A layer's fold stays as it was unless the error falls.

mod folded;
mod folds;

use std::ops::Range;

use rayon::prelude::*;

pub use folded::{Scaling, write_folded};
pub use folds::{Exponents, LayerFolds, Smoothing};

use crate::calibrate::Sequences;
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::formats::{Codec, Format};
use crate::interrupt::Interrupt;
use crate::opened::checkpoint_model;
use crate::progress::Progress;
use crate::quant::smooth::{Columns, candidates, int8_inputs, power};
use crate::runtime::{Edge, FloatLinear, LayerEdge, Linear, Rounding, State};
use crate::spark::{Module, SparkConfig, TensorSpec};
use crate::tensor::{Dtype, TensorView};

/// Rows of inputs that candidates are tried on.
const SAMPLES: usize = 128;
/// Weight rows of a matrix that are tried, evenly from all: a quarter of the largest MLP is plenty.
const MAX_ROWS: usize = 4096;
/// Rows of one task.
const TASK_ROWS: usize = 32;
/// Tokens between two looks at the interrupt.
const PIECE: usize = 256;
/// A fold has to be worth something: the error must fall below this part of what it was.
const WORTH: f64 = 0.97;

/// The four folds of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fold {
    Attention,
    Values,
    Mlp,
    Product,
}

impl Fold {
    const ALL: [Self; 4] = [Self::Attention, Self::Values, Self::Mlp, Self::Product];

    fn of_edge(edge: LayerEdge) -> Option<Self> {
        let first = edge.read_by()?;
        Self::ALL.into_iter().find(|fold| fold.readers()[0] == first)
    }

    /// The quantized modules that read these inputs.
    fn readers(self) -> &'static [Module] {
        match self {
            Self::Attention => &[Module::QkvProj],
            Self::Values => &[Module::OutProj],
            Self::Mlp => &[Module::MlpGate, Module::MlpUp],
            Self::Product => &[Module::MlpDown],
        }
    }

    fn width(self, config: &SparkConfig) -> usize {
        self.readers()[0].in_features(config)
    }

    /// The factor that a column of the inputs shares: of the heads, one per value of a key head.
    fn factor(self, config: &SparkConfig, column: usize) -> usize {
        match self {
            Self::Values => folds::value_row(config, column),
            _ => column,
        }
    }

    fn factors(self, config: &SparkConfig) -> usize {
        match self {
            Self::Values => config.kv_rows(),
            _ => self.width(config),
        }
    }
}

/// What is kept of the inputs of a fold.
struct Seen {
    /// `[in]`.
    max: Vec<f32>,
    /// `[in]`, sums of absolute values.
    sum: Vec<f64>,
    /// `[samples, in]`.
    rows: Vec<f32>,
}

impl Seen {
    fn new(width: usize) -> Self {
        Self { max: vec![0.0; width], sum: vec![0.0; width], rows: Vec::new() }
    }

    /// Takes in rows `[n, in]`, of which the first is the one with this number; every `stride`th is kept.
    fn add(&mut self, rows: &[f32], first: usize, stride: usize) {
        let width = self.max.len();
        for (i, row) in rows.chunks_exact(width).enumerate() {
            for ((max, sum), x) in self.max.iter_mut().zip(&mut self.sum).zip(row) {
                *max = max.max(x.abs());
                *sum += f64::from(x.abs());
            }
            if (first + i).is_multiple_of(stride) {
                self.rows.extend_from_slice(row);
            }
        }
    }
}

/// Steps of work, in tokens, for a progress: the texts once, and as much again for the candidates.
pub fn work(sequences: &Sequences) -> usize {
    2 * sequences.total()
}

/// Anonymous bytes at most: of every layer the extremes and samples of its inputs, the outputs of a fold on
/// the samples, and the forward pass.
pub fn peak_bytes(config: &SparkConfig) -> u64 {
    let width: usize = Fold::ALL.iter().map(|fold| fold.width(config)).sum();
    let seen = config.num_hidden_layers() * width * (12 + 4 * (SAMPLES + 1));
    let trial = 4 * (SAMPLES + 1) * (3 * config.intermediate_size + 2 * 2 * MAX_ROWS);
    let pass = 64 * PIECE * config.intermediate_size.max(config.hidden_size);
    (seen + trial + pass) as u64 + (64 << 20)
}

/// Chooses the folds of every layer for a format.
///
/// # Errors
/// When interrupted.
pub fn choose(
    checkpoint: &Checkpoint,
    format: &dyn Format,
    sequences: &Sequences,
    progress: &dyn Progress,
    interrupt: &Interrupt,
) -> Result<Smoothing> {
    let config = &checkpoint.config;
    let seen = look(checkpoint, sequences, progress, interrupt)?;
    let (layers, total) = (seen.len(), sequences.total());
    let mut smoothing = Smoothing::default();
    for (layer, seen) in seen.into_iter().enumerate() {
        let mut folds = LayerFolds::default();
        for (fold, seen) in Fold::ALL.into_iter().zip(seen) {
            interrupt.check()?;
            let exponents = try_fold(checkpoint, format, layer, fold, &seen);
            *match fold {
                Fold::Attention => &mut folds.attention,
                Fold::Values => &mut folds.values,
                Fold::Mlp => &mut folds.mlp,
                Fold::Product => &mut folds.product,
            } = exponents.map(Exponents);
        }
        let done = |n: usize| total * n / layers;
        progress.advance((done(layer + 1) - done(layer)) as u64, &format!("folds of layer {layer}"));
        smoothing.layers.push(folds);
    }
    debug_assert_eq!(smoothing.layers.len(), config.num_hidden_layers());
    Ok(smoothing)
}

/// Runs the texts and keeps what the folds need, by layer in the order of [`Fold::ALL`].
fn look(
    checkpoint: &Checkpoint,
    sequences: &Sequences,
    progress: &dyn Progress,
    interrupt: &Interrupt,
) -> Result<Vec<[Seen; 4]>> {
    let config = &checkpoint.config;
    let model = checkpoint_model(checkpoint, Rounding::None)?;
    let mut seen: Vec<[Seen; 4]> = (0..config.num_hidden_layers())
        .map(|_| Fold::ALL.map(|fold| Seen::new(fold.width(config))))
        .collect();
    let stride = sequences.total().div_ceil(SAMPLES).max(1);
    let mut before = 0;
    for tokens in &sequences.tokens {
        let mut state = State::new(config);
        for piece in tokens.chunks(PIECE) {
            interrupt.check()?;
            model.run(&mut state, piece, &mut |edge, position, rows| {
                let Edge::Layer(layer, edge) = edge else { return };
                let Some(fold) = Fold::of_edge(edge) else { return };
                seen[layer][fold as usize].add(rows, before + position, stride);
            })?;
            progress.advance(piece.len() as u64, "calibration texts");
        }
        before += tokens.len();
    }
    Ok(seen)
}

/// The exponents of a fold, one per factor, if any are worth it.
fn try_fold(
    checkpoint: &Checkpoint,
    format: &dyn Format,
    layer: usize,
    fold: Fold,
    seen: &Seen,
) -> Option<Vec<i8>> {
    let config = &checkpoint.config;
    let specs =
        checkpoint.specs.iter().filter(|s| s.layer == Some(layer) && fold.readers().contains(&s.module));
    let readers: Vec<Reader<'_>> =
        specs.filter_map(|spec| Reader::new(checkpoint, format, spec, seen)).collect();
    if readers.is_empty() {
        return None;
    }
    let columns = columns(config, fold, seen, &readers);
    let width = fold.width(config);
    let error = |factors: &[i8]| -> f64 {
        let exponents: Vec<i8> = (0..width).map(|column| factors[fold.factor(config, column)]).collect();
        readers.iter().map(|reader| reader.error(&exponents, seen)).sum()
    };
    let unfolded = error(&vec![0; fold.factors(config)]);
    let tried = candidates(&columns).into_iter().map(|factors| (error(&factors), factors));
    let best = tried.min_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 < WORTH * unfolded).then_some(best.1)
}

/// Extremes by factor.
fn columns(config: &SparkConfig, fold: Fold, seen: &Seen, readers: &[Reader<'_>]) -> Columns {
    let factors = fold.factors(config);
    let zeros = || vec![0.0f32; factors];
    let mut columns = Columns { input_max: zeros(), input_mean: zeros(), weight_max: zeros() };
    for column in 0..seen.max.len() {
        let factor = fold.factor(config, column);
        columns.input_max[factor] = columns.input_max[factor].max(seen.max[column]);
        #[expect(clippy::cast_possible_truncation, reason = "relative sizes")]
        let sum = seen.sum[column] as f32;
        columns.input_mean[factor] += sum;
        for reader in readers {
            columns.weight_max[factor] = columns.weight_max[factor].max(reader.column_max[column]);
        }
    }
    columns
}

/// A matrix that candidates are tried on.
struct Reader<'a> {
    codec: &'a dyn Codec,
    source: TensorView<'a>,
    /// Every so manieth row.
    stride: usize,
    /// Largest absolute weight of each column in the rows that are tried.
    column_max: Vec<f32>,
    /// `[tasks][samples, rows]`: the exact outputs.
    exact: Vec<Vec<f32>>,
}

impl<'a> Reader<'a> {
    fn new(
        checkpoint: &'a Checkpoint,
        format: &'a dyn Format,
        spec: &TensorSpec,
        seen: &Seen,
    ) -> Option<Self> {
        let codec = format.codec_at(spec.module, spec.layer)?;
        let source = checkpoint.tensor(&spec.name);
        let stride = source.rows().div_ceil(MAX_ROWS);
        let mut reader =
            Self { codec, source, stride, column_max: vec![0.0; source.row_len()], exact: Vec::new() };
        let tasks: Vec<(Vec<f32>, Vec<f32>)> = reader
            .tasks()
            .into_par_iter()
            .map(|rows| {
                let weights = reader.weights(rows);
                (reader.maxima(&weights), outputs(&weights, &seen.rows, source.row_len()))
            })
            .collect();
        for (maxima, exact) in tasks {
            for (max, x) in reader.column_max.iter_mut().zip(maxima) {
                *max = max.max(x);
            }
            reader.exact.push(exact);
        }
        Some(reader)
    }

    /// Numbers of the rows that are tried, task by task.
    fn tasks(&self) -> Vec<Range<usize>> {
        let rows = self.source.rows().div_ceil(self.stride);
        (0..rows).step_by(TASK_ROWS).map(|start| start..(start + TASK_ROWS).min(rows)).collect()
    }

    /// `[rows, in]`.
    fn weights(&self, rows: Range<usize>) -> Vec<f32> {
        let k = self.source.row_len();
        let mut weights = vec![0.0; rows.len() * k];
        for (row, out) in rows.zip(weights.chunks_exact_mut(k)) {
            self.source.decode_row(row * self.stride, out);
        }
        weights
    }

    fn maxima(&self, weights: &[f32]) -> Vec<f32> {
        let k = self.source.row_len();
        let mut maxima = vec![0.0f32; k];
        for row in weights.chunks_exact(k) {
            for (max, w) in maxima.iter_mut().zip(row) {
                *max = max.max(w.abs());
            }
        }
        maxima
    }

    /// Squared error of the outputs on the samples, with columns multiplied by `2^e` and inputs divided.
    fn error(&self, exponents: &[i8], seen: &Seen) -> f64 {
        let k = self.source.row_len();
        let into_weights: Vec<f32> = exponents.iter().map(|e| power(*e)).collect();
        let out_of_inputs: Vec<f32> = exponents.iter().map(|e| power(-*e)).collect();
        let mut inputs = seen.rows.clone();
        multiply(&mut inputs, &out_of_inputs);
        if self.codec.rounds_inputs() {
            int8_inputs(&mut inputs, k);
        }
        let errors: Vec<f64> = self
            .tasks()
            .into_par_iter()
            .zip(&self.exact)
            .map(|(rows, exact)| {
                let mut weights = self.weights(rows);
                multiply(&mut weights, &into_weights);
                let rounded = self.codec.round(&weights, k, None);
                let found = outputs(&rounded, &inputs, k);
                let squares = exact.iter().zip(&found).map(|(a, b)| f64::from(a - b) * f64::from(a - b));
                squares.sum()
            })
            .collect();
        // In the order of the rows: the choice must not depend on threads.
        errors.iter().sum::<f64>() * self.stride as f64
    }
}

fn multiply(rows: &mut [f32], factors: &[f32]) {
    for row in rows.chunks_exact_mut(factors.len()) {
        for (x, factor) in row.iter_mut().zip(factors) {
            *x *= factor;
        }
    }
}

/// `[samples, rows]`: the product of inputs `[samples, in]` and weights `[rows, in]`.
fn outputs(weights: &[f32], inputs: &[f32], in_features: usize) -> Vec<f32> {
    let shape = [weights.len() / in_features, in_features];
    let bytes = bytemuck::cast_slice(weights);
    let view = TensorView { name: "trial", dtype: Dtype::F32, shape: &shape, bytes };
    let mut out = vec![0.0; inputs.len() / in_features * shape[0]];
    match FloatLinear::new(view, Rounding::None) {
        Ok(linear) => linear.forward(inputs, &mut out),
        Err(e) => unreachable!("whole rows: {e}"),
    }
    out
}

#[cfg(test)]
mod tests;
