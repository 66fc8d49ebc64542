//! Checkpoints as GGUF files, the way `conversion/spark2_5.py` of llama.cpp writes them: inputs of tests,
//! and what llama.cpp quantizes further. It shares no code with the reader of spark-convert.

mod blocks;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Pair {
    /// A u32.
    U32(u32),
    /// An f32.
    F32(f32),
    /// Text.
    Text(String),
    /// A list of booleans.
    Bools(Vec<bool>),
    /// A list of i32.
    Numbers(Vec<i32>),
    /// A list of texts.
    Texts(Vec<String>),
}

/// What matrices are stored as. Norms are F32 whatever is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Four bytes.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// 32 codes of 8 bits and a scale.
    Q8_0,
    /// Q4_K, and Q6_K for the tensors that llama.cpp's Q4_K_M gives more bits. Rows have to be multiples
    /// of 256.
    #[value(name = "q4-k-m")]
    Q4KM,
}

/// Types by their number in `enum ggml_type`.
mod id {
    pub(super) const F32: u32 = 0;
    pub(super) const F16: u32 = 1;
    pub(super) const Q8_0: u32 = 8;
    pub(super) const Q4_K: u32 = 12;
    pub(super) const Q6_K: u32 = 14;
    pub(super) const BF16: u32 = 30;
}

/// A tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its name in the file.
    pub name: String,
    /// Its number in `enum ggml_type`.
    pub kind: u32,
    /// Dimensions, slowest first.
    pub shape: Vec<u64>,
    /// Its data.
    pub bytes: Vec<u8>,
}

/// A whole file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gguf {
    /// Key-value pairs.
    pub pairs: Vec<(String, Pair)>,
    /// Tensors, in order of their data.
    pub tensors: Vec<Tensor>,
}

const ALIGNMENT: usize = 32;

impl Kind {
    /// The type of a tensor of a model of so many layers.
    fn id(self, name: &str, layers: u32, shape: &[usize]) -> u32 {
        match self {
            _ if shape.len() < 2 => id::F32,
            Self::F32 => id::F32,
            Self::F16 => id::F16,
            Self::Bf16 => id::BF16,
            Self::Q8_0 => id::Q8_0,
            Self::Q4KM if has_more_bits(name, layers) => id::Q6_K,
            Self::Q4KM => id::Q4_K,
        }
    }
}

/// Which tensors of a Q4_K_M file are Q6_K: the embedding (or head), and of an eighth of the layers at
/// either end and every third between them `attn_qkv` and `ffn_down` (`llama-quant.cpp`).
fn has_more_bits(name: &str, layers: u32) -> bool {
    let Some((layer, part)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
        return true;
    };
    let Ok(layer) = layer.parse::<u32>() else { return true };
    let eighth = layers / 8;
    let chosen = layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2;
    chosen && ["attn_qkv.weight", "ffn_down.weight"].contains(&part)
}

fn encode(kind: u32, values: &[f32]) -> Result<Vec<u8>> {
    Ok(match kind {
        id::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        id::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        id::BF16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        id::Q8_0 => blocks::encode(values, blocks::q8_0)?,
        id::Q4_K => blocks::encode(values, blocks::q4_k)?,
        id::Q6_K => blocks::encode(values, blocks::q6_k)?,
        other => bail!("type {other} is not written"),
    })
}

impl Gguf {
    /// The file of a checkpoint, without a vocabulary.
    pub fn of_checkpoint(dir: &Path, kind: Kind) -> Result<Self> {
        let config: Value = serde_json::from_slice(&fs::read(dir.join("config.json"))?)?;
        let mut file = Self { pairs: pairs(&config)?, tensors: Vec::new() };
        let layers = u32::try_from(config["num_hidden_layers"].as_u64().context("num_hidden_layers")?)?;
        let mut shards: Vec<_> = fs::read_dir(dir)?.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
        shards.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
        shards.sort();
        for path in shards {
            let bytes = fs::read(&path)?;
            let shard = SafeTensors::deserialize(&bytes)?;
            // In order of their data, as the converter goes through a shard.
            let mut tensors: Vec<_> = shard.iter().collect();
            tensors.sort_by_key(|(_, view)| view.data().as_ptr().addr());
            for (name, view) in tensors {
                let values = widened(view.dtype(), view.data())?;
                let name = tensor_name(name)?;
                let kind = kind.id(&name, layers, view.shape());
                let whole = |block: usize| view.shape().last().is_some_and(|row| row % block == 0);
                ensure!(
                    kind != id::Q4_K && kind != id::Q6_K || whole(256),
                    "{name}: rows are no multiple of 256"
                );
                file.tensors.push(Tensor {
                    name,
                    kind,
                    shape: view.shape().iter().map(|d| *d as u64).collect(),
                    bytes: encode(kind, &values)?,
                });
            }
        }
        Ok(file)
    }

    /// The bytes of the file, version 3.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, pair) in &self.pairs {
            text(&mut out, key);
            pair.write(&mut out);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            for dimension in tensor.shape.iter().rev() {
                out.extend(dimension.to_le_bytes());
            }
            out.extend(tensor.kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += tensor.bytes.len().next_multiple_of(ALIGNMENT);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
            out.extend(&tensor.bytes);
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out
    }

    /// How much of the file, at its end, is data of tensors.
    pub fn data_bytes(&self) -> usize {
        self.tensors.iter().map(|t| t.bytes.len().next_multiple_of(ALIGNMENT)).sum()
    }

    /// Changes, or adds, a pair.
    pub fn set(&mut self, key: &str, pair: Pair) {
        match self.pairs.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = pair,
            None => self.pairs.push((key.to_owned(), pair)),
        }
    }

    /// Takes a pair out.
    pub fn remove(&mut self, key: &str) {
        self.pairs.retain(|(k, _)| k != key);
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Pair {
    fn write(&self, out: &mut Vec<u8>) {
        let list = |out: &mut Vec<u8>, element: u32, count: usize| {
            out.extend(9u32.to_le_bytes());
            out.extend(element.to_le_bytes());
            out.extend((count as u64).to_le_bytes());
        };
        match self {
            Self::U32(n) => out.extend(4u32.to_le_bytes().into_iter().chain(n.to_le_bytes())),
            Self::F32(x) => out.extend(6u32.to_le_bytes().into_iter().chain(x.to_le_bytes())),
            Self::Text(value) => {
                out.extend(8u32.to_le_bytes());
                text(out, value);
            }
            Self::Bools(values) => {
                list(out, 7, values.len());
                out.extend(values.iter().map(|b| u8::from(*b)));
            }
            Self::Numbers(values) => {
                list(out, 5, values.len());
                out.extend(values.iter().flat_map(|n| n.to_le_bytes()));
            }
            Self::Texts(values) => {
                list(out, 8, values.len());
                values.iter().for_each(|value| text(out, value));
            }
        }
    }
}

fn widened(dtype: Dtype, bytes: &[u8]) -> Result<Vec<f32>> {
    Ok(match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::BF16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        other => bail!("{other:?} is not a float"),
    })
}

/// The table of `conversion/spark2_5.py` and of `gguf`'s tensor mapping.
fn tensor_name(name: &str) -> Result<String> {
    let fixed = [
        ("model.embedding.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ];
    if let Some((_, theirs)) = fixed.iter().find(|(ours, _)| *ours == name) {
        return Ok((*theirs).to_owned());
    }
    let parts = [
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_k_v_proj", "attn_qkv"),
        ("self_attn.g_proj", "attn_gate"),
        ("self_attn.out_proj", "attn_output"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    let inside = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let (layer, part) = inside.with_context(|| format!("{name}: not a tensor of a Spark checkpoint"))?;
    let part = part.strip_suffix(".weight").unwrap_or(part);
    let (_, theirs) =
        parts.iter().find(|(ours, _)| *ours == part).with_context(|| format!("{name}: unknown"))?;
    Ok(format!("blk.{layer}.{theirs}.weight"))
}

fn pairs(config: &Value) -> Result<Vec<(String, Pair)>> {
    let whole = |key: &str| -> Result<u32> {
        let value = config.get(key).and_then(Value::as_u64).with_context(|| format!("config.json: {key}"))?;
        Ok(u32::try_from(value)?)
    };
    let layer_types = config["layer_types"].as_array().context("config.json: layer_types")?;
    let head_dim = whole("head_dim")?;
    let rope =
        |kind: &str, key: &str| config["rope_parameters"][kind][key].as_f64().context("rope_parameters");
    let rotated = |kind: &str| -> Result<u32> {
        Ok((f64::from(head_dim) * rope(kind, "partial_rotary_factor")?) as u32)
    };
    let eps = config["rms_norm_eps"].as_f64().context("config.json: rms_norm_eps")?;
    let mut pairs = vec![
        ("general.architecture".to_owned(), Pair::Text("spark2_5".to_owned())),
        ("general.type".to_owned(), Pair::Text("model".to_owned())),
        // llama.cpp takes this for a model without a vocabulary.
        ("tokenizer.ggml.model".to_owned(), Pair::Text("none".to_owned())),
    ];
    for (key, id) in [("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")] {
        if let Some(id) = config.get(id).and_then(Value::as_u64) {
            pairs.push((format!("tokenizer.ggml.{key}_token_id"), Pair::U32(u32::try_from(id)?)));
        }
    }
    let sliding = layer_types.iter().map(|t| t == "sliding_attention").collect();
    for (key, pair) in [
        ("block_count", Pair::U32(whole("num_hidden_layers")?)),
        ("context_length", Pair::U32(whole("max_position_embeddings")?)),
        ("embedding_length", Pair::U32(whole("hidden_size")?)),
        ("feed_forward_length", Pair::U32(whole("intermediate_size")?)),
        ("vocab_size", Pair::U32(whole("vocab_size")?)),
        ("attention.head_count", Pair::U32(whole("num_attention_heads")?)),
        ("attention.head_count_kv", Pair::U32(whole("num_key_value_heads")?)),
        ("attention.key_length", Pair::U32(head_dim)),
        ("attention.value_length", Pair::U32(head_dim)),
        ("attention.layer_norm_rms_epsilon", Pair::F32(eps as f32)),
        ("attention.sliding_window", Pair::U32(whole("sliding_window")?)),
        ("attention.sliding_window_pattern", Pair::Bools(sliding)),
        ("rope.freq_base", Pair::F32(rope("full_attention", "rope_theta")? as f32)),
        ("rope.freq_base_swa", Pair::F32(rope("sliding_attention", "rope_theta")? as f32)),
        ("rope.dimension_count", Pair::U32(rotated("full_attention")?)),
        ("rope.dimension_count_swa", Pair::U32(rotated("sliding_attention")?)),
    ] {
        pairs.push((format!("spark2_5.{key}"), pair));
    }
    Ok(pairs)
}
