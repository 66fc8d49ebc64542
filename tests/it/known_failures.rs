//! Failures of other converters, one test each, numbered as in the project's list.

use std::fs;

use serde_json::{Value, json};
use xtask::fixtures::{Dtype, FixtureSpec, Head};

use crate::runs::{Model, Tensors, all_tensors, edit_json, read_json, run, shards, tree};

const SHARD_1: &str = "model-00001-of-00002.safetensors";
const SHARD_2: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";

#[test]
fn kf01_a_missing_shard_is_named() {
    let model = Model::tiny();
    fs::remove_file(model.file(SHARD_2)).unwrap();
    model.refused(&[SHARD_2, "download"]);
}

#[test]
fn kf01_a_shard_cut_short_says_how_many_bytes_are_missing() {
    let model = Model::tiny();
    let bytes = fs::read(model.file(SHARD_1)).unwrap();
    fs::write(model.file(SHARD_1), &bytes[..bytes.len() - 1234]).unwrap();
    model.refused(&[SHARD_1, "1234 are missing"]);
    fs::write(model.file(SHARD_1), &bytes[..100]).unwrap();
    model.refused(&[SHARD_1, "inside its header"]);
    fs::write(model.file(SHARD_1), b"").unwrap();
    model.refused(&[SHARD_1, "0 bytes"]);
}

#[test]
fn kf01_a_git_lfs_pointer_is_called_one() {
    let model = Model::tiny();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 461792\n";
    fs::write(model.file(SHARD_1), pointer).unwrap();
    model.refused(&[SHARD_1, "Git LFS pointer"]);
}

#[test]
fn kf01_shards_without_an_index_are_not_guessed_at() {
    let model = Model::tiny();
    fs::remove_file(model.file(INDEX)).unwrap();
    model.refused(&[INDEX, SHARD_1]);
}

#[test]
fn kf01_index_and_shards_agree_exactly() {
    let tensor = "model.layers.1.mlp.up_proj.weight";
    let model = Model::tiny();
    let right = fs::read(model.file(INDEX)).unwrap();
    // In the index, but not in its shard.
    edit_json(&model.file(INDEX), |i| i["weight_map"]["model.layers.9.extra.weight"] = SHARD_1.into());
    model.refused(&["model.layers.9.extra.weight", SHARD_1]);
    // In the shard, but not in the index.
    fs::write(model.file(INDEX), &right).unwrap();
    edit_json(&model.file(INDEX), |i| drop(i["weight_map"].as_object_mut().unwrap().remove(tensor)));
    model.refused(&[tensor, INDEX]);
    // In the other shard.
    fs::write(model.file(INDEX), &right).unwrap();
    edit_json(&model.file(INDEX), |i| {
        let other = if i["weight_map"][tensor] == SHARD_1 { SHARD_2 } else { SHARD_1 };
        i["weight_map"][tensor] = other.into();
    });
    model.refused(&[tensor, INDEX]);
}

#[test]
fn kf01_the_index_stays_inside_the_model() {
    for path in ["../stolen.safetensors", "/etc/passwd", "sub/x.safetensors"] {
        let model = Model::tiny();
        edit_json(&model.file(INDEX), |i| i["weight_map"]["model.norm.weight"] = path.into());
        model.refused(&[path]);
    }
}

#[test]
fn kf01_a_link_out_of_the_model_is_refused() {
    let model = Model::tiny();
    let outside = model.root.path().join("secret");
    fs::write(&outside, "a secret").unwrap();
    std::os::unix::fs::symlink(&outside, model.file("vocab.json")).unwrap();
    model.refused(&["vocab.json", "link"]);
}

#[test]
fn kf02_a_stray_safetensors_file_is_left_aside_and_mentioned() {
    let model = Model::tiny();
    model.quantize(&[]).expect(0);
    let alone = tree(&model.out());
    fs::remove_dir_all(model.out()).unwrap();
    for stray in ["consolidated.safetensors", "adapter_model.safetensors", "model.safetensors"] {
        fs::copy(model.file(SHARD_1), model.file(stray)).unwrap();
    }
    let run = model.quantize(&[]).expect(0);
    assert!(
        run.stderr.contains("adapter_model.safetensors") && run.stderr.contains("consolidated.safetensors")
    );
    let mut beside = tree(&model.out());
    // The manifest says what was left aside; all else is as without.
    for files in [&mut beside, &mut alone.clone()] {
        files.remove(std::path::Path::new("spark-convert.json"));
    }
    assert!(beside.keys().all(|k| alone.contains_key(k)), "{:?}", beside.keys());
    assert!(beside.iter().all(|(k, v)| alone[k] == *v));
}

#[test]
fn kf02_without_an_index_only_model_safetensors_counts() {
    let model = Model::new(FixtureSpec::tiny().single_file());
    fs::copy(model.file("model.safetensors"), model.file("other.safetensors")).unwrap();
    assert!(model.quantize(&[]).expect(0).stderr.contains("other.safetensors"));
    let written: Vec<_> = shards(&model.out()).iter().map(|p| p.file_name().unwrap().to_owned()).collect();
    assert_eq!(written, ["model.safetensors"]);
}

#[test]
fn kf03_missing_wrongly_shaped_and_unknown_tensors_are_refused_by_name() {
    let norm = "model.layers.2.input_layernorm.weight";
    Model::new(FixtureSpec::tiny().omit(norm)).refused(&[norm, "[128]"]);
    let bias = "model.layers.0.self_attn.q_k_v_proj.bias";
    Model::new(FixtureSpec::tiny().extra_tensor(bias, "BF16", &[4], vec![0; 8])).refused(&[bias, "[4]"]);
    let adapter = "model.layers.0.mlp.up_proj.lora_A.weight";
    Model::new(FixtureSpec::tiny().extra_tensor(adapter, "F32", &[1], vec![0; 4]))
        .refused(&[adapter, "adapter"]);
    let other_config = FixtureSpec::tiny().edit_config(|c| c["intermediate_size"] = json!(200));
    Model::new(other_config).refused(&["mlp.gate_proj.weight", "[200, 128]", "[192, 128]"]);
}

#[test]
fn kf03_known_buffers_are_noted_and_left_behind() {
    let model = Model::new(FixtureSpec::tiny().rotary_buffers());
    let run = model.quantize(&[]).expect(0);
    assert!(run.stderr.contains("rotary_emb.inv_freq"), "{}", run.stderr);
    assert!(all_tensors(&model.out()).keys().all(|n| !n.contains("rotary_emb")));
    model.verify(&[]).expect(0);
}

#[test]
fn kf04_each_tensor_is_read_by_its_own_dtype() {
    // The same values in another dtype give the same codes: bf16 fits f32 exactly.
    let bf16 = Model::tiny();
    bf16.quantize(&[]).expect(0);
    let codes = |m: &Model| {
        let mut all = all_tensors(&m.out());
        all.retain(|_, t| t.0 == "I8");
        all
    };
    let widened = Model::tiny();
    for path in shards(&widened.dir) {
        let mut file = Tensors::read(&path);
        for (_, dtype, _, bytes) in &mut file.tensors {
            *dtype = "F32".to_owned();
            *bytes = bytes.chunks(2).flat_map(|b| [0, 0, b[0], b[1]]).collect();
        }
        file.write(&path);
    }
    // The index still states the total of the bf16 tensors, and the config still says bfloat16.
    widened.quantize(&[]).expect(0);
    assert_eq!(codes(&widened), codes(&bf16));
    let copied = all_tensors(&widened.out());
    assert_eq!(copied["model.norm.weight"].0, "F32");
    widened.verify(&[]).expect(0);

    for spec in [FixtureSpec::tiny().mixed(), FixtureSpec::tiny().dtype(Dtype::F16)] {
        let model = Model::new(spec);
        let run = model.quantize(&[]).expect(0);
        let dtypes: std::collections::BTreeSet<_> =
            all_tensors(&model.dir).into_values().map(|t| t.0).collect();
        assert_eq!(run.stderr.contains("several dtypes"), dtypes.len() > 1, "{}", run.stderr);
        let source = all_tensors(&model.dir);
        for (name, tensor) in all_tensors(&model.out()) {
            if tensor.0 != "I8" && !name.ends_with("_scale") {
                assert_eq!(tensor, source[&name], "{name}");
            }
        }
        model.verify(&[]).expect(0);
    }
}

#[test]
fn kf05_unaligned_data_and_absent_metadata_change_nothing() {
    let plain = Model::tiny();
    plain.quantize(&[]).expect(0);
    let expected = all_tensors(&plain.out());
    for spec in [FixtureSpec::tiny().unpadded_header(), FixtureSpec::tiny().no_metadata()] {
        let model = Model::new(spec);
        model.quantize(&[]).expect(0);
        assert_eq!(all_tensors(&model.out()), expected);
        model.verify(&[]).expect(0);
    }
}

#[test]
fn kf06_a_hub_cache_snapshot_is_read_and_plain_files_are_written() {
    let model = Model::new(FixtureSpec::tiny().hub_cache("someone/Spark-X2.5-tiny"));
    assert!(model.file("config.json").is_symlink());
    model.quantize(&[]).expect(0);
    for entry in fs::read_dir(model.out()).unwrap() {
        assert!(!entry.unwrap().path().is_symlink());
    }
    model.verify(&[]).expect(0);
    // The default name is the repository's, not the revision's.
    let model_dir = model.dir.to_str().unwrap();
    run(model.root.path(), ["quantize", model_dir, "--scheme", "w8a8"]).expect(0);
    assert!(model.root.path().join("artifacts/Spark-X2.5-tiny-w8a8/spark-convert.json").is_file());
    // The artifact outlives the cache.
    fs::remove_dir_all(model.root.path().join("model")).unwrap();
    run(model.root.path(), ["inspect", "out"]).expect(0);
}

#[test]
fn kf07_an_already_quantized_input_is_called_that() {
    let by_config = FixtureSpec::tiny().edit_config(|c| {
        c.insert("quantization_config".into(), json!({"quant_method": "gptq", "bits": 4}));
    });
    Model::new(by_config).refused(&["quantization_config", "gptq", "full-precision"]);
    let scale = "model.layers.0.mlp.up_proj.weight_scale";
    let by_name = FixtureSpec::tiny().extra_tensor(scale, "F32", &[192, 1], vec![0; 192 * 4]);
    Model::new(by_name).refused(&[scale, "already quantized"]);
    let weight = "model.layers.0.mlp.up_proj.weight";
    let by_dtype =
        FixtureSpec::tiny().omit(weight).extra_tensor(weight, "I8", &[192, 128], vec![1; 192 * 128]);
    Model::new(by_dtype).refused(&[weight, "I8"]);
}

#[test]
fn kf07_an_artifact_is_not_quantized_again() {
    let model = Model::tiny();
    model.quantize(&[]).expect(0);
    let run = run(model.root.path(), ["quantize", "out", "--scheme", "w8a8", "--out", "twice"]).expect(3);
    assert!(run.error().contains("already quantized"), "{}", run.error());
}

#[test]
fn kf08_rotary_settings_are_required_per_layer_type() {
    type Edit = Box<dyn Fn(&mut serde_json::Map<String, Value>) + Send + Sync>;
    let edits: [(&str, Edit); 4] = [
        ("rope_theta", Box::new(|c| drop(c.insert("rope_theta".into(), json!(10000))))),
        ("rope_parameters", Box::new(|c| drop(c.remove("rope_parameters")))),
        (
            "rope_parameters.sliding_attention",
            Box::new(|c| c["rope_parameters"] = json!({"rope_theta": 1e4, "partial_rotary_factor": 1})),
        ),
        (
            "rope_parameters.full_attention.rope_type",
            Box::new(|c| c["rope_parameters"]["full_attention"]["rope_type"] = json!("yarn")),
        ),
    ];
    for (key, edit) in edits {
        Model::new(FixtureSpec::tiny().edit_config(edit)).refused(&["config.json", key]);
    }
    let spelled_out = FixtureSpec::tiny().edit_config(|c| {
        c["rope_parameters"]["full_attention"]["rope_type"] = json!("default");
        c["rope_parameters"]["full_attention"]["rope_theta"] = json!(5e6);
        c["sliding_window"] = json!(8.0);
    });
    Model::new(spelled_out).quantize(&[]).expect(0);
}

#[test]
fn kf10_fields_that_change_the_arithmetic_are_read_or_refused() {
    for (key, value) in [
        ("layer_types", json!(["sliding_attention", "full_attention"])),
        ("layer_types", json!(vec!["full_attention"; 5])),
        ("hidden_act", json!("gelu_pytorch_tanh")),
        ("attention_bias", json!(true)),
        ("final_logit_softcapping", json!(30.0)),
    ] {
        let spec = FixtureSpec::tiny().edit_config(move |c| drop(c.insert(key.into(), value.clone())));
        Model::new(spec).refused(&["config.json", key]);
    }
}

#[test]
fn kf11_a_redundant_head_is_dropped_and_a_different_one_refused() {
    let model = Model::new(FixtureSpec::tiny().head(Head::TiedWithCopy));
    let run = model.quantize(&[]).expect(0);
    assert!(run.stderr.contains("lm_head.weight") && run.stderr.contains("copy"), "{}", run.stderr);
    assert!(!all_tensors(&model.out()).contains_key("lm_head.weight"));
    model.verify(&[]).expect(0);
    Model::new(FixtureSpec::tiny().head(Head::TiedWithOther))
        .refused(&["lm_head.weight", "tie_word_embeddings"]);
}

#[test]
fn kf11_an_untied_head_is_the_one_that_is_used() {
    let model = Model::new(FixtureSpec::tiny().head(Head::Untied));
    let source = all_tensors(&model.dir);
    assert_ne!(source["lm_head.weight"], source["model.embedding.weight"]);
    model.quantize(&[]).expect(0);
    assert_eq!(all_tensors(&model.out())["lm_head.weight"], source["lm_head.weight"]);
    model.verify(&[]).expect(0);

    fs::remove_dir_all(model.out()).unwrap();
    model.quantize(&["--head", "int8"]).expect(0);
    let written = all_tensors(&model.out());
    let bf16 = |b: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
    let head = &source["lm_head.weight"].2;
    let scale = f32::from_le_bytes(written["lm_head.weight_scale"].2[..4].try_into().unwrap());
    for k in 0..128 {
        let code = f32::from(written["lm_head.weight"].2[k] as i8);
        let weight = bf16(&head[2 * k..]);
        assert!((code * scale - weight).abs() <= scale * 0.501 || code.abs() == 127.0, "{k}");
    }
    model.verify(&[]).expect(0);
    Model::new(FixtureSpec::tiny().edit_config(|c| c["tie_word_embeddings"] = json!(false)))
        .refused(&["lm_head.weight", "tie_word_embeddings"]);
}

#[test]
fn kf12_all_zero_rows_stay_exactly_zero() {
    let tensor = "model.layers.1.mlp.down_proj.weight";
    let spec = FixtureSpec::tiny().zero_rows(tensor, 3..5).zero_rows("model.embedding.weight", 0..448);
    let model = Model::new(spec);
    model.quantize(&["--head", "int8"]).expect(0);
    let written = all_tensors(&model.out());
    let module = tensor.trim_end_matches(".weight");
    let scales: Vec<f32> = written[&format!("{module}.weight_scale")]
        .2
        .chunks(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect();
    assert!(scales.iter().all(|s| s.is_finite() && *s > 0.0));
    assert!(written[tensor].2[3 * 192..5 * 192].iter().all(|c| *c == 0));
    assert!(written["lm_head.weight"].2.iter().all(|c| *c == 0));
    // A ratio over nothing is no number, and none is printed.
    let manifest = fs::read_to_string(model.out().join("spark-convert.json")).unwrap();
    let report = model.verify(&["--json"]).expect(0);
    for text in [&manifest, &report.stdout] {
        assert!(!text.to_lowercase().contains("nan") && !text.contains("inf"), "{text}");
    }
    let head = report.json()["artifacts"][0]["modules"]
        .as_array()
        .unwrap()
        .iter()
        .find(|m| m["module"] == "lm_head")
        .cloned();
    assert_eq!(head.unwrap(), json!({"module": "lm_head", "snr_db": null, "zero_rows": 448}));
}

#[test]
fn kf13_a_nan_is_refused_with_its_place() {
    for (tensor, place) in [
        ("model.layers.2.self_attn.out_proj.weight", "[1, 2]"),
        ("model.layers.0.self_attn.g_proj.weight", "[0, 66]"),
        ("model.norm.weight", "[66]"),
        ("model.embedding.weight", "[0, 66]"),
    ] {
        for value in [f32::NAN, f32::NEG_INFINITY] {
            Model::new(FixtureSpec::tiny().set_value(tensor, 66, value)).refused(&[tensor, place, "1 NaN"]);
        }
    }
}

#[test]
fn kf20_the_input_is_never_the_output() {
    let model = Model::tiny();
    let before = tree(&model.dir);
    let link = model.root.path().join("link");
    std::os::unix::fs::symlink(&model.dir, &link).unwrap();
    let dir = model.dir.to_str().unwrap();
    let dotted = format!("{dir}/../model/.");
    for out in [dir, link.to_str().unwrap(), &dotted, model.root.path().to_str().unwrap()] {
        let run =
            run(model.root.path(), ["quantize", dir, "--scheme", "w8a8", "--force", "--out", out]).expect(2);
        assert!(run.error().contains("input"), "{}", run.error());
    }
    assert_eq!(tree(&model.dir), before);
}

#[test]
fn kf20_what_is_there_is_kept_unless_told_to_replace_it() {
    let model = Model::tiny();
    fs::create_dir(model.out()).unwrap();
    fs::write(model.out().join("thesis.txt"), "years of work").unwrap();
    assert!(model.quantize(&[]).expect(2).error().contains("--force"));
    assert_eq!(fs::read_to_string(model.out().join("thesis.txt")).unwrap(), "years of work");
    model.quantize(&["--force"]).expect(0);
    assert!(!model.out().join("thesis.txt").exists());
    model.verify(&[]).expect(0);
    // Another plan's artifact counts as something else, too.
    assert!(model.quantize(&["--method", "rtn"]).expect(2).error().contains("search"));
    model.quantize(&["--method", "rtn", "--force"]).expect(0);
    assert!(model.quantize(&["--method", "rtn"]).expect(0).stdout.contains("up to date"));
}

#[test]
fn kf20_an_empty_directory_is_nothing_to_keep_and_a_file_is_refused() {
    let model = Model::tiny();
    fs::create_dir(model.out()).unwrap();
    model.quantize(&[]).expect(0);
    fs::remove_dir_all(model.out()).unwrap();
    fs::write(model.out(), "a file").unwrap();
    assert!(model.quantize(&["--force"]).expect(2).error().contains("not a directory"));
    assert_eq!(fs::read_to_string(model.out()).unwrap(), "a file");
}

#[test]
fn kf20_a_killed_run_leaves_nothing_that_looks_finished_and_a_rerun_needs_no_cleaning() {
    // Large enough to be killed on the way.
    let model = Model::new(FixtureSpec::square().sizes(|g| g.vocab = 60_000));
    let mut child = crate::runs::command(model.root.path())
        .args(["quantize", model.dir.to_str().unwrap(), "--scheme", "w8a8", "--out", "out", "--threads", "1"])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let partial = model.root.path().join(".out.partial");
    while !partial.exists() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    child.kill().unwrap();
    let status = child.wait().unwrap();
    if status.code().is_none() {
        assert!(!model.out().exists(), "killed, and yet there is an artifact");
    }
    // Whatever is left is cleared or complete.
    model.quantize(&[]).expect(0);
    assert!(!partial.exists());
    model.verify(&[]).expect(0);
}

#[test]
fn kf20_a_signal_ends_the_run_with_its_own_code_and_leaves_nothing() {
    let model = Model::new(FixtureSpec::square().sizes(|g| g.vocab = 60_000));
    let mut child = crate::runs::command(model.root.path())
        .args([
            "quantize",
            model.dir.to_str().unwrap(),
            "--scheme",
            "w8a8",
            "--out",
            "new/out",
            "--threads",
            "1",
        ])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let before = tree(&model.dir);
    while !model.root.path().join("new/.out.partial").exists() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    let pid = child.id().to_string();
    std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap();
    let code = child.wait().unwrap().code();
    // On a fast machine the run may be done before the signal arrives.
    if code == Some(5) {
        assert!(!model.root.path().join("new").exists());
    } else {
        assert_eq!(code, Some(0));
    }
    assert_eq!(tree(&model.dir), before);
}

#[test]
fn kf21_the_artifact_is_complete_for_its_loader() {
    let model = Model::tiny();
    fs::write(model.file("modeling_spark.py"), "class Spark2_5ForCausalLM: pass\n").unwrap();
    fs::write(model.file("LICENSE"), "Apache-2.0\n").unwrap();
    fs::write(model.file("pytorch_model.bin"), "weights of another kind").unwrap();
    fs::write(model.file("quantize_config.json"), "{}").unwrap();
    fs::write(model.file(".gitattributes"), "*").unwrap();
    edit_json(&model.file("config.json"), |c| c["my_own_key"] = json!({"kept": [1, 2.5]}));
    let run = model.quantize(&[]).expect(0);
    assert!(run.stderr.contains("pytorch_model.bin") && run.stderr.contains("my_own_key"), "{}", run.stderr);

    let out = model.out();
    for name in
        ["modeling_spark.py", "LICENSE", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    {
        assert_eq!(fs::read(out.join(name)).unwrap(), fs::read(model.file(name)).unwrap(), "{name}");
    }
    for name in ["pytorch_model.bin", "quantize_config.json", ".gitattributes"] {
        assert!(!out.join(name).exists(), "{name}");
    }
    let (source, written) = (read_json(&model.file("config.json")), read_json(&out.join("config.json")));
    for (key, value) in source.as_object().unwrap() {
        assert_eq!(written[key], *value, "{key}");
    }
    let keys = |v: &Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&written)[..keys(&source).len()], keys(&source));
    assert_eq!(keys(&written).last().unwrap(), "quantization_config");

    let index = read_json(&out.join(INDEX));
    let mut total = 0;
    let mut named = 0;
    for path in shards(&out) {
        let file = Tensors::read(&path);
        assert_eq!(file.metadata, json!({"format": "pt"}));
        for (name, _, _, bytes) in &file.tensors {
            assert_eq!(index["weight_map"][name], path.file_name().unwrap().to_str().unwrap(), "{name}");
            total += bytes.len() as u64;
            named += 1;
        }
    }
    assert_eq!(index["metadata"]["total_size"], total);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), named);
    assert_ne!(fs::read(out.join(INDEX)).unwrap(), fs::read(model.file(INDEX)).unwrap());
}

#[test]
fn kf27_one_spoilt_scale_is_exit_1_and_text_and_json_agree() {
    let model = Model::tiny();
    model.quantize(&[]).expect(0);
    let scale = "model.layers.2.mlp.up_proj.weight_scale";
    for path in shards(&model.out()) {
        let mut file = Tensors::read(&path);
        if let Some(bytes) = file.get(scale) {
            let spoilt = f32::from_le_bytes(bytes[..4].try_into().unwrap()) * 64.0;
            bytes[..4].copy_from_slice(&spoilt.to_le_bytes());
            file.write(&path);
        }
    }
    let text = model.verify(&[]).expect(1);
    let json = model.verify(&["--json"]).expect(1).json();
    assert!(text.stdout.contains(scale) && text.stdout.contains("failed"), "{}", text.stdout);
    assert!(text.error().contains("out"));
    assert_eq!(json["passed"], false);
    let findings = json["artifacts"][0]["findings"].as_array().unwrap();
    assert!(findings.iter().any(|f| f["subject"] == scale));
    for finding in findings {
        assert!(text.stdout.contains(finding["what"].as_str().unwrap()), "{finding}");
    }
}

#[test]
fn kf28_the_same_bytes_at_any_thread_count_and_any_time() {
    for head in ["bf16", "int8"] {
        let model = Model::new(FixtureSpec::wide());
        let mut runs = Vec::new();
        for threads in ["1", "2", "1", "2", "7"] {
            model.quantize(&["--head", head, "--threads", threads]).expect(0);
            runs.push(tree(&model.out()));
            fs::remove_dir_all(model.out()).unwrap();
        }
        assert!(runs.windows(2).all(|w| w[0] == w[1]));
        // Nothing of the machine or the moment: another place gives the same bytes.
        let elsewhere = Model::new(FixtureSpec::wide());
        elsewhere.quantize(&["--head", head]).expect(0);
        assert_eq!(tree(&elsewhere.out()), runs[0]);
    }
}
