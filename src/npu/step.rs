//! The step as graphs: one token to decode, several to prefill, batch 1, caches as inputs and outputs.
//!
//! Linears are `Gemm` over the checkpoint's own rows, queries, keys and values apart so that each has
//! an encoding of its own. Attention is grouped: the query heads of a key head are rows of one matrix,
//! keys and values are never repeated. Keys are stored transposed, so that no step has to.
//!
//! A prefill graph takes rows of tokens through the same layers, weights and caches, and ends in the
//! residual stream: the logits of a prompt are those of its last token, which goes through the decode
//! graphs.

mod heads;

use std::ops::Range;

use super::logical::{LogicalGraph, Op, Port, Role, TensorId, Values};
use super::options::{CacheKind, CacheType, Options, Split};
use super::weights::{Weight, WeightRole};
use crate::calibrate::{LayerSite, Site};
use crate::spark::{GateActivation, LayerType, Module, SparkConfig, TensorSpec, tensor_specs};

/// The word of the contract for a layer type.
pub fn type_word(kind: LayerType) -> &'static str {
    match kind {
        LayerType::Sliding => "sliding",
        LayerType::Full => "full",
    }
}

/// Entries that a cache of a layer type holds: what is visible, without the current token.
pub fn capacity(config: &SparkConfig, options: &Options, kind: LayerType) -> usize {
    match kind {
        LayerType::Sliding => config.sliding_window - 1,
        LayerType::Full => options.context - 1,
    }
}

/// What queries are scaled by: `1 / sqrt(head_dim)`, folded into their weights.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "meant to be f32")]
pub fn query_scale(config: &SparkConfig) -> f32 {
    (config.head_dim as f64).powf(-0.5) as f32
}

/// The decode graphs of an export, in the order they are run. The options fit the configuration (see
/// `npu::check`).
pub fn graphs(config: &SparkConfig, options: &Options) -> Vec<LogicalGraph> {
    let layers = config.num_hidden_layers();
    let specs = &tensor_specs(config);
    let build = |name: String, layers: Range<usize>, head: bool| {
        Builder { config, options, specs, rows: 1, g: LogicalGraph::new(name, layers, head) }.build()
    };
    let Some(parts) = parts(layers, options.split) else {
        return vec![build("step".to_owned(), 0..layers, true)];
    };
    let parts = parts.into_iter().map(|(name, layers)| build(name, layers, false));
    parts.chain([build("head".to_owned(), layers..layers, true)]).collect()
}

/// The prefill graphs, none unless they are asked for. Each has the layers of the decode graph with its
/// number, and the first of its weights.
pub fn prefill_graphs(config: &SparkConfig, options: &Options) -> Vec<LogicalGraph> {
    let Some(rows) = options.prefill else { return Vec::new() };
    let layers = config.num_hidden_layers();
    let specs = &tensor_specs(config);
    let build = |name, layers| {
        Builder { config, options, specs, rows, g: LogicalGraph::new(name, layers, false) }.build()
    };
    match parts(layers, options.split) {
        None => vec![build("prefill".to_owned(), 0..layers)],
        Some(parts) => {
            parts.into_iter().map(|(name, layers)| build(format!("prefill_{name}"), layers)).collect()
        }
    }
}

/// Names and layers of the graphs of a split, without the head; `None` of one that does not cut.
fn parts(layers: usize, split: Split) -> Option<Vec<(String, Range<usize>)>> {
    let (word, length) = match split {
        Split::Whole => return None,
        Split::Layer => ("layer", 1),
        Split::Block4 => ("block", 4),
    };
    let starts = (0..layers).step_by(length).enumerate();
    Some(starts.map(|(i, start)| (format!("{word}_{i:02}"), start..(start + length).min(layers))).collect())
}

struct Builder<'a> {
    config: &'a SparkConfig,
    options: &'a Options,
    specs: &'a [TensorSpec],
    /// Tokens that go in at once.
    rows: usize,
    g: LogicalGraph,
}

/// What the layers of one type share.
#[derive(Clone, Copy)]
struct Shared {
    cos: TensorId,
    sin: TensorId,
    mask: TensorId,
}

impl Builder<'_> {
    fn build(mut self) -> LogicalGraph {
        let (config, layers) = (self.config, self.g.layers.clone());
        let hidden = config.hidden_size;
        let site = match layers.start {
            0 => Site::Embedding,
            i => Site::Layer(i - 1, LayerSite::Output),
        };
        let seen = Values::Seen(site, 1.0);
        let rows = self.rows;
        let hidden_in = self.g.input("hidden_in", [1, rows, hidden], seen, Role::Hidden);
        let has = |kind| config.layer_types[layers.clone()].contains(&kind);
        let kinds: Vec<LayerType> =
            [LayerType::Sliding, LayerType::Full].into_iter().filter(|kind| has(*kind)).collect();
        let shared: Vec<(LayerType, Shared)> = kinds.iter().map(|kind| (*kind, self.shared(*kind))).collect();
        let mut x = self.g.reshape(hidden_in, "residual", [rows, hidden]);
        for i in layers.clone() {
            let kind = config.layer_types[i];
            let shared = shared.iter().find(|(of, _)| *of == kind).map(|(_, shared)| *shared);
            x = self.layer(i, x, shared.expect("every layer type of the graph is there"));
        }
        let (output, role) = match self.g.head {
            true => (self.head(x), Role::Logits),
            false => (self.g.reshape(x, "hidden_out", [1, rows, hidden]), Role::Hidden),
        };
        self.g.outputs.insert(0, Port { tensor: output, role });
        self.g
    }

    /// Entries that the scores of a layer type range over: the cache and the new ones.
    fn visible(&self, kind: LayerType) -> usize {
        capacity(self.config, self.options, kind) + self.rows
    }

    /// Rotary and mask inputs of a layer type.
    fn shared(&mut self, kind: LayerType) -> Shared {
        let word = type_word(kind);
        let pairs = self.config.rope(kind).rotary_dims / 2;
        let rows = self.rows;
        let (angles, mask) = ([1, 1, rows, pairs], [1, 1, rows, self.visible(kind)]);
        let g = &mut self.g;
        Shared {
            cos: g.input(format!("rope_cos_{word}"), angles, Values::Unit, Role::RopeCos(kind)),
            sin: g.input(format!("rope_sin_{word}"), angles, Values::Unit, Role::RopeSin(kind)),
            mask: g.input(format!("mask_{word}"), mask, Values::Mask(kind), Role::Mask(kind)),
        }
    }

    /// A layer on the residual stream `[rows, hidden]`.
    fn layer(&mut self, i: usize, x: TensorId, shared: Shared) -> TensorId {
        let seen = |site| Values::Seen(Site::Layer(i, site), 1.0);
        let name = |part: &str| format!("layer_{i:02}_{part}");
        let heads = self.attention(i, x, shared);
        let (out, gate, up, down) = (
            self.linear(i, Module::OutProj, "out_proj"),
            self.linear(i, Module::MlpGate, "gate_proj"),
            self.linear(i, Module::MlpUp, "up_proj"),
            self.linear(i, Module::MlpDown, "down_proj"),
        );
        let norm = self.norm(Some(i), Module::PostAttentionNorm, "post_attention_norm");
        let (hidden, ffn) = (self.config.hidden_size, self.config.intermediate_size);
        let (rows, epsilon) = (self.rows, self.epsilon());
        let g = &mut self.g;
        let attended = g.gemm(heads, out, name("attention_output"), seen(LayerSite::AttentionOutput));
        let x = g.apply(
            Op::Add,
            &[x, attended],
            name("after_attention"),
            [rows, hidden],
            seen(LayerSite::AfterAttention),
        );
        let n = g.rms_norm(x, norm, epsilon, name("post_attention_norm"), seen(LayerSite::PostAttentionNorm));
        let gate = g.gemm(n, gate, name("mlp_gate"), seen(LayerSite::MlpGate));
        let gate =
            g.apply(Op::Gelu, &[gate], name("mlp_activated"), [rows, ffn], seen(LayerSite::MlpActivated));
        let up = g.gemm(n, up, name("mlp_up"), seen(LayerSite::MlpUp));
        let product =
            g.apply(Op::Mul, &[gate, up], name("mlp_product"), [rows, ffn], seen(LayerSite::MlpProduct));
        let added = g.gemm(product, down, name("mlp_output"), seen(LayerSite::MlpOutput));
        g.apply(Op::Add, &[x, added], name("output"), [rows, hidden], seen(LayerSite::Output))
    }

    /// From the residual stream to gated heads, `[rows, q_rows]`.
    fn attention(&mut self, i: usize, x: TensorId, shared: Shared) -> TensorId {
        let config = self.config;
        let seen = |site| Values::Seen(Site::Layer(i, site), 1.0);
        let name = |part: &str| format!("layer_{i:02}_{part}");
        let (kv, heads) = (config.num_key_value_heads, config.num_attention_heads);
        let dim = config.head_dim;
        let scale = query_scale(config);
        let (q_rows, kv_rows) = (config.q_rows(), config.kv_rows());

        let norm = self.norm(Some(i), Module::InputNorm, "input_norm");
        let epsilon = self.epsilon();
        let n = self.g.rms_norm(x, norm, epsilon, name("input_norm"), seen(LayerSite::InputNorm));
        let q_weight = Weight { factor: scale, ..self.qkv(i, "q_proj", 0..q_rows) };
        let scaled = Values::Seen(Site::Layer(i, LayerSite::Queries), scale);
        let q = self.g.gemm(n, q_weight, name("queries"), scaled);
        let k_weight = self.qkv(i, "k_proj", q_rows..q_rows + kv_rows);
        let k = self.g.gemm(n, k_weight, name("keys"), seen(LayerSite::Keys));
        let v_weight = self.qkv(i, "v_proj", q_rows + kv_rows..q_rows + 2 * kv_rows);
        let v = self.g.gemm(n, v_weight, name("values"), seen(LayerSite::Values));
        let gates = self.gates(i, n);

        let q = self.split_heads(q, &name("query_heads"), heads, dim);
        let q = self.rotate(i, q, "query", LayerSite::QueryProducts, scale, shared);
        let q = self.stack(q, name("query_rows"));
        let k = self.split_heads(k, &name("key_heads"), kv, dim);
        let k = self.rotate(i, k, "key", LayerSite::KeyProducts, 1.0, shared);
        // What is not re-coded is the entry already.
        let new = |what: &str, part: &str| match self.options.cache_type {
            CacheType::Signed => name(part),
            CacheType::Symmetric => self.entry_name(i, what),
        };
        let (column, row) = (new("key", "key_column"), new("value", "value_row"));
        let k = self.key_columns(i, k, column);
        let v = self.value_rows(i, v, row);
        let keys = self.cached(i, k, "key", 3);
        let values = self.cached(i, v, "value", 2);

        let length = self.visible(config.layer_types[i]);
        let rows = self.g.tensor(q).shape[2];
        let g = &mut self.g;
        let scores = seen(LayerSite::Scores);
        let s = g.apply(Op::MatMul, &[q, keys], name("scores"), [kv, 1, rows, length], scores);
        let s = self.unstack(s, name("scores_by_head"));
        let shape = self.g.tensor(s).shape.clone();
        let g = &mut self.g;
        let masked = Values::MaskedScores(i);
        let s = g.apply(Op::Add, &[s, shared.mask], name("masked_scores"), shape.clone(), masked);
        let s = g.apply(Op::Softmax, &[s], name("probabilities"), shape, Values::Probability);
        let s = self.stack(s, name("probability_rows"));
        let mixed = seen(LayerSite::Heads);
        let o = self.g.apply(Op::MatMul, &[s, values], name("heads"), [kv, 1, rows, dim], mixed);
        let o = self.unstack(o, name("mixed_by_head"));
        let shape = self.g.tensor(o).shape.clone();
        let gated = seen(LayerSite::GatedHeads);
        let o = self.g.apply(Op::Mul, &[o, gates], name("gated_heads"), shape, gated);
        self.join_heads(o, name("heads_in_a_row"))
    }

    /// One gate per query head, shaped like the heads with a width of 1.
    fn gates(&mut self, i: usize, n: TensorId) -> TensorId {
        let (rows, heads) = (self.rows, self.config.num_attention_heads);
        let weight = self.linear(i, Module::HeadGate, "g_proj");
        let name = |part: &str| format!("layer_{i:02}_{part}");
        let site = Site::Layer(i, LayerSite::HeadGate);
        let g = &mut self.g;
        let gate = g.gemm(n, weight, name("head_gate"), Values::Seen(site, 1.0));
        let mut activated =
            g.apply(Op::Sigmoid, &[gate], name("head_gate_sigmoid"), [rows, heads], Values::Sigmoid);
        if self.config.gate_activation == GateActivation::Silu {
            let values = Values::Silu(site);
            activated = g.apply(Op::Mul, &[gate, activated], name("head_gate_silu"), [rows, heads], values);
        }
        self.split_heads(activated, &name("head_gates"), heads, 1)
    }

    /// Turns the leading dimensions of heads `[.., head_dim]` in half-split pairs; the rest passes.
    fn rotate(
        &mut self,
        i: usize,
        x: TensorId,
        what: &str,
        products: LayerSite,
        scale: f32,
        shared: Shared,
    ) -> TensorId {
        let dim = self.config.head_dim;
        let half = self.g.tensor(shared.cos).shape[3];
        let name = |part: &str| format!("layer_{i:02}_{what}_{part}");
        let seen = Values::Seen(Site::Layer(i, products), scale);
        let rotated = match products {
            LayerSite::QueryProducts => LayerSite::RotatedQueries,
            _ => LayerSite::RotatedKeys,
        };
        let g = &mut self.g;
        let mut shape = g.tensor(x).shape.clone();
        shape[3] = half;
        let a = g.slice(x, name("first_half"), 3, 0..half);
        let b = g.slice(x, name("second_half"), 3, half..2 * half);
        let mut times = |x, by, part: &str| g.apply(Op::Mul, &[x, by], name(part), shape.clone(), seen);
        let (a_cos, b_sin) = (times(a, shared.cos, "first_cos"), times(b, shared.sin, "second_sin"));
        let (a_sin, b_cos) = (times(a, shared.sin, "first_sin"), times(b, shared.cos, "second_cos"));
        let first = g.apply(Op::Sub, &[a_cos, b_sin], name("first_rotated"), shape.clone(), Values::Moved);
        let second = g.apply(Op::Add, &[a_sin, b_cos], name("second_rotated"), shape, Values::Moved);
        let mut parts = vec![first, second];
        if 2 * half < dim {
            parts.push(g.slice(x, name("passed"), 3, 2 * half..dim));
        }
        g.concat(&parts, name("rotated"), 3, Values::Seen(Site::Layer(i, rotated), scale))
    }

    /// Name of the new entries of a cache, which are what is returned unless the whole cache is.
    fn entry_name(&self, i: usize, what: &str) -> String {
        match self.options.cache(self.config.layer_types[i]) {
            CacheKind::RollCache => format!("layer_{i:02}_{what}_entry"),
            CacheKind::RingEntry | CacheKind::RollEntry => format!("past_{what}_{i}_out"),
        }
    }

    /// The entries of the cache with the new ones behind them along `axis`; makes the ports.
    fn cached(&mut self, i: usize, new: TensorId, what: &str, axis: usize) -> TensorId {
        let kind = self.config.layer_types[i];
        let capacity = capacity(self.config, self.options, kind);
        let role = match what {
            "key" => Role::KeyCache(i),
            _ => Role::ValueCache(i),
        };
        let (rows, entry_name) = (self.rows, self.entry_name(i, what));
        let g = &mut self.g;
        let entry = g.tensor(new).shape.clone();
        let mut shape = entry.clone();
        shape[axis] = capacity;
        let past = g.input(format!("past_{what}_{i}_in"), shape, Values::Cache, role);
        let new = match self.options.cache_type {
            CacheType::Signed => g.apply(Op::Recode, &[new], entry_name, entry, Values::Cache),
            CacheType::Symmetric => new,
        };
        let all = g.concat(&[past, new], format!("layer_{i:02}_all_{what}s"), axis, Values::Moved);
        let tensor = match self.options.cache(kind) {
            CacheKind::RollCache => g.slice(all, format!("past_{what}_{i}_out"), axis, rows..capacity + rows),
            CacheKind::RingEntry | CacheKind::RollEntry => new,
        };
        g.outputs.push(Port { tensor, role });
        all
    }

    /// From the residual stream to logits, `[1, 1, vocab]`.
    fn head(&mut self, x: TensorId) -> TensorId {
        let c = self.config;
        let norm = self.norm(None, Module::FinalNorm, "final_norm");
        let module = if c.tie_word_embeddings { Module::Embedding } else { Module::LmHead };
        let weight = self.weight(None, module, "head".to_owned(), 0..c.vocab_size, WeightRole::Linear);
        let epsilon = self.epsilon();
        let g = &mut self.g;
        let n = g.rms_norm(x, norm, epsilon, "final_norm", Values::Seen(Site::FinalNorm, 1.0));
        let logits = g.gemm(n, weight, "logits_row", Values::Seen(Site::Logits, 1.0));
        g.reshape(logits, "logits", [1, 1, c.vocab_size])
    }

    #[expect(clippy::cast_possible_truncation, reason = "as the reference adds it")]
    fn epsilon(&self) -> f32 {
        self.config.rms_norm_eps as f32
    }

    fn linear(&self, i: usize, module: Module, name: &str) -> Weight {
        let c = self.config;
        let (role, rows) = match module {
            Module::HeadGate => (WeightRole::HeadGate, c.num_attention_heads),
            Module::MlpGate | Module::MlpUp => (WeightRole::Linear, c.intermediate_size),
            _ => (WeightRole::Linear, c.hidden_size),
        };
        self.weight(Some(i), module, format!("layer_{i:02}_{name}"), 0..rows, role)
    }

    fn qkv(&self, i: usize, name: &str, rows: Range<usize>) -> Weight {
        self.weight(Some(i), Module::QkvProj, format!("layer_{i:02}_{name}"), rows, WeightRole::Linear)
    }

    fn norm(&self, layer: Option<usize>, module: Module, name: &str) -> Weight {
        let name = layer.map_or_else(|| name.to_owned(), |i| format!("layer_{i:02}_{name}"));
        self.weight(layer, module, name, 0..1, WeightRole::Norm)
    }

    /// Some rows of a tensor of the checkpoint; a norm is one row.
    fn weight(
        &self,
        layer: Option<usize>,
        module: Module,
        name: String,
        rows: Range<usize>,
        role: WeightRole,
    ) -> Weight {
        let spec = self.specs.iter().find(|s| s.module == module && s.layer == layer);
        let spec = spec.expect("every module of the step is a tensor of the architecture");
        let columns = spec.shape.last().copied().unwrap_or(1);
        let (name, source) = (format!("{name}_weight"), spec.name.clone());
        Weight { name, source, rows, columns, factor: 1.0, role, module }
    }
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
