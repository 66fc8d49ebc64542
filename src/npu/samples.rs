//! Samples of the inputs of each graph, as floats, for jobs that calibrate again (AI Hub's quantize job
//! on a float export): residual stream, rotary tables, masks and caches as a runtime would feed them.

use std::collections::BTreeMap;

use super::Export;
use super::hdf5::{SampledInput, head};
use super::logical::{LogicalGraph, Role};
use super::options::{CacheKind, Split};
use super::step::capacity;
use super::write::DataFile;
use crate::artifact::{FileRecord, Staging};
use crate::calibrate::Sequences;
use crate::error::Result;
use crate::interrupt::Interrupt;
use crate::runtime::{Edge, LayerEdge, Model, State};
use crate::spark::LayerType;

/// Steps that are sampled. At the published sizes and a context of 1024 a sample has 73 MB.
pub const SAMPLES: usize = 8;

/// Bytes of the arrays of all graphs.
pub fn bytes(graphs: &[LogicalGraph]) -> u64 {
    graphs.iter().flat_map(inputs).map(|input| input.len_bytes()).sum::<u64>() * SAMPLES as u64
}

fn inputs(graph: &LogicalGraph) -> Vec<SampledInput> {
    let input = |port: &super::logical::Port| {
        let tensor = graph.tensor(port.tensor);
        SampledInput { name: tensor.name.clone(), shape: tensor.shape.clone() }
    };
    graph.inputs.iter().map(input).collect()
}

/// Name of the file of a graph. It is not in the graph's directory, which must hold nothing else.
fn file_name(split: Split, graph: &LogicalGraph) -> String {
    match split {
        Split::Whole => "calib.h5".to_owned(),
        Split::Layer | Split::Block4 => format!("calib_{}.h5", graph.name),
    }
}

/// Names of the files.
pub fn file_names(export: &Export) -> Vec<String> {
    match export.options.samples {
        true => export.graphs.iter().map(|g| file_name(export.options.split, g)).collect(),
        false => Vec::new(),
    }
}

/// Sequence and position of a sample: sequences evenly over the list, positions at a quarter, half, three
/// quarters and the end of them, so that caches are seen from nearly empty to full.
fn place(sequences: &Sequences, sample: usize) -> (usize, usize) {
    let sequence = sample * sequences.tokens.len() / SAMPLES;
    let last = sequences.tokens[sequence].len() - 1;
    (sequence, last * (sample % 4 + 1) / 4)
}

/// Writes the files, and returns their records by name.
///
/// # Errors
/// A token outside the vocabulary, a failed write, an interrupt.
pub fn write(
    model: &Model<'_>,
    export: &Export,
    sequences: &Sequences,
    staging: &Staging,
    interrupt: &Interrupt,
) -> Result<BTreeMap<String, FileRecord>> {
    let mut files = Vec::new();
    for graph in &export.graphs {
        let name = file_name(export.options.split, graph);
        let mut file = DataFile::create(staging, &name)?;
        file.append(&head(&inputs(graph), SAMPLES))?;
        files.push((name, file));
    }
    for sample in 0..SAMPLES {
        let (sequence, position) = place(sequences, sample);
        let tokens = &sequences.tokens[sequence];
        let mut state = State::new(model.config());
        for piece in tokens[..position].chunks(PIECE) {
            interrupt.check()?;
            model.forward_last(&mut state, piece)?;
        }
        let step = Step::new(model, export, state, tokens[position])?;
        for (graph, (_, file)) in export.graphs.iter().zip(&mut files) {
            for port in &graph.inputs {
                let values = step.input(graph, port.role);
                let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                file.append(&bytes)?;
            }
        }
    }
    files.into_iter().map(|(name, file)| Ok((name, file.close()?))).collect()
}

/// Tokens between two looks at the interrupt.
const PIECE: usize = 256;

/// A decode step about to be taken.
struct Step<'a> {
    model: &'a Model<'a>,
    export: &'a Export,
    /// Before the step.
    state: State,
    /// The residual stream before each layer, and before the head.
    residual: Vec<Vec<f32>>,
}

impl<'a> Step<'a> {
    fn new(model: &'a Model<'a>, export: &'a Export, state: State, token: u32) -> Result<Self> {
        let mut residual = Vec::new();
        model.run(&mut state.clone(), &[token], &mut |edge, _, rows| {
            if matches!(edge, Edge::Embedding | Edge::Layer(_, LayerEdge::Output)) {
                residual.push(rows.to_vec());
            }
        })?;
        Ok(Self { model, export, state, residual })
    }

    fn input(&self, graph: &LogicalGraph, role: Role) -> Vec<f32> {
        let position = self.state.position();
        let angles = |kind| self.model.angles(kind, position..position + 1);
        match role {
            Role::Hidden | Role::Logits => self.residual[graph.layers.start].clone(),
            Role::RopeCos(kind) => angles(kind).map_or_else(Vec::new, |a| a.at(0).0.to_vec()),
            Role::RopeSin(kind) => angles(kind).map_or_else(Vec::new, |a| a.at(0).1.to_vec()),
            Role::Mask(kind) => self.mask(kind),
            Role::KeyCache(layer) => self.cache(layer, true),
            Role::ValueCache(layer) => self.cache(layer, false),
        }
    }

    /// Slots of the entries that the next position sees, oldest first, by the rule of the cache.
    fn slots(&self, kind: LayerType) -> Vec<usize> {
        let capacity = capacity(self.model.config(), &self.export.options, kind);
        let position = self.state.position();
        let count = position.min(capacity);
        match self.export.options.cache(kind) {
            CacheKind::RingEntry => (position - count..position).map(|p| p % capacity).collect(),
            CacheKind::RollEntry => (0..count).collect(),
            CacheKind::RollCache => (capacity - count..capacity).collect(),
        }
    }

    fn mask(&self, kind: LayerType) -> Vec<f32> {
        let capacity = capacity(self.model.config(), &self.export.options, kind);
        let mut mask = vec![self.export.blocked(kind); capacity + 1];
        mask[capacity] = 0.0;
        for slot in self.slots(kind) {
            mask[slot] = 0.0;
        }
        mask
    }

    /// Keys `[kv, 1, dim, capacity]` or values `[kv, 1, capacity, dim]` of a layer; unwritten slots are
    /// zero.
    fn cache(&self, layer: usize, keys: bool) -> Vec<f32> {
        let config = self.model.config();
        let kind = config.layer_types[layer];
        let (heads, dim) = (config.num_key_value_heads, config.head_dim);
        let capacity = capacity(config, &self.export.options, kind);
        let slots = self.slots(kind);
        let position = self.state.position();
        let cache = &self.state.layers[layer];
        let mut out = vec![0.0; heads * dim * capacity];
        for (head, out) in out.chunks_exact_mut(dim * capacity).enumerate() {
            let seen = position - slots.len()..position;
            let entries = if keys { cache.keys(head, seen) } else { cache.values(head, seen) };
            for (entry, slot) in entries.chunks_exact(dim).zip(&slots) {
                for (d, x) in entry.iter().enumerate() {
                    let at = if keys { d * capacity + slot } else { slot * dim + d };
                    out[at] = *x;
                }
            }
        }
        out
    }
}

#[cfg(test)]
#[path = "samples_tests.rs"]
mod tests;
