use super::*;

use serde_json::json;

use crate::formats::Choice;
use crate::tensor::{Dtype, NonFinite, TensorView};

fn format(int8_head: bool) -> W8a8 {
    W8a8::new(Method::RoundToNearest, int8_head)
}

/// The configuration that the published vLLM build was seen to load, key for key.
#[test]
fn the_config_block_is_the_one_that_was_run() {
    let expected: Value = serde_json::from_str(
        r#"{
  "quant_method": "compressed-tensors",
  "format": "int-quantized",
  "quantization_status": "compressed",
  "global_compression_ratio": null,
  "kv_cache_scheme": null,
  "version": "0.17.0",
  "ignore": ["lm_head", "re:.*g_proj$"],
  "config_groups": {
    "group_0": {
      "targets": ["Linear"],
      "format": "int-quantized",
      "weights": {"num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel",
                  "group_size": null, "block_structure": null, "dynamic": false,
                  "actorder": null, "observer": "minmax", "observer_kwargs": {}},
      "input_activations": {"num_bits": 8, "type": "int", "symmetric": true, "strategy": "token",
                  "group_size": null, "block_structure": null, "dynamic": true,
                  "actorder": null, "observer": null, "observer_kwargs": {}},
      "output_activations": null
    }
  }
}"#,
    )
    .unwrap();
    assert_eq!(format(false).quantization_config(), expected);
    let int8_head = format(true).quantization_config();
    assert_eq!(int8_head["ignore"], json!(["re:.*g_proj$"]));
    assert_eq!(int8_head["config_groups"]["group_0"]["targets"], json!(["Linear", "lm_head"]));
}

#[test]
fn the_config_keeps_its_keys_and_their_order() {
    let mut config: Map<String, Value> =
        serde_json::from_str(r#"{"z": 1, "tie_word_embeddings": true, "a": {"x": null}}"#).unwrap();
    format(false).patch_config(&mut config, &[]);
    assert_eq!(config.keys().collect::<Vec<_>>(), ["z", "tie_word_embeddings", "a", "quantization_config"]);
    assert_eq!(config["tie_word_embeddings"], true);
    format(true).patch_config(&mut config, &[]);
    assert_eq!(config["tie_word_embeddings"], false);
    assert_eq!(config.keys().nth(1).unwrap(), "tie_word_embeddings");
}

#[test]
fn options_come_back() {
    for method in [Method::RoundToNearest, Method::Search] {
        for int8_head in [false, true] {
            let format = W8a8::new(method, int8_head);
            assert_eq!(W8a8::from_options(&format.options()), Ok(format));
        }
    }
    assert!(W8a8::from_options(&Map::new()).is_err());
}

fn unhex(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

/// The golden case "w8a8", byte for byte, in blocks of any size.
#[test]
fn bytes_are_those_of_the_golden_case() {
    let golden: Value =
        serde_json::from_str(include_str!("../../fixtures/goldens/cpu_formats.json")).unwrap();
    let case = &golden["w8a8"];
    let (n, k) = (case["N"].as_u64().unwrap() as usize, case["K"].as_u64().unwrap() as usize);
    // The rule of the golden file's weights.
    let weight = |r: usize, c: usize| {
        (((r * 31 + c * 17) % 97) as f32 - 48.0) / 256.0 * if c.is_multiple_of(5) { 4.0 } else { 1.0 }
    };
    let source: Vec<u8> =
        (0..n * k).flat_map(|i| half::bf16::from_f32(weight(i / k, i % k)).to_le_bytes()).collect();
    let view = TensorView { name: "m.weight", dtype: Dtype::BF16, shape: &[n, k], bytes: &source };
    for split in 0..=n {
        let format = format(false);
        let mut encoder = format.codec(Module::MlpUp).unwrap().encoder(view, 0..n, Choice::Weights);
        let mut codes = Vec::new();
        encoder.encode(0..split, &mut codes).unwrap();
        encoder.encode(split..n, &mut codes).unwrap();
        assert_eq!(codes, unhex(&case["weight_i8_hex"]));
        codes.clear();
        assert!(!encoder.finish(&mut codes));
        assert_eq!(codes, unhex(&case["weight_scale_f32_hex"]));
    }
}

#[test]
fn a_nan_is_located() {
    let mut values = [1.0f32; 4 * 8];
    values[2 * 8 + 5] = f32::INFINITY;
    let source: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let view = TensorView { name: "m.weight", dtype: Dtype::F32, shape: &[4, 8], bytes: &source };
    let format = format(false);
    let mut encoder = format.codec(Module::MlpUp).unwrap().encoder(view, 0..4, Choice::Weights);
    let error = encoder.encode(0..4, &mut Vec::new()).unwrap_err();
    assert_eq!(error, NonFinite { count: 1, row: 2, column: 5 });
}
