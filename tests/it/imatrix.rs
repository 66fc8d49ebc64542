//! Importance matrices of llama.cpp: both forms are read, they decide the grids, and others are refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use serde_json::Value;
use sha2::{Digest, Sha256};
use xtask::fixtures::FixtureSpec;
use xtask::gguf::{Gguf, Tensor};

use crate::runs::{Model, Run, all_tensors, read_json};

const LAYERS: usize = 4;

/// Sums of squares of the inputs of every matrix, as llama.cpp names them.
type Sums = BTreeMap<String, Vec<f32>>;

/// The matrices of a layer by both names, with the rows of the inputs that they read.
const MATRICES: [(&str, &str); 5] = [
    ("attn_qkv", "self_attn.q_k_v_proj"),
    ("attn_output", "self_attn.out_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// As steep as those of a real model, where a few channels carry most.
fn sums(model: &Model, value: impl Fn(usize) -> f32) -> Sums {
    let tensors = all_tensors(&model.dir);
    let mut sums = Sums::new();
    for layer in 0..LAYERS {
        for (theirs, ours) in MATRICES {
            let shape = &tensors[&format!("model.layers.{layer}.{ours}.weight")].1;
            let columns = usize::try_from(shape[1].as_u64().unwrap()).unwrap();
            sums.insert(format!("blk.{layer}.{theirs}.weight"), (0..columns).map(&value).collect());
        }
    }
    sums
}

fn steep(column: usize) -> f32 {
    [900.0, 0.5, 30.0, 2.0, 0.0, 8.0, 0.1][column % 7] * 1e3
}

/// The form of today.
fn gguf(sums: &Sums) -> Vec<u8> {
    let mut file = Gguf::default();
    let mut add = |name: String, values: &[f32]| {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        file.tensors.push(Tensor { name, kind: 0, shape: vec![1, values.len() as u64], bytes });
    };
    for (name, values) in sums {
        add(format!("{name}.in_sum2"), values);
        add(format!("{name}.counts"), &[512.0]);
    }
    file.bytes()
}

/// The form before it: averages times the number of calls, then where they come from.
fn list(sums: &Sums) -> Vec<u8> {
    let number = |n: usize| i32::try_from(n).unwrap().to_le_bytes();
    let mut out = number(sums.len()).to_vec();
    for (name, values) in sums {
        out.extend(number(name.len()));
        out.extend(name.as_bytes());
        out.extend(number(4));
        out.extend(number(values.len()));
        out.extend(values.iter().flat_map(|v| (v / 512.0 * 4.0).to_le_bytes()));
    }
    out.extend(number(4));
    out.extend(number(7));
    out.extend(b"cal.txt");
    out
}

fn written(model: &Model, name: &str, bytes: &[u8]) -> PathBuf {
    let path = model.root.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn quantize(model: &Model, scheme: &str, imatrix: Option<&Path>, more: &[&str]) -> Run {
    let mut args = more.to_vec();
    if let Some(path) = imatrix {
        args.extend(["--imatrix", path.to_str().unwrap()]);
    }
    model.quantize_to(scheme, &args)
}

/// Decodes a module of the row-major layout by its rule, and sums the squared errors of its columns.
fn column_errors(model: &Model, module: &str) -> Vec<f64> {
    const GROUP: usize = 64;
    let (source, artifact) = (all_tensors(&model.dir), all_tensors(&model.out()));
    let floats = |tensor: &(String, Value, Vec<u8>)| -> Vec<f32> {
        tensor.2.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
    };
    let weights = floats(&source[&format!("{module}.weight")]);
    let [scales, zeros] = ["scale", "zero"].map(|part| floats(&artifact[&format!("{module}.weight_{part}")]));
    let (_, shape, packed) = &artifact[&format!("{module}.weight_packed")];
    let k = usize::try_from(shape[1].as_u64().unwrap()).unwrap() * 2;
    let mut errors = vec![0.0; k];
    for (i, w) in weights.iter().enumerate() {
        let code = packed[i / 2] >> (4 * (i % 2)) & 15;
        let decoded = (f32::from(code) - 8.0) * scales[i / GROUP] + zeros[i / GROUP];
        errors[i % k] += f64::from(w - decoded).powi(2);
    }
    errors
}

#[test]
fn importance_moves_the_error_to_columns_that_count_less_in_both_forms_of_the_file() {
    let model = Model::new(FixtureSpec::tiny());
    let options = ["--group-size", "64", "--layout", "row-major", "--force"];
    let modules = || (0..LAYERS).flat_map(|l| MATRICES.map(|(_, m)| format!("model.layers.{l}.{m}")));
    let total = |weigh: &dyn Fn(usize) -> f64| -> Vec<f64> {
        let sum = |m: String| column_errors(&model, &m).iter().enumerate().map(|(k, e)| e * weigh(k)).sum();
        modules().map(sum).collect()
    };
    let weighted = |k: usize| f64::from(steep(k));
    quantize(&model, "w4a16", None, &options).expect(0);
    let (plain, plain_unweighted) = (total(&weighted), total(&|_| 1.0));
    let without = all_tensors(&model.out());

    let path = written(&model, "imatrix.gguf", &gguf(&sums(&model, steep)));
    let run = quantize(&model, "w4a16", Some(&path), &options).expect(0);
    assert!(run.stderr.contains("lm_head: the importance matrix says nothing of it"), "{}", run.stderr);
    let (better, worse) = (total(&weighted), total(&|_| 1.0));
    for (i, module) in modules().enumerate() {
        assert!(better[i] < 0.95 * plain[i], "{module}: {} with, {} without", better[i], plain[i]);
        assert!(worse[i] > plain_unweighted[i], "{module}: the search alone is not the best unweighted one");
    }
    model.verify(&[]).expect(0);
    let digest: String =
        Sha256::digest(fs::read(&path).unwrap()).iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(read_json(&model.out().join("spark-convert.json"))["calibration_sha256"], digest);
    let with = all_tensors(&model.out());

    // The older form says the same in other words.
    let path = written(&model, "imatrix.dat", &list(&sums(&model, steep)));
    quantize(&model, "w4a16", Some(&path), &options).expect(0);
    assert!(all_tensors(&model.out()) == with, "the two forms made different weights");

    // Without --force it is what would be written, and with another matrix it is not.
    let again = ["--group-size", "64", "--layout", "row-major"];
    assert!(quantize(&model, "w4a16", Some(&path), &again).expect(0).stdout.contains("up to date"));
    assert!(quantize(&model, "w4a16", None, &again).expect(2).error().contains("another importance matrix"));

    // Where all columns count alike, nothing changes.
    let path = written(&model, "even.gguf", &gguf(&sums(&model, |_| 3.5)));
    quantize(&model, "w4a16", Some(&path), &options).expect(0);
    assert!(all_tensors(&model.out()) == without, "an even matrix is none");
}

#[test]
fn every_four_bit_scheme_takes_it_and_the_head_where_it_is_measured() {
    let model = Model::new(FixtureSpec::tiny());
    let mut sums = sums(&model, steep);
    sums.insert("output.weight".to_owned(), (0..sums["blk.0.attn_qkv.weight"].len()).map(steep).collect());
    let path = written(&model, "imatrix.gguf", &gguf(&sums));
    for options in [&["--group-size", "64"][..], &["--group-size", "32", "--asymmetric"]] {
        let options = [options, &["--force"]].concat();
        let run = quantize(&model, "w4a8", Some(&path), &options).expect(0);
        assert!(!run.stderr.contains("lm_head"), "{}", run.stderr);
        model.verify(&[]).expect(0);
    }
    let run = quantize(&model, "w4a8", Some(&path), &["--group-size", "64", "--head", "int8", "--force"]);
    assert!(run.expect(0).stderr.contains("lm_head: 8 bits have a scale per row"));
}

/// A budget is spent by it, too: what the modules lose is counted by columns.
#[test]
fn a_budget_goes_by_importance() {
    let model = Model::new(FixtureSpec::tiny());
    let path = written(&model, "imatrix.gguf", &gguf(&sums(&model, steep)));
    let target = |n: &str| -> Value {
        let options = ["--asymmetric", "--target-bytes", n, "--force"];
        let lost = |imatrix| {
            quantize(&model, "w4a8", imatrix, &options).expect(0);
            read_json(&model.out().join("spark-convert.json"))["allocation"].clone()
        };
        let (with, without) = (lost(Some(path.as_path())), lost(None));
        assert_eq!(without.get("inputs_sha256"), None);
        assert!(with["error_before"] != without["error_before"], "{with}");
        with
    };
    let refused = quantize(&model, "w4a8", None, &["--asymmetric", "--target-bytes", "1"]).expect(2);
    let words: Vec<&str> = refused.error().split(' ').collect();
    let smallest = words[words.iter().position(|word| *word == "bytes").unwrap() - 1];
    let digest: String =
        Sha256::digest(fs::read(&path).unwrap()).iter().map(|b| format!("{b:02x}")).collect();
    let more = (smallest.parse::<u64>().unwrap() * 5 / 4).to_string();
    assert_eq!(target(&more)["inputs_sha256"], digest);
    quantize(&model, "w4a8", Some(&path), &["--asymmetric", "--target-bytes", &more, "--force"]).expect(0);
    model.verify(&[]).expect(0);
    let both = ["--target-bytes", more.as_str(), "--calib-tokens", "100"];
    assert!(quantize(&model, "w4a8", Some(&path), &both).expect(2).error().contains("--imatrix"));
}

#[test]
fn what_has_no_effect_and_what_is_of_another_model_is_refused() {
    let model = Model::new(FixtureSpec::tiny());
    let path = written(&model, "imatrix.gguf", &gguf(&sums(&model, steep)));
    for (scheme, more, word) in [
        ("w8a8", &[][..], "w8a8"),
        ("w4a8", &["--method", "rtn"], "--method rtn"),
        ("w4a8", &["--method", "gptq"], "--method gptq"),
    ] {
        let run = quantize(&model, scheme, Some(&path), more).expect(2);
        assert!(run.error().contains("--imatrix") && run.error().contains(word), "{}", run.error());
    }
    let refused = |bytes: &[u8], words: &[&str]| {
        let path = written(&model, "bad.gguf", bytes);
        let run = quantize(&model, "w4a8", Some(&path), &["--group-size", "64"]).expect(3);
        assert!(words.iter().all(|w| run.error().contains(w)), "{words:?} in {}", run.error());
        assert!(!model.out().exists());
    };
    let edited = |edit: &dyn Fn(&mut Sums)| {
        let mut sums = sums(&model, steep);
        edit(&mut sums);
        sums
    };
    const UP: &str = "blk.2.ffn_up.weight";
    type Edit<'a> = &'a dyn Fn(&mut Sums);
    let bad: [(Edit<'_>, &[&str]); 4] = [
        (&|s| drop(s.remove(UP)), &[UP, "nothing of this one", "llama-imatrix"]),
        (&|s| s.get_mut(UP).unwrap().truncate(1), &[UP, "made of another model"]),
        (&|s| s.get_mut(UP).unwrap()[3] = f32::NAN, &[UP, "NaN in column 3"]),
        (&|s| s.get_mut(UP).unwrap()[5] = -1.0, &[UP, "in column 5"]),
    ];
    for (edit, words) in bad {
        refused(&gguf(&edited(edit)), words);
        refused(&list(&edited(edit)), words);
    }
    let whole = list(&sums(&model, steep));
    refused(&whole[..whole.len() / 2], &["bad.gguf", "end within an entry"]);
    refused(b"not a matrix at all", &["bad.gguf", "an importance matrix of llama-imatrix"]);
    refused(&Gguf::of_checkpoint(&model.dir, xtask::gguf::Kind::F32).unwrap().bytes(), &[".in_sum2"]);
    let missing =
        quantize(&model, "w4a8", Some(Path::new("nowhere.gguf")), &["--group-size", "64"]).expect(3);
    assert!(missing.error().contains("no such file"));
    // Zeros say nothing, and are told.
    let zeros = written(&model, "zeros.gguf", &gguf(&edited(&|s| s.get_mut(UP).unwrap().fill(0.0))));
    let run = quantize(&model, "w4a8", Some(&zeros), &["--group-size", "64"]).expect(0);
    assert!(run.stderr.contains(UP) && run.stderr.contains("count alike"), "{}", run.stderr);
}
