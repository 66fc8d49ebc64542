//! The forward pass.

use rayon::prelude::*;

use super::attention::attend;
use super::cache::LayerCache;
use super::kernels::activation::sigmoid;
use super::norm::rms_norm;
use super::{Angles, LayerParts, Linear, Model, State};
use crate::error::{Failure, Result};
use crate::spark::{GateActivation, LayerType, Module};

/// Tokens that go through the layers together: bounds the memory for activations, without an effect
/// on results.
const CHUNK: usize = 256;

/// A place in the forward pass where activations can be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Edge {
    /// Rows of the embedding, `[tokens, hidden]`.
    Embedding,
    /// Inside the layer with this number.
    Layer(usize, LayerEdge),
    /// What the head multiplies, `[tokens, hidden]`.
    FinalNorm,
}

/// A place inside a layer; in the order they are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerEdge {
    /// Input of the q, k, v and gate projections, `[tokens, hidden]`.
    InputNorm,
    /// Queries, keys and values as projected, `[tokens, q + 2 kv]`.
    Qkv,
    /// The same after the rotary embedding of queries and keys.
    Rotated,
    /// The gates before their activation, `[tokens, heads]`.
    HeadGate,
    /// The lowest and the highest scaled score of the piece, of keys that their query sees: `[2]`. The
    /// matrix of scores is never held as a whole.
    Scores,
    /// Weighted sums of values, `[tokens, q]`.
    Heads,
    /// The same times the gates: input of the output projection.
    GatedHeads,
    /// What the attention adds to the residual stream, `[tokens, hidden]`.
    AttentionOutput,
    /// The residual stream between attention and MLP.
    AfterAttention,
    /// Input of the MLP's gate and up projections, `[tokens, hidden]`.
    PostAttentionNorm,
    /// The gate projection, `[tokens, ffn]`.
    MlpGate,
    /// The same after GELU.
    MlpActivated,
    /// The up projection, `[tokens, ffn]`.
    MlpUp,
    /// Their product: input of the down projection.
    MlpProduct,
    /// What the MLP adds to the residual stream, `[tokens, hidden]`.
    MlpOutput,
    /// The residual stream after the layer, `[tokens, hidden]`.
    Output,
}

impl LayerEdge {
    /// The projection whose inputs pass here; of those that share them the first (see
    /// [`Module::first_reader`]).
    pub fn read_by(self) -> Option<Module> {
        match self {
            Self::InputNorm => Some(Module::QkvProj),
            Self::GatedHeads => Some(Module::OutProj),
            Self::PostAttentionNorm => Some(Module::MlpGate),
            Self::MlpProduct => Some(Module::MlpDown),
            _ => None,
        }
    }

    /// The projection whose outputs pass here.
    pub fn written_by(self) -> Option<Module> {
        match self {
            Self::Qkv => Some(Module::QkvProj),
            Self::AttentionOutput => Some(Module::OutProj),
            Self::MlpGate => Some(Module::MlpGate),
            Self::MlpUp => Some(Module::MlpUp),
            Self::MlpOutput => Some(Module::MlpDown),
            _ => None,
        }
    }
}

/// What looks at activations: the place, the position of the first token, and the rows. A long
/// prompt passes in several pieces, in order.
type Tap<'t> = dyn FnMut(Edge, usize, &[f32]) + 't;

/// Activations of a chunk.
struct Buffers {
    /// The residual stream.
    h: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    head_gate: Vec<f32>,
    heads: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    added: Vec<f32>,
}

impl Buffers {
    /// For `n` tokens.
    fn new(model: &Model<'_>, n: usize) -> Self {
        let c = model.config();
        Self {
            h: vec![0.0; n * c.hidden_size],
            normed: vec![0.0; n * c.hidden_size],
            qkv: vec![0.0; n * model.heads.qkv()],
            head_gate: vec![0.0; n * c.num_attention_heads],
            heads: vec![0.0; n * c.q_rows()],
            gate: vec![0.0; n * c.intermediate_size],
            up: vec![0.0; n * c.intermediate_size],
            added: vec![0.0; n * c.hidden_size],
        }
    }
}

impl Model<'_> {
    /// Takes in tokens and returns their final-norm hidden states, `[tokens, hidden]`.
    ///
    /// Whether tokens come in one call or one by one makes no difference to the bits.
    ///
    /// # Errors
    /// When there are no tokens, a token is outside the vocabulary, or the state is another model's.
    pub fn forward(&self, state: &mut State, tokens: &[u32]) -> Result<Vec<f32>> {
        let mut hidden = Vec::with_capacity(tokens.len() * self.config().hidden_size);
        self.run(state, tokens, &mut |edge, _, rows| {
            if edge == Edge::FinalNorm {
                hidden.extend_from_slice(rows);
            }
        })?;
        Ok(hidden)
    }

    /// Takes in tokens and returns the final-norm hidden state of the last, `[hidden]`.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn forward_last(&self, state: &mut State, tokens: &[u32]) -> Result<Vec<f32>> {
        let mut hidden = Vec::new();
        self.run(state, tokens, &mut |edge, _, rows| {
            if edge == Edge::FinalNorm {
                hidden.clear();
                hidden.extend_from_slice(&rows[rows.len() - self.config().hidden_size..]);
            }
        })?;
        Ok(hidden)
    }

    /// Takes in tokens and shows `tap` the activations on the way: the place, the position of the
    /// first token of the piece, and its rows. Long prompts pass in pieces, in order; hidden states
    /// are what is seen at [`Edge::FinalNorm`].
    ///
    /// # Errors
    /// As [`Model::forward`]; the state is untouched then.
    pub fn run(
        &self,
        state: &mut State,
        tokens: &[u32],
        tap: &mut dyn FnMut(Edge, usize, &[f32]),
    ) -> Result<()> {
        let vocab = self.config().vocab_size;
        if tokens.is_empty() {
            return Err(Failure::usage("no tokens to run the model on"));
        }
        if let Some(i) = tokens.iter().position(|t| *t as usize >= vocab) {
            let token = tokens[i];
            return Err(Failure::usage(format!("token {token} at index {i} is not below {vocab}")));
        }
        if !state.fits(self.config()) {
            return Err(Failure::usage("the state was made for another model"));
        }
        for chunk in tokens.chunks(CHUNK) {
            self.chunk(state, chunk, tap);
        }
        Ok(())
    }

    fn chunk(&self, state: &mut State, tokens: &[u32], tap: &mut Tap<'_>) {
        let (c, n, position) = (self.config(), tokens.len(), state.position);
        let mut b = Buffers::new(self, n);
        for (row, token) in b.h.chunks_exact_mut(c.hidden_size).zip(tokens) {
            self.parts.embedding.row(*token, row);
        }
        tap(Edge::Embedding, position, &b.h);
        // One table per layer type serves all its layers.
        let angles = |kind| self.angles(kind, position..position + n);
        let (sliding, full) = (angles(LayerType::Sliding), angles(LayerType::Full));
        for (i, cache) in state.layers.iter_mut().enumerate() {
            let tap = &mut |edge: LayerEdge, rows: &[f32]| tap(Edge::Layer(i, edge), position, rows);
            let angles = match c.layer_types[i] {
                LayerType::Sliding => &sliding,
                LayerType::Full => &full,
            };
            self.layer(i, cache, position, angles.as_ref(), &mut b, tap);
        }
        self.norm(&b.h, &self.parts.final_norm, &mut b.normed);
        tap(Edge::FinalNorm, position, &b.normed);
        state.position += n;
    }

    /// Rows of the embedding, `[tokens, hidden]`.
    ///
    /// # Panics
    /// When a token is outside the vocabulary.
    pub fn embed(&self, tokens: &[u32]) -> Vec<f32> {
        let width = self.config().hidden_size;
        let mut rows = vec![0.0; tokens.len() * width];
        for (row, token) in rows.chunks_exact_mut(width).zip(tokens) {
            self.parts.embedding.row(*token, row);
        }
        rows
    }

    /// Runs one layer on rows of the residual stream that come from elsewhere, `[tokens, hidden]`, and
    /// replaces them by what this layer makes of them. `state` holds the keys and values of the rows that
    /// came before; `position` is that of the first row, and pieces come in order. `tap` sees the
    /// activations on the way. All layers in a row give the bits of [`Model::run`].
    ///
    /// # Panics
    /// When there is no such layer, the state is another model's, or the rows do not fit.
    pub fn run_layer(
        &self,
        layer: usize,
        state: &mut State,
        position: usize,
        rows: &mut [f32],
        tap: &mut dyn FnMut(LayerEdge, &[f32]),
    ) {
        let n = rows.len() / self.config().hidden_size;
        let mut b = Buffers::new(self, n);
        b.h.copy_from_slice(rows);
        let angles = self.angles(self.config().layer_types[layer], position..position + n);
        let cache = &mut state.layers[layer];
        self.layer(layer, cache, position, angles.as_ref(), &mut b, &mut |edge, rows: &[f32]| {
            tap(edge, rows)
        });
        rows.copy_from_slice(&b.h);
    }

    /// The last norm of rows of the residual stream, `[tokens, hidden]`: what the head multiplies.
    pub fn final_norm(&self, h: &[f32]) -> Vec<f32> {
        let mut normed = vec![0.0; h.len()];
        self.norm(h, &self.parts.final_norm, &mut normed);
        normed
    }

    /// Takes the residual stream in `b.h` through one layer.
    fn layer(
        &self,
        i: usize,
        cache: &mut LayerCache,
        position: usize,
        angles: Option<&Angles>,
        b: &mut Buffers,
        tap: &mut impl FnMut(LayerEdge, &[f32]),
    ) {
        let layer = &self.parts.layers[i];
        self.norm(&b.h, &layer.input_norm, &mut b.normed);
        tap(LayerEdge::InputNorm, &b.normed);
        self.linear(&*layer.qkv, &b.normed, &mut b.qkv);
        tap(LayerEdge::Qkv, &b.qkv);
        if let Some(angles) = angles {
            let rotated = (self.heads.queries + self.heads.keys) * self.heads.dim;
            b.qkv.par_chunks_exact_mut(self.heads.qkv()).enumerate().for_each(|(t, row)| {
                for head in row[..rotated].chunks_exact_mut(self.heads.dim) {
                    angles.rotate(t, head, self.rounding());
                }
            });
        }
        tap(LayerEdge::Rotated, &b.qkv);
        self.attention(layer, cache, position, b, tap);
        add(&mut b.h, &b.added);
        tap(LayerEdge::AfterAttention, &b.h);
        self.norm(&b.h, &layer.post_attention_norm, &mut b.normed);
        tap(LayerEdge::PostAttentionNorm, &b.normed);
        self.mlp(layer, b, tap);
        add(&mut b.h, &b.added);
        tap(LayerEdge::Output, &b.h);
    }

    fn attention(
        &self,
        layer: &LayerParts<'_>,
        cache: &mut LayerCache,
        position: usize,
        b: &mut Buffers,
        tap: &mut impl FnMut(LayerEdge, &[f32]),
    ) {
        let (heads, rounding) = (self.heads, self.rounding());
        let n = b.qkv.len() / heads.qkv();
        cache.append(n, |head, t| {
            let kv = &b.qkv[t * heads.qkv() + heads.queries * heads.dim..][..2 * heads.keys * heads.dim];
            let (k, v) = kv.split_at(heads.keys * heads.dim);
            (&k[head * heads.dim..][..heads.dim], &v[head * heads.dim..][..heads.dim])
        });
        self.linear(&*layer.head_gate, &b.normed, &mut b.head_gate);
        tap(LayerEdge::HeadGate, &b.head_gate);
        let scores = attend(heads, &b.qkv, cache, position, rounding, &mut b.heads);
        tap(LayerEdge::Scores, &scores);
        tap(LayerEdge::Heads, &b.heads);
        let activation = self.config().gate_activation;
        for (head, g) in b.heads.chunks_exact_mut(heads.dim).zip(&b.head_gate) {
            let gate = rounding.round(match activation {
                GateActivation::Sigmoid => sigmoid(*g),
                GateActivation::Silu => g * sigmoid(*g),
            });
            for x in head {
                *x = rounding.round(*x * gate);
            }
        }
        tap(LayerEdge::GatedHeads, &b.heads);
        self.linear(&*layer.out, &b.heads, &mut b.added);
        tap(LayerEdge::AttentionOutput, &b.added);
    }

    fn mlp(&self, layer: &LayerParts<'_>, b: &mut Buffers, tap: &mut impl FnMut(LayerEdge, &[f32])) {
        let (ffn, rounding) = (self.config().intermediate_size, self.rounding());
        self.linear(&*layer.mlp_gate, &b.normed, &mut b.gate);
        tap(LayerEdge::MlpGate, &b.gate);
        b.gate.par_chunks_mut(ffn.min(2048)).for_each(|gate| {
            self.gelu.apply(gate);
            rounding.apply(gate);
        });
        tap(LayerEdge::MlpActivated, &b.gate);
        self.linear(&*layer.mlp_up, &b.normed, &mut b.up);
        tap(LayerEdge::MlpUp, &b.up);
        b.gate.par_chunks_exact_mut(ffn).zip(b.up.par_chunks_exact(ffn)).for_each(|(gate, up)| {
            for (gate, up) in gate.iter_mut().zip(up) {
                *gate = rounding.round(*gate * up);
            }
        });
        tap(LayerEdge::MlpProduct, &b.gate);
        self.linear(&*layer.mlp_down, &b.gate, &mut b.added);
        tap(LayerEdge::MlpOutput, &b.added);
    }

    /// Logits of the vocabulary rows `rows` for hidden states `[tokens, hidden]`, into `out`
    /// `[tokens, rows.len()]`.
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn logits_rows(&self, hidden: &[f32], rows: std::ops::Range<usize>, out: &mut [f32]) {
        self.parts.head.forward_rows(hidden, rows, out);
        self.rounding().apply(out);
    }

    /// All logits for hidden states `[tokens, hidden]`: `[tokens, vocab]`.
    pub fn logits(&self, hidden: &[f32]) -> Vec<f32> {
        let vocab = self.config().vocab_size;
        let mut out = vec![0.0; hidden.len() / self.config().hidden_size * vocab];
        self.logits_rows(hidden, 0..vocab, &mut out);
        out
    }

    /// Takes in a prompt and returns the most likely continuation, at most `count` tokens; a token
    /// that `stop` accepts ends it and is not part of it.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn greedy(
        &self,
        state: &mut State,
        prompt: &[u32],
        count: usize,
        stop: impl Fn(u32) -> bool,
    ) -> Result<Vec<u32>> {
        let mut continuation = Vec::new();
        let mut hidden = self.forward_last(state, prompt)?;
        while continuation.len() < count {
            let token = argmax(&self.logits(&hidden));
            if stop(token) {
                break;
            }
            continuation.push(token);
            if continuation.len() < count {
                hidden = self.forward_last(state, &[token])?;
            }
        }
        Ok(continuation)
    }

    fn norm(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
        #[expect(clippy::cast_possible_truncation, reason = "as the reference adds it")]
        let eps = self.config().rms_norm_eps as f32;
        rms_norm(x, weight, eps, self.rounding(), out);
    }

    fn linear(&self, linear: &dyn Linear, x: &[f32], y: &mut [f32]) {
        linear.forward(x, y);
        self.rounding().apply(y);
    }
}

fn add(h: &mut [f32], added: &[f32]) {
    for (h, x) in h.iter_mut().zip(added) {
        *h += x;
    }
}

/// The index of the largest logit, the lowest one on ties. NaN is never the largest.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (i, x) in logits.iter().enumerate() {
        if *x > best.1 {
            best = (i, *x);
        }
    }
    u32::try_from(best.0).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_index_wins_a_tie() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), 1);
        assert_eq!(argmax(&[f32::NAN, -3.0, f32::NAN]), 1);
    }
}
