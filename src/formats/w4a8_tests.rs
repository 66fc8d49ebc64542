use super::*;

fn all() -> Vec<W4a8> {
    let mut formats = Vec::new();
    for method in [Method::RoundToNearest, Method::Search] {
        for group_size in W4a8::GROUP_SIZES {
            for four_bit_head in [true, false] {
                for signs in [Signs::Both, Signs::Positive] {
                    for qkv in [QkvTensors::Fused, QkvTensors::Split] {
                        formats.push(W4a8::gptq(method, group_size, signs, four_bit_head, qkv));
                    }
                }
            }
            for head in [Head::Int4, Head::Int8, Head::Source] {
                for asymmetric in [true, false] {
                    formats.push(W4a8::compressed_tensors(method, group_size, asymmetric, head));
                }
            }
        }
    }
    formats
}

fn default() -> W4a8 {
    W4a8::gptq(Method::Search, 128, Signs::Both, true, QkvTensors::Fused)
}

fn patched(format: &W4a8) -> Map<String, Value> {
    let mut config = Map::new();
    config.insert("tie_word_embeddings".to_owned(), true.into());
    format.patch_config(&mut config, &[]);
    config
}

#[test]
fn options_come_back_and_names_tell_formats_apart() {
    let mut names = std::collections::HashSet::new();
    for format in all() {
        assert_eq!(W4a8::from_options(&format.options()), Ok(format.clone()));
        assert!(names.insert(format.name_suffix()), "{}", format.name_suffix());
    }
    assert_eq!(default().name_suffix(), "");
    assert!(W4a8::from_options(&Map::new()).is_err());
    // What GPTQ cannot say, and what this version does not know.
    for (key, value) in
        [("asymmetric", json!(true)), ("head", json!("int8")), ("group_size", json!(256)), ("new", json!(1))]
    {
        let mut options = default().options();
        options.insert(key.to_owned(), value);
        assert!(W4a8::from_options(&options).is_err(), "{key}");
    }
}

/// The keys that the published vLLM build was seen to need, with their values.
#[test]
fn the_gptq_block_is_the_one_that_was_run() {
    let config = patched(&default());
    assert_eq!(config["tie_word_embeddings"], false);
    let mut block = config["quantization_config"].clone();
    let quantizer = block.as_object_mut().unwrap().shift_remove("meta").unwrap();
    assert!(quantizer["quantizer"][0].as_str().unwrap().starts_with("spark-convert:"));
    let expected: Value = serde_json::from_str(
        r#"{
  "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": true,
  "lm_head": true, "checkpoint_format": "gptq", "pack_dtype": "int32",
  "modules_in_block_to_quantize": ["q_k_v_proj", "q_proj", "k_proj", "v_proj", "out_proj",
                                   "gate_proj", "up_proj", "down_proj", "lm_head"]
}"#,
    )
    .unwrap();
    assert_eq!(block, expected);
    assert_eq!(
        default().further_files(&config),
        [("quantize_config.json", config["quantization_config"].clone())]
    );
}

#[test]
fn no_entry_of_the_module_list_is_part_of_the_name_of_a_plain_module() {
    for name in ["model.layers.0.self_attn.g_proj", "model.embedding", "model.norm"] {
        assert!(!default().modules().iter().any(|entry| name.contains(entry)), "{name}");
    }
}

#[test]
fn a_head_left_alone_stays_tied_and_out_of_the_list() {
    let format = W4a8::gptq(Method::Search, 64, Signs::Both, false, QkvTensors::Fused);
    let config = patched(&format);
    assert_eq!(config["tie_word_embeddings"], true);
    let block = &config["quantization_config"];
    assert_eq!(block["lm_head"], false);
    assert!(!block["modules_in_block_to_quantize"].as_array().unwrap().contains(&json!("lm_head")));
    assert!(format.codec(Module::LmHead).is_none() && format.codec(Module::MlpUp).is_some());
}

/// The block of the asymmetric form, key for key as it was run, and the two groups of an int8 head.
#[test]
fn the_compressed_tensors_blocks_are_the_ones_that_were_run() {
    let config = patched(&W4a8::compressed_tensors(Method::Search, 64, true, Head::Int4));
    assert_eq!(config["tie_word_embeddings"], false);
    let expected: Value = serde_json::from_str(
        r#"{
  "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
  "global_compression_ratio": null, "kv_cache_scheme": null, "version": "0.17.0",
  "ignore": ["re:.*g_proj$"],
  "config_groups": {
    "group_0": {
      "targets": ["Linear", "lm_head"], "format": "pack-quantized",
      "input_activations": null, "output_activations": null,
      "weights": {"num_bits": 4, "type": "int", "symmetric": false, "strategy": "group", "group_size": 64,
                  "block_structure": null, "dynamic": false, "actorder": null,
                  "observer": "minmax", "observer_kwargs": {}}
    }
  }
}"#,
    )
    .unwrap();
    assert_eq!(config["quantization_config"], expected);
    let mixed = patched(&W4a8::compressed_tensors(Method::Search, 128, false, Head::Int8));
    let block = &mixed["quantization_config"];
    assert_eq!(block["format"], "mixed-precision");
    assert_eq!(block["ignore"], json!(["re:.*g_proj$"]));
    assert_eq!(block["config_groups"]["group_0"]["targets"], json!(["Linear"]));
    assert_eq!(block["config_groups"]["group_0"]["weights"]["symmetric"], true);
    let head = &block["config_groups"]["group_1"];
    assert_eq!((&head["targets"], &head["format"]), (&json!(["re:.*lm_head$"]), &json!("int-quantized")));
    assert_eq!(
        (&head["weights"]["num_bits"], &head["input_activations"]["dynamic"]),
        (&json!(8), &json!(true))
    );
}

/// Each width is a group of its own, and its targets are what vLLM looks for: the joined name of gate and up among the
/// targets (before the class `Linear` is), and q, k and v among what is ignored (in whose place it never looks for
/// `q_k_v_proj`).
#[test]
fn overridden_modules_are_found_by_the_names_that_vllm_has_for_them() {
    let overrides = Overrides::default()
        .and(["model.layers.3.mlp.gate_proj", "model.layers.3.mlp.up_proj"], Width::Int8)
        .and(["model.layers.1.self_attn.q_k_v_proj"], Width::Source)
        .and(["model.layers.0.mlp.down_proj", "model.layers.2.mlp.down_proj"], Width::Groups32)
        .and(["model.layers.2.self_attn.out_proj"], Width::Groups64)
        .and(["model.layers.1.self_attn.out_proj"], Width::Groups128);
    let format =
        W4a8::compressed_tensors(Method::Search, 64, true, Head::Int4).with_overrides(overrides.clone());
    assert_eq!(format.overrides().of(Module::OutProj, Some(2)), None, "in groups of 64 anyhow");
    assert_eq!(W4a8::from_options(&format.options()), Ok(format.clone()));
    let block = patched(&format)["quantization_config"].clone();
    assert_eq!(block["format"], "mixed-precision");
    assert_eq!(block["ignore"], json!(["re:.*g_proj$", r"re:.*layers\.(1)\.self_attn\.(q_k_v|q|k|v)_proj$"]));
    let groups = block["config_groups"].as_object().unwrap();
    let found: Vec<_> = groups
        .values()
        .map(|g| (g["targets"].clone(), g["weights"]["num_bits"].clone(), g["weights"]["group_size"].clone()))
        .collect();
    let expected = [
        (json!(["Linear", "lm_head"]), json!(4), json!(64)),
        (json!([r"re:.*layers\.(1)\.self_attn\.out_proj$"]), json!(4), json!(128)),
        (json!([r"re:.*layers\.(0|2)\.mlp\.down_proj$"]), json!(4), json!(32)),
        (
            json!([r"re:.*layers\.(3)\.mlp\.gate_(up_)?proj$", r"re:.*layers\.(3)\.mlp\.up_proj$"]),
            json!(8),
            json!(null),
        ),
    ];
    assert_eq!(found, expected);
    assert_eq!(format.codec_at(Module::MlpDown, Some(0)).unwrap().group_size(), Some(32));
    assert_eq!(format.codec_at(Module::MlpDown, Some(1)).unwrap().group_size(), Some(64));
    assert_eq!(format.codec_at(Module::OutProj, Some(1)).unwrap().group_size(), Some(128));
    // In groups of one size the block says one packing.
    let groups = Overrides::default().and(["model.layers.0.mlp.down_proj"], Width::Groups32);
    let format = W4a8::compressed_tensors(Method::Search, 64, true, Head::Int4).with_overrides(groups);
    assert_eq!(patched(&format)["quantization_config"]["format"], "pack-quantized");
}

#[test]
fn a_shape_that_the_kernel_does_not_take_is_refused_with_what_would_fit() {
    let codec =
        |group_size| W4a8::gptq(Method::Search, group_size, Signs::Both, true, QkvTensors::Fused).codec;
    assert_eq!(codec(128).fits([2048, 6656]), super::super::Fit::Fits);
    let super::super::Fit::Refuse(why) = codec(128).fits([256, 832]) else { panic!("832 / 128") };
    assert!(why.contains("832") && why.contains("--group-size 32 or 64"), "{why}");
    assert!(matches!(codec(32).fits([40, 64]), super::super::Fit::Refuse(_)));
}
