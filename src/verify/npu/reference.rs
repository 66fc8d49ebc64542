//! The checkpoint, step by step: what goes into every layer, what comes out, and the keys and values that
//! the caches of an export should hold.

use crate::error::Result;
use crate::interpreter::Tensors;
use crate::interrupt::Interrupt;
use crate::npu::manifest::{DecodeManifest, TensorInfo};
use crate::npu::runner::{encode, slot_of};
use crate::runtime::{Edge, LayerEdge, Model, State};

/// Tokens between two looks at the interrupt.
const PIECE: usize = 256;

/// A sequence in progress.
pub(super) struct Reference<'m> {
    model: &'m Model<'m>,
    state: State,
    /// The residual stream before each layer and behind the last, `[layers + 1, hidden]`, of the last step.
    pub(super) residual: Vec<Vec<f32>>,
    /// Of the last step, `[vocab]`.
    pub(super) logits: Vec<f32>,
}

impl<'m> Reference<'m> {
    /// A sequence that has taken in these tokens, or none.
    ///
    /// # Errors
    /// A token outside the vocabulary, or an interrupt.
    pub(super) fn after(
        model: &'m Model<'m>,
        tokens: &[u32],
        interrupt: &Interrupt,
        mut taken: impl FnMut(usize),
    ) -> Result<Self> {
        let mut state = State::new(model.config());
        for piece in tokens.chunks(PIECE) {
            interrupt.check()?;
            model.forward_last(&mut state, piece)?;
            taken(piece.len());
        }
        Ok(Self { model, state, residual: Vec::new(), logits: Vec::new() })
    }

    /// Takes in a token.
    ///
    /// # Errors
    /// When it is outside the vocabulary.
    pub(super) fn step(&mut self, token: u32) -> Result<()> {
        let (mut residual, mut hidden) = (Vec::new(), Vec::new());
        self.model.run(&mut self.state, &[token], &mut |edge, _, row| match edge {
            Edge::Embedding | Edge::Layer(_, LayerEdge::Output) => residual.push(row.to_vec()),
            Edge::FinalNorm => hidden.extend_from_slice(row),
            Edge::Layer(..) => {}
        })?;
        self.logits = self.model.logits(&hidden);
        self.residual = residual;
        Ok(())
    }

    /// The keys or the values of a layer at a position that its last steps still saw, `[heads, dim]`.
    pub(super) fn entry(&self, layer: usize, keys: bool, position: usize) -> Vec<f32> {
        let cache = &self.state.layers[layer];
        let heads = 0..self.model.config().num_key_value_heads;
        let of = |head| match keys {
            true => cache.keys(head, position..position + 1),
            false => cache.values(head, position..position + 1),
        };
        heads.flat_map(of).copied().collect()
    }

    /// The caches of an export before the step at `position`, each in its encoding and with its entries where
    /// the manifest's rules put them; `position` is the next, or that of the last step.
    ///
    /// # Errors
    /// When the manifest has no input for a cache, or one of another form.
    pub(super) fn caches(&self, manifest: &DecodeManifest, position: usize) -> Result<Tensors> {
        let mut caches = Tensors::new();
        for info in manifest.graphs.iter().flat_map(|g| &g.inputs) {
            let keys = match info.role.as_str() {
                "key_cache" => true,
                "value_cache" => false,
                _ => continue,
            };
            let Some(layer) = info.layer else { continue };
            caches
                .insert(info.name.clone(), encode(info, &self.cache(manifest, info, layer, keys, position))?);
        }
        Ok(caches)
    }

    /// `[heads, 1, dim, capacity]` of keys, `[heads, 1, capacity, dim]` of values.
    fn cache(
        &self,
        manifest: &DecodeManifest,
        info: &TensorInfo,
        layer: usize,
        keys: bool,
        position: usize,
    ) -> Vec<f32> {
        let (heads, dim) = (self.model.config().num_key_value_heads, self.model.config().head_dim);
        let mut out = vec![0.0; info.shape.iter().product()];
        let Some(cache) = manifest.caches.iter().find(|c| c.layer == layer) else { return out };
        let capacity = cache.capacity;
        for entry in position.saturating_sub(capacity)..position {
            let Some(slot) = slot_of(cache, entry, position) else { continue };
            let values = self.entry(layer, keys, entry);
            for head in 0..heads {
                for (d, x) in values[head * dim..][..dim].iter().enumerate() {
                    let at = if keys { d * capacity + slot } else { slot * dim + d };
                    out[head * dim * capacity + at] = *x;
                }
            }
        }
        out
    }
}
