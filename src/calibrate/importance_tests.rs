use super::*;

const FILE: &str = "imatrix.dat";

fn entry(name: &[u8], values: i32) -> Vec<u8> {
    let length = i32::try_from(name.len()).unwrap();
    [&length.to_le_bytes(), name, &1i32.to_le_bytes(), &values.to_le_bytes()].concat()
}

/// Counts that lead out of the file, and names that are none, are told and not followed.
#[test]
fn a_damaged_list_is_refused() {
    let one = 1i32.to_le_bytes();
    let bad: [Vec<u8>; 7] = [
        Vec::new(),
        0i32.to_le_bytes().to_vec(),
        (-1i32).to_le_bytes().to_vec(),
        i32::MAX.to_le_bytes().to_vec(),
        [&one[..], &entry(b"x", i32::MAX)].concat(),
        [&one[..], &entry(b"x", -1)].concat(),
        [&one[..], &entry(b"\xff\xfe", 0)].concat(),
    ];
    for bytes in bad {
        let error = of_list(FILE, &bytes).unwrap_err().to_string();
        assert!(error.contains(FILE) && error.contains("llama-imatrix"), "{bytes:?}: {error}");
    }
    let good = [&one[..], &entry(b"x", 1), &2.5f32.to_le_bytes()].concat();
    assert_eq!(of_list(FILE, &good).unwrap()["x"], [2.5]);
}

/// Proportions, with a floor so that no column is free.
#[test]
fn values_are_relative_to_the_largest() {
    assert_eq!(relative(FILE, "x", vec![4.0, 1.0, 0.0], 3).unwrap(), Some(vec![1.0, 0.25, FLOOR]));
    assert_eq!(relative(FILE, "x", vec![0.0; 3], 3).unwrap(), None);
}

/// Both files of one run of llama-imatrix (two forms, two writers) over the bundled checkpoint's GGUF say
/// the same, and it is what the bytes hold: the ratios were taken from the list by hand.
#[test]
fn the_files_of_llama_imatrix_itself() {
    let config = include_bytes!("../../fixtures/spark-tiny/config.json");
    let config = SparkConfig::parse(&serde_json::from_slice(config).unwrap()).unwrap();
    let read = |file: &str, bytes: &[u8]| Importance::parse(file, bytes, &config).unwrap();
    let gguf = read("imatrix.gguf", include_bytes!("../../fixtures/goldens/imatrix/imatrix.gguf"));
    let list = read("imatrix.dat", include_bytes!("../../fixtures/goldens/imatrix/imatrix.dat"));
    assert!(!gguf.has_head() && !list.has_head());
    for (tensor, module, largest, some) in [
        (
            "model.layers.0.self_attn.q_k_v_proj.weight",
            Module::QkvProj,
            32,
            [(0, 0.608_059_7), (1, 0.588_054_7), (100, 0.620_056_6)],
        ),
        (
            "model.layers.7.mlp.down_proj.weight",
            Module::MlpDown,
            215,
            [(0, 0.071_406_13), (1, 0.055_012_23), (100, 0.011_074_24)],
        ),
    ] {
        for importance in [&gguf, &list] {
            let values = importance.of(module, tensor).unwrap();
            assert_eq!(values[largest], 1.0);
            for (column, ratio) in some {
                assert!((values[column] - ratio).abs() < 1e-6, "{tensor} {column}: {}", values[column]);
            }
        }
    }
    for spec in tensor_specs(&config).iter().filter(|spec| spec.module.is_projection()) {
        let [a, b] = [&gguf, &list].map(|importance| importance.of(spec.module, &spec.name).unwrap());
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-6), "{}", spec.name);
    }
}
