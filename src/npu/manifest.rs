//! `manifest.json`: the contract between the graphs of an export and a runtime. What each input means,
//! how reals become codes, who owns the caches and by which rule.

mod prefill;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use prefill::{PrefillInfo, PrefillMask};

use super::dialect::Dialect;
use super::encode::Encodings;
use super::encoding::{Bits, Encoding};
use super::logical::{LogicalGraph, Port, Role};
use super::lower::{element, float_nodes};
use super::options::Options;
use super::step::{capacity, type_word};
use super::weights::{Coding, Weight};
use super::{Export, Phase};
use crate::spark::{LayerType, SparkConfig};

/// Name of the file.
pub const DECODE_MANIFEST_FILE: &str = "manifest.json";
/// Name of the file with the rows for `hidden_in`.
pub const EMBEDDING_FILE: &str = "embed_tokens.bin";
/// Name of the model in the directory of a graph.
pub const MODEL_FILE: &str = "model.onnx";
/// Name of its external data.
pub const DATA_FILE: &str = "model.data";
/// Name of the encodings beside the model of the aimet dialect.
pub const ENCODINGS_FILE: &str = "model.encodings";

const FORMAT: &str = "spark-npu-decode";
const VERSION: u32 = 1;

/// The file. Readers pass over keys they don't know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecodeManifest {
    /// `spark-npu-decode`.
    pub format: String,
    /// Of the format.
    pub version: u32,
    /// The architecture.
    pub model: ModelInfo,
    /// `w8a16`, `w8`, `w16a16`, `w8a8` or `fp32`: of what the graphs hold.
    pub precision: String,
    /// `qdq23`, `qdq21`, `float18` or `aimet`: the form of the graphs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dialect: Option<String>,
    /// The precision that the encodings beside float graphs give, of the aimet dialect. Tensors then are
    /// float32 and have the encoding that a converter is to give them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encodings_precision: Option<String>,
    /// Of the graphs.
    pub opset: i64,
    /// `quantized` or `float`: inputs and outputs.
    pub io: String,
    /// Tokens visible to a full layer, the current one included.
    pub context: usize,
    /// In the order they are run.
    pub graphs: Vec<GraphInfo>,
    /// By layer type: `sliding`, `full`.
    pub rope: BTreeMap<String, RopeInfo>,
    /// By layer type.
    pub masks: BTreeMap<String, MaskInfo>,
    /// By layer number.
    pub caches: Vec<CacheInfo>,
    /// The rows for `hidden_in`.
    pub embedding: EmbeddingInfo,
    /// Graphs that take several tokens, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<PrefillInfo>,
}

/// The architecture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct ModelInfo {
    pub architecture: String,
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    pub vocab: usize,
    pub sliding_window: usize,
    pub rms_eps: f64,
    /// `sliding` or `full`, by layer number.
    pub layer_types: Vec<String>,
    pub tied_embeddings: bool,
}

/// A graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GraphInfo {
    /// Name, also of its directory.
    pub name: String,
    /// The model, relative to the manifest.
    pub file: String,
    /// Its external data.
    pub data: String,
    /// Layers it holds.
    pub layers: Vec<usize>,
    /// Whether it ends in logits.
    pub head: bool,
    /// Inputs.
    pub inputs: Vec<TensorInfo>,
    /// Outputs.
    pub outputs: Vec<TensorInfo>,
    /// Weights that are more precise than the precision says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub high_precision_weights: Vec<String>,
    /// Nodes of a quantized graph that are float.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub float_nodes: Vec<String>,
    /// Encodings beside the model, of the aimet dialect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encodings: Option<String>,
    /// The graph whose data file begins with all the bytes of this one's: a runtime may give both the
    /// longer one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_is_start_of: Option<String>,
}

/// An input or an output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Element type, as numpy calls it.
    pub dtype: String,
    /// `hidden`, `rope_cos`, `rope_sin`, `mask`, `key_cache`, `value_cache` or `logits`.
    pub role: String,
    /// The layer of a cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// The layer type of a rope or a mask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_type: Option<String>,
    /// How reals become codes, where they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<EncodingInfo>,
}

/// `real = (code - zero_point) * scale`, `code = clamp(round_half_even(real / scale) + zero_point)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EncodingInfo {
    /// Type of the codes.
    pub dtype: String,
    /// The exact f32, written as a double.
    pub scale: f64,
    /// The code of zero.
    pub zero_point: i64,
}

/// The smallest and the largest code of a type, as the manifest names it.
pub fn codes_of(dtype: &str) -> Option<(i64, i64)> {
    match dtype {
        "uint8" => Some((0, 255)),
        "int8" => Some((-128, 127)),
        "uint16" => Some((0, 65535)),
        "int16" => Some((-32768, 32767)),
        _ => None,
    }
}

impl From<Encoding> for EncodingInfo {
    fn from(e: Encoding) -> Self {
        Self {
            dtype: e.element.name().to_owned(),
            scale: f64::from(e.scale),
            zero_point: e.zero_point.into(),
        }
    }
}

/// Cosines and sines: `angle_j = p * theta^(-2j / rotary_dim)` for `j < rotary_dim / 2`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeInfo {
    /// Base.
    pub theta: f64,
    /// Dimensions of a head that are rotated.
    pub rotary_dim: usize,
    /// The input that takes the cosines.
    pub cos: String,
    /// The input that takes the sines.
    pub sin: String,
    /// `half`: pairs are `(j, j + rotary_dim / 2)`.
    pub pairing: String,
}

/// An additive mask.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MaskInfo {
    /// The input that takes it.
    pub input: String,
    /// Slots of the cache and the current token.
    pub length: usize,
    /// What stands where a position is seen: zero.
    pub attend: f64,
    /// What stands elsewhere.
    pub blocked: f64,
    /// Index of the current token.
    pub current_index: usize,
}

/// The caches of a layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CacheInfo {
    /// Layer number.
    pub layer: usize,
    /// `sliding` or `full`.
    #[serde(rename = "type")]
    pub kind: String,
    /// `ring` or `roll`.
    pub layout: String,
    /// `entry` or `cache`.
    pub returns: String,
    /// Slots.
    pub capacity: usize,
    /// Keys.
    pub key: CacheTensors,
    /// Values.
    pub value: CacheTensors,
}

/// The tensors of a cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CacheTensors {
    /// The cache as it goes in.
    pub input: String,
    /// What the graph returns.
    pub output: String,
    /// The axis of the slots.
    pub seq_axis: usize,
}

/// The rows for `hidden_in`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EmbeddingInfo {
    /// Name of the file.
    pub file: String,
    /// `float16` or `float32`.
    pub dtype: String,
    /// `[vocab, hidden]`.
    pub shape: [usize; 2],
}

/// The manifest of an export.
pub(super) fn decode_manifest(export: &Export) -> DecodeManifest {
    let (config, options) = (&export.config, &export.options);
    let kinds: Vec<LayerType> = [LayerType::Sliding, LayerType::Full]
        .into_iter()
        .filter(|kind| config.layer_types.contains(kind))
        .collect();
    let by_type = |kind: &LayerType| type_word(*kind).to_owned();
    let rope = |kind: &LayerType| {
        let (word, parameters) = (by_type(kind), config.rope(*kind));
        let info = RopeInfo {
            theta: parameters.theta,
            rotary_dim: parameters.rotary_dims,
            cos: format!("rope_cos_{word}"),
            sin: format!("rope_sin_{word}"),
            pairing: "half".to_owned(),
        };
        (word, info)
    };
    let mask = |kind: &LayerType| {
        let (word, capacity) = (by_type(kind), capacity(config, options, *kind));
        let info = MaskInfo {
            input: format!("mask_{word}"),
            length: capacity + 1,
            attend: 0.0,
            blocked: export.blocked(*kind).into(),
            current_index: capacity,
        };
        (word, info)
    };
    let quantized = options.is_quantized();
    DecodeManifest {
        format: FORMAT.to_owned(),
        version: VERSION,
        model: ModelInfo {
            architecture: "Spark2_5ForCausalLM".to_owned(),
            layers: config.num_hidden_layers(),
            hidden: config.hidden_size,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            intermediate: config.intermediate_size,
            vocab: config.vocab_size,
            sliding_window: config.sliding_window,
            rms_eps: config.rms_norm_eps,
            layer_types: config.layer_types.iter().map(by_type).collect(),
            tied_embeddings: config.tie_word_embeddings,
        },
        precision: options.stored().name().to_owned(),
        dialect: Some(options.dialect.name().to_owned()),
        encodings_precision: is_aimet(options).then(|| options.precision.name().to_owned()),
        opset: options.dialect.opset(),
        io: if quantized { "quantized" } else { "float" }.to_owned(),
        context: options.context,
        graphs: (0..export.graphs.len()).map(|i| graph_info(export, Phase::Decode, i)).collect(),
        rope: kinds.iter().map(rope).collect(),
        masks: kinds.iter().map(mask).collect(),
        caches: (0..config.num_hidden_layers()).map(|i| cache_info(config, options, i)).collect(),
        embedding: EmbeddingInfo {
            file: EMBEDDING_FILE.to_owned(),
            dtype: if quantized { "float16" } else { "float32" }.to_owned(),
            shape: [config.vocab_size, config.hidden_size],
        },
        prefill: prefill::info(export, &kinds),
    }
}

fn is_aimet(options: &Options) -> bool {
    options.dialect == Dialect::Aimet
}

fn graph_info(export: &Export, phase: Phase, index: usize) -> GraphInfo {
    let (graph, options) = (&export.graphs_of(phase)[index], &export.options);
    let encodings = export.encodings(phase, index);
    let tensor = |port: &Port| tensor_info(graph, port, options, encodings);
    let precise = |w: &&Weight| {
        let coding = Coding::stored(w.role, options);
        options.stored().has_int8_weights() && coding == Coding::Symmetric(Bits::Sixteen)
    };
    GraphInfo {
        name: graph.name.clone(),
        file: format!("{}/{MODEL_FILE}", graph.name),
        data: format!("{}/{DATA_FILE}", graph.name),
        layers: graph.layers.clone().collect(),
        head: graph.head,
        inputs: graph.inputs.iter().map(tensor).collect(),
        outputs: graph.outputs.iter().map(tensor).collect(),
        high_precision_weights: graph.weights.iter().filter(precise).map(|w| w.name.clone()).collect(),
        float_nodes: match options.is_quantized() {
            true => float_nodes(graph, options.dialect),
            false => Vec::new(),
        },
        encodings: is_aimet(options).then(|| format!("{}/{ENCODINGS_FILE}", graph.name)),
        data_is_start_of: match phase {
            Phase::Decode => None,
            Phase::Prefill => Some(export.graphs[index].name.clone()),
        },
    }
}

fn tensor_info(
    graph: &LogicalGraph,
    port: &Port,
    options: &Options,
    encodings: Option<&Encodings>,
) -> TensorInfo {
    let tensor = graph.tensor(port.tensor);
    let encoding = encodings.map(|e| e.of(port.tensor));
    let (role, layer, kind) = match port.role {
        Role::Hidden => ("hidden", None, None),
        Role::RopeCos(kind) => ("rope_cos", None, Some(kind)),
        Role::RopeSin(kind) => ("rope_sin", None, Some(kind)),
        Role::Mask(kind) => ("mask", None, Some(kind)),
        Role::KeyCache(layer) => ("key_cache", Some(layer), None),
        Role::ValueCache(layer) => ("value_cache", Some(layer), None),
        Role::Logits => ("logits", None, None),
    };
    TensorInfo {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        dtype: element(encoding.filter(|_| options.is_quantized())).name().to_owned(),
        role: role.to_owned(),
        layer,
        layer_type: kind.map(|kind| type_word(kind).to_owned()),
        encoding: encoding.map(EncodingInfo::from),
    }
}

fn cache_info(config: &SparkConfig, options: &Options, layer: usize) -> CacheInfo {
    let kind = config.layer_types[layer];
    let tensors = |what: &str, seq_axis: usize| CacheTensors {
        input: format!("past_{what}_{layer}_in"),
        output: format!("past_{what}_{layer}_out"),
        seq_axis,
    };
    CacheInfo {
        layer,
        kind: type_word(kind).to_owned(),
        layout: options.cache(kind).layout().to_owned(),
        returns: options.cache(kind).returns().to_owned(),
        capacity: capacity(config, options, kind),
        key: tensors("key", 3),
        value: tensors("value", 2),
    }
}
