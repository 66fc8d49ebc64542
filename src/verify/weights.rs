//! How far the written weights are from the source's, module by module.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::contract::expected_steps;
use super::{Check, Finding};
use crate::artifact::Manifest;
use crate::checkpoint::{Checkpoint, TensorFiles};
use crate::error::Result;
use crate::formats::{Format, Packed, Tolerance};
use crate::interrupt::Interrupt;
use crate::plan::Action;
use crate::progress::Progress;
use crate::quant::{ErrorSums, Method};
use crate::smooth::Scaling;
use crate::tensor::{TensorView, amax_bits};

/// Rows summed by one task: part of the order of summation, so independent of the thread count.
pub(super) const ROWS_PER_TASK: usize = 64;

/// The manifest's SNR is rounded to 0.001 dB, and measured on the same bytes.
const SNR_TOLERANCE_DB: f64 = 0.01;

/// Weight SNR of a quantized module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleSnr {
    /// Module name.
    pub module: String,
    /// `10 log10(sum w^2 / sum (w - dequantized)^2)`; null where nothing was lost.
    pub snr_db: Option<f64>,
    /// Rows that are all zero in the source.
    pub zero_rows: usize,
}

/// Decodes every quantized module from disk and compares it with the source.
///
/// # Errors
/// When interrupted.
pub fn check_weights(
    files: &TensorFiles,
    manifest: &Manifest,
    checkpoint: &Checkpoint,
    format: &dyn Format,
    progress: &dyn Progress,
    interrupt: &Interrupt,
) -> Result<(Vec<ModuleSnr>, Vec<Finding>)> {
    let (mut modules, mut findings) = (Vec::new(), Vec::new());
    for step in expected_steps(checkpoint, format) {
        interrupt.check()?;
        let source = checkpoint.tensor(&step.source);
        progress.advance((step.rows.len() * source.row_bytes()) as u64, step.module_name());
        let Some(codec) =
            format.codec_at(step.module, step.layer).filter(|_| step.action == Action::Quantize)
        else {
            continue;
        };
        // What cannot be read is a finding of the contract.
        let Ok(packed) = codec.read(files, step.module_name(), step.shape) else {
            continue;
        };
        let tensor = &step.outputs[0].name;
        let file = files.shard_of(tensor).map_or("", |s| s.file_name.as_str());
        // An importance matrix, too, gives up weights that hardly count for others.
        let weighted = manifest.calibration_sha256.is_some() && manifest.smoothing.is_none();
        let tolerance = match format.method() {
            Method::RoundToNearest | Method::Search if !weighted => Tolerance::Rounding,
            _ => Tolerance::Solved,
        };
        let smoothing = manifest.smoothing.as_ref().filter(|s| s.fits(&checkpoint.config));
        let scaling = smoothing.and_then(|s| s.of(step.module, step.layer, &checkpoint.config));
        let rows = SourceRows { source, offset: step.rows.start, scaling: scaling.as_ref() };
        let measured = measure(rows, &packed, step.shape[0], tolerance);
        if let Some(row) = measured.impossible_row {
            findings.push(
                Finding::new(
                    Check::Weights,
                    file,
                    format!("row {row}: its error is larger than rounding can make it; codes and scale do not belong together"),
                )
                .subject(tensor)
                .consequence("the row's outputs are wrong"),
            );
        }
        let snr_db = measured.sums.snr_db();
        let stated = manifest.tensors.iter().find(|t| t.name == *tensor).and_then(|t| t.snr_db);
        let agrees = match (snr_db, stated) {
            (Some(a), Some(b)) => (a - b).abs() <= SNR_TOLERANCE_DB,
            (a, b) => a == b,
        };
        if !agrees && measured.impossible_row.is_none() {
            let shown = |db: Option<f64>| db.map_or_else(|| "exact".to_owned(), |db| format!("{db:.3} dB"));
            findings.push(
                Finding::new(
                    Check::Weights,
                    file,
                    format!("weight SNR {}, the manifest says {}", shown(snr_db), shown(stated)),
                )
                .subject(tensor),
            );
        }
        modules.push(ModuleSnr {
            module: step.module_name().to_owned(),
            snr_db,
            zero_rows: measured.zero_rows,
        });
    }
    Ok((modules, findings))
}

#[derive(Default)]
struct Measured {
    sums: ErrorSums,
    zero_rows: usize,
    /// The first row that no encoder can have made.
    impossible_row: Option<usize>,
}

/// The rows that a module was made of.
#[derive(Clone, Copy)]
struct SourceRows<'a> {
    source: TensorView<'a>,
    /// The first of them in the source.
    offset: usize,
    scaling: Option<&'a Scaling>,
}

impl SourceRows<'_> {
    fn decode(self, row: usize, weights: &mut [f32]) {
        self.source.decode_row(self.offset + row, weights);
        if let Some(scaling) = self.scaling {
            scaling.apply(self.offset + row, weights);
        }
    }
}

/// `rows` rows of the module.
fn measure(source: SourceRows<'_>, packed: &Packed<'_>, rows: usize, tolerance: Tolerance) -> Measured {
    let tasks: Vec<Measured> = (0..rows.div_ceil(ROWS_PER_TASK))
        .into_par_iter()
        .map_init(
            || vec![0.0; source.source.row_len()],
            |weights, task| {
                let mut part = Measured::default();
                for row in task * ROWS_PER_TASK..((task + 1) * ROWS_PER_TASK).min(rows) {
                    source.decode(row, weights);
                    let amax = f32::from_bits(amax_bits(weights));
                    part.zero_rows += usize::from(amax == 0.0);
                    match packed.row_error(row, weights, amax, tolerance) {
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
