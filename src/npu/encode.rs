//! From calibrated ranges to the encoding of every tensor of a graph.
//!
//! Tensors between which elements only move share an encoding, whose range holds all their values: a
//! runtime moves codes, not reals. Entries of caches are the exception: they are signed, since they are
//! the second operand of a product, and lie on the same grid as the unsigned tensor they come from, so
//! that re-coding them is a shift by a constant. Where nothing is re-coded, the cache and what it comes
//! from have one unsigned encoding with zero in the middle.

use std::collections::BTreeMap;

use super::encoding::{Bits, Encoding};
use super::logical::{LogicalGraph, Op, TensorId, Values};
use super::options::Options;
use crate::calibrate::{LayerSite, Range, Ranges, Site};
use crate::spark::{LayerType, SparkConfig};

/// How far ranges are widened: at 16 bits a clipped value costs far more than a coarser step.
pub const WIDENING: f32 = 1.25;

/// How far below the lowest score a blocked position lies: `exp(-24)` is 4e-11, less than half a step
/// of a 16-bit probability.
const MARGIN: f32 = 24.0;

/// What blocks a position where masks are floats: its exponential is zero.
const FLOAT_BLOCKED: f32 = -1e4;

/// What the mask of each layer type holds where a position is blocked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Blocked {
    sliding: f32,
    full: f32,
}

impl Blocked {
    /// From the scores: a blocked score must come out at or below `MARGIN` under the lowest there is,
    /// and no further, since the mask shares a range with the scores. A decode step blocks slots that were
    /// never written, whose score is zero; prefill blocks entries of any score, the highest included.
    /// Without ranges the mask is a float.
    pub fn new(config: &SparkConfig, options: &Options, ranges: Option<&Ranges>) -> Self {
        let of = |kind: LayerType| {
            let Some(ranges) = ranges else { return FLOAT_BLOCKED };
            let layers = config.layer_types.iter().enumerate().filter(|(_, of)| **of == kind);
            let below = |scores: Range| match options.prefill {
                Some(_) => scores.max.max(0.0) - scores.min,
                None => -scores.min,
            };
            let below = layers.map(|(i, _)| below(scores(ranges, i))).fold(0.0, f32::max);
            -(MARGIN + below).ceil()
        };
        Self { sliding: of(LayerType::Sliding), full: of(LayerType::Full) }
    }

    /// For a layer type.
    pub fn of(self, kind: LayerType) -> f32 {
        match kind {
            LayerType::Sliding => self.sliding,
            LayerType::Full => self.full,
        }
    }
}

fn scores(ranges: &Ranges, layer: usize) -> Range {
    ranges.get(Site::Layer(layer, LayerSite::Scores)).widened(WIDENING)
}

/// The encoding of every tensor of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Encodings {
    of: Vec<Encoding>,
    /// The tensor that stands for all that share its encoding.
    leader: Vec<usize>,
    /// Tensors whose range has no extent, and that got a scale all the same.
    pub degenerate: Vec<String>,
}

impl Encodings {
    /// Works the encodings of a graph out.
    ///
    /// # Panics
    /// When a site of the graph was not calibrated, or options are those of a float export.
    pub fn new(graph: &LogicalGraph, options: &Options, ranges: &Ranges, blocked: Blocked) -> Self {
        let bits = options.precision.activation_bits().expect("the activations are codes");
        let leader = groups(graph);
        let mut merged: BTreeMap<usize, Group> = BTreeMap::new();
        for (i, tensor) in graph.tensors.iter().enumerate() {
            let group = merged.entry(leader[i]).or_default();
            match tensor.values {
                Values::Moved => {}
                Values::Cache => group.is_cache = true,
                Values::Seen(site, factor) => {
                    group.see(ranges.get(site).widened(WIDENING).times(factor));
                }
                Values::Silu(site) => group.see(silu(ranges.get(site).widened(WIDENING))),
                Values::MaskedScores(layer) => {
                    let Range { min, max } = scores(ranges, layer);
                    group.see(Range::new(min - MARGIN, max));
                }
                Values::Unit => group.fixed = Some(Encoding::unit(bits)),
                Values::Probability => group.fixed = Some(Encoding::probability(bits)),
                Values::Sigmoid => group.fixed = Some(Encoding::sigmoid(bits)),
                Values::Mask(kind) => group.fixed = Some(Encoding::mask(blocked.of(kind), bits)),
            }
        }
        let mut degenerate = Vec::new();
        let mut encodings: BTreeMap<usize, Encoding> = BTreeMap::new();
        // Caches first: they decide about the tensors they come from.
        for step in graph.steps.iter().filter(|step| step.op == Op::Recode) {
            let (from, to) = (leader[step.inputs[0].0], leader[step.output.0]);
            let amax = merged[&from].range.amax().max(merged[&to].range.amax());
            let signed = Encoding::signed(amax, bits).unwrap_or_else(|| {
                degenerate.push(graph.tensors[to].name.clone());
                unit_step(bits)
            });
            encodings.insert(from, signed.shifted(bits));
            encodings.insert(to, signed);
        }
        for (of, group) in &merged {
            encodings.entry(*of).or_insert_with(|| {
                let found = group.fixed.or_else(|| match group.is_cache {
                    true => Encoding::signed(group.range.amax(), bits).map(|e| e.shifted(bits)),
                    false => Encoding::asymmetric(group.range, bits),
                });
                found.unwrap_or_else(|| {
                    degenerate.push(graph.tensors[*of].name.clone());
                    unit_step(bits).shifted(bits)
                })
            });
        }
        let of = leader.iter().map(|leader| encodings[leader]).collect();
        Self { of, leader, degenerate }
    }

    /// Of a tensor.
    pub fn of(&self, tensor: TensorId) -> Encoding {
        self.of[tensor.0]
    }

    /// The tensor after which the encoding of another is named.
    pub fn leader(&self, tensor: TensorId) -> TensorId {
        TensorId(self.leader[tensor.0])
    }
}

/// For values that were never other than zero: any step does, and a whole one is the plainest.
fn unit_step(bits: Bits) -> Encoding {
    Encoding { element: bits.signed(), scale: 1.0 / f32::from(bits.largest()), zero_point: 0 }
}

#[derive(Clone, Copy, Debug)]
struct Group {
    fixed: Option<Encoding>,
    range: Range,
    is_cache: bool,
}

impl Default for Group {
    fn default() -> Self {
        Self { fixed: None, range: Range::EMPTY, is_cache: false }
    }
}

impl Group {
    fn see(&mut self, range: Range) {
        self.range = self.range.union(range);
    }
}

/// `g sigmoid(g)` has its minimum, -0.27846, at -1.27846; from there it falls on neither side.
fn silu(gate: Range) -> Range {
    let silu = |g: f32| g / (1.0 + (-g).exp());
    let ends = Range::new(silu(gate.min), silu(gate.max));
    let dip = if gate.min < -1.278 { -0.278_47 } else { ends.min };
    Range::new(ends.min.min(dip), ends.max.max(ends.min))
}

/// For every tensor the first of those it shares an encoding with.
fn groups(graph: &LogicalGraph) -> Vec<usize> {
    let mut parent: Vec<usize> = (0..graph.tensors.len()).collect();
    for step in graph.steps.iter().filter(|step| step.op.moves()) {
        for input in &step.inputs {
            let (a, b) = (root(&parent, input.0), root(&parent, step.output.0));
            parent[a.max(b)] = a.min(b);
        }
    }
    (0..parent.len()).map(|i| root(&parent, i)).collect()
}

fn root(parent: &[usize], mut i: usize) -> usize {
    while parent[i] != i {
        i = parent[i];
    }
    i
}

#[cfg(test)]
#[path = "encode_tests.rs"]
mod tests;
