//! Runs a written export: the graphs in the bundled interpreter, and around them what a runtime owes
//! them by the manifest: embedding rows, rotary tables, masks, and the caches with their rules.
//!
//! Nothing but the files of the export is used, so what this says holds for any runtime that follows
//! the manifest.

mod agreement;
mod prefill;

use std::collections::BTreeMap;
use std::path::Path;

use half::f16;
use memmap2::Mmap;

use super::manifest::{
    CacheInfo, CacheTensors, DECODE_MANIFEST_FILE, DecodeManifest, EncodingInfo, GraphInfo, TensorInfo,
};
use crate::checkpoint::ModelDir;
use crate::error::{Failure, InputError, Result};
use crate::interpreter::{Data, Session, SliceMut, Tensor, Tensors};
use crate::onnx::{ElementType, Model, is_bare_name};
use crate::runtime::Rope;
use crate::spark::RopeParameters;

/// The files of an export, mapped.
pub struct OpenedExport {
    manifest: DecodeManifest,
    decode: Graphs,
    prefill: Graphs,
    embedding: Mmap,
}

/// Models and their data files.
struct Graphs {
    models: Vec<Model>,
    data: Vec<Mmap>,
}

impl Graphs {
    fn open(path: &Path, graphs: &[GraphInfo]) -> Result<Self> {
        let (mut models, mut data) = (Vec::new(), Vec::new());
        for graph in graphs {
            let (sub, model) = in_directory(path, &graph.file)?;
            let (_, data_file) = in_directory(path, &graph.data)?;
            models.push(Model::decode(&sub.read(model)?, data_file)?);
            data.push(sub.map(data_file)?);
        }
        Ok(Self { models, data })
    }

    fn sessions(&self) -> Result<Vec<Session<'_>>> {
        let sessions = self.models.iter().zip(&self.data).map(|(model, data)| Session::new(model, data));
        Ok(sessions.collect::<Result<_, _>>()?)
    }
}

impl OpenedExport {
    /// Opens the directory of an export.
    ///
    /// # Errors
    /// When a file is missing or is not what the manifest says.
    pub fn open(path: &Path) -> Result<Self> {
        let dir = ModelDir::open(path)?;
        let manifest: DecodeManifest = serde_json::from_value(dir.read_json(DECODE_MANIFEST_FILE)?)
            .map_err(|e| InputError::file(DECODE_MANIFEST_FILE).found(e))?;
        let decode = Graphs::open(path, &manifest.graphs)?;
        let prefill = manifest.prefill.as_ref().map_or(&[][..], |prefill| &prefill.graphs);
        let prefill = Graphs::open(path, prefill)?;
        if !is_bare_name(&manifest.embedding.file) {
            return Err(refuse("embedding.file", "a file beside the manifest", &manifest.embedding.file));
        }
        let embedding = dir.map(&manifest.embedding.file)?;
        let [rows, columns] = manifest.embedding.shape;
        let expected =
            (rows as u64).saturating_mul(columns as u64).saturating_mul(embedding_bytes(&manifest)? as u64);
        if embedding.len() as u64 != expected || columns != manifest.model.hidden {
            return Err(refuse("embedding", &format!("{expected} bytes"), embedding.len()));
        }
        Ok(Self { manifest, decode, prefill, embedding })
    }

    /// The contract.
    pub fn manifest(&self) -> &DecodeManifest {
        &self.manifest
    }

    /// The row of a token, for `hidden_in`.
    ///
    /// # Errors
    /// When the token is outside the vocabulary.
    pub fn embedding(&self, token: u32) -> Result<Vec<f32>> {
        let [rows, columns] = self.manifest.embedding.shape;
        let token = token as usize;
        if token >= rows {
            return Err(Failure::usage(format!("token {token} is not below {rows}")));
        }
        let size = embedding_bytes(&self.manifest)?;
        let row = &self.embedding[token * columns * size..][..columns * size];
        Ok(match size {
            2 => row.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            _ => row.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        })
    }

    /// A sequence that starts empty.
    ///
    /// # Errors
    /// When a graph is not one that can be run, or its inputs are not those of the manifest.
    pub fn runner(&self) -> Result<Runner<'_>> {
        let (sessions, prefill) = (self.decode.sessions()?, self.prefill.sessions()?);
        agreement::check(&self.manifest, &sessions, &prefill)?;
        let ropes = self.manifest.rope.iter().map(|(kind, rope)| {
            let parameters = RopeParameters { theta: rope.theta, rotary_dims: rope.rotary_dim };
            (kind.as_str(), Rope::new(parameters))
        });
        let ropes = ropes.collect();
        let mut runner =
            Runner { export: self, sessions, prefill, ropes, caches: BTreeMap::new(), position: 0 };
        runner.reset()?;
        Ok(runner)
    }
}

/// `DIR/FILE` of an export, opened as a directory and a bare name.
fn in_directory<'n>(path: &Path, name: &'n str) -> Result<(ModelDir, &'n str)> {
    match name.split_once('/') {
        Some((dir, file)) if is_bare_name(dir) && is_bare_name(file) => {
            Ok((ModelDir::open(&path.join(dir))?, file))
        }
        _ => Err(refuse("graphs", "DIR/FILE beside the manifest", name)),
    }
}

fn refuse(subject: &str, expected: &str, found: impl std::fmt::Display) -> Failure {
    InputError::file(DECODE_MANIFEST_FILE).subject(subject).expected(expected).found(found).into()
}

fn embedding_bytes(manifest: &DecodeManifest) -> Result<usize> {
    match manifest.embedding.dtype.as_str() {
        "float16" => Ok(2),
        "float32" => Ok(4),
        other => Err(refuse("embedding.dtype", "float16 or float32", other)),
    }
}

/// What a step gave.
#[derive(Clone, Debug, Default)]
pub struct StepResult {
    /// `[vocab]`.
    pub logits: Vec<f32>,
    /// The residual stream behind each graph but the last, `[hidden]`.
    pub residual: Vec<Vec<f32>>,
    /// Every tensor that a graph returned.
    pub outputs: Tensors,
}

/// A sequence in progress.
pub struct Runner<'a> {
    export: &'a OpenedExport,
    sessions: Vec<Session<'a>>,
    prefill: Vec<Session<'a>>,
    ropes: BTreeMap<&'a str, Rope>,
    /// By the name of the input.
    caches: Tensors,
    position: usize,
}

impl Runner<'_> {
    /// Tokens taken in, which is the position of the next.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The caches, by the name of the input.
    pub fn caches(&self) -> &Tensors {
        &self.caches
    }

    /// Starts anew: every cache is filled with its zero point.
    ///
    /// # Errors
    /// When a cache of the manifest is no input of a graph.
    pub fn reset(&mut self) -> Result<()> {
        self.position = 0;
        self.caches.clear();
        let manifest = &self.export.manifest;
        for cache in &manifest.caches {
            for tensors in [&cache.key, &cache.value] {
                let info = manifest.graphs.iter().flat_map(|g| &g.inputs).find(|i| i.name == tensors.input);
                let info = info.ok_or_else(|| refuse("caches", "an input of a graph", &tensors.input))?;
                let count = info.shape.iter().product();
                let zeros = vec![0.0; count];
                self.caches.insert(info.name.clone(), encode(info, &zeros)?);
            }
        }
        Ok(())
    }

    /// Goes on at `position`, with caches (by the name of the input) that were filled elsewhere.
    ///
    /// # Errors
    /// When they are not the caches of the manifest, each of its type and shape.
    pub fn resume(&mut self, position: usize, caches: Tensors) -> Result<()> {
        for (name, held) in &self.caches {
            let found = caches.get(name).map(|c| (c.element(), c.shape()));
            if found != Some((held.element(), held.shape())) {
                let expected = format!("{} {:?}", held.element(), held.shape());
                let found = found
                    .map_or_else(|| "none".to_owned(), |(element, shape)| format!("{element} {shape:?}"));
                return Err(refuse(name, &expected, found));
            }
        }
        (self.position, self.caches) = (position, caches);
        Ok(())
    }

    /// What a decode graph is fed at this position; the residual stream is given in the type of its input.
    ///
    /// # Errors
    /// When the manifest has an input of a role that is not known, or no rope or mask for one.
    pub fn inputs(&self, graph: usize, hidden: &Tensor) -> Result<Tensors> {
        self.feed(&self.export.manifest.graphs[graph], hidden, 1, |kind| self.mask(kind))
    }

    /// What a graph of so many rows is fed at this position; `mask` makes the mask of a layer type.
    fn feed(
        &self,
        graph: &GraphInfo,
        hidden: &Tensor,
        rows: usize,
        mask: impl Fn(&str) -> Result<Vec<f32>>,
    ) -> Result<Tensors> {
        let mut inputs = Tensors::new();
        for info in &graph.inputs {
            let kind = info.layer_type.as_deref().unwrap_or_default();
            let tensor = match info.role.as_str() {
                "hidden" => hidden.clone(),
                "rope_cos" | "rope_sin" => {
                    let rope = self.ropes.get(kind).ok_or_else(|| refuse("rope", "a layer type", kind))?;
                    let angles = rope.angles(self.position..self.position + rows);
                    let of = |row| {
                        let (cos, sin) = angles.at(row);
                        if info.role == "rope_cos" { cos } else { sin }
                    };
                    encode(info, &(0..rows).flat_map(of).copied().collect::<Vec<f32>>())?
                }
                "mask" => encode(info, &mask(kind)?)?,
                "key_cache" | "value_cache" => match self.caches.get(&info.name) {
                    Some(cache) => cache.clone(),
                    None => return Err(refuse("caches", "a cache of that name", &info.name)),
                },
                other => return Err(refuse(&info.name, "a known role", other)),
            };
            inputs.insert(info.name.clone(), tensor);
        }
        Ok(inputs)
    }

    /// Runs one graph alone, on inputs as given.
    ///
    /// # Errors
    /// When the inputs are not those of the graph.
    pub fn run_graph(&self, graph: usize, inputs: &Tensors) -> Result<Tensors> {
        Ok(self.sessions[graph].run(inputs)?)
    }

    /// Takes in a row of the embedding and moves on.
    ///
    /// # Errors
    /// When the context is full, or the manifest is not that of the graphs.
    pub fn step(&mut self, hidden: &[f32]) -> Result<StepResult> {
        let result = self.peek(hidden)?;
        self.keep(&result.outputs, 1, 1)?;
        Ok(result)
    }

    /// What [`Runner::step`] would give; nothing moves on.
    ///
    /// # Errors
    /// As [`Runner::step`].
    pub fn peek(&self, hidden: &[f32]) -> Result<StepResult> {
        let manifest = &self.export.manifest;
        // The step at position = capacity of a full layer is the last: its entry has no slot.
        if self.position >= manifest.context {
            return Err(Failure::usage(format!("the context of {} tokens is full", manifest.context)));
        }
        self.pass(&manifest.graphs, &self.sessions, hidden, |index, stream| self.inputs(index, stream))
    }

    /// Runs graphs one after the other, each on the residual stream that the one before returned; `feed`
    /// gives the inputs of the graph with that number.
    fn pass(
        &self,
        graphs: &[GraphInfo],
        sessions: &[Session<'_>],
        hidden: &[f32],
        feed: impl Fn(usize, &Tensor) -> Result<Tensors>,
    ) -> Result<StepResult> {
        let first = graphs.first().ok_or_else(|| refuse("graphs", "at least one", "none"))?;
        let info = first.inputs.iter().find(|i| i.role == "hidden");
        let mut stream = encode(info.ok_or_else(|| refuse("graphs", "an input hidden_in", "none"))?, hidden)?;
        let mut result = StepResult::default();
        for (index, (graph, session)) in graphs.iter().zip(sessions).enumerate() {
            let outputs = session.run(&feed(index, &stream)?)?;
            for info in &graph.outputs {
                let tensor = outputs.get(&info.name);
                let tensor =
                    tensor.ok_or_else(|| refuse(&graph.name, "an output of that name", &info.name))?;
                match info.role.as_str() {
                    "hidden" => {
                        result.residual.push(decode(info, tensor)?);
                        stream = tensor.clone();
                    }
                    "logits" => result.logits = decode(info, tensor)?,
                    _ => {}
                }
            }
            result.outputs.extend(outputs);
        }
        Ok(result)
    }

    /// Moves the caches on by what graphs of so many rows have returned, of which the first `count` are
    /// tokens.
    fn keep(&mut self, outputs: &Tensors, rows: usize, count: usize) -> Result<()> {
        for cache in &self.export.manifest.caches {
            for tensors in [&cache.key, &cache.value] {
                let missing = || refuse("caches", "an output of a graph", &tensors.output);
                let returned = outputs.get(&tensors.output).ok_or_else(missing)?;
                for row in 0..count {
                    match slot(cache, self.position + row)? {
                        Slot::Swap => drop(self.caches.insert(tensors.input.clone(), returned.clone())),
                        Slot::None => {}
                        Slot::At(slot) => {
                            let held = self.caches.get_mut(&tensors.input).ok_or_else(missing)?;
                            put(held, slot, returned, row, rows, tensors)?;
                        }
                    }
                }
            }
        }
        self.position += count;
        Ok(())
    }

    /// The mask of a layer type at this position: what is seen, and the current token.
    fn mask(&self, kind: &str) -> Result<Vec<f32>> {
        let manifest = &self.export.manifest;
        let mask = manifest.masks.get(kind).ok_or_else(|| refuse("masks", "a layer type", kind))?;
        let cache = manifest.caches.iter().find(|c| c.kind == kind);
        let cache = cache.ok_or_else(|| refuse("caches", "a layer of every type", kind))?;
        let written = self.position.min(cache.capacity);
        let seen = match cache.returns.as_str() {
            "cache" => cache.capacity - written..cache.capacity,
            _ => 0..written,
        };
        if mask.length <= cache.capacity || mask.current_index >= mask.length {
            return Err(refuse("masks", &format!("{} positions", cache.capacity + 1), mask.length));
        }
        #[expect(clippy::cast_possible_truncation, reason = "they were written from f32")]
        let (attend, blocked) = (mask.attend as f32, mask.blocked as f32);
        let mut values = vec![blocked; mask.length];
        values[seen].fill(attend);
        values[mask.current_index] = attend;
        Ok(values)
    }
}

/// Where a returned entry goes.
enum Slot {
    /// The whole cache was returned.
    Swap,
    /// Into this slot.
    At(usize),
    /// Nowhere: it is the last of the context, and nothing will read it.
    None,
}

fn slot(cache: &CacheInfo, position: usize) -> Result<Slot> {
    Ok(match (cache.layout.as_str(), cache.returns.as_str()) {
        ("roll", "cache") => Slot::Swap,
        ("ring", "entry") => Slot::At(position % cache.capacity.max(1)),
        ("roll", "entry") if position < cache.capacity => Slot::At(position),
        ("roll", "entry") => Slot::None,
        (layout, returns) => {
            return Err(refuse(
                "caches",
                "ring/entry, roll/entry or roll/cache",
                format!("{layout}/{returns}"),
            ));
        }
    })
}

/// The slot that the entry of an earlier position has when `position` is the next, if it still has one.
pub fn slot_of(cache: &CacheInfo, entry: usize, position: usize) -> Option<usize> {
    let age = position.checked_sub(entry)?;
    if age == 0 || age > cache.capacity {
        return None;
    }
    match (cache.layout.as_str(), cache.returns.as_str()) {
        ("ring", _) => Some(entry % cache.capacity),
        (_, "cache") => Some(cache.capacity - age),
        _ => (entry < cache.capacity).then_some(entry),
    }
}

/// Writes one of `rows` returned entries into a slot of a cache.
fn put(
    cache: &mut Tensor,
    slot: usize,
    entries: &Tensor,
    row: usize,
    rows: usize,
    tensors: &CacheTensors,
) -> Result<()> {
    let shape = cache.shape().to_vec();
    let axis = tensors.seq_axis;
    let mut expected = shape.clone();
    if axis < shape.len() {
        expected[axis] = rows;
    }
    if axis >= shape.len() || slot >= shape[axis] || entries.shape() != expected {
        return Err(refuse(
            &tensors.output,
            &format!("{rows} entries of {shape:?}"),
            format!("{:?}", entries.shape()),
        ));
    }
    let inner = shape[axis + 1..].iter().product::<usize>();
    let (to, from) = ((slot, shape[axis]), (row, rows));
    match (cache.slice_mut(), entries.data()) {
        (SliceMut::F32(cache), Data::F32(entries)) => place(cache, to, entries, from, inner),
        (SliceMut::I16(cache), Data::I16(entries)) => place(cache, to, entries, from, inner),
        (SliceMut::U16(cache), Data::U16(entries)) => place(cache, to, entries, from, inner),
        (SliceMut::I8(cache), Data::I8(entries)) => place(cache, to, entries, from, inner),
        (SliceMut::U8(cache), Data::U8(entries)) => place(cache, to, entries, from, inner),
        _ => return Err(refuse(&tensors.output, "the type of the cache", entries.element())),
    }
    Ok(())
}

/// Copies between places `(index, count)` along the axis of slots, `inner` elements each.
fn place<T: Copy>(
    cache: &mut [T],
    (slot, slots): (usize, usize),
    entries: &[T],
    (row, rows): (usize, usize),
    inner: usize,
) {
    for (cache, entries) in cache.chunks_exact_mut(slots * inner).zip(entries.chunks_exact(rows * inner)) {
        cache[slot * inner..][..inner].copy_from_slice(&entries[row * inner..][..inner]);
    }
}

/// Reals as a tensor of the manifest: `clamp(round_half_even(real / scale) + zero_point)`.
///
/// # Errors
/// When the manifest's type has no encoding, or there are more or fewer values than its shape.
pub fn encode(info: &TensorInfo, values: &[f32]) -> Result<Tensor> {
    let data = match (info.dtype.as_str(), &info.encoding) {
        ("float32", _) => Data::F32(values.to_vec()),
        ("uint16", Some(e)) => Data::U16(codes(values, e)),
        ("int16", Some(e)) => Data::I16(codes(values, e)),
        ("uint8", Some(e)) => Data::U8(codes(values, e)),
        ("int8", Some(e)) => Data::I8(codes(values, e)),
        (other, _) => return Err(refuse(&info.name, "float32, or a type with an encoding", other)),
    };
    Ok(Tensor::new(info.shape.clone(), data)?)
}

/// A type of codes.
trait Code: Copy + TryFrom<i64> {
    const MIN: i64;
    const MAX: i64;
    const ZERO: Self;
}

macro_rules! code {
    ($($type:ty),*) => {
        $(impl Code for $type {
            const MIN: i64 = <$type>::MIN as i64;
            const MAX: i64 = <$type>::MAX as i64;
            const ZERO: Self = 0;
        })*
    };
}
code!(u8, i8, u16, i16);

fn codes<T: Code>(values: &[f32], encoding: &EncodingInfo) -> Vec<T> {
    let code = |x: &f32| {
        let steps = (f64::from(*x) / encoding.scale).round_ties_even();
        #[expect(clippy::cast_possible_truncation, reason = "far within the range of an i64")]
        let code = steps.clamp(-1e9, 1e9) as i64 + encoding.zero_point;
        T::try_from(code.clamp(T::MIN, T::MAX)).unwrap_or(T::ZERO)
    };
    values.iter().map(code).collect()
}

/// The reals of a tensor of the manifest.
///
/// # Errors
/// When it is of another type than the manifest says.
pub fn decode(info: &TensorInfo, tensor: &Tensor) -> Result<Vec<f32>> {
    if tensor.element().name() != info.dtype {
        return Err(refuse(&info.name, &info.dtype, tensor.element()));
    }
    if let Some(floats) = tensor.floats() {
        return Ok(floats.to_vec());
    }
    let encoding = info.encoding.as_ref().ok_or_else(|| refuse(&info.name, "an encoding", "none"))?;
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "codes are of 16 bits")]
    let real = |code: i64| ((code - encoding.zero_point) as f64 * encoding.scale) as f32;
    Ok(match tensor.data() {
        Data::U16(codes) => codes.iter().map(|c| real(i64::from(*c))).collect(),
        Data::I16(codes) => codes.iter().map(|c| real(i64::from(*c))).collect(),
        Data::U8(codes) => codes.iter().map(|c| real(i64::from(*c))).collect(),
        Data::I8(codes) => codes.iter().map(|c| real(i64::from(*c))).collect(),
        Data::F32(_) | Data::I64(_) => return Err(refuse(&info.name, "codes", ElementType::I64)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Caches of five slots, moved on by the rule of their kind, hold the positions where `slot_of` finds them.
    #[test]
    fn entries_are_found_where_the_rules_of_the_caches_put_them() {
        for (layout, returns) in [("ring", "entry"), ("roll", "entry"), ("roll", "cache")] {
            let tensors = CacheTensors { input: String::new(), output: String::new(), seq_axis: 3 };
            let cache = CacheInfo {
                layer: 0,
                kind: "full".to_owned(),
                layout: layout.to_owned(),
                returns: returns.to_owned(),
                capacity: 5,
                key: tensors.clone(),
                value: tensors,
            };
            let mut held: Vec<Option<usize>> = vec![None; 5];
            let last = if (layout, returns) == ("roll", "entry") { 5 } else { 13 };
            for position in 0..=last {
                for entry in 0..position + 2 {
                    let expected = held.iter().position(|h| *h == Some(entry));
                    assert_eq!(
                        slot_of(&cache, entry, position),
                        expected,
                        "{layout}/{returns} {entry} {position}"
                    );
                }
                match slot(&cache, position).unwrap() {
                    Slot::Swap => {
                        held.remove(0);
                        held.push(Some(position));
                    }
                    Slot::At(slot) => held[slot] = Some(position),
                    Slot::None => {}
                }
            }
        }
    }
}
