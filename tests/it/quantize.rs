//! `quantize` and `inspect`: options, plan, destinations, what is printed.

use std::fs;

use serde_json::json;
use xtask::fixtures::FixtureSpec;

use crate::export_npu_run::with_texts;
use crate::runs::{Model, all_tensors, command, run, tree};

#[test]
fn dry_run_prints_every_tensor_and_writes_nothing() {
    let model = Model::tiny();
    let before = tree(model.root.path());
    let plan = model.quantize(&["--dry-run", "--json", "--head", "int8"]).expect(0).json();
    let text = model.quantize(&["--dry-run", "--head", "int8"]).expect(0).stdout;
    assert_eq!(tree(model.root.path()), before);

    model.quantize(&["--head", "int8"]).expect(0);
    let written = all_tensors(&model.out());
    let planned = plan["tensors"].as_array().unwrap();
    assert_eq!(planned.len(), written.len());
    for tensor in planned {
        let name = tensor["name"].as_str().unwrap();
        let (dtype, shape, bytes) = &written[name];
        assert_eq!((&tensor["dtype"], &tensor["shape"]), (&json!(dtype), shape), "{name}");
        assert_eq!(tensor["bytes"], bytes.len(), "{name}");
        assert!(text.contains(name));
    }
    let total: usize = written.values().map(|t| t.2.len()).sum();
    assert_eq!(plan["sizes"]["tensor_bytes"], total);
    // Of the bf16 embedding one row is read per token, of all else everything.
    let table = written["model.embedding.weight"].2.len();
    assert_eq!(plan["sizes"]["bytes_per_token"], total - table + table / 448);
}

#[test]
fn dry_runs_tell_how_long_the_run_will_take() {
    let model = with_texts(FixtureSpec::tiny());
    for (options, phases) in [
        (&[][..], &["quantize"][..]),
        (
            &["--method", "gptq", "--calib", "texts.jsonl"],
            &["forward", "Hessians", "factors", "solve", "hash"],
        ),
        (&["--smooth", "--calib", "texts.jsonl"], &["smooth", "quantize"]),
    ] {
        let options = [options, &["--dry-run"]].concat();
        let plan = model.quantize(&[&options[..], &["--json"]].concat()).expect(0).json();
        let told = plan["phases"].as_array().unwrap();
        assert_eq!(told.iter().map(|p| p["phase"].as_str().unwrap()).collect::<Vec<_>>(), phases);
        let seconds = told.iter().map(|p| p["seconds"].as_f64().unwrap());
        assert!(seconds.clone().all(|s| s > 0.0 && s < 600.0), "{told:?}");
        let total = plan["estimated_seconds"].as_f64().unwrap();
        assert!((seconds.sum::<f64>() - total).abs() < 1e-9 * total);
        assert!(model.quantize(&options).expect(0).stdout.contains(" on this machine; nothing was written"));
    }
}

#[test]
fn a_tied_head_is_read_whole_for_every_token() {
    let model = Model::tiny();
    let plan = model.quantize(&["--dry-run", "--json"]).expect(0).json();
    assert_eq!(plan["sizes"]["bytes_per_token"], plan["sizes"]["tensor_bytes"]);
}

#[test]
fn five_modules_a_layer_are_quantized_and_all_else_is_kept() {
    // Heads x head_dim differs from hidden here, as in the 4B.
    let model = Model::new(FixtureSpec::wide());
    model.quantize(&[]).expect(0);
    let (source, written) = (all_tensors(&model.dir), all_tensors(&model.out()));
    let mut quantized = 0;
    for (name, (_, shape, _)) in &source {
        let module = name.trim_end_matches(".weight");
        let projection = ["q_k_v_proj", "out_proj", "gate_proj", "up_proj", "down_proj"]
            .iter()
            .any(|m| module.ends_with(&format!(".{m}")));
        if projection {
            quantized += 1;
            assert_eq!(written[name].0, "I8", "{name}");
            assert_eq!(written[name].1, *shape, "{name}");
            let scale = &written[&format!("{module}.weight_scale")];
            assert_eq!((scale.0.as_str(), &scale.1), ("F32", &json!([shape[0], 1])), "{name}");
        } else {
            assert_eq!(written[name], source[name], "{name}");
        }
    }
    assert_eq!(quantized, 4 * 5);
    assert_eq!(written.len(), source.len() + quantized);
    model.verify(&[]).expect(0);
}

#[test]
fn search_is_not_below_rounding_on_any_module() {
    let model = Model::new(FixtureSpec::wide());
    let snrs = |method: &str| {
        model.quantize(&["--method", method, "--force"]).expect(0);
        let report = model.verify(&["--json"]).expect(0).json();
        report["artifacts"][0]["modules"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| m["snr_db"].as_f64().unwrap())
            .collect::<Vec<_>>()
    };
    let (rtn, search) = (snrs("rtn"), snrs("search"));
    assert_eq!(rtn.len(), 20);
    assert!(rtn.iter().zip(&search).all(|(r, s)| s >= r), "{rtn:?} {search:?}");
    assert!(search.iter().sum::<f64>() > rtn.iter().sum::<f64>());
}

#[test]
fn the_checkpoint_is_never_guessed_outside_a_checkout() {
    let model = Model::tiny();
    let empty = model.root.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let args = ["quantize", "--scheme", "w8a8", "--dry-run"];
    let refused = run(&empty, args).expect(2);
    assert!(refused.error().contains("SPARK_CHECKPOINT"));
    // The current directory, if it is a checkpoint.
    run(&model.dir, args).expect(0);
    // The variable, which must not be empty.
    let with = |value: &str| command(&empty).args(args).env("SPARK_CHECKPOINT", value).output().unwrap();
    assert_eq!(with(model.dir.to_str().unwrap()).status.code(), Some(0));
    assert_eq!(with("").status.code(), Some(2));
    assert_eq!(with("/no/such/model").status.code(), Some(3));
    assert_eq!(run(&empty, ["quantize", "", "--scheme", "w8a8"]).code, 2);
    // config.json stands for its directory.
    run(&empty, ["inspect", model.file("config.json").to_str().unwrap()]).expect(0);
}

#[test]
fn inside_a_checkout_the_bundled_checkpoint_is_taken_and_said() {
    let checkout = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    for dir in [checkout.to_owned(), checkout.join("src/spark")] {
        let run = run(&dir, ["inspect"]).expect(0);
        assert!(run.stderr.contains("fixtures/spark-tiny"), "{}", run.stderr);
    }
}

#[test]
fn a_second_run_is_up_to_date_until_something_differs() {
    let model = Model::tiny();
    assert!(model.quantize(&[]).expect(0).stdout.contains("written"));
    let first = tree(&model.out());
    assert_eq!(model.quantize(&["--json"]).expect(0).json()["status"], "up to date");
    assert_eq!(tree(&model.out()), first);
    // A damaged artifact is not up to date.
    let file = model.out().join("tokenizer.json");
    fs::write(&file, "{}").unwrap();
    assert!(model.quantize(&[]).expect(2).error().contains("tokenizer.json"));
    model.quantize(&["--force"]).expect(0);
    assert_eq!(tree(&model.out()), first);
    // Nor one of other weights of the same shapes.
    let other = Model::new(FixtureSpec::tiny().seed(1));
    for name in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        fs::copy(other.file(name), model.file(name)).unwrap();
    }
    assert!(model.quantize(&[]).expect(2).error().contains("another checkpoint"));
}

#[test]
fn unknown_and_ineffective_options_are_usage_errors() {
    let model = Model::tiny();
    for args in [
        &["--group-size", "128"][..],
        &["--no-such-flag"],
        &["--method", "magic"],
        &["--head", "4bit"],
        &["--threads", "0"],
        &["--quiet", "--verbose"],
    ] {
        model.quantize(args).expect(2);
    }
    assert!(!model.out().exists());
    let no_scheme = run(model.root.path(), ["quantize", "model"]).expect(2);
    assert!(no_scheme.stderr.contains("--scheme"));
}

#[test]
fn a_destination_that_cannot_be_written_is_exit_4_and_leaves_nothing() {
    let model = Model::tiny();
    let before = tree(model.root.path());
    let dir = model.dir.to_str().unwrap();
    // A file where a directory would have to be made.
    let out = model.root.path().join("model/config.json/x");
    let run = run(model.root.path(), ["quantize", dir, "--scheme", "w8a8", "--out", out.to_str().unwrap()]);
    assert!(matches!(run.code, 2 | 4), "{run:?}");
    assert_eq!(tree(model.root.path()), before);
}

#[test]
fn stdout_is_the_result_and_stderr_the_story() {
    let model = Model::tiny();
    let run = model.quantize(&["--json"]).expect(0);
    assert_eq!(run.json()["status"], "written");
    assert_eq!(run.json()["quantized_modules"], 20);
    assert_eq!(run.stderr, "");
    let missing = crate::runs::run(model.root.path(), ["inspect", "nowhere"]).expect(3);
    assert_eq!(missing.stdout, "");
    let json = crate::runs::run(model.root.path(), ["inspect", "nowhere", "--log-format", "json"]).expect(3);
    let line: serde_json::Value = serde_json::from_str(json.stderr.lines().next().unwrap()).unwrap();
    assert_eq!(line["level"], "ERROR");
}

#[test]
fn inspect_tells_checkpoints_from_artifacts() {
    let model = Model::tiny();
    model.quantize(&["--head", "int8"]).expect(0);
    let checkpoint = run(model.root.path(), ["inspect", "model", "--json", "--tensors"]).expect(0).json();
    assert_eq!((&checkpoint["kind"], &checkpoint["parameters"]), (&json!("checkpoint"), &json!(452_736)));
    assert_eq!(checkpoint["tensors"].as_array().unwrap().len(), 34);
    let artifact = run(model.root.path(), ["inspect", "out", "--json"]).expect(0).json();
    assert_eq!(artifact["kind"], "artifact");
    assert_eq!(artifact["options"], json!({"method": "search", "head": "int8"}));
    assert_eq!(artifact["architecture"]["tie_word_embeddings"], false);
    let text = run(model.root.path(), ["inspect", "out"]).expect(0).stdout;
    assert!(text.contains("w8a8") && text.contains("own head"), "{text}");
}
