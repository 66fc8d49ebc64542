use proptest::prelude::*;

use super::super::tests::*;
use super::*;

fn quantize(weights: &[f32], method: Method, signs: Signs) -> (Vec<u8>, f32) {
    let mut codes = vec![0; weights.len()];
    let scale = quantize_group(weights, None, method, signs, &mut codes);
    (codes, scale)
}

fn noise(weights: &[f32], method: Method, signs: Signs) -> f64 {
    let (codes, scale) = quantize(weights, method, signs);
    group_error(weights, &codes, scale).noise
}

#[test]
fn rounding_gives_the_golden_codes_and_scales() {
    let golden = &goldens()["gptq"];
    let (n, k, g) = (32, 64, 32);
    let (qweight, scales) = (hex(&golden["qweight_hex"]), hex(&golden["scales_hex"]));
    for row in 0..n {
        for group in 0..k / g {
            let weights: Vec<f32> = (group * g..(group + 1) * g).map(|c| golden_weight(row, c)).collect();
            let (codes, scale) = quantize(&weights, Method::RoundToNearest, Signs::Both);
            assert_eq!(scale, bf16_at(&scales, group * n + row));
            for (at, code) in codes.iter().enumerate() {
                // Word [c / 8, row], nibble c % 8.
                let c = group * g + at;
                let byte = qweight[(c / 8 * n + row) * 4 + c % 8 / 2];
                assert_eq!(*code, (byte >> (c % 2 * 4)) & 15, "{row} {c}");
            }
        }
    }
}

#[test]
fn constants_are_exact_and_scales_normal() {
    for method in METHODS {
        for c in CONSTANTS {
            for signs in [Signs::Positive, Signs::Both] {
                let (codes, scale) = quantize(&[c; 33], method, signs);
                assert!(scale.is_normal() && scale > 0.0, "{c:e} {scale:e}");
                assert_eq!(group_error(&[c; 33], &codes, scale).noise, 0.0, "{c:e}");
                let mut back = [1.0; 33];
                decode_group(&codes, scale, &mut back);
                assert_eq!(back, [c; 33]);
            }
        }
    }
}

#[test]
fn extreme_groups_keep_finite_scales_weights_and_sums() {
    for group in extremes() {
        for method in METHODS {
            let (codes, scale) = quantize(&group, method, Signs::Both);
            assert!(scale.is_normal() && is_bf16(scale), "{group:?}");
            let mut back = vec![0.0; group.len()];
            decode_group(&codes, scale, &mut back);
            assert!(back.iter().all(|w| w.is_finite()), "{group:?} {back:?}");
            let sums = group_error(&group, &codes, scale);
            assert!(sums.signal.is_finite(), "{group:?}");
            assert!(sums.noise <= rounding_bound(&group), "{group:?} {sums:?}");
        }
    }
}

#[test]
fn signs_may_be_forbidden_and_pay_otherwise() {
    // The largest weights are positive: a negative scale gives them the extra level.
    let weights: Vec<f32> = (0..64).map(|i| (i as f32 - 29.0) / 8.0).collect();
    let (_, positive) = quantize(&weights, Method::Search, Signs::Positive);
    let (_, both) = quantize(&weights, Method::Search, Signs::Both);
    assert!(positive > 0.0 && both < 0.0, "{positive} {both}");
    assert!(
        noise(&weights, Method::Search, Signs::Both) < 0.9 * noise(&weights, Method::Search, Signs::Positive)
    );
}

/// All scales from half to 1.1 times the full range's, of either sign.
fn best_of_all(weights: &[f32]) -> f64 {
    let full = rounding_scale(extent(weights));
    scales_around(full, 0.5, 1.1)
        .flat_map(|scale| [scale, -scale])
        .map(|scale| plain_noise(weights, |w| (w / scale).round_ties_even().clamp(-8.0, 7.0) * scale))
        .fold(f64::INFINITY, f64::min)
}

#[test]
fn the_search_is_close_to_trying_everything() {
    let mut loss = Loss::default();
    for weights in samples() {
        loss.add(noise(&weights, Method::Search, Signs::Both), best_of_all(&weights));
    }
    assert!(loss.mean_db() < 0.05, "{}", loss.mean_db());
}

#[test]
fn importance_moves_the_grid_to_what_counts() {
    check_importance(|weights, importance| {
        let mut codes = vec![0; weights.len()];
        let scale = quantize_group(weights, importance, Method::Search, Signs::Both, &mut codes);
        let mut back = vec![0.0; weights.len()];
        decode_group(&codes, scale, &mut back);
        back
    });
}

#[test]
fn builds_of_the_search_agree() {
    for weights in samples() {
        let importance: Vec<f32> = weights.iter().map(|w| w.abs() * 3.0).collect();
        for importance in [None, Some(&importance[..])] {
            for signs in [Signs::Positive, Signs::Both] {
                let group = Group::new(&weights, importance);
                assert_eq!(
                    searched_scale(group, signs).to_bits(),
                    searched_scale::scalar(group, signs).to_bits()
                );
            }
        }
    }
}

proptest! {
    #[test]
    fn the_search_is_never_below_rounding_nor_rounding_above_its_bound(weights in any_group()) {
        let rounded = noise(&weights, Method::RoundToNearest, Signs::Both);
        prop_assert!(rounded <= rounding_bound(&weights));
        for signs in [Signs::Positive, Signs::Both] {
            let searched = noise(&weights, Method::Search, signs);
            prop_assert!(searched <= rounded * (1.0 + 1e-4), "{searched} {rounded}");
        }
    }

    #[test]
    fn errors_are_what_decoding_shows(weights in any_group()) {
        let (codes, scale) = quantize(&weights, Method::Search, Signs::Both);
        prop_assert!(is_bf16(scale));
        let mut back = vec![0.0; weights.len()];
        decode_group(&codes, scale, &mut back);
        check_sums(&weights, &back, group_error(&weights, &codes, scale));
    }
}
