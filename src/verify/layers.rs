//! What every layer alone costs: fed the reference's own input, how far is its output?
//!
//! Errors of earlier layers do not reach it, so a figure belongs to one layer. Sliding and full layers
//! read different rotary tables and caches, so they are told apart.

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::interrupt::Interrupt;
use crate::quant::ErrorSums;
use crate::runtime::{Edge, LayerEdge, Model, State};
use crate::spark::LayerType;

/// Sliding windows of text that layers are measured on: past the first, keys drop out of sight.
pub const LAYER_WINDOWS: usize = 2;

/// Most tokens that layers are measured on, where a window is long or there is none.
const MAX_TOKENS: usize = 1024;

/// Tokens that go through the layers together.
const PIECE: usize = 128;

/// All layers, measured on one text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Layers {
    /// The scenario whose text it is: the longest.
    pub scenario: String,
    /// Tokens from its beginning.
    pub tokens: usize,
    /// One by one.
    pub layers: Vec<LayerSnr>,
}

/// How far the output of a layer is from that of the reference's, both fed the reference's input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerSnr {
    /// Number of the layer.
    pub layer: usize,
    /// As config.json spells it.
    pub kind: String,
    /// Of the residual stream after the layer: `10 log10(sum r^2 / sum (r - y)^2)`; null where equal.
    pub output_snr_db: Option<f64>,
    /// The same noise against what the layer adds to the stream, which is all that the layer does.
    pub update_snr_db: Option<f64>,
}

impl Layers {
    /// The lowest SNR of an output; `None` where nothing is lost anywhere.
    pub fn lowest_db(&self) -> Option<f64> {
        self.layers.iter().filter_map(|l| l.output_snr_db).min_by(f64::total_cmp)
    }
}

/// How many tokens of a text of `len` are taken, for a window of that length.
pub(super) fn layer_tokens(len: usize, window: usize) -> usize {
    let wanted = if window == 0 { MAX_TOKENS } else { (LAYER_WINDOWS * window).min(MAX_TOKENS) };
    len.min(wanted)
}

/// Shown rows of a residual stream: after which layer, or none for the embedding's; the position of the first
/// row; and the rows, `[tokens, hidden]`.
pub(super) type See<'s> = dyn FnMut(Option<usize>, usize, &[f32]) + 's;

/// A model's residual stream on a text, in pieces of [`PIECE`] tokens: of each piece first the embedding's
/// rows, then what every layer makes of them.
pub(super) trait Residuals {
    /// Shows all of it, in order.
    ///
    /// # Errors
    /// When it cannot be computed or read, or on an interrupt.
    fn each(&self, see: &mut See<'_>) -> Result<()>;
}

/// The stream of a model that is run for it.
pub(super) struct Live<'a, 'm> {
    pub(super) model: &'a Model<'m>,
    pub(super) tokens: &'a [u32],
    pub(super) interrupt: &'a Interrupt,
}

impl Residuals for Live<'_, '_> {
    fn each(&self, see: &mut See<'_>) -> Result<()> {
        each_residual(self.model, self.tokens, self.interrupt, see)
    }
}

/// Runs a model on a text and shows its residual stream.
///
/// # Errors
/// When a token is outside the vocabulary, or on an interrupt.
pub(super) fn each_residual(
    model: &Model<'_>,
    tokens: &[u32],
    interrupt: &Interrupt,
    see: &mut See<'_>,
) -> Result<()> {
    let mut state = State::new(model.config());
    for piece in tokens.chunks(PIECE) {
        interrupt.check()?;
        model.run(&mut state, piece, &mut |edge, position, rows| match edge {
            Edge::Embedding => see(None, position, rows),
            Edge::Layer(i, LayerEdge::Output) => see(Some(i), position, rows),
            _ => {}
        })?;
    }
    Ok(())
}

/// What [`each_residual`] shows on a text of so many tokens: place, position of the first row, rows.
pub(super) fn residual_pieces(
    tokens: usize,
    layers: usize,
) -> impl Iterator<Item = (Option<usize>, usize, usize)> {
    (0..tokens).step_by(PIECE).flat_map(move |position| {
        let rows = PIECE.min(tokens - position);
        std::iter::once(None).chain((0..layers).map(Some)).map(move |place| (place, position, rows))
    })
}

/// Feeds every layer of `other` with what the same layer of the reference gets, token for token: `reference`
/// is the stream of the first `tokens` of the scenario's text.
///
/// # Errors
/// When the stream cannot be computed or read, or on an interrupt.
pub(super) fn check_layers(
    scenario: &str,
    tokens: usize,
    reference: &dyn Residuals,
    other: &Model<'_>,
) -> Result<Layers> {
    let config = other.config();
    let mut sums = vec![[ErrorSums::default(); 2]; config.num_hidden_layers()];
    let mut theirs = State::new(config);
    let mut input: Vec<f32> = Vec::new();
    reference.each(&mut |place, position, rows| {
        if let Some(i) = place {
            let mut output = input.clone();
            other.run_layer(i, &mut theirs, position, &mut output, &mut |_, _| {});
            for ((r, y), x) in rows.iter().zip(&output).zip(&input) {
                let (r, y, x) = (f64::from(*r), f64::from(*y), f64::from(*x));
                let noise = (r - y) * (r - y);
                sums[i][0] += ErrorSums { signal: r * r, noise };
                sums[i][1] += ErrorSums { signal: (r - x) * (r - x), noise };
            }
        }
        input.clear();
        input.extend_from_slice(rows);
    })?;
    let layer = |(i, [output, update]): (usize, [ErrorSums; 2])| LayerSnr {
        layer: i,
        kind: config.layer_types[i].name().to_owned(),
        output_snr_db: in_decibels(output),
        update_snr_db: in_decibels(update),
    };
    Ok(Layers {
        scenario: scenario.to_owned(),
        tokens,
        layers: sums.into_iter().enumerate().map(layer).collect(),
    })
}

/// The SNR; the lowest that is reported where the noise is not a number, so that no bar is passed.
fn in_decibels(sums: ErrorSums) -> Option<f64> {
    const LOWEST: f64 = -1000.0;
    match sums.snr_db() {
        Some(db) if db.is_finite() => Some(db),
        Some(_) => Some(LOWEST),
        None => None,
    }
}

/// The name of a layer type in reports.
pub fn layer_kind(name: &str) -> &str {
    if name == LayerType::Sliding.name() {
        "sliding"
    } else if name == LayerType::Full.name() {
        "full"
    } else {
        name
    }
}
