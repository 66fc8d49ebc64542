use super::*;

#[test]
fn pairs_broadcast_from_the_last_dimension() {
    let a = floats(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let row = floats(&[3], &[10.0, 20.0, 30.0]);
    let column = floats(&[2, 1], &[100.0, 200.0]);
    let one = floats(&[], &[2.0]);
    let check = |op, a: &Tensor, b: &Tensor, shape: &[usize], expected: &[f32]| {
        assert_eq!(apply(op, &[], &[a, b], shape), floats(shape, expected), "{op}");
    };
    check("Add", &a, &row, &[2, 3], &[11.0, 22.0, 33.0, 14.0, 25.0, 36.0]);
    check("Add", &row, &a, &[2, 3], &[11.0, 22.0, 33.0, 14.0, 25.0, 36.0]);
    check("Sub", &a, &column, &[2, 3], &[-99.0, -98.0, -97.0, -196.0, -195.0, -194.0]);
    check("Sub", &column, &row, &[2, 3], &[90.0, 80.0, 70.0, 190.0, 180.0, 170.0]);
    check("Mul", &a, &one, &[2, 3], &[2.0, 4.0, 6.0, 8.0, 10.0, 12.0]);
    check("Div", &one, &a, &[2, 3], &[2.0, 1.0, 2.0 / 3.0, 0.5, 0.4, 2.0 / 6.0]);
    check("Div", &a, &a, &[2, 3], &[1.0; 6]);
    check("Pow", &a, &one, &[2, 3], &[1.0, 4.0, 9.0, 16.0, 25.0, 36.0]);
    check("Pow", &a, &floats(&[], &[-1.0]), &[2, 3], &[1.0, 0.5, 1.0 / 3.0, 0.25, 0.2, 1.0 / 6.0]);
    // Dimensions that one side does not have, and repeats in the middle.
    let deep = floats(&[2, 1, 2, 1], &[1.0, 2.0, 3.0, 4.0]);
    let wide = floats(&[2, 1, 2], &[0.0, 10.0, 20.0, 30.0]);
    let expected = [1., 11., 2., 12., 21., 31., 22., 32., 3., 13., 4., 14., 23., 33., 24., 34.];
    check("Add", &deep, &wide, &[2, 2, 2, 2], &expected);
}

fn close(op: &str, attributes: &[(&str, AttributeValue)], exact: impl Fn(f64) -> f64, tolerance: f64) {
    let x: Vec<f32> = (-900..900).map(|i| i as f32 * 0.01).chain([0.0, -30.0, 30.0, 1e-20]).collect();
    let found = apply(op, attributes, &[&floats(&[2, x.len() / 2], &x)], &[2, x.len() / 2]);
    for (x, found) in x.iter().zip(found.floats().unwrap()) {
        let exact = exact(f64::from(*x));
        let error = (f64::from(*found) - exact).abs();
        assert!(error <= tolerance * exact.abs().max(1e-30) + 1e-30, "{op}({x}) = {found}, expected {exact}");
    }
}

#[test]
fn functions_are_those_of_their_names() {
    let gelu = |x: f64| x / 2.0 * (1.0 + libm::erf(x / 2f64.sqrt()));
    close("Sigmoid", &[], |x| 1.0 / (1.0 + (-x).exp()), 5e-7);
    close("Erf", &[], libm::erf, 3e-7);
    close("Neg", &[], |x| -x, 0.0);
    // Relative to 1 + erf, which cancels on the far left: absolute there.
    let x = floats(&[5], &[-9.0, -1.0, 0.0, 0.5, 3.0]);
    let none = [("approximate", AttributeValue::String("none".into()))];
    let found = apply("Gelu", &none, &[&x], &[5]);
    for (x, found) in x.floats().unwrap().iter().zip(found.floats().unwrap()) {
        assert!((f64::from(*found) - gelu(f64::from(*x))).abs() < 3e-7, "{x} {found}");
    }
    let x = floats(&[1, 4], &[0.0, 1.0, 2.25, 1e-12]);
    assert_eq!(apply("Sqrt", &[], &[&x], &[1, 4]), floats(&[1, 4], &[0.0, 1.0, 1.5, 1e-6]));
}

#[test]
fn gelu_is_the_five_nodes_it_replaces() {
    let x = floats(&[1, 64], &noise(3, 64).iter().map(|x| x * 5.0).collect::<Vec<_>>());
    let build = Build::new()
        .input("x", ElementType::F32, &[1, 64])
        .constant("root", &floats(&[], &[std::f32::consts::SQRT_2]))
        .constant("one", &floats(&[], &[1.0]))
        .constant("half", &floats(&[], &[0.5]))
        .node("Div", &["x", "root"], "a")
        .node("Erf", &["a"], "b")
        .node("Add", &["b", "one"], "c")
        .node("Mul", &["x", "c"], "d")
        .node("Mul", &["d", "half"], "y")
        .node("Gelu", &["x"], "z")
        .output("y", ElementType::F32, &[1, 64])
        .output("z", ElementType::F32, &[1, 64]);
    let outputs = build.run(&[("x", &x)]);
    for (y, z) in outputs["y"].floats().unwrap().iter().zip(outputs["z"].floats().unwrap()) {
        assert!((y - z).abs() < 1e-6, "{y} {z}");
    }
}

#[test]
fn softmax_is_over_the_last_axis() {
    let ln = f32::ln;
    let x = floats(&[2, 1, 3], &[ln(1.0), ln(2.0), ln(5.0), 1000.0, 1000.0, -1000.0]);
    let found = apply("Softmax", &[("axis", AttributeValue::Int(-1))], &[&x], &[2, 1, 3]);
    for (found, expected) in found.floats().unwrap().iter().zip([0.125, 0.25, 0.625, 0.5, 0.5, 0.0]) {
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }
    assert_eq!(found, apply("Softmax", &[("axis", AttributeValue::Int(2))], &[&x], &[2, 1, 3]));
}

#[test]
fn rms_normalization_is_its_decomposition() {
    // Mean square 9, plus 7: the root is 4.
    let x = floats(&[2, 4], &[3.0, -3.0, 3.0, -3.0, 0.0, 6.0, 0.0, 0.0]);
    let scale = floats(&[4], &[4.0, 8.0, 0.0, -4.0]);
    let attributes = [("axis", AttributeValue::Int(-1)), ("epsilon", AttributeValue::Float(7.0))];
    let expected = floats(&[2, 4], &[3.0, -6.0, 0.0, 3.0, 0.0, 12.0, 0.0, 0.0]);
    assert_eq!(apply("RMSNormalization", &attributes, &[&x, &scale], &[2, 4]), expected);

    let build = Build::new()
        .input("x", ElementType::F32, &[1, 200])
        .constant("two", &floats(&[], &[2.0]))
        .constant("axes", &ints(&[-1]))
        .constant("eps", &floats(&[], &[1e-6]))
        .constant("w", &floats(&[200], &noise(2, 200)))
        .node("Pow", &["x", "two"], "squares")
        .node_with("ReduceMean", &["squares", "axes"], "mean", &[("keepdims", AttributeValue::Int(1))])
        .node("Add", &["mean", "eps"], "more")
        .node("Sqrt", &["more"], "root")
        .node("Div", &["x", "root"], "normal")
        .node("Mul", &["normal", "w"], "y")
        .node_with("RMSNormalization", &["x", "w"], "z", &[("epsilon", AttributeValue::Float(1e-6))])
        .output("y", ElementType::F32, &[1, 200])
        .output("z", ElementType::F32, &[1, 200])
        .output("mean", ElementType::F32, &[1, 1]);
    let x = noise(9, 200);
    let outputs = build.run(&[("x", &floats(&[1, 200], &x))]);
    for (y, z) in outputs["y"].floats().unwrap().iter().zip(outputs["z"].floats().unwrap()) {
        assert!((y - z).abs() < 1e-6, "{y} {z}");
    }
    let mean = x.iter().map(|x| f64::from(x * x)).sum::<f64>() / 200.0;
    assert!((f64::from(outputs["mean"].floats().unwrap()[0]) - mean).abs() < 1e-7);
}

#[test]
fn means_are_over_rows() {
    let x = floats(&[2, 2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, -1.0, 0.0, 1.0]);
    let expected = floats(&[2, 2, 1], &[2.0, 5.0, 8.0, 0.0]);
    assert_eq!(apply("ReduceMean", &[], &[&x, &ints(&[2])], &[2, 2, 1]), expected);
}
