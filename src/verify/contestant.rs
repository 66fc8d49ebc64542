//! How far the weights of a GGUF file are from a checkpoint's, tensor by tensor.

use rayon::prelude::*;

use super::weights::ROWS_PER_TASK;
use super::{Check, Finding, ModuleSnr};
use crate::checkpoint::{Checkpoint, GgufFile};
use crate::error::{InputError, Result};
use crate::ggml::BlockMatrix;
use crate::gguf::first_difference;
use crate::interrupt::Interrupt;
use crate::plan::module_of;
use crate::progress::Progress;
use crate::quant::ErrorSums;
use crate::spark::{Module, SparkConfig};
use crate::tensor::{EXPONENT_BITS, TensorView, amax_bits};

/// Makes sure that a file has the architecture of the checkpoint that it is compared with.
///
/// # Errors
/// The first thing that differs.
pub fn check_same_model(file: &GgufFile, reference: &SparkConfig) -> Result<()> {
    let Some(difference) = first_difference(&file.config, reference) else { return Ok(()) };
    Err(InputError::file(&file.file_name)
        .subject(difference.what)
        .expected(format!("{}, as the reference has it", difference.expected))
        .found(difference.found)
        .hint("pass the checkpoint that it was made from with --reference")
        .into())
}

/// Rows of a tensor of the file.
#[derive(Clone, Copy)]
enum Rows<'a> {
    Floats(TensorView<'a>),
    Blocks(BlockMatrix<'a>),
}

impl Rows<'_> {
    fn decode(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::Floats(view) => view.decode_row(row, out),
            Self::Blocks(blocks) => blocks.decode_row(row, out),
        }
    }
}

/// Decodes every tensor of the file and compares it with the source. Norms are among them.
///
/// # Errors
/// When interrupted.
pub fn check_contestant(
    file: &GgufFile,
    checkpoint: &Checkpoint,
    progress: &dyn Progress,
    interrupt: &Interrupt,
) -> Result<(Vec<ModuleSnr>, Vec<Finding>)> {
    let (mut modules, mut findings) = (Vec::new(), Vec::new());
    for spec in &file.specs {
        interrupt.check()?;
        // A head of its own beside a tied one is made from the embedding.
        let tied = spec.module == Module::LmHead && checkpoint.config.tie_word_embeddings;
        let source = checkpoint.tensor(if tied { "model.embedding.weight" } else { &spec.name });
        progress.advance(source.bytes.len() as u64, module_of(&spec.name));
        let rows = match (file.blocks(&spec.name)?, file.floats(&spec.name)) {
            (Some(blocks), _) => Rows::Blocks(blocks),
            (None, Some(view)) => Rows::Floats(view),
            (None, None) => continue,
        };
        let (sums, zero_rows, broken) = measure(source, rows);
        if let Some(row) = broken {
            let what = format!("row {row}: NaN or infinity among its weights");
            findings.push(
                Finding::new(Check::Weights, &file.file_name, what)
                    .subject(crate::gguf::tensor_name(spec))
                    .consequence("every output that it reaches is NaN"),
            );
        }
        let module = module_of(&spec.name).to_owned();
        modules.push(ModuleSnr { module, snr_db: sums.snr_db().filter(|db| !db.is_nan()), zero_rows });
    }
    Ok((modules, findings))
}

/// Sums of squares, rows that are zero in the source, and the first row of the file that is not finite.
fn measure(source: TensorView<'_>, rows: Rows<'_>) -> (ErrorSums, usize, Option<usize>) {
    let of_task = |(weights, found): &mut (Vec<f32>, Vec<f32>), task: usize| {
        let (mut sums, mut zero_rows, mut broken) = (ErrorSums::default(), 0, None);
        for row in task * ROWS_PER_TASK..((task + 1) * ROWS_PER_TASK).min(source.rows()) {
            source.decode_row(row, weights);
            rows.decode(row, found);
            zero_rows += usize::from(amax_bits(weights) == 0);
            if amax_bits(found) >= EXPONENT_BITS {
                broken = broken.or(Some(row));
            }
            for (w, y) in weights.iter().zip(found.iter()) {
                let (w, y) = (f64::from(*w), f64::from(*y));
                sums += ErrorSums { signal: w * w, noise: (w - y) * (w - y) };
            }
        }
        (sums, zero_rows, broken)
    };
    let buffers = || (vec![0.0; source.row_len()], vec![0.0; source.row_len()]);
    let tasks: Vec<_> =
        (0..source.rows().div_ceil(ROWS_PER_TASK)).into_par_iter().map_init(buffers, of_task).collect();
    tasks.into_iter().fold((ErrorSums::default(), 0, None), |(mut sums, zero_rows, broken), part| {
        sums += part.0;
        (sums, zero_rows + part.1, broken.or(part.2))
    })
}
