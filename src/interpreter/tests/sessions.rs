use proptest::prelude::*;

use super::*;

/// An MLP between quantized edges, weights in the file.
fn mlp() -> Build {
    let (h, n) = (96, 700);
    let weight = |build: Build, name: &str, seed, out: usize, k: usize| {
        let (scale, zero) = (format!("{name}_scale"), format!("{name}_zero"));
        let scales: Vec<f32> = noise(seed, out).iter().map(|s| s.abs() * 1e-3 + 1e-4).collect();
        build
            .external(name, &tensor(&[out, k], Data::I8(codes_i8(seed, out * k))))
            .constant(&scale, &floats(&[out], &scales))
            .constant(&zero, &tensor(&[out], Data::I8(vec![0; out])))
            .node_with(
                "DequantizeLinear",
                &[name, &scale, &zero],
                &format!("{name}_f"),
                &[("axis", AttributeValue::Int(0))],
            )
    };
    let transposed = [("transB", AttributeValue::Int(1))];
    let build = Build::new().input("x", ElementType::U16, &[1, h]);
    let build = build.dequantize("x", 5e-5, Data::U16(vec![32_768]), "xf");
    let build = weight(weight(weight(build, "gate", 1, n, h), "up", 2, n, h), "down", 3, h, n);
    build
        .node_with("Gemm", &["xf", "gate_f"], "a", &transposed)
        .quantize("a", 2e-4, Data::U16(vec![32_768]), "aq")
        .dequantize("aq", 2e-4, Data::U16(vec![32_768]), "af")
        .node("Gelu", &["af"], "g")
        .quantize("g", 1e-4, Data::U16(vec![2000]), "gq")
        .dequantize("gq", 1e-4, Data::U16(vec![2000]), "gf")
        .node_with("Gemm", &["xf", "up_f"], "u", &transposed)
        .quantize("u", 2e-4, Data::U16(vec![32_768]), "uq")
        .dequantize("uq", 2e-4, Data::U16(vec![32_768]), "uf")
        .node("Mul", &["gf", "uf"], "p")
        .quantize("p", 4e-4, Data::U16(vec![32_768]), "pq")
        .dequantize("pq", 4e-4, Data::U16(vec![32_768]), "pf")
        .node_with("Gemm", &["pf", "down_f"], "d", &transposed)
        .node("Add", &["xf", "d"], "s")
        .quantize("s", 3e-3, Data::U16(vec![32_768]), "y")
        .declare("gq", ElementType::U16, &[1, n])
        .declare("xf", ElementType::F32, &[1, h])
        .output("y", ElementType::U16, &[1, h])
}

fn x() -> Tensor {
    tensor(&[1, 96], Data::U16(codes_u16(11, 96)))
}

#[test]
fn results_do_not_depend_on_threads() {
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| mlp().run(&[("x", &x())]))
    };
    let one = run(1);
    assert_eq!(one, run(3));
    let Data::U16(y) = one["y"].data() else { panic!("type") };
    let distinct: std::collections::HashSet<_> = y.iter().collect();
    assert!(distinct.len() > 20, "{} distinct codes", distinct.len());
}

#[test]
fn a_tap_sees_every_computed_tensor_in_order_and_may_change_it() {
    let build = mlp();
    let model = build.read();
    let session = Session::new(&model, &build.data).unwrap();
    let mut seen = Vec::new();
    let inputs = given(&[("x", &x())]);
    let whole =
        session.run_with(&inputs, |name, tensor| seen.push((name.to_owned(), tensor.clone()))).unwrap();
    let names: Vec<&str> = seen.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a", "aq", "g", "gq", "u", "uq", "p", "pq", "d", "s", "y"]);
    assert_eq!(seen.last().unwrap().1, whole["y"]);
    // With nothing in the MLP, the sum is its input: codes move from one encoding to the other.
    let only_x = session.run_with(&inputs, |name, tensor| {
        if let ("d", SliceMut::F32(d)) = (name, tensor.slice_mut()) {
            d.fill(0.0);
        }
    });
    let x = x();
    let Data::U16(x) = x.data() else { panic!("type") };
    let expected = x.iter().map(|x| {
        let value = (f32::from(*x) - 32_768.0) * 5e-5;
        ((value / 3e-3).round_ties_even() + 32_768.0) as u16
    });
    assert_eq!(only_x.unwrap()["y"].data(), &Data::U16(expected.collect()));
}

#[test]
fn inputs_and_outputs_are_what_the_graph_says() {
    let build = mlp();
    let model = build.read();
    let session = Session::new(&model, &build.data).unwrap();
    assert!(session.inputs().eq(&model.graph.inputs));
    assert!(session.outputs().eq(&model.graph.outputs));
    let refusal = |inputs: &Tensors| session.run(inputs).unwrap_err().to_string();
    assert_eq!(refusal(&Tensors::new()), "x: expected uint16 [1, 96], found no such input");
    let other = tensor(&[96], Data::U16(vec![0; 96]));
    assert_eq!(refusal(&given(&[("x", &other)])), "x: expected uint16 [1, 96], found uint16 [96]");
    let other = floats(&[1, 96], &[0.0; 96]);
    assert_eq!(refusal(&given(&[("x", &other)])), "x: expected uint16 [1, 96], found float32 [1, 96]");
    let more = given(&[("x", &x()), ("w", &other)]);
    assert_eq!(refusal(&more), "w: expected one of x, found an input of that name");
}

#[test]
fn an_output_may_be_an_input_a_constant_or_dequantized_and_is_read_after_it_was_computed() {
    let x = tensor(&[2], Data::U8(vec![1, 2]));
    let build = Build::new()
        .input("x", ElementType::U8, &[2])
        .constant("c", &floats(&[1], &[7.0]))
        .dequantize("x", 0.5, Data::U8(vec![1]), "f")
        .node("Add", &["f", "c"], "y")
        .node("Neg", &["y"], "z")
        .output("x", ElementType::U8, &[2])
        .output("c", ElementType::F32, &[1])
        .output("f", ElementType::F32, &[2])
        .output("y", ElementType::F32, &[2])
        .output("z", ElementType::F32, &[2]);
    let found = build.run(&[("x", &x)]);
    assert_eq!(found["x"], x);
    assert_eq!(found["c"], floats(&[1], &[7.0]));
    assert_eq!(found["f"], floats(&[2], &[0.0, 0.5]));
    assert_eq!(found["y"], floats(&[2], &[7.0, 7.5]));
    assert_eq!(found["z"], floats(&[2], &[-7.0, -7.5]));
}

#[test]
fn tensors_hold_as_many_elements_as_their_shape_says() {
    assert!(Tensor::new([2, 3], Data::U8(vec![0; 5])).is_err());
    assert!(Tensor::new([usize::MAX, 3], Data::U8(vec![0; 5])).is_err());
    assert!(Tensor::from_le_bytes(ElementType::U16, [1], &[1]).is_err());
    for data in [
        Data::F32(vec![1.5, -2.0]),
        Data::U8(vec![0, 255]),
        Data::I8(vec![-128, 127]),
        Data::U16(vec![1, 65_534]),
        Data::I16(vec![-2, 300]),
        Data::I64(vec![i64::MIN, 5]),
    ] {
        let tensor = tensor(&[2], data);
        let again = Tensor::from_le_bytes(tensor.element(), [2], &tensor.to_le_bytes()).unwrap();
        assert_eq!(again, tensor);
    }
}

/// A graph of every kind of operand, small enough to be run whatever becomes of its shapes.
fn small() -> Build {
    let transposed = [("transB", AttributeValue::Int(1))];
    Build::new()
        .input("x", ElementType::U8, &[2, 3])
        .dequantize("x", 0.5, Data::U8(vec![7]), "f")
        .constant("w", &tensor(&[2, 3], Data::I8(vec![1, -2, 3, 4, 5, -6])))
        .constant("s", &floats(&[2], &[0.5, 0.25]))
        .constant("z", &tensor(&[2], Data::I8(vec![0, 0])))
        .constant("shape", &ints(&[1, 2, -1]))
        .constant("one", &ints(&[1]))
        .constant("two", &ints(&[2]))
        .node_with("DequantizeLinear", &["w", "s", "z"], "wf", &[("axis", AttributeValue::Int(0))])
        .node_with("Gemm", &["f", "wf"], "a", &transposed)
        .node("Reshape", &["a", "shape"], "b")
        .node("MatMul", &["b", "b"], "c")
        .node_with("Softmax", &["c"], "d", &[("axis", AttributeValue::Int(-1))])
        .node("Slice", &["d", "one", "two", "one"], "e")
        .node_with("Concat", &["d", "e"], "g", &[("axis", AttributeValue::Int(1))])
        .node_with("Transpose", &["g"], "h", &[("perm", AttributeValue::Ints(vec![2, 0, 1]))])
        .node("Add", &["h", "h"], "i")
        .quantize("i", 0.01, Data::U16(vec![3]), "y")
        .output("y", ElementType::U16, &[2, 1, 3])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    /// Whatever passes the checks of a session runs to its end.
    #[test]
    fn a_damaged_graph_is_refused_or_runs(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..4),
    ) {
        let mut bytes = small().model.encode("d").unwrap();
        for (at, byte, small_step) in damage {
            let i = at.index(bytes.len());
            bytes[i] = if small_step { bytes[i].wrapping_add(byte % 5).wrapping_sub(2) } else { byte };
        }
        let Ok(model) = Model::decode(&bytes, "d") else { return Ok(()) };
        let Ok(session) = Session::new(&model, &[]) else { return Ok(()) };
        let zeros = |info: &ValueInfo| {
            let count: usize = info.shape.iter().product();
            let bytes = vec![0; (count * info.element.bytes()).min(4000)];
            Some((info.name.clone(), Tensor::from_le_bytes(info.element, &*info.shape, &bytes).ok()?))
        };
        let inputs: Option<Tensors> = session.inputs().map(zeros).collect();
        if let Some(inputs) = inputs {
            let outputs = session.run(&inputs).unwrap();
            prop_assert_eq!(outputs.len(), model.graph.outputs.len());
        }
    }
}

#[test]
fn the_undamaged_graph_runs() {
    let x = tensor(&[2, 3], Data::U8(vec![7, 8, 9, 10, 11, 12]));
    small().run(&[("x", &x)]);
}
