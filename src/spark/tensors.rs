//! The tensors of a Spark-X2.5 checkpoint, in the order the published shards fill up.

use super::SparkConfig;

/// What a tensor is to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Module {
    /// `model.embedding`, `[vocab, hidden]`.
    Embedding,
    /// `self_attn.q_k_v_proj`, `[(heads + 2 kv) head_dim, hidden]`: all q rows, then k, then v.
    QkvProj,
    /// `self_attn.g_proj`, `[heads, hidden]`: one gate per query head. Never quantized: each of its
    /// few outputs scales a whole head.
    HeadGate,
    /// `self_attn.out_proj`, `[hidden, heads head_dim]`.
    OutProj,
    /// `mlp.gate_proj`, `[ffn, hidden]`.
    MlpGate,
    /// `mlp.up_proj`, `[ffn, hidden]`.
    MlpUp,
    /// `mlp.down_proj`, `[hidden, ffn]`.
    MlpDown,
    /// `input_layernorm`, `[hidden]`.
    InputNorm,
    /// `post_attention_layernorm`, `[hidden]`.
    PostAttentionNorm,
    /// `model.norm`, `[hidden]`.
    FinalNorm,
    /// `lm_head`, `[vocab, hidden]`; stored only when the embeddings are not tied.
    LmHead,
}

impl Module {
    /// Whether this is one of the five projections of a layer that every scheme quantizes.
    pub fn is_projection(self) -> bool {
        matches!(self, Self::QkvProj | Self::OutProj | Self::MlpGate | Self::MlpUp | Self::MlpDown)
    }

    /// The matrix that stands for all that read the same inputs: `gate_proj` for `up_proj`, any other for itself.
    pub fn first_reader(self) -> Self {
        if self == Self::MlpUp { Self::MlpGate } else { self }
    }

    /// Length of the inputs of a projection or the head.
    pub fn in_features(self, config: &SparkConfig) -> usize {
        match self {
            Self::OutProj => config.q_rows(),
            Self::MlpDown => config.intermediate_size,
            _ => config.hidden_size,
        }
    }
}

/// A tensor the architecture requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Full name in the checkpoint.
    pub name: String,
    /// `[out, in]` for matrices, `[hidden]` for norms.
    pub shape: Vec<usize>,
    /// Its part in the model.
    pub module: Module,
    /// Its layer, if it belongs to one.
    pub layer: Option<usize>,
}

/// Every tensor of a checkpoint with this configuration, in published order.
///
/// Source: the published checkpoints' indexes; row order of `q_k_v_proj` from the published model code.
pub fn tensor_specs(config: &SparkConfig) -> Vec<TensorSpec> {
    let (h, f, q, kv) = (config.hidden_size, config.intermediate_size, config.q_rows(), config.kv_rows());
    let mut specs = Vec::with_capacity(3 + 8 * config.num_hidden_layers());
    let mut push = |name: String, shape: Vec<usize>, module, layer| {
        specs.push(TensorSpec { name, shape, module, layer });
    };
    push("model.embedding.weight".to_owned(), vec![config.vocab_size, h], Module::Embedding, None);
    for layer in 0..config.num_hidden_layers() {
        for (suffix, shape, module) in [
            ("self_attn.q_k_v_proj", vec![q + 2 * kv, h], Module::QkvProj),
            ("self_attn.g_proj", vec![config.num_attention_heads, h], Module::HeadGate),
            ("self_attn.out_proj", vec![h, q], Module::OutProj),
            ("mlp.gate_proj", vec![f, h], Module::MlpGate),
            ("mlp.up_proj", vec![f, h], Module::MlpUp),
            ("mlp.down_proj", vec![h, f], Module::MlpDown),
            ("input_layernorm", vec![h], Module::InputNorm),
            ("post_attention_layernorm", vec![h], Module::PostAttentionNorm),
        ] {
            push(format!("model.layers.{layer}.{suffix}.weight"), shape, module, Some(layer));
        }
    }
    push("model.norm.weight".to_owned(), vec![h], Module::FinalNorm, None);
    if !config.tie_word_embeddings {
        push("lm_head.weight".to_owned(), vec![config.vocab_size, h], Module::LmHead, None);
    }
    specs
}

/// Stored buffers that older training code leaves behind and that loaders compute themselves.
pub fn is_known_buffer(name: &str) -> bool {
    let Some((_, buffer)) = name.rsplit_once('.') else { return false };
    name.contains("rotary_emb.")
        && matches!(buffer, "inv_freq" | "original_inv_freq" | "cos_cached" | "sin_cached")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts of the published checkpoints: 226 tensors and 1 707 657 216 parameters in the 1.7B,
    /// 290 and 4 112 079 360 in the 4B.
    #[test]
    fn tensor_counts_and_parameters_equal_the_published_ones() {
        for (layers, hidden, ffn, heads, kv, tensors, parameters) in
            [(28, 2048, 6656, 8, 2, 226, 1_707_657_216_usize), (36, 2560, 10240, 16, 4, 290, 4_112_079_360)]
        {
            let mut json = crate::spark::config::tests::published();
            for (key, value) in [
                ("num_hidden_layers", layers),
                ("hidden_size", hidden),
                ("intermediate_size", ffn),
                ("num_attention_heads", heads),
                ("num_key_value_heads", kv),
            ] {
                json[key] = value.into();
            }
            json["layer_types"] = (0..layers)
                .map(|i| if i % 4 == 3 { "full_attention" } else { "sliding_attention" })
                .collect();
            let specs = tensor_specs(&SparkConfig::parse(&json).unwrap());
            assert_eq!(specs.len(), tensors);
            assert_eq!(specs.iter().map(|s| s.shape.iter().product::<usize>()).sum::<usize>(), parameters);
        }
    }

    #[test]
    fn buffers_are_known_by_name() {
        assert!(is_known_buffer("model.layers.3.self_attn.rotary_emb.inv_freq"));
        assert!(is_known_buffer("model.rotary_emb.inv_freq"));
        assert!(!is_known_buffer("model.layers.3.self_attn.q_k_v_proj.bias"));
        assert!(!is_known_buffer("inv_freq"));
    }
}
