//! The decode step as graphs: one token, batch 1, caches as inputs and outputs.
//!
//! Linears are `Gemm` over the checkpoint's own rows, queries, keys and values apart so that each has
//! an encoding of its own. Attention is grouped: the query heads of a key head are rows of one matrix,
//! keys and values are never repeated. Keys are stored transposed, so that no step has to.

use std::ops::Range;

use super::logical::{LogicalGraph, Op, Port, Role, TensorId, Values};
use super::options::{CacheKind, Options, Split};
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

/// The graphs of an export, in the order they are run. The options fit the configuration (see
/// `npu::check`).
pub fn graphs(config: &SparkConfig, options: &Options) -> Vec<LogicalGraph> {
    let layers = config.num_hidden_layers();
    let specs = &tensor_specs(config);
    let build = |name: String, layers: Range<usize>, head: bool| {
        Builder { config, options, specs, g: LogicalGraph::new(name, layers, head) }.build()
    };
    match options.split {
        Split::Whole => vec![build("step".to_owned(), 0..layers, true)],
        Split::Layer => {
            let layer = |i| build(format!("layer_{i:02}"), i..i + 1, false);
            let head = build("head".to_owned(), layers..layers, true);
            (0..layers).map(layer).chain([head]).collect()
        }
    }
}

struct Builder<'a> {
    config: &'a SparkConfig,
    options: &'a Options,
    specs: &'a [TensorSpec],
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
        let hidden_in = self.g.input("hidden_in", [1, 1, hidden], seen, Role::Hidden);
        let has = |kind| config.layer_types[layers.clone()].contains(&kind);
        let kinds: Vec<LayerType> =
            [LayerType::Sliding, LayerType::Full].into_iter().filter(|kind| has(*kind)).collect();
        let shared: Vec<(LayerType, Shared)> = kinds.iter().map(|kind| (*kind, self.shared(*kind))).collect();
        let mut x = self.g.reshape(hidden_in, "residual", [1, hidden]);
        for i in layers.clone() {
            let kind = config.layer_types[i];
            let shared = shared.iter().find(|(of, _)| *of == kind).map(|(_, shared)| *shared);
            x = self.layer(i, x, shared.expect("every layer type of the graph is there"));
        }
        let (output, role) = match self.g.head {
            true => (self.head(x), Role::Logits),
            false => (self.g.reshape(x, "hidden_out", [1, 1, hidden]), Role::Hidden),
        };
        self.g.outputs.insert(0, Port { tensor: output, role });
        self.g
    }

    /// Rotary and mask inputs of a layer type.
    fn shared(&mut self, kind: LayerType) -> Shared {
        let word = type_word(kind);
        let pairs = self.config.rope(kind).rotary_dims / 2;
        let length = capacity(self.config, self.options, kind) + 1;
        let g = &mut self.g;
        Shared {
            cos: g.input(format!("rope_cos_{word}"), [1, 1, 1, pairs], Values::Unit, Role::RopeCos(kind)),
            sin: g.input(format!("rope_sin_{word}"), [1, 1, 1, pairs], Values::Unit, Role::RopeSin(kind)),
            mask: g.input(format!("mask_{word}"), [1, 1, 1, length], Values::Mask(kind), Role::Mask(kind)),
        }
    }

    /// A layer on the residual stream `[1, hidden]`.
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
        let epsilon = self.epsilon();
        let g = &mut self.g;
        let attended = g.gemm(heads, out, name("attention_output"), seen(LayerSite::AttentionOutput));
        let x = g.apply(
            Op::Add,
            &[x, attended],
            name("after_attention"),
            [1, hidden],
            seen(LayerSite::AfterAttention),
        );
        let n = g.rms_norm(x, norm, epsilon, name("post_attention_norm"), seen(LayerSite::PostAttentionNorm));
        let gate = g.gemm(n, gate, name("mlp_gate"), seen(LayerSite::MlpGate));
        let gate = g.apply(Op::Gelu, &[gate], name("mlp_activated"), [1, ffn], seen(LayerSite::MlpActivated));
        let up = g.gemm(n, up, name("mlp_up"), seen(LayerSite::MlpUp));
        let product =
            g.apply(Op::Mul, &[gate, up], name("mlp_product"), [1, ffn], seen(LayerSite::MlpProduct));
        let added = g.gemm(product, down, name("mlp_output"), seen(LayerSite::MlpOutput));
        g.apply(Op::Add, &[x, added], name("output"), [1, hidden], seen(LayerSite::Output))
    }

    /// From the residual stream to gated heads, `[1, q_rows]`.
    fn attention(&mut self, i: usize, x: TensorId, shared: Shared) -> TensorId {
        let config = self.config;
        let seen = |site| Values::Seen(Site::Layer(i, site), 1.0);
        let name = |part: &str| format!("layer_{i:02}_{part}");
        let (kv, dim) = (config.num_key_value_heads, config.head_dim);
        let group = config.num_attention_heads / kv;
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

        // Query head h uses key head h / group: the heads of a group are neighbours.
        let q = self.g.reshape(q, name("query_heads"), [kv, 1, group, dim]);
        let q = self.rotate(i, q, "query", LayerSite::QueryProducts, scale, shared);
        let k = self.g.reshape(k, name("key_heads"), [kv, 1, 1, dim]);
        let k = self.rotate(i, k, "key", LayerSite::KeyProducts, 1.0, shared);
        let k = self.g.reshape(k, name("key_column"), [kv, 1, dim, 1]);
        let v = self.g.reshape(v, name("value_row"), [kv, 1, 1, dim]);
        let keys = self.cached(i, k, "key", 3);
        let values = self.cached(i, v, "value", 2);

        let length = self.g.tensor(shared.mask).shape[3];
        let g = &mut self.g;
        let scores = [kv, 1, group, length];
        let s = g.apply(Op::MatMul, &[q, keys], name("scores"), scores, seen(LayerSite::Scores));
        let s = g.apply(Op::Add, &[s, shared.mask], name("masked_scores"), scores, Values::MaskedScores(i));
        let s = g.apply(Op::Softmax, &[s], name("probabilities"), scores, Values::Probability);
        let heads = [kv, 1, group, dim];
        let o = g.apply(Op::MatMul, &[s, values], name("heads"), heads, seen(LayerSite::Heads));
        let o = g.apply(Op::Mul, &[o, gates], name("gated_heads"), heads, seen(LayerSite::GatedHeads));
        g.reshape(o, name("heads_in_a_row"), [1, q_rows])
    }

    /// One gate per query head, `[kv, 1, group, 1]`.
    fn gates(&mut self, i: usize, n: TensorId) -> TensorId {
        let heads = self.config.num_attention_heads;
        let kv = self.config.num_key_value_heads;
        let weight = self.linear(i, Module::HeadGate, "g_proj");
        let name = |part: &str| format!("layer_{i:02}_{part}");
        let site = Site::Layer(i, LayerSite::HeadGate);
        let g = &mut self.g;
        let gate = g.gemm(n, weight, name("head_gate"), Values::Seen(site, 1.0));
        let mut activated =
            g.apply(Op::Sigmoid, &[gate], name("head_gate_sigmoid"), [1, heads], Values::Sigmoid);
        if self.config.gate_activation == GateActivation::Silu {
            let values = Values::Silu(site);
            activated = g.apply(Op::Mul, &[gate, activated], name("head_gate_silu"), [1, heads], values);
        }
        g.reshape(activated, name("head_gates"), [kv, 1, heads / kv, 1])
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

    /// The entries of the cache with the new one behind them along `axis`; makes the ports.
    fn cached(&mut self, i: usize, new: TensorId, what: &str, axis: usize) -> TensorId {
        let kind = self.config.layer_types[i];
        let capacity = capacity(self.config, self.options, kind);
        let role = match what {
            "key" => Role::KeyCache(i),
            _ => Role::ValueCache(i),
        };
        let returned = format!("past_{what}_{i}_out");
        let name = |part: &str| format!("layer_{i:02}_{part}");
        let g = &mut self.g;
        let entry = g.tensor(new).shape.clone();
        let mut shape = entry.clone();
        shape[axis] = capacity;
        let past = g.input(format!("past_{what}_{i}_in"), shape, Values::Cache, role);
        let whole_cache = self.options.cache(kind) == CacheKind::RollCache;
        let entry_name = if whole_cache { name(&format!("{what}_entry")) } else { returned.clone() };
        let new = g.apply(Op::Recode, &[new], entry_name, entry, Values::Cache);
        let all = g.concat(&[past, new], name(&format!("all_{what}s")), axis, Values::Moved);
        let tensor = match whole_cache {
            true => g.slice(all, returned, axis, 1..capacity + 1),
            false => new,
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
