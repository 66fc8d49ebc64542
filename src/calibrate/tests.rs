use super::*;
use crate::progress::Silent;
use crate::runtime::{LayerEdge, Rounding};
use crate::spark::{LayerType, Module, tensor_specs};
use crate::tensor::{Dtype, TensorView};

const WINDOW: usize = 8;

fn config() -> SparkConfig {
    let json = serde_json::json!({
        "model_type": "spark2_5", "architectures": ["Spark2_5ForCausalLM"],
        "hidden_act": "gelu", "attention_bias": false, "mlp_bias": false,
        "headwise_attn_output_gate": true, "gate_attn_act_mode": "sigmoid",
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 64, "sliding_window": WINDOW, "max_position_embeddings": 4096,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 5_000_000},
            "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000}
        },
        "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
    });
    SparkConfig::parse(&json).unwrap()
}

/// F32 tensors of a random model.
struct Weights(Vec<(String, Vec<usize>, Vec<u8>)>);

impl Weights {
    fn new(config: &SparkConfig) -> Self {
        let mut state = 1u64;
        let mut noise = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / 8_388_608.0 - 1.0
        };
        let tensor = |spec: crate::spark::TensorSpec| {
            let n: usize = spec.shape.iter().product();
            let bytes = (0..n).flat_map(|_| (noise() * 0.4).to_le_bytes()).collect();
            (spec.name, spec.shape, bytes)
        };
        Self(tensor_specs(config).into_iter().map(tensor).collect())
    }

    fn model(&self, config: &SparkConfig) -> Model<'_> {
        let find = |name: &str| {
            let (name, shape, bytes) = self.0.iter().find(|t| t.0 == name)?;
            Some(TensorView { name, dtype: Dtype::F32, shape, bytes })
        };
        Model::from_views(config.clone(), Rounding::None, find).unwrap()
    }
}

fn text(length: usize, seed: usize) -> Text {
    let tokens = (0..length).map(|i| ((i * 29 + seed * 13) % 64) as u32).collect();
    Text { name: format!("text {seed}"), tokens }
}

fn sequences(lengths: &[usize], context: usize, limit: Option<usize>) -> Sequences {
    let texts: Vec<_> = lengths.iter().enumerate().map(|(i, n)| text(*n, i)).collect();
    Sequences::new(&texts, &config(), context, limit).unwrap()
}

fn lengths(sequences: &Sequences) -> Vec<usize> {
    sequences.tokens.iter().map(Vec::len).collect()
}

#[test]
fn texts_are_cut_at_the_context_and_joined_when_none_fills_it() {
    // The rest of three tokens says nothing; a rest of nine goes on as a sequence of its own.
    let cut = sequences(&[23, 29], 20, None);
    assert_eq!(lengths(&cut), [20, 20, 9]);
    assert!(cut.notes.is_empty());
    assert_eq!(cut.tokens[2], text(29, 1).tokens[20..]);

    let joined = sequences(&[10, 12, 9], 25, None);
    assert_eq!(lengths(&joined), [10, 12, 9, 25]);
    assert_eq!(joined.tokens[3][10..22], text(12, 1).tokens);
    assert!(joined.notes[0].contains("up to position 24"), "{:?}", joined.notes);
    // What there is may be less than the context.
    assert_eq!(lengths(&sequences(&[10, 12], 400, None)), [10, 12, 22]);
    assert_eq!(lengths(&sequences(&[10], 400, None)), [10]);
}

#[test]
fn a_limit_takes_texts_evenly() {
    let all = [10, 10, 10, 10, 10, 10];
    let some = sequences(&all, 10, Some(30));
    assert_eq!(some.texts, 3);
    assert_eq!(some.tokens, [text(10, 0).tokens, text(10, 2).tokens, text(10, 4).tokens]);
    assert!(some.notes[0].contains("3 of 6 texts"), "{:?}", some.notes);
    // The first alone is cut.
    assert_eq!(lengths(&sequences(&[50, 50], 100, Some(20))), [20]);
}

#[test]
fn texts_that_never_fill_a_window_are_refused() {
    let refuse = |lengths: &[usize], context, limit| {
        let texts: Vec<_> = lengths.iter().enumerate().map(|(i, n)| text(*n, i)).collect();
        Sequences::new(&texts, &config(), context, limit).unwrap_err().to_string()
    };
    let message = refuse(&[8], 100, None);
    assert!(message.contains("at least 9 tokens in all") && message.contains("found 8 in 1"), "{message}");
    assert!(refuse(&[50], 100, Some(8)).contains("at least 9 tokens"));
    assert!(refuse(&[], 100, None).contains("found 0"));
    assert_eq!(lengths(&sequences(&[9], 100, None)), [9]);
}

/// SHA-256 of 02000000 05000000 07000000 01000000 09000000.
#[test]
fn the_hash_is_of_lengths_and_ids() {
    let sequences = Sequences { tokens: vec![vec![5, 7], vec![9]], texts: 2, notes: Vec::new() };
    let words: Vec<u8> = [2u32, 5, 7, 1, 9].iter().flat_map(|w| w.to_le_bytes()).collect();
    assert_eq!(sequences.sha256(), crate::artifact::hash_bytes(&words));
    let moved = Sequences { tokens: vec![vec![5], vec![7, 9]], ..sequences.clone() };
    assert_ne!(moved.sha256(), sequences.sha256());
}

/// Every range equals that of the values themselves, taken token by token.
#[test]
fn ranges_are_those_of_single_steps() {
    let config = config();
    let weights = Weights::new(&config);
    let model = weights.model(&config);
    let sequences = sequences(&[3 * WINDOW, 2 * WINDOW + 3], 3 * WINDOW, None);
    let ranges = calibrate(&model, &sequences, &Silent, &Interrupt::default()).unwrap();

    let mut expected: BTreeMap<Site, Range> = BTreeMap::new();
    let mut see = |site, values: &[f32]| {
        let known = expected.entry(site).or_insert(Range::EMPTY);
        *known = known.union(Range::of(values).unwrap());
    };
    let (q, kv, d) = (config.q_rows(), config.kv_rows(), config.head_dim);
    for tokens in &sequences.tokens {
        let mut state = State::new(&config);
        for token in tokens {
            let mut hidden = Vec::new();
            let step = &mut |edge: Edge, position: usize, rows: &[f32]| match edge {
                Edge::Embedding => see(Site::Embedding, rows),
                Edge::FinalNorm => {
                    see(Site::FinalNorm, rows);
                    hidden = rows.to_vec();
                }
                Edge::Layer(i, LayerEdge::Qkv) => {
                    see(Site::Layer(i, LayerSite::Queries), &rows[..q]);
                    see(Site::Layer(i, LayerSite::Keys), &rows[q..q + kv]);
                    see(Site::Layer(i, LayerSite::Values), &rows[q + kv..]);
                    let (theta, dims): (f64, usize) = match config.layer_types[i] {
                        LayerType::Sliding => (1e4, d),
                        LayerType::Full => (5e6, d / 4),
                    };
                    let mut products = [Vec::new(), Vec::new()];
                    for (h, head) in rows[..q + kv].chunks(d).enumerate() {
                        for (j, x) in head[..dims].iter().enumerate() {
                            let exponent = -2.0 * (j % (dims / 2)) as f64 / dims as f64;
                            let angle = position as f64 * theta.powf(exponent);
                            let of = &mut products[usize::from(h >= q / d)];
                            of.extend([x * angle.cos() as f32, x * angle.sin() as f32]);
                        }
                    }
                    see(Site::Layer(i, LayerSite::QueryProducts), &products[0]);
                    see(Site::Layer(i, LayerSite::KeyProducts), &products[1]);
                }
                Edge::Layer(i, LayerEdge::Rotated) => {
                    see(Site::Layer(i, LayerSite::RotatedQueries), &rows[..q]);
                    see(Site::Layer(i, LayerSite::RotatedKeys), &rows[q..q + kv]);
                }
                Edge::Layer(i, LayerEdge::GatedHeads) => see(Site::Layer(i, LayerSite::GatedHeads), rows),
                Edge::Layer(i, LayerEdge::Output) => see(Site::Layer(i, LayerSite::Output), rows),
                Edge::Layer(..) => {}
            };
            model.run(&mut state, &[*token], step).unwrap();
            see(Site::Logits, &model.logits(&hidden));
        }
    }
    for (site, expected) in &expected {
        let found = ranges.get(*site);
        let near = |a: f32, b: f32| (a - b).abs() <= 2e-5 * expected.amax();
        assert!(
            near(found.min, expected.min) && near(found.max, expected.max),
            "{site}: {found:?} {expected:?}"
        );
    }
    // The ends, and 21 places in each of the two layers.
    assert_eq!(ranges.iter().count(), 3 + 2 * 21);
}

/// Scores are observed while attending: against all of them, computed from the rotated q and k.
#[test]
fn the_range_of_scores_is_that_of_visible_keys() {
    let config = config();
    let weights = Weights::new(&config);
    let model = weights.model(&config);
    let sequences = sequences(&[40], 40, None);
    let ranges = calibrate(&model, &sequences, &Silent, &Interrupt::default()).unwrap();
    let (q, d) = (config.q_rows(), config.head_dim);
    let row = q + 2 * config.kv_rows();
    let mut rotated = vec![Vec::new(); 2];
    let tap = &mut |edge: Edge, _: usize, rows: &[f32]| {
        if let Edge::Layer(i, LayerEdge::Rotated) = edge {
            rotated[i].extend_from_slice(rows);
        }
    };
    model.run(&mut State::new(&config), &sequences.tokens[0], tap).unwrap();
    for (i, rows) in rotated.iter().enumerate() {
        let mut expected = Range::EMPTY;
        for (t, query) in rows.chunks(row).enumerate() {
            let first = if i == 0 { (t + 1).saturating_sub(WINDOW) } else { 0 };
            for head in 0..4 {
                for key in rows.chunks(row).take(t + 1).skip(first) {
                    let (a, b) = (&query[head * d..][..d], &key[q + head / 2 * d..][..d]);
                    let dot: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    // 1 / sqrt(16)
                    let score = (dot / 4.0) as f32;
                    expected = expected.union(Range::new(score, score));
                }
            }
        }
        let found = ranges.get(Site::Layer(i, LayerSite::Scores));
        let near = |a: f32, b: f32| (a - b).abs() <= 1e-5 * expected.amax();
        assert!(near(found.min, expected.min) && near(found.max, expected.max), "{found:?} {expected:?}");
    }
}

#[test]
fn coverage_tells_what_was_not_seen() {
    let config = config();
    let weights = Weights::new(&config);
    let model = weights.model(&config);
    let sequences = sequences(&[20], 100, None);
    let ranges = calibrate(&model, &sequences, &Silent, &Interrupt::default()).unwrap();
    let coverage = Coverage::new(&sequences, &ranges, &config, 100);
    assert_eq!((coverage.tokens, coverage.longest_position, coverage.sliding_window), (20, 19, WINDOW));
    // One sequence has nothing before it that it could outgrow.
    assert_eq!(coverage.unsettled_sites, 0);
    assert!(coverage.notes()[0].contains("positions 20 to 99"), "{:?}", coverage.notes());
}

#[test]
fn an_activation_that_is_not_finite_is_told_by_its_place() {
    let config = config();
    let mut weights = Weights::new(&config);
    let up = weights.0.iter_mut().find(|t| t.0 == "model.layers.1.mlp.up_proj.weight").unwrap();
    up.2[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    let model = weights.model(&config);
    let failure = calibrate(&model, &sequences(&[20], 20, None), &Silent, &Interrupt::default()).unwrap_err();
    assert!(failure.to_string().contains("layer 1: MLP up: expected finite activations"), "{failure}");
}

#[test]
fn an_interrupt_stops_between_pieces() {
    let config = config();
    let weights = Weights::new(&config);
    let interrupt = Interrupt::default();
    interrupt.stop();
    let failure = calibrate(&weights.model(&config), &sequences(&[20], 20, None), &Silent, &interrupt);
    assert!(matches!(failure, Err(crate::error::Failure::Interrupted)));
}

/// Against the definitions, in f64, from the weights and the rows that pass.
#[test]
fn energies_are_mean_squares_of_inputs_and_of_what_the_weights_make_of_them() {
    let config = config();
    let weights = Weights::new(&config);
    let model = weights.model(&config);
    let sequences = sequences(&[9, 21], 64, None);
    let energies =
        Energies::collect(&model, &sequences, &Silent, &crate::interrupt::Interrupt::default()).unwrap();
    // Rows of every place, of all tokens in order.
    let mut rows: std::collections::BTreeMap<String, Vec<f64>> = Default::default();
    for tokens in &sequences.tokens {
        let mut see = |edge: Edge, _: usize, values: &[f32]| {
            rows.entry(format!("{edge:?}")).or_default().extend(values.iter().map(|x| f64::from(*x)));
        };
        model.run(&mut State::new(&config), tokens, &mut see).unwrap();
    }
    let total = sequences.total();
    assert!(total < 64, "all logits are taken");
    let place = |layer: usize, edge: LayerEdge| &rows[&format!("{:?}", Edge::Layer(layer, edge))];
    let matrix = |name: &str| {
        let (_, shape, bytes) = weights.0.iter().find(|t| t.0 == name).unwrap();
        let values = bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b)));
        (shape[1], values.collect::<Vec<f64>>())
    };
    let energy = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>();
    let near = |what: &str, found: f64, expected: f64| {
        assert!((found - expected).abs() <= 1e-5 * expected, "{what}: {found}, expected {expected}");
    };
    let check = |module, layer, name: &str, inputs: &[f64], common: bool, share: f64| {
        let found = energies.of(module, layer).unwrap();
        let (k, w) = matrix(name);
        let mut columns = vec![0.0; k];
        let mut outputs = 0.0;
        for x in inputs.chunks_exact(k) {
            columns.iter_mut().zip(x).for_each(|(sum, x)| *sum += x * x / total as f64);
            let mut y: Vec<f64> =
                w.chunks_exact(k).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
            if common {
                let mean = y.iter().sum::<f64>() / y.len() as f64;
                y.iter_mut().for_each(|y| *y -= mean);
            }
            outputs += energy(&y) / total as f64;
        }
        assert_eq!(inputs.len(), total * k, "{name}");
        found.columns.iter().zip(columns).for_each(|(f, e)| near(name, *f, e));
        near(name, found.outputs, outputs);
        near(name, found.share, share);
    };
    let mut before = rows["Embedding"].clone();
    for layer in 0..2 {
        let mut add = |edge| {
            let added = place(layer, edge);
            let h = config.hidden_size;
            before.iter_mut().zip(added).for_each(|(sum, x)| *sum += x);
            let parts =
                added.chunks_exact(h).zip(before.chunks_exact(h)).map(|(a, all)| energy(a) / energy(all));
            parts.sum::<f64>() / total as f64
        };
        let attention = add(LayerEdge::AttentionOutput);
        let mlp = add(LayerEdge::MlpOutput);
        assert!(attention != mlp);
        for (module, name, edge, share) in [
            (Module::QkvProj, "self_attn.q_k_v_proj", LayerEdge::InputNorm, attention),
            (Module::OutProj, "self_attn.out_proj", LayerEdge::GatedHeads, attention),
            (Module::MlpGate, "mlp.gate_proj", LayerEdge::PostAttentionNorm, mlp),
            (Module::MlpUp, "mlp.up_proj", LayerEdge::PostAttentionNorm, mlp),
            (Module::MlpDown, "mlp.down_proj", LayerEdge::MlpProduct, mlp),
        ] {
            let name = format!("model.layers.{layer}.{name}.weight");
            check(module, Some(layer), &name, place(layer, edge), false, share);
        }
    }
    check(Module::LmHead, None, "model.embedding.weight", &rows["FinalNorm"], true, 1.0);
    assert_eq!(energies.of(Module::HeadGate, Some(0)), None);
}
