//! Blocks against what the Python package `gguf` decodes them to, bit for bit.

use super::*;

/// Blocks and the values that they stand for (`tests/oracle/ggml_goldens.py`).
fn goldens() -> [(BlockType, &'static [u8], Vec<f32>); 4] {
    macro_rules! golden {
        ($kind:expr, $name:literal) => {
            (
                $kind,
                include_bytes!(concat!("../../fixtures/goldens/ggml/", $name, ".blocks")).as_slice(),
                floats(include_bytes!(concat!("../../fixtures/goldens/ggml/", $name, ".f32"))),
            )
        };
    }
    [
        golden!(BlockType::Q8_0, "Q8_0"),
        golden!(BlockType::Q4K, "Q4_K"),
        golden!(BlockType::Q5K, "Q5_K"),
        golden!(BlockType::Q6K, "Q6_K"),
    ]
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn every_type_decodes_to_the_bits_of_the_package() {
    for (kind, blocks, expected) in goldens() {
        assert_eq!(blocks.len() / kind.bytes() * kind.elements(), expected.len(), "{}", kind.name());
        let mut found = vec![f32::NAN; expected.len()];
        kind.decode(blocks, &mut found);
        assert_eq!(bits(&found), bits(&expected), "{}", kind.name());
    }
}

#[test]
fn builds_of_the_kernels_agree() {
    for (kind, blocks, expected) in goldens() {
        let mut found = vec![f32::NAN; expected.len()];
        blocks::scalar(kind, blocks, &mut found);
        assert_eq!(bits(&found), bits(&expected), "{}", kind.name());
    }
}

#[test]
fn a_matrix_decodes_rows_and_pieces_of_rows() {
    for (kind, blocks, expected) in goldens() {
        let columns = expected.len() / 2;
        let matrix = BlockMatrix::new(kind, [2, columns], blocks).unwrap();
        let mut row = vec![f32::NAN; columns];
        for (r, expected) in expected.chunks(columns).enumerate() {
            matrix.decode_row(r, &mut row);
            assert_eq!(bits(&row), bits(expected));
            let piece = columns / 2..columns;
            let mut part = vec![f32::NAN; piece.len()];
            matrix.decode(r, piece.clone(), &mut part);
            assert_eq!(bits(&part), bits(&expected[piece]), "{} {r}", kind.name());
        }
        for (shape, bytes) in [
            ([2, columns + 1], blocks),
            ([2, columns], &blocks[1..]),
            ([3, columns], blocks),
            ([2, 0], &blocks[..0]),
            ([usize::MAX, columns], blocks),
        ] {
            assert!(BlockMatrix::new(kind, shape, bytes).is_err(), "{shape:?}");
        }
    }
}

/// `block_q8_0`, `block_q4_K`, `block_q5_K` and `block_q6_K` of ggml-common.h.
#[test]
fn sizes_are_those_of_ggml() {
    for (id, name, elements, bytes) in [
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (30, "BF16", 1, 2),
        (8, "Q8_0", 32, 34),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
    ] {
        let kind = TensorType::from_id(id).unwrap();
        assert_eq!((kind.name(), kind.block_len(), kind.block_bytes()), (name, elements, bytes));
        assert_eq!(kind.bytes_of(elements * 3), Some(bytes * 3));
        assert_eq!(kind.bytes_of(elements + 1), (elements == 1).then_some(bytes * 2));
    }
    assert_eq!(TensorType::Float(Dtype::F32).bytes_of(usize::MAX), None);
    for id in [2, 3, 6, 7, 10, 11, 31, 40, 41, u32::MAX] {
        assert_eq!(TensorType::from_id(id), None);
    }
    assert_eq!(type_name(2), "Q4_0 (ggml type 2)");
    assert_eq!(type_name(12), "Q4_K (ggml type 12)");
    assert_eq!(type_name(999), "ggml type 999");
}
