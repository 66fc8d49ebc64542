//! Scores, softmax and the weighted sum of values, over blocks of queries.

use rayon::prelude::*;

use super::Rounding;
use super::cache::LayerCache;
use super::kernels::activation::softmax;
use super::kernels::dot;
use super::kernels::mix::mix;
use super::kernels::rows::Rows;
use crate::tensor::extremes;

/// Query rows, tokens x heads of a group, that a task aims for.
const QUERY_ROWS: usize = 32;
/// Keys whose rows stay in the cache while the queries of a task pass.
const KEY_BLOCK: usize = 64;

/// Shape of the attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) dim: usize,
}

impl Heads {
    /// Length of a row of q, k and v together.
    pub(crate) fn qkv(self) -> usize {
        (self.queries + 2 * self.keys) * self.dim
    }

    /// Query heads that share a key head; they are neighbours.
    pub(crate) fn group(self) -> usize {
        self.queries / self.keys
    }
}

/// Attends from the tokens of `qkv`, whose keys and values end the cache, and fills `out`
/// `[tokens, queries * dim]`. The first token is at `position`.
///
/// Each row of probabilities is as long as the positions its query sees, and a weight of zero adds
/// nothing: what a query gets does not depend on the queries it shares a task with.
///
/// Returns the lowest and the highest score that any query gave to a key it sees, scaled: the matrix
/// of scores is never held as a whole, so this is all that can be seen of it.
pub(crate) fn attend(
    heads: Heads,
    qkv: &[f32],
    cache: &LayerCache,
    position: usize,
    rounding: Rounding,
    out: &mut [f32],
) -> [f32; 2] {
    let Heads { dim, .. } = heads;
    let group = heads.group();
    let tokens = qkv.len() / heads.qkv();
    let step = (QUERY_ROWS / group).max(1);
    let blocks = tokens.div_ceil(step);
    let results: Vec<(Vec<f32>, [f32; 2])> = (0..heads.keys * blocks)
        .into_par_iter()
        .map_init(Scratch::default, |scratch, task| {
            let (head, start) = (task / blocks, task % blocks * step);
            let end = (start + step).min(tokens);
            scratch.queries.clear();
            for row in qkv[start * heads.qkv()..end * heads.qkv()].chunks_exact(heads.qkv()) {
                scratch.queries.extend_from_slice(&row[head * group * dim..(head + 1) * group * dim]);
            }
            attend_block(head, group, dim, cache, position + start, rounding, scratch)
        })
        .collect();
    out.par_chunks_exact_mut(heads.queries * dim).enumerate().for_each(|(token, out)| {
        for (head, out) in out.chunks_exact_mut(group * dim).enumerate() {
            let (result, _) = &results[head * blocks + token / step];
            out.copy_from_slice(&result[token % step * group * dim..][..group * dim]);
        }
    });
    results.iter().map(|(_, scores)| *scores).fold(NOTHING, joined)
}

/// The extremes of no values.
const NOTHING: [f32; 2] = [f32::INFINITY, f32::NEG_INFINITY];

fn joined(a: [f32; 2], b: [f32; 2]) -> [f32; 2] {
    [a[0].min(b[0]), a[1].max(b[1])]
}

#[derive(Default)]
struct Scratch {
    /// `[tokens, group, dim]`.
    queries: Vec<f32>,
    /// `[tokens, group, positions]`.
    scores: Vec<f32>,
}

/// The tokens from `position` on, for the query heads of one key head; with the extremes of their
/// scores.
fn attend_block(
    head: usize,
    group: usize,
    dim: usize,
    cache: &LayerCache,
    position: usize,
    rounding: Rounding,
    scratch: &mut Scratch,
) -> (Vec<f32>, [f32; 2]) {
    let Scratch { queries, scores } = scratch;
    let tokens = queries.len() / (group * dim);
    let seen = cache.first_visible(position)..position + tokens;
    let len = seen.len();
    scores.clear();
    scores.resize(tokens * group * len, 0.0);
    for start in (0..len).step_by(KEY_BLOCK) {
        let keys = seen.start + start..(seen.start + start + KEY_BLOCK).min(seen.end);
        let keys: Vec<&[f32]> = cache.keys(head, keys).chunks_exact(dim).collect();
        dot::multiply(Rows::dense(queries, dim), &keys, &mut scores[start..], len);
    }
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "meant to be f32")]
    let scale = (dim as f64).powf(-0.5) as f32;
    let mut seen_scores = NOTHING;
    for (row, scores) in scores.chunks_exact_mut(len).enumerate() {
        let query = position + row / group;
        let visible = cache.first_visible(query) - seen.start..query + 1 - seen.start;
        scores[..visible.start].fill(0.0);
        scores[visible.end..].fill(0.0);
        seen_scores = joined(seen_scores, extremes(&scores[visible.clone()]));
        softmax(&mut scores[visible], scale, rounding);
    }
    let mut out = vec![0.0; tokens * group * dim];
    mix(Rows::dense(scores, len), cache.values(head, seen), dim, &mut out);
    rounding.apply(&mut out);
    (out, seen_scores.map(|score| score * scale))
}
