use proptest::prelude::*;

use super::*;

/// 0, 1, 2, ... of a type.
fn count(shape: &[usize], element: ElementType) -> Tensor {
    let n = 0..shape.iter().product::<usize>();
    tensor(
        shape,
        match element {
            ElementType::F32 => Data::F32(n.map(|i| i as f32).collect()),
            ElementType::U8 => Data::U8(n.map(|i| i as u8).collect()),
            ElementType::I8 => Data::I8(n.map(|i| i as i8).collect()),
            ElementType::U16 => Data::U16(n.map(|i| i as u16).collect()),
            ElementType::I16 => Data::I16(n.map(|i| i as i16).collect()),
            ElementType::I64 => Data::I64(n.map(|i| i as i64).collect()),
        },
    )
}

fn of(element: ElementType, shape: &[usize], values: &[i64]) -> Tensor {
    tensor(
        shape,
        match element {
            ElementType::F32 => Data::F32(values.iter().map(|i| *i as f32).collect()),
            ElementType::U8 => Data::U8(values.iter().map(|i| *i as u8).collect()),
            ElementType::I8 => Data::I8(values.iter().map(|i| *i as i8).collect()),
            ElementType::U16 => Data::U16(values.iter().map(|i| *i as u16).collect()),
            ElementType::I16 => Data::I16(values.iter().map(|i| *i as i16).collect()),
            ElementType::I64 => Data::I64(values.to_vec()),
        },
    )
}

const MOVED: [ElementType; 5] =
    [ElementType::F32, ElementType::U8, ElementType::I8, ElementType::U16, ElementType::I16];

#[test]
fn every_type_moves() {
    for element in MOVED {
        let x = count(&[2, 3, 2], element);
        let case = |op: &str,
                    attributes: &[(&str, AttributeValue)],
                    more: &[Tensor],
                    shape: &[usize],
                    values: &[i64]| {
            let inputs: Vec<&Tensor> = std::iter::once(&x).chain(more).collect();
            assert_eq!(apply(op, attributes, &inputs, shape), of(element, shape, values), "{op} {element}");
        };
        let perm = [("perm", AttributeValue::Ints(vec![2, 0, 1]))];
        case("Transpose", &perm, &[], &[2, 2, 3], &[0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]);
        case("Transpose", &[], &[], &[2, 3, 2], &[0, 6, 2, 8, 4, 10, 1, 7, 3, 9, 5, 11]);
        case("Reshape", &[], &[ints(&[0, -1])], &[2, 6], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
        case("Reshape", &[], &[ints(&[-1])], &[12], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
        case("Identity", &[], &[], &[2, 3, 2], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
        let bounds = [ints(&[1]), ints(&[3]), ints(&[1])];
        case("Slice", &[], &bounds, &[2, 2, 2], &[2, 3, 4, 5, 8, 9, 10, 11]);
        // From the end, past the end, two axes.
        let bounds = [ints(&[-1, 1]), ints(&[i64::MAX, 2]), ints(&[-2, 2]), ints(&[1, 1])];
        case("Slice", &[], &bounds, &[2, 1, 1], &[5, 11]);
        let bounds = [ints(&[i64::MIN]), ints(&[-2]), ints(&[1])];
        case("Slice", &[], &bounds, &[2, 1, 2], &[0, 1, 6, 7]);
    }
}

#[test]
fn concat_joins_along_its_axis() {
    for element in MOVED {
        let a = of(element, &[2, 1, 2], &[1, 2, 3, 4]);
        let b = of(element, &[2, 2, 2], &[5, 6, 7, 8, 9, 10, 11, 12]);
        for axis in [1, -2] {
            let found = apply("Concat", &[("axis", AttributeValue::Int(axis))], &[&a, &b], &[2, 3, 2]);
            assert_eq!(found, of(element, &[2, 3, 2], &[1, 2, 5, 6, 7, 8, 3, 4, 9, 10, 11, 12]));
        }
        let found = apply("Concat", &[("axis", AttributeValue::Int(0))], &[&a, &a], &[4, 1, 2]);
        assert_eq!(found, of(element, &[4, 1, 2], &[1, 2, 3, 4, 1, 2, 3, 4]));
        let found = apply("Concat", &[("axis", AttributeValue::Int(2))], &[&a, &a, &a], &[2, 1, 6]);
        assert_eq!(found, of(element, &[2, 1, 6], &[1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4]));
    }
}

/// A cache and a new entry, each behind its own dequantization, rounded to the encoding they share.
#[test]
fn codes_survive_moving_between_q_and_dq() {
    let cache = tensor(&[2, 1, 4, 5], Data::I16(codes_i16(1, 40)));
    let entry = tensor(&[2, 1, 4, 1], Data::I16(codes_i16(2, 8)));
    let build = Build::new()
        .input("cache", ElementType::I16, &[2, 1, 4, 5])
        .input("entry", ElementType::I16, &[2, 1, 4, 1])
        .dequantize("cache", 0.000_37, Data::I16(vec![0]), "a")
        .dequantize("entry", 0.000_37, Data::I16(vec![0]), "b")
        .node_with("Concat", &["a", "b"], "c", &[("axis", AttributeValue::Int(3))])
        .quantize("c", 0.000_37, Data::I16(vec![0]), "y")
        .output("y", ElementType::I16, &[2, 1, 4, 6]);
    let found = build.run(&[("cache", &cache), ("entry", &entry)]);
    let Data::I16(y) = found["y"].data() else { panic!("type") };
    let (Data::I16(cache), Data::I16(entry)) = (cache.data(), entry.data()) else { panic!("type") };
    for (row, y) in y.chunks(6).enumerate() {
        assert_eq!(y[..5], cache[row * 5..][..5]);
        assert_eq!(y[5], entry[row]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn two_slices_joined_are_the_whole(
        shape in proptest::collection::vec(1usize..5, 1..5),
        axis in any::<prop::sample::Index>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let axis = axis.index(shape.len());
        prop_assume!(shape[axis] > 1);
        let cut = 1 + cut.index(shape[axis] - 1);
        let x = count(&shape, ElementType::U16);
        let (mut left, mut right) = (shape.clone(), shape.clone());
        left[axis] = cut;
        right[axis] -= cut;
        let cut = cut as i64;
        let axes = ints(&[axis as i64]);
        let a = apply("Slice", &[], &[&x, &ints(&[0]), &ints(&[cut]), &axes], &left);
        let b = apply("Slice", &[], &[&x, &ints(&[cut]), &ints(&[i64::MAX]), &axes], &right);
        let joined = apply("Concat", &[("axis", AttributeValue::Int(axis as i64))], &[&a, &b], &shape);
        prop_assert_eq!(joined, x);
    }

    #[test]
    fn a_transposition_moves_every_index(
        shape in proptest::collection::vec(1usize..5, 1..5),
        seed in any::<u32>(),
    ) {
        let mut order: Vec<usize> = (0..shape.len()).collect();
        order.sort_by_key(|d| (d + 1).wrapping_mul(seed as usize | 1) % 1009);
        let x = count(&shape, ElementType::I16);
        let to: Vec<usize> = order.iter().map(|d| shape[*d]).collect();
        let perm = AttributeValue::Ints(order.iter().map(|d| *d as i64).collect());
        let y = apply("Transpose", &[("perm", perm)], &[&x], &to);
        let Data::I16(y) = y.data() else { panic!("type") };
        for (flat, found) in y.iter().enumerate() {
            // The index in the result, then that of the source, by division.
            let mut rest = flat;
            let mut index = vec![0; to.len()];
            for d in (0..to.len()).rev() {
                index[order[d]] = rest % to[d];
                rest /= to[d];
            }
            let source = shape.iter().zip(&index).fold(0, |n, (len, i)| n * len + i);
            prop_assert_eq!(*found as usize, source);
        }
    }
}
