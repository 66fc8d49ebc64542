//! GPTQ over a model: layer after layer, each for the inputs that the quantized layers before it give.
//!
//! Of a layer at a time the inputs of its matrices are collected (its own weights still those of the
//! source), the matrices are rounded, and the rounded layer's outputs become the next layer's inputs.
//! Between layers the residual stream of all texts lies on disk in bf16; solved modules lie there, too,
//! until [`crate::convert`] takes them in file order. All of that is in a directory beside the target, so
//! a run that was killed goes on after the last finished layer, with the same bytes in the end.
//!
//! In memory are one layer's Hessians and its decoded matrices.

mod hidden;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Write;
use std::time::Instant;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::artifact::{Scratch, Sha256Hex, finish_hash, rounded};
use crate::calibrate::Sequences;
use crate::checkpoint::{Checkpoint, ModelDir};
use crate::error::{Failure, InputError, Result};
use crate::formats::{Codec, Format, Inputs};
use crate::interrupt::Interrupt;
use crate::plan::{Action, Plan, Step};
use crate::progress::Progress;
use crate::quant::gptq::{Hessian, Solver};
use crate::runtime::{FloatLinear, LayerEdge, Linear, Model, Rounding, State};
use crate::spark::{Module, SparkConfig};
use crate::tensor::{Dtype, TensorView};
use hidden::{HiddenReader, HiddenWriter};

/// Tokens that go through a layer together.
const PIECE: usize = 256;
/// Rows that one task rounds.
const TASK_ROWS: usize = 64;
/// Tasks whose result is in memory at a time.
const TASKS: usize = 32;

/// What became of a module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SolvedModule {
    /// `10 log10(sum y^2 / sum (y - y')^2)` of its outputs over the calibration inputs; absent of the
    /// head, whose outputs are not computed, and where nothing was lost.
    pub output_snr_db: Option<f64>,
    /// What was added to the diagonal of the Hessian, as a part of its mean.
    pub damping: f64,
    /// Input columns that no text reached.
    pub dead_columns: usize,
}

/// Codes of every quantized module.
pub struct Solution {
    scratch: Scratch,
    files: BTreeMap<String, memmap2::Mmap>,
    /// By module name.
    pub modules: BTreeMap<String, SolvedModule>,
    /// Hash of the calibration tokens.
    pub tokens_sha256: Sha256Hex,
}

impl Solution {
    /// What [`Codec::encoder`] takes for a module.
    pub fn module(&self, name: &str) -> Option<&[u8]> {
        self.files.get(name).map(|map| &map[..])
    }

    /// What was out of the ordinary, one sentence each.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for (name, module) in &self.modules {
            if module.dead_columns > 0 {
                notes.push(format!(
                    "{name}: {} input columns were zero in all texts and are rounded to nearest",
                    module.dead_columns
                ));
            }
            if module.damping > 0.011 {
                notes.push(format!("{name}: the Hessian needed a damping of {} of its mean", module.damping));
            }
        }
        notes
    }

    /// Removes the work in progress: the artifact is there.
    ///
    /// # Errors
    /// When that fails.
    pub fn remove(self) -> Result<()> {
        drop(self.files);
        self.scratch.remove()
    }
}

/// Steps of work, in tokens through a layer twice and once for the head: for a progress.
pub fn work(config: &SparkConfig, sequences: &Sequences) -> usize {
    sequences.total() * (2 * config.num_hidden_layers() + 1)
}

/// Bytes of work in progress on disk: solved modules and two residual streams.
pub fn scratch_bytes(plan: &Plan, config: &SparkConfig, sequences: &Sequences) -> u64 {
    plan.sizes.tensor_bytes + 2 * hidden::bytes(sequences.total(), config.hidden_size)
}

/// Anonymous bytes at most: Hessians of a layer, the work on the largest, its decoded matrices, and
/// activations of a piece.
pub fn peak_bytes(config: &SparkConfig) -> u64 {
    let square = |n: usize| 8 * (n as u64) * (n as u64);
    let (h, q, f) = (config.hidden_size, config.q_rows(), config.intermediate_size);
    let hessians = 2 * square(h) + square(q) + square(f);
    let largest = square(h.max(q).max(f));
    let matrices = 4 * h as u64 * (2 * q + 2 * config.kv_rows() + 3 * f) as u64;
    let pieces = 4 * (PIECE * (8 * h + 4 * q + 4 * f)) as u64 + 64 * (f.max(h) * PIECE) as u64;
    hessians + 5 * largest / 2 + matrices + pieces + (64 << 20)
}

/// Solves every quantized module of a plan.
///
/// # Errors
/// A NaN among the activations, a full disk, an interrupt.
pub fn solve(
    checkpoint: &Checkpoint,
    format: &dyn Format,
    plan: &Plan,
    sequences: &Sequences,
    target: &std::path::Path,
    progress: &dyn Progress,
    interrupt: &Interrupt,
) -> Result<Solution> {
    let tokens_sha256 = sequences.sha256();
    let scratch = Scratch::open(target, "gptq", &fingerprint(checkpoint, format, &tokens_sha256)?)?;
    let clock = Clock::default();
    let solve = Solve { checkpoint, format, plan, sequences, scratch: &scratch, progress, interrupt, clock };
    let mut modules = BTreeMap::new();
    let layers = checkpoint.config.num_hidden_layers();
    for layer in 0..layers {
        modules.extend(solve.layer(layer)?);
    }
    modules.extend(solve.head()?);
    let Clock { forward, hessians, factors, solve } = &solve.clock;
    tracing::info!(
        "calibrated on {} tokens: forward {:.1} s, Hessians {:.1} s, factors {:.1} s, solve {:.1} s",
        sequences.total(),
        forward.get(),
        hessians.get(),
        factors.get(),
        solve.get()
    );
    let dir = ModelDir::open(scratch.dir())?;
    let map = |name: &String| Ok((name.clone(), dir.map(&file_of(name))?));
    let files = modules.keys().map(map).collect::<Result<_>>()?;
    Ok(Solution { files, modules, tokens_sha256, scratch })
}

/// What the work in progress depends on.
fn fingerprint(checkpoint: &Checkpoint, format: &dyn Format, tokens: &Sha256Hex) -> Result<String> {
    let mut hash = Sha256::new();
    for shard in &checkpoint.files.shards {
        hash.update(crate::artifact::hash_bytes(shard.bytes()));
    }
    hash.update(json!([format.scheme(), format.options(), tokens, checkpoint.config_json]).to_string());
    hash.update(env!("CARGO_PKG_VERSION"));
    Ok(finish_hash(hash))
}

fn file_of(module: &str) -> String {
    format!("{module}.solved")
}

/// Seconds of the phases of a run, as [`crate::estimate`] names them.
#[derive(Default)]
struct Clock {
    forward: Cell<f64>,
    hessians: Cell<f64>,
    factors: Cell<f64>,
    solve: Cell<f64>,
}

/// Runs `work` and adds its seconds to a phase.
fn timed<T>(phase: &Cell<f64>, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = work();
    phase.set(phase.get() + start.elapsed().as_secs_f64());
    done
}

struct Solve<'a> {
    checkpoint: &'a Checkpoint,
    format: &'a dyn Format,
    plan: &'a Plan,
    sequences: &'a Sequences,
    scratch: &'a Scratch,
    progress: &'a dyn Progress,
    interrupt: &'a Interrupt,
    clock: Clock,
}

/// What is seen of a layer on the texts.
struct Collected {
    /// Of the inputs, by the first matrix that reads them.
    hessians: BTreeMap<Module, Hessian>,
    /// Squares of the outputs, by matrix.
    energy: BTreeMap<Module, f64>,
}

impl Solve<'_> {
    fn config(&self) -> &SparkConfig {
        &self.checkpoint.config
    }

    /// The quantized steps of a layer, or without one of the head.
    fn steps(&self, layer: Option<usize>) -> Vec<&Step> {
        let here = |s: &&Step| {
            s.action == Action::Quantize
                && if layer.is_some() { s.layer == layer } else { s.module == Module::LmHead }
        };
        self.plan.steps().map(|(_, step)| step).filter(here).collect()
    }

    /// The rows of the residual stream before a layer.
    fn hidden_before(&self, layer: usize) -> String {
        format!("hidden-{layer}")
    }

    fn layer(&self, layer: usize) -> Result<BTreeMap<String, SolvedModule>> {
        let record = format!("layer-{layer}.json");
        // Written after the next layer's inputs.
        if self.scratch.has(&record) {
            let modules = ModelDir::open(self.scratch.dir())?.read_json(&record)?;
            self.progress.advance(2 * self.sequences.total() as u64, "layers of an earlier run");
            return serde_json::from_value(modules).map_err(|e| InputError::file(&record).found(e).into());
        }
        let model = crate::opened::checkpoint_model(self.checkpoint, Rounding::None)?;
        let collected = self.collect(layer, &model)?;
        let (mut modules, mut decoded) = (BTreeMap::new(), BTreeMap::<String, Vec<f32>>::new());
        let mut solvers: BTreeMap<Module, (Solver, Vec<f32>)> = BTreeMap::new();
        for step in self.steps(Some(layer)) {
            let input = step.module.first_reader();
            if !solvers.contains_key(&input) {
                // One at a time: the steps of an input are neighbours but for the file's order.
                solvers.clear();
                let hessian = &collected.hessians[&input];
                let solver = timed(&self.clock.factors, || self.solver(hessian, step))?;
                solvers.insert(input, (solver, hessian.importance()));
            }
            let (solver, importance) = &solvers[&input];
            let matrix = decoded.entry(step.source.clone()).or_insert_with(|| {
                let source = self.checkpoint.tensor(&step.source);
                vec![0.0; source.rows() * source.row_len()]
            });
            let k = step.shape[1];
            let rows = &mut matrix[step.rows.start * k..step.rows.end * k];
            let inputs = Inputs { solver, importance };
            let noise = timed(&self.clock.solve, || self.module(step, inputs, Some(rows)))?;
            let energy = collected.energy.get(&step.module).copied().unwrap_or(0.0);
            modules.insert(
                step.module_name().to_owned(),
                SolvedModule {
                    output_snr_db: (noise > 0.0 && energy > 0.0)
                        .then(|| rounded(10.0 * (energy / noise).log10())),
                    damping: solver.damping(),
                    dead_columns: solver.dead(),
                },
            );
        }
        drop((collected, solvers));
        self.advance(layer, &decoded)?;
        let json = serde_json::to_vec(&modules).map_err(|e| InputError::file(&record).found(e))?;
        self.scratch.write(&record, &json)?;
        if layer > 0 {
            self.scratch.forget(&self.hidden_before(layer))?;
        }
        Ok(modules)
    }

    fn solver(&self, hessian: &Hessian, step: &Step) -> Result<Solver> {
        hessian.solver().map_err(|e| {
            InputError::file("calibration texts")
                .subject(step.module_name())
                .expected("finite activations")
                .found(e)
                .hint("the checkpoint is damaged, or the texts are not for it")
                .into()
        })
    }

    /// Runs the texts through the source's layer and looks at the inputs of its matrices.
    fn collect(&self, layer: usize, model: &Model<'_>) -> Result<Collected> {
        let config = self.config();
        let wanted = self.steps(Some(layer)).into_iter().map(|step| step.module.first_reader());
        let mut hessians: BTreeMap<Module, Hessian> =
            wanted.map(|input| (input, Hessian::new(input.in_features(config)))).collect();
        let mut energy = BTreeMap::new();
        self.each_piece(layer, model, |_| Ok(()), &mut |edge, rows| {
            if let Some(hessian) = edge.read_by().and_then(|input| hessians.get_mut(&input)) {
                timed(&self.clock.hessians, || hessian.add(rows));
            }
            if let Some(module) = edge.written_by() {
                *energy.entry(module).or_insert(0.0) +=
                    rows.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>();
            }
        })?;
        Ok(Collected { hessians, energy })
    }

    /// Runs the texts through the layer as solved; its outputs are the next layer's inputs.
    fn advance(&self, layer: usize, decoded: &BTreeMap<String, Vec<f32>>) -> Result<()> {
        let config = self.config();
        let packed = |spec: &crate::spark::TensorSpec| -> Result<Option<Box<dyn Linear + '_>>> {
            let Some(weights) = decoded.get(&spec.name) else { return Ok(None) };
            let source = self.checkpoint.tensor(&spec.name);
            let view =
                TensorView { dtype: Dtype::F32, bytes: bytemuck::cast_slice(weights.as_slice()), ..source };
            Ok(Some(Box::new(FloatLinear::new(view, Rounding::None)?)))
        };
        let lookup = |name: &str| self.checkpoint.files.get(name);
        let model = Model::from_parts(config.clone(), Rounding::None, lookup, packed, |_| Ok(None))?;
        let name = self.hidden_before(layer + 1);
        let mut writer = HiddenWriter::new(self.scratch, &name)?;
        self.each_piece(layer, &model, |rows| writer.append(rows), &mut |_, _| {})?;
        writer.finish()
    }

    /// Every text through one layer, a piece at a time; `see` gets the outputs.
    fn each_piece(
        &self,
        layer: usize,
        model: &Model<'_>,
        mut see: impl FnMut(&[f32]) -> Result<()>,
        tap: &mut dyn FnMut(LayerEdge, &[f32]),
    ) -> Result<()> {
        let before = match layer {
            0 => None,
            _ => Some(HiddenReader::open(self.scratch, &self.hidden_before(layer))?),
        };
        let (width, mut at) = (self.config().hidden_size, 0);
        for tokens in &self.sequences.tokens {
            let (mut state, mut position) = (State::new(self.config()), 0);
            for piece in tokens.chunks(PIECE) {
                self.interrupt.check()?;
                let mut h = match &before {
                    None => model.embed(piece),
                    Some(reader) => reader.rows(at * width..(at + piece.len()) * width)?,
                };
                at += piece.len();
                // The taps have a phase of their own.
                let tapped = self.clock.hessians.get();
                timed(&self.clock.forward, || model.run_layer(layer, &mut state, position, &mut h, tap));
                let in_taps = self.clock.hessians.get() - tapped;
                self.clock.forward.set(self.clock.forward.get() - in_taps);
                position += piece.len();
                see(&h)?;
                self.progress.advance(piece.len() as u64, &format!("layer {layer}"));
            }
        }
        Ok(())
    }

    fn head(&self) -> Result<BTreeMap<String, SolvedModule>> {
        let mut modules = BTreeMap::new();
        let (config, layers) = (self.config(), self.config().num_hidden_layers());
        for step in self.steps(None) {
            const RECORD: &str = "head.json";
            if self.scratch.has(RECORD) {
                let json = ModelDir::open(self.scratch.dir())?.read_json(RECORD)?;
                modules = serde_json::from_value(json).map_err(|e| InputError::file(RECORD).found(e))?;
                break;
            }
            let model = crate::opened::checkpoint_model(self.checkpoint, Rounding::None)?;
            let reader = HiddenReader::open(self.scratch, &self.hidden_before(layers))?;
            let mut hessian = Hessian::new(config.hidden_size);
            let total = self.sequences.total();
            for start in (0..total).step_by(PIECE) {
                self.interrupt.check()?;
                let end = (start + PIECE).min(total);
                let h = reader.rows(start * config.hidden_size..end * config.hidden_size)?;
                timed(&self.clock.hessians, || hessian.add(&model.final_norm(&h)));
                self.progress.advance((end - start) as u64, "head");
            }
            let solver = timed(&self.clock.factors, || self.solver(&hessian, step))?;
            let importance = hessian.importance();
            drop(hessian);
            let inputs = Inputs { solver: &solver, importance: &importance };
            timed(&self.clock.solve, || self.module(step, inputs, None))?;
            let solved =
                SolvedModule { output_snr_db: None, damping: solver.damping(), dead_columns: solver.dead() };
            modules.insert(step.module_name().to_owned(), solved);
            let json = serde_json::to_vec(&modules).map_err(|e| InputError::file(RECORD).found(e))?;
            self.scratch.write(RECORD, &json)?;
        }
        Ok(modules)
    }

    /// Solves one module into its file and, if there is room given, its decoded rows. Returns the
    /// squared error of its outputs.
    fn module(&self, step: &Step, inputs: Inputs<'_>, mut decoded: Option<&mut [f32]>) -> Result<f64> {
        let codec: &dyn Codec = match self.format.codec_at(step.module, step.layer) {
            Some(codec) => codec,
            None => return Ok(0.0),
        };
        let source = self.checkpoint.tensor(&step.source);
        let (k, name) = (step.shape[1], file_of(step.module_name()));
        let mut file = self.scratch.create(&name)?;
        let mut noise = 0.0;
        let starts: Vec<usize> = step.rows.clone().step_by(TASK_ROWS).collect();
        for starts in starts.chunks(TASKS) {
            self.interrupt.check()?;
            let solved: Vec<_> = starts
                .par_iter()
                .map(|&start| {
                    let rows = start..(start + TASK_ROWS).min(step.rows.end);
                    let mut weights = vec![0.0; rows.len() * k];
                    for (row, weights) in rows.zip(weights.chunks_exact_mut(k)) {
                        source.decode_row(row, weights);
                    }
                    if weights.iter().all(|w| w.is_finite()) {
                        Some(codec.solve(&weights, &inputs))
                    } else {
                        None
                    }
                })
                .collect();
            for (solved, &start) in solved.into_iter().zip(starts) {
                let Some(solved) = solved else {
                    return Err(InputError::default()
                        .subject(&step.source)
                        .expected("finite weights")
                        .found(format!("NaN or infinite in the rows from {start} on"))
                        .hint("the checkpoint is damaged, or training diverged")
                        .into());
                };
                file.write_all(&solved.bytes)
                    .map_err(|e| Failure::io(&self.scratch.dir().join(&name), "cannot write", e))?;
                noise += solved.output_noise;
                if let Some(decoded) = &mut decoded {
                    let at = (start - step.rows.start) * k;
                    decoded[at..at + solved.decoded.len()].copy_from_slice(&solved.decoded);
                }
            }
        }
        self.scratch.finish(&name, &file)?;
        Ok(noise)
    }
}
