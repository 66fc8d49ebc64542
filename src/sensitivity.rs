//! Widths and group sizes for a budget of bytes read per decoded token.
//!
//! Of every module, what it loses in each width is measured on the weights themselves, rounded as the build would
//! round them (of GPTQ its grids; that its codes make up for each other's errors lowers what all modules lose): the
//! energy of the error of its outputs as a part of the energy of the outputs, so that modules of different size and
//! scale compare. Without texts every input column counts alike, or as an importance matrix says. With texts the
//! columns count by the mean squares of the inputs that the unquantized model has there, and the outputs are its own.
//!
//! That part is then multiplied by what the outputs are to the model ([`Energy::share`]): a fifth of what an MLP
//! loses is little where the MLP adds little to the residual stream. From there on errors are taken to go through
//! the model as the stream itself does, so they stay the part of it that they are, up to the head, whose own error is
//! counted whole. Without texts the embedding and every attention and MLP are taken to add alike.
//!
//! Errors of different weights are taken to have nothing to do with each other, which is what rounding makes of
//! them; errors of inputs rounded to int8 are the same in every width but bf16, and left out. On the bundled
//! checkpoint the sum, with texts, went along with the divergence that `verify` measures: 5.0, 2.4, 1.8 and 1.0 %
//! came to KL of 0.038, 0.022, 0.018 and 0.010. It ranks builds; `verify` measures them.
//!
//! Modules that vLLM joins go together. What a width costs in bytes is what [`Plan`] says of a build with it.
//! [`crate::quant::allocate`] chooses.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::artifact::Sha256Hex;
use crate::calibrate::{Energies, Energy, Importance};
use crate::checkpoint::Checkpoint;
use crate::error::{Failure, InputError, Result};
use crate::formats::{Codec, Format, Head, Overrides, W4a8, Width};
use crate::interrupt::Interrupt;
use crate::plan::{Plan, module_of};
use crate::progress::Progress;
use crate::quant::allocate::{Cost, allocate};
use crate::quant::{ErrorSums, Method};
use crate::spark::{Module, TensorSpec};
use crate::tensor::TensorView;

/// Weight rows of a matrix that are rounded, evenly from all.
const MAX_ROWS: usize = 1024;
/// Rows of one task.
const TASK_ROWS: usize = 32;

/// What is known of the inputs of matrices.
#[derive(Clone, Copy, Debug)]
pub enum Known<'a> {
    /// Nothing: all columns count alike.
    Nothing,
    /// How much each column counts, relatively.
    Importance(&'a Importance),
    /// What texts made of them.
    Energies {
        /// The mean squares.
        energies: &'a Energies,
        /// Hash of the texts' tokens.
        tokens_sha256: &'a Sha256Hex,
    },
}

/// What the user has decided: the pass leaves it as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fixed {
    /// The group size of 4-bit modules.
    pub group_size: bool,
    /// The width of the head.
    pub head: bool,
    /// The widths of some projections, those that the others have anyhow included.
    pub overrides: Overrides,
}

/// What a budget came to, as the manifest keeps it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allocation {
    /// The budget, in bytes read per decoded token.
    pub target_bytes: u64,
    /// What the build reads.
    pub bytes_per_token: u64,
    /// Hash of the calibration tokens, or of the importance matrix, by which columns counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inputs_sha256: Option<Sha256Hex>,
    /// Sum of what the modules would lose in the smallest build.
    pub error_before: f64,
    /// Sum of what they lose.
    pub error: f64,
    /// Those that would lose most first.
    pub modules: Vec<Allocated>,
}

/// What became of modules that go together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allocated {
    /// Their names.
    pub modules: Vec<String>,
    /// `g128`, `g64`, `g32` (4 bits in such groups), `int8` or `bf16`.
    pub width: String,
    /// Whether an option said so.
    pub fixed: bool,
    /// Bytes of it that a token reads.
    pub bytes: u64,
    /// Squared error of the outputs as a part of what the model has there, in the smallest build; of modules that go
    /// together, the sum.
    pub error_before: f64,
    /// The same in the width that it has.
    pub error: f64,
}

/// Modules that go together, and the widths that there are for them, the smallest build's first.
struct Unit<'a> {
    members: Vec<&'a TensorSpec>,
    head: bool,
    fixed: bool,
    widths: Vec<Width>,
}

impl Unit<'_> {
    fn names(&self) -> Vec<&str> {
        if self.head {
            vec!["lm_head"]
        } else {
            self.members.iter().map(|spec| module_of(&spec.name)).collect()
        }
    }

    /// The build with this unit in another width.
    fn apply(&self, format: W4a8, width: Width) -> W4a8 {
        match (self.head, width) {
            (true, Width::Int8) => format.with_head(Head::Int8),
            (true, Width::Source) => format.with_head(Head::Source),
            (true, _) => format.with_head(Head::Int4),
            (false, _) => {
                let overrides = format.overrides().clone().and(self.names(), width);
                format.with_overrides(overrides)
            }
        }
    }
}

/// Anonymous bytes at most, without the texts ([`Energies::peak_bytes`]): rows as they are and as they come back.
pub fn peak_bytes(checkpoint: &Checkpoint, threads: usize) -> u64 {
    let longest = checkpoint.specs.iter().filter_map(|s| s.shape.get(1)).max().copied().unwrap_or(0);
    (threads * TASK_ROWS * longest * 12) as u64 + (16 << 20)
}

fn head_spec(checkpoint: &Checkpoint) -> Option<&TensorSpec> {
    let tied = checkpoint.config.tie_word_embeddings;
    let module = if tied { Module::Embedding } else { Module::LmHead };
    checkpoint.specs.iter().find(|spec| spec.module == module)
}

/// The smallest of some builds that the checkpoint goes with, the first being the smallest.
///
/// # Errors
/// When it goes with none: what is wrong with the first.
pub fn smallest(checkpoint: &Checkpoint, builds: Vec<W4a8>) -> Result<W4a8> {
    let mut refused = None;
    for build in builds {
        match Plan::new(checkpoint, &build) {
            Ok(_) => return Ok(build),
            Err(why) => refused = refused.or(Some(why)),
        }
    }
    Err(refused.unwrap_or_else(|| Failure::usage("no build to choose from")))
}

/// A choice to make, of which headers decide the bytes.
pub struct Choosing<'a> {
    checkpoint: &'a Checkpoint,
    base: &'a W4a8,
    target_bytes: u64,
    units: Vec<Unit<'a>>,
    /// Bytes of each unit in each of its widths.
    bytes: Vec<Vec<u64>>,
    /// What a token reads beside them.
    others: u64,
}

impl<'a> Choosing<'a> {
    /// Widths for the modules of the smallest build, `base`.
    ///
    /// # Errors
    /// A budget that is below the smallest build, or with which nothing has to be quantized.
    pub fn new(checkpoint: &'a Checkpoint, base: &'a W4a8, fixed: &Fixed, target_bytes: u64) -> Result<Self> {
        let units = units(checkpoint, base, fixed);
        let plan = Plan::new(checkpoint, base)?;
        let bytes =
            units.iter().map(|unit| bytes(checkpoint, base, &plan, unit)).collect::<Result<Vec<_>>>()?;
        let smallest = plan.sizes.bytes_per_token;
        check_budget(target_bytes, smallest, &bytes)?;
        let others = smallest - bytes.iter().map(|ways| ways[0]).sum::<u64>();
        Ok(Self { checkpoint, base, target_bytes, units, bytes, others })
    }

    /// Source bytes that are rounded, for a progress.
    pub fn work(&self) -> u64 {
        self.units.iter().map(|unit| rounded_bytes(self.checkpoint, unit)).sum()
    }

    /// Measures what modules lose, and chooses.
    ///
    /// # Errors
    /// Weights that are NaN or infinite; an interrupt.
    pub fn run(
        &self,
        known: Known<'_>,
        progress: &dyn Progress,
        interrupt: &Interrupt,
    ) -> Result<(W4a8, Allocation)> {
        let Self { checkpoint, base, target_bytes, units, bytes, others } = self;
        let mut costs: Vec<Vec<Cost>> = Vec::with_capacity(units.len());
        for (unit, bytes) in units.iter().zip(bytes) {
            interrupt.check()?;
            let errors = errors(checkpoint, base, unit, known)?;
            costs.push(bytes.iter().zip(errors).map(|(&bytes, error)| Cost { bytes, error }).collect());
            progress.advance(rounded_bytes(checkpoint, unit), unit.names()[0]);
        }
        let chosen = allocate(&costs, target_bytes - others)
            .map_err(|e| Failure::usage(format!("--target-bytes {target_bytes}: {e} beside {others}")))?;
        let format = units
            .iter()
            .zip(&chosen)
            .filter(|(unit, _)| !unit.fixed)
            .fold((*base).clone(), |format, (unit, way)| unit.apply(format, unit.widths[*way]));
        let bytes_per_token = Plan::new(checkpoint, &format)?.sizes.bytes_per_token;
        let allocation = allocation(units, &costs, &chosen, known);
        Ok((format, Allocation { target_bytes: *target_bytes, bytes_per_token, ..allocation }))
    }
}

/// Source bytes of a unit that are rounded.
fn rounded_bytes(checkpoint: &Checkpoint, unit: &Unit<'_>) -> u64 {
    let of = |spec: &&TensorSpec| {
        let source = checkpoint.tensor(&spec.name);
        (source.rows().min(MAX_ROWS) * source.row_bytes()) as u64
    };
    unit.members.iter().map(of).sum()
}

/// The modules that have a width, in the order of the model.
fn units<'a>(checkpoint: &'a Checkpoint, base: &W4a8, fixed: &Fixed) -> Vec<Unit<'a>> {
    let base_width = base.width();
    // The smallest build is in the coarsest groups that go with the checkpoint, so finer ones do, too.
    let finer = |width: &Width| match width.group_size() {
        Some(size) => !fixed.group_size && Some(size) < base_width.group_size(),
        None => true,
    };
    let all: Vec<Width> = [base_width].into_iter().chain(Width::ALL.into_iter().filter(finer)).collect();
    let mut units: Vec<Unit<'a>> = Vec::new();
    for spec in checkpoint.specs.iter().filter(|spec| spec.module.is_projection()) {
        if spec.module == Module::MlpUp
            && let Some(gate) = units.last_mut().filter(|unit| unit.members[0].module == Module::MlpGate)
        {
            gate.members.push(spec);
            continue;
        }
        let (fixed, widths) = match fixed.overrides.of(spec.module, spec.layer) {
            Some(width) => (true, vec![width]),
            None => (false, all.clone()),
        };
        units.push(Unit { members: vec![spec], head: false, fixed, widths });
    }
    let head_width = match base.head() {
        Head::Int4 => base_width,
        Head::Int8 => Width::Int8,
        Head::Source => Width::Source,
    };
    let widths = if fixed.head { vec![head_width] } else { vec![base_width, Width::Int8, Width::Source] };
    let members: Vec<&TensorSpec> = head_spec(checkpoint).into_iter().collect();
    units.push(Unit { members, head: true, fixed: fixed.head, widths });
    units
}

/// Bytes that a token reads of a unit in each of its widths.
fn bytes(checkpoint: &Checkpoint, base: &W4a8, plan: &Plan, unit: &Unit<'_>) -> Result<Vec<u64>> {
    let is_ours = |module: Module, source: &str| {
        let ours = unit.members.iter().any(|spec| spec.name == source);
        // Beside an untied head the embedding is only looked up.
        ours && (!unit.head || module != Module::Embedding || !base.unties_head())
    };
    let steps = plan.steps().filter(|(_, step)| is_ours(step.module, &step.source));
    let smallest: u64 = steps.map(|(_, step)| step.len_bytes()).sum();
    let of = |width: &Width| {
        let changed = if unit.fixed { base.clone() } else { unit.apply(base.clone(), *width) };
        let read = Plan::new(checkpoint, &changed)?.sizes.bytes_per_token;
        Ok((smallest + read).saturating_sub(plan.sizes.bytes_per_token))
    };
    unit.widths.iter().map(of).collect()
}

fn check_budget(target: u64, smallest: u64, bytes: &[Vec<u64>]) -> Result<()> {
    let most = |ways: &Vec<u64>| ways.iter().max().copied().unwrap_or(0) - ways.first().copied().unwrap_or(0);
    let largest = smallest + bytes.iter().map(most).sum::<u64>();
    let refuse = |why: String| Err(Failure::usage(format!("--target-bytes {target}: {why}")));
    if smallest == largest {
        return refuse(format!(
            "other options decide every module; this build reads {smallest} bytes per token"
        ));
    }
    if target < smallest {
        return refuse(format!(
            "the smallest build with these options reads {smallest} bytes per token; give at least that"
        ));
    }
    if target >= largest {
        return refuse(format!(
            "has no effect: with all in bf16 that may be, a token reads {largest} bytes; give less"
        ));
    }
    Ok(())
}

/// What a unit loses in each of its widths.
fn errors(checkpoint: &Checkpoint, base: &W4a8, unit: &Unit<'_>, known: Known<'_>) -> Result<Vec<f64>> {
    let mut errors = vec![0.0; unit.widths.len()];
    for spec in &unit.members {
        let module = if unit.head { Module::LmHead } else { spec.module };
        let alike = share_alike(module, spec.layer);
        let (columns, signal, share) = match known {
            Known::Nothing => (None, None, alike),
            Known::Importance(importance) => {
                let columns = importance.of(module, &spec.name);
                (columns.map(|columns| columns.iter().copied().map(f64::from).collect()), None, alike)
            }
            Known::Energies { energies, .. } => match energies.of(module, spec.layer) {
                Some(Energy { columns, outputs, share }) => (Some(columns), Some(outputs), share),
                None => (None, None, alike),
            },
        };
        let columns: Option<Vec<f64>> = columns;
        let grids = match (known, base.method()) {
            // What the build rounds by, too.
            (Known::Importance(_), _) | (_, Method::Gptq) => columns.as_deref().map(relative),
            _ => None,
        };
        let inputs = Inputs { columns: columns.as_deref(), grids: grids.as_deref() };
        let codecs: Vec<Option<&dyn Codec>> = unit.widths.iter().map(|width| base.codec_of(*width)).collect();
        let sums = measure(checkpoint.tensor(&spec.name), &codecs, inputs)?;
        for (error, sums) in errors.iter_mut().zip(sums) {
            // Outputs that are the same for all, as the logits of equal rows, have no energy of their own.
            let signal = signal.filter(|signal| *signal > 0.0).unwrap_or(sums.signal);
            *error += share * ErrorSums { signal, ..sums }.relative();
        }
    }
    Ok(errors)
}

/// [`Energy::share`] if the embedding and the attentions and MLPs of all layers added alike, and independently: the
/// first one is half of the sum after it, the second a third.
fn share_alike(module: Module, layer: Option<usize>) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    let before = layer.map(|layer| 1.0 + 2.0 * layer as f64);
    match (module, before) {
        (_, None) => 1.0,
        (Module::QkvProj | Module::OutProj, Some(before)) => 1.0 / (before + 1.0),
        (_, Some(before)) => 1.0 / (before + 2.0),
    }
}

/// How much the columns of a matrix count.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    /// In what is lost.
    columns: Option<&'a [f64]>,
    /// In the choice of grids.
    grids: Option<&'a [f32]>,
}

/// Relative to the largest, as grids are searched by.
fn relative(columns: &[f64]) -> Vec<f32> {
    let largest = columns.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    #[expect(clippy::cast_possible_truncation, reason = "relative weights")]
    columns.iter().map(|c| (c / largest) as f32).collect()
}

/// Rounds rows of a matrix by several codecs, none of which loses nothing. Sums are those of all rows, as far as the
/// rows that are rounded tell.
fn measure(
    source: TensorView<'_>,
    codecs: &[Option<&dyn Codec>],
    inputs: Inputs<'_>,
) -> Result<Vec<ErrorSums>> {
    let (k, stride) = (source.row_len(), source.rows().div_ceil(MAX_ROWS).max(1));
    let rows: Vec<usize> = (0..source.rows()).step_by(stride).collect();
    let tasks: Vec<Option<Vec<ErrorSums>>> = rows
        .par_chunks(TASK_ROWS)
        .map(|rows| {
            let mut weights = vec![0.0; rows.len() * k];
            for (row, weights) in rows.iter().zip(weights.chunks_exact_mut(k)) {
                source.decode_row(*row, weights);
            }
            let error = |codec: &Option<&dyn Codec>| match codec {
                None => ErrorSums::weighted(&weights, &weights, k, inputs.columns),
                Some(codec) => {
                    let rounded = codec.round(&weights, k, inputs.grids);
                    ErrorSums::weighted(&weights, &rounded, k, inputs.columns)
                }
            };
            weights.iter().all(|w| w.is_finite()).then(|| codecs.iter().map(error).collect())
        })
        .collect();
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    let share = source.rows() as f64 / rows.len().max(1) as f64;
    let mut total = vec![ErrorSums::default(); codecs.len()];
    // In the order of the rows: the choice must not depend on threads.
    for task in tasks {
        let Some(sums) = task else {
            return Err(InputError::default()
                .subject(source.name)
                .expected("finite weights")
                .found("NaN or infinite ones")
                .hint("the checkpoint is damaged, or training diverged")
                .into());
        };
        for (total, sums) in total.iter_mut().zip(sums) {
            *total += ErrorSums { signal: share * sums.signal, noise: share * sums.noise };
        }
    }
    Ok(total)
}

/// What there is to say of a choice, but for its bytes as a whole.
fn allocation(units: &[Unit<'_>], costs: &[Vec<Cost>], chosen: &[usize], known: Known<'_>) -> Allocation {
    let mut modules: Vec<Allocated> = units
        .iter()
        .zip(costs)
        .zip(chosen)
        .map(|((unit, costs), &way)| Allocated {
            modules: unit.names().into_iter().map(str::to_owned).collect(),
            width: unit.widths[way].name().to_owned(),
            fixed: unit.fixed,
            bytes: costs[way].bytes,
            error_before: readable(costs[0].error),
            error: readable(costs[way].error),
        })
        .collect();
    // Stable: equal ones stay in the order of the model.
    modules.sort_by(|a, b| b.error_before.total_cmp(&a.error_before));
    let inputs_sha256 = match known {
        Known::Nothing => None,
        Known::Importance(importance) => Some(importance.sha256.clone()),
        Known::Energies { tokens_sha256, .. } => Some(tokens_sha256.clone()),
    };
    Allocation {
        target_bytes: 0,
        bytes_per_token: 0,
        inputs_sha256,
        error_before: readable(costs.iter().map(|ways| ways[0].error).sum()),
        error: readable(costs.iter().zip(chosen).map(|(ways, way)| ways[*way].error).sum()),
        modules,
    }
}

/// Six digits.
fn readable(error: f64) -> f64 {
    format!("{error:.5e}").parse().unwrap_or(error)
}
