use serde_json::json;

use super::*;

/// The published 4B configuration, with eight layers.
pub(crate) fn published() -> Value {
    json!({
        "architectures": ["Spark2_5ForCausalLM"],
        "attention_bias": false, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_spark.Spark2_5Config"},
        "bos_token_id": 0, "dtype": "bfloat16", "eos_token_id": 1,
        "gate_attn_act_mode": "sigmoid", "head_dim": 256, "headwise_attn_output_gate": true,
        "hidden_act": "gelu", "hidden_size": 2560, "initializer_range": 0.01976,
        "intermediate_size": 10240,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
                        "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 1048576, "mlp_bias": false, "model_type": "spark2_5",
        "num_attention_heads": 16, "num_hidden_layers": 8, "num_key_value_heads": 4,
        "pad_token_id": 2, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 5000000},
            "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000}
        },
        "sliding_window": 512, "tie_word_embeddings": true,
        "transformers_version": "4.57.1", "use_cache": true, "vocab_size": 131072
    })
}

fn refused(edit: impl FnOnce(&mut Value)) -> ConfigError {
    let mut json = published();
    edit(&mut json);
    SparkConfig::parse(&json).expect_err("should be refused")
}

#[test]
fn the_published_config_is_read_without_notes() {
    let config = SparkConfig::parse(&published()).unwrap();
    assert_eq!(config.notes, Vec::<String>::new());
    assert_eq!((config.q_rows(), config.kv_rows(), config.num_hidden_layers()), (4096, 1024, 8));
    assert_eq!(config.rope(LayerType::Full), RopeParameters { theta: 5e6, rotary_dims: 64 });
    assert_eq!(config.rope(LayerType::Sliding), RopeParameters { theta: 1e4, rotary_dims: 256 });
    assert_eq!(config.eos_token_ids, [1]);
}

#[test]
fn numbers_may_be_integers_or_floats() {
    let mut json = published();
    json["hidden_size"] = json!(2560.0);
    json["rms_norm_eps"] = json!(0.000001);
    json["rope_parameters"]["sliding_attention"]["partial_rotary_factor"] = json!(1);
    json["rope_parameters"]["full_attention"]["rope_theta"] = json!(5e6);
    json["rope_parameters"]["full_attention"]["rope_type"] = json!("default");
    assert_eq!(SparkConfig::parse(&json).unwrap(), SparkConfig::parse(&published()).unwrap());
}

#[test]
fn defaults_that_are_safe_are_taken_and_said() {
    let mut json = published();
    let map = json.as_object_mut().unwrap();
    map.remove("rms_norm_eps");
    map.remove("head_dim");
    let config = SparkConfig::parse(&json).unwrap();
    assert_eq!((config.head_dim, config.rms_norm_eps), (160, 1e-6));
    assert!(config.notes.iter().any(|n| n.contains("head_dim")));
    assert!(config.notes.iter().any(|n| n.contains("rms_norm_eps")));
}

/// Each of these keys has no single safe reading when it is missing.
#[test]
fn a_missing_key_is_refused_by_name() {
    for key in [
        "model_type",
        "architectures",
        "hidden_act",
        "headwise_attn_output_gate",
        "gate_attn_act_mode",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
        "layer_types",
        "rope_parameters",
        "sliding_window",
        "tie_word_embeddings",
    ] {
        let error = refused(|json| drop(json.as_object_mut().unwrap().remove(key)));
        assert!(error.key.starts_with(key), "{key}: {error}");
        assert!(error.found.contains("no such key"), "{error}");
    }
}

#[test]
fn values_that_are_not_implemented_are_refused_by_name() {
    for (key, value) in [
        ("model_type", json!("llama")),
        ("architectures", json!(["LlamaForCausalLM"])),
        ("hidden_act", json!("gelu_pytorch_tanh")),
        ("hidden_act", json!("silu")),
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("headwise_attn_output_gate", json!(false)),
        ("gate_attn_act_mode", json!("tanh")),
        ("hidden_size", json!(2560.5)),
        ("hidden_size", json!(-1)),
        ("hidden_size", json!("2560")),
        ("vocab_size", json!(1e300)),
        ("num_hidden_layers", json!(0)),
        ("num_key_value_heads", json!(3)),
        ("rms_norm_eps", json!(0)),
        ("rms_norm_eps", json!(-1e-6)),
        ("head_dim", json!(true)),
        ("sliding_window", json!(0)),
        ("eos_token_id", json!(131072)),
        ("eos_token_id", json!([1, -1])),
        ("quantization_config", json!({"quant_method": "gptq"})),
        // Known arithmetic of other architectures.
        ("rope_scaling", json!({"type": "yarn", "factor": 4.0})),
        ("rope_theta", json!(10000)),
        ("final_logit_softcapping", json!(30.0)),
        ("embedding_multiplier", json!(12.0)),
        ("use_sliding_window", json!(true)),
        ("num_experts", json!(8)),
    ] {
        let error = refused(|json| json[key] = value.clone());
        assert!(error.key.starts_with(key), "{key} = {value}: {error}");
    }
}

#[test]
fn layer_types_must_fit_the_layers() {
    assert_eq!(refused(|j| drop(j["layer_types"].as_array_mut().unwrap().pop())).found, "7 entries");
    assert_eq!(
        refused(|j| j["layer_types"].as_array_mut().unwrap().push("full_attention".into())).found,
        "9 entries"
    );
    assert_eq!(refused(|j| j["layer_types"][2] = "chunked_attention".into()).key, "layer_types[2]");
}

#[test]
fn rotary_settings_are_required_per_layer_type() {
    let flat = json!({"rope_theta": 10000, "partial_rotary_factor": 1.0});
    assert_eq!(refused(|j| j["rope_parameters"] = flat).key, "rope_parameters.sliding_attention");
    let drop_full =
        |j: &mut Value| drop(j["rope_parameters"].as_object_mut().unwrap().remove("full_attention"));
    assert_eq!(refused(drop_full).key, "rope_parameters.full_attention");
    for (key, value) in [
        ("rope_type", json!("yarn")),
        ("factor", json!(8.0)),
        ("rope_theta", json!(0)),
        ("rope_theta", Value::Null),
        ("partial_rotary_factor", Value::Null),
        ("partial_rotary_factor", json!(1.5)),
        ("partial_rotary_factor", json!(0.001)),
    ] {
        let error = refused(|j| j["rope_parameters"]["full_attention"][key] = value.clone());
        assert_eq!(error.key, format!("rope_parameters.full_attention.{key}"), "{value}");
    }
}

#[test]
fn a_layer_type_not_in_use_needs_no_settings() {
    let mut json = published();
    json["layer_types"] = json!(vec!["full_attention"; 8]);
    json["rope_parameters"].as_object_mut().unwrap().remove("sliding_attention");
    json.as_object_mut().unwrap().remove("sliding_window");
    let config = SparkConfig::parse(&json).unwrap();
    assert_eq!((config.sliding_window, config.rope_sliding), (0, None));
}

#[test]
fn unknown_keys_are_noted_and_neutral_ones_passed_over() {
    let mut json = published();
    json["my_training_run"] = json!("v7");
    json["rope_scaling"] = Value::Null;
    json["use_qk_norm"] = json!(false);
    let config = SparkConfig::parse(&json).unwrap();
    assert_eq!(config.notes.len(), 1, "{:?}", config.notes);
    assert!(config.notes[0].contains("my_training_run"));
}

#[test]
fn names_and_values_cannot_drive_a_terminal() {
    let mut json = published();
    json["a\n\u{1b}[31m\u{7f}b"] = json!(1);
    assert!(SparkConfig::parse(&json).unwrap().notes[0].contains("a\u{fffd}\u{fffd}[31m\u{fffd}b"));
    json["model_type"] = json!("\u{9b}31m");
    let error = SparkConfig::parse(&json).unwrap_err().to_string();
    assert!(error.contains("\u{fffd}31m") && !error.contains(char::is_control), "{error:?}");
}
