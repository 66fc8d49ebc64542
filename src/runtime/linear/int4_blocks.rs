//! 4-bit codes of any layout as words, block by block along K: what the linears of 4-bit weights share, whatever
//! an activation is.

use std::ops::Range;

use super::split_rows_by;
use crate::error::{InputError, Result};
use crate::pack::{CodeLayout, Int4Matrix};
use crate::runtime::kernels::fixed_point::Ahead;
use crate::runtime::kernels::int4::{WORD, Words};
use crate::runtime::kernels::words::{interleave, interleave_block};

/// Longest stretch of K whose sum is exact, as in vLLM's int4 product.
const MAX_BLOCK: usize = 128;
/// Rows that one task takes where the words of neighbouring rows lie side by side: enough for a stream.
const ROWS_OF_COLUMNS: usize = 128;
/// The same where rows are interleaved: whole blocks of either height.
const ROWS_OF_BLOCKS: usize = 128;
/// The same where many tokens share what was unpacked.
const ROWS_FOR_MANY: usize = 32;
/// How many columns ahead of what is multiplied the following ones are asked for.
const COLUMNS_AHEAD: usize = 256;
/// Columns that are brought into words together.
const COLUMNS: usize = 128;

/// A matrix of 4-bit codes, K cut into blocks: the group, or 128 where groups are longer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Int4Blocks<'a> {
    pub(super) matrix: Int4Matrix<'a>,
    pub(super) block: usize,
}

/// What a thread keeps from task to task.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[words, rows]`.
    words: Vec<[u8; 4]>,
    /// `[rows, columns]`.
    codes: Vec<u8>,
}

impl<'a> Int4Blocks<'a> {
    /// # Errors
    /// When groups are no multiple of 8, or longer than 128 and no multiple of that.
    pub(super) fn new(matrix: Int4Matrix<'a>) -> Result<Self> {
        let block = matrix.group_size().min(MAX_BLOCK);
        if !matrix.group_size().is_multiple_of(block) || !block.is_multiple_of(WORD) {
            let expected = format!("groups of a multiple of {WORD} up to {MAX_BLOCK}, or a multiple of that");
            return Err(InputError::default().expected(expected).found(matrix.group_size()).into());
        }
        Ok(Self { matrix, block })
    }

    /// Blocks of a row.
    pub(super) fn blocks(&self) -> usize {
        self.matrix.shape()[1] / self.block
    }

    /// Blocks of a group.
    pub(super) fn per_group(&self) -> usize {
        self.matrix.group_size() / self.block
    }

    /// Whether the codes of a row follow each other, so that a single token is multiplied by rows as they are.
    pub(super) fn has_rows(&self) -> bool {
        self.matrix.codes().layout() == CodeLayout::Rows
    }

    /// Splits rows into tasks as [`super::split_rows`] does, with blocks as high as suit the layout.
    pub(super) fn split<S: Default + Send>(
        &self,
        tokens: usize,
        rows: Range<usize>,
        y: &mut [f32],
        task: impl Fn(&mut S, Range<usize>, &mut [f32]) + Sync,
    ) {
        let height = match self.matrix.codes().layout() {
            CodeLayout::Blocks { .. } => ROWS_OF_BLOCKS,
            CodeLayout::Columns if tokens == 1 => ROWS_OF_COLUMNS,
            _ => ROWS_FOR_MANY,
        };
        split_rows_by(height, tokens, rows, y, task);
    }

    /// Passes the codes of some rows as words, some blocks at a time and in order: `take(blocks, words)`.
    pub(super) fn each_piece(
        &self,
        rows: &Range<usize>,
        scratch: &mut Scratch,
        mut take: impl FnMut(Range<usize>, Words<'_>),
    ) {
        let at_once = (COLUMNS / self.block).max(1);
        for first in (0..self.blocks()).step_by(at_once) {
            let blocks = first..(first + at_once).min(self.blocks());
            take(blocks.clone(), self.words(rows, &blocks, scratch));
        }
    }

    /// Where the codes of some rows lie that will be wanted a little after those of block `b`: some columns further,
    /// or past the end of the rows the first ones of the rows that follow. No processor foresees that.
    pub(super) fn ahead(&self, rows: &Range<usize>, b: usize) -> Option<Ahead<'a>> {
        let CodeLayout::Blocks { rows: height } = self.matrix.codes().layout() else { return None };
        let (k, half) = (self.matrix.shape()[1], height / 2);
        let column = b * self.block + COLUMNS_AHEAD;
        let skip = if column < k { 0 } else { rows.len().saturating_sub(height) / 2 * k };
        let bytes = self.matrix.codes().bytes().get(rows.start * k / 2 + column * half + skip..)?;
        Some(Ahead { bytes, height, stride: half * k })
    }

    /// The codes of some rows and blocks as words.
    fn words<'s>(
        &self,
        rows: &Range<usize>,
        blocks: &Range<usize>,
        Scratch { words, codes }: &'s mut Scratch,
    ) -> Words<'s>
    where
        'a: 's,
    {
        let (bytes, [out, k]) = (self.matrix.codes().bytes(), self.matrix.shape());
        let columns = blocks.start * self.block..blocks.end * self.block;
        let n = rows.len();
        let layout = self.matrix.codes().layout();
        if layout == CodeLayout::Columns {
            let words = &bytes.as_chunks::<4>().0[columns.start / WORD * out + rows.start..];
            return Words { words, stride: out, rows: n };
        }
        words.resize(columns.len() / WORD * n, [0; 4]);
        match layout {
            CodeLayout::Blocks { rows: height }
                if rows.start.is_multiple_of(height) && n.is_multiple_of(height) =>
            {
                let half = height / 2;
                for first in (0..n).step_by(height) {
                    let block = &bytes[(rows.start + first) * k / 2..][..half * k];
                    let block = &block[columns.start * half..columns.end * half];
                    interleave_block(block, half, &mut words[first..], n);
                }
            }
            CodeLayout::Rows => {
                interleave(&bytes[rows.start * k / 2 + columns.start / 2..], k / 2, n, words);
            }
            _ => {
                codes.resize(n * columns.len(), 0);
                self.matrix.codes().decode(rows.clone(), columns.clone(), codes);
                for (row, codes) in codes.chunks_exact(columns.len()).enumerate() {
                    for (word, codes) in codes.as_chunks::<WORD>().0.iter().enumerate() {
                        words[word * n + row] = std::array::from_fn(|i| codes[2 * i] | codes[2 * i + 1] << 4);
                    }
                }
            }
        }
        Words { words, stride: n, rows: n }
    }
}
