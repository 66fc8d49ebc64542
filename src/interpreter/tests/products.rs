use super::*;

/// Codes minus zero points, in i64, whatever the type.
fn centred(codes: &Data, zero: i64) -> Vec<i64> {
    match codes {
        Data::U8(x) => x.iter().map(|x| i64::from(*x) - zero).collect(),
        Data::I8(x) => x.iter().map(|x| i64::from(*x) - zero).collect(),
        Data::U16(x) => x.iter().map(|x| i64::from(*x) - zero).collect(),
        Data::I16(x) => x.iter().map(|x| i64::from(*x) - zero).collect(),
        Data::F32(_) | Data::I64(_) => panic!("not codes"),
    }
}

fn of_type(element: ElementType, seed: u64, n: usize) -> Data {
    match element {
        ElementType::U8 => Data::U8(codes_u8(seed, n)),
        ElementType::I8 => Data::I8(codes_i8(seed, n)),
        ElementType::U16 => Data::U16(codes_u16(seed, n)),
        _ => Data::I16(codes_i16(seed, n)),
    }
}

fn zero_of(element: ElementType, zero: i64) -> Data {
    match element {
        ElementType::U8 => Data::U8(vec![zero as u8]),
        ElementType::I8 => Data::I8(vec![zero as i8]),
        ElementType::U16 => Data::U16(vec![zero as u16]),
        _ => Data::I16(vec![zero as i16]),
    }
}

/// `x` with a zero point times rows of `w` with a scale per row; the sum is exact, then scaled once.
fn check_gemm(m: usize, n: usize, k: usize, x: (Data, i64), w: (Data, i64), in_file: bool) {
    let (x_scale, w_scales) = (0.003_7f32, noise(4, n).iter().map(|s| s.abs() + 0.01).collect::<Vec<_>>());
    let (xt, wt) = (tensor(&[m, k], x.0), tensor(&[n, k], w.0));
    let zeros = match zero_of(wt.element(), w.1) {
        Data::U8(z) => Data::U8(vec![z[0]; n]),
        Data::I8(z) => Data::I8(vec![z[0]; n]),
        Data::U16(z) => Data::U16(vec![z[0]; n]),
        Data::I16(z) => Data::I16(vec![z[0]; n]),
        other => other,
    };
    let build = Build::new().input("q", xt.element(), &[m, k]);
    let build = if in_file { build.external("w", &wt) } else { build.constant("w", &wt) };
    let build = build
        .dequantize("q", x_scale, zero_of(xt.element(), x.1), "x")
        .constant("w_scale", &floats(&[n], &w_scales))
        .constant("w_zero", &tensor(&[n], zeros))
        .node_with("DequantizeLinear", &["w", "w_scale", "w_zero"], "wf", &[("axis", AttributeValue::Int(0))])
        .node_with("Gemm", &["x", "wf"], "y", &[("transB", AttributeValue::Int(1))])
        .output("y", ElementType::F32, &[m, n]);
    let found = build.run(&[("q", &xt)]);
    let (xc, wc) = (centred(xt.data(), x.1), centred(wt.data(), w.1));
    for (i, found) in found["y"].floats().unwrap().iter().enumerate() {
        let (row, column) = (i / n, i % n);
        let sum: i64 = xc[row * k..][..k].iter().zip(&wc[column * k..][..k]).map(|(x, w)| x * w).sum();
        let expected = (sum as f64 * f64::from(x_scale) * f64::from(w_scales[column])) as f32;
        assert!((found - expected).abs() <= expected.abs() * 1.2e-7, "{m} {n} {k}: {found} {expected}");
    }
}

#[test]
fn products_of_codes_are_exact_for_every_pair_of_types() {
    use ElementType::{I8, I16, U8, U16};
    for (x, x_zero) in [(U16, 32_768), (U16, 0), (U16, 65_535), (U16, 11_111), (I16, 0), (U8, 128), (I8, -3)]
    {
        for (w, w_zero) in [(I8, 0), (I16, 0), (U8, 130), (I8, 5), (U16, 40_000)] {
            for (m, n, k) in [(1, 5, 37), (1, 33, 64), (3, 7, 130)] {
                check_gemm(m, n, k, (of_type(x, 1, m * k), x_zero), (of_type(w, 2, n * k), w_zero), false);
            }
        }
    }
}

/// The largest sums there are: 16 bits times 8 leave 32 after 258 terms.
#[test]
fn sums_do_not_overflow() {
    let k = 6656;
    for zero in [0, 32_768, 65_535] {
        for code in [0, 65_535] {
            check_gemm(1, 2, k, (Data::U16(vec![code; k]), zero), (Data::I8(vec![-128; 2 * k]), 0), false);
            check_gemm(
                1,
                2,
                k,
                (Data::U16(vec![code; k]), zero),
                (Data::I16(vec![-32_768; 2 * k]), 0),
                false,
            );
        }
    }
}

#[test]
fn weights_of_a_file_are_read_where_they_are() {
    for element in [ElementType::I8, ElementType::I16, ElementType::U16, ElementType::U8] {
        let (n, k) = (300, 257);
        check_gemm(
            2,
            n,
            k,
            (of_type(ElementType::U16, 5, 2 * k), 30_000),
            (of_type(element, 6, n * k), 0),
            true,
        );
    }
}

/// Float activations with quantized weights, float weights in the model and in the file.
#[test]
fn products_of_floats_are_close_to_exact() {
    let (m, n, k) = (2, 70, 300);
    let (x, w) = (noise(1, m * k), noise(2, n * k));
    let codes = of_type(ElementType::I8, 3, n * k);
    let scales = noise(4, n);
    let scales: Vec<f32> = scales.iter().map(|s| s.abs() * 0.01 + 1e-3).collect();
    let dequantized: Vec<f64> =
        centred(&codes, 0).iter().enumerate().map(|(i, c)| f64::from(*c as f32 * scales[i / k])).collect();
    let transposed = [("transB", AttributeValue::Int(1)), ("alpha", AttributeValue::Float(1.0))];
    let build = Build::new()
        .input("x", ElementType::F32, &[m, k])
        .external("wf", &floats(&[n, k], &w))
        .constant("wm", &floats(&[4, k], &w[..4 * k]))
        .constant("wq", &tensor(&[n, k], codes))
        .constant("s", &floats(&[n], &scales))
        .constant("z", &tensor(&[n], Data::I8(vec![0; n])))
        .node_with("DequantizeLinear", &["wq", "s", "z"], "wd", &[("axis", AttributeValue::Int(0))])
        .node_with("Gemm", &["x", "wf"], "a", &transposed)
        .node_with("Gemm", &["x", "wd"], "b", &transposed)
        .node_with("Gemm", &["x", "wm"], "c", &transposed)
        .output("a", ElementType::F32, &[m, n])
        .output("b", ElementType::F32, &[m, n])
        .output("c", ElementType::F32, &[m, 4]);
    let found = build.run(&[("x", &floats(&[m, k], &x))]);
    let w: Vec<f64> = w.iter().map(|w| f64::from(*w)).collect();
    for (name, w, n) in [("a", &w, n), ("b", &dequantized, n), ("c", &w, 4)] {
        for (i, found) in found[name].floats().unwrap().iter().enumerate() {
            let exact: f64 =
                x[i / n * k..][..k].iter().zip(&w[i % n * k..][..k]).map(|(x, w)| f64::from(*x) * w).sum();
            assert!((f64::from(*found) - exact).abs() < 2e-5, "{name} {i}: {found} {exact}");
        }
    }
}

/// Shapes of `a` and `b`, and per output matrix which matrices it is made of.
type Case = (&'static [usize], &'static [usize], &'static [(usize, usize)]);

const BATCHES: [Case; 5] = [
    (&[3, 4], &[4, 5], &[(0, 0)]),
    (&[2, 1, 4, 300], &[2, 1, 300, 170], &[(0, 0), (1, 1)]),
    (&[2, 1, 3, 4], &[1, 2, 4, 2], &[(0, 0), (0, 1), (1, 0), (1, 1)]),
    (&[2, 3, 4], &[4, 2], &[(0, 0), (1, 0)]),
    (&[1, 7], &[3, 7, 1], &[(0, 0), (0, 1), (0, 2)]),
];

#[test]
fn matrices_of_codes_multiply_exactly_in_batches() {
    use ElementType::{I8, I16, U8, U16};
    for (a_shape, b_shape, pairs) in BATCHES {
        for (a, a_zero, b, b_zero) in
            [(U16, 32_768, I16, 0), (U16, 0, U16, 65_535), (U8, 3, I8, -4), (I16, 0, I16, 0)]
        {
            let size = |shape: &[usize]| shape.iter().product::<usize>();
            let at = tensor(a_shape, of_type(a, 7, size(a_shape)));
            let bt = tensor(b_shape, of_type(b, 8, size(b_shape)));
            let ([m, k], [_, n]) = (a_shape.last_chunk().unwrap(), b_shape.last_chunk().unwrap());
            let mut shape = if a_shape.len() > b_shape.len() { a_shape.to_vec() } else { b_shape.to_vec() };
            let rank = shape.len();
            for (d, s) in shape[..rank - 2].iter_mut().enumerate() {
                let dim = |x: &[usize]| (d + x.len()).checked_sub(rank).map_or(1, |i| x[i]);
                *s = dim(a_shape).max(dim(b_shape));
            }
            shape[rank - 2] = *m;
            shape[rank - 1] = *n;
            let build = Build::new()
                .input("a", a, a_shape)
                .input("b", b, b_shape)
                .dequantize("a", 0.002, zero_of(a, a_zero), "af")
                .dequantize("b", 0.125, zero_of(b, b_zero), "bf")
                .node("MatMul", &["af", "bf"], "y")
                .output("y", ElementType::F32, &shape);
            let found = build.run(&[("a", &at), ("b", &bt)]);
            let (ac, bc) = (centred(at.data(), a_zero), centred(bt.data(), b_zero));
            for (i, found) in found["y"].floats().unwrap().iter().enumerate() {
                let (matrix, row, column) = (i / (m * n), i / n % m, i % n);
                let (am, bm) = pairs[matrix];
                let sum: i64 =
                    (0..*k).map(|j| ac[(am * m + row) * k + j] * bc[(bm * k + j) * n + column]).sum();
                let expected = (sum as f64 * f64::from(0.002f32) * 0.125) as f32;
                assert!(
                    (found - expected).abs() <= expected.abs() * 1.2e-7,
                    "{a_shape:?}: {found} {expected}"
                );
            }
        }
    }
}

#[test]
fn matrices_of_floats_multiply_in_batches() {
    for (a_shape, b_shape, pairs) in BATCHES {
        let size = |shape: &[usize]| shape.iter().product::<usize>();
        let (a, b) = (noise(1, size(a_shape)), noise(2, size(b_shape)));
        let ([m, k], [_, n]) = (a_shape.last_chunk().unwrap(), b_shape.last_chunk().unwrap());
        let rank = a_shape.len().max(b_shape.len());
        let outer: Vec<usize> = (0..rank - 2)
            .map(|d| {
                let dim = |x: &[usize]| (d + x.len()).checked_sub(rank).map_or(1, |i| x[i]);
                dim(a_shape).max(dim(b_shape))
            })
            .collect();
        let shape = [&*outer, &[*m, *n]].concat();
        let build = Build::new()
            .input("a", ElementType::F32, a_shape)
            .input("b", ElementType::F32, b_shape)
            .node("MatMul", &["a", "b"], "y")
            .output("y", ElementType::F32, &shape);
        let found = build.run(&[("a", &floats(a_shape, &a)), ("b", &floats(b_shape, &b))]);
        for (i, found) in found["y"].floats().unwrap().iter().enumerate() {
            let (matrix, row, column) = (i / (m * n), i / n % m, i % n);
            let (am, bm) = pairs[matrix];
            let exact: f64 = (0..*k)
                .map(|j| f64::from(a[(am * m + row) * k + j]) * f64::from(b[(bm * k + j) * n + column]))
                .sum();
            assert!((f64::from(*found) - exact).abs() < 2e-5, "{a_shape:?}: {found} {exact}");
        }
    }
}
