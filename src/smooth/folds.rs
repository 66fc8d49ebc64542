//! What was moved, as the manifest keeps it.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::folded::Scaling;
use crate::quant::smooth::MAX_EXPONENT;
use crate::spark::{Module, SparkConfig};

/// Exponents of powers of two, one per factor; as text two hex digits each (two's complement).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exponents(pub Vec<i8>);

impl Serialize for Exponents {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text: String = self.0.iter().map(|e| format!("{:02x}", e.cast_unsigned())).collect();
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for Exponents {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let pair = |pair: &[u8]| -> Option<i8> {
            // Not every byte that a number may begin with is a digit.
            let digits = pair.len() == 2 && pair.iter().all(u8::is_ascii_hexdigit);
            let text = std::str::from_utf8(pair).ok().filter(|_| digits)?;
            let exponent = u8::from_str_radix(text, 16).ok()?.cast_signed();
            (-MAX_EXPONENT..=MAX_EXPONENT).contains(&exponent).then_some(exponent)
        };
        let exponents: Option<Vec<i8>> = text.as_bytes().chunks(2).map(pair).collect();
        exponents
            .map(Self)
            .ok_or_else(|| D::Error::custom("exponents: expected two hex digits each, -15 to 15"))
    }
}

/// The folds of a layer; absent where nothing was moved. Columns are multiplied by `2^e`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerFolds {
    /// From the input norm into q, k, v and the head gate, `[hidden]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<Exponents>,
    /// From the rows of v into the output projection, `[kv rows]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub values: Option<Exponents>,
    /// From the post-attention norm into gate and up, `[hidden]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mlp: Option<Exponents>,
    /// From the rows of up into down, `[ffn]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub product: Option<Exponents>,
}

/// The folds of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Smoothing {
    /// By layer.
    pub layers: Vec<LayerFolds>,
}

/// The factor of a column of `out_proj`: query heads read the values of their key head.
pub(super) fn value_row(config: &SparkConfig, column: usize) -> usize {
    let (head, dimension) = (column / config.head_dim, column % config.head_dim);
    let shared = config.num_attention_heads / config.num_key_value_heads;
    head / shared * config.head_dim + dimension
}

impl Smoothing {
    /// Whether the folds are for a model of these sizes.
    pub fn fits(&self, config: &SparkConfig) -> bool {
        let long =
            |exponents: &Option<Exponents>, n: usize| exponents.as_ref().is_none_or(|e| e.0.len() == n);
        self.layers.len() == config.num_hidden_layers()
            && self.layers.iter().all(|layer| {
                long(&layer.attention, config.hidden_size)
                    && long(&layer.values, config.kv_rows())
                    && long(&layer.mlp, config.hidden_size)
                    && long(&layer.product, config.intermediate_size)
            })
    }

    /// How many folds moved something, and how many there could be.
    pub fn count(&self) -> (usize, usize) {
        let folds = |l: &LayerFolds| [&l.attention, &l.values, &l.mlp, &l.product].map(Option::is_some);
        let moved = self.layers.iter().flat_map(folds).filter(|moved| *moved).count();
        (moved, 4 * self.layers.len())
    }

    /// What the folds do to a tensor; `None` where they leave it alone.
    pub fn of(&self, module: Module, layer: Option<usize>, config: &SparkConfig) -> Option<Scaling> {
        let layer = self.layers.get(layer?)?;
        let columns = |e: &Option<Exponents>| e.as_ref().map(|e| e.0.clone()).unwrap_or_default();
        let inverse = |e: &Option<Exponents>| columns(e).into_iter().map(|e| -e).collect::<Vec<i8>>();
        let (rows, columns) = match module {
            Module::InputNorm => (Vec::new(), inverse(&layer.attention)),
            Module::HeadGate => (Vec::new(), columns(&layer.attention)),
            Module::QkvProj => {
                let values = inverse(&layer.values);
                let before = if values.is_empty() { 0 } else { config.q_rows() + config.kv_rows() };
                (std::iter::repeat_n(0, before).chain(values).collect(), columns(&layer.attention))
            }
            Module::OutProj => {
                let values = columns(&layer.values);
                let all = 0..if values.is_empty() { 0 } else { config.q_rows() };
                (Vec::new(), all.map(|column| values[value_row(config, column)]).collect())
            }
            Module::PostAttentionNorm => (Vec::new(), inverse(&layer.mlp)),
            Module::MlpGate => (Vec::new(), columns(&layer.mlp)),
            Module::MlpUp => (inverse(&layer.product), columns(&layer.mlp)),
            Module::MlpDown => (Vec::new(), columns(&layer.product)),
            Module::Embedding | Module::FinalNorm | Module::LmHead => return None,
        };
        (!rows.is_empty() || !columns.is_empty()).then(|| Scaling::new(rows, columns))
    }
}
