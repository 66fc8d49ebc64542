//! What a served model holds beside its weights: keys and values, and rotary tables.

use serde::Serialize;

use crate::spark::{LayerType, SparkConfig};

/// Positions of a block: what vLLM allocates at a time unless it is told otherwise.
const BLOCK: u64 = 16;

/// Bytes of a cached number: bf16 on processors, 16-bit codes in exports.
const ELEMENT_BYTES: u64 = 2;

/// Keys and values of all sequences, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct KvBudget {
    /// Of one token in one layer: `kv_heads * head_dim * 2 * 2`.
    pub bytes_per_token_and_layer: u64,
    /// Every layer holds the whole context: what a backend allocates that does not know layer types.
    /// The safe number for vLLM's CPU backend.
    pub flat_bytes: u64,
    /// The flat number and a quarter, for what a backend keeps back.
    pub flat_padded_bytes: u64,
    /// Sliding layers hold their window only.
    pub hybrid_bytes: u64,
    /// Caches of an export: `window - 1` entries in sliding layers, `context - 1` in full ones.
    pub npu_bytes: u64,
}

impl KvBudget {
    /// The budget of `sessions` sequences of `context` positions.
    ///
    /// Sizes are bounded by the configuration (dimensions below 2^20, layers below 2^12, positions below
    /// 2^40); a product that does not fit saturates, and nothing has that much memory.
    pub fn new(config: &SparkConfig, context: u64, sessions: u64) -> Self {
        let bytes = config.kv_rows() as u64 * 2 * ELEMENT_BYTES;
        let layers = |kind| config.layer_types.iter().filter(|k| **k == kind).count() as u64;
        let (sliding, full) = (layers(LayerType::Sliding), layers(LayerType::Full));
        let window = config.sliding_window as u64;
        let blocks = |positions: u64| positions.div_ceil(BLOCK).saturating_mul(BLOCK);
        let total = |token_layers: u64| token_layers.saturating_mul(bytes).saturating_mul(sessions);
        let sum = |of_sliding: u64, of_full: u64| {
            sliding.saturating_mul(of_sliding).saturating_add(full.saturating_mul(of_full))
        };
        let flat_bytes = total(sum(blocks(context), blocks(context)));
        Self {
            bytes_per_token_and_layer: bytes,
            flat_bytes,
            flat_padded_bytes: flat_bytes.saturating_add(flat_bytes / 4),
            hybrid_bytes: total(sum(blocks(window.min(context)), blocks(context))),
            npu_bytes: total(sum(window.saturating_sub(1), context.saturating_sub(1))),
        }
    }
}

/// Tables of cosines and sines that a runtime builds ahead, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RotaryTables {
    /// Positions the configuration allows.
    pub max_positions: u64,
    /// Tables in bf16 up to that length, one `[positions, rotary_dims]` per layer type.
    pub bytes_at_max: u64,
    /// Positions to be served, `--context`.
    pub served_positions: u64,
    /// Tables up to the served length.
    pub bytes_served: u64,
}

impl RotaryTables {
    /// The tables of a configuration.
    pub fn new(config: &SparkConfig, context: u64) -> Self {
        let dims: u64 = [config.rope_sliding, config.rope_full]
            .iter()
            .flatten()
            .map(|rope| rope.rotary_dims as u64)
            .sum();
        let bytes = |positions: u64| positions.saturating_mul(dims).saturating_mul(ELEMENT_BYTES);
        let max_positions = config.max_position_embeddings as u64;
        Self {
            max_positions,
            bytes_at_max: bytes(max_positions),
            served_positions: context,
            bytes_served: bytes(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// The published configuration of the 1.7B: 21 sliding layers with a window of 512, 7 full ones, two
    /// key heads of 256.
    fn published() -> SparkConfig {
        let mut json = crate::spark::published_config();
        let four = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"];
        json["layer_types"] = four.repeat(7).into();
        json["num_hidden_layers"] = 28.into();
        json["num_key_value_heads"] = 2.into();
        SparkConfig::parse(&json).unwrap()
    }

    #[test]
    fn a_cache_of_the_published_model_is_what_its_arithmetic_says() {
        let budget = KvBudget::new(&published(), 32_768, 1);
        assert_eq!(budget.bytes_per_token_and_layer, 2048);
        assert_eq!(budget.flat_bytes, 917_504 * 2048);
        assert_eq!(budget.hybrid_bytes, 240_128 * 2048);
        assert_eq!(budget.flat_padded_bytes, 917_504 * 2048 / 4 * 5);
        assert_eq!(budget.npu_bytes, (21 * 511 + 7 * 32_767) * 2048);
        let two = KvBudget::new(&published(), 32_768, 2);
        assert_eq!(two.hybrid_bytes, 2 * budget.hybrid_bytes);
    }

    #[test]
    fn blocks_are_whole_and_a_short_context_does_not_fill_a_window() {
        // 56 KiB per token over 28 layers, blocks of 16.
        assert_eq!(KvBudget::new(&published(), 17, 1).flat_bytes, 32 * 56 * 1024);
        let short = KvBudget::new(&published(), 100, 1);
        assert_eq!(short.hybrid_bytes, short.flat_bytes);
        // 128 MiB hold 2340 tokens.
        let at = |context| KvBudget::new(&published(), context, 1).flat_bytes;
        assert!(at(2336) <= 128 * MIB && at(2352) > 128 * MIB);
    }

    #[test]
    fn rotary_tables_cost_640_mib_uncapped_and_next_to_nothing_capped() {
        let tables = RotaryTables::new(&published(), 2048);
        assert_eq!((tables.max_positions, tables.bytes_at_max), (1 << 20, 640 * MIB));
        assert_eq!((tables.served_positions, tables.bytes_served), (2048, MIB + MIB / 4));
    }
}
