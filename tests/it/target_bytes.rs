//! `quantize --target-bytes`: the bytes are kept, what is lost is counted right, more bytes lose less, and what is
//! decided elsewhere stays.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use xtask::fixtures::FixtureSpec;

use crate::export_npu_run::with_texts;
use crate::runs::{Model, Run, Tensors, all_tensors, read_json, run, shards, tree};

/// The preset has rows of 192, which groups of 128 do not divide: its smallest build is in groups of 64.
fn model() -> Model {
    Model::new(FixtureSpec::tiny())
}

fn quantize(model: &Model, target: u64, more: &[&str]) -> Run {
    let target = target.to_string();
    model.quantize_to("w4a8", &[&["--asymmetric", "--target-bytes", &target, "--force"], more].concat())
}

/// The number before `bytes` in a refusal.
fn told(run: &Run) -> u64 {
    let (before, _) =
        run.error().split_once(" bytes per token").or(run.error().split_once(" bytes;")).unwrap();
    before.rsplit(' ').next().unwrap().parse().unwrap()
}

/// The smallest and the largest budget.
fn limits(model: &Model, more: &[&str]) -> (u64, u64) {
    (told(&quantize(model, 1, more).expect(2)), told(&quantize(model, 1 << 40, more).expect(2)))
}

/// Bytes that a token reads of what is on disk: all, but of the embedding beside a head of its own one row.
fn read_per_token(dir: &Path) -> u64 {
    let tensors = all_tensors(dir);
    let untied = tensors.keys().any(|name| name.starts_with("lm_head."));
    let read = |(name, (_, shape, bytes)): (&String, &(String, Value, Vec<u8>))| {
        let rows = if untied && name == "model.embedding.weight" { shape[0].as_u64().unwrap() } else { 1 };
        bytes.len() as u64 / rows
    };
    tensors.iter().map(read).sum()
}

fn allocation(dir: &Path) -> Value {
    read_json(&dir.join("spark-convert.json"))["allocation"].clone()
}

/// Widths by module, as chosen.
fn widths(allocation: &Value) -> BTreeMap<String, String> {
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    let of = |m: &Value| {
        let width = text(&m["width"]);
        m["modules"].as_array().unwrap().iter().map(|name| (text(name), width.clone())).collect::<Vec<_>>()
    };
    allocation["modules"].as_array().unwrap().iter().flat_map(of).collect()
}

/// What a module is stored in, by its tensors.
fn stored(tensors: &BTreeMap<String, (String, Value, Vec<u8>)>, module: &str) -> String {
    let tied_head = if module == "lm_head" { "model.embedding.weight" } else { "" };
    let plain = tensors.get(&format!("{module}.weight")).or(tensors.get(tied_head));
    match (tensors.get(&format!("{module}.weight_packed")), plain) {
        (Some((_, packed, _)), _) => {
            let groups = &tensors[&format!("{module}.weight_scale")].1[1];
            format!("g{}", packed[1].as_u64().unwrap() * 8 / groups.as_u64().unwrap())
        }
        (None, Some((dtype, ..))) if dtype == "I8" => "int8".to_owned(),
        (None, Some((dtype, ..))) => dtype.to_lowercase(),
        (None, None) => panic!("nothing of {module}"),
    }
}

#[test]
fn bytes_on_disk_stay_within_the_budget_in_the_widths_that_are_told() {
    let model = model();
    let (smallest, largest) = limits(&model, &["--method", "rtn"]);
    let mut seen = std::collections::BTreeSet::new();
    let mut error = f64::INFINITY;
    for eighths in 0..=8 {
        let target = smallest + (largest - 1 - smallest) * eighths / 8;
        let shown = quantize(&model, target, &["--method", "rtn", "--dry-run", "--json"]).expect(0).json();
        let written = quantize(&model, target, &["--method", "rtn", "--json"]).expect(0).json();
        let (read, tensors) = (read_per_token(&model.out()), all_tensors(&model.out()));
        assert!(read <= target, "{read} bytes, {target} allowed");
        let allocation = allocation(&model.out());
        assert_eq!(allocation["bytes_per_token"], read);
        assert_eq!(allocation["target_bytes"], target);
        assert_eq!(written["bytes_per_token"], read);
        assert_eq!((&written["allocation"], &shown["allocation"]), (&allocation, &allocation));
        for (module, width) in widths(&allocation) {
            assert_eq!(stored(&tensors, &module), width, "{module}");
            seen.insert(width);
        }
        // The bytes that are told of the modules, and everything else: what no width changes.
        let modules = allocation["modules"].as_array().unwrap();
        let told: u64 = modules.iter().map(|m| m["bytes"].as_u64().unwrap()).sum();
        let others = tensors.iter().filter(|(name, _)| name.contains("norm") || name.contains("g_proj"));
        let others: u64 = others.map(|(_, t)| t.2.len() as u64).sum();
        let row = read_json(&model.file("config.json"))["hidden_size"].as_u64().unwrap() * 2;
        assert_eq!(told + others + row, read, "an embedding row is read in any case");
        // Neither bytes nor errors go down and up.
        let now = allocation["error"].as_f64().unwrap();
        assert!(now <= error, "{target}: {now} after {error}");
        error = now;
        model.verify(&[]).expect(0);
    }
    assert!(error < 1e-3, "all but something small is bf16 in the end: {error}");
    let all: Vec<&str> = seen.iter().map(String::as_str).collect();
    assert_eq!(all, ["bf16", "g32", "g64", "int8"]);
    // One byte less, and bytes for all.
    let low = quantize(&model, smallest - 1, &["--method", "rtn"]).expect(2);
    assert!(low.error().contains("--target-bytes") && told(&low) == smallest);
    let high = quantize(&model, largest, &["--method", "rtn"]).expect(2);
    assert!(high.error().contains("has no effect") && told(&high) == largest);
}

/// The smallest build is the plain one, and what its modules lose is the noise of the bytes on disk (as `verify`
/// measures it) times what the module is to the model: after the embedding, the attention of layer 0 is a half, its MLP
/// a third, and so on; the head counts whole.
#[test]
fn errors_are_those_of_the_stored_bytes() {
    let model = model();
    let (smallest, _) = limits(&model, &[]);
    quantize(&model, smallest, &[]).expect(0);
    let (ours, told) = (all_tensors(&model.out()), allocation(&model.out()));
    let report: Value = serde_json::from_str(&model.verify(&["--json"]).expect(0).stdout).unwrap();
    let snr: BTreeMap<String, f64> = report["artifacts"][0]["modules"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|m| Some((m["module"].as_str()?.to_owned(), m["snr_db"].as_f64()?)))
        .collect();
    let mut sum = 0.0;
    for entry in told["modules"].as_array().unwrap() {
        let mut expected = 0.0;
        for name in entry["modules"].as_array().unwrap() {
            let name = name.as_str().unwrap();
            let layer = name.split('.').nth(2).and_then(|l| l.parse::<f64>().ok());
            let share = match layer {
                None => 1.0,
                Some(layer) if name.contains("self_attn") => 1.0 / (2.0 + 2.0 * layer),
                Some(layer) => 1.0 / (3.0 + 2.0 * layer),
            };
            expected += share * 10f64.powf(-snr[name] / 10.0);
        }
        let found = entry["error"].as_f64().unwrap();
        assert!((found / expected - 1.0).abs() < 1e-4, "{entry}: expected {expected}");
        assert_eq!(entry["error"], entry["error_before"]);
        sum += found;
    }
    assert!((told["error"].as_f64().unwrap() / sum - 1.0).abs() < 1e-4);
    let order: Vec<f64> =
        told["modules"].as_array().unwrap().iter().map(|m| m["error_before"].as_f64().unwrap()).collect();
    assert!(order.is_sorted_by(|a, b| a >= b), "{order:?}");
    model.quantize_to("w4a8", &["--asymmetric", "--group-size", "64", "--force"]).expect(0);
    assert!(all_tensors(&model.out()) == ours, "the plain build is the smallest");
}

/// On the bundled checkpoint, where figures mean something.
#[test]
fn with_more_bytes_the_model_diverges_less() {
    let root = tempfile::TempDir::new().unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/spark-tiny");
    let fixture = fixture.to_str().unwrap();
    let targets = ["4.5MB", "5.5MB", "8MiB"];
    let mut args = vec!["verify"];
    for target in targets {
        let quantize = ["quantize", fixture, "--scheme", "w4a8", "--asymmetric", "--method", "rtn"];
        run(root.path(), [&quantize[..], &["--target-bytes", target, "--out", target]].concat()).expect(0);
        args.push(target);
    }
    args.extend([
        "--reference",
        fixture,
        "--scenario",
        "code",
        "--json",
        "--max-kld",
        "9",
        "--min-greedy",
        "0",
    ]);
    let report = run(root.path(), args).expect(0).json();
    let artifacts = report["artifacts"].as_array().unwrap();
    let kl: Vec<f64> =
        artifacts.iter().map(|a| a["behaviour"]["total"]["kl"]["mean"].as_f64().unwrap()).collect();
    assert!(kl.len() == 3 && kl.is_sorted_by(|a, b| a > b), "{kl:?}");
    assert!(kl[2] < 0.2 * kl[0], "{kl:?}");
}

#[test]
fn the_same_is_written_by_any_number_of_threads_and_is_up_to_date() {
    let model = model();
    let words =
        |i: u32| (0..120u32).map(|j| format!("word{} ", (i * 7919 + j * j * 31) % 977)).collect::<String>();
    fs::write(model.root.path().join("texts.txt"), (0..1).map(words).collect::<String>()).unwrap();
    let (smallest, largest) = limits(&model, &[]);
    let target = (3 * smallest + largest) / 4;
    for more in [&["--calib", "texts.txt"][..], &["--calib", "texts.txt", "--method", "gptq"], &[]] {
        quantize(&model, target, &[more, &["--threads", "1"]].concat()).expect(0);
        let one = tree(&model.out());
        model.verify(&[]).expect(0);
        assert_eq!(allocation(&model.out())["inputs_sha256"].is_string(), !more.is_empty());
        let target = target.to_string();
        let again = [&["--asymmetric", "--target-bytes", &target], more].concat();
        assert!(model.quantize_to("w4a8", &again).expect(0).stdout.contains("up to date"));
        fs::remove_dir_all(model.out()).unwrap();
        model.quantize_to("w4a8", &[&again[..], &["--threads", "2"]].concat()).expect(0);
        assert!(tree(&model.out()) == one, "{more:?}");
    }
    // What is there was made without texts, for this budget.
    let other = |target: u64, more: &[&str]| {
        let target = target.to_string();
        model.quantize_to("w4a8", &[&["--asymmetric", "--target-bytes", &target], more].concat()).expect(2)
    };
    assert!(other(target + 1, &[]).error().contains(&format!("--target-bytes {target}")));
    other(target, &["--calib", "texts.txt"]).error();
    other(target + (largest - target) / 2, &[]).error();
}

#[test]
fn what_other_options_decide_stays() {
    let model = model();
    let fixed = ["--override", "*.1.*=bf16", "--override", "*.2.*out_proj=g64", "--head", "int8"];
    let (smallest, largest) = limits(&model, &fixed);
    let run = quantize(&model, (smallest + largest) / 2, &fixed).expect(0);
    assert!(run.stdout.contains("lost before") && run.stdout.contains("bytes read per token, of"));
    let told = allocation(&model.out());
    for (module, width) in widths(&told) {
        let expected = match module.as_str() {
            "lm_head" => "int8",
            "model.layers.2.self_attn.out_proj" => "g64",
            module if module.starts_with("model.layers.1.") => "bf16",
            _ => continue,
        };
        assert_eq!(width, expected, "{module}");
    }
    let fixed = told["modules"].as_array().unwrap().iter().filter(|m| m["fixed"] == true).count();
    assert_eq!(fixed, 4 + 1 + 1, "of layer 1 gate and up are one");
    model.verify(&[]).expect(0);
    // A group size that was asked for is the only one.
    let groups = ["--group-size", "32"];
    let (smallest, largest) = limits(&model, &groups);
    quantize(&model, (smallest + largest) / 2, &groups).expect(0);
    assert!(!widths(&allocation(&model.out())).values().any(|width| width == "g64"));
    // In every group size there is a linear, each described where its tensors are looked for.
    let (smallest, largest) = limits(&model, &[]);
    quantize(&model, (7 * smallest + largest) / 8, &[]).expect(0);
    let widths = widths(&allocation(&model.out()));
    let block = read_json(&model.out().join("config.json"))["quantization_config"].clone();
    let groups = block["config_groups"].as_object().unwrap();
    let finer = groups.values().find(|g| g["weights"]["group_size"] == 32).unwrap();
    assert_eq!(groups["group_0"]["weights"]["group_size"], 64);
    assert_eq!(groups["group_0"]["targets"][0], json!("Linear"));
    let named = |module: &str| {
        let (layer, path) = module.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
        finer["targets"].as_array().unwrap().iter().any(|t| {
            let (layers, end) =
                t.as_str().unwrap().strip_prefix(r"re:.*layers\.(").unwrap().split_once(')').unwrap();
            let kind = path.rsplit_once('.').unwrap().1.split('_').next().unwrap();
            layers.split('|').any(|l| l == layer) && end.contains(kind)
        })
    };
    let (mut inside, mut outside) = (0, 0);
    for (module, width) in widths.iter().filter(|(module, _)| *module != "lm_head") {
        assert_eq!(named(module), width == "g32", "{module} {width}: {finer}");
        *(if width == "g32" { &mut inside } else { &mut outside }) += 1;
    }
    assert!(inside > 0 && outside > 0);
}

/// Where all rows of the head are equal its logits are, too, and no error of theirs is any part of them: what is told
/// stays a number all the same.
#[test]
fn a_head_that_says_nothing_makes_no_infinite_error() {
    let model = with_texts(FixtureSpec::tiny());
    for shard in shards(&model.dir) {
        let mut tensors = Tensors::read(&shard);
        let Some(table) = tensors.get("model.embedding.weight") else { continue };
        let row = table[..table.len() / 448].to_vec();
        table.chunks_exact_mut(row.len()).for_each(|other| other.copy_from_slice(&row));
        tensors.write(&shard);
    }
    let (smallest, largest) = limits(&model, &[]);
    quantize(&model, (smallest + largest) / 2, &["--calib", "texts.jsonl"]).expect(0);
    let told = allocation(&model.out());
    for error in [&told["error"], &told["error_before"]] {
        assert!(error.as_f64().is_some_and(|e| (0.0..1e3).contains(&e)), "{told}");
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let model = Model::tiny();
    for (scheme, more, words) in [
        ("w8a8", &["--target-bytes", "1MB"][..], &["--target-bytes", "w8a8", "one width"][..]),
        ("w4a16", &["--target-bytes", "1MB"], &["--target-bytes", "w4a16", "one width"]),
        ("w4a8", &["--target-bytes", "1MB", "--packing", "gptq"], &["--packing gptq", "--target-bytes"]),
        ("w4a8", &["--target-bytes", "1MB", "--qkv", "split"], &["--qkv"]),
        (
            "w4a8",
            &["--target-bytes", "1MB", "--override", "*gate_proj=int8"],
            &["up_proj", "one module to vLLM"],
        ),
        (
            "w4a8",
            &["--target-bytes", "1MB", "--override", "*=int8", "--head", "int8"],
            &["other options decide every module"],
        ),
        ("w4a8", &["--override", "*=g64", "--group-size", "64"], &["--override", "groups of 64 anyhow"]),
        ("w4a8", &["--calib", "texts"], &["--calib", "--target-bytes"]),
    ] {
        let run = model.quantize_to(scheme, more).expect(2);
        assert!(words.iter().all(|w| run.error().contains(w)), "{more:?}: {}", run.error());
    }
    let malformed = model.quantize_to("w4a8", &["--target-bytes", "12 apples"]).expect(2);
    assert!(
        malformed.stderr.contains("--target-bytes") && malformed.stderr.contains("12MB"),
        "{}",
        malformed.stderr
    );
    assert!(!model.out().exists());
}
