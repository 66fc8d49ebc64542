use super::*;

/// A graph with inputs of several types for nodes that are wrong.
fn base() -> Build {
    Build::new()
        .input("a", ElementType::F32, &[2, 3])
        .input("b", ElementType::F32, &[3, 4])
        .input("q", ElementType::U16, &[2, 3])
        .input("t", ElementType::F32, &[1, 2, 3, 2])
        .constant("one", &floats(&[], &[1.0]))
        .constant("zero", &tensor(&[], Data::U16(vec![0])))
        .constant("half", &floats(&[1], &[0.5]))
        .constant("v3", &floats(&[3], &[1.0, 2.0, 3.0]))
        .constant("i0", &ints(&[0]))
        .constant("i1", &ints(&[1]))
        .constant("i2", &ints(&[2]))
        .constant("minus", &ints(&[-1, -1]))
}

fn int(name: &str, value: i64) -> (&str, AttributeValue) {
    (name, AttributeValue::Int(value))
}

fn float(name: &str, value: f32) -> (&str, AttributeValue) {
    (name, AttributeValue::Float(value))
}

#[test]
fn every_wrong_node_is_refused_with_its_name_and_the_reason() {
    type Attributes = Vec<(&'static str, AttributeValue)>;
    let none = Vec::new;
    let text = |name, value: &str| vec![(name, AttributeValue::String(value.into()))];
    let cases: Vec<(&str, &[&str], Attributes, &str)> = vec![
        ("Conv", &["a"], none(), "expected one of Add, Concat"),
        ("Add", &["a"], none(), "expected 2 inputs, found 1"),
        ("Add", &["a", "a", "a"], none(), "expected 2 inputs, found 3"),
        ("Add", &["a", "nothing"], none(), "expected inputs that are computed before, found nothing"),
        ("Add", &["a", "y"], none(), "expected inputs that are computed before, found y"),
        ("Add", &["a", "b"], none(), "expected shapes that broadcast, found [2, 3] and [3, 4]"),
        ("Add", &["a", "q"], none(), "expected q to be float32, found uint16"),
        ("Add", &["a", "i0"], none(), "expected i0 to be float32, found int64"),
        ("Add", &["a", "a"], vec![int("axis", 0)], "the attribute axis, which is not supported"),
        ("Sigmoid", &["q"], none(), "expected q to be float32"),
        (
            "Gelu",
            &["a"],
            text("approximate", "tanh"),
            "expected the exact form, approximate none, found tanh",
        ),
        ("Gelu", &["a"], vec![int("approximate", 1)], "expected the attribute approximate to be a string"),
        ("Softmax", &["a"], vec![int("axis", 0)], "expected the last axis, 1, found 0"),
        ("Softmax", &["a"], vec![int("axis", 2)], "expected an axis of 2 dimensions, found 2"),
        ("Softmax", &["a"], vec![int("axis", i64::MIN)], "expected an axis of 2 dimensions"),
        ("Softmax", &["one"], none(), "expected an axis of 0 dimensions"),
        ("RMSNormalization", &["a", "half"], none(), "expected half to be a vector of 3, found [1]"),
        ("RMSNormalization", &["a", "v3"], vec![float("epsilon", -1.0)], "expected a finite epsilon"),
        ("RMSNormalization", &["a", "v3"], vec![float("epsilon", f32::NAN)], "expected a finite epsilon"),
        ("RMSNormalization", &["a", "v3"], vec![int("axis", 0)], "expected the last axis"),
        (
            "RMSNormalization",
            &["a", "v3"],
            vec![int("stash_type", 16)],
            "expected the attribute stash_type to be 1",
        ),
        ("ReduceMean", &["a", "i0"], none(), "expected the last axis, 1, found 0"),
        ("ReduceMean", &["a", "minus"], none(), "expected one axis"),
        (
            "ReduceMean",
            &["a", "i1"],
            vec![int("keepdims", 0)],
            "expected the attribute keepdims to be 1, found 0",
        ),
        ("ReduceMean", &["a", "one"], none(), "expected one to be a vector of int64, found float32 []"),
        ("Gemm", &["a", "b"], none(), "expected the attribute transB to be 1, found 0"),
        ("Gemm", &["a", "b"], vec![int("transB", 1)], "expected b to be rows of 3, like a, found [3, 4]"),
        ("Gemm", &["a", "v3"], vec![int("transB", 1)], "expected v3 to be a matrix"),
        ("Gemm", &["t", "a"], vec![int("transB", 1)], "expected t to be a matrix"),
        ("Gemm", &["a", "a", "half"], vec![int("transB", 1)], "expected 2 inputs, found 3"),
        (
            "Gemm",
            &["a", "a"],
            vec![int("transB", 1), int("transA", 1)],
            "expected the attribute transA to be 0",
        ),
        (
            "Gemm",
            &["a", "a"],
            vec![int("transB", 1), float("alpha", 2.0)],
            "expected the attribute alpha to be 1",
        ),
        ("Gemm", &["a", "q"], vec![int("transB", 1)], "expected q to be float32"),
        ("MatMul", &["a", "a"], none(), "expected a to be matrices of 3 rows, found [2, 3]"),
        ("MatMul", &["a", "v3"], none(), "expected two matrices or more"),
        ("MatMul", &["q", "b"], none(), "expected q to be float32"),
        (
            "Transpose",
            &["a"],
            vec![("perm", AttributeValue::Ints(vec![0, 0]))],
            "each of 2 dimensions once in perm",
        ),
        (
            "Transpose",
            &["a"],
            vec![("perm", AttributeValue::Ints(vec![0]))],
            "each of 2 dimensions once in perm",
        ),
        (
            "Transpose",
            &["a"],
            vec![("perm", AttributeValue::Ints(vec![0, 2]))],
            "expected an axis of 2 dimensions",
        ),
        ("Transpose", &["a"], vec![int("perm", 0)], "expected the attribute perm to be a list of integers"),
        ("Reshape", &["a", "i2"], none(), "expected a shape of as many elements, found [2] for [2, 3]"),
        ("Reshape", &["a", "minus"], none(), "expected a shape of as many elements, found [-1, -1]"),
        ("Reshape", &["a", "a"], none(), "expected a to be an initializer, found a computed tensor"),
        ("Reshape", &["a", "i0"], vec![int("allowzero", 1)], "expected the attribute allowzero to be 0"),
        (
            "Slice",
            &["a", "i1", "i1", "i1"],
            none(),
            "expected at least one element of 3 along axis 1, found 1..1",
        ),
        ("Slice", &["a", "i2", "i1", "i1"], none(), "found 2..1"),
        ("Slice", &["a", "i0", "i1"], none(), "expected data, starts, ends, axes, found 3"),
        ("Slice", &["a", "i0", "i1", "i1", "i2"], none(), "expected steps of 1"),
        ("Slice", &["a", "i0", "i1", "i2"], none(), "expected an axis of 2 dimensions, found 2"),
        ("Slice", &["a", "i0", "i1", "minus"], none(), "expected as many starts and ends as axes"),
        ("Slice", &["a", "minus", "minus", "minus"], none(), "expected at least one element"),
        ("Concat", &[], vec![int("axis", 0)], "expected at least one input"),
        ("Concat", &["a", "a"], none(), "expected the attribute axis, found none"),
        (
            "Concat",
            &["a", "b"],
            vec![int("axis", 0)],
            "expected float32 [2, 3] except along axis 0, found float32 [3, 4]",
        ),
        ("Concat", &["a", "q"], vec![int("axis", 0)], "found uint16 [2, 3]"),
        ("Concat", &["a", "v3"], vec![int("axis", 0)], "found float32 [3]"),
        ("QuantizeLinear", &["q", "one", "zero"], none(), "expected q to be float32"),
        ("QuantizeLinear", &["a", "one"], none(), "expected 3 inputs, found 2"),
        ("QuantizeLinear", &["a", "a", "zero"], none(), "expected a to be an initializer"),
        ("QuantizeLinear", &["a", "one", "q"], none(), "expected q to be of shape [], like its scale"),
        ("QuantizeLinear", &["a", "one", "one"], none(), "expected one to be of 8 or 16 bits, found float32"),
        ("QuantizeLinear", &["a", "one", "i0"], none(), "expected i0 to be of 8 or 16 bits, found int64"),
        ("QuantizeLinear", &["a", "one", "zero"], vec![int("saturate", 0)], "the attribute saturate"),
        ("DequantizeLinear", &["a", "one", "zero"], none(), "expected a to be uint16, like its zero point"),
        ("DequantizeLinear", &["q", "one", "zero"], vec![int("block_size", 2)], "the attribute block_size"),
        ("DequantizeLinear", &["q", "i0", "zero"], none(), "expected i0 to be float32"),
    ];
    for (op_type, inputs, attributes, reason) in cases {
        let found = base().node_with(op_type, inputs, "y", &attributes).refusal();
        let start = format!("node make_y ({op_type}): ");
        assert!(
            found.starts_with(&start) && found.contains(reason),
            "{op_type} {inputs:?}: {found:?}, not {reason:?}"
        );
    }
}

#[test]
fn encodings_have_normal_scales_one_or_one_per_index() {
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-40] {
        let build = base().quantize("a", scale, Data::U16(vec![0]), "y");
        assert!(
            build.refusal().contains("expected positive, finite and normal scales in y_scale"),
            "{scale}"
        );
    }
    let per_axis = |scales: usize, axis| {
        base()
            .constant("s", &floats(&[scales], &vec![1.0; scales]))
            .constant("z", &tensor(&[scales], Data::U16(vec![0; scales])))
            .node_with("DequantizeLinear", &["q", "s", "z"], "y", &[int("axis", axis)])
            .refusal()
    };
    assert!(per_axis(2, 1).contains("expected s to be a scalar or 3 scales, found [2]"));
    assert!(per_axis(3, 2).contains("expected an axis of 2 dimensions, found 2"));
    let square = base()
        .constant("s", &floats(&[1, 1], &[1.0]))
        .constant("z", &tensor(&[1, 1], Data::U16(vec![0])))
        .node("DequantizeLinear", &["q", "s", "z"], "y");
    assert!(square.refusal().contains("expected s to be a scalar or a vector"));
}

#[test]
fn what_is_declared_has_to_be_what_is_computed() {
    let build = base().node("Add", &["a", "a"], "y").declare("y", ElementType::F32, &[3, 2]);
    assert_eq!(build.refusal(), "y: expected float32 [3, 2], as declared, found float32 [2, 3]");
    let build = base().node("Add", &["a", "a"], "y").output("y", ElementType::U16, &[2, 3]);
    assert_eq!(build.refusal(), "y: expected uint16 [2, 3], as declared, found float32 [2, 3]");
    let build = base().dequantize("q", 1.0, Data::U16(vec![0]), "y").output("y", ElementType::F32, &[6]);
    assert_eq!(build.refusal(), "y: expected float32 [6], as declared, found float32 [2, 3]");
    let build = base().output("one", ElementType::F32, &[1]);
    assert_eq!(build.refusal(), "one: expected float32 [1], as declared, found float32 []");
    let build = base().output("a", ElementType::F32, &[1]);
    assert!(build.refusal().contains("as declared"));
    let build = base().declare("u", ElementType::F32, &[1]);
    assert_eq!(build.refusal(), "u: expected a node that makes it, found none of 0 nodes");
    let build = base().output("y", ElementType::F32, &[1]);
    assert_eq!(build.refusal(), "y: expected a node that makes it, found none of 0 nodes");
}

#[test]
fn versions_decide_which_operators_there_are() {
    let with_versions = |opset, ir_version, build: Build| {
        let mut build = build;
        build.model.opset = opset;
        build.model.ir_version = ir_version;
        build.refusal()
    };
    assert_eq!(with_versions(17, 8, base()), "expected operator set 18 to 23, found 17");
    assert_eq!(with_versions(24, 11, base()), "expected operator set 18 to 23, found 24");
    assert_eq!(with_versions(23, 12, base()), "expected IR version 8 to 11, found 12");
    let norm = base().node("RMSNormalization", &["a", "v3"], "y");
    assert!(with_versions(22, 10, norm).contains("expected operator set 23 or newer, found 22"));
    assert!(
        with_versions(19, 9, base().node("Gelu", &["a"], "y")).contains("expected operator set 20 or newer")
    );
    let wide = base().quantize("a", 1.0, Data::I16(vec![0]), "y");
    assert!(with_versions(20, 9, wide).contains("expected operator set 21 or newer for int16, found 20"));
}

#[test]
fn nodes_have_one_output_and_tensors_few_dimensions() {
    let mut build = base().node("Identity", &["a"], "y");
    build.model.graph.nodes[0].outputs.push("z".into());
    assert!(build.refusal().contains("expected one output, found 2"));
    let build = Build::new().input("x", ElementType::F32, &[1; 9]);
    assert_eq!(build.refusal(), "x: expected at most 8 dimensions, found 9");
    let build =
        base().constant("deep", &ints(&[1, 1, 1, 1, 1, 1, 1, 2, 3])).node("Reshape", &["a", "deep"], "y");
    assert_eq!(build.refusal(), "y: expected at most 8 dimensions, found 9");
}

/// Declared inputs cost nothing; what a node makes of them is bounded before it is made.
#[test]
fn outputs_have_a_bounded_size() {
    let wide = 1 << 20;
    let build = Build::new()
        .input("r", ElementType::F32, &[1, wide])
        .input("c", ElementType::F32, &[wide, 1])
        .input("m", ElementType::F32, &[1 << 11, wide]);
    let add = build.clone().node("Add", &["r", "c"], "y").refusal();
    assert!(
        add.contains("expected an output of at most 1073741824 elements, found [1048576, 1048576]"),
        "{add}"
    );
    let product = build.clone().node("MatMul", &["c", "r"], "y").refusal();
    assert!(product.contains("expected an output of at most"), "{product}");
    let terms = build.node_with("Gemm", &["m", "r"], "y", &[int("transB", 1)]).refusal();
    assert!(terms.contains("expected sums of at most 524288 terms, found 1048576"), "{terms}");
}

#[test]
fn a_data_file_that_is_too_short_is_refused() {
    let mut build = base().external("w", &floats(&[5, 3], &[0.0; 15]));
    build.data.pop();
    assert_eq!(
        build.refusal(),
        "w: expected 60 bytes of external data from byte 0, found a data file of 59 bytes"
    );
}
