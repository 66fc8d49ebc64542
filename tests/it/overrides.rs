//! Modules in another width than the rest: stored, said in the configuration, verified, and refused where the
//! consumer could not load them.

use serde_json::{Value, json};
use xtask::fixtures::FixtureSpec;

use crate::runs::{Model, all_tensors, read_json};

const BASE: [&str; 3] = ["--asymmetric", "--group-size", "64"];

fn snr_db(model: &Model) -> f64 {
    let bars = ["--json", "--min-snr-db", "0", "--max-kld", "99", "--min-greedy", "0"];
    let json: Value = serde_json::from_str(&model.verify_scenario("code", &bars).expect(0).stdout).unwrap();
    let gates = json["artifacts"][0]["gates"].as_array().unwrap();
    gates.iter().find(|gate| gate["name"] == "snr_db").unwrap()["measured"].as_f64().unwrap()
}

#[test]
fn overridden_modules_are_stored_and_described_as_asked() {
    let model = Model::new(FixtureSpec::tiny());
    model.quantize_to("w4a8", &[&BASE[..], &["--head", "int8"]].concat()).expect(0);
    let (plain, plain_tensors) = (snr_db(&model), all_tensors(&model.out()));
    let overrides =
        ["--override", "*=int8", "--override", "model.layers.1.*=bf16", "--override", "*.2.*down_proj=bf16"];
    let more = [&BASE[..], &["--head", "int8", "--force"], &overrides].concat();
    let plan = model.quantize_to("w4a8", &[&more[..], &["--dry-run", "--json"]].concat()).expect(0).json();
    model.quantize_to("w4a8", &more).expect(0);
    let tensors = all_tensors(&model.out());
    let dtype = |name: &str| tensors.get(name).map(|t| t.0.as_str());
    assert_eq!(dtype("model.layers.0.mlp.down_proj.weight"), Some("I8"));
    assert_eq!(dtype("model.layers.0.mlp.down_proj.weight_scale"), Some("F32"));
    assert_eq!(dtype("model.layers.1.self_attn.q_k_v_proj.weight"), Some("BF16"));
    assert_eq!(dtype("model.layers.2.mlp.down_proj.weight"), Some("BF16"));
    assert_eq!(dtype("model.layers.2.mlp.up_proj.weight"), Some("I8"));
    assert!(tensors.keys().all(|name| !name.ends_with("weight_packed")), "every 4-bit module is overridden");
    let planned: Vec<&str> =
        plan["tensors"].as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
    assert!(planned.len() == tensors.len() && planned.iter().all(|name| tensors.contains_key(*name)));
    assert_eq!(plan["options"]["overrides"]["model.layers.2.mlp.down_proj"], "bf16");
    assert_eq!(plan["options"]["overrides"]["model.layers.2.mlp.up_proj"], "int8");

    let block = read_json(&model.out().join("config.json"))["quantization_config"].clone();
    assert_eq!(block["format"], "mixed-precision");
    let targets = block["config_groups"]["group_1"]["targets"].as_array().unwrap();
    assert!(targets.contains(&json!(r"re:.*layers\.(0|3)\.mlp\.down_proj$")), "{targets:?}");
    assert!(targets.contains(&json!(r"re:.*layers\.(0|2|3)\.mlp\.up_proj$")), "{targets:?}");
    let ignored = block["ignore"].as_array().unwrap();
    assert!(ignored.contains(&json!(r"re:.*layers\.(1|2)\.mlp\.down_proj$")), "{ignored:?}");

    // Read back from disk, judged, and run: more bits, nearer to the source.
    model.verify(&[]).expect(0);
    let mixed = snr_db(&model);
    assert!(mixed > plain + 6.0, "{mixed:.1} dB with wider modules, {plain:.1} dB without");
    assert!(tensors != plain_tensors);
    assert!(
        model
            .quantize_to("w4a8", &[&more[..2], &["64", "--head", "int8"]].concat())
            .expect(2)
            .error()
            .contains("it is w4a8 with")
    );
}

/// Calibrated codes go by the module's own width.
#[test]
fn gptq_solves_overridden_modules_in_their_width() {
    let model = Model::new(FixtureSpec::tiny());
    let texts = model.root.path().join("texts.txt");
    std::fs::write(&texts, "The cursor is at the end of the line, and the line is at the end. ".repeat(8))
        .unwrap();
    let more = ["--method", "gptq", "--calib", texts.to_str().unwrap(), "--override", "*out_proj=int8"];
    model.quantize_to("w4a8", &[&BASE[..], &more].concat()).expect(0);
    assert_eq!(all_tensors(&model.out())["model.layers.3.self_attn.out_proj.weight"].0, "I8");
    model.verify(&[]).expect(0);
}

#[test]
fn what_no_loader_takes_is_refused() {
    let model = Model::tiny();
    for (scheme, more, words) in [
        ("w4a8", &["--override", "*lm_head=int8"][..], &["*lm_head=int8", "--head"][..]),
        (
            "w4a8",
            &["--override", "*down_proj=int3"],
            &["expected PATTERN=int8, PATTERN=bf16 or a group size"],
        ),
        ("w4a8", &["--override", "*down_proj"], &["expected PATTERN=int8, PATTERN=bf16 or a group size"]),
        ("w4a8", &["--override", "*gate_proj=int8"], &["gate_proj", "up_proj", "one module to vLLM"]),
        ("w4a8", &["--override", "*=int8", "--packing", "gptq"], &["--packing gptq", "--override"]),
        ("w4a8", &["--override", "*=int8", "--qkv", "split"], &["--qkv"]),
        ("w8a8", &["--override", "*=bf16"], &["--override", "w8a8"]),
        ("w4a16", &["--override", "*=bf16"], &["--override", "w4a16"]),
    ] {
        let run = model.quantize_to(scheme, more).expect(2);
        assert!(words.iter().all(|w| run.error().contains(w)), "{more:?}: {}", run.error());
    }
    // A manifest whose widths are not those of the tensors.
    let model = Model::new(FixtureSpec::tiny());
    model.quantize_to("w4a8", &[&BASE[..], &["--override", "*down_proj=int8"]].concat()).expect(0);
    let manifest = model.out().join("spark-convert.json");
    crate::runs::edit_json(&manifest, |m| drop(m["options"].as_object_mut().unwrap().remove("overrides")));
    crate::tamper::repair_hashes(&model.out());
    let run = model.verify(&[]).expect(1);
    assert!(run.stdout.contains("down_proj"), "{}", run.stdout);
}
