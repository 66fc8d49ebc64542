//! What values flow where: texts through the one forward pass, and the range of every place that an
//! export encodes.
//!
//! Each text is a sequence of its own, cut at the context length of the export. Positions decide as
//! much as words do (an empty cache, a full window, a full context look different), so where no text
//! fills the context, one more sequence of all texts in a row does. A prompt in one call is the same
//! arithmetic as token by token (see [`crate::runtime`]), so these are the ranges of decode steps.
//!
//! A sequence is folded into running ranges when it is done: memory does not depend on the amount of
//! text, but for four bytes a token.

mod energy;
mod importance;
mod range;
mod sites;
mod texts;

use std::collections::BTreeMap;

use serde::Serialize;
use sha2::{Digest, Sha256};

pub use energy::{Energies, Energy};
pub use importance::Importance;
pub use range::Range;
pub use sites::{LayerSite, Site};
pub use texts::{MIN_TEXT_TOKENS, Text, TextEncoder, bundled, read};

use crate::artifact::{Sha256Hex, finish_hash};
use crate::error::{InputError, Result};
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::runtime::{Edge, Model, State};
use crate::spark::SparkConfig;
use sites::Observer;

/// A range that a text widens by more than this share of its extent was not known well before.
const GROWTH: f32 = 0.01;

/// Vocabulary rows whose logits are held at a time.
const LOGIT_ROWS: usize = 2048;

/// Sequences to run, and what there is to say about them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequences {
    /// What is run, each from an empty state.
    pub tokens: Vec<Vec<u32>>,
    /// Texts that they were made from.
    pub texts: usize,
    /// What the user should know, one sentence each.
    pub notes: Vec<String>,
}

impl Sequences {
    /// Cuts texts into sequences of at most `context` tokens, and joins them into one more if none is
    /// that long. With a `limit` only so many tokens are taken: whole texts, evenly from the list.
    ///
    /// # Errors
    /// When all texts together don't reach beyond the sliding window (or the context, if that is
    /// shorter): then full caches would never be seen.
    pub fn new(texts: &[Text], config: &SparkConfig, context: usize, limit: Option<usize>) -> Result<Self> {
        let chosen = match limit {
            None => texts.iter().collect(),
            Some(limit) => spread(texts, limit),
        };
        let total: usize = chosen.iter().map(|t| t.tokens.len()).sum();
        let total = total.min(limit.unwrap_or(usize::MAX));
        let wanted = context.min(config.sliding_window + 1);
        if total < wanted {
            let reason = match context <= config.sliding_window {
                true => "the context of the export".to_owned(),
                false => format!("one more than the sliding window of {}", config.sliding_window),
            };
            return Err(InputError::file("calibration texts")
                .expected(format!("at least {wanted} tokens in all, {reason}"))
                .found(format!("{total} in {} texts", chosen.len()))
                .hint("give more or longer texts: ranges from caches that were never full are too small")
                .into());
        }
        let mut notes = Vec::new();
        if chosen.len() < texts.len() {
            notes.push(format!("calibration: {} of {} texts were taken", chosen.len(), texts.len()));
        }
        let mut tokens: Vec<Vec<u32>> = Vec::new();
        let mut left = limit.unwrap_or(usize::MAX);
        for text in &chosen {
            let taken = &text.tokens[..text.tokens.len().min(left)];
            left -= taken.len();
            // The rest of a long text goes on as a sequence of its own, unless it is next to nothing.
            let pieces = taken.chunks(context).filter(|c| c.len() >= MIN_TEXT_TOKENS.min(context));
            tokens.extend(pieces.map(<[u32]>::to_vec));
        }
        if tokens.iter().all(|t| t.len() < context) && chosen.len() > 1 {
            let joined: Vec<u32> = chosen.iter().flat_map(|t| &t.tokens).copied().take(context).collect();
            notes.push(format!(
                "calibration: no text fills the context of {context} tokens, so the texts were also run in a \
                 row, up to position {}",
                joined.len() - 1
            ));
            tokens.push(joined);
        }
        Ok(Self { tokens, texts: chosen.len(), notes })
    }

    /// Tokens of all sequences.
    pub fn total(&self) -> usize {
        self.tokens.iter().map(Vec::len).sum()
    }

    /// SHA-256 over the sequences: of each its length and its ids, as 32-bit little-endian words.
    pub fn sha256(&self) -> Sha256Hex {
        let mut hash = Sha256::new();
        let mut word = |n: u32| hash.update(n.to_le_bytes());
        for tokens in &self.tokens {
            word(u32::try_from(tokens.len()).unwrap_or(u32::MAX));
            tokens.iter().for_each(|id| word(*id));
        }
        finish_hash(hash)
    }
}

/// As many texts as stay within `limit` tokens, evenly from the list; at least the first.
fn spread(texts: &[Text], limit: usize) -> Vec<&Text> {
    let evenly = |count: usize| (0..count).map(move |i| &texts[i * texts.len() / count]);
    let fits = |count: &usize| evenly(*count).map(|t| t.tokens.len()).sum::<usize>() <= limit;
    let count = (1..=texts.len()).rev().find(fits).unwrap_or(1).min(texts.len());
    evenly(count).collect()
}

/// What is known of a site.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observed {
    /// All values of all sequences.
    pub range: Range,
    /// The last sequence that widened it by more than a hundredth.
    pub last_growth: usize,
}

/// The ranges of all sites.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ranges {
    sites: BTreeMap<Site, Observed>,
}

impl Ranges {
    /// Ranges given from elsewhere, as if one sequence had shown them.
    pub fn from_sites(sites: impl IntoIterator<Item = (Site, Range)>) -> Self {
        let observed = |(site, range)| (site, Observed { range, last_growth: 0 });
        Self { sites: sites.into_iter().map(observed).collect() }
    }

    /// The range of a site.
    ///
    /// # Panics
    /// When it was not calibrated: the sites of a model are fixed, and every sequence passes all.
    pub fn get(&self, site: Site) -> Range {
        self.sites.get(&site).unwrap_or_else(|| panic!("{site} was not calibrated")).range
    }

    /// Takes in what is known of a site beyond what sequences showed.
    pub fn include(&mut self, site: Site, range: Range) {
        let known = self.sites.entry(site).or_insert(Observed { range: Range::EMPTY, last_growth: 0 });
        known.range = known.range.union(range);
    }

    /// All sites in the order they are reached.
    pub fn iter(&self) -> impl Iterator<Item = (Site, Observed)> {
        self.sites.iter().map(|(site, observed)| (*site, *observed))
    }

    /// Folds the ranges of the sequence with this number in.
    fn fold(&mut self, sequence: usize, ranges: BTreeMap<Site, Range>) {
        for (site, range) in ranges {
            let known =
                self.sites.entry(site).or_insert(Observed { range: Range::EMPTY, last_growth: sequence });
            if range.outgrows(known.range, GROWTH) {
                known.last_growth = sequence;
            }
            known.range = known.range.union(range);
        }
    }
}

/// How much a calibration has seen.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Coverage {
    /// Texts read.
    pub texts: usize,
    /// Sequences run.
    pub sequences: usize,
    /// Tokens run.
    pub tokens: usize,
    /// The last position reached.
    pub longest_position: usize,
    /// Positions of the sliding window, the current one included; 0 without sliding layers.
    pub sliding_window: usize,
    /// Positions of the export.
    pub context: usize,
    /// Sites whose range the last sequence still widened by more than a hundredth.
    pub unsettled_sites: usize,
    /// SHA-256 of the tokens.
    pub tokens_sha256: Sha256Hex,
}

impl Coverage {
    /// Of a finished calibration.
    pub fn new(sequences: &Sequences, ranges: &Ranges, config: &SparkConfig, context: usize) -> Self {
        let last = sequences.tokens.len() - 1;
        Self {
            texts: sequences.texts,
            sequences: sequences.tokens.len(),
            tokens: sequences.total(),
            longest_position: sequences.tokens.iter().map(|t| t.len() - 1).max().unwrap_or(0),
            sliding_window: config.sliding_window,
            context,
            unsettled_sites: ranges.iter().filter(|(_, seen)| last > 0 && seen.last_growth == last).count(),
            tokens_sha256: sequences.sha256(),
        }
    }

    /// What the user should know, one sentence each.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.longest_position + 1 < self.context {
            notes.push(format!(
                "calibration: positions {} to {} of the context were not seen",
                self.longest_position + 1,
                self.context - 1
            ));
        }
        if self.unsettled_sites > 0 {
            notes.push(format!(
                "calibration: the last sequence still widened {} ranges by more than a hundredth; more texts \
                 would settle them",
                self.unsettled_sites
            ));
        }
        notes
    }
}

/// Runs the sequences and folds the range of every site.
///
/// # Errors
/// A NaN or an infinity among the activations, a token outside the vocabulary, an interrupt.
pub fn calibrate(
    model: &Model<'_>,
    sequences: &Sequences,
    progress: &dyn Progress,
    interrupt: &Interrupt,
) -> Result<Ranges> {
    let vocab = model.config().vocab_size;
    let mut ranges = Ranges::default();
    for (number, tokens) in sequences.tokens.iter().enumerate() {
        let mut state = State::new(model.config());
        let mut observer = Observer::new(model);
        let mut logits = Vec::new();
        for piece in tokens.chunks(PIECE) {
            interrupt.check()?;
            let mut hidden = Vec::new();
            model.run(&mut state, piece, &mut |edge, position, rows| {
                observer.see(edge, position, rows);
                if edge == Edge::FinalNorm {
                    hidden.extend_from_slice(rows);
                }
            })?;
            for start in (0..vocab).step_by(LOGIT_ROWS) {
                let rows = start..(start + LOGIT_ROWS).min(vocab);
                logits.resize(piece.len() * rows.len(), 0.0);
                model.logits_rows(&hidden, rows, &mut logits);
                observer.fold(Site::Logits, &logits);
            }
            progress.advance(piece.len() as u64, "calibration texts");
        }
        ranges.fold(number, observer.finish()?);
    }
    Ok(ranges)
}

/// Tokens between two looks at the interrupt.
const PIECE: usize = 256;

#[cfg(test)]
mod tests;
