//! The forward pass against a plain one in f64, and against itself.

use super::linear::tests::noise;
use super::*;
use crate::spark::{LayerType, SparkConfig, tensor_specs};
use crate::tensor::{Dtype, TensorView};

const WINDOW: usize = 8;

fn config(edit: impl FnOnce(&mut serde_json::Value)) -> SparkConfig {
    let mut json = serde_json::json!({
        "model_type": "spark2_5", "architectures": ["Spark2_5ForCausalLM"],
        "hidden_act": "gelu", "attention_bias": false, "mlp_bias": false,
        "headwise_attn_output_gate": true, "gate_attn_act_mode": "sigmoid",
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 96, "sliding_window": WINDOW, "max_position_embeddings": 4096,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 5_000_000},
            "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000}
        },
        "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
    });
    edit(&mut json);
    SparkConfig::parse(&json).unwrap()
}

/// A random checkpoint of F32 tensors.
struct Weights {
    config: SparkConfig,
    tensors: Vec<(String, Vec<usize>, Vec<u8>)>,
}

impl Weights {
    fn new(config: SparkConfig) -> Self {
        let tensors = (tensor_specs(&config).into_iter().enumerate())
            .map(|(i, spec)| {
                let (n, k) = (spec.shape.iter().product(), spec.shape[spec.shape.len() - 1]);
                let size = if spec.shape.len() == 1 { 1.0 } else { (3.0 / k as f32).sqrt() };
                let shift = if spec.name.contains("layernorm") { 0.8 } else { 0.0 };
                let values = noise(n, i as u64 + 1).into_iter().map(|x| x * size + shift);
                (spec.name, spec.shape, values.flat_map(f32::to_le_bytes).collect())
            })
            .collect();
        Self { config, tensors }
    }

    fn set(&mut self, name: &str, f: impl Fn(f32) -> f32) {
        let tensor = self.tensors.iter_mut().find(|t| t.0.ends_with(name)).unwrap();
        let values = tensor.2.chunks(4).map(|b| f(f32::from_le_bytes(b.try_into().unwrap())));
        tensor.2 = values.flat_map(f32::to_le_bytes).collect();
    }

    fn view(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, shape, bytes) = self.tensors.iter().find(|t| t.0 == name)?;
        Some(TensorView { name, dtype: Dtype::F32, shape, bytes })
    }

    fn model(&self) -> Model<'_> {
        self.rounded(Rounding::None)
    }

    fn rounded(&self, rounding: Rounding) -> Model<'_> {
        Model::from_views(self.config.clone(), rounding, |name| self.view(name)).unwrap()
    }

    fn f64(&self, name: &str) -> Vec<f64> {
        let (_, _, bytes) = self.tensors.iter().find(|t| t.0 == name).unwrap();
        bytes.chunks(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect()
    }

    /// Logits in f64, written for reading: every position against every other, no cache.
    fn logits(&self, tokens: &[u32]) -> Vec<f64> {
        let c = &self.config;
        let (h, d) = (c.hidden_size, c.head_dim);
        let times = |x: &[f64], name: &str| -> Vec<f64> {
            let w = self.f64(name);
            let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
            let k = if name.ends_with("down_proj.weight") {
                c.intermediate_size
            } else if name.ends_with("out_proj.weight") {
                c.q_rows()
            } else {
                h
            };
            x.chunks(k).flat_map(|x| w.chunks(k).map(move |w| dot(x, w))).collect()
        };
        let norm = |x: &[f64], name: &str| -> Vec<f64> {
            let w = self.f64(name);
            let row = |x: &[f64]| {
                let mean = x.iter().map(|x| x * x).sum::<f64>() / h as f64;
                x.iter().zip(&w).map(|(x, w)| w * x / (mean + c.rms_norm_eps).sqrt()).collect::<Vec<_>>()
            };
            x.chunks(h).flat_map(row).collect()
        };
        let embedding = self.f64("model.embedding.weight");
        let mut stream: Vec<f64> =
            tokens.iter().flat_map(|t| embedding[*t as usize * h..][..h].to_vec()).collect();
        for (i, kind) in c.layer_types.iter().enumerate() {
            let name = |part: &str| format!("model.layers.{i}.{part}.weight");
            let x = norm(&stream, &name("input_layernorm"));
            let mut qkv = times(&x, &name("self_attn.q_k_v_proj"));
            let gates = times(&x, &name("self_attn.g_proj"));
            let (width, heads) = (c.q_rows() + 2 * c.kv_rows(), c.num_attention_heads);
            let rope = c.rope(*kind);
            let half = rope.rotary_dims / 2;
            for (position, row) in qkv.chunks_mut(width).enumerate() {
                for head in row[..c.q_rows() + c.kv_rows()].chunks_mut(d) {
                    for i in 0..half {
                        // The f32 angle is part of the definition.
                        let exponent = (2 * i) as f32 / rope.rotary_dims as f32;
                        let frequency = 1.0 / (rope.theta.powf(f64::from(exponent)) as f32);
                        let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                        let (a, b) = (head[i], head[i + half]);
                        (head[i], head[i + half]) = (a * cos - b * sin, b * cos + a * sin);
                    }
                }
            }
            let mut attended = Vec::new();
            for t in 0..tokens.len() {
                for head in 0..heads {
                    let q = &qkv[t * width + head * d..][..d];
                    let kv = head / (heads / c.num_key_value_heads);
                    let key = |j: usize| &qkv[j * width + c.q_rows() + kv * d..][..d];
                    let value = |j: usize| &qkv[j * width + c.q_rows() + c.kv_rows() + kv * d..][..d];
                    let sees = |j: &usize| *kind == LayerType::Full || t - j < c.sliding_window;
                    let visible: Vec<usize> = (0..=t).filter(sees).collect();
                    let scores: Vec<f64> = (visible.iter())
                        .map(|j| q.iter().zip(key(*j)).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt())
                        .collect();
                    let max = scores.iter().copied().fold(f64::MIN, f64::max);
                    let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                    let g = gates[t * heads + head];
                    let gate = match c.gate_activation {
                        crate::spark::GateActivation::Sigmoid => 1.0 / (1.0 + (-g).exp()),
                        crate::spark::GateActivation::Silu => g / (1.0 + (-g).exp()),
                    };
                    attended.extend((0..d).map(|i| {
                        let weighted = visible.iter().zip(&scores);
                        weighted.map(|(j, s)| (s - max).exp() / total * value(*j)[i]).sum::<f64>() * gate
                    }));
                }
            }
            let out = times(&attended, &name("self_attn.out_proj"));
            stream.iter_mut().zip(out).for_each(|(s, o)| *s += o);
            let x = norm(&stream, &name("post_attention_layernorm"));
            let gate = times(&x, &name("mlp.gate_proj"));
            let up = times(&x, &name("mlp.up_proj"));
            let gelu = |x: f64| x / 2.0 * (1.0 + libm::erf(x / 2f64.sqrt()));
            let product: Vec<f64> = gate.iter().zip(up).map(|(g, u)| gelu(*g) * u).collect();
            let out = times(&product, &name("mlp.down_proj"));
            stream.iter_mut().zip(out).for_each(|(s, o)| *s += o);
        }
        let head = if c.tie_word_embeddings { "model.embedding.weight" } else { "lm_head.weight" };
        times(&norm(&stream, "model.norm.weight"), head)
    }
}

fn tokens(n: usize) -> Vec<u32> {
    noise(n, 77).into_iter().map(|x| ((x + 1.0) * 48.0) as u32 % 96).collect()
}

/// Signal to noise in dB.
fn snr(exact: &[f64], found: &[f32]) -> f64 {
    assert_eq!(exact.len(), found.len());
    let noise: f64 = exact.iter().zip(found).map(|(e, f)| (e - f64::from(*f)).powi(2)).sum();
    10.0 * (exact.iter().map(|e| e * e).sum::<f64>() / noise).log10()
}

fn all_logits(model: &Model<'_>, tokens: &[u32]) -> Vec<f32> {
    model.logits(&model.forward(&mut State::new(model.config()), tokens).unwrap())
}

#[test]
fn logits_agree_with_plain_f64_around_the_window() {
    let weights = Weights::new(config(|_| ()));
    let model = weights.model();
    for n in [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 5 * WINDOW] {
        let tokens = tokens(n);
        let (exact, found) = (weights.logits(&tokens), all_logits(&model, &tokens));
        let db = snr(&exact, &found);
        assert!(db >= 110.0, "{n} tokens: {db} dB");
        for (exact, found) in exact.chunks(96).zip(found.chunks(96)) {
            let exact: Vec<f32> = exact.iter().map(|x| *x as f32).collect();
            assert_eq!(argmax(found), argmax(&exact));
        }
    }
}

#[test]
fn variants_of_the_architecture_agree_with_plain_f64() {
    let edits: [fn(&mut serde_json::Value); 5] = [
        |j| j["gate_attn_act_mode"] = "silu".into(),
        |j| j["tie_word_embeddings"] = false.into(),
        |j| j["sliding_window"] = 1.into(),
        |j| j["num_key_value_heads"] = 4.into(),
        |j| j["layer_types"] = ["full_attention"; 4].to_vec().into(),
    ];
    for (i, edit) in edits.into_iter().enumerate() {
        let weights = Weights::new(config(edit));
        let tokens = tokens(3 * WINDOW);
        let db = snr(&weights.logits(&tokens), &all_logits(&weights.model(), &tokens));
        assert!(db >= 110.0, "variant {i}: {db} dB");
    }
}

/// The strongest form of "the cache is right": equal bits, past the chunk and past every window.
#[test]
fn pieces_of_a_prompt_give_the_bits_of_the_whole() {
    let weights = Weights::new(config(|_| ()));
    for rounding in [Rounding::None, Rounding::Bf16] {
        let model = weights.rounded(rounding);
        let tokens = tokens(300);
        let whole = model.forward(&mut State::new(model.config()), &tokens).unwrap();
        for piece in [1, WINDOW - 1, WINDOW, 57] {
            let mut state = State::new(model.config());
            let mut hidden = Vec::new();
            for piece in tokens.chunks(piece) {
                hidden.extend(model.forward(&mut state, piece).unwrap());
            }
            assert_eq!(hidden, whole, "{rounding:?} in pieces of {piece}");
            assert_eq!(state.position(), 300);
        }
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let weights = Weights::new(config(|_| ()));
    let model = weights.model();
    let tokens = tokens(70);
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut state = State::new(model.config());
            let hidden = model.forward(&mut state, &tokens).unwrap();
            (model.logits(&hidden), model.greedy(&mut state, &[1], 12, |_| false).unwrap())
        })
    };
    let one = run(1);
    assert_eq!(run(2), one);
    assert_eq!(run(3), one);
}

/// In a window of one, every token sees itself only: its attention is its own value.
#[test]
fn one_visible_key_gets_all_the_weight() {
    let weights = Weights::new(config(|j| j["sliding_window"] = 1.into()));
    let model = weights.model();
    let (mut values, mut heads) = (Vec::new(), Vec::new());
    let c = model.config();
    model
        .run(&mut State::new(c), &tokens(5), &mut |edge, _, rows| match edge {
            Edge::Layer(0, LayerEdge::Rotated) => values = rows.to_vec(),
            Edge::Layer(0, LayerEdge::Heads) => heads = rows.to_vec(),
            _ => {}
        })
        .unwrap();
    for (qkv, out) in values.chunks(c.q_rows() + 2 * c.kv_rows()).zip(heads.chunks(c.q_rows())) {
        for (head, out) in out.chunks(c.head_dim).enumerate() {
            assert_eq!(out, &qkv[c.q_rows() + c.kv_rows() + head / 2 * c.head_dim..][..c.head_dim]);
        }
    }
}

#[test]
fn a_gate_of_zero_halves_the_attention() {
    let mut weights = Weights::new(config(|_| ()));
    weights.set("layers.0.self_attn.g_proj.weight", |_| 0.0);
    let (mut heads, mut gated) = (Vec::new(), Vec::new());
    let model = weights.model();
    model
        .run(&mut State::new(model.config()), &tokens(20), &mut |edge, _, rows| match edge {
            Edge::Layer(0, LayerEdge::Heads) => heads = rows.to_vec(),
            Edge::Layer(0, LayerEdge::GatedHeads) => gated = rows.to_vec(),
            _ => {}
        })
        .unwrap();
    assert!(heads.iter().zip(&gated).all(|(a, b)| *b == a / 2.0));
}

#[test]
fn taps_see_every_edge_with_its_positions() {
    let weights = Weights::new(config(|_| ()));
    let model = weights.model();
    let mut state = State::new(model.config());
    model.forward(&mut state, &tokens(7)).unwrap();
    let mut seen = Vec::new();
    let mut hidden = Vec::new();
    model
        .run(&mut state.clone(), &tokens(300), &mut |edge, position, rows| {
            seen.push((edge, position));
            if edge == Edge::FinalNorm {
                hidden.extend_from_slice(rows);
            }
        })
        .unwrap();
    // 300 tokens are a chunk of 256 and the rest, each with 16 edges per layer and two more.
    assert_eq!(seen.len(), 2 * (4 * 16 + 2));
    assert_eq!(seen.first(), Some(&(Edge::Embedding, 7)));
    assert_eq!(seen.last(), Some(&(Edge::FinalNorm, 7 + 256)));
    let last = model.forward_last(&mut state.clone(), &tokens(300)).unwrap();
    assert_eq!(last, hidden[hidden.len() - 48..]);
    assert_eq!(hidden, model.forward(&mut state, &tokens(300)).unwrap());
}

#[test]
fn bf16_arithmetic_rounds_what_leaves_a_step() {
    let weights = Weights::new(config(|_| ()));
    let model = weights.rounded(Rounding::Bf16);
    let tokens = tokens(40);
    let is_bf16 = |rows: &[f32]| rows.iter().all(|x| x.to_bits() & 0xffff == 0);
    model
        .run(&mut State::new(model.config()), &tokens, &mut |edge, _, rows| {
            use LayerEdge::{AfterAttention, Output, Scores};
            // Scores are seen as the products they are, before they are rounded.
            if matches!(edge, Edge::Layer(_, Scores)) {
                return;
            }
            let stream =
                matches!(edge, Edge::Embedding | Edge::Layer(_, AfterAttention) | Edge::Layer(_, Output));
            assert_eq!(is_bf16(rows), !stream, "{edge:?}");
        })
        .unwrap();
    let db = snr(&weights.logits(&tokens), &all_logits(&model, &tokens));
    assert!((25.0..55.0).contains(&db), "{db} dB");
}

#[test]
fn greedy_continues_and_stops() {
    let weights = Weights::new(config(|_| ()));
    let model = weights.model();
    let prompt = tokens(10);
    let twelve = model.greedy(&mut State::new(model.config()), &prompt, 12, |_| false).unwrap();
    assert_eq!(twelve.len(), 12);
    // Without a cache, from scratch each time.
    let mut text = prompt.clone();
    for token in &twelve {
        let logits = all_logits(&model, &text);
        assert_eq!(argmax(&logits[logits.len() - 96..]), *token);
        text.push(*token);
    }
    let first = twelve.iter().position(|t| *t == twelve[3]).unwrap();
    let stopped = model.greedy(&mut State::new(model.config()), &prompt, 12, |t| t == twelve[3]).unwrap();
    assert_eq!(stopped, twelve[..first]);
}

#[test]
fn logits_can_be_made_in_blocks_of_rows() {
    let weights = Weights::new(config(|_| ()));
    let model = weights.model();
    let hidden = model.forward(&mut State::new(model.config()), &tokens(3)).unwrap();
    let whole = model.logits(&hidden);
    let mut part = vec![0.0; 3 * 50];
    model.logits_rows(&hidden, 30..80, &mut part);
    for (part, whole) in part.chunks(50).zip(whole.chunks(96)) {
        assert_eq!(part, &whole[30..80]);
    }
}

#[test]
fn input_that_makes_no_sense_is_refused_and_changes_nothing() {
    let weights = Weights::new(config(|_| ()));
    let model = weights.model();
    let mut state = State::new(model.config());
    assert!(model.forward(&mut state, &[]).is_err());
    let error = model.forward(&mut state, &[5, 96]).unwrap_err();
    assert_eq!(error.to_string(), "token 96 at index 1 is not below 96");
    assert_eq!((state.position(), state.bytes()), (0, 0));
    let other = config(|j| j["head_dim"] = 32.into());
    assert!(model.forward(&mut State::new(&other), &[1]).is_err());
}

#[test]
fn parts_that_do_not_fit_are_named() {
    let weights = Weights::new(config(|_| ()));
    let build = |lookup: &dyn Fn(&str) -> Option<TensorView<'static>>| {
        Model::from_views(weights.config.clone(), Rounding::None, lookup).err().unwrap().to_string()
    };
    assert_eq!(build(&|_| None), "model.embedding.weight: expected shape [96, 48], found no such tensor");
    let vector = TensorView { name: "x", dtype: Dtype::F32, shape: &[3], bytes: &[0; 12] };
    assert!(build(&|_| Some(vector)).ends_with("expected shape [96, 48], found shape [3]"));
}

#[test]
fn memory_of_sliding_layers_is_bounded() {
    let weights = Weights::new(config(|j| {
        j["layer_types"] = ["sliding_attention"; 4].to_vec().into();
    }));
    let model = weights.model();
    let mut state = State::new(model.config());
    let mut most = 0;
    for _ in 0..40 {
        model.forward(&mut state, &tokens(30)).unwrap();
        most = most.max(state.bytes());
    }
    // Four layers, two key heads, keys and values of 16: well below 1200 positions.
    assert!(most <= 4 * 2 * 2 * 16 * 4 * 128, "{most}");
}

/// Fed what the model itself feeds its layers, in pieces that cross the window, every layer gives the bits
/// that it gives in the whole.
#[test]
fn one_layer_alone_is_the_layer_of_the_whole() {
    let weights = Weights::new(config(|_| {}));
    let model = weights.model();
    let (mut state, mut alone) = (State::new(model.config()), State::new(model.config()));
    let mut compared = 0;
    for piece in tokens(50).chunks(17) {
        let mut rows = Vec::new();
        model
            .run(&mut state, piece, &mut |edge, position, now| match edge {
                Edge::Embedding => rows = now.to_vec(),
                Edge::Layer(i, LayerEdge::Output) => {
                    model.run_layer(i, &mut alone, position, &mut rows, &mut |_, _| {});
                    assert_eq!(rows, now, "layer {i} at {position}");
                    compared += 1;
                }
                _ => {}
            })
            .unwrap();
    }
    assert_eq!(compared, 3 * model.config().num_hidden_layers());
}
