//! The places whose values an export encodes, and how the taps of the forward pass fill them.

use std::collections::BTreeMap;
use std::fmt;

use super::Range;
use crate::error::{InputError, Result};
use crate::runtime::{Angles, Edge, LayerEdge, Model};
use crate::spark::{LayerType, SparkConfig};

/// A place in the model, in the order they are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Site {
    /// Rows of the embedding.
    Embedding,
    /// Inside a layer.
    Layer(usize, LayerSite),
    /// What the head multiplies.
    FinalNorm,
    /// What it gives.
    Logits,
}

/// A place inside a layer, in the order they are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LayerSite {
    /// Input of the q, k, v and gate projections.
    InputNorm,
    /// Queries as projected, not scaled.
    Queries,
    /// Keys as projected.
    Keys,
    /// Values.
    Values,
    /// Queries times cosines and sines: all four products of a rotation.
    QueryProducts,
    /// Keys times cosines and sines.
    KeyProducts,
    /// Queries after the rotary embedding, not scaled; dimensions that are not rotated included.
    RotatedQueries,
    /// Keys after the rotary embedding.
    RotatedKeys,
    /// Gates before their activation.
    HeadGate,
    /// Scaled scores of the keys that their query sees.
    Scores,
    /// Weighted sums of values.
    Heads,
    /// The same times the gates.
    GatedHeads,
    /// What the attention adds to the residual stream.
    AttentionOutput,
    /// The residual stream between attention and MLP.
    AfterAttention,
    /// Input of the MLP.
    PostAttentionNorm,
    /// The gate projection.
    MlpGate,
    /// The same after GELU.
    MlpActivated,
    /// The up projection.
    MlpUp,
    /// Their product.
    MlpProduct,
    /// What the MLP adds to the residual stream.
    MlpOutput,
    /// The residual stream after the layer.
    Output,
}

impl LayerSite {
    /// All of them.
    pub const ALL: [Self; 21] = [
        Self::InputNorm,
        Self::Queries,
        Self::Keys,
        Self::Values,
        Self::QueryProducts,
        Self::KeyProducts,
        Self::RotatedQueries,
        Self::RotatedKeys,
        Self::HeadGate,
        Self::Scores,
        Self::Heads,
        Self::GatedHeads,
        Self::AttentionOutput,
        Self::AfterAttention,
        Self::PostAttentionNorm,
        Self::MlpGate,
        Self::MlpActivated,
        Self::MlpUp,
        Self::MlpProduct,
        Self::MlpOutput,
        Self::Output,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::InputNorm => "input norm",
            Self::Queries => "queries",
            Self::Keys => "keys",
            Self::Values => "values",
            Self::QueryProducts => "rotary products of queries",
            Self::KeyProducts => "rotary products of keys",
            Self::RotatedQueries => "rotated queries",
            Self::RotatedKeys => "rotated keys",
            Self::HeadGate => "head gate",
            Self::Scores => "scores",
            Self::Heads => "heads",
            Self::GatedHeads => "gated heads",
            Self::AttentionOutput => "attention output",
            Self::AfterAttention => "residual after attention",
            Self::PostAttentionNorm => "post-attention norm",
            Self::MlpGate => "MLP gate",
            Self::MlpActivated => "MLP gate after GELU",
            Self::MlpUp => "MLP up",
            Self::MlpProduct => "MLP product",
            Self::MlpOutput => "MLP output",
            Self::Output => "residual after the layer",
        }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedding => f.write_str("embedding"),
            Self::Layer(layer, site) => write!(f, "layer {layer}: {}", site.name()),
            Self::FinalNorm => f.write_str("final norm"),
            Self::Logits => f.write_str("logits"),
        }
    }
}

/// The ranges of one sequence, filled by the taps of its forward pass.
pub(super) struct Observer<'m> {
    model: &'m Model<'m>,
    /// By site.
    pub(super) ranges: BTreeMap<Site, Range>,
    /// The first site where a value was NaN or infinite.
    not_finite: Option<Site>,
    /// Cosines and sines of the piece that is passing, by layer type.
    angles: [Option<Angles>; 2],
    /// Columns of the gathered block, kept from call to call.
    block: Vec<f32>,
}

impl<'m> Observer<'m> {
    pub(super) fn new(model: &'m Model<'m>) -> Self {
        Self { model, ranges: BTreeMap::new(), not_finite: None, angles: [None, None], block: Vec::new() }
    }

    /// Takes in what a tap of the forward pass shows.
    pub(super) fn see(&mut self, edge: Edge, position: usize, rows: &[f32]) {
        let config = self.model.config();
        match edge {
            Edge::Embedding => {
                // The first edge of a piece: its positions are the same for every layer.
                let positions = position..position + rows.len() / config.hidden_size;
                self.angles = [LayerType::Sliding, LayerType::Full]
                    .map(|kind| self.model.angles(kind, positions.clone()));
                self.fold(Site::Embedding, rows);
            }
            Edge::FinalNorm => self.fold(Site::FinalNorm, rows),
            Edge::Layer(layer, edge) => self.see_layer(layer, edge, rows),
        }
    }

    fn see_layer(&mut self, layer: usize, edge: LayerEdge, rows: &[f32]) {
        let config = self.model.config();
        let site = |site| Site::Layer(layer, site);
        let plain = match edge {
            LayerEdge::Qkv => {
                let [q, k, v] = qkv_columns(config);
                self.fold_columns(site(LayerSite::Queries), rows, q);
                self.fold_columns(site(LayerSite::Keys), rows, k);
                self.fold_columns(site(LayerSite::Values), rows, v);
                return self.fold_products(layer, rows);
            }
            LayerEdge::Rotated => {
                let [q, k, _] = qkv_columns(config);
                self.fold_columns(site(LayerSite::RotatedQueries), rows, q);
                return self.fold_columns(site(LayerSite::RotatedKeys), rows, k);
            }
            LayerEdge::InputNorm => LayerSite::InputNorm,
            LayerEdge::HeadGate => LayerSite::HeadGate,
            LayerEdge::Scores => LayerSite::Scores,
            LayerEdge::Heads => LayerSite::Heads,
            LayerEdge::GatedHeads => LayerSite::GatedHeads,
            LayerEdge::AttentionOutput => LayerSite::AttentionOutput,
            LayerEdge::AfterAttention => LayerSite::AfterAttention,
            LayerEdge::PostAttentionNorm => LayerSite::PostAttentionNorm,
            LayerEdge::MlpGate => LayerSite::MlpGate,
            LayerEdge::MlpActivated => LayerSite::MlpActivated,
            LayerEdge::MlpUp => LayerSite::MlpUp,
            LayerEdge::MlpProduct => LayerSite::MlpProduct,
            LayerEdge::MlpOutput => LayerSite::MlpOutput,
            LayerEdge::Output => LayerSite::Output,
        };
        self.fold(site(plain), rows);
    }

    pub(super) fn fold(&mut self, site: Site, values: &[f32]) {
        match Range::of(values) {
            Some(range) => self.take(site, range),
            None => self.not_finite = self.not_finite.or(Some(site)),
        }
    }

    fn take(&mut self, site: Site, range: Range) {
        let known = self.ranges.entry(site).or_insert(Range::EMPTY);
        *known = known.union(range);
    }

    /// Folds some columns of rows of q, k and v.
    fn fold_columns(&mut self, site: Site, rows: &[f32], columns: std::ops::Range<usize>) {
        let config = self.model.config();
        let mut range = Range::EMPTY;
        for row in rows.chunks_exact(config.q_rows() + 2 * config.kv_rows()) {
            match Range::of(&row[columns.clone()]) {
                Some(seen) => range = range.union(seen),
                None => self.not_finite = self.not_finite.or(Some(site)),
            }
        }
        self.take(site, range);
    }

    /// The products of a rotation, `a cos`, `b sin`, `a sin`, `b cos` for every pair `(a, b)`: the
    /// forward pass has them in registers only, a graph stores each.
    fn fold_products(&mut self, layer: usize, rows: &[f32]) {
        let config = self.model.config();
        let index = usize::from(config.layer_types[layer] == LayerType::Full);
        let Some(angles) = self.angles[index].take() else { return };
        let [q, k, _] = qkv_columns(config);
        let mut block = std::mem::take(&mut self.block);
        for (t, row) in rows.chunks_exact(config.q_rows() + 2 * config.kv_rows()).enumerate() {
            let (cos, sin) = angles.at(t);
            for (site, columns) in [(LayerSite::QueryProducts, &q), (LayerSite::KeyProducts, &k)] {
                block.clear();
                for head in row[columns.clone()].chunks_exact(config.head_dim) {
                    let (a, b) = head[..2 * cos.len()].split_at(cos.len());
                    for half in [a, b] {
                        block.extend(half.iter().zip(cos).map(|(x, c)| x * c));
                        block.extend(half.iter().zip(sin).map(|(x, s)| x * s));
                    }
                }
                self.fold(Site::Layer(layer, site), &block);
            }
        }
        self.block = block;
        self.angles[index] = Some(angles);
    }

    /// The ranges, unless something was not finite.
    pub(super) fn finish(self) -> Result<BTreeMap<Site, Range>> {
        match self.not_finite {
            None => Ok(self.ranges),
            Some(site) => Err(InputError::default()
                .subject(site)
                .expected("finite activations")
                .found("NaN or infinity")
                .hint("the checkpoint is damaged, or training diverged")
                .into()),
        }
    }
}

/// Columns of queries, keys and values in a row of all three.
fn qkv_columns(config: &SparkConfig) -> [std::ops::Range<usize>; 3] {
    let (q, kv) = (config.q_rows(), config.kv_rows());
    [0..q, q..q + kv, q + kv..q + 2 * kv]
}
