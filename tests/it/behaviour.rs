//! What models say: `generate`, and the scenarios of `verify`.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use spark_convert::interrupt::Interrupt;
use spark_convert::metrics::{Comparison, Position};
use spark_convert::opened::{Opened, checkpoint_model};
use spark_convert::runtime::{Rounding, State};
use spark_convert::scenario::Prompt;
use spark_convert::verify::{Reference, Speech, check_behaviour};
use xtask::fixtures::FixtureSpec;

use crate::runs::{Model, Run, edit_json, run};

/// Tokens are compared, no text, and none of them ends anything.
const TOKENS: Speech<'static> = Speech { tokenizer: None, stop: &[] };

fn generate(model: &Model, what: &str, more: &[&str]) -> Run {
    let args = ["generate", what].into_iter().chain(more.iter().copied());
    run(model.root.path(), args)
}

#[test]
fn tokens_in_tokens_out_on_checkpoints_and_artifacts() {
    let model = Model::tiny();
    model.quantize(&["--head", "int8"]).expect(0);
    for what in ["model", "out"] {
        let opened = Opened::open(&model.root.path().join(what)).unwrap();
        let runtime = opened.model().unwrap();
        let expected = runtime.greedy(&mut State::new(opened.config()), &[3, 17, 42], 9, |t| t == 1).unwrap();
        let said = generate(&model, what, &["--tokens", "3,17,42", "--max-new-tokens", "9", "--json"])
            .expect(0)
            .json();
        assert_eq!(said["tokens"], json!(expected), "{what}");
        assert!(said["text"].is_string());
        let threads = generate(
            &model,
            what,
            &["--tokens", "3,17,42", "--max-new-tokens", "9", "--json", "--threads", "1"],
        );
        assert_eq!(threads.json(), said);
    }
}

#[test]
fn text_streams_to_stdout_and_equals_that_of_json() {
    let model = Model::tiny();
    for more in [&[][..], &["--raw"], &["--no-think"]] {
        let args: Vec<&str> =
            ["--prompt", "Hello, 世界", "--max-new-tokens", "12"].iter().chain(more).copied().collect();
        let text = generate(&model, "model", &args).expect(0).stdout;
        let json = generate(&model, "model", &[&args[..], &["--json"]].concat()).expect(0).json();
        assert_eq!(text, format!("{}\n", json["text"].as_str().unwrap()), "{more:?}");
    }
    // The template, the raw text and the closed thought are three different prompts.
    let tokens = |more: &[&str]| {
        generate(&model, "model", &[&["--prompt", "Hello", "--json"], more].concat()).expect(0).json()["tokens"].clone()
    };
    assert_ne!(tokens(&[]), tokens(&["--raw"]));
    assert_ne!(tokens(&[]), tokens(&["--no-think"]));
}

#[test]
fn generation_stops_at_any_end_token() {
    let model = Model::tiny();
    let all =
        generate(&model, "model", &["--tokens", "5,6", "--max-new-tokens", "8", "--json"]).expect(0).json();
    let third = all["tokens"][2].clone();
    let first = all["tokens"].as_array().unwrap().iter().position(|t| *t == third).unwrap();
    edit_json(&model.file("config.json"), |c| c["eos_token_id"] = json!([1, third]));
    let stopped =
        generate(&model, "model", &["--tokens", "5,6", "--max-new-tokens", "8", "--json"]).expect(0).json();
    assert_eq!(stopped["tokens"].as_array().unwrap().len(), first + 1);
}

#[test]
fn what_cannot_be_generated_from_is_refused() {
    let model = Model::tiny();
    for args in [
        &[][..],
        &["--prompt", ""],
        &["--prompt", "", "--raw"],
        &["--prompt", "a", "--tokens", "1"],
        &["--tokens", "1,x"],
        &["--tokens", "-1"],
        &["--tokens", "3", "--raw"],
        &["--tokens", "3", "--no-think"],
        &["--prompt", "a", "--raw", "--no-think"],
        &["--prompt", "a", "--max-new-tokens", "0"],
    ] {
        // A chat template makes a prompt of nothing, too; that is a question without words.
        if args == ["--prompt", ""] {
            generate(&model, "model", args).expect(0);
        } else {
            generate(&model, "model", args).expect(2);
        }
    }
}

#[test]
fn kf19_ids_at_the_edges() {
    let model = Model::tiny();
    // Id 0 is an ordinary id, and the last one is the last one.
    generate(&model, "model", &["--tokens", "0,447", "--max-new-tokens", "1"]).expect(0);
    let outside = generate(&model, "model", &["--tokens", "0,448"]).expect(2);
    assert!(outside.error().contains("448"), "{}", outside.error());
    // A tokenizer whose added token lies beyond the vocabulary is an error when it is used.
    edit_json(&model.file("tokenizer.json"), |t| {
        let mut token = t["added_tokens"][3].clone();
        token["id"] = json!(448);
        token["content"] = json!("<beyond>");
        t["added_tokens"].as_array_mut().unwrap().push(token);
    });
    let beyond = generate(&model, "model", &["--prompt", "<beyond>", "--raw"]).expect(3);
    assert!(beyond.error().contains("448"), "{}", beyond.error());
    generate(&model, "model", &["--prompt", "within", "--raw", "--max-new-tokens", "1"]).expect(0);
    // A byte without a token, and no BOS before the text.
    let byte = generate(&model, "model", &["--prompt", "\u{6}", "--raw", "--max-new-tokens", "1", "--json"])
        .expect(0)
        .json();
    let unk =
        generate(&model, "model", &["--tokens", "5", "--max-new-tokens", "1", "--json"]).expect(0).json();
    assert_eq!(byte["tokens"], unk["tokens"]);
}

#[test]
fn without_a_tokenizer_ids_still_work_and_prompts_are_refused() {
    let model = Model::tiny();
    fs::remove_file(model.file("tokenizer.json")).unwrap();
    let said =
        generate(&model, "model", &["--tokens", "3", "--max-new-tokens", "3", "--json"]).expect(0).json();
    assert_eq!((said["tokens"].as_array().unwrap().len(), &said["text"]), (3, &Value::Null));
    assert!(generate(&model, "model", &["--prompt", "hello"]).expect(3).error().contains("tokenizer.json"));
    // An artifact is still made and its bytes still verified; scenarios need text.
    model.quantize(&[]).expect(0);
    model.verify(&[]).expect(0);
    assert!(model.verify_scenario("code", &[]).expect(3).error().contains("tokenizer.json"));
}

#[test]
fn a_checkpoint_without_a_template_takes_raw_text() {
    let model = Model::tiny();
    edit_json(&model.file("tokenizer_config.json"), |c| {
        drop(c.as_object_mut().unwrap().remove("chat_template"))
    });
    assert!(generate(&model, "model", &["--prompt", "hello"]).expect(3).error().contains("--raw"));
    generate(&model, "model", &["--prompt", "hello", "--raw", "--max-new-tokens", "1"]).expect(0);
    // Chats are skipped, said and counted; one that was asked for is not.
    model.quantize(&[]).expect(0);
    let args = ["verify", "out", "--reference", "model", "--min-greedy", "0", "--json"];
    let verified = run(model.root.path(), args).expect(0);
    assert!(verified.stderr.contains("5 scenarios skipped"), "{}", verified.stderr);
    assert_eq!(
        verified.json()["skipped_scenarios"],
        json!(["short", "tool-call", "agent-last-step", "agent-tools", "chinese"])
    );
    assert_eq!(verified.json()["artifacts"][0]["behaviour"]["scenarios"].as_array().unwrap().len(), 5);
    model.verify_scenario("chinese", &[]).expect(3);
}

#[test]
fn verify_reports_every_scenario_beside_its_floor() {
    let model = Model::tiny();
    model.quantize(&[]).expect(0);
    let args = ["verify", "out", "--reference", "model", "--min-greedy", "0"];
    let report = run(model.root.path(), args.iter().chain(&["--json"])).expect(0).json();
    let behaviour = &report["artifacts"][0]["behaviour"];
    let scenarios = behaviour["scenarios"].as_array().unwrap();
    let names: Vec<_> = scenarios.iter().map(|s| s["scenario"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "short",
            "window-1",
            "window",
            "window+1",
            "long",
            "tool-call",
            "agent-last-step",
            "agent-tools",
            "chinese",
            "code"
        ]
    );
    // A window of eight, and five of them.
    let lengths: Vec<_> = scenarios[1..5].iter().map(|s| s["prompt_tokens"].as_u64().unwrap()).collect();
    assert_eq!(lengths, [7, 8, 9, 40]);
    for s in scenarios {
        let (artifact, floor) = (&s["artifact"], &s["floor"]);
        // int8 loses more than bf16 arithmetic, and both lose something.
        assert!(artifact["kl"]["mean"].as_f64() > floor["kl"]["mean"].as_f64(), "{s}");
        assert!(floor["kl"]["mean"].as_f64() > Some(0.0), "{s}");
        assert!(artifact["logits_snr_db"].as_f64() < floor["logits_snr_db"].as_f64(), "{s}");
        // Of every prompt the last token that it brings forth is not fed.
        let prompts = s["prompts"].as_array().unwrap().len() as u64;
        let positions = s["prompt_tokens"].as_u64().unwrap() + s["greedy"]["of"].as_u64().unwrap() - prompts;
        assert_eq!(artifact["positions"], positions);
        // The text is the prompt: its first token is given.
        assert_eq!(artifact["perplexity"]["tokens"], s["prompt_tokens"].as_u64().unwrap() - prompts);
        for mean in
            [&artifact["kl"]["sem"], &artifact["same_top_sem"], &artifact["perplexity"]["ln_ratio"]["sem"]]
        {
            assert!(mean.as_f64().is_some(), "{s}");
        }
    }
    let text = run(model.root.path(), args).expect(0).stdout;
    for name in names {
        assert!(text.contains(name));
    }
    assert_eq!(text.matches("bf16 floor").count(), 11);
}

#[test]
fn gates_on_what_the_model_says() {
    let model = Model::tiny();
    model.quantize(&[]).expect(0);
    let verify = |more: &[&str]| model.verify_scenario("short", more);
    verify(&["--min-snr-db", "20", "--max-kld", "0.05", "--min-greedy", "0"]).expect(0);
    for more in [["--min-snr-db", "60"], ["--max-kld", "0.000001"]] {
        let failed = verify(&more).expect(1);
        assert!(failed.stdout.contains("FAIL"), "{}", failed.stdout);
        let json = verify(&[&more[..], &["--json"]].concat()).expect(1).json();
        assert_eq!(json["passed"], false);
        let missed: Vec<_> = json["artifacts"][0]["gates"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|g| g["passed"] == false)
            .collect();
        assert_eq!(missed.len(), 1);
    }
    verify(&["--scenario", "nothing-of-that-name"]).expect(2);
}

/// One prefill decides what step-by-step decoding would find: the artifact's own greedy text equals
/// the reference's up to the first position where their choices differ.
#[test]
fn teacher_forcing_finds_the_same_divergence_as_decoding() {
    let model = Model::new(FixtureSpec::tiny().seed(5));
    model.quantize(&["--method", "rtn", "--head", "int8"]).expect(0);
    let (source, artifact) = (Opened::open(&model.dir).unwrap(), Opened::open(&model.out()).unwrap());
    let Opened::Checkpoint(checkpoint) = &source else { panic!("a checkpoint") };
    let (reference, other) = (source.model().unwrap(), artifact.model().unwrap());
    let floor = checkpoint_model(checkpoint, Rounding::Bf16).unwrap();
    let interrupt = Interrupt::default();
    let mut diverged = 0;
    for start in 0..6u32 {
        let prompt: Vec<u32> = (0..30).map(|i| (i * 37 + start * 101) % 448).collect();
        let run =
            Reference::run("x", Prompt::of_tokens(&prompt, 40), &reference, &floor, &TOKENS, &interrupt)
                .unwrap();
        let behaviour = check_behaviour(&[run], &reference, &other, &TOKENS, None, &interrupt).unwrap();
        let greedy = behaviour.scenarios[0].greedy;
        let decode = |m: &spark_convert::runtime::Model<'_>| {
            m.greedy(&mut State::new(m.config()), &prompt, 40, |_| false).unwrap()
        };
        let (ours, theirs) = (decode(&reference), decode(&other));
        let prefix = ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
        assert_eq!((greedy.matched, greedy.of), (prefix, 40));
        assert_eq!(greedy.divergence.map(|d| d.index), (prefix < 40).then_some(prefix));
        diverged += usize::from(prefix < 40);
    }
    assert!(diverged > 0, "no case diverges, so nothing was tested");
}

#[test]
fn a_model_loses_nothing_against_itself() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/spark-tiny");
    let opened = Opened::open(&dir).unwrap();
    let model = opened.model().unwrap();
    let interrupt = Interrupt::default();
    let prompt = Prompt::of_tokens(&[3, 17, 42], 5);
    let run = Reference::run("x", prompt, &model, &model, &TOKENS, &interrupt).unwrap();
    let behaviour = check_behaviour(&[run], &model, &model, &TOKENS, None, &interrupt).unwrap();
    let total = behaviour.total;
    assert_eq!(
        (total.logits_snr_db, total.kl.max, total.same_top, total.top20_overlap),
        (None, 0.0, 1.0, 1.0)
    );
    assert_eq!(behaviour.layers.unwrap().lowest_db(), None);
    // And the comparison is not blind.
    let mut comparison = Comparison::default();
    comparison.add(Position::of(&[0.0, 1.0], &[1.0, 0.0]));
    assert!(comparison.summary(2).same_top == 0.0);
}
