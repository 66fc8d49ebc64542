use proptest::prelude::*;

use super::*;

fn quantized(x: &Tensor, scale: f32, zero: Data) -> Data {
    let element = zero.element();
    let build = Build::new().input("x", ElementType::F32, x.shape()).quantize("x", scale, zero, "q");
    let outputs = build.output("q", element, x.shape()).run(&[("x", x)]);
    outputs["q"].data().clone()
}

fn dequantized(q: &Tensor, scale: f32, zero: Data) -> Vec<f32> {
    let build = Build::new().input("q", q.element(), q.shape()).dequantize("q", scale, zero, "x");
    let outputs = build.output("x", ElementType::F32, q.shape()).run(&[("q", q)]);
    outputs["x"].floats().unwrap().to_vec()
}

#[test]
fn codes_are_rounded_half_to_even_and_saturate() {
    // In steps of 0.5: 0.5, 1.5, 2.5, -0.5, -1.5, 1.4, then far outside.
    let x = [0.25, 0.75, 1.25, -0.25, -0.75, 0.7, 1e9, -1e9, f32::INFINITY, f32::NEG_INFINITY];
    let x = floats(&[10], &x);
    assert_eq!(quantized(&x, 0.5, Data::U8(vec![3])), Data::U8(vec![3, 5, 5, 3, 1, 4, 255, 0, 255, 0]));
    assert_eq!(
        quantized(&x, 0.5, Data::I8(vec![-5])),
        Data::I8(vec![-5, -3, -3, -5, -7, -4, 127, -128, 127, -128])
    );
    assert_eq!(
        quantized(&x, 0.5, Data::U16(vec![32_768])),
        Data::U16(vec![32_768, 32_770, 32_770, 32_768, 32_766, 32_769, 65_535, 0, 65_535, 0])
    );
    assert_eq!(
        quantized(&x, 0.5, Data::I16(vec![0])),
        Data::I16(vec![0, 2, 2, 0, -2, 1, 32_767, -32_768, 32_767, -32_768])
    );
    // Zero points at the ends of the range.
    let x = floats(&[4], &[1.0, 65_535.0, 70_000.0, -1.0]);
    assert_eq!(quantized(&x, 1.0, Data::U16(vec![0])), Data::U16(vec![1, 65_535, 65_535, 0]));
    assert_eq!(quantized(&x, 1.0, Data::U16(vec![65_535])), Data::U16(vec![65_535, 65_535, 65_535, 65_534]));
}

/// Rounding comes before the zero point is added: 0.5 and an odd zero point give an odd code.
#[test]
fn the_zero_point_is_added_after_rounding() {
    let x = floats(&[2], &[0.5, 1.5]);
    assert_eq!(quantized(&x, 1.0, Data::U8(vec![7])), Data::U8(vec![7, 9]));
}

#[test]
fn codes_mean_their_distance_from_the_zero_point_times_the_scale() {
    let q = tensor(&[3], Data::U16(vec![0, 32_768, 65_535]));
    assert_eq!(dequantized(&q, 0.25, Data::U16(vec![32_768])), [-8192.0, 0.0, 8191.75]);
    assert_eq!(dequantized(&q, 1.0, Data::U16(vec![65_535])), [-65_535.0, -32_767.0, 0.0]);
    let q = tensor(&[3], Data::I8(vec![-128, 0, 127]));
    assert_eq!(dequantized(&q, 2.0, Data::I8(vec![127])), [-510.0, -254.0, 0.0]);
    let q = tensor(&[2], Data::U8(vec![0, 255]));
    assert_eq!(dequantized(&q, 0.5, Data::U8(vec![255])), [-127.5, 0.0]);
    let q = tensor(&[2], Data::I16(vec![-32_768, 32_767]));
    assert_eq!(dequantized(&q, 1.0, Data::I16(vec![0])), [-32_768.0, 32_767.0]);
}

#[test]
fn an_axis_has_a_scale_and_a_zero_point_per_index() {
    let x = floats(&[2, 3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0]);
    for axis in [1, -2] {
        let by_axis = [("axis", AttributeValue::Int(axis))];
        let build = Build::new()
            .input("x", ElementType::F32, &[2, 3, 2])
            .constant("s", &floats(&[3], &[1.0, 0.5, 2.0]))
            .constant("z", &tensor(&[3], Data::I8(vec![0, 10, -1])))
            .node_with("QuantizeLinear", &["x", "s", "z"], "q", &by_axis)
            .node_with("DequantizeLinear", &["q", "s", "z"], "y", &by_axis)
            .output("q", ElementType::I8, &[2, 3, 2])
            .output("y", ElementType::F32, &[2, 3, 2]);
        let outputs = build.run(&[("x", &x)]);
        // 5/2 = 2.5 is 2, 6/2 = 3, -5/2 is -2.
        assert_eq!(outputs["q"].data(), &Data::I8(vec![1, 2, 16, 18, 1, 2, -1, -2, 4, 2, -3, -4]));
        let y = [1.0, 2.0, 3.0, 4.0, 4.0, 6.0, -1.0, -2.0, -3.0, -4.0, -4.0, -6.0];
        assert_eq!(outputs["y"].floats().unwrap(), y);
    }
}

/// Two values of one tensor with two encodings: the code changes by the difference of zero points.
#[test]
fn a_change_of_encoding_moves_codes() {
    let q = tensor(&[4], Data::U16(vec![0, 1, 32_768, 65_535]));
    let build = Build::new()
        .input("q", ElementType::U16, &[4])
        .dequantize("q", 0.013, Data::U16(vec![32_768]), "x")
        .quantize("x", 0.013, Data::I16(vec![0]), "r")
        .output("r", ElementType::I16, &[4]);
    assert_eq!(build.run(&[("q", &q)])["r"].data(), &Data::I16(vec![-32_768, -32_767, 0, 32_767]));
}

#[test]
fn every_code_survives_at_many_scales() {
    let all = tensor(&[1 << 16], Data::U16((0..=u16::MAX).collect()));
    for (i, zero) in [0, 1, 777, 32_768, 65_535].into_iter().enumerate() {
        let scale = 1.37e-6 * 13.0f32.powi(i as i32);
        let x = floats(&[1 << 16], &dequantized(&all, scale, Data::U16(vec![zero])));
        assert_eq!(&quantized(&x, scale, Data::U16(vec![zero])), all.data());
    }
}

#[test]
fn long_tensors_are_cut_without_a_seam() {
    let n = 40_000;
    let x = floats(&[n], &noise(5, n));
    let found = quantized(&x, 1e-4, Data::I16(vec![-7]));
    let expected = x.floats().unwrap().iter().map(|x| {
        let steps = f64::from(x / 1e-4f32).round_ties_even();
        (steps - 7.0).clamp(-32_768.0, 32_767.0) as i16
    });
    assert_eq!(found, Data::I16(expected.collect()));
}

proptest! {
    #[test]
    fn a_code_is_within_half_a_step(x in -1e4f32..1e4, scale in 1e-3f32..10.0, zero in any::<u8>()) {
        let x = floats(&[1], &[x]);
        let code = quantized(&x, scale, Data::U8(vec![zero]));
        let q = tensor(&[1], code);
        let back = dequantized(&q, scale, Data::U8(vec![zero]))[0];
        let x = x.floats().unwrap()[0];
        let (lowest, highest) = (-f32::from(zero) * scale, (255.0 - f32::from(zero)) * scale);
        let nearest = x.clamp(lowest, highest);
        prop_assert!((back - nearest).abs() <= scale * 0.5001, "{} {}", back, nearest);
    }
}
