//! Weights of an export against the rows of the checkpoint, constant by constant; queries are compared with
//! the factor of the scores folded in.

use std::collections::BTreeMap;

use half::f16;
use rayon::prelude::*;

use super::ExportFiles;
use super::view::{code_range, codes};
use crate::artifact::Manifest;
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::interrupt::Interrupt;
use crate::npu::options::Options;
use crate::npu::step;
use crate::npu::weights::Weight;
use crate::onnx::{ElementType, Initializer};
use crate::progress::Progress;
use crate::quant::{ErrorSums, int8};
use crate::spark::Module;
use crate::tensor::{TensorView, amax_bits, extremes};
use crate::verify::{Check, Finding, ModuleSnr};

/// Rows summed by one task: part of the order of summation, so independent of the thread count.
const ROWS_PER_TASK: usize = 64;

/// The manifest's SNR is rounded to 0.001 dB, and measured on the same bytes.
const SNR_TOLERANCE_DB: f64 = 0.01;

/// How much more than half a step of its grid a 16-bit code may be off: the f32 scale and the whole zero
/// point leave the ends of the range a little outside.
const SLACK: f64 = 1.05;

/// Compares every weight and the embedding with the source.
///
/// # Errors
/// When interrupted.
pub fn check_export_weights(
    files: &ExportFiles,
    manifest: &Manifest,
    checkpoint: &Checkpoint,
    progress: &dyn Progress,
    interrupt: &Interrupt,
) -> Result<(Vec<ModuleSnr>, Vec<Finding>)> {
    let constants = constants(files);
    let (mut modules, mut findings) = (Vec::new(), Vec::new());
    // The weights are the same however the step is cut, and whatever the caches are.
    let graphs = step::graphs(&checkpoint.config, &Options::default());
    for weight in graphs.iter().flat_map(|g| &g.weights) {
        interrupt.check()?;
        let source = checkpoint.tensor(&weight.source);
        progress.advance((weight.rows.len() * source.row_bytes()) as u64, &weight.name);
        let Some(constant) = constants.get(weight.name.as_str()) else {
            findings.push(
                Finding::new(Check::Contract, "the graphs", "missing")
                    .subject(&weight.name)
                    .consequence("a linear or a norm of the model is not in the step"),
            );
            continue;
        };
        let finding =
            |check: Check, what: String| Finding::new(check, constant.file, what).subject(&weight.name);
        let stored = match constant.stored(weight) {
            Ok(stored) => stored,
            Err(what) => {
                findings.push(finding(Check::Contract, what).consequence("the weight cannot be read"));
                continue;
            }
        };
        let measured = measure(source, weight, &stored);
        if let Some(row) = measured.impossible_row {
            let whose = row_of(source, weight, &stored, row)
                .map_or_else(String::new, |other| format!("; it is row {other} of {}", weight.source));
            let what = format!(
                "row {row}: its error is larger than rounding can make it; codes and scale do not belong \
                 together, or to row {} of {}{whose}",
                weight.rows.start + row,
                weight.source
            );
            findings.push(finding(Check::Weights, what).consequence("the row's outputs are wrong"));
        }
        let snr_db = measured.sums.snr_db();
        let stated = manifest.tensors.iter().find(|t| t.name == weight.name).and_then(|t| t.snr_db);
        let agrees = match (snr_db, stated) {
            (Some(a), Some(b)) => (a - b).abs() <= SNR_TOLERANCE_DB,
            (a, b) => a == b,
        };
        if !agrees && measured.impossible_row.is_none() {
            let shown = |db: Option<f64>| db.map_or_else(|| "exact".to_owned(), |db| format!("{db:.3} dB"));
            let what = format!("weight SNR {}, the record says {}", shown(snr_db), shown(stated));
            findings.push(finding(Check::Weights, what));
        }
        modules.push(ModuleSnr { module: weight.name.clone(), snr_db, zero_rows: measured.zero_rows });
    }
    findings.extend(check_embedding(files, checkpoint));
    Ok((modules, findings))
}

/// A constant, its parts and where it is.
struct Constant<'a> {
    file: &'a str,
    codes: &'a Initializer,
    grid: Option<[&'a Initializer; 2]>,
    data: &'a [u8],
}

/// Constants of all graphs by name.
fn constants(files: &ExportFiles) -> BTreeMap<&str, Constant<'_>> {
    let mut constants = BTreeMap::new();
    for (info, graph) in files.manifest().graphs.iter().zip(&files.graphs) {
        let Some(graph) = graph else { continue };
        let initializers = &graph.model.graph.initializers;
        let by_name: BTreeMap<&str, &Initializer> =
            initializers.iter().map(|i| (i.name.as_str(), i)).collect();
        // The encoding of a weight is what its DequantizeLinear reads, whatever that is called.
        let grids: BTreeMap<&str, [&Initializer; 2]> = graph
            .model
            .graph
            .nodes
            .iter()
            .filter(|n| n.op_type == "DequantizeLinear")
            .filter_map(|n| {
                let [codes, scale, zero] = &n.inputs[..] else { return None };
                Some((codes.as_str(), [*by_name.get(scale.as_str())?, *by_name.get(zero.as_str())?]))
            })
            .collect();
        for codes in initializers {
            let grid = grids.get(codes.name.as_str()).copied();
            let constant = Constant { file: &info.file, codes, grid, data: &graph.data };
            constants.entry(codes.name.as_str()).or_insert(constant);
        }
    }
    constants
}

/// The bytes of a weight with what they mean.
struct Stored<'a> {
    element: ElementType,
    bytes: &'a [u8],
    columns: usize,
    /// One per row, or one; empty of floats.
    scales: Vec<f32>,
    zeros: Vec<i64>,
}

impl<'a> Constant<'a> {
    /// What is stored, if it has the form of the weight; else what is wrong.
    fn stored(&self, weight: &Weight) -> Result<Stored<'a>, String> {
        let shape = weight.shape();
        if self.codes.shape != shape {
            return Err(format!("expected shape {shape:?}, found {:?}", self.codes.shape));
        }
        let element = self.codes.element;
        let bytes = self.codes.bytes(self.data).map_err(|e| e.to_string())?;
        let stored =
            Stored { element, bytes, columns: weight.columns, scales: Vec::new(), zeros: Vec::new() };
        match (element, self.grid) {
            (ElementType::F32, None) => return Ok(stored),
            (ElementType::F32 | ElementType::I64, _) | (_, None) => {
                return Err(format!("{element}, expected floats, or codes with an encoding"));
            }
            _ => {}
        }
        let [scale, zero] = self.grid.ok_or("no encoding")?;
        let scales = scale.bytes(self.data).map_err(|e| e.to_string())?;
        let scales: Vec<f32> = scales.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let zeros = codes(zero.element, zero.bytes(self.data).map_err(|e| e.to_string())?);
        let zeros = zeros.filter(|z| z.len() == scales.len() && zero.element == element);
        let zeros = zeros.ok_or_else(|| format!("a zero point of {} {:?}", zero.element, zero.shape))?;
        if scales.len() != 1 && scales.len() != weight.rows.len() {
            return Err(format!("{} scales for {} rows", scales.len(), weight.rows.len()));
        }
        if let Some(bad) = scales.iter().position(|s| !s.is_normal() || *s < 0.0) {
            return Err(format!("row {bad}: expected a positive scale, found {}", scales[bad]));
        }
        Ok(Stored { scales, zeros, ..stored })
    }
}

impl Stored<'_> {
    fn row_bytes(&self, row: usize) -> &[u8] {
        let length = self.columns * self.element.bytes();
        &self.bytes[row * length..][..length]
    }

    fn encoding(&self, row: usize) -> (f32, i64) {
        let i = if self.scales.len() == 1 { 0 } else { row };
        (self.scales[i], self.zeros[i])
    }

    /// Squared error of a row against its source; `None` when no encoder can have left as much. `step` is
    /// that of the grid that the source calls for.
    fn row_error(&self, row: usize, source: &[f32], step: f64) -> Option<ErrorSums> {
        let bytes = self.row_bytes(row);
        if self.element == ElementType::F32 {
            let written = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
            let same = written.zip(source).all(|(w, s)| w.to_bits() == s.to_bits());
            let signal = source.iter().map(|x| f64::from(*x).powi(2)).sum();
            return same.then_some(ErrorSums { signal, noise: 0.0 });
        }
        let (scale, zero) = self.encoding(row);
        if self.element == ElementType::I8 && zero == 0 {
            let codes: &[i8] = bytemuck::cast_slice(bytes);
            let sums = int8::row_error(source, codes, scale);
            let amax = f32::from_bits(amax_bits(source));
            let legal = codes.iter().all(|c| *c != i8::MIN);
            let bound = int8::rounding_bound(source.len(), amax);
            return (legal && sums.noise <= bound).then_some(sums);
        }
        let mut sums = ErrorSums::default();
        for (x, code) in source.iter().zip(codes(self.element, bytes)?) {
            let x = f64::from(*x);
            #[expect(clippy::cast_precision_loss, reason = "codes are of 16 bits")]
            let error = x - (code - zero) as f64 * f64::from(scale);
            sums += ErrorSums { signal: x * x, noise: error * error };
        }
        #[expect(clippy::cast_precision_loss, reason = "row lengths are far below 2^53")]
        let bound = source.len() as f64 * (step / 2.0).powi(2) * SLACK;
        (sums.noise <= bound).then_some(sums)
    }
}

/// A row of the weight as it should be: the source's, times the factor.
fn expected_row(source: TensorView<'_>, weight: &Weight, row: usize, out: &mut [f32]) {
    source.decode_row(row, out);
    if weight.factor != 1.0 {
        out.iter_mut().for_each(|x| *x *= weight.factor);
    }
}

/// The step that a grid over these values has: from end to end, or of the larger one where the zero point is
/// in the middle. int8 rows have a bound of their own.
fn grid_step(element: ElementType, zero: i64, [low, high]: [f32; 2]) -> f64 {
    let (low, high) = (f64::from(low.min(0.0)), f64::from(high.max(0.0)));
    let (first, last) = code_range(element);
    #[expect(clippy::cast_precision_loss, reason = "codes are of 16 bits")]
    let (codes, largest) = ((last - first) as f64, last as f64);
    if first < 0 && zero == 0 { (-low).max(high) / largest } else { (high - low) / codes }
}

#[derive(Default)]
struct Measured {
    sums: ErrorSums,
    zero_rows: usize,
    /// The first row that no encoder can have made.
    impossible_row: Option<usize>,
}

fn measure(source: TensorView<'_>, weight: &Weight, stored: &Stored<'_>) -> Measured {
    let rows = weight.rows.len();
    let whole = match stored.scales.len() == 1 && rows > 1 {
        false => None,
        true => {
            let mut ends = [0.0f32; 2];
            let mut row = vec![0.0; weight.columns];
            for r in weight.rows.clone() {
                expected_row(source, weight, r, &mut row);
                let [low, high] = extremes(&row);
                ends = [ends[0].min(low), ends[1].max(high)];
            }
            Some(ends)
        }
    };
    let tasks: Vec<Measured> = (0..rows.div_ceil(ROWS_PER_TASK))
        .into_par_iter()
        .map_init(
            || vec![0.0; weight.columns],
            |expected, task| {
                let mut part = Measured::default();
                for row in task * ROWS_PER_TASK..((task + 1) * ROWS_PER_TASK).min(rows) {
                    expected_row(source, weight, weight.rows.start + row, expected);
                    part.zero_rows += usize::from(amax_bits(expected) == 0);
                    let zero = stored.zeros.first().copied().unwrap_or(0);
                    let step = grid_step(stored.element, zero, whole.unwrap_or_else(|| extremes(expected)));
                    match stored.row_error(row, expected, step) {
                        Some(sums) => part.sums += sums,
                        None => part.impossible_row = part.impossible_row.or(Some(row)),
                    }
                }
                part
            },
        )
        .collect();
    tasks.into_iter().fold(Measured::default(), |mut total, part| {
        total.sums += part.sums;
        total.zero_rows += part.zero_rows;
        total.impossible_row = total.impossible_row.or(part.impossible_row);
        total
    })
}

/// The row of the source tensor that a stored row is, if it is another one's.
fn row_of(source: TensorView<'_>, weight: &Weight, stored: &Stored<'_>, row: usize) -> Option<usize> {
    (0..source.rows()).into_par_iter().find_first(|other| {
        let mut expected = vec![0.0; weight.columns];
        expected_row(source, weight, *other, &mut expected);
        let zero = stored.zeros.first().copied().unwrap_or(0);
        let step = grid_step(stored.element, zero, extremes(&expected));
        amax_bits(&expected) != 0 && stored.row_error(row, &expected, step).is_some()
    })
}

/// The rows for `hidden_in` are the source's, rounded to the type of the file.
fn check_embedding(files: &ExportFiles, checkpoint: &Checkpoint) -> Option<Finding> {
    let info = &files.manifest().embedding;
    let bytes: &[u8] = files.embedding.as_deref()?;
    let spec = checkpoint.specs.iter().find(|s| s.module == Module::Embedding)?;
    let source = checkpoint.tensor(&spec.name);
    let half = info.dtype == "float16";
    let length = source.row_len() * if half { 2 } else { 4 };
    // Another size is a finding of the contract.
    if bytes.len() != length * source.rows() {
        return None;
    }
    let differs = |row: &usize| {
        let mut expected = vec![0.0; source.row_len()];
        source.decode_row(*row, &mut expected);
        let written = &bytes[row * length..][..length];
        match half {
            true => expected.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).ne(written.iter().copied()),
            false => expected.iter().flat_map(|x| x.to_le_bytes()).ne(written.iter().copied()),
        }
    };
    let row = (0..source.rows()).into_par_iter().find_first(differs)?;
    Some(
        Finding::new(Check::Weights, &info.file, format!("is not row {row} of {}", source.name))
            .subject(format!("row {row}"))
            .consequence("the token is taken for another one"),
    )
}
