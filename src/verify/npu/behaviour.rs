//! What an export says: steps through the bundled interpreter, the caches owned by the manifest's rules,
//! against the checkpoint in f32.
//!
//! Two runs. In one the export lives on its own keys and values, from an empty cache on; that gives the
//! figures of the whole step. In the other each graph is fed what the checkpoint feeds the same layers, so
//! that a graph answers for itself alone. Both see the same tokens: a text, and through the step that fills
//! the window the checkpoint's own continuation of it.

use serde::{Deserialize, Serialize};

use super::reference::Reference;
use super::stretches::{Stretch, Stretches};
use crate::error::{InputError, Result};
use crate::interpreter::{SliceMut, Tensor};
use crate::interrupt::Interrupt;
use crate::metrics::{Comparison, Position, Summary, TIE_NATS};
use crate::npu::manifest::{CacheInfo, DecodeManifest, GraphInfo, TensorInfo};
use crate::npu::runner::{OpenedExport, Runner, StepResult, decode, encode};
use crate::progress::Progress;
use crate::quant::ErrorSums;
use crate::runtime::{Model, argmax};

/// Equal outputs, and outputs without any likeness, in decibels: figures stay numbers.
const LIMIT_DB: f64 = 300.0;

/// Steps after which what lies in unwritten slots is changed, while there are some.
const GARBAGE_AT: usize = 3;

/// The logits of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepSnr {
    /// Tokens before it.
    pub position: usize,
    /// SNR of its logits.
    pub snr_db: f64,
}

/// What a layer returns to its cache, over all steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerSnr {
    /// Layer number.
    pub layer: usize,
    /// `sliding` or `full`.
    pub layer_type: String,
    /// SNR of the keys.
    pub key_snr_db: f64,
    /// SNR of the values.
    pub value_snr_db: f64,
}

/// A graph that was fed what the checkpoint feeds it, over all steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GraphSnr {
    /// Name of the graph.
    pub graph: String,
    /// `sliding`, `full`, `mixed` or `head`.
    pub layer_type: String,
    /// SNR of the residual stream behind it, or of the logits.
    pub snr_db: f64,
}

/// All graphs of layers of a type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TypeSnr {
    /// `sliding`, `full`, `mixed` or `head`.
    pub layer_type: String,
    /// How many graphs.
    pub graphs: usize,
    /// The lowest figure.
    pub min_snr_db: f64,
    /// The mean of the figures.
    pub mean_snr_db: f64,
}

/// What the steps of an export came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExportBehaviour {
    /// The positions that were run.
    pub stretches: Stretches,
    /// All logits of all steps.
    pub logits: Summary,
    /// Share of the steps whose token is the checkpoint's, or as good as it: within 0.05 nats of it.
    pub greedy_share: f64,
    /// The same of the steps that continue the checkpoint's own text.
    pub continuation_greedy_share: f64,
    /// The worst step.
    pub worst_step: StepSnr,
    /// The step with empty caches.
    pub empty_cache_snr_db: f64,
    /// Steps with full sliding caches, if the context goes that far.
    pub full_window_snr_db: Option<f64>,
    /// The last step of the context, where the caches of full layers are full, if it was run.
    pub full_cache_snr_db: Option<f64>,
    /// Keys and values by layer.
    pub keys_values: Vec<LayerSnr>,
    /// Graphs by themselves, where the step is cut into several.
    pub graphs: Vec<GraphSnr>,
    /// The same by layer type.
    pub graph_types: Vec<TypeSnr>,
    /// How far the logits change with what lies in unwritten slots of the values, if there were any.
    pub unwritten_slots_snr_db: Option<f64>,
    /// Step by step.
    pub steps: Vec<StepSnr>,
}

impl ExportBehaviour {
    /// The lowest figure of keys and values.
    pub fn lowest_kv(&self) -> f64 {
        self.keys_values.iter().flat_map(|l| [l.key_snr_db, l.value_snr_db]).fold(LIMIT_DB, f64::min)
    }

    /// The lowest figure of a graph, where there are several.
    pub fn lowest_graph(&self) -> Option<f64> {
        let lowest = self.graphs.iter().map(|g| g.snr_db).fold(LIMIT_DB, f64::min);
        (!self.graphs.is_empty()).then_some(lowest)
    }
}

/// What goes into a run.
pub struct ExportRun<'a> {
    /// The export.
    pub export: &'a OpenedExport,
    /// The checkpoint.
    pub model: &'a Model<'a>,
    /// Tokens of a text; it begins anew where it ends.
    pub text: &'a [u32],
    /// Which positions.
    pub stretches: &'a Stretches,
}

impl ExportRun<'_> {
    /// Runs the steps.
    ///
    /// # Errors
    /// When the export cannot be run (an input error), or on an interrupt.
    pub fn run(&self, progress: &dyn Progress, interrupt: &Interrupt) -> Result<ExportBehaviour> {
        let mut sums = Sums::new(self.export.manifest(), self.model.config().num_hidden_layers());
        for stretch in &self.stretches.run {
            self.stretch(stretch, &mut sums, progress, interrupt)?;
        }
        sums.finish(self)
    }

    /// The token at a position, where the text decides.
    fn text_token(&self, position: usize) -> u32 {
        self.text[position % self.text.len()]
    }

    /// Positions whose token is the checkpoint's choice: half a window before and after the step that fills
    /// it. Where a stretch begins there is no choice yet.
    fn continues(&self, stretch: &Stretch, position: usize) -> bool {
        let window = self.window();
        position > stretch.from && (window / 2..window + window / 2).contains(&position)
    }

    /// Positions that the first full window takes; the context without sliding layers.
    fn window(&self) -> usize {
        let manifest = self.export.manifest();
        let capacity = manifest.caches.iter().map(|c| c.capacity).min();
        capacity.map_or(manifest.context, |c| c + 1)
    }

    fn stretch(
        &self,
        stretch: &Stretch,
        sums: &mut Sums,
        progress: &dyn Progress,
        interrupt: &Interrupt,
    ) -> Result<()> {
        let manifest = self.export.manifest();
        let before: Vec<u32> = (0..stretch.from).map(|p| self.text_token(p)).collect();
        let taken = |count: usize| progress.advance(count as u64, "the checkpoint");
        let mut reference = Reference::after(self.model, &before, interrupt, taken)?;
        let mut runner = self.export.runner()?;
        if stretch.from > 0 {
            runner.resume(stretch.from, reference.caches(manifest, stretch.from)?)?;
        }
        let mut forced = self.export.runner()?;
        for position in stretch.from..stretch.to {
            interrupt.check()?;
            let continues = self.continues(stretch, position);
            let token = if continues { argmax(&reference.logits) } else { self.text_token(position) };
            reference.step(token)?;
            let row = self.export.embedding(token)?;
            if position == GARBAGE_AT {
                sums.unwritten = self.unwritten(&runner, &mut forced, &row)?;
            }
            if manifest.graphs.len() > 1 {
                forced.resume(position, reference.caches(manifest, position)?)?;
                for (index, graph) in manifest.graphs.iter().enumerate() {
                    sums.graphs[index] += self.graph(&forced, index, graph, &reference)?;
                }
            }
            let result = runner.step(&row)?;
            sums.step(position, continues, &reference, &result);
            sums.entries(manifest, &reference, &result, position)?;
            progress.advance(1, "steps");
        }
        Ok(())
    }

    /// One graph, on what the checkpoint has before and behind its layers.
    fn graph(
        &self,
        forced: &Runner<'_>,
        index: usize,
        graph: &GraphInfo,
        reference: &Reference<'_>,
    ) -> Result<ErrorSums> {
        let missing = |what: &str| InputError::file(&graph.file).expected(what).found("none");
        let layers = graph.layers.first().zip(graph.layers.last());
        let (before, behind) = layers.map_or_else(
            || (reference.residual.len() - 1, reference.residual.len() - 1),
            |(first, last)| (*first, last + 1),
        );
        let hidden =
            graph.inputs.iter().find(|i| i.role == "hidden").ok_or_else(|| missing("a hidden input"))?;
        let inputs = forced.inputs(index, &encode(hidden, &reference.residual[before])?)?;
        let outputs = forced.run_graph(index, &inputs)?;
        let is_result = |o: &&TensorInfo| o.role == if graph.head { "logits" } else { "hidden" };
        let info = graph.outputs.iter().find(is_result).ok_or_else(|| missing("a result"))?;
        let found = decode(info, outputs.get(&info.name).ok_or_else(|| missing("a result"))?)?;
        let truth = if graph.head { &reference.logits } else { &reference.residual[behind] };
        Ok(error(truth, &found))
    }

    /// How much the logits of the next step owe to values in slots that nothing was written to.
    fn unwritten(&self, runner: &Runner<'_>, forced: &mut Runner<'_>, row: &[f32]) -> Result<Option<f64>> {
        let (position, mut caches) = (runner.position(), runner.caches().clone());
        let mut any = false;
        for cache in &self.export.manifest().caches {
            let Some(values) = caches.get_mut(&cache.value.input) else { continue };
            any |= spoil(values, cache, position);
        }
        if !any {
            return Ok(None);
        }
        let before = runner.peek(row)?.logits;
        forced.resume(position, caches)?;
        Ok(Some(decibels(error(&before, &forced.peek(row)?.logits))))
    }
}

/// Writes something large into every slot of the values that holds no entry yet; whether there was one.
fn spoil(values: &mut Tensor, cache: &CacheInfo, position: usize) -> bool {
    let written = position.min(cache.capacity);
    let [heads, _, slots, dim] = *values.shape() else { return false };
    let empty = match cache.returns.as_str() {
        "cache" => 0..slots.saturating_sub(written),
        _ => written..slots,
    };
    for head in 0..heads {
        let range = (head * slots + empty.start) * dim..(head * slots + empty.end) * dim;
        match values.slice_mut() {
            SliceMut::F32(x) => x[range].fill(1e3),
            SliceMut::I16(x) => x[range].fill(i16::MAX - 9),
            SliceMut::U16(x) => x[range].fill(u16::MAX - 9),
            SliceMut::I8(x) => x[range].fill(i8::MAX),
            SliceMut::U8(x) => x[range].fill(u8::MAX),
            SliceMut::I64(_) => {}
        }
    }
    !empty.is_empty()
}

/// What adds up over the steps.
struct Sums {
    logits: Comparison,
    greedy: [usize; 2],
    continued: [usize; 2],
    steps: Vec<(StepSnr, ErrorSums)>,
    /// Of keys and of values, by layer.
    entries: Vec<[ErrorSums; 2]>,
    graphs: Vec<ErrorSums>,
    unwritten: Option<f64>,
}

impl Sums {
    fn new(manifest: &DecodeManifest, layers: usize) -> Self {
        Self {
            logits: Comparison::default(),
            greedy: [0; 2],
            continued: [0; 2],
            steps: Vec::new(),
            entries: vec![[ErrorSums::default(); 2]; layers],
            graphs: vec![ErrorSums::default(); manifest.graphs.len()],
            unwritten: None,
        }
    }

    fn step(&mut self, position: usize, continues: bool, reference: &Reference<'_>, result: &StepResult) {
        let (truth, found) = (&reference.logits, &result.logits);
        self.logits.add(Position::of(truth, found));
        let (choice, theirs) = (argmax(truth) as usize, argmax(found) as usize);
        let margin = truth.get(choice).zip(truth.get(theirs)).map_or(f32::INFINITY, |(a, b)| a - b);
        let kept = choice == theirs || f64::from(margin) <= TIE_NATS;
        let counts = [Some(&mut self.greedy), continues.then_some(&mut self.continued)];
        for [matched, of] in counts.into_iter().flatten() {
            *matched += usize::from(kept);
            *of += 1;
        }
        let sums = error(truth, found);
        self.steps.push((StepSnr { position, snr_db: decibels(sums) }, sums));
    }

    /// The entries that a step has returned, which are the last slots where a whole cache is.
    fn entries(
        &mut self,
        manifest: &DecodeManifest,
        reference: &Reference<'_>,
        result: &StepResult,
        position: usize,
    ) -> Result<()> {
        for cache in &manifest.caches {
            for (i, tensors) in [&cache.key, &cache.value].into_iter().enumerate() {
                let info = manifest.graphs.iter().flat_map(|g| &g.outputs).find(|o| o.name == tensors.output);
                let Some((info, tensor)) = info.zip(result.outputs.get(&tensors.output)) else { continue };
                let all = decode(info, tensor)?;
                let last = last_slot(&all, &info.shape, tensors.seq_axis);
                let Some(sums) = self.entries.get_mut(cache.layer) else { continue };
                sums[i] += error(&reference.entry(cache.layer, i == 0, position), &last);
            }
        }
        Ok(())
    }

    fn finish(self, run: &ExportRun<'_>) -> Result<ExportBehaviour> {
        let manifest = run.export.manifest();
        let nothing = || InputError::file("manifest.json").expected("at least one step").found("none");
        let worst = self.steps.iter().map(|s| s.0).min_by(|a, b| a.snr_db.total_cmp(&b.snr_db));
        let over = |from: usize| {
            let steps = self.steps.iter().filter(|s| s.0.position >= from);
            let (count, sums) = steps.fold((0, ErrorSums::default()), |(n, mut sums), step| {
                sums += step.1;
                (n + 1, sums)
            });
            (count > 0).then(|| decibels(sums))
        };
        let share = |[matched, of]: [usize; 2]| {
            #[expect(clippy::cast_precision_loss, reason = "counts are small")]
            let share = matched as f64 / of.max(1) as f64;
            if of == 0 { 1.0 } else { share }
        };
        let keys_values = manifest.caches.iter().zip(&self.entries).map(|(cache, sums)| LayerSnr {
            layer: cache.layer,
            layer_type: cache.kind.clone(),
            key_snr_db: decibels(sums[0]),
            value_snr_db: decibels(sums[1]),
        });
        let graphs = manifest.graphs.iter().zip(&self.graphs).map(|(graph, sums)| GraphSnr {
            graph: graph.name.clone(),
            layer_type: type_of(graph, manifest),
            snr_db: decibels(*sums),
        });
        let graphs: Vec<GraphSnr> = if manifest.graphs.len() > 1 { graphs.collect() } else { Vec::new() };
        Ok(ExportBehaviour {
            stretches: run.stretches.clone(),
            logits: self.logits.summary(run.model.config().vocab_size),
            greedy_share: share(self.greedy),
            continuation_greedy_share: share(self.continued),
            worst_step: worst.ok_or_else(nothing)?,
            empty_cache_snr_db: self.steps.first().ok_or_else(nothing)?.0.snr_db,
            full_window_snr_db: over(run.window() - 1),
            full_cache_snr_db: over(manifest.context - 1),
            keys_values: keys_values.collect(),
            graph_types: by_type(&graphs),
            graphs,
            unwritten_slots_snr_db: self.unwritten,
            steps: self.steps.into_iter().map(|s| s.0).collect(),
        })
    }
}

/// The type of the layers of a graph.
fn type_of(graph: &GraphInfo, manifest: &DecodeManifest) -> String {
    let mut kinds: Vec<&str> =
        graph.layers.iter().filter_map(|i| Some(manifest.model.layer_types.get(*i)?.as_str())).collect();
    kinds.dedup();
    match kinds[..] {
        [] => "head",
        [kind] if !graph.head => kind,
        _ => "mixed",
    }
    .to_owned()
}

/// Figures by layer type, in the order the types first come.
fn by_type(graphs: &[GraphSnr]) -> Vec<TypeSnr> {
    let mut types: Vec<TypeSnr> = Vec::new();
    for graph in graphs {
        if types.iter().any(|t| t.layer_type == graph.layer_type) {
            continue;
        }
        let figures: Vec<f64> =
            graphs.iter().filter(|g| g.layer_type == graph.layer_type).map(|g| g.snr_db).collect();
        #[expect(clippy::cast_precision_loss, reason = "a count of graphs")]
        let mean_snr_db = figures.iter().sum::<f64>() / figures.len() as f64;
        types.push(TypeSnr {
            layer_type: graph.layer_type.clone(),
            graphs: figures.len(),
            min_snr_db: figures.into_iter().fold(LIMIT_DB, f64::min),
            mean_snr_db,
        });
    }
    types
}

/// The last index along an axis.
fn last_slot(values: &[f32], shape: &[usize], axis: usize) -> Vec<f32> {
    let slots = shape.get(axis).copied().unwrap_or(1).max(1);
    let inner: usize = shape.iter().skip(axis + 1).product();
    let rows = values.chunks_exact(slots * inner);
    rows.flat_map(|row| &row[(slots - 1) * inner..]).copied().collect()
}

fn error(truth: &[f32], found: &[f32]) -> ErrorSums {
    // Of another length: the contract is broken, and nothing is like anything.
    if truth.len() != found.len() {
        return ErrorSums { signal: 0.0, noise: 1.0 };
    }
    truth.iter().zip(found).fold(ErrorSums::default(), |mut sums, (r, y)| {
        let (r, y) = (f64::from(*r), f64::from(*y));
        sums += ErrorSums { signal: r * r, noise: (r - y) * (r - y) };
        sums
    })
}

/// A number whatever happens: what is not a number is as bad as can be.
fn decibels(sums: ErrorSums) -> f64 {
    match sums.snr_db() {
        None => LIMIT_DB,
        Some(db) if db.is_nan() => -LIMIT_DB,
        Some(db) => db.clamp(-LIMIT_DB, LIMIT_DB),
    }
}
