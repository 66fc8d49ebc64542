use super::*;
use crate::tensor::widen;

fn config() -> SparkConfig {
    let json = serde_json::json!({
        "model_type": "spark2_5", "architectures": ["Spark2_5ForCausalLM"],
        "hidden_act": "gelu", "attention_bias": false, "mlp_bias": false,
        "headwise_attn_output_gate": true, "gate_attn_act_mode": "sigmoid",
        "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
        "vocab_size": 64, "sliding_window": 8, "max_position_embeddings": 4096,
        "layer_types": ["full_attention"],
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000}
        },
        "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
    });
    SparkConfig::parse(&json).unwrap()
}

fn folds(attention: Vec<i8>, values: Vec<i8>, mlp: Vec<i8>, product: Vec<i8>) -> Smoothing {
    let [attention, values, mlp, product] = [attention, values, mlp, product].map(|e| Some(Exponents(e)));
    Smoothing { layers: vec![LayerFolds { attention, values, mlp, product }] }
}

/// Heads 0 and 1 read key head 0, heads 2 and 3 key head 1: factor = key head * 2 + dimension.
#[test]
fn every_factor_meets_its_inverse() {
    let config = config();
    let values = [3, -2, 1, 0];
    let smoothing = folds(vec![1; 8], values.to_vec(), vec![-2; 8], (0..12).collect());
    assert!(smoothing.fits(&config) && smoothing.count() == (4, 4));
    let scaled = |module, rows: usize, columns: usize| -> Vec<Vec<f32>> {
        let scaling = smoothing.of(module, Some(0), &config).unwrap();
        (0..rows)
            .map(|row| {
                let mut weights = vec![1.0; columns];
                scaling.apply(row, &mut weights);
                weights
            })
            .collect()
    };
    // q 8 rows, k 4, v 4: only v is divided.
    let qkv = scaled(Module::QkvProj, 16, 8);
    let expected: Vec<f32> = [0; 12].iter().chain(&values).map(|e| 2.0 * 2f32.powi(-i32::from(*e))).collect();
    assert_eq!(qkv.iter().map(|row| row[0]).collect::<Vec<_>>(), expected);
    assert_eq!(scaled(Module::HeadGate, 4, 8), vec![vec![2.0; 8]; 4]);
    assert_eq!(scaled(Module::InputNorm, 1, 8), vec![vec![0.5; 8]]);
    assert_eq!(scaled(Module::OutProj, 1, 8)[0], [8.0, 0.25, 8.0, 0.25, 2.0, 1.0, 2.0, 1.0]);
    assert_eq!(scaled(Module::PostAttentionNorm, 1, 8), vec![vec![4.0; 8]]);
    assert_eq!(scaled(Module::MlpGate, 1, 8), vec![vec![0.25; 8]]);
    let (up, down) = (scaled(Module::MlpUp, 12, 8), scaled(Module::MlpDown, 1, 12));
    for (row, column) in up.iter().zip(&down[0]) {
        assert_eq!(row[3] * column, 0.25);
    }
    for module in [Module::Embedding, Module::FinalNorm, Module::LmHead] {
        assert!(smoothing.of(module, Some(0), &config).is_none());
    }
    // A model of other sizes, and numbers that no fold has.
    assert!(!folds(vec![1; 7], values.to_vec(), vec![0; 8], vec![0; 12]).fits(&config));
    let text = serde_json::to_string(&smoothing).unwrap();
    assert!(text.contains("\"values\":\"03fe0100\""), "{text}");
    assert_eq!(serde_json::from_str::<Smoothing>(&text).unwrap(), smoothing);
    for bad in ["7f", "0", "0g", "+1"] {
        assert!(serde_json::from_str::<Exponents>(&format!("\"{bad}\"")).is_err(), "{bad}");
    }
}

#[test]
fn bytes_are_exact_in_every_type_and_refused_beyond_its_range() {
    let scaling = Scaling::new(vec![0, -1], vec![2, 0, -3]);
    let weights = [1.5f32, -0.75, 3.0, 0.0, 1.0, -2.5];
    let expected = [6.0f32, -0.75, 0.375, 0.0, 0.5, -0.156_25];
    let halves = |f: &dyn Fn(f32) -> [u8; 2]| weights.iter().flat_map(|w| f(*w)).collect::<Vec<u8>>();
    for (dtype, bytes) in [
        (Dtype::BF16, halves(&|w| half::bf16::from_f32(w).to_le_bytes())),
        (Dtype::F16, halves(&|w| half::f16::from_f32(w).to_le_bytes())),
        (Dtype::F32, weights.iter().flat_map(|w| w.to_le_bytes()).collect()),
    ] {
        let view = TensorView { name: "w", dtype, shape: &[2, 3], bytes: &bytes };
        let mut found = [0.0; 6];
        widen(dtype, &scaling.bytes(view, 0..2).unwrap(), &mut found);
        assert_eq!(found, expected, "{dtype}");
    }
    let large: Vec<u8> = [60000.0f32; 3].iter().flat_map(|w| half::f16::from_f32(*w).to_le_bytes()).collect();
    let view = TensorView { name: "w", dtype: Dtype::F16, shape: &[1, 3], bytes: &large };
    let error = scaling.bytes(view, 0..1).unwrap_err().to_string();
    assert!(error.contains("w") && error.contains("--smooth"), "{error}");
}
