//! A model put together from parts.

use super::attention::Heads;
use super::rope::{Angles, Rope};
use super::{Embedding, FloatEmbedding, FloatLinear, Gelu, Linear, Rounding};
use crate::error::{InputError, Result};
use crate::spark::{LayerType, Module, SparkConfig, TensorSpec, tensor_specs};
use crate::tensor::TensorView;

/// The parts of one layer. Norm weights are `[hidden]`.
pub struct LayerParts<'a> {
    /// Weight of the norm before the attention.
    pub input_norm: Vec<f32>,
    /// Queries, keys and values, in this order.
    pub qkv: Box<dyn Linear + 'a>,
    /// One gate per query head.
    pub head_gate: Box<dyn Linear + 'a>,
    /// From the heads back to the residual stream.
    pub out: Box<dyn Linear + 'a>,
    /// Weight of the norm before the MLP.
    pub post_attention_norm: Vec<f32>,
    /// The half of the MLP that goes through GELU.
    pub mlp_gate: Box<dyn Linear + 'a>,
    /// The half of the MLP that is multiplied by it.
    pub mlp_up: Box<dyn Linear + 'a>,
    /// From the MLP back to the residual stream.
    pub mlp_down: Box<dyn Linear + 'a>,
}

/// The parts of a model.
pub struct ModelParts<'a> {
    /// The architecture.
    pub config: SparkConfig,
    /// Token embeddings.
    pub embedding: Box<dyn Embedding + 'a>,
    /// One for each layer of the configuration.
    pub layers: Vec<LayerParts<'a>>,
    /// Weight of the last norm.
    pub final_norm: Vec<f32>,
    /// From the last norm to logits.
    pub head: Box<dyn Linear + 'a>,
    /// Where to round.
    pub rounding: Rounding,
}

/// A model that can run.
pub struct Model<'a> {
    pub(super) parts: ModelParts<'a>,
    pub(super) heads: Heads,
    pub(super) rope_sliding: Option<Rope>,
    pub(super) rope_full: Option<Rope>,
    pub(super) gelu: Gelu,
}

impl<'a> Model<'a> {
    /// Checks that the parts fit together.
    ///
    /// # Errors
    /// The first part of a shape that the configuration does not call for.
    pub fn new(parts: ModelParts<'a>) -> Result<Self> {
        check(&parts)?;
        let config = &parts.config;
        let heads = Heads {
            queries: config.num_attention_heads,
            keys: config.num_key_value_heads,
            dim: config.head_dim,
        };
        let rope_sliding = config.rope_sliding.map(Rope::new);
        let rope_full = config.rope_full.map(Rope::new);
        Ok(Self { heads, rope_sliding, rope_full, parts, gelu: Gelu::Exact })
    }

    /// The model of a checkpoint: `lookup` finds tensors by their full names. Only the norms are
    /// copied; a tied head multiplies by the embedding.
    ///
    /// # Errors
    /// The first tensor that is missing, or is not what the configuration calls for.
    pub fn from_views(
        config: SparkConfig,
        rounding: Rounding,
        lookup: impl Fn(&str) -> Option<TensorView<'a>>,
    ) -> Result<Self> {
        Self::from_parts(config, rounding, lookup, |_| Ok(None), |_| Ok(None))
    }

    /// The model of an artifact: `packed` gives the linear of a module that is quantized, and `None`
    /// for one whose floats `lookup` finds; `packed_embedding` does the same for the embedding.
    ///
    /// # Errors
    /// The first tensor that is missing, or is not what the configuration calls for.
    pub fn from_parts(
        config: SparkConfig,
        rounding: Rounding,
        lookup: impl Fn(&str) -> Option<TensorView<'a>>,
        packed: impl Fn(&TensorSpec) -> Result<Option<Box<dyn Linear + 'a>>>,
        packed_embedding: impl Fn(&TensorSpec) -> Result<Option<Box<dyn Embedding + 'a>>>,
    ) -> Result<Self> {
        let specs = tensor_specs(&config);
        let find = |module: Module, layer: Option<usize>| -> Result<TensorView<'a>> {
            let spec = specs.iter().find(|s| s.module == module && s.layer == layer);
            let (name, shape) = spec.map_or(("", [].as_slice()), |s| (&s.name, &s.shape));
            let error = || InputError::default().subject(name).expected(format!("shape {shape:?}"));
            let view = lookup(name).ok_or_else(|| error().found("no such tensor"))?;
            if view.shape != shape {
                return Err(error().found(format!("shape {:?}", view.shape)).into());
            }
            Ok(view)
        };
        let linear = |module, layer| -> Result<Box<dyn Linear + 'a>> {
            let spec = specs.iter().find(|s| s.module == module && s.layer == layer);
            match spec.map(&packed).transpose()?.flatten() {
                Some(linear) => Ok(linear),
                None => Ok(Box::new(FloatLinear::new(find(module, layer)?, rounding)?)),
            }
        };
        let norm = |module, layer| -> Result<Vec<f32>> {
            let view = find(module, layer)?;
            // Checks type and bytes; a vector is a matrix of one row.
            FloatLinear::new(TensorView { shape: &[1, view.row_len()], ..view }, Rounding::None)?;
            let mut weight = vec![0.0; view.row_len()];
            view.decode_row(0, &mut weight);
            Ok(weight)
        };
        let layer = |i: usize| -> Result<LayerParts<'a>> {
            let i = Some(i);
            Ok(LayerParts {
                input_norm: norm(Module::InputNorm, i)?,
                qkv: linear(Module::QkvProj, i)?,
                head_gate: linear(Module::HeadGate, i)?,
                out: linear(Module::OutProj, i)?,
                post_attention_norm: norm(Module::PostAttentionNorm, i)?,
                mlp_gate: linear(Module::MlpGate, i)?,
                mlp_up: linear(Module::MlpUp, i)?,
                mlp_down: linear(Module::MlpDown, i)?,
            })
        };
        let head = if config.tie_word_embeddings { Module::Embedding } else { Module::LmHead };
        let embedding_spec = specs.iter().find(|s| s.module == Module::Embedding);
        let embedding: Box<dyn Embedding + 'a> =
            match embedding_spec.map(&packed_embedding).transpose()?.flatten() {
                Some(embedding) => embedding,
                None => Box::new(FloatEmbedding::new(find(Module::Embedding, None)?)?),
            };
        let parts = ModelParts {
            embedding,
            layers: (0..config.num_hidden_layers()).map(layer).collect::<Result<_>>()?,
            final_norm: norm(Module::FinalNorm, None)?,
            head: linear(head, None)?,
            config,
            rounding,
        };
        Self::new(parts)
    }

    /// The same with another form of GELU: what an engine makes of the model that has no other.
    #[must_use]
    pub fn with_gelu(self, gelu: Gelu) -> Self {
        Self { gelu, ..self }
    }

    /// The architecture.
    pub fn config(&self) -> &SparkConfig {
        &self.parts.config
    }

    /// Where the model rounds.
    pub fn rounding(&self) -> Rounding {
        self.parts.rounding
    }

    /// The linear from final-norm hidden states to logits.
    pub fn head(&self) -> &(dyn Linear + 'a) {
        &*self.parts.head
    }

    /// Cosines and sines that the layers of a type turn queries and keys by.
    pub(crate) fn angles(&self, kind: LayerType, positions: std::ops::Range<usize>) -> Option<Angles> {
        self.rope(kind).map(|rope| rope.angles(positions))
    }

    pub(super) fn rope(&self, kind: LayerType) -> Option<&Rope> {
        match kind {
            LayerType::Sliding => self.rope_sliding.as_ref(),
            LayerType::Full => self.rope_full.as_ref(),
        }
    }
}

fn check(parts: &ModelParts<'_>) -> Result<()> {
    let c = &parts.config;
    let shape = |subject: String, found: [usize; 2], expected: [usize; 2]| match found == expected {
        true => Ok(()),
        false => Err(InputError::default()
            .subject(subject)
            .expected(format!("shape {expected:?}"))
            .found(format!("shape {found:?}"))),
    };
    let linear = |subject: String, l: &dyn Linear, out: usize, k: usize| {
        shape(subject, [l.out_features(), l.in_features()], [out, k])
    };
    let (h, f, q) = (c.hidden_size, c.intermediate_size, c.q_rows());
    let e = &parts.embedding;
    shape("embedding".to_owned(), [e.vocab_size(), e.hidden_size()], [c.vocab_size, h])?;
    if parts.layers.len() != c.num_hidden_layers() {
        let (expected, found) = (c.num_hidden_layers(), parts.layers.len());
        return Err(InputError::default().subject("layers").expected(expected).found(found).into());
    }
    for (i, l) in parts.layers.iter().enumerate() {
        let name = |part: &str| format!("layer {i}: {part}");
        shape(name("input_layernorm"), [1, l.input_norm.len()], [1, h])?;
        linear(name("q_k_v_proj"), &*l.qkv, q + 2 * c.kv_rows(), h)?;
        linear(name("g_proj"), &*l.head_gate, c.num_attention_heads, h)?;
        linear(name("out_proj"), &*l.out, h, q)?;
        shape(name("post_attention_layernorm"), [1, l.post_attention_norm.len()], [1, h])?;
        linear(name("gate_proj"), &*l.mlp_gate, f, h)?;
        linear(name("up_proj"), &*l.mlp_up, f, h)?;
        linear(name("down_proj"), &*l.mlp_down, h, f)?;
    }
    shape("norm".to_owned(), [1, parts.final_norm.len()], [1, h])?;
    linear("head".to_owned(), &*parts.head, c.vocab_size, h)?;
    Ok(())
}
