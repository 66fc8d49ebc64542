//! How large the inputs and outputs of every matrix are on calibration texts.

use std::collections::BTreeMap;

use super::{LOGIT_ROWS, PIECE, Sequences};
use crate::error::{InputError, Result};
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::runtime::{Edge, LayerEdge, Model, State};
use crate::spark::{Module, SparkConfig};

/// Tokens whose logits are computed: the head is the largest matrix, and its outputs vary little from token to token.
const LOGIT_TOKENS: usize = 64;
/// A part of the energy of logits that is less than this was never more than rounding: sums of f64 over a
/// vocabulary are good to ten digits.
const LEAST_PART: f64 = 1e-9;

/// Mean energies of matrices over all tokens of some sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct Energies {
    tokens: usize,
    /// Sums of squares of each input column; those of `up_proj` are with `gate_proj`, which reads the same.
    inputs: BTreeMap<(Module, Option<usize>), Vec<f64>>,
    /// Sums of squares of all outputs.
    outputs: BTreeMap<(Module, Option<usize>), f64>,
    /// Sums over tokens of what attention (`out_proj`) and MLP (`down_proj`) of a layer add to the residual stream, in
    /// parts of its energy right after that.
    added: BTreeMap<(Module, usize), f64>,
}

/// What is known of a matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Energy {
    /// Mean square of each input column, `[in]`.
    pub columns: Vec<f64>,
    /// Mean energy of its outputs: the sum of their squares.
    pub outputs: f64,
    /// What it is to the model: the energy of what its attention or MLP adds to the residual stream, in parts of the
    /// stream right after that, on average over tokens. Of the head itself 1.
    pub share: f64,
}

impl Energies {
    /// Runs the sequences. What all logits of a token share does not count as output of the head: softmax takes
    /// no notice of it.
    ///
    /// # Errors
    /// A NaN or an infinity among the activations, a token outside the vocabulary, an interrupt.
    pub fn collect(
        model: &Model<'_>,
        sequences: &Sequences,
        progress: &dyn Progress,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let total = sequences.total();
        let mut energies =
            Self { tokens: total, inputs: BTreeMap::new(), outputs: BTreeMap::new(), added: BTreeMap::new() };
        let mut added = Vec::new();
        let stride = total.div_ceil(LOGIT_TOKENS).max(1);
        let (mut before, mut sampled) = (0, Vec::new());
        for tokens in &sequences.tokens {
            let mut state = State::new(model.config());
            for piece in tokens.chunks(PIECE) {
                interrupt.check()?;
                model.run(&mut state, piece, &mut |edge, position, rows| {
                    energies.see(edge, rows, model.config());
                    energies.see_added(edge, rows, model.config(), &mut added);
                    if edge == Edge::FinalNorm {
                        let rows = rows.chunks_exact(model.config().hidden_size).enumerate();
                        let taken = rows.filter(|(i, _)| (before + position + i).is_multiple_of(stride));
                        sampled.extend(taken.flat_map(|(_, row)| row));
                    }
                })?;
                progress.advance(piece.len() as u64, "calibration texts");
            }
            before += tokens.len();
        }
        energies.head(model, &sampled, interrupt)?;
        energies.check()?;
        Ok(energies)
    }

    fn see(&mut self, edge: Edge, rows: &[f32], config: &SparkConfig) {
        let (read, written, layer) = match edge {
            Edge::FinalNorm => (Some(Module::LmHead), None, None),
            Edge::Layer(layer, edge) => (edge.read_by(), edge.written_by(), Some(layer)),
            _ => return,
        };
        if let Some(module) = read {
            let width = module.in_features(config);
            let sums = self.inputs.entry((module, layer)).or_insert_with(|| vec![0.0; width]);
            for row in rows.chunks_exact(width) {
                for (sum, x) in sums.iter_mut().zip(row) {
                    *sum += f64::from(*x) * f64::from(*x);
                }
            }
        }
        if let Some(module) = written {
            *self.outputs.entry((module, layer)).or_insert(0.0) += square_sum(rows);
        }
    }

    /// What is added to the residual stream is seen before the sum of both.
    fn see_added(&mut self, edge: Edge, rows: &[f32], config: &SparkConfig, added: &mut Vec<f64>) {
        let Edge::Layer(layer, edge) = edge else { return };
        let of_tokens = rows.chunks_exact(config.hidden_size).map(square_sum);
        let adder = match edge {
            LayerEdge::AttentionOutput | LayerEdge::MlpOutput => {
                added.clear();
                added.extend(of_tokens);
                return;
            }
            LayerEdge::AfterAttention => Module::OutProj,
            LayerEdge::Output => Module::MlpDown,
            _ => return,
        };
        let parts = added.iter().zip(of_tokens).filter(|(_, sum)| *sum > 0.0).map(|(added, sum)| added / sum);
        *self.added.entry((adder, layer)).or_insert(0.0) += parts.sum::<f64>();
    }

    /// The energy of the logits, less what they share, of the hidden states `[n, hidden]` of some tokens.
    fn head(&mut self, model: &Model<'_>, hidden: &[f32], interrupt: &Interrupt) -> Result<()> {
        let (vocab, width) = (model.config().vocab_size, model.config().hidden_size);
        let sampled = hidden.len() / width;
        let (mut sums, mut squares) = (vec![0.0f64; sampled], vec![0.0f64; sampled]);
        let mut logits = Vec::new();
        for start in (0..vocab).step_by(LOGIT_ROWS) {
            interrupt.check()?;
            let rows = start..(start + LOGIT_ROWS).min(vocab);
            logits.resize(sampled * rows.len(), 0.0);
            model.logits_rows(hidden, rows.clone(), &mut logits);
            for (token, logits) in logits.chunks_exact(rows.len()).enumerate() {
                sums[token] += logits.iter().map(|x| f64::from(*x)).sum::<f64>();
                squares[token] += square_sum(logits);
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
        let (vocab, share) = (vocab as f64, self.tokens as f64 / sampled.max(1) as f64);
        // Of logits that are all alike only the rounding of the difference would be left.
        let own = |(sum, square): (&f64, &f64)| {
            Some(square - sum * sum / vocab).filter(|own| *own > LEAST_PART * square).unwrap_or(0.0)
        };
        let energy: f64 = sums.iter().zip(&squares).map(own).sum();
        self.outputs.insert((Module::LmHead, None), energy * share);
        Ok(())
    }

    fn check(&self) -> Result<()> {
        let inputs = self.inputs.iter().map(|(place, sums)| (place, sums.iter().sum::<f64>()));
        let all = inputs.chain(self.outputs.iter().map(|(place, sum)| (place, *sum)));
        match all.into_iter().find(|(_, sum)| !sum.is_finite()) {
            None => Ok(()),
            Some(((module, layer), _)) => {
                let place = layer.map_or_else(String::new, |layer| format!(" of layer {layer}"));
                Err(InputError::file("calibration texts")
                    .subject(format!("{module:?}{place}"))
                    .expected("finite activations")
                    .found("NaN or infinite ones")
                    .hint("the checkpoint is damaged, or the texts are not for it")
                    .into())
            }
        }
    }

    /// Of a matrix; `None` of what was not seen.
    pub fn of(&self, module: Module, layer: Option<usize>) -> Option<Energy> {
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
        let tokens = self.tokens as f64;
        let columns =
            self.inputs.get(&(module.first_reader(), layer))?.iter().map(|sum| sum / tokens).collect();
        let outputs = self.outputs.get(&(module, layer))? / tokens;
        let adder = match module {
            Module::QkvProj | Module::OutProj => Module::OutProj,
            _ => Module::MlpDown,
        };
        let share = match layer {
            Some(layer) => self.added.get(&(adder, layer))? / tokens,
            None => 1.0,
        };
        Some(Energy { columns, outputs, share })
    }

    /// Anonymous bytes at most: what is kept of every layer, the logits of a chunk, and the forward pass.
    pub fn peak_bytes(config: &SparkConfig) -> u64 {
        let (h, f, q) = (config.hidden_size, config.intermediate_size, config.q_rows());
        let kept = 8 * config.num_hidden_layers() * (2 * h + q + f);
        let logits = 4 * LOGIT_TOKENS * (LOGIT_ROWS + h);
        (kept + logits + 64 * PIECE * f.max(h)) as u64 + (64 << 20)
    }
}

fn square_sum(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum()
}
