//! The `quantization_config` block of compressed-tensors, as version 0.17 parses it.
//!
//! The library's models of `weights` and `input_activations` forbid unknown keys, so nothing is added
//! to them; `scale_dtype` and `zp_dtype` are left out because older versions don't know them.

use serde_json::{Map, Value, json};

/// The head gate: plain in every artifact, and of the class `Linear`. The expression matches from the
/// start of a dotted name.
pub(super) const HEAD_GATE: &str = "re:.*g_proj$";

/// int8 weights per output channel and int8 activations per token.
pub(super) fn int8_group(targets: &[&str]) -> Value {
    json!({
        "targets": targets,
        "format": "int-quantized",
        "weights": {
            "num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel",
            "group_size": null, "block_structure": null, "dynamic": false,
            "actorder": null, "observer": "minmax", "observer_kwargs": {}
        },
        "input_activations": {
            "num_bits": 8, "type": "int", "symmetric": true, "strategy": "token",
            "group_size": null, "block_structure": null, "dynamic": true,
            "actorder": null, "observer": null, "observer_kwargs": {}
        },
        "output_activations": null
    })
}

/// 4-bit weights in groups. `input_activations` is null: the int8 rows are the kernel's own affair, and
/// with a scheme there vLLM takes another class.
pub(super) fn int4_group(targets: &[&str], group_size: usize, symmetric: bool) -> Value {
    json!({
        "targets": targets,
        "format": "pack-quantized",
        "input_activations": null,
        "output_activations": null,
        "weights": {
            "num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group",
            "group_size": group_size, "block_structure": null, "dynamic": false,
            "actorder": null, "observer": "minmax", "observer_kwargs": {}
        }
    })
}

/// The block around the groups, which are named in order.
pub(super) fn block(format: &str, ignore: &[&str], groups: Vec<Value>) -> Value {
    let groups: Map<_, _> = groups.into_iter().enumerate().map(|(i, g)| (format!("group_{i}"), g)).collect();
    json!({
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "global_compression_ratio": null,
        "kv_cache_scheme": null,
        "version": "0.17.0",
        "ignore": ignore,
        "config_groups": groups
    })
}

/// What vLLM does when the configuration differs at this dotted path.
pub(super) fn consequence(path: &str) -> &'static str {
    match path.strip_prefix("quantization_config") {
        None if path.starts_with("tie_word_embeddings") => {
            "with the tie on, vLLM drops the head's tensors and multiplies by the embedding; off, it looks for them"
        }
        None => "the loader builds another model than the weights belong to",
        Some("") => "without the block vLLM takes the model for unquantized and stops at the first scale",
        Some(p) if p.starts_with(".quant_method") => "vLLM selects its loader by this key",
        Some(p) if p.starts_with(".ignore") => {
            "the loader looks for codes of g_proj or of the head that are not there, or leaves theirs unread"
        }
        Some(p) if p.contains(".targets") => "modules outside the targets are loaded as unquantized",
        Some(p) if p.contains(".format") => {
            "the loader expects another packing and finds no kernel for these tensors"
        }
        Some(p) if p.contains("strategy") => "vLLM fails the shape check of the scales",
        Some(p) if p.contains(".weights.") || p.contains(".input_activations.") => {
            "compressed-tensors refuses unknown or contradictory arguments; others change the arithmetic"
        }
        Some(_) => "compressed-tensors reads another scheme than the tensors follow",
    }
}
