//! `config.json` to [`SparkConfig`]: every field that changes the arithmetic is read or refused.

use std::fmt;

use serde_json::{Map, Value};

use super::unread_keys::unread_keys;
use crate::error::one_line;

/// Largest size accepted for any dimension: far above the family, small enough that products of
/// three dimensions stay within 64 bits.
const MAX_DIMENSION: u64 = 1 << 20;

/// Most layers accepted: a list of names and shapes is made for each.
const MAX_LAYERS: u64 = 4096;

/// Which keys a layer sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerType {
    /// The last `sliding_window` positions, the current one included.
    Sliding,
    /// All positions up to the current one.
    Full,
}

impl LayerType {
    /// The name used in config.json.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sliding => "sliding_attention",
            Self::Full => "full_attention",
        }
    }
}

/// The activation of the head-wise attention gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateActivation {
    /// `1 / (1 + exp(-g))`, what the published checkpoints use.
    Sigmoid,
    /// `g / (1 + exp(-g))`, which the published code also knows.
    Silu,
}

/// Rotary embedding of one layer type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeParameters {
    /// Base of the inverse frequencies.
    pub theta: f64,
    /// Leading dimensions of each head that are rotated, in half-split pairs `(i, i + rotary_dims / 2)`.
    pub rotary_dims: usize,
}

/// Everything config.json says that the arithmetic depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct SparkConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// One entry per layer.
    pub layer_types: Vec<LayerType>,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of a head. Heads x head_dim need not be the hidden size (it is not in the 4B).
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Window of the sliding layers, the current position included; 0 when there is no such layer.
    pub sliding_window: usize,
    /// Rotary parameters of the sliding layers, if there are any.
    pub rope_sliding: Option<RopeParameters>,
    /// Rotary parameters of the full layers, if there are any.
    pub rope_full: Option<RopeParameters>,
    /// Activation of the attention gate.
    pub gate_activation: GateActivation,
    /// Whether the head multiplies by the embedding.
    pub tie_word_embeddings: bool,
    /// Longest position the model was published for.
    pub max_position_embeddings: usize,
    /// Token ids that end generation.
    pub eos_token_ids: Vec<u32>,
    /// What was assumed or left unread, one sentence each, to be shown to the user.
    pub notes: Vec<String>,
}

/// A refused configuration key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The key, dotted when nested.
    pub key: String,
    /// What would have been right.
    pub expected: String,
    /// What is there.
    pub found: String,
    /// What to do.
    pub hint: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = format!("{}: expected {}, found {}", self.key, self.expected, self.found);
        if !self.hint.is_empty() {
            line = format!("{line}; {}", self.hint);
        }
        // JSON strings may hold what drives a terminal.
        f.write_str(&one_line(&line))
    }
}

impl std::error::Error for ConfigError {}

impl SparkConfig {
    /// Reads a parsed `config.json`.
    ///
    /// Numbers may be written as integers or floats. A missing key is refused unless the published
    /// config class has a default that is the one safe reading (`head_dim` = hidden / heads,
    /// `rms_norm_eps` = 1e-6, absent biases): then a note says so.
    ///
    /// # Errors
    /// The first key that is missing, malformed, contradictory or not implemented.
    pub fn parse(json: &Value) -> Result<Self, ConfigError> {
        let Some(map) = json.as_object() else {
            return Err(refuse("config.json", "a JSON object", kind(json), ""));
        };
        let keys = Keys { map };
        let mut notes = Vec::new();

        match map.get("model_type").and_then(Value::as_str) {
            Some("spark2_5") => {}
            _ => {
                return Err(refuse(
                    "model_type",
                    "\"spark2_5\"",
                    keys.shown("model_type"),
                    "only Spark-X2.5 checkpoints are supported",
                ));
            }
        }
        let is_spark = |v: &Value| v.as_str() == Some("Spark2_5ForCausalLM");
        if !map.get("architectures").and_then(Value::as_array).is_some_and(|a| a.iter().any(is_spark)) {
            return Err(refuse(
                "architectures",
                "[\"Spark2_5ForCausalLM\"]",
                keys.shown("architectures"),
                "the loaders choose the model class by this key",
            ));
        }
        if let Some(block) = map.get("quantization_config").filter(|v| !v.is_null()) {
            let method = block.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
            return Err(refuse(
                "quantization_config",
                "no such block",
                format!("an already quantized checkpoint (quant_method {method:?})"),
                "use the full-precision checkpoint",
            ));
        }
        keys.exactly("hidden_act", "gelu", "the MLP is implemented with the exact GELU only")?;
        keys.absent_or_false("attention_bias", &mut notes)?;
        keys.absent_or_false("mlp_bias", &mut notes)?;
        if !keys.boolean("headwise_attn_output_gate")? {
            return Err(refuse(
                "headwise_attn_output_gate",
                "true",
                "false",
                "checkpoints without the head-wise attention gate are not supported",
            ));
        }
        let gate_activation = match keys.string("gate_attn_act_mode")? {
            "sigmoid" => GateActivation::Sigmoid,
            "silu" => GateActivation::Silu,
            other => {
                return Err(refuse(
                    "gate_attn_act_mode",
                    "\"sigmoid\" or \"silu\"",
                    format!("{other:?}"),
                    "",
                ));
            }
        };

        let hidden_size = keys.dimension("hidden_size")?;
        let intermediate_size = keys.dimension("intermediate_size")?;
        let num_hidden_layers = keys.dimension_up_to("num_hidden_layers", MAX_LAYERS)?;
        let num_attention_heads = keys.dimension("num_attention_heads")?;
        let num_key_value_heads = keys.dimension("num_key_value_heads")?;
        let vocab_size = keys.dimension("vocab_size")?;
        let max_position_embeddings = keys.dimension_up_to("max_position_embeddings", 1 << 40)?;
        if num_attention_heads % num_key_value_heads != 0 {
            return Err(refuse(
                "num_key_value_heads",
                format!("a divisor of num_attention_heads ({num_attention_heads})"),
                num_key_value_heads,
                "",
            ));
        }
        let head_dim = match map.get("head_dim") {
            Some(v) if !v.is_null() => keys.dimension("head_dim")?,
            _ if hidden_size % num_attention_heads == 0 => {
                let derived = hidden_size / num_attention_heads;
                notes.push(format!(
                    "config.json has no head_dim: taken as hidden_size / num_attention_heads = {derived}, \
                     the published default"
                ));
                derived
            }
            _ => {
                return Err(refuse(
                    "head_dim",
                    "a number (hidden_size is not a multiple of num_attention_heads)",
                    "no such key",
                    "add it to config.json",
                ));
            }
        };
        let rms_norm_eps = match map.get("rms_norm_eps") {
            Some(v) if !v.is_null() => keys.positive("rms_norm_eps")?,
            _ => {
                notes
                    .push("config.json has no rms_norm_eps: taken as 1e-6, the published default".to_owned());
                1e-6
            }
        };
        if rms_norm_eps >= 1.0 {
            return Err(refuse("rms_norm_eps", "a number below 1", rms_norm_eps, ""));
        }

        let layer_types = layer_types(&keys, num_hidden_layers)?;
        let has = |kind: LayerType| layer_types.contains(&kind);
        let sliding_window =
            if has(LayerType::Sliding) { keys.dimension_up_to("sliding_window", 1 << 30)? } else { 0 };
        let rope = |kind: LayerType| match has(kind) {
            true => rope_parameters(&keys, kind, head_dim).map(Some),
            false => Ok(None),
        };
        let (rope_sliding, rope_full) = (rope(LayerType::Sliding)?, rope(LayerType::Full)?);

        let config = Self {
            hidden_size,
            intermediate_size,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size,
            rms_norm_eps,
            sliding_window,
            rope_sliding,
            rope_full,
            gate_activation,
            tie_word_embeddings: keys.boolean("tie_word_embeddings")?,
            max_position_embeddings,
            eos_token_ids: eos_token_ids(&keys, vocab_size)?,
            layer_types,
            notes: Vec::new(),
        };
        if config
            .q_rows()
            .checked_add(2 * config.kv_rows())
            .is_none_or(|rows| rows as u64 > MAX_DIMENSION * 4)
        {
            return Err(refuse(
                "num_attention_heads",
                "heads x head_dim below four million",
                num_attention_heads,
                "",
            ));
        }
        notes.extend(unread_keys(map)?);
        Ok(Self { notes, ..config })
    }

    /// Number of layers.
    pub fn num_hidden_layers(&self) -> usize {
        self.layer_types.len()
    }

    /// Query rows of `q_k_v_proj`, and the input width of `out_proj`.
    pub fn q_rows(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Key rows of `q_k_v_proj`; as many value rows follow.
    pub fn kv_rows(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Rotary parameters of a layer type.
    ///
    /// # Panics
    /// When no layer is of that type.
    pub fn rope(&self, kind: LayerType) -> RopeParameters {
        match kind {
            LayerType::Sliding => self.rope_sliding,
            LayerType::Full => self.rope_full,
        }
        .expect("parse() requires rotary parameters for every layer type in use")
    }
}

/// Typed access to the top-level keys.
struct Keys<'a> {
    map: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    fn get(&self, key: &str, expected: &str) -> Result<&'a Value, ConfigError> {
        match self.map.get(key) {
            Some(value) if !value.is_null() => Ok(value),
            _ => Err(refuse(
                key,
                expected,
                self.shown(key),
                "the value cannot be guessed; add it to config.json",
            )),
        }
    }

    fn shown(&self, key: &str) -> String {
        self.map.get(key).map_or_else(|| "no such key".to_owned(), shown)
    }

    fn boolean(&self, key: &str) -> Result<bool, ConfigError> {
        let value = self.get(key, "true or false")?;
        value.as_bool().ok_or_else(|| refuse(key, "true or false", shown(value), ""))
    }

    fn string(&self, key: &str) -> Result<&'a str, ConfigError> {
        let value = self.get(key, "a string")?;
        value.as_str().ok_or_else(|| refuse(key, "a string", shown(value), ""))
    }

    fn exactly(&self, key: &str, wanted: &str, hint: &str) -> Result<(), ConfigError> {
        match self.map.get(key).and_then(Value::as_str) {
            Some(found) if found == wanted => Ok(()),
            _ => Err(refuse(key, format!("{wanted:?}"), self.shown(key), hint)),
        }
    }

    fn absent_or_false(&self, key: &str, notes: &mut Vec<String>) -> Result<(), ConfigError> {
        match self.map.get(key) {
            Some(Value::Bool(false)) => Ok(()),
            None | Some(Value::Null) => {
                notes.push(format!(
                    "config.json has no {key}: taken as false (a bias tensor would be refused by name)"
                ));
                Ok(())
            }
            Some(other) => Err(refuse(key, "false", shown(other), "the architecture has no biases")),
        }
    }

    fn dimension(&self, key: &str) -> Result<usize, ConfigError> {
        self.dimension_up_to(key, MAX_DIMENSION)
    }

    fn dimension_up_to(&self, key: &str, max: u64) -> Result<usize, ConfigError> {
        let expected = format!("a whole number from 1 to {max}");
        let value = self.get(key, &expected)?;
        whole(value)
            .filter(|n| (1..=max).contains(n))
            .and_then(|n| usize::try_from(n).ok())
            .ok_or_else(|| refuse(key, expected, shown(value), ""))
    }

    fn positive(&self, key: &str) -> Result<f64, ConfigError> {
        let value = self.get(key, "a number above zero")?;
        positive(value).ok_or_else(|| refuse(key, "a number above zero", shown(value), ""))
    }
}

fn layer_types(keys: &Keys<'_>, num_hidden_layers: usize) -> Result<Vec<LayerType>, ConfigError> {
    let expected = format!("a list of {num_hidden_layers} layer types (num_hidden_layers)");
    let value = keys.get("layer_types", &expected)?;
    let Some(list) = value.as_array() else {
        return Err(refuse("layer_types", expected, kind(value), ""));
    };
    if list.len() != num_hidden_layers {
        return Err(refuse(
            "layer_types",
            expected,
            format!("{} entries", list.len()),
            "left behind by pruning?",
        ));
    }
    list.iter()
        .enumerate()
        .map(|(i, entry)| match entry.as_str() {
            Some("sliding_attention") => Ok(LayerType::Sliding),
            Some("full_attention") => Ok(LayerType::Full),
            _ => Err(refuse(
                format!("layer_types[{i}]"),
                "\"sliding_attention\" or \"full_attention\"",
                shown(entry),
                "",
            )),
        })
        .collect()
}

fn rope_parameters(
    keys: &Keys<'_>,
    kind_: LayerType,
    head_dim: usize,
) -> Result<RopeParameters, ConfigError> {
    let key = |name: &str| format!("rope_parameters.{}.{name}", kind_.name());
    let all = keys.get("rope_parameters", "an object with an entry for every layer type")?;
    let entry = all.get(kind_.name()).and_then(Value::as_object).ok_or_else(|| {
        refuse(
            format!("rope_parameters.{}", kind_.name()),
            "an object (the two layer types use different rotary tables)",
            all.get(kind_.name()).map_or_else(|| "no such key".to_owned(), shown),
            "a setting for all layers alike is not how this model was trained",
        )
    })?;
    for (name, value) in entry {
        let known = match name.as_str() {
            "rope_theta" | "partial_rotary_factor" => true,
            "rope_type" => value.as_str() == Some("default"),
            _ => value.is_null(),
        };
        if !known {
            return Err(refuse(
                key(name),
                "rope_type \"default\" without scaling",
                shown(value),
                "rotary scaling is not implemented",
            ));
        }
    }
    let number = |name: &str| {
        let value = entry.get(name).filter(|v| !v.is_null()).ok_or_else(|| {
            refuse(
                key(name),
                "a number above zero",
                "no such key",
                "public readers disagree on its default; add it",
            )
        })?;
        positive(value).ok_or_else(|| refuse(key(name), "a number above zero", shown(value), ""))
    };
    let theta = number("rope_theta")?;
    let factor = number("partial_rotary_factor")?;
    // As the reference: int(head_dim * factor), truncated.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "0 < factor <= 1 is checked first"
    )]
    let rotary_dims = if factor <= 1.0 { (head_dim as f64 * factor) as usize } else { 0 };
    if rotary_dims < 2 || rotary_dims % 2 != 0 {
        return Err(refuse(
            key("partial_rotary_factor"),
            format!("a factor of at most 1 that leaves an even number of the {head_dim} head dims"),
            factor,
            "",
        ));
    }
    Ok(RopeParameters { theta, rotary_dims })
}

fn eos_token_ids(keys: &Keys<'_>, vocab_size: usize) -> Result<Vec<u32>, ConfigError> {
    let id = |value: &Value| {
        whole(value).filter(|&id| id < vocab_size as u64).and_then(|id| u32::try_from(id).ok()).ok_or_else(
            || refuse("eos_token_id", format!("token ids below vocab_size ({vocab_size})"), shown(value), ""),
        )
    };
    match keys.map.get("eos_token_id") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(one) => Ok(vec![id(one)?]),
    }
}

/// A non-negative whole number, written as an integer or as a float without a fraction.
fn whole(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let float = value.as_f64()?;
        // 2^53: above it a float no longer tells neighbouring integers apart.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "range and fraction are checked"
        )]
        ((0.0..=9_007_199_254_740_992.0).contains(&float) && float.fract() == 0.0).then_some(float as u64)
    })
}

fn positive(value: &Value) -> Option<f64> {
    value.as_f64().filter(|x| x.is_finite() && *x > 0.0)
}

pub(super) fn refuse(
    key: impl Into<String>,
    expected: impl fmt::Display,
    found: impl fmt::Display,
    hint: &str,
) -> ConfigError {
    ConfigError {
        key: key.into(),
        expected: expected.to_string(),
        found: found.to_string(),
        hint: hint.to_owned(),
    }
}

/// A value as it stands, cut to a length that fits on a line.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 {
        text
    } else {
        format!("{}...", text.chars().take(57).collect::<String>())
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
pub(crate) mod tests;
