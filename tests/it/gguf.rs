//! GGUF files: read, run, and ranked beside artifacts.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use spark_convert::checkpoint::Checkpoint;
use spark_convert::opened::{Opened, checkpoint_model};
use spark_convert::runtime::{Gelu, Rounding, State};
use xtask::fixtures::{FixtureSpec, Head};
use xtask::gguf::{Gguf, Kind, Pair};

use crate::runs::{Model, Run, read_json, run};

const TOKENS: [u32; 21] = [3, 17, 42, 5, 9, 100, 200, 300, 400, 447, 0, 1, 2, 8, 33, 65, 71, 99, 250, 12, 7];

/// The checkpoint as a GGUF file beside it.
fn convert(model: &Model, kind: Kind, edit: impl FnOnce(&mut Gguf)) -> PathBuf {
    let mut file = Gguf::of_checkpoint(&model.dir, kind).unwrap();
    edit(&mut file);
    let path = model.root.path().join("model.gguf");
    fs::write(&path, file.bytes()).unwrap();
    path
}

fn logits(path: &Path, gelu: Gelu) -> Vec<f32> {
    let opened = Opened::open(path).unwrap();
    let model = opened.model().unwrap().with_gelu(gelu);
    let hidden = model.forward(&mut State::new(model.config()), &TOKENS).unwrap();
    model.logits(&hidden)
}

fn snr_db(reference: &[f32], other: &[f32]) -> f64 {
    let pairs = || reference.iter().zip(other).map(|(r, y)| (f64::from(*r), f64::from(*y)));
    let signal: f64 = pairs().map(|(r, _)| r * r).sum();
    10.0 * (signal / pairs().map(|(r, y)| (r - y) * (r - y)).sum::<f64>()).log10()
}

#[test]
fn float_files_give_the_bits_of_the_checkpoint() {
    for head in [Head::Tied, Head::Untied] {
        let model = Model::new(FixtureSpec::tiny().head(head));
        let expected = logits(&model.dir, Gelu::Exact);
        // bf16 weights lose nothing as F32 or BF16.
        for kind in [Kind::F32, Kind::Bf16] {
            let path = convert(&model, kind, |_| {});
            assert_eq!(logits(&path, Gelu::Exact), expected, "{kind:?}");
        }
    }
}

#[test]
fn quantized_files_and_the_tanh_form_are_as_far_off_as_they_should_be() {
    let model = Model::tiny();
    let expected = logits(&model.dir, Gelu::Exact);
    let path = convert(&model, Kind::Q8_0, |_| {});
    let opened = Opened::open(&path).unwrap();
    let Opened::Gguf(file) = &opened else { panic!("a GGUF file") };
    let checkpoint = Checkpoint::open(&model.dir).unwrap();
    // Eight bits and a scale for 32 weights, stored in f16: rounding is at most half a step of amax / 127,
    // and a scale is off by 2^-11 of itself at most, or by 2^-25 where it is subnormal.
    for spec in checkpoint.specs.iter().filter(|s| s.shape.len() == 2) {
        let (source, blocks) = (checkpoint.tensor(&spec.name), file.blocks(&spec.name).unwrap().unwrap());
        let (mut w, mut found) = (vec![0.0; spec.shape[1]], vec![0.0; spec.shape[1]]);
        for row in 0..spec.shape[0] {
            source.decode_row(row, &mut w);
            blocks.decode_row(row, &mut found);
            for (w, found) in w.chunks(32).zip(found.chunks(32)) {
                let amax = w.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                let most = amax * (0.5 / 127.0 + 0.5f32.powi(11)) + 127.0 * 0.5f32.powi(25);
                assert!(w.iter().zip(found).all(|(w, y)| (w - y).abs() <= most), "{}", spec.name);
            }
        }
    }
    let quantized = snr_db(&expected, &logits(&path, Gelu::Exact));
    assert!((25.0..60.0).contains(&quantized), "{quantized}");
    // The published facts have 57 to 67 dB for the tanh form in f16 on another model.
    let path = convert(&model, Kind::F32, |_| {});
    let tanh = snr_db(&expected, &logits(&path, Gelu::Tanh));
    assert!((40.0..90.0).contains(&tanh), "{tanh}");
}

#[test]
fn inspect_says_what_a_file_is() {
    let model = Model::tiny();
    let path = convert(&model, Kind::Q8_0, |_| {});
    let text = run(model.root.path(), ["inspect", "model.gguf", "--tensors"]).expect(0).stdout;
    for words in
        ["GGUF version 3", "tensors by type", "of Q8_0", "blk.0.attn_qkv.weight", "4 layers (3 sliding"]
    {
        assert!(text.contains(words), "{words:?} in {text}");
    }
    let said = run(model.root.path(), ["inspect", "model.gguf", "--tensors", "--json"]).expect(0).json();
    let checkpoint = run(model.root.path(), ["inspect", "model", "--json"]).expect(0).json();
    assert_eq!(said["kind"], "gguf");
    for key in ["architecture", "parameters"] {
        assert_eq!(said[key], checkpoint[key], "{key}");
    }
    assert_eq!(said["bytes"], fs::metadata(path).unwrap().len());
    // 34 bytes for 32 weights of every matrix, four bytes for a norm's.
    let specs = Checkpoint::open(&model.dir).unwrap().specs;
    let bytes = |shape: &[usize]| match shape {
        [n] => n * 4,
        shape => shape.iter().product::<usize>() / 32 * 34,
    };
    let total: usize = specs.iter().map(|s| bytes(&s.shape)).sum();
    assert_eq!(said["tensor_bytes"], total);
    assert_eq!(said["bytes_per_token"], total);
    assert_eq!(said["tensors"].as_array().unwrap().len(), specs.len());
    assert_eq!(said["metadata"]["general.architecture"], "spark2_5");
}

fn generate(model: &Model, what: &str, more: &[&str]) -> Run {
    run(model.root.path(), ["generate", what, "--max-new-tokens", "7"].iter().chain(more))
}

#[test]
fn text_comes_with_the_tokenizer_of_the_checkpoint() {
    let model = Model::tiny();
    convert(&model, Kind::F32, |_| {});
    let expected = generate(&model, "model", &["--prompt", "Hello, 世界", "--json"]).expect(0).json();
    let args = ["--prompt", "Hello, 世界", "--json", "--tokenizer", "model"];
    assert_eq!(generate(&model, "model.gguf", &args).expect(0).json(), expected);
    // Ids need none, and then there is no text.
    let ids = generate(&model, "model.gguf", &["--tokens", "3,17", "--json"]).expect(0).json();
    let expected = generate(&model, "model", &["--tokens", "3,17", "--json"]).expect(0).json();
    assert_eq!((&ids["tokens"], &ids["text"]), (&expected["tokens"], &Value::Null));
    let without = generate(&model, "model.gguf", &["--prompt", "Hello"]).expect(3);
    assert!(without.error().contains("--tokenizer"), "{}", without.error());
    // The form of GELU is a question to a GGUF file alone.
    generate(&model, "model.gguf", &["--tokens", "3", "--gelu", "tanh"]).expect(0);
    assert!(
        generate(&model, "model", &["--tokens", "3", "--gelu", "tanh"]).expect(2).error().contains("--gelu")
    );
}

#[test]
fn a_tokenizer_of_another_model_is_noticed() {
    let model = Model::tiny();
    let vocab = read_json(&model.file("tokenizer.json"))["model"]["vocab"].clone();
    let mut tokens = vec!["[PAD]".to_owned(); 448];
    for (token, id) in vocab.as_object().unwrap() {
        tokens[id.as_u64().unwrap() as usize].clone_from(token);
    }
    let mut types: Vec<i32> = tokens.iter().map(|t| if t == "[PAD]" { 5 } else { 1 }).collect();
    let ordinary = vocab.as_object().unwrap().values().filter_map(Value::as_u64).max().unwrap() as usize;
    let store = |tokens: &[String], types: &[i32]| {
        convert(&model, Kind::F32, |file| {
            file.set("tokenizer.ggml.tokens", Pair::Texts(tokens.to_vec()));
            file.set("tokenizer.ggml.token_type", Pair::Numbers(types.to_vec()));
        });
        generate(&model, "model.gguf", &["--tokens", "3", "--tokenizer", "model"])
    };
    store(&tokens, &types).expect(0);
    tokens[ordinary] = "other".to_owned();
    let refused = store(&tokens, &types).expect(3);
    for word in [format!("token {ordinary}").as_str(), "other", "--tokenizer"] {
        assert!(refused.error().contains(word), "{word} in {}", refused.error());
    }
    // What is not marked as an ordinary token is respelled by converters.
    types[ordinary] = 3;
    store(&tokens, &types).expect(0);
}

#[test]
fn a_file_is_a_contestant_beside_an_artifact() {
    let model = Model::tiny();
    model.quantize(&[]).expect(0);
    convert(&model, Kind::Q8_0, |_| {});
    let args = |more: &[&'static str]| {
        ["verify", "out", "model.gguf", "--reference", "model", "--scenario", "short", "--min-greedy", "0"]
            .into_iter()
            .chain(more.iter().copied())
            .collect::<Vec<_>>()
    };
    let report = run(model.root.path(), args(&["--json"])).expect(0).json();
    let [artifact, contestant] = &report["artifacts"].as_array().unwrap()[..] else { panic!("two") };
    assert_eq!((&artifact["scheme"], &contestant["scheme"]), (&json!("w8a8"), &json!("gguf")));
    assert_eq!(artifact["notes"], json!([]));
    assert!(contestant["notes"][0].as_str().unwrap().contains("exact GELU"), "{}", contestant["notes"]);
    // No bars but the one that was given.
    let gates = contestant["gates"].as_array().unwrap();
    assert_eq!(gates.iter().map(|g| &g["name"]).collect::<Vec<_>>(), ["greedy"]);
    // Every tensor was compared: matrices lost something, norms nothing.
    let modules = contestant["modules"].as_array().unwrap();
    assert_eq!(modules.len(), Checkpoint::open(&model.dir).unwrap().specs.len());
    for m in modules {
        let snr = m["snr_db"].as_f64();
        match m["module"].as_str().unwrap() {
            name if name.contains("norm") => assert_eq!(snr, None, "{name}"),
            // A step of amax / 127 for 32 weights: 10 log10(12 * 127^2 * rms^2 / amax^2), whose crest
            // factor amax / rms is between 1 and the root of 32.
            name => assert!(snr.is_some_and(|db| (37.0..52.9).contains(&db)), "{name}: {snr:?}"),
        }
    }
    let scenario = |verdict: &Value| verdict["behaviour"]["scenarios"][0].clone();
    assert_eq!(scenario(artifact)["floor"], scenario(contestant)["floor"]);
    assert!(scenario(contestant)["artifact"]["kl"]["mean"].as_f64() > Some(0.0));

    let text = run(model.root.path(), args(&["--gelu", "tanh"])).expect(0).stdout;
    assert!(text.contains("contestant: ") && text.contains("tanh GELU"), "{text}");
    // A bar that is missed is exit 1; a damaged weight is a finding.
    run(model.root.path(), args(&["--min-weight-snr-db", "60"])).expect(1);
    convert(&model, Kind::F32, |file| {
        let tensor = file.tensors.iter_mut().find(|t| t.name == "blk.1.ffn_up.weight").unwrap();
        tensor.bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let broken = run(model.root.path(), args(&["--json"])).expect(1).json();
    let finding = &broken["artifacts"][1]["findings"][0];
    assert_eq!((&finding["check"], &finding["subject"]), (&json!("weights"), &json!("blk.1.ffn_up.weight")));
}

#[test]
fn gelu_without_a_file_and_files_of_other_models_are_refused_at_once() {
    let model = Model::tiny();
    model.quantize(&[]).expect(0);
    let verify = |what: &str, more: &[&'static str]| {
        let args = ["verify", what, "--reference", "model", "--scenario", "none"];
        run(model.root.path(), args.iter().chain(more))
    };
    assert!(verify("out", &["--gelu", "tanh"]).expect(2).error().contains("--gelu"));
    for (key, pair, words) in [
        ("spark2_5.attention.sliding_window", Pair::U32(7), ["sliding window", "8"]),
        ("spark2_5.rope.freq_base", Pair::F32(1e6), ["full layers", "5000000"]),
        ("spark2_5.attention.layer_norm_rms_epsilon", Pair::F32(1e-5), ["epsilon", "0.000001"]),
        (
            "spark2_5.attention.sliding_window_pattern",
            Pair::Bools(vec![true; 4]),
            ["layers", "full_attention"],
        ),
    ] {
        convert(&model, Kind::F32, |file| file.set(key, pair));
        let refused = verify("model.gguf", &[]).expect(3);
        for word in words.iter().chain(&["model.gguf", "--reference"]) {
            assert!(refused.error().contains(word), "{word} in {}", refused.error());
        }
        assert_eq!(refused.stdout, "");
    }
}

#[test]
fn what_is_not_a_spark_model_is_one_line_and_exit_3() {
    let model = Model::tiny();
    let refused = |words: &[&str]| {
        let run = run(model.root.path(), ["inspect", "model.gguf"]).expect(3);
        for word in words {
            assert!(run.error().contains(word), "{word:?} in {}", run.error());
        }
    };
    refused(&["model.gguf", "no such file"]);
    fs::write(model.root.path().join("model.gguf"), b"").unwrap();
    refused(&["model.gguf", "GGUF"]);
    fs::write(model.root.path().join("model.gguf"), b"version https://git-lfs.github.com/spec/v1\n").unwrap();
    refused(&["Git LFS pointer"]);
    let path = convert(&model, Kind::F32, |_| {});
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1000]).unwrap();
    refused(&["cut short", "missing"]);
    fs::write(&path, &bytes[..300]).unwrap();
    refused(&["ends inside its header"]);
    convert(&model, Kind::F32, |file| file.set("general.architecture", Pair::Text("llama".into())));
    refused(&["general.architecture", "llama", "Spark"]);
    convert(&model, Kind::F32, |file| file.set("split.count", Pair::U32(3)));
    refused(&["split.count", "--merge"]);
    convert(&model, Kind::F32, |file| file.set("spark2_5.attention.scale", Pair::F32(0.5)));
    refused(&["spark2_5.attention.scale", "arithmetic"]);
    convert(&model, Kind::F32, |file| file.remove("spark2_5.rope.freq_base_swa"));
    refused(&["spark2_5.rope.freq_base_swa", "no such key"]);
    convert(&model, Kind::F32, |file| file.tensors.retain(|t| t.name != "blk.2.attn_gate.weight"));
    refused(&["blk.2.attn_gate.weight", "no such tensor"]);
    convert(&model, Kind::F32, |file| {
        let mut extra = file.tensors[0].clone();
        extra.name = "blk.0.attn_q_norm.weight".to_owned();
        file.tensors.push(extra);
    });
    refused(&["blk.0.attn_q_norm.weight", "does not have"]);
    // A type that is not read: Q4_0, whose blocks of 32 take 18 bytes.
    convert(&model, Kind::Q8_0, |file| {
        let tensor = file.tensors.iter_mut().find(|t| t.name == "blk.0.ffn_up.weight").unwrap();
        tensor.kind = 2;
    });
    refused(&["blk.0.ffn_up.weight", "Q4_0", "Q8_0"]);
    // What is unknown and harmless is a note.
    convert(&model, Kind::F32, |file| file.set("spark2_5.mascot", Pair::U32(1)));
    let said = run(model.root.path(), ["inspect", "model.gguf"]).expect(0).stdout;
    assert!(said.contains("note: ") && said.contains("spark2_5.mascot"), "{said}");
}

#[cfg(unix)]
#[test]
fn a_link_that_the_user_names_is_followed() {
    let model = Model::tiny();
    let path = convert(&model, Kind::F32, |_| {});
    let other = model.root.path().join("other");
    fs::create_dir(&other).unwrap();
    std::os::unix::fs::symlink(&path, other.join("link.gguf")).unwrap();
    let said = run(model.root.path(), ["inspect", "other/link.gguf"]).expect(0).stdout;
    assert!(said.contains("link.gguf"), "{said}");
    fs::remove_file(path).unwrap();
    let dangling = run(model.root.path(), ["inspect", "other/link.gguf"]).expect(3);
    assert!(dangling.error().contains("no such file"), "{}", dangling.error());
}

#[test]
fn rounding_is_a_matter_of_checkpoints() {
    // The floor of verify is bf16 arithmetic on the source; a contestant runs in f32 around its weights.
    let model = Model::tiny();
    let path = convert(&model, Kind::Bf16, |_| {});
    let checkpoint = Checkpoint::open(&model.dir).unwrap();
    let floor = checkpoint_model(&checkpoint, Rounding::Bf16).unwrap();
    let hidden = floor.forward(&mut State::new(floor.config()), &TOKENS).unwrap();
    assert_ne!(floor.logits(&hidden), logits(&path, Gelu::Exact));
}
