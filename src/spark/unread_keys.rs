//! Keys of config.json that are not read: inert, foreign and refused, or unknown and noted.

use serde_json::{Map, Value};

use super::config::{ConfigError, refuse, shown};
use crate::error::one_line;

/// Keys that have no effect on inference arithmetic, or that are read elsewhere.
const INERT_KEYS: &[&str] = &[
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "initializer_range",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_name_or_path",
    "_attn_implementation",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "is_decoder",
    "is_encoder_decoder",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "problem_type",
];

/// Keys that `SparkConfig::parse` reads.
const READ_KEYS: &[&str] = &[
    "attention_bias",
    "eos_token_id",
    "gate_attn_act_mode",
    "head_dim",
    "headwise_attn_output_gate",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "tie_word_embeddings",
    "vocab_size",
];

/// Keys of related architectures that change the arithmetic and that Spark does not implement, with
/// the fragment of the name that gives them away. Any value but null and false is refused: reading
/// past one of them is how a converter produces a model that runs and is wrong.
const FOREIGN_FRAGMENTS: &[&str] = &[
    "rope_theta",
    "rope_scaling",
    "rotary",
    "softcap",
    "multiplier",
    "logits_scaling",
    "logit_scale",
    "scale_emb",
    "scale_depth",
    "embedding_scale",
    "query_pre_attn_scalar",
    "qk_norm",
    "qk_layernorm",
    "use_sliding_window",
    "sliding_window_pattern",
    "max_window_layers",
    "attention_sink",
    "attn_sink",
    "expert",
    "no_rope",
    "alibi",
    "parallel_attn",
    "elementwise_attn_output_gate",
    "attn_output_gate",
    "hidden_activation",
];

/// A note for every key that nobody knows.
///
/// # Errors
/// The first key known to change the arithmetic of a related architecture.
pub(super) fn unread_keys(map: &Map<String, Value>) -> Result<Vec<String>, ConfigError> {
    let mut notes = Vec::new();
    for (key, value) in map {
        if READ_KEYS.contains(&key.as_str()) || INERT_KEYS.contains(&key.as_str()) {
            continue;
        }
        let neutral = matches!(value, Value::Null | Value::Bool(false));
        if !neutral && FOREIGN_FRAGMENTS.iter().any(|fragment| key.contains(fragment)) {
            return Err(refuse(
                key,
                "no such key (Spark-X2.5 keeps rotary settings per layer type under rope_parameters)",
                shown(value),
                "the published architecture does not read it, and elsewhere it changes the arithmetic; \
                 remove it if it has no effect",
            ));
        }
        if !neutral {
            let key = one_line(key);
            notes.push(format!("config.json: {key} is not a key of this architecture; kept, not read"));
        }
    }
    Ok(notes)
}
