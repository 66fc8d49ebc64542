use super::*;
use crate::tensor::Dtype;

/// Rows of weights, as F32 bytes.
fn bytes(rows: &[[f32; 4]]) -> Vec<u8> {
    rows.iter().flatten().flat_map(|x| x.to_le_bytes()).collect()
}

fn weight(rows: std::ops::Range<usize>, factor: f32) -> Weight {
    let (name, source) = ("w".to_owned(), "s".to_owned());
    Weight { name, source, rows, columns: 4, factor, role: WeightRole::Linear, module: Module::QkvProj }
}

/// Codes and scales of all rows of a weight, encoded one block of one row at a time.
fn encode(
    rows: &[[f32; 4]],
    weight: &Weight,
    coding: Coding,
) -> Result<(Vec<u8>, Scales, ErrorSums), NonFinite> {
    let bytes = bytes(rows);
    let source = TensorView { name: "s", dtype: Dtype::F32, shape: &[rows.len(), 4], bytes: &bytes };
    let mut encoder = WeightEncoder::new(source, weight, coding, Method::RoundToNearest)?;
    let (mut codes, mut sums) = (Vec::new(), ErrorSums::default());
    for row in 0..weight.rows.len() {
        sums += encoder.encode(row..row + 1, &mut codes)?;
    }
    Ok((codes, encoder.finish(), sums))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn rows_have_scales_of_their_own_and_the_factor_goes_into_them() {
    let rows = [[9.0; 4], [127.0, -127.0, 1.5, 2.5], [0.0; 4], [0.0, 2.54, -1.27, 0.0]];
    let (codes, scales, sums) = encode(&rows, &weight(1..4, 0.5), Coding::Rows(Bits::Eight)).unwrap();
    // Halves are rounded to even; the factor of a half is exact and changes no code.
    let expected: [i8; 12] = [127, -127, 2, 2, 0, 0, 0, 0, 0, 127, -64, 0];
    assert_eq!(codes, expected.map(|c| c.cast_unsigned()));
    let found = floats(&scales.scales);
    assert_eq!(found[..2], [0.5, 1.0]);
    assert!((found[2] - 0.01).abs() < 1e-8);
    assert_eq!((scales.zero_points, scales.zero_rows), (vec![0; 3], 1));
    // Off by half a step of 0.5 twice, and by half a step of 0.01.
    assert!((sums.noise - (2.0 * 0.25 * 0.25 + 0.005 * 0.005)).abs() < 1e-6, "{sums:?}");
}

#[test]
fn sixteen_bits_are_finer() {
    let rows = [[1.0, -0.5, 0.25, 0.0]];
    for coding in [Coding::Rows(Bits::Sixteen), Coding::Symmetric(Bits::Sixteen)] {
        let (codes, scales, _) = encode(&rows, &weight(0..1, 1.0), coding).unwrap();
        let codes: Vec<i16> = codes.chunks(2).map(|b| i16::from_le_bytes([b[0], b[1]])).collect();
        // 32767 times 0.5 and 0.25, halves to even: 16383.5 and 8191.75.
        assert_eq!(codes, [32767, -16384, 8192, 0]);
        assert_eq!(floats(&scales.scales), [1.0 / 32767.0]);
        assert_eq!(scales.zero_points, [0, 0]);
    }
}

#[test]
fn one_scale_for_all_rows_is_of_the_largest() {
    let rows = [[1.0, 0.0, 0.0, 0.0], [-2.0, 1.0, 0.0, 0.0]];
    let (codes, scales, _) = encode(&rows, &weight(0..2, 1.0), Coding::Symmetric(Bits::Sixteen)).unwrap();
    let codes: Vec<i16> = codes.chunks(2).map(|b| i16::from_le_bytes([b[0], b[1]])).collect();
    assert_eq!((codes[0], codes[4]), (16384, -32767));
    assert_eq!(floats(&scales.scales), [2.0 / 32767.0]);
}

#[test]
fn norms_have_a_zero_point() {
    let (codes, scales, _) =
        encode(&[[0.5, 1.5, -0.5, 0.0]], &weight(0..1, 1.0), Coding::Asymmetric(Bits::Sixteen)).unwrap();
    let codes: Vec<u16> = codes.chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
    // -0.5 to 1.5 in 65535 steps; zero after a quarter of them: 16383.75.
    assert_eq!(scales.zero_points, 16384u16.to_le_bytes());
    assert_eq!((codes[1], codes[2], codes[3]), (65535, 0, 16384));
    let (codes, scales, _) =
        encode(&[[1.0, 1.0, 1.0, 1.0]], &weight(0..1, 1.0), Coding::Asymmetric(Bits::Eight)).unwrap();
    assert_eq!((codes, scales.zero_points), (vec![255; 4], vec![0]));
}

#[test]
fn floats_stay_and_nothing_is_lost() {
    let rows = [[1.0, -2.5, 3e-40, 0.0]];
    let (codes, scales, sums) = encode(&rows, &weight(0..1, 1.0), Coding::Float).unwrap();
    assert_eq!(codes, bytes(&rows));
    assert_eq!((scales.scales.len(), scales.zero_points.len(), sums.snr_db()), (0, 0, None));
}

#[test]
fn a_weight_that_is_not_finite_is_located() {
    let rows = [[1.0; 4], [1.0, f32::NAN, 1.0, f32::INFINITY]];
    for coding in [Coding::Rows(Bits::Eight), Coding::Symmetric(Bits::Sixteen), Coding::Float] {
        let bad = encode(&rows, &weight(0..2, 1.0), coding).unwrap_err();
        assert_eq!(bad, NonFinite { count: 2, row: 1, column: 1 });
    }
}
