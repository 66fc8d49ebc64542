//! From the metadata of a Spark GGUF to the configuration of the checkpoint that it was made from.

use serde_json::{Map, Value as Json, json};

use super::{Header, Metadata, Value};
use crate::error::InputError;
use crate::spark::SparkConfig;

/// `general.architecture`, and the prefix of the architecture's keys.
const ARCHITECTURE: &str = "spark2_5";

/// Keys below the architecture's prefix that are read, with the key of config.json that says the same.
const KEYS: &[(&str, &str)] = &[
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("vocab_size", "vocab_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.value_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.sliding_window_pattern", "layer_types"),
    ("rope.freq_base", "rope_parameters.full_attention.rope_theta"),
    ("rope.freq_base_swa", "rope_parameters.sliding_attention.rope_theta"),
    ("rope.dimension_count", "rope_parameters.full_attention.partial_rotary_factor"),
    ("rope.dimension_count_swa", "rope_parameters.sliding_attention.partial_rotary_factor"),
];

/// The architecture of the file.
///
/// # Errors
/// When it is another one, or a key is missing, malformed, contradictory or one that changes the
/// arithmetic in a way that is not implemented.
pub fn config(file: &str, header: &Header, bytes: &[u8]) -> Result<SparkConfig, InputError> {
    let json = config_json(file, header, bytes)?;
    let mut config = SparkConfig::parse(&json).map_err(|e| {
        let known = KEYS.iter().find(|(_, key)| *key == e.key);
        let key = known.map_or(e.key, |(key, _)| format!("{ARCHITECTURE}.{key}"));
        InputError::file(file).subject(key).expected(e.expected).found(e.found)
    })?;
    config.notes.extend(notes(file, &header.metadata)?);
    Ok(config)
}

/// The config.json that says what the metadata says. What a GGUF of this architecture does not state is
/// what llama.cpp takes for granted: sigmoid gates, no biases, and a head that is tied unless the file
/// has one.
///
/// # Errors
/// When a key that it is made from is missing or of another type, or the file is of another architecture
/// or one of several.
pub fn config_json(file: &str, header: &Header, bytes: &[u8]) -> Result<Json, InputError> {
    let keys = Keys { file, metadata: &header.metadata };
    keys.check_kind()?;
    let layers = keys.whole("block_count")?;
    let head_dim = keys.whole("attention.key_length")?;
    let value_dim = keys.whole("attention.value_length")?;
    if value_dim != head_dim {
        let expected = format!("{head_dim}, the length of a key");
        return Err(keys.error("attention.value_length").expected(expected).found(value_dim));
    }
    let rope = |theta: &str, dimensions: &str| -> Result<Json, InputError> {
        let factor = rotary_factor(keys.whole(dimensions)?, head_dim);
        Ok(json!({
            "rope_type": "default", "rope_theta": keys.float(theta)?, "partial_rotary_factor": factor,
        }))
    };
    let mut config = json!({
        "architectures": ["Spark2_5ForCausalLM"],
        "attention_bias": false,
        "gate_attn_act_mode": "sigmoid",
        "head_dim": head_dim,
        "headwise_attn_output_gate": true,
        "hidden_act": "gelu",
        "hidden_size": keys.whole("embedding_length")?,
        "intermediate_size": keys.whole("feed_forward_length")?,
        "layer_types": keys.layer_types(layers, bytes)?,
        "max_position_embeddings": keys.whole("context_length")?,
        "mlp_bias": false,
        "model_type": "spark2_5",
        "num_attention_heads": keys.whole("attention.head_count")?,
        "num_hidden_layers": layers,
        "num_key_value_heads": keys.whole("attention.head_count_kv")?,
        "rms_norm_eps": keys.float("attention.layer_norm_rms_epsilon")?,
        "rope_parameters": {
            "full_attention": rope("rope.freq_base", "rope.dimension_count")?,
            "sliding_attention": rope("rope.freq_base_swa", "rope.dimension_count_swa")?,
        },
        "sliding_window": keys.whole("attention.sliding_window")?,
        "tie_word_embeddings": !header.tensors.iter().any(|t| t.name == super::tensors::HEAD),
        "vocab_size": keys.whole("vocab_size")?,
    });
    let tokens = [("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")];
    if let Some(map) = config.as_object_mut() {
        keys.tokens(&tokens, map)?;
    }
    Ok(config)
}

/// The factor that gives back `dimensions` when it is multiplied by the width of a head and cut off, as
/// config.json is read.
pub(super) fn rotary_factor(dimensions: u64, head_dim: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "both are bounded by what a u32 holds")]
    let (dimensions, head_dim) = (dimensions as f64, head_dim as f64);
    let factor = dimensions / head_dim;
    if (factor * head_dim).trunc() < dimensions { factor.next_up() } else { factor }
}

/// Typed access to the metadata.
struct Keys<'a> {
    file: &'a str,
    metadata: &'a Metadata,
}

impl Keys<'_> {
    /// An error about a key of the architecture.
    fn error(&self, key: &str) -> InputError {
        InputError::file(self.file).subject(format!("{ARCHITECTURE}.{key}"))
    }

    fn get(&self, key: &str, expected: &str) -> Result<&Value, InputError> {
        self.metadata.get(&format!("{ARCHITECTURE}.{key}")).ok_or_else(|| {
            let hint = "the value cannot be guessed; convert the checkpoint again with a current llama.cpp";
            self.error(key).expected(expected).found("no such key").hint(hint)
        })
    }

    /// A whole number that a u32 holds: what the format has for all of these.
    fn whole(&self, key: &str) -> Result<u64, InputError> {
        const EXPECTED: &str = "a whole number";
        let value = self.get(key, EXPECTED)?;
        let number = match value {
            Value::Whole(n) => u32::try_from(*n).ok(),
            _ => None,
        };
        number.map(u64::from).ok_or_else(|| self.error(key).expected(EXPECTED).found(value.shown()))
    }

    fn float(&self, key: &str) -> Result<f64, InputError> {
        const EXPECTED: &str = "a number above zero";
        match self.get(key, EXPECTED)? {
            Value::Float(x) if x.is_finite() && *x > 0.0 => Ok(*x),
            other => Err(self.error(key).expected(EXPECTED).found(other.shown())),
        }
    }

    /// The list of layer types; true, or any number but 0, means sliding.
    fn layer_types(&self, layers: u64, bytes: &[u8]) -> Result<Vec<&'static str>, InputError> {
        const KEY: &str = "attention.sliding_window_pattern";
        let expected = format!("a list of {layers} booleans (block_count), true for sliding");
        let value = self.get(KEY, &expected)?;
        let numbers = match value {
            Value::List(list) => list.numbers(bytes).filter(|numbers| numbers.len() as u64 == layers),
            _ => None,
        };
        let numbers = numbers.ok_or_else(|| self.error(KEY).expected(expected).found(value.shown()))?;
        Ok(numbers.iter().map(|n| if *n == 0 { "full_attention" } else { "sliding_attention" }).collect())
    }

    /// Token ids under their names in config.json, where the file has them.
    fn tokens(&self, names: &[(&str, &str)], config: &mut Map<String, Json>) -> Result<(), InputError> {
        for (token, name) in names {
            let key = format!("tokenizer.ggml.{token}_token_id");
            match self.metadata.get(&key) {
                None => {}
                Some(Value::Whole(id)) if u32::try_from(*id).is_ok() => {
                    config.insert((*name).to_owned(), json!(u32::try_from(*id).unwrap_or_default()));
                }
                Some(other) => {
                    let error = InputError::file(self.file).subject(key);
                    return Err(error.expected("a token id").found(other.shown()));
                }
            }
        }
        Ok(())
    }

    /// Refuses what is not a whole Spark model.
    fn check_kind(&self) -> Result<(), InputError> {
        const KEY: &str = "general.architecture";
        let found = self.metadata.get(KEY);
        if self.metadata.text(KEY) != Some(ARCHITECTURE) {
            let found = found.map_or_else(|| "no such key".to_owned(), Value::shown);
            let hint = "only Spark-X2.5 models are supported";
            let error = InputError::file(self.file).subject(KEY);
            return Err(error.expected(format!("{ARCHITECTURE:?}")).found(found).hint(hint));
        }
        if let Some(kind) = self.metadata.text("general.type").filter(|kind| *kind != "model") {
            let error = InputError::file(self.file).subject("general.type");
            return Err(error.expected("\"model\"").found(format!("{kind:?}")));
        }
        // 0 is what putting parts together leaves behind.
        if let Some(Value::Whole(parts @ 2..)) = self.metadata.get("split.count") {
            return Err(InputError::file(self.file)
                .subject("split.count")
                .expected("a model in one file")
                .found(format!("one of {parts} files"))
                .hint("put them together with llama-gguf-split --merge"));
        }
        Ok(())
    }
}

/// A note for every key of the architecture that is not read.
///
/// # Errors
/// The first that changes the arithmetic of architectures that have it.
fn notes(file: &str, metadata: &Metadata) -> Result<Vec<String>, InputError> {
    const FOREIGN: &[&str] =
        &["scal", "softcap", "expert", "rope", "attention", "bias", "clamp", "norm", "parallel", "pooling"];
    let mut notes = Vec::new();
    for (key, value) in metadata.iter() {
        let Some(rest) = key.strip_prefix(ARCHITECTURE).and_then(|rest| rest.strip_prefix('.')) else {
            continue;
        };
        let unscaled = rest == "rope.scaling.type" && metadata.text(key) == Some("none");
        if KEYS.iter().any(|(known, _)| *known == rest) || unscaled {
            continue;
        }
        if FOREIGN.iter().any(|fragment| rest.contains(fragment)) {
            return Err(InputError::file(file)
                .subject(key)
                .expected("no such key (llama.cpp does not read it for this architecture)")
                .found(value.shown())
                .hint("elsewhere it changes the arithmetic"));
        }
        notes.push(format!("{file}: {key} is not a key of this architecture; not read"));
    }
    Ok(notes)
}
