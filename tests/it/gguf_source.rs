//! GGUF files of floats as the source of artifacts.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use xtask::fixtures::{Dtype, FixtureSpec, Head};
use xtask::gguf::{Gguf, Kind, Pair};

use crate::runs::{Model, Run, edit_json, read_json, run, tree};

/// The checkpoint as a GGUF file in a directory of its own.
fn convert(model: &Model, kind: Kind, edit: impl FnOnce(&mut Gguf)) -> PathBuf {
    let mut file = Gguf::of_checkpoint(&model.dir, kind).unwrap();
    edit(&mut file);
    let dir = model.root.path().join("ggufs");
    fs::create_dir_all(&dir).unwrap();
    let path = dir.join("spark-float.gguf");
    fs::write(&path, file.bytes()).unwrap();
    path
}

/// `quantize` of the GGUF file, into `from-gguf`.
fn quantize(model: &Model, more: &[&str]) -> Run {
    let args = ["quantize", "ggufs/spark-float.gguf", "--tokenizer", "model", "--out", "from-gguf"];
    run(model.root.path(), args.iter().chain(more))
}

/// Sizes that every scheme divides.
fn even() -> FixtureSpec {
    FixtureSpec::square().sizes(|sizes| {
        sizes.ffn = 768;
        sizes.layers = 4;
    })
}

/// The manifest without what it was made from.
fn without_source(dir: &Path) -> Value {
    let mut manifest = read_json(&dir.join("spark-convert.json"));
    for key in ["source", "self_sha256", "notes"] {
        manifest.as_object_mut().unwrap().shift_remove(key).unwrap();
    }
    manifest
}

#[test]
fn a_float_file_gives_the_bytes_that_the_checkpoint_gives() {
    // llama.cpp's converter widens norms to F32, and of F32 and F16 checkpoints they are F32 or lose bits.
    for (dtype, kind, head, options) in [
        (Dtype::Bf16, Kind::Bf16, Head::Tied, ["--scheme", "w8a8"].as_slice()),
        (Dtype::Bf16, Kind::Bf16, Head::Untied, &["--scheme", "w4a16", "--group-size", "64"]),
        (Dtype::F32, Kind::F32, Head::Tied, &["--scheme", "w4a8", "--asymmetric", "--head", "int8"]),
        (Dtype::F16, Kind::F16, Head::Tied, &["--scheme", "w4a8"]),
    ] {
        let model = Model::new(even().single_file().dtype(dtype).head(head));
        convert(&model, kind, |_| {});
        let args = ["quantize", "model", "--out", "from-dir"];
        run(model.root.path(), args.iter().chain(options)).expect(0);
        quantize(&model, options).expect(0);
        let root = model.root.path();
        let (ours, theirs) = (tree(&root.join("from-gguf")), tree(&root.join("from-dir")));
        assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
        for (name, bytes) in ours.iter().filter(|(name, _)| name.as_path() != "spark-convert.json") {
            assert!(*bytes == theirs[name], "{dtype:?}: {}", name.display());
        }
        assert_eq!(without_source(&root.join("from-gguf")), without_source(&root.join("from-dir")));
        let manifest = read_json(&root.join("from-gguf/spark-convert.json"));
        let sources = manifest["source"]["files"].as_object().unwrap();
        assert_eq!(sources.keys().collect::<Vec<_>>(), ["config.json", "spark-float.gguf"]);
        let length = fs::metadata(root.join("ggufs/spark-float.gguf")).unwrap().len();
        assert_eq!(sources["spark-float.gguf"]["bytes"], length);
    }
}

#[test]
fn the_bundled_checkpoint_comes_out_the_same_by_way_of_a_file() {
    let model = Model::tiny();
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/spark-tiny");
    fs::remove_dir_all(&model.dir).unwrap();
    fs::create_dir(&model.dir).unwrap();
    for entry in fs::read_dir(bundled).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.dir.join(path.file_name().unwrap())).unwrap();
    }
    convert(&model, Kind::Bf16, |_| {});
    let options = ["--scheme", "w4a8", "--method", "rtn"];
    model.quantize_to("w4a8", &options[2..]).expect(0);
    quantize(&model, &options).expect(0);
    // Two shards became one file: the same tensors, hash by hash.
    let tensors = |dir: PathBuf| {
        let mut manifest = without_source(&dir);
        let mut tensors = manifest["tensors"].take().as_array().unwrap().clone();
        for tensor in &mut tensors {
            tensor.as_object_mut().unwrap().shift_remove("file");
        }
        tensors.sort_by_key(|t| t["name"].as_str().unwrap().to_owned());
        tensors
    };
    assert_eq!(tensors(model.root.path().join("from-gguf")), tensors(model.out()));
}

#[test]
fn calibration_sees_the_same_model() {
    let model = Model::new(even().single_file());
    convert(&model, Kind::Bf16, |_| {});
    let gptq = ["--scheme", "w4a8", "--method", "gptq", "--calib-tokens", "64"];
    model.quantize_to("w4a8", &gptq[2..]).expect(0);
    quantize(&model, &gptq).expect(0);
    let weights = |dir: PathBuf| fs::read(dir.join("model.safetensors")).unwrap();
    assert!(weights(model.root.path().join("from-gguf")) == weights(model.out()));
}

#[test]
fn the_file_is_the_reference_of_what_was_made_from_it() {
    let model = Model::tiny();
    let path = convert(&model, Kind::Bf16, |_| {});
    let said = quantize(&model, &["--scheme", "w8a8", "--json"]).expect(0).json();
    assert_eq!(said["status"], "written");
    assert!(said["notes"].to_string().contains("spark-float.gguf: the tensors; model: all else"));
    assert_eq!(quantize(&model, &["--scheme", "w8a8", "--json"]).expect(0).json()["status"], "up to date");
    let verify = |reference: &[&str]| {
        let args = ["verify", "from-gguf", "--scenario", "short", "--min-greedy", "0", "--reference"];
        run(model.root.path(), args.iter().chain(reference))
    };
    let file = ["ggufs/spark-float.gguf", "--tokenizer", "model"];
    let report = verify(&[&file[..], &["--json"]].concat()).expect(0).json();
    assert_eq!(report["artifacts"][0]["findings"], json!([]));
    // The checkpoint has other files than the artifact was made from, even though the weights are equal.
    let other = verify(&["model"]).expect(3);
    for word in ["spark-float.gguf", "--reference"] {
        assert!(other.error().contains(word), "{word} in {}", other.error());
    }
    // A file that was changed afterwards is not what it was made from.
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 64;
    bytes[last] ^= 1;
    fs::write(&path, bytes).unwrap();
    let changed = verify(&file).expect(3);
    assert!(changed.error().contains("SHA-256"), "{}", changed.error());
}

#[test]
fn a_plan_names_the_command_and_its_figures() {
    let model = Model::new(even());
    convert(&model, Kind::Bf16, |_| {});
    let args = ["plan", "ggufs/spark-float.gguf", "--tokenizer", "model", "--target", "x86-vnni", "--json"];
    let plan = run(model.root.path(), args.iter().chain(&["--threads", "2"])).expect(0).json();
    let mut seen = 0;
    for candidate in plan["candidates"].as_array().unwrap() {
        let Some(line) = candidate["command"].as_str() else { continue };
        let words: Vec<_> = line.strip_prefix("spark-convert ").unwrap().split(' ').collect();
        assert_eq!(words[..4], ["quantize", "ggufs/spark-float.gguf", "--tokenizer", "model"], "{line}");
        let more = ["--dry-run", "--json", "--threads", "2"];
        let dry = run(model.root.path(), words.iter().chain(&more)).expect(0).json();
        assert_eq!(candidate["bytes_per_token"], dry["sizes"]["bytes_per_token"], "{line}");
        assert_eq!(candidate["making_peak_bytes"], dry["peak_memory_bytes"], "{line}");
        assert_eq!(dry["artifact"].as_str().unwrap().split('-').next(), Some("artifacts/spark"));
        seen += 1;
    }
    assert!(seen > 2, "{plan}");
    assert!(!model.root.path().join("artifacts").exists());
}

/// Makes the file, and makes sure that it is refused with these words and nothing is left behind.
#[track_caller]
fn refused(model: &Model, kind: Kind, edit: impl FnOnce(&mut Gguf), words: &[&str]) {
    convert(model, kind, edit);
    let before = tree(model.root.path());
    let run = quantize(model, &["--scheme", "w8a8"]).expect(3);
    for word in words {
        assert!(run.error().contains(word), "{word:?} in {}", run.error());
    }
    assert_eq!((tree(model.root.path()) == before, run.stdout.as_str()), (true, ""));
}

#[test]
fn what_is_no_source_is_refused_by_name() {
    let model = Model::tiny();
    refused(&model, Kind::Q8_0, |_| {}, &["spark-float.gguf", "Q8_0", "more in blocks", "--outtype bf16"]);
    // Another model's metadata, one property at a time.
    for (key, pair, words) in [
        ("spark2_5.attention.sliding_window", Pair::U32(7), ["sliding window", "found 7"]),
        ("spark2_5.rope.freq_base_swa", Pair::F32(2e4), ["sliding layers", "base 20000"]),
        ("spark2_5.rope.dimension_count", Pair::U32(32), ["full layers", "32 dimensions"]),
        ("spark2_5.attention.layer_norm_rms_epsilon", Pair::F32(1e-5), ["epsilon", "0.00001"]),
    ] {
        refused(&model, Kind::Bf16, |file| file.set(key, pair), &words);
        refused(&model, Kind::Bf16, |file| file.remove(key), &[key, "no such key"]);
    }
    // A head of its own where config.json says that it is tied: a copy is left behind, another is refused.
    let with_head = |change: u8| {
        move |file: &mut Gguf| {
            let mut head = file.tensors.iter().find(|t| t.name == "token_embd.weight").unwrap().clone();
            head.name = "output.weight".to_owned();
            head.bytes[0] ^= change;
            file.tensors.push(head);
        }
    };
    refused(&model, Kind::Bf16, with_head(1), &["lm_head.weight", "tie_word_embeddings"]);
    convert(&model, Kind::Bf16, with_head(0));
    quantize(&model, &["--scheme", "w8a8", "--dry-run"]).expect(0);
    // A weight that is no number.
    let broken = |file: &mut Gguf| {
        let tensor = file.tensors.iter_mut().find(|t| t.name == "blk.1.ffn_up.weight").unwrap();
        tensor.bytes[..2].copy_from_slice(&[0xc0, 0x7f]);
    };
    refused(&model, Kind::Bf16, broken, &["spark-float.gguf", "mlp.up_proj", "NaN"]);
}

#[test]
fn a_directory_is_needed_and_has_to_be_the_right_one() {
    let model = Model::tiny();
    convert(&model, Kind::Bf16, |_| {});
    let plain = |args: &[&str]| run(model.root.path(), args);
    let dry = ["--scheme", "w8a8", "--dry-run"];
    // Without --tokenizer the directory of the file has to do.
    let alone = plain(&[&["quantize", "ggufs/spark-float.gguf"], &dry[..]].concat()).expect(3);
    for word in ["config.json", "ggufs", "--tokenizer"] {
        assert!(alone.error().contains(word), "{word} in {}", alone.error());
    }
    fs::copy(model.root.path().join("ggufs/spark-float.gguf"), model.file("spark-float.gguf")).unwrap();
    plain(&[&["quantize", "model/spark-float.gguf"], &dry[..]].concat()).expect(0);
    fs::remove_file(model.file("spark-float.gguf")).unwrap();
    // It goes with a file alone, and not every verb takes one.
    for verb in [&["quantize", "model", "--scheme", "w8a8"][..], &["plan", "model"]] {
        let usage = plain(&[verb, &["--tokenizer", "model"]].concat()).expect(2);
        assert!(usage.error().contains("--tokenizer"), "{}", usage.error());
    }
    let export = plain(&["export-npu", "ggufs/spark-float.gguf"]).expect(3);
    assert!(export.error().contains("a GGUF file"), "{}", export.error());
    let inside = plain(&[
        "quantize",
        "ggufs/spark-float.gguf",
        "--tokenizer",
        "model",
        "--scheme",
        "w8a8",
        "--out",
        "ggufs",
    ]);
    assert!(inside.expect(2).error().contains("--out"));

    // A vocabulary that the tokenizer does not spell.
    let vocab = read_json(&model.file("tokenizer.json"))["model"]["vocab"].clone();
    let ids = || vocab.as_object().unwrap().iter().map(|(token, id)| (token, id.as_u64().unwrap() as usize));
    let size = ids().map(|(_, id)| id).max().unwrap() + 1;
    let mut tokens = vec![String::new(); size];
    ids().for_each(|(token, id)| tokens[id].clone_from(token));
    let with_vocabulary = |file: &mut Gguf| {
        file.set("tokenizer.ggml.tokens", Pair::Texts(tokens.clone()));
        file.set("tokenizer.ggml.token_type", Pair::Numbers(vec![1; size]));
    };
    convert(&model, Kind::Bf16, with_vocabulary);
    let said = quantize(&model, &[&dry[..], &["--json"]].concat()).expect(0).json();
    assert!(!said["notes"].to_string().contains("not compared"), "{}", said["notes"]);
    convert(&model, Kind::Bf16, |_| {});
    let said = quantize(&model, &[&dry[..], &["--json"]].concat()).expect(0).json();
    assert!(said["notes"].to_string().contains("not compared"), "{}", said["notes"]);
    let swapped = |file: &mut Gguf| {
        let mut tokens = tokens.clone();
        tokens.swap(size - 1, size - 2);
        file.set("tokenizer.ggml.tokens", Pair::Texts(tokens));
        file.set("tokenizer.ggml.token_type", Pair::Numbers(vec![1; size]));
    };
    refused(&model, Kind::Bf16, swapped, &["tokenizer.json", "token ", "--tokenizer"]);
    edit_json(&model.file("tokenizer.json"), |json| {
        json["model"].as_object_mut().unwrap().shift_remove("vocab");
    });
    refused(&model, Kind::Bf16, with_vocabulary, &["tokenizer.json", "model.vocab"]);
}

#[test]
fn norms_that_sixteen_bits_do_not_hold_stay_as_they_are() {
    let model = Model::new(FixtureSpec::tiny().single_file());
    // 1 + 2^-20 needs 21 bits of mantissa; bf16 has 8, f16 has 11.
    let odd = 1.0f32 + 2.0f32.powi(-20);
    for kind in [Kind::Bf16, Kind::F16] {
        convert(&model, kind, |file| {
            let norm = file.tensors.iter_mut().find(|t| t.name == "blk.2.ffn_norm.weight").unwrap();
            norm.bytes[..4].copy_from_slice(&odd.to_le_bytes());
        });
        quantize(&model, &["--scheme", "w8a8", "--force"]).expect(0);
        let out = model.root.path().join("from-gguf");
        let mut tensors = crate::runs::all_tensors(&out);
        let (dtype, _, bytes) = tensors.remove("model.layers.2.post_attention_layernorm.weight").unwrap();
        assert_eq!((dtype.as_str(), &bytes[..4]), ("F32", &odd.to_le_bytes()[..]));
        let other = &tensors["model.layers.1.post_attention_layernorm.weight"].0;
        assert_eq!(other, if kind == Kind::Bf16 { "BF16" } else { "F16" });
        let notes = read_json(&out.join("spark-convert.json"))["notes"].to_string();
        assert!(notes.contains("model.layers.2.post_attention_layernorm.weight: stays F32"), "{notes}");
    }
}
