//! Keys and values of earlier positions.

use std::ops::Range;

use crate::spark::{LayerType, SparkConfig};

/// What a model remembers of one sequence: how far it is, and the keys and values that later
/// positions can still see.
///
/// Memory grows with the positions used in full layers and is bounded in sliding layers.
#[derive(Clone, Debug)]
pub struct State {
    pub(crate) position: usize,
    pub(crate) layers: Vec<LayerCache>,
}

impl State {
    /// An empty sequence.
    pub fn new(config: &SparkConfig) -> Self {
        let layers = (0..config.num_hidden_layers()).map(|layer| LayerCache::of_layer(config, layer));
        Self { position: 0, layers: layers.collect() }
    }

    /// Whether this is the state of a model with this configuration.
    pub(crate) fn fits(&self, config: &SparkConfig) -> bool {
        let layer = |(layer, kind): (&LayerCache, &LayerType)| {
            layer.head_dim == config.head_dim
                && layer.heads.len() == config.num_key_value_heads
                && layer.keep == earlier_entries(*kind, config)
        };
        self.layers.len() == config.layer_types.len()
            && self.layers.iter().zip(&config.layer_types).all(layer)
    }

    /// Number of tokens taken in, which is the position of the next.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Bytes held in keys and values.
    pub fn bytes(&self) -> usize {
        let entries = self.layers.iter().flat_map(|l| &l.heads).map(|h| h.k.capacity() + h.v.capacity());
        entries.sum::<usize>() * size_of::<f32>()
    }
}

/// How many entries before the current one a layer sees, if that is bounded: the window counts the
/// current position.
fn earlier_entries(kind: LayerType, config: &SparkConfig) -> Option<usize> {
    (kind == LayerType::Sliding).then(|| config.sliding_window.saturating_sub(1))
}

/// Entries of one layer, contiguous by position for every key head.
///
/// A sliding layer drops entries from the front: `window - 1` earlier ones are all that the next
/// position can see. Dropping moves the rest, so it waits until as many can go as must stay.
#[derive(Clone, Debug)]
pub(crate) struct LayerCache {
    /// Earlier entries to keep.
    keep: Option<usize>,
    head_dim: usize,
    /// Position of the first entry.
    first: usize,
    /// Number of entries.
    len: usize,
    heads: Vec<HeadCache>,
}

#[derive(Clone, Debug, Default)]
struct HeadCache {
    k: Vec<f32>,
    v: Vec<f32>,
}

impl LayerCache {
    /// The empty cache of a layer.
    pub(crate) fn of_layer(config: &SparkConfig, layer: usize) -> Self {
        let keep = earlier_entries(config.layer_types[layer], config);
        Self::new(config.num_key_value_heads, config.head_dim, keep)
    }

    /// An empty cache; `keep` is the number of earlier entries a position sees.
    pub(crate) fn new(heads: usize, head_dim: usize, keep: Option<usize>) -> Self {
        Self { keep, head_dim, first: 0, len: 0, heads: vec![HeadCache::default(); heads] }
    }

    /// Adds the entries of the next `count` positions; `entry(head, i)` is the key and the value of
    /// the `i`th.
    pub(crate) fn append<'a>(
        &mut self,
        count: usize,
        entry: impl Fn(usize, usize) -> (&'a [f32], &'a [f32]),
    ) {
        self.drop_unseen();
        for (h, head) in self.heads.iter_mut().enumerate() {
            for i in 0..count {
                let (k, v) = entry(h, i);
                head.k.extend_from_slice(k);
                head.v.extend_from_slice(v);
            }
        }
        self.len += count;
    }

    fn drop_unseen(&mut self) {
        let Some(keep) = self.keep else { return };
        let unseen = self.len.saturating_sub(keep);
        if unseen < keep.max(1) {
            return;
        }
        for head in &mut self.heads {
            head.k.drain(..unseen * self.head_dim);
            head.v.drain(..unseen * self.head_dim);
        }
        self.first += unseen;
        self.len -= unseen;
    }

    /// The first of the positions that `position` sees.
    pub(crate) fn first_visible(&self, position: usize) -> usize {
        self.keep.map_or(0, |keep| position.saturating_sub(keep))
    }

    /// Keys of a head at some positions, all of which are held.
    pub(crate) fn keys(&self, head: usize, positions: Range<usize>) -> &[f32] {
        &self.heads[head].k[self.span(positions)]
    }

    /// Values of a head at some positions, all of which are held.
    pub(crate) fn values(&self, head: usize, positions: Range<usize>) -> &[f32] {
        &self.heads[head].v[self.span(positions)]
    }

    fn span(&self, positions: Range<usize>) -> Range<usize> {
        (positions.start - self.first) * self.head_dim..(positions.end - self.first) * self.head_dim
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(cache: &mut LayerCache, positions: Range<usize>) {
        let values: Vec<f32> = positions.map(|p| p as f32).collect();
        cache.append(values.len(), |_, i| (&values[i..=i], &values[i..=i]));
    }

    #[test]
    fn a_window_counts_the_current_position() {
        let first = |window: Option<usize>, position| {
            LayerCache::new(1, 1, window.map(|w| w - 1)).first_visible(position)
        };
        assert_eq!([0, 2, 3, 4, 9].map(|p| first(Some(4), p)), [0, 0, 0, 1, 6]);
        assert_eq!(first(Some(1), 7), 7);
        assert_eq!(first(None, 7), 0);
    }

    /// The values are the positions, so what is visible can be read off.
    #[test]
    fn every_visible_entry_is_held_and_old_ones_go() {
        for window in [1, 2, 5] {
            let mut cache = LayerCache::new(2, 1, Some(window - 1));
            let mut position = 0;
            for step in [3, 1, 1, 1, 7, 1, 1, 1, 1, 1, 1, 20, 1] {
                fill(&mut cache, position..position + step);
                for p in position..position + step {
                    let visible = cache.first_visible(p)..p + 1;
                    let expected: Vec<f32> = visible.clone().map(|p| p as f32).collect();
                    assert_eq!(cache.keys(1, visible.clone()), expected);
                    assert_eq!(cache.values(0, visible), expected);
                }
                position += step;
                assert!(cache.len <= 2 * window + 20, "{}", cache.len);
            }
            for p in position..position + 1000 {
                fill(&mut cache, p..p + 1);
                assert!(cache.len <= 2 * window, "{}", cache.len);
            }
        }
    }

    #[test]
    fn a_full_layer_keeps_everything() {
        let mut cache = LayerCache::new(1, 1, None);
        fill(&mut cache, 0..100);
        assert_eq!(cache.keys(0, 0..3), [0.0, 1.0, 2.0]);
    }
}
