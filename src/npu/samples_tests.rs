use super::*;
use crate::npu::options::{Options, Precision};
use crate::npu::test_config;
use crate::runtime::Rounding;
use crate::spark::{SparkConfig, tensor_specs};
use crate::tensor::{Dtype, TensorView};

const CONTEXT: usize = 24;

/// A random model of the small architecture, for `check`.
fn with_model(check: impl FnOnce(&Model<'_>)) {
    let config: SparkConfig = test_config(|_| ());
    let mut state = 7u64;
    let mut noise = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = tensor_specs(&config)
        .into_iter()
        .map(|spec| {
            let bytes = (0..spec.shape.iter().product()).flat_map(|_: usize| (noise() * 0.3).to_le_bytes());
            (spec.name, spec.shape, bytes.collect())
        })
        .collect();
    let find = |name: &str| {
        let (name, shape, bytes) = tensors.iter().find(|t| t.0 == name)?;
        Some(TensorView { name, dtype: Dtype::F32, shape, bytes })
    };
    check(&Model::from_views(config, Rounding::None, find).unwrap());
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * 31 + 5) % 96) as u32).collect()
}

fn export(model: &Model<'_>, sliding_cache: CacheKind, full_cache: CacheKind) -> Export {
    let precision = Precision::Fp32;
    let options = Options {
        context: CONTEXT,
        sliding_cache,
        full_cache,
        samples: true,
        precision,
        ..Options::default()
    };
    Export::plan(model.config(), options).unwrap()
}

/// Key column of head 0 of a layer, as the forward pass makes it for a position.
fn rotated_keys(model: &Model<'_>, layer: usize, position: usize) -> Vec<f32> {
    let config = model.config();
    let mut key = Vec::new();
    let tap = &mut |edge: Edge, first: usize, rows: &[f32]| {
        if edge == Edge::Layer(layer, LayerEdge::Rotated) {
            let row = config.q_rows() + 2 * config.kv_rows();
            key = rows[(position - first) * row + config.q_rows()..][..config.head_dim].to_vec();
        }
    };
    model.run(&mut State::new(config), &tokens(CONTEXT), tap).unwrap();
    key
}

/// Slot of position 12 in a window of 8 (seven slots) and a context of 24 (23 slots), at position 15.
#[test]
fn entries_are_where_the_rule_of_the_cache_puts_them() {
    with_model(|model| {
        let mut state = State::new(model.config());
        model.forward(&mut state, &tokens(15)).unwrap();
        for (sliding, full, slots) in [
            (CacheKind::RingEntry, CacheKind::RollEntry, [12 % 7, 12]),
            // The last 7 of 7, the last 15 of 23: position 12 is third from the end.
            (CacheKind::RollCache, CacheKind::RollCache, [4, 20]),
            (CacheKind::RingEntry, CacheKind::RingEntry, [12 % 7, 12]),
        ] {
            let export = export(model, sliding, full);
            let step = Step::new(model, &export, state.clone(), 3).unwrap();
            for (layer, (capacity, slot)) in [7, 23].into_iter().zip(slots).enumerate() {
                let keys = step.cache(layer, true);
                let expected = rotated_keys(model, layer, 12);
                let found: Vec<f32> = (0..16).map(|d| keys[d * capacity + slot]).collect();
                assert_eq!(found, expected, "{sliding:?} {full:?} layer {layer}");
                assert_eq!(keys.len(), 2 * 16 * capacity);
            }
            // Of the full layer 15 of 23 slots are written, and the current token is seen.
            let mask = step.mask(LayerType::Full);
            assert_eq!(mask.len(), 24);
            assert_eq!(mask.iter().filter(|m| **m == 0.0).count(), 16);
            assert_eq!((mask[slots[1]], mask[23]), (0.0, 0.0));
            assert!(step.mask(LayerType::Sliding).iter().all(|m| *m == 0.0));
        }
    });
}

#[test]
fn samples_reach_from_nearly_empty_caches_to_full_ones() {
    let sequences = Sequences { tokens: vec![tokens(21), tokens(24)], texts: 2, notes: Vec::new() };
    let places: Vec<_> = (0..SAMPLES).map(|s| place(&sequences, s)).collect();
    assert_eq!(places[..4], [(0, 5), (0, 10), (0, 15), (0, 20)]);
    assert_eq!(places[4..], [(1, 5), (1, 11), (1, 17), (1, 23)]);
}
