//! Damaged files before everything that reads them. `cargo xtask fuzz` goes on for longer.

/// Few runs of each, from seeds that are the same every time.
fn survives(name: &str, runs: u64) {
    let binary = assert_cmd::cargo::cargo_bin!("spark-convert");
    let outcome = xtask::fuzz::run(binary, name, 0, runs).unwrap();
    assert!(outcome.bad.is_empty(), "{:#?}", outcome.bad);
    assert_eq!(outcome.runs, runs);
    assert!(outcome.accepted < runs, "{name}: no damage was noticed");
    assert!(outcome.peak_bytes > 0, "memory was not measured");
}

macro_rules! targets {
    ($($test:ident: $name:literal, $runs:literal;)*) => {
        $(#[test]
        fn $test() {
            survives($name, $runs);
        })*

        #[test]
        fn every_target_has_its_test() {
            assert_eq!([$($name),*], xtask::fuzz::NAMES);
        }
    };
}

targets! {
    a_damaged_weights_file: "safetensors", 1000;
    a_damaged_index: "index", 1000;
    a_damaged_config: "config", 3000;
    a_damaged_tokenizer: "tokenizer", 300;
    a_damaged_chat_template: "chat-template", 500;
    a_damaged_manifest: "manifest", 500;
    a_damaged_artifact_config: "artifact-config", 500;
    a_damaged_artifact: "artifact-weights", 500;
    an_artifact_that_verify_looks_at: "artifact-contract", 500;
    a_damaged_export_manifest: "npu-manifest", 500;
    a_damaged_graph: "onnx", 1000;
    an_export_that_verify_looks_at: "export-contract", 500;
    a_damaged_gguf: "gguf", 1000;
    a_damaged_importance_matrix: "imatrix", 1000;
}
