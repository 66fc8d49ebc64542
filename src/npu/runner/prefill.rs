//! Several tokens at once through the prefill graphs, into the same caches.

use super::{CacheInfo, Runner, StepResult, refuse};
use crate::error::{Failure, Result};
use crate::npu::manifest::PrefillInfo;

impl Runner<'_> {
    /// Tokens that the prefill graphs take at once, if the export has them.
    pub fn prefill_rows(&self) -> Option<usize> {
        self.export.manifest.prefill.as_ref().map(|prefill| prefill.rows)
    }

    /// Takes in a prompt, rows of the embedding, and moves on: all tokens but the last through the prefill
    /// graphs, as far as there are any, the last through the decode graphs. Returns what it gave.
    ///
    /// # Errors
    /// As [`Runner::step`]; and when there are no tokens.
    pub fn prompt(&mut self, hidden: &[Vec<f32>]) -> Result<StepResult> {
        let Some((last, before)) = hidden.split_last() else {
            return Err(Failure::usage("a prompt of no tokens".to_owned()));
        };
        let (rows, partial) = match &self.export.manifest.prefill {
            None => (1, false),
            Some(prefill) => (prefill.rows.max(1), prefill.partial_chunks),
        };
        for chunk in before.chunks(rows) {
            if rows > 1 && (partial || chunk.len() == rows) {
                self.prefill(chunk)?;
            } else {
                for token in chunk {
                    self.step(token)?;
                }
            }
        }
        self.step(last)
    }

    /// Takes in tokens, rows of the embedding, in one call of the prefill graphs, and moves on. There are
    /// no logits; the residual streams have a row per token of the graphs, those given first.
    ///
    /// # Errors
    /// When the export has no prefill graphs, the tokens are none, more than a call takes or fewer where
    /// caches are returned whole, the context is full, or the manifest is not that of the graphs.
    pub fn prefill(&mut self, hidden: &[Vec<f32>]) -> Result<StepResult> {
        let manifest = &self.export.manifest;
        let prefill = manifest.prefill.as_ref();
        let prefill = prefill.ok_or_else(|| refuse("prefill", "prefill graphs", "none"))?;
        let (rows, count) = (prefill.rows, hidden.len());
        if count == 0 || count > rows || (count < rows && !prefill.partial_chunks) {
            let least = if prefill.partial_chunks { "1 to " } else { "" };
            return Err(Failure::usage(format!("{count} tokens at once, expected {least}{rows}")));
        }
        if self.position + count > manifest.context {
            return Err(Failure::usage(format!("the context of {} tokens is full", manifest.context)));
        }
        let mut stream = hidden.concat();
        if stream.len() != count * manifest.model.hidden {
            return Err(Failure::usage(format!("rows of the embedding have {}", manifest.model.hidden)));
        }
        stream.resize(rows * manifest.model.hidden, 0.0);
        let result = self.pass(&prefill.graphs, &self.prefill, &stream, |index, stream| {
            self.feed(&prefill.graphs[index], stream, rows, |kind| self.prefill_mask(prefill, kind, count))
        })?;
        self.keep(&result.outputs, rows, count)?;
        Ok(result)
    }

    /// A row of the mask per token. What is in sight of a token: the entries before it, as many as the
    /// cache holds, whether they are in the cache yet or not, and itself.
    fn prefill_mask(&self, prefill: &PrefillInfo, kind: &str, count: usize) -> Result<Vec<f32>> {
        let mask = prefill.masks.get(kind).ok_or_else(|| refuse("prefill.masks", "a layer type", kind))?;
        let cache = self.export.manifest.caches.iter().find(|c| c.kind == kind);
        let cache = cache.ok_or_else(|| refuse("caches", "a layer of every type", kind))?;
        let end = mask.current_index.checked_add(prefill.rows);
        if mask.current_index < cache.capacity || end.is_none_or(|end| end > mask.length) {
            let expected = format!("{} and {} columns", cache.capacity, prefill.rows);
            return Err(refuse("prefill.masks", &expected, mask.length));
        }
        #[expect(clippy::cast_possible_truncation, reason = "they were written from f32")]
        let (attend, blocked) = (mask.attend as f32, mask.blocked as f32);
        let mut values = vec![blocked; mask.length * prefill.rows];
        for (row, columns) in values.chunks_exact_mut(mask.length).enumerate() {
            let own = mask.current_index + row;
            columns[own] = attend;
            if row < count {
                let oldest = (self.position + row).saturating_sub(cache.capacity);
                for position in oldest..self.position {
                    let slot = slot_of(cache, self.position, position);
                    if slot >= cache.capacity {
                        return Err(refuse("caches", "a slot for every position", cache.capacity));
                    }
                    columns[slot] = attend;
                }
                let first_new = oldest.saturating_sub(self.position);
                columns[mask.current_index + first_new..own].fill(attend);
            }
        }
        Ok(values)
    }
}

/// The slot of the entry of a position that is held when so many tokens were taken in.
fn slot_of(cache: &CacheInfo, taken: usize, position: usize) -> usize {
    match (cache.layout.as_str(), cache.returns.as_str()) {
        (_, "cache") => cache.capacity - (taken - position),
        ("ring", _) => position % cache.capacity,
        _ => position,
    }
}
