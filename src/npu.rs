//! The decode step as ONNX graphs for an NPU: one token, static shapes, explicit caches. Prefill graphs,
//! where they are asked for, take several tokens into the same caches with the same weights.
//!
//! A [`LogicalGraph`] says what is computed, by the names and shapes of the contract ([`manifest`] is
//! what a runtime reads of it). [`encode`] gives every tensor an encoding from calibrated ranges,
//! [`lower`] makes ONNX nodes of the two, and [`mod@write`] streams the weights of a checkpoint beside them.
//! What a graph consists of does not depend on a calibration, so a plan can be told without one.
//!
//! Consumers: Qualcomm QNN (QAIRT converter, AI Hub, ONNX Runtime's QNN execution provider) for the
//! quantized forms; ONNX Runtime for all.

pub mod aimet;
pub mod dialect;
pub mod encode;
pub mod encoding;
pub mod hdf5;
pub mod layout;
pub mod logical;
pub mod lower;
pub mod manifest;
pub mod options;
pub mod package;
pub mod runner;
pub mod samples;
pub mod step;
pub mod weights;
pub mod write;

use encode::{Blocked, Encodings};
use layout::Layout;
use logical::LogicalGraph;
use manifest::DecodeManifest;
use options::Options;

use crate::calibrate::{Range, Ranges};
use crate::checkpoint::CONFIG_FILE;
use crate::error::{Failure, InputError, Result};
use crate::spark::{LayerType, SparkConfig};
use crate::tensor::TensorView;

/// An export, planned: everything but the bytes of weights.
#[derive(Clone, Debug)]
pub struct Export {
    /// The architecture.
    pub config: SparkConfig,
    /// What was asked for.
    pub options: Options,
    /// Decode graphs in the order they are run.
    pub graphs: Vec<LogicalGraph>,
    /// Prefill graphs, none or as many as decode graphs with layers: each has the layers of the decode
    /// graph with its number, and the first of its weights.
    pub prefill: Vec<LogicalGraph>,
    /// Where the constants of each decode graph lie; those of its prefill graph lie at the same offsets.
    pub layouts: Vec<Layout>,
    /// What masks hold, from the scores where texts were run.
    blocked: Blocked,
    /// Once there are ranges.
    encodings: Option<AllEncodings>,
}

/// One per graph.
#[derive(Clone, Debug)]
struct AllEncodings {
    decode: Vec<Encodings>,
    prefill: Vec<Encodings>,
}

/// Which of the two kinds of graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Decode,
    Prefill,
}

impl Export {
    /// Plans an export.
    ///
    /// # Errors
    /// When the options don't fit the model, or a file would be too large.
    pub fn plan(config: &SparkConfig, options: Options) -> Result<Self> {
        check(config, &options)?;
        let graphs = step::graphs(config, &options);
        let prefill = step::prefill_graphs(config, &options);
        let layouts = graphs.iter().map(|g| Layout::new(g, &options)).collect::<Result<_>>()?;
        let blocked = Blocked::new(config, &options, None);
        Ok(Self { config: config.clone(), options, graphs, prefill, layouts, blocked, encodings: None })
    }

    /// Takes in what texts have shown.
    ///
    /// # Panics
    /// When a site of the model was not calibrated.
    pub fn calibrate(&mut self, ranges: &Ranges) {
        self.blocked = Blocked::new(&self.config, &self.options, Some(ranges));
        if self.options.has_encodings() {
            let of = |graphs: &[LogicalGraph]| -> Vec<Encodings> {
                graphs.iter().map(|g| Encodings::new(g, &self.options, ranges, self.blocked)).collect()
            };
            self.encodings = Some(AllEncodings { decode: of(&self.graphs), prefill: of(&self.prefill) });
        }
    }

    /// Graphs of a phase in the order they are run.
    fn graphs_of(&self, phase: Phase) -> &[LogicalGraph] {
        match phase {
            Phase::Decode => &self.graphs,
            Phase::Prefill => &self.prefill,
        }
    }

    /// Encodings of a graph, in it or beside it; `None` where activations have none.
    ///
    /// # Panics
    /// When activations have encodings and the export is not calibrated.
    fn encodings(&self, phase: Phase, graph: usize) -> Option<&Encodings> {
        let encodings = self.encodings.as_ref().map(|all| match phase {
            Phase::Decode => &all.decode[graph],
            Phase::Prefill => &all.prefill[graph],
        });
        assert_eq!(encodings.is_some(), self.options.has_encodings(), "codes need ranges");
        encodings
    }

    /// What the runtime reads.
    ///
    /// # Panics
    /// When activations have encodings and the export is not calibrated.
    pub fn manifest(&self) -> DecodeManifest {
        manifest::decode_manifest(self)
    }

    /// What the masks of a layer type hold where a position is blocked.
    pub fn blocked(&self, kind: LayerType) -> f32 {
        self.blocked.of(kind)
    }

    /// Tensors whose range has no extent.
    pub fn degenerate(&self) -> Vec<String> {
        let of = |(graph, encodings): (&LogicalGraph, &Encodings)| {
            let tensor = |name: &String| format!("{}: {name}", graph.name);
            encodings.degenerate.iter().map(tensor).collect::<Vec<_>>()
        };
        let encodings = self.encodings.iter().flat_map(|all| &all.decode);
        self.graphs.iter().zip(encodings).flat_map(of).collect()
    }

    /// Bytes of all constants of weights.
    pub fn weight_bytes(&self) -> u64 {
        self.layouts.iter().flat_map(|l| &l.weights).map(layout::PlacedWeight::len_bytes).sum()
    }

    /// Bytes of the embedding file.
    pub fn embedding_bytes(&self) -> u64 {
        let element = if self.options.is_quantized() { 2 } else { 4 };
        self.config.vocab_size as u64 * self.config.hidden_size as u64 * element
    }

    /// Bytes that a step reads: all weights, and a row of the embedding.
    pub fn bytes_per_token(&self) -> u64 {
        self.weight_bytes() + self.embedding_bytes() / self.config.vocab_size as u64
    }

    /// Bytes of all data files, the embedding and samples.
    pub fn data_bytes(&self) -> u64 {
        let samples = if self.options.samples { samples::bytes(&self.graphs) } else { 0 };
        let prefill = self.prefill.iter().zip(&self.layouts);
        let prefill: u64 = prefill.map(|(graph, layout)| layout.bytes_of_first(graph.weights.len())).sum();
        let decode: u64 = self.layouts.iter().map(|l| l.file_bytes).sum();
        decode + prefill + self.embedding_bytes() + samples
    }
}

/// Refuses options that don't fit the model.
fn check(config: &SparkConfig, options: &Options) -> Result<()> {
    let longest = config.max_position_embeddings;
    if options.context < 2 || options.context > longest {
        return Err(Failure::usage(format!(
            "--context {}: expected 2 to {longest}, the positions the model was made for",
            options.context
        )));
    }
    if let Some(rows) = options.prefill.filter(|rows| *rows < 2 || *rows > options.context) {
        return Err(Failure::usage(format!(
            "--prefill {rows}: expected 2 to {}, the tokens of the context",
            options.context
        )));
    }
    if config.layer_types.contains(&LayerType::Sliding) && config.sliding_window < 2 {
        return Err(InputError::file(CONFIG_FILE)
            .subject("sliding_window")
            .expected("at least 2 for an export: a window of one has no cache")
            .found(config.sliding_window)
            .into());
    }
    Ok(())
}

/// The range of a whole table. Every row of the embedding can come in, whatever the texts hold.
///
/// # Errors
/// When an element is NaN or infinite.
pub fn table_range(table: TensorView<'_>) -> Result<Range> {
    use rayon::prelude::*;
    let of = |r: usize| {
        let mut row = vec![0.0; table.row_len()];
        table.decode_row(r, &mut row);
        Range::of(&row)
    };
    let range =
        (0..table.rows()).into_par_iter().map(of).try_reduce(|| Range::EMPTY, |a, b| Some(a.union(b)));
    range.ok_or_else(|| {
        InputError::default()
            .subject(table.name)
            .expected("finite weights")
            .found("NaN or infinity")
            .hint("the checkpoint is damaged, or training diverged")
            .into()
    })
}

/// A small architecture of one sliding and one full layer.
#[cfg(test)]
fn test_config(edit: impl FnOnce(&mut serde_json::Value)) -> SparkConfig {
    let mut json = serde_json::json!({
        "model_type": "spark2_5", "architectures": ["Spark2_5ForCausalLM"],
        "hidden_act": "gelu", "attention_bias": false, "mlp_bias": false,
        "headwise_attn_output_gate": true, "gate_attn_act_mode": "sigmoid",
        "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 96, "sliding_window": 8, "max_position_embeddings": 4096,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 5_000_000},
            "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000}
        },
        "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
    });
    edit(&mut json);
    SparkConfig::parse(&json).unwrap()
}

/// Ranges of every site of a configuration: all of them from -1 to 2, unless `of` says otherwise.
#[cfg(test)]
fn test_ranges(config: &SparkConfig, of: impl Fn(crate::calibrate::Site) -> Option<Range>) -> Ranges {
    use crate::calibrate::{LayerSite, Site};
    let layers = (0..config.num_hidden_layers())
        .flat_map(|i| LayerSite::ALL.into_iter().map(move |site| Site::Layer(i, site)));
    let sites = layers.chain([Site::Embedding, Site::FinalNorm, Site::Logits]);
    Ranges::from_sites(sites.map(|site| (site, of(site).unwrap_or(Range::new(-1.0, 2.0)))))
}
