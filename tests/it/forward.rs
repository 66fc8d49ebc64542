//! The forward pass against PyTorch, and what the mistakes of other runtimes would look like.
//!
//! `fixtures/goldens/runtime/README.md` says how the goldens are made.

mod mistakes;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use spark_convert::artifact::hash_bytes;
use spark_convert::checkpoint::Checkpoint;
use spark_convert::runtime::{Model, Rounding, State, argmax};
use spark_convert::spark::SparkConfig;
use spark_convert::tensor::TensorView;
use tempfile::TempDir;
use xtask::fixtures::FixtureSpec;

use crate::runs::{read_json, shards};

/// One position less than the window, the window, one more, and several windows.
const LENGTHS: [usize; 5] = [15, 16, 17, 48, 80];
const WINDOW: usize = 16;

/// What PyTorch made of a checkpoint.
struct Golden {
    tokens: Vec<u32>,
    /// `[80, vocab]`.
    logits: Vec<f32>,
    long_prompt: Vec<u32>,
    /// The last position of the long prompt, `[vocab]`.
    long_logits: Vec<f32>,
    greedy: BTreeMap<usize, Vec<u32>>,
    vocab: usize,
}

fn numbers(json: &Value) -> Vec<u32> {
    json.as_array().unwrap().iter().map(|n| u32::try_from(n.as_u64().unwrap()).unwrap()).collect()
}

impl Golden {
    /// Reads the golden of a checkpoint, after making sure that it is of this checkpoint.
    fn of(preset: &str, checkpoint: &Path) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/goldens/runtime");
        let json = read_json(&dir.join(format!("{preset}.json")));
        let hashes: Vec<(String, String)> = shards(checkpoint)
            .iter()
            .map(|p| {
                let name = p.file_name().unwrap().to_string_lossy().into_owned();
                (name, hash_bytes(&fs::read(p).unwrap()))
            })
            .collect();
        let recorded: Vec<(String, String)> = (json["shards"].as_object().unwrap().iter())
            .map(|(name, hash)| (name.clone(), hash.as_str().unwrap().to_owned()))
            .collect();
        assert_eq!(
            hashes, recorded,
            "the fixture changed, not the runtime: run tests/oracle/spark_goldens.py again"
        );
        let vocab = json["vocab"].as_u64().unwrap() as usize;
        let bytes = fs::read(dir.join(format!("{preset}.bin"))).unwrap();
        let mut logits: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let tokens = numbers(&json["tokens"]);
        assert_eq!((tokens.len(), logits.len()), (5 * WINDOW, (5 * WINDOW + 1) * vocab));
        let long_logits = logits.split_off(tokens.len() * vocab);
        assert_eq!(json["long_prompt"]["rule"], "(i * i * 31 + i * 17 + 7) % vocab");
        let long = json["long_prompt"]["tokens"].as_u64().unwrap();
        let long_prompt = (0..long).map(|i| ((i * i * 31 + i * 17 + 7) % vocab as u64) as u32).collect();
        let greedy = json["greedy"].as_object().unwrap();
        let greedy = greedy.iter().map(|(n, tokens)| (n.parse().unwrap(), numbers(tokens))).collect();
        Self { tokens, logits, long_prompt, long_logits, greedy, vocab }
    }
}

/// A checkpoint and its golden.
struct Case {
    _root: TempDir,
    dir: PathBuf,
    checkpoint: Checkpoint,
    golden: Golden,
}

impl Case {
    fn new(preset: &str) -> Self {
        let spec = if preset == "wide" { FixtureSpec::wide() } else { FixtureSpec::square() };
        let root = TempDir::new().unwrap();
        let dir = spec.write(root.path().join("model")).unwrap().model_dir;
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let golden = Golden::of(preset, &dir);
        Self { _root: root, dir, checkpoint, golden }
    }

    fn both() -> [(&'static str, Self); 2] {
        ["square", "wide"].map(|preset| (preset, Self::new(preset)))
    }

    fn config(&self) -> &SparkConfig {
        &self.checkpoint.config
    }

    fn view(&self, name: &str) -> Option<TensorView<'_>> {
        self.checkpoint.files.get(name)
    }

    fn model(&self) -> Model<'_> {
        Model::from_views(self.config().clone(), Rounding::None, |name| self.view(name)).unwrap()
    }

    /// The logits of all 80 positions.
    fn logits(&self, model: &Model<'_>) -> Vec<f32> {
        logits(model, &self.golden.tokens)
    }

    /// How far the logits of some positions are from the golden.
    fn snr(&self, found: &[f32], positions: std::ops::Range<usize>) -> f64 {
        let range = positions.start * self.golden.vocab..positions.end * self.golden.vocab;
        snr(&self.golden.logits[range.clone()], &found[range])
    }
}

fn logits(model: &Model<'_>, tokens: &[u32]) -> Vec<f32> {
    model.logits(&model.forward(&mut State::new(model.config()), tokens).unwrap())
}

/// Signal to noise in dB.
fn snr(golden: &[f32], found: &[f32]) -> f64 {
    assert_eq!(golden.len(), found.len());
    let noise: f64 = golden.iter().zip(found).map(|(g, f)| (f64::from(*g) - f64::from(*f)).powi(2)).sum();
    10.0 * (golden.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>() / noise).log10()
}

#[test]
fn logits_are_those_of_pytorch() {
    for (preset, case) in Case::both() {
        let model = case.model();
        for n in LENGTHS {
            let found = logits(&model, &case.golden.tokens[..n]);
            let db = case.snr(&found, 0..n);
            println!("{preset}, {n} tokens: {db:.1} dB");
            assert!(db >= 110.0, "{preset}, {n} tokens: {db} dB");
        }
    }
}

#[test]
fn logits_far_into_a_prompt_are_those_of_pytorch() {
    for (preset, case) in Case::both() {
        let model = case.model();
        let hidden = model.forward_last(&mut State::new(case.config()), &case.golden.long_prompt).unwrap();
        let db = snr(&case.golden.long_logits, &model.logits(&hidden));
        println!("{preset}, position {}: {db:.1} dB", case.golden.long_prompt.len());
        assert!(db >= 90.0, "{preset}: {db} dB");
    }
}

#[test]
fn greedy_tokens_are_those_of_pytorch() {
    for (preset, case) in Case::both() {
        let model = case.model();
        assert!(case.golden.greedy.keys().eq(&LENGTHS));
        for (n, expected) in &case.golden.greedy {
            let prompt = &case.golden.tokens[..*n];
            let found = model.greedy(&mut State::new(case.config()), prompt, 24, |_| false).unwrap();
            assert_eq!((found.len(), &found), (24, expected), "{preset}, {n} tokens");
        }
    }
}

#[test]
fn kf09_heads_times_head_dim_need_not_be_the_hidden_size() {
    let case = Case::new("wide");
    assert_eq!((case.config().q_rows(), case.config().hidden_size), (512, 256));
    let logits = case.logits(&case.model());
    assert!(case.snr(&logits, 0..80) >= 110.0);
    // What would come of taking the one for the other is refused by name.
    let mut config = case.config().clone();
    config.head_dim = config.hidden_size / config.num_attention_heads;
    let built = Model::from_views(config, Rounding::None, |name| case.view(name));
    let error = built.err().unwrap().to_string();
    assert!(error.contains("layers.0.self_attn.q_k_v_proj.weight"), "{error}");
}

/// Equal bits, not merely close: the cache is the same whichever way it was filled.
#[test]
fn kf16_a_prompt_at_once_and_token_by_token_are_the_same() {
    for (preset, case) in Case::both() {
        let model = case.model();
        for n in LENGTHS {
            let tokens = &case.golden.tokens[..n];
            let (mut at_once, mut stepped) = (State::new(case.config()), State::new(case.config()));
            let whole = model.forward(&mut at_once, tokens).unwrap();
            let steps: Vec<f32> =
                tokens.iter().flat_map(|t| model.forward(&mut stepped, &[*t]).unwrap()).collect();
            assert!(same_bits(&whole, &steps), "{preset}, {n} tokens");
            assert!(case.snr(&model.logits(&steps), 0..n) >= 110.0);
            // And what follows.
            let next = argmax(&model.logits(&whole[whole.len() - case.config().hidden_size..]));
            let after = [&mut at_once, &mut stepped].map(|s| model.forward(s, &[next]).unwrap());
            assert!(same_bits(&after[0], &after[1]), "{preset}, after {n} tokens");
        }
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn kf19_a_token_outside_the_vocabulary_is_named_and_zero_is_a_token() {
    let case = Case::new("square");
    let model = case.model();
    for token in [512, 513, 131_071, u32::MAX] {
        let mut state = State::new(case.config());
        let error = model.forward(&mut state, &[0, 5, token]).unwrap_err().to_string();
        assert!(error.contains(&token.to_string()) && error.contains("512"), "{error}");
        assert_eq!(state.position(), 0);
    }
    // Token 0 is in the golden's prompt, at 46: neither padding nor an end.
    let at = case.golden.tokens.iter().position(|t| *t == 0).unwrap();
    let found = case.logits(&model);
    assert!(case.snr(&found, at..at + 1) >= 110.0 && case.snr(&found, at + 1..80) >= 110.0);
    assert!(model.forward(&mut State::new(case.config()), &[0, 511]).is_ok());
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let case = Case::new("wide");
    let model = case.model();
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| case.logits(&model))
    };
    assert!(same_bits(&run(1), &run(2)));
}
