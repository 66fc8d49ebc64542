//! Calibration texts, as options name them.

use std::path::Path;

use crate::calibrate::{self, Sequences, TextEncoder};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::opened::{chat_template, tokenizer};

/// The texts as tokens of the checkpoint's tokenizer, in sequences of at most `context`.
///
/// # Errors
/// Texts that cannot be read or are too short, a missing tokenizer.
pub(super) fn sequences(
    calib: Option<&Path>,
    limit: Option<u32>,
    checkpoint: &Checkpoint,
    context: usize,
) -> Result<Sequences> {
    let config = &checkpoint.config;
    let tokenizer = tokenizer(&checkpoint.dir, config)?;
    let template = chat_template(&checkpoint.dir)?;
    let encoder = TextEncoder { tokenizer: &tokenizer, template: template.as_ref() };
    let (texts, notes) = match calib {
        Some(path) => (calibrate::read(path, encoder)?, Vec::new()),
        None => calibrate::bundled(encoder)?,
    };
    let limit = limit.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
    let mut sequences = Sequences::new(&texts, config, context, limit)?;
    sequences.notes.splice(0..0, notes);
    Ok(sequences)
}
