use super::*;

fn format(head: Head) -> W8a8 {
    W8a8 { method: Method::RoundToNearest, head }
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
    assert_eq!(format(Head::Source).quantization_config(), expected);
    let int8_head = format(Head::Quantized).quantization_config();
    assert_eq!(int8_head["ignore"], json!(["re:.*g_proj$"]));
    assert_eq!(int8_head["config_groups"]["group_0"]["targets"], json!(["Linear", "lm_head"]));
}

#[test]
fn the_config_keeps_its_keys_and_their_order() {
    let mut config: Map<String, Value> =
        serde_json::from_str(r#"{"z": 1, "tie_word_embeddings": true, "a": {"x": null}}"#).unwrap();
    format(Head::Source).patch_config(&mut config);
    assert_eq!(config.keys().collect::<Vec<_>>(), ["z", "tie_word_embeddings", "a", "quantization_config"]);
    assert_eq!(config["tie_word_embeddings"], true);
    format(Head::Quantized).patch_config(&mut config);
    assert_eq!(config["tie_word_embeddings"], false);
    assert_eq!(config.keys().nth(1).unwrap(), "tie_word_embeddings");
}

#[test]
fn options_come_back() {
    for method in [Method::RoundToNearest, Method::Search] {
        for head in [Head::Source, Head::Quantized] {
            let format = W8a8 { method, head };
            assert_eq!(W8a8::from_options(&format.options()), Ok(format));
        }
    }
    assert!(W8a8::from_options(&Map::new()).is_err());
}

/// Weights and bytes of the golden case "w8a8": w[n][k] = (((n*31 + k*17) mod 97) - 48) / 256, times
/// four where 5 divides k. The expected codes and scales are worked out here in f64.
#[test]
fn bytes_are_rows_of_codes_then_scales() {
    let (n, k) = (5, 24);
    let w = |r: usize, c: usize| {
        (((r * 31 + c * 17) % 97) as f32 - 48.0) / 256.0 * if c % 5 == 0 { 4.0 } else { 1.0 }
    };
    let source: Vec<u8> =
        (0..n * k).flat_map(|i| half::bf16::from_f32(w(i / k, i % k)).to_le_bytes()).collect();
    let view = TensorView { name: "m.weight", dtype: Dtype::BF16, shape: &[n, k], bytes: &source };
    let mut encoder = format(Head::Source).encoder(view);
    let mut bytes = Vec::new();
    encoder.encode(0..3, &mut bytes).unwrap();
    encoder.encode(3..5, &mut bytes).unwrap();
    let scales = encoder.finish();
    assert_eq!((bytes.len(), scales.len(), scales[0].len()), (n * k, 1, n * 4));
    for r in 0..n {
        let amax = (0..k).map(|c| w(r, c).abs()).fold(0.0, f32::max);
        let scale = amax / 127.0;
        assert_eq!(scales[0][4 * r..4 * r + 4], scale.to_le_bytes());
        for c in 0..k {
            let exact = f64::from(w(r, c)) / f64::from(scale);
            let code = bytes[r * k + c] as i8;
            assert!((exact - f64::from(code)).abs() <= 0.5 + 1e-6, "{r} {c} {exact} {code}");
        }
    }
}

#[test]
fn a_nan_is_located() {
    let mut values = vec![1.0f32; 4 * 8];
    values[2 * 8 + 5] = f32::INFINITY;
    let source: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let view = TensorView { name: "m.weight", dtype: Dtype::F32, shape: &[4, 8], bytes: &source };
    let error = format(Head::Source).encoder(view).encode(0..4, &mut Vec::new()).unwrap_err();
    assert_eq!(error, NonFinite { count: 1, row: 2, column: 5 });
}
