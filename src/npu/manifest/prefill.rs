//! What the manifest says of prefill graphs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{GraphInfo, graph_info};
use crate::npu::options::CacheKind;
use crate::npu::step::{capacity, type_word};
use crate::npu::{Export, Phase};
use crate::spark::LayerType;

/// The prefill graphs of an export. Names, caches, encodings and the embedding are those of the decode
/// graphs; what differs is the number of rows and with it the masks.
///
/// With p tokens taken in, a call takes the next n, at most `rows`:
///
/// * `hidden_in` `[1, rows, hidden]` has their embeddings in rows 0 to n - 1, the rotary inputs
///   `[1, 1, rows, ..]` the angles of positions p to p + n - 1. What the other rows hold is free.
/// * A mask `[1, 1, rows, length]` has a row per token. Its columns are the slots of the cache, then the
///   new tokens. Row r attends to column `current_index + j` for r - capacity <= j <= r, and to the slots
///   that hold positions from p + r - capacity on; a ring may hold older ones, which are blocked. Rows
///   from n on attend to their own column, which no other row does.
/// * A graph that returns entries returns `rows` of them along `seq_axis`. The runtime writes the first n
///   into their slots, in order, as a decode step writes its one, and leaves the others. A graph that
///   returns its cache has moved it by `rows`, so n must be `rows`: see `partial_chunks`.
/// * `hidden_out` of the last graph is the residual stream before the head, a row per token. For logits
///   the last token of a prompt goes through the decode graphs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillInfo {
    /// Tokens of a call.
    pub rows: usize,
    /// Whether a call may take fewer: only where every cache returns entries.
    pub partial_chunks: bool,
    /// In the order they are run.
    pub graphs: Vec<GraphInfo>,
    /// By layer type.
    pub masks: BTreeMap<String, PrefillMask>,
}

/// A mask with a row per token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillMask {
    /// The input that takes it.
    pub input: String,
    /// Rows.
    pub rows: usize,
    /// Columns: slots of the cache and the tokens of the call.
    pub length: usize,
    /// What stands where a position is seen: zero.
    pub attend: f64,
    /// What stands elsewhere.
    pub blocked: f64,
    /// Column of the first token of the call.
    pub current_index: usize,
}

pub(super) fn info(export: &Export, kinds: &[LayerType]) -> Option<PrefillInfo> {
    let rows = export.options.prefill?;
    let mask = |kind: &LayerType| {
        let (word, capacity) = (type_word(*kind), capacity(&export.config, &export.options, *kind));
        let info = PrefillMask {
            input: format!("mask_{word}"),
            rows,
            length: capacity + rows,
            attend: 0.0,
            blocked: export.blocked(*kind).into(),
            current_index: capacity,
        };
        (word.to_owned(), info)
    };
    Some(PrefillInfo {
        rows,
        partial_chunks: kinds.iter().all(|kind| export.options.cache(*kind) != CacheKind::RollCache),
        graphs: (0..export.prefill.len()).map(|i| graph_info(export, Phase::Prefill, i)).collect(),
        masks: kinds.iter().map(mask).collect(),
    })
}
