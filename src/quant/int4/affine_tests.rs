use proptest::prelude::*;

use super::super::tests::*;
use super::*;

fn quantize(weights: &[f32], method: Method) -> (Vec<u8>, f32, f32) {
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
    let golden = &goldens()["tinygemm"];
    let (n, k, g) = (64, 64, 32);
    let (packed, stored) = (hex(&golden["weight_packed_hex"]), hex(&golden["scales_and_zeros_hex"]));
    for row in 0..n {
        for group in 0..k / g {
            let weights: Vec<f32> = (group * g..(group + 1) * g).map(|c| golden_weight(row, c)).collect();
            let (codes, scale, zero) = quantize(&weights, Method::RoundToNearest);
            let at = (group * n + row) * 2;
            assert_eq!([scale, zero], [bf16_at(&stored, at), bf16_at(&stored, at + 1)]);
            for (at, code) in codes.iter().enumerate() {
                // One block of 64 rows: 32 bytes per column, rows d and d + 32 in byte d.
                let byte = packed[(group * g + at) * 32 + row % 32];
                assert_eq!(*code, (byte >> (row / 32 * 4)) & 15);
            }
        }
    }
}

#[test]
fn constants_are_exact_and_scales_normal() {
    for method in METHODS {
        // Exact even below the smallest scale: the zero alone is the weight.
        for c in CONSTANTS.into_iter().chain([f32::from_bits(0x0001_0000)]) {
            let (codes, scale, zero) = quantize(&[c; 33], method);
            assert!(scale.is_normal() && scale > 0.0, "{c:e} {scale:e}");
            assert_eq!((codes[0], zero), (8, c));
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
            assert!(scale.is_normal() && scale > 0.0 && is_bf16(scale) && is_bf16(zero), "{group:?}");
            let mut back = vec![0.0; group.len()];
            decode_group(&codes, scale, zero, &mut back);
            assert!(back.iter().all(|w| w.is_finite()), "{group:?} {back:?}");
            let sums = group_error(&group, &codes, scale, zero);
            assert!(sums.signal.is_finite(), "{group:?}");
            assert!(sums.noise <= rounding_bound(&group), "{group:?} {sums:?}");
        }
    }
}

/// Ends on a fine mesh, each scale with the zeros that bf16 has around.
fn best_of_all(weights: &[f32]) -> f64 {
    let [lo, hi] = extent(weights);
    let mut best = f64::INFINITY;
    for i in -2..=40 {
        for j in -2..=40 {
            let step = (hi - lo) / 160.0;
            let (low, high) = (lo + step * i as f32, hi - step * j as f32);
            let scale = storable_scale((high - low) / 15.0);
            let zero = to_bf16(0.5 * (low + high) + 0.5 * scale);
            let decode =
                |w: f32| ((w - zero) / scale).round_ties_even().clamp(-8.0, 7.0).mul_add(scale, zero);
            best = best.min(plain_noise(weights, decode));
        }
    }
    best
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
            assert_eq!(
                moments(&weights, importance, 0.1, 0.3).map(f32::to_bits),
                moments::scalar(&weights, importance, 0.1, 0.3).map(f32::to_bits)
            );
        }
    }
}

proptest! {
    #[test]
    fn the_search_is_never_below_rounding_nor_rounding_above_its_bound(
        weights in any_group(),
        offset in prop_oneof![Just(0.0f32), -100f32..100.0],
    ) {
        let weights: Vec<f32> = weights.iter().map(|w| to_bf16(w + offset)).collect();
        let rounded = noise(&weights, Method::RoundToNearest);
        prop_assert!(rounded <= rounding_bound(&weights), "{rounded} {}", rounding_bound(&weights));
        let searched = noise(&weights, Method::Search);
        prop_assert!(searched <= rounded * (1.0 + 1e-3), "{searched} {rounded}");
    }

    #[test]
    fn errors_are_what_decoding_shows(weights in any_group()) {
        let (codes, scale, zero) = quantize(&weights, Method::Search);
        prop_assert!(is_bf16(scale) && scale > 0.0 && is_bf16(zero));
        let mut back = vec![0.0; weights.len()];
        decode_group(&codes, scale, zero, &mut back);
        check_sums(&weights, &back, group_error(&weights, &codes, scale, zero));
    }
}
