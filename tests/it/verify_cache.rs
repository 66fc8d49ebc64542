//! `verify --cache`: the report is the same whether the checkpoint runs or is remembered, and what is wrong
//! with an entry is told.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde_json::Value;
use spark_convert::checkpoint::Checkpoint;
use spark_convert::error::Failure;
use spark_convert::interrupt::Interrupt;
use spark_convert::opened::checkpoint_model;
use spark_convert::runtime::Rounding;
use spark_convert::scenario::Prompt;
use spark_convert::verify::{Cache, Passes, source_hashes};

use crate::runs::{Model, Run, edit_json, run};

const SCENARIOS: [&str; 6] = ["--scenario", "window+1", "--scenario", "short", "--scenario", "code"];
const SHORTEST: [&str; 4] = ["--scenario", "window+1", "--scenario", "window"];

fn artifact() -> Model {
    let model = Model::tiny();
    model.quantize_to("w4a8", &["--group-size", "32"]).expect(0);
    model
}

fn verify(model: &Model, more: &[&str]) -> Run {
    let args = ["verify", "out", "--reference", "model", "--min-greedy", "0", "--min-snr-db", "0"];
    run(model.root.path(), args.iter().chain(&["--max-kld", "9"]).chain(more))
}

fn cached(model: &Model, scenarios: &[&str], more: &[&str]) -> Run {
    verify(model, &[scenarios, &["--cache", "seen", "--json"], more].concat()).expect(0)
}

/// A report without what the clock decides.
fn untimed(run: &Run) -> Value {
    let mut json = run.json();
    for verdict in json["artifacts"].as_array_mut().unwrap() {
        verdict["behaviour"]["seconds"] = Value::Null;
    }
    for contestant in json["comparison"].as_array_mut().unwrap() {
        contestant["seconds"] = Value::Null;
    }
    json
}

/// Entries of the cache, in a fixed order.
fn entries(model: &Model) -> Vec<PathBuf> {
    let dir = model.root.path().join("seen");
    let mut found: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    found.retain(|p| p.extension().is_some_and(|e| e == "f32"));
    found.sort();
    found
}

/// What stands on stderr about the cache: prompts known, prompts run.
#[track_caller]
fn tally(run: &Run) -> (u32, u32) {
    let line = run.stderr.lines().find(|l| l.contains("prompts known")).expect(&run.stderr);
    let number =
        |before: &str| line.split(before).next().unwrap().split(' ').next_back().unwrap().parse().unwrap();
    (number(" prompts known"), number(" run through the checkpoint"))
}

#[test]
fn a_run_that_remembers_prints_the_same_report() {
    let model = artifact();
    let plain = untimed(&verify(&model, &[&SCENARIOS[..], &["--json"]].concat()).expect(0));
    let prompts: usize = plain["artifacts"][0]["behaviour"]["scenarios"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s["prompts"].as_array().unwrap().len())
        .sum();
    let prompts = u32::try_from(prompts).unwrap();
    let first = cached(&model, &SCENARIOS, &["--threads", "1"]);
    assert_eq!(tally(&first), (0, prompts));
    let written: Vec<_> = entries(&model).iter().map(|p| fs::read(p).unwrap()).collect();
    // And one for the layers alone.
    assert_eq!(written.len(), prompts as usize + 1);
    let second = cached(&model, &SCENARIOS, &[]);
    assert_eq!(tally(&second), (prompts, 0));
    assert_eq!(untimed(&first), plain);
    assert_eq!(untimed(&second), plain);
    let left: Vec<_> = entries(&model).iter().map(|p| fs::read(p).unwrap()).collect();
    assert!(left == written, "a run that finds everything changes nothing");

    // Of other scenarios only what is new is run.
    let more = verify(&model, &["--scenario", "code", "--scenario", "window", "--cache", "seen"]).expect(0);
    assert_eq!(tally(&more), (1, 1));
    // Another checkpoint has entries of its own.
    edit_json(&model.file("config.json"), |c| c["rms_norm_eps"] = 1e-5.into());
    model.quantize_to("w4a8", &["--group-size", "32", "--force"]).expect(0);
    assert_eq!(tally(&cached(&model, &SCENARIOS, &[])), (0, prompts));
}

#[test]
fn what_is_wrong_with_an_entry_is_told_and_made_again() {
    let model = artifact();
    let right = untimed(&cached(&model, &SHORTEST, &[]));
    let paths = entries(&model);
    let whole: Vec<_> = paths.iter().map(|p| fs::read(p).unwrap()).collect();
    let spoilt = |edit: &dyn Fn(usize, &[u8]) -> Vec<u8>, word: &str| {
        for (i, (path, bytes)) in paths.iter().zip(&whole).enumerate() {
            fs::write(path, edit(i, bytes)).unwrap();
        }
        let run = cached(&model, &SHORTEST, &[]);
        let told = run.stderr.lines().filter(|l| l.contains("run again")).collect::<Vec<_>>();
        assert_eq!(told.len(), paths.len(), "{word}: {}", run.stderr);
        assert!(told.iter().all(|line| line.contains(word)), "{word}: {}", run.stderr);
        assert_eq!(untimed(&run), right, "{word}");
        for (path, bytes) in paths.iter().zip(&whole) {
            assert!(fs::read(path).unwrap() == *bytes, "{word}: {} was not mended", path.display());
        }
    };
    let flip = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 1;
        bytes
    };
    spoilt(&|_, b| flip(b, b.len() / 2), "bytes were changed");
    spoilt(&|_, b| flip(b, b.len() - 1), "bytes were changed");
    spoilt(&|_, b| flip(b, 0), "no entry of this form");
    // The form of a later version.
    spoilt(&|_, b| flip(b, 30), "no entry of this form");
    spoilt(&|_, b| flip(b, 40), "another run");
    spoilt(&|i, _| whole[(i + 1) % whole.len()].clone(), "another run");
    // A count of tokens that nothing could hold.
    spoilt(&|_, b| flip(b, 96 + 7), "tokens");
    spoilt(&|_, b| b[..b.len() - 4].to_vec(), "bytes, found");
    spoilt(&|_, b| [b, &[0; 4][..]].concat(), "bytes, found");
    spoilt(&|_, b| b[..100].to_vec(), "cut short");
    spoilt(&|_, _| Vec::new(), "cut short");
}

#[test]
fn what_is_no_cache_is_refused_and_left_alone() {
    let model = artifact();
    let root = model.root.path();
    fs::create_dir(root.join("papers")).unwrap();
    fs::write(root.join("papers/thesis.txt"), "x").unwrap();
    fs::create_dir(root.join("theirs")).unwrap();
    fs::write(root.join("theirs/CACHEDIR.TAG"), "Signature: 8a477f597d28d172789f06886806bc55\n").unwrap();
    for (args, word) in [
        (&["--cache", "papers"][..], "no CACHEDIR.TAG"),
        (&["--cache", "theirs"], "another program's"),
        (&["--cache", "papers/thesis.txt"], "a file"),
        (&["--cache", "model"], "no CACHEDIR.TAG"),
        (&["--cache", ".."], "expected a directory that --cache has made"),
        (&["--cache", "new", "--report", "./new"], "--report"),
        (&["--cache", "new/seen", "--report", "new"], "--report"),
        (&["--cache", "new", "--scenario", "none"], "no effect"),
    ] {
        let refused = verify(&model, args).expect(2);
        assert!(refused.error().contains(word), "{args:?}: {}", refused.error());
    }
    assert!(!root.join("new").exists());
    assert_eq!(fs::read_dir(root.join("papers")).unwrap().count(), 1);
    assert_eq!(fs::read_dir(root.join("theirs")).unwrap().count(), 1);
    // An empty directory becomes one, and one that cannot be written is an error of its own.
    fs::create_dir(root.join("empty")).unwrap();
    verify(&model, &["--scenario", "window", "--cache", "empty"]).expect(0);
    assert!(root.join("empty/CACHEDIR.TAG").is_file());
    let entry = fs::read_dir(root.join("empty")).unwrap().map(|e| e.unwrap().path());
    let entry = entry.filter(|p| p.extension().is_some_and(|e| e == "f32")).min().unwrap();
    fs::remove_file(&entry).unwrap();
    fs::create_dir(&entry).unwrap();
    let stuck = verify(&model, &["--scenario", "window", "--cache", "empty"]).expect(4);
    assert!(stuck.error().contains("cannot write"), "{}", stuck.error());
}

/// Everything that decides an entry is in its name.
#[test]
fn entries_are_told_apart_by_all_that_decides_them() {
    let model = Model::tiny();
    let checkpoint = Checkpoint::open(&model.dir).unwrap();
    let build = |rounding| checkpoint_model(&checkpoint, rounding).unwrap();
    let (exact, floor) = (build(Rounding::None), build(Rounding::Bf16));
    let hashes = source_hashes(&checkpoint).unwrap();
    let path = model.root.path().join("cache");
    let interrupt = Interrupt::default();
    let prompt = Prompt::of_tokens(&[3, 17, 42], 4);
    let open = |hashes: &BTreeMap<_, _>, stop: &[u32], model, floor| {
        Cache::open(&path, hashes, stop, model, floor).unwrap()
    };
    let known = |cache: &Cache, prompt: &Prompt| {
        let run = || -> Result<Passes, Failure> { Err(Failure::usage("not known")) };
        cache.passes(prompt, run).ok()
    };
    let cache = open(&hashes, &[1], &exact, &floor);
    let made = cache.passes(&prompt, || Passes::run(&prompt, &exact, &floor, &[1], &interrupt)).unwrap();
    assert_eq!(known(&cache, &prompt), Some(made.clone()));
    for other in [Prompt::of_tokens(&[3, 17, 43], 4), Prompt::of_tokens(&[3, 17, 42], 5)] {
        assert_eq!(known(&cache, &other), None);
    }
    // What it is called, or whether it is a chat, does not matter.
    let renamed = Prompt { name: "x".into(), thinking: Some(true), ..prompt.clone() };
    assert_eq!(known(&cache, &renamed), Some(made.clone()));
    assert!(Cache::open(&path, &hashes, &[1], &exact, &floor).is_err(), "two runs at a time");
    drop(cache);
    let mut others = hashes.clone();
    others.values_mut().next().unwrap().replace_range(..1, "x");
    for cache in [
        (&others, &[1][..], &exact, &floor),
        (&hashes, &[1, 2][..], &exact, &floor),
        // Arithmetic that differs while all names and hashes are equal.
        (&hashes, &[1][..], &floor, &floor),
        (&hashes, &[1][..], &exact, &exact),
    ] {
        assert_eq!(known(&open(cache.0, cache.1, cache.2, cache.3), &prompt), None);
    }
    assert_eq!(known(&open(&hashes, &[1], &exact, &floor), &prompt), Some(made));
}
