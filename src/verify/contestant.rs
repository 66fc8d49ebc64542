//! How far the weights of a GGUF file are from a checkpoint's, tensor by tensor.

use rayon::prelude::*;

use super::weights::ROWS_PER_TASK;
use super::{Check, Finding, ModuleSnr};
use crate::checkpoint::{Checkpoint, GgufFile};
use crate::error::{InputError, Result};
use crate::ggml::BlockMatrix;
use crate::interrupt::Interrupt;
use crate::plan::module_of;
use crate::progress::Progress;
use crate::quant::ErrorSums;
use crate::spark::{LayerType, Module, SparkConfig};
use crate::tensor::{EXPONENT_BITS, TensorView, amax_bits};

/// Makes sure that a file has the architecture of the checkpoint that it is compared with.
///
/// # Errors
/// The first thing that differs.
pub fn check_same_model(file: &GgufFile, reference: &SparkConfig) -> Result<()> {
    let config = &file.config;
    let kinds = |c: &SparkConfig| c.layer_types.iter().map(|t| t.name()).collect::<Vec<_>>().join(", ");
    // The container has 32 bits for these.
    #[expect(clippy::cast_possible_truncation, reason = "as stored")]
    let rope = |c: &SparkConfig, kind: LayerType| {
        let rope = match kind {
            LayerType::Sliding => c.rope_sliding,
            LayerType::Full => c.rope_full,
        };
        rope.map_or_else(
            || "none".to_owned(),
            |r| format!("{} dimensions, base {}", r.rotary_dims, r.theta as f32),
        )
    };
    #[expect(clippy::cast_possible_truncation, reason = "as stored")]
    let properties = |c: &SparkConfig| {
        [
            ("hidden size", c.hidden_size.to_string()),
            ("width of the MLP", c.intermediate_size.to_string()),
            ("number of layers", c.num_hidden_layers().to_string()),
            ("types of layers", kinds(c)),
            ("query heads", c.num_attention_heads.to_string()),
            ("key-value heads", c.num_key_value_heads.to_string()),
            ("width of a head", c.head_dim.to_string()),
            ("vocabulary", c.vocab_size.to_string()),
            ("epsilon of norms", (c.rms_norm_eps as f32).to_string()),
            ("sliding window", c.sliding_window.to_string()),
            ("rotary embedding of sliding layers", rope(c, LayerType::Sliding)),
            ("rotary embedding of full layers", rope(c, LayerType::Full)),
            ("activation of the gates", format!("{:?}", c.gate_activation)),
        ]
    };
    let refuse = |subject: &str, expected: String, found: String| {
        InputError::file(&file.file_name)
            .subject(subject)
            .expected(format!("{expected}, as the reference has it"))
            .found(found)
            .hint("pass the checkpoint that it was made from with --reference")
    };
    for ((what, ours), (_, theirs)) in properties(config).into_iter().zip(properties(reference)) {
        if ours != theirs {
            return Err(refuse(what, theirs, ours).into());
        }
    }
    if config.tie_word_embeddings && !reference.tie_word_embeddings {
        return Err(refuse("head", "a tensor of its own".to_owned(), "none".to_owned()).into());
    }
    Ok(())
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
