//! Tensors with the folds applied, and a whole checkpoint of them.

use std::io::Write;

use half::{bf16, f16};

use super::Smoothing;
use crate::artifact::Staging;
use crate::checkpoint::{CONFIG_FILE, Checkpoint, INDEX_FILE};
use crate::error::{Failure, InputError, Result};
use crate::interrupt::Interrupt;
use crate::quant::smooth::power;
use crate::tensor::{Dtype, EXPONENT_BITS, TensorView, amax_bits};

/// Bytes of a tensor that are in memory at a time.
const BLOCK_BYTES: usize = 4 << 20;

/// Powers of two that the rows and columns of a tensor are multiplied by.
#[derive(Clone, Debug, PartialEq)]
pub struct Scaling {
    /// `[out]`, or nothing.
    rows: Vec<i8>,
    /// `[in]`, or nothing.
    columns: Vec<f32>,
}

impl Scaling {
    pub(super) fn new(rows: Vec<i8>, columns: Vec<i8>) -> Self {
        Self { rows, columns: columns.into_iter().map(power).collect() }
    }

    /// Multiplies a row of weights, in place.
    pub fn apply(&self, row: usize, weights: &mut [f32]) {
        for (w, factor) in weights.iter_mut().zip(&self.columns) {
            *w *= factor;
        }
        if let Some(exponent) = self.rows.get(row).filter(|e| **e != 0) {
            let factor = power(*exponent);
            weights.iter_mut().for_each(|w| *w *= factor);
        }
    }

    /// The bytes of some rows of a tensor, multiplied, in its own type.
    ///
    /// # Errors
    /// When a weight leaves the range of the type.
    pub fn bytes(&self, source: TensorView<'_>, rows: std::ops::Range<usize>) -> Result<Vec<u8>> {
        let mut weights = vec![0.0; source.row_len()];
        let mut out = Vec::with_capacity(rows.len() * source.row_bytes());
        for row in rows {
            source.decode_row(row, &mut weights);
            self.apply(row, &mut weights);
            match source.dtype {
                Dtype::F16 => {
                    let halves: Vec<f16> = weights.iter().map(|w| f16::from_f32(*w)).collect();
                    for (w, half) in weights.iter_mut().zip(&halves) {
                        *w = half.to_f32();
                    }
                    out.extend(halves.iter().flat_map(|h| h.to_le_bytes()));
                }
                Dtype::F32 => out.extend(weights.iter().flat_map(|w| w.to_le_bytes())),
                _ => out.extend(weights.iter().flat_map(|w| bf16::from_f32(*w).to_le_bytes())),
            }
            if amax_bits(&weights) >= EXPONENT_BITS {
                return Err(InputError::default()
                    .subject(source.name)
                    .expected(format!("room for a scale to move in {}", source.dtype))
                    .found(format!("a weight beyond its range in row {row}"))
                    .hint("leave --smooth out")
                    .into());
            }
        }
        Ok(out)
    }
}

/// Writes the checkpoint with the folds applied into `staging`: the same files with the same headers, every
/// tensor in its own type.
///
/// # Errors
/// A failed write, a weight that leaves the range of its type, an interrupt.
pub fn write_folded(
    checkpoint: &Checkpoint,
    smoothing: &Smoothing,
    staging: &Staging,
    interrupt: &Interrupt,
) -> Result<()> {
    for shard in &checkpoint.files.shards {
        let bytes = shard.bytes();
        let path = staging.path(&shard.file_name);
        let failed = |e| Failure::io(&path, "cannot write", e);
        let mut file = staging.create(&shard.file_name)?;
        let mut at = 0;
        for entry in &shard.tensors {
            let source = shard.view(entry);
            // What lies between tensors, the header before the first included, stays.
            let start = bytes.len().min(usize::try_from(entry.offset()).unwrap_or(usize::MAX));
            file.write_all(&bytes[at.min(start)..start]).map_err(failed)?;
            at = start + source.bytes.len();
            let spec = checkpoint.specs.iter().find(|s| s.name == entry.name);
            let scaling = spec.and_then(|s| smoothing.of(s.module, s.layer, &checkpoint.config));
            let block = (BLOCK_BYTES / source.row_bytes().max(1)).max(1);
            for first in (0..source.rows()).step_by(block) {
                interrupt.check()?;
                let rows = first..(first + block).min(source.rows());
                match &scaling {
                    Some(scaling) => file.write_all(&scaling.bytes(source, rows)?),
                    None => file.write_all(source.row_range(rows)),
                }
                .map_err(failed)?;
            }
        }
        file.write_all(&bytes[at.min(bytes.len())..]).map_err(failed)?;
        file.sync_all().map_err(failed)?;
    }
    let index = checkpoint.files.indexed.then_some(INDEX_FILE);
    let names = checkpoint.side_files.iter().map(String::as_str).chain([CONFIG_FILE]).chain(index);
    for name in names {
        interrupt.check()?;
        staging.copy(name, checkpoint.dir.open_file(name)?)?;
    }
    Ok(())
}
