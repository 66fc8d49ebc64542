use proptest::prelude::*;

use super::super::tests::*;
use super::*;
use crate::quant::int4::symmetric::{self, Signs};

fn quantize(weights: &[f32], method: Method) -> (Vec<u8>, f32, u8) {
    let mut codes = vec![0; weights.len()];
    let (scale, zero) = quantize_group(weights, None, method, &mut codes);
    (codes, scale, zero)
}

fn noise(weights: &[f32], method: Method) -> f64 {
    let (codes, scale, zero) = quantize(weights, method);
    group_error(weights, &codes, scale, zero).noise
}

#[test]
fn rounding_gives_the_golden_codes_scales_and_zeros() {
    let golden = &goldens()["packed"];
    let (n, k, g) = (32, 64, 32);
    let [packed, scales, zeros] =
        ["weight_packed_hex", "weight_scale_bf16_hex", "weight_zero_point_hex"].map(|key| hex(&golden[key]));
    for row in 0..n {
        for group in 0..k / g {
            let weight = |c| golden_weight(row, c) + if c < 32 { 0.125 } else { 0.0 };
            let weights: Vec<f32> = (group * g..(group + 1) * g).map(weight).collect();
            let (codes, scale, zero) = quantize(&weights, Method::RoundToNearest);
            assert_eq!(scale, bf16_at(&scales, row * (k / g) + group));
            // Word [row / 8, group], nibble row % 8.
            let byte = zeros[(row / 8 * (k / g) + group) * 4 + row % 8 / 2];
            assert_eq!(zero, (byte >> (row % 2 * 4)) & 15);
            for (at, code) in codes.iter().enumerate() {
                let c = group * g + at;
                assert_eq!(*code, (packed[(row * k + c) / 2] >> (c % 2 * 4)) & 15, "{row} {c}");
            }
        }
    }
}

#[test]
fn constants_are_exact_and_scales_normal() {
    for method in METHODS {
        for c in CONSTANTS {
            let (codes, scale, zero) = quantize(&[c; 33], method);
            assert!(scale.is_normal() && scale > 0.0, "{c:e} {scale:e}");
            assert_eq!(group_error(&[c; 33], &codes, scale, zero).noise, 0.0, "{c:e}");
            let mut back = [1.0; 33];
            decode_group(&codes, scale, zero, &mut back);
            assert_eq!(back, [c; 33]);
        }
    }
}

#[test]
fn extreme_groups_keep_finite_scales_weights_and_sums() {
    for group in extremes() {
        for method in METHODS {
            let (codes, scale, zero) = quantize(&group, method);
            assert!(scale.is_normal() && scale > 0.0 && is_bf16(scale), "{group:?}");
            let mut back = vec![0.0; group.len()];
            decode_group(&codes, scale, zero, &mut back);
            assert!(back.iter().all(|w| w.is_finite()), "{group:?} {back:?}");
            let sums = group_error(&group, &codes, scale, zero);
            assert!(sums.signal.is_finite(), "{group:?}");
            assert!(sums.noise <= rounding_bound(&group), "{group:?} {sums:?}");
        }
    }
}

/// All scales from half to 1.1 times the full range's, with every zero.
fn best_of_all(weights: &[f32]) -> f64 {
    let (full, _) = rounding(extent(weights));
    scales_around(full, 0.5, 1.1)
        .flat_map(|scale| (0..16u8).map(move |zero| (scale, f32::from(zero))))
        .map(|(scale, zero)| {
            plain_noise(weights, |w| (w / scale).round_ties_even().clamp(-zero, 15.0 - zero) * scale)
        })
        .fold(f64::INFINITY, f64::min)
}

#[test]
fn the_search_is_close_to_trying_everything() {
    let mut loss = Loss::default();
    for weights in samples() {
        loss.add(noise(&weights, Method::Search), best_of_all(&weights));
    }
    assert!(loss.mean_db() < 0.05, "{}", loss.mean_db());
}

#[test]
fn a_zero_point_loses_less_than_the_symmetric_grid() {
    let mut gain = Loss::default();
    for weights in samples() {
        let mut codes = vec![0; weights.len()];
        let scale = symmetric::quantize_group(&weights, None, Method::Search, Signs::Both, &mut codes);
        let symmetric = symmetric::group_error(&weights, &codes, scale).noise;
        let zero_point = noise(&weights, Method::Search);
        assert!(zero_point <= symmetric * 1.15, "{zero_point} {symmetric}");
        gain.add(symmetric, zero_point);
    }
    assert!(gain.mean_db() > 0.1, "{}", gain.mean_db());
}

#[test]
fn importance_moves_the_grid_to_what_counts() {
    check_importance(|weights, importance| {
        let mut codes = vec![0; weights.len()];
        let (scale, zero) = quantize_group(weights, importance, Method::Search, &mut codes);
        let mut back = vec![0.0; weights.len()];
        decode_group(&codes, scale, zero, &mut back);
        back
    });
}

#[test]
fn builds_of_the_search_agree() {
    for weights in samples() {
        let importance: Vec<f32> = weights.iter().map(|w| w.abs() * 3.0).collect();
        for importance in [None, Some(&importance[..])] {
            let group = Group::new(&weights, importance);
            assert_eq!(search(group), search::scalar(group));
        }
    }
}

proptest! {
    #[test]
    fn the_search_is_never_below_rounding_nor_rounding_above_its_bound(weights in any_group()) {
        let rounded = noise(&weights, Method::RoundToNearest);
        prop_assert!(rounded <= rounding_bound(&weights));
        let searched = noise(&weights, Method::Search);
        prop_assert!(searched <= rounded * (1.0 + 1e-4), "{searched} {rounded}");
    }

    #[test]
    fn errors_are_what_decoding_shows(weights in any_group()) {
        let (codes, scale, zero) = quantize(&weights, Method::Search);
        prop_assert!(is_bf16(scale) && scale > 0.0 && zero < 16);
        let mut back = vec![0.0; weights.len()];
        decode_group(&codes, scale, zero, &mut back);
        check_sums(&weights, &back, group_error(&weights, &codes, scale, zero));
    }
}
