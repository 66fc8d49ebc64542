use half::bf16;
use serde_json::Value;

use super::*;

/// Values without pattern.
fn random(n: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as u8
    };
    (0..n).map(|_| next()).collect()
}

fn golden(case: &str) -> Value {
    let golden: Value =
        serde_json::from_str(include_str!("../../fixtures/goldens/cpu_formats.json")).unwrap();
    golden[case].clone()
}

fn unhex(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

fn shape_of(case: &Value) -> [usize; 2] {
    [case["N"].as_u64().unwrap() as usize, case["K"].as_u64().unwrap() as usize]
}

/// The rule of the golden file's weights.
fn golden_weight(n: usize, k: usize) -> f32 {
    (((n * 31 + k * 17) % 97) as f32 - 48.0) / 256.0 * if k.is_multiple_of(5) { 4.0 } else { 1.0 }
}

fn words_to_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn bf16_bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect()
}

fn round_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// The code of one element, by the definition of the layout.
fn naive(bytes: &[u8], layout: CodeLayout, [out, k_len]: [usize; 2], n: usize, k: usize) -> u8 {
    let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|b| bytes[4 * i + b]));
    let code = match layout {
        CodeLayout::Rows => u32::from(bytes[(n * k_len + k) / 2]) >> (4 * (k % 2)),
        CodeLayout::Columns => word(k / 8 * out + n) >> (4 * (k % 8)),
        CodeLayout::Blocks { rows } => {
            let (block, r) = (n / rows, n % rows);
            let at = block * rows * k_len / 2 + k * (rows / 2) + r % (rows / 2);
            u32::from(bytes[at]) >> if r < rows / 2 { 0 } else { 4 }
        }
    };
    (code % 16) as u8
}

const LAYOUTS: [CodeLayout; 4] =
    [CodeLayout::Rows, CodeLayout::Columns, CodeLayout::Blocks { rows: 32 }, CodeLayout::Blocks { rows: 64 }];

#[test]
fn every_range_decodes_to_the_definition() {
    for layout in LAYOUTS {
        for shape in [[64, 8], [128, 40], [192, 152]] {
            let bytes = random(shape[0] * shape[1] / 2 + 1, 1);
            // At an odd address.
            let bytes = &bytes[1..];
            let packed = PackedCodes::new(bytes, layout, shape).unwrap();
            assert_eq!((packed.shape(), packed.layout()), (shape, layout));
            let expected = |n: usize, k: usize| naive(bytes, layout, shape, n, k);
            let check = |rows: Range<usize>, columns: Range<usize>| {
                let mut out = vec![0xff; rows.len() * columns.len()];
                packed.decode(rows.clone(), columns.clone(), &mut out);
                for (i, code) in out.iter().enumerate() {
                    let (n, k) = (rows.start + i / columns.len(), columns.start + i % columns.len());
                    assert_eq!(*code, expected(n, k), "{layout:?} {shape:?} {rows:?} {columns:?}: {n}, {k}");
                }
            };
            check(0..shape[0], 0..shape[1]);
            for start in 0..8 {
                for end in shape[1] - 8..=shape[1] {
                    check(start..start + 1, start..end.max(start));
                    check(7 - start..shape[0] - start, start..end.max(start));
                }
            }
            for (start, len) in [(0, 32), (32, 32), (30, 4), (31, 2), (16, 48), (60, 4), (33, 7), (5, 0)] {
                check(start..start + len, 0..shape[1]);
                check(start..start + len, 1..shape[1] - 1);
                check(start..start + len, 3..6);
                check(start..start + len, 2..2);
            }
        }
    }
}

#[test]
fn packing_is_the_inverse_of_the_definition_and_goes_block_by_block() {
    for shape in [[64, 8], [128, 48], [192, 120]] {
        let codes: Vec<u8> = random(shape[0] * shape[1], 2).iter().map(|x| x & 15).collect();
        for layout in LAYOUTS {
            let mut bytes = Vec::new();
            if layout == CodeLayout::Columns {
                bytes = words_to_bytes(&pack_columns(&codes, shape[1]));
            } else {
                for block in codes.chunks(64 * shape[1]) {
                    pack_rows(layout, block, shape[1], &mut bytes);
                }
            }
            assert_eq!(layout.len_bytes(shape), Some(bytes.len()));
            for (i, code) in codes.iter().enumerate() {
                assert_eq!(naive(&bytes, layout, shape, i / shape[1], i % shape[1]), *code, "{layout:?} {i}");
            }
        }
    }
    // Even rows that are no multiple of eight, in the layouts that hold them.
    let codes: Vec<u8> = random(64 * 10, 3).iter().map(|x| x & 15).collect();
    for layout in [CodeLayout::Rows, CodeLayout::Blocks { rows: 32 }, CodeLayout::Blocks { rows: 64 }] {
        let mut bytes = vec![9];
        pack_rows(layout, &codes, 10, &mut bytes);
        pack_rows(layout, &[], 10, &mut bytes);
        let mut again = vec![0; codes.len()];
        PackedCodes::new(&bytes[1..], layout, [64, 10]).unwrap().decode(0..64, 0..10, &mut again);
        assert_eq!((bytes[0], again), (9, codes.clone()));
    }
}

/// The golden cases "tinygemm_pack": what PyTorch packs, wherever blocks are full.
#[test]
fn full_blocks_are_those_of_torch() {
    let mut seen = [0, 0];
    for case in golden("tinygemm_pack").as_array().unwrap() {
        let shape = shape_of(case);
        // The rule of the golden file's codes.
        let codes: Vec<u8> = (0..shape[0] * shape[1])
            .map(|i| (i / shape[1], i % shape[1]))
            .map(|(n, k)| ((n * 7 + k * 3 + n / 16) % 16) as u8)
            .collect();
        for (i, (rows, key)) in [(64, "avx512_hex"), (32, "avx2_hex")].into_iter().enumerate() {
            let layout = CodeLayout::Blocks { rows };
            let torch = unhex(&case[key]);
            if layout.len_bytes(shape).is_none() {
                assert!(!shape[0].is_multiple_of(rows));
                // The full blocks in front of a short one are the same even so.
                let full = shape[0] / rows * rows;
                let mut bytes = Vec::new();
                pack_rows(layout, &codes[..full * shape[1]], shape[1], &mut bytes);
                assert_eq!(bytes, torch[..bytes.len()]);
                continue;
            }
            let mut bytes = Vec::new();
            pack_rows(layout, &codes, shape[1], &mut bytes);
            assert_eq!(bytes, torch, "{shape:?} {rows}");
            let mut again = vec![0; codes.len()];
            PackedCodes::new(&torch, layout, shape).unwrap().decode(0..shape[0], 0..shape[1], &mut again);
            assert_eq!(again, codes);
            seen[i] += 1;
        }
    }
    assert_eq!(seen, [2, 4]);
}

/// Every row and range of a matrix against weights `[out, in]`.
fn check_weights(matrix: &Int4Matrix<'_>, weights: &[f32]) {
    let [n, k] = matrix.shape();
    let mut all = vec![f32::NAN; n * k];
    matrix.decode(0..n, 0..k, &mut all);
    assert_eq!(all, weights);
    let mut row = vec![f32::NAN; k];
    for (r, weights) in weights.chunks(k).enumerate() {
        matrix.decode_row(r, &mut row);
        assert_eq!(row, weights, "row {r}");
    }
    for (rows, columns) in [(0..n, 1..k - 1), (1..n - 1, k / 2 - 1..k), (n / 2..n, 0..3), (3..3, 0..k)] {
        let mut part = vec![f32::NAN; rows.len() * columns.len()];
        matrix.decode(rows.clone(), columns.clone(), &mut part);
        let expected: Vec<f32> =
            rows.flat_map(|r| columns.clone().map(move |c| weights[r * k + c])).collect();
        assert_eq!(part, expected);
    }
}

fn codes_of(matrix: &Int4Matrix<'_>) -> Vec<u8> {
    let [n, k] = matrix.shape();
    let mut codes = vec![0; n * k];
    matrix.codes().decode(0..n, 0..k, &mut codes);
    codes
}

/// The golden case "gptq": codes, scales and zeros that our own arithmetic gives, packed and read.
#[test]
fn the_golden_gptq_matrix() {
    let case = golden("gptq");
    let [n, k] = shape_of(&case);
    let g = case["group_size"].as_u64().unwrap() as usize;
    let scale = |row: usize, group: usize| {
        let amax = (group * g..(group + 1) * g).fold(0.0f32, |m, c| m.max(golden_weight(row, c).abs()));
        round_bf16(amax / 7.0)
    };
    let code = |row: usize, c: usize| {
        ((golden_weight(row, c) / scale(row, c / g)).round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8
    };
    let codes: Vec<u8> = (0..n * k).map(|i| code(i / k, i % k)).collect();
    let qweight = unhex(&case["qweight_hex"]);
    assert_eq!(words_to_bytes(&pack_columns(&codes, k)), qweight);
    let zeros = zero_points::pack_group_major(&vec![8; n * k / g], n);
    assert_eq!(words_to_bytes(&zeros), unhex(&case["qzeros_hex"]));
    assert_eq!(zero_points::read_group_major(&unhex(&case["qzeros_hex"]), n, 3, 1), 8);
    let scales = unhex(&case["scales_hex"]);
    assert_eq!(bf16_bytes((0..k / g).flat_map(|j| (0..n).map(move |r| scale(r, j)))), scales);

    let packed = PackedCodes::new(&qweight, CodeLayout::Columns, [n, k]).unwrap();
    let matrix = Int4Matrix::new(packed, g, GroupGrids::GroupMajor { scales: &scales }).unwrap();
    assert_eq!(codes_of(&matrix), codes);
    let weights: Vec<f32> = (codes.iter().enumerate())
        .map(|(i, code)| (f32::from(*code) - 8.0) * scale(i / k, i % k / g))
        .collect();
    check_weights(&matrix, &weights);
}

/// The golden case "packed": compressed-tensors with zero points.
#[test]
fn the_golden_packed_matrix() {
    let case = golden("packed");
    let [n, k] = shape_of(&case);
    let g = case["group_size"].as_u64().unwrap() as usize;
    let weight = |row: usize, c: usize| golden_weight(row, c) + if c < 32 { 0.125 } else { 0.0 };
    let grid = |row: usize, group: usize| {
        let values = || (group * g..(group + 1) * g).map(|c| weight(row, c));
        let (lo, hi) = (values().fold(0.0f32, f32::min), values().fold(0.0f32, f32::max));
        let scale = round_bf16((hi - lo) / 15.0);
        (scale, (-lo / scale).round_ties_even().clamp(0.0, 15.0))
    };
    let code = |row: usize, c: usize| {
        let (scale, zero) = grid(row, c / g);
        (weight(row, c) / scale + zero).round_ties_even().clamp(0.0, 15.0) as u8
    };
    let codes: Vec<u8> = (0..n * k).map(|i| code(i / k, i % k)).collect();
    let bytes = unhex(&case["weight_packed_hex"]);
    let mut ours = Vec::new();
    pack_rows(CodeLayout::Rows, &codes, k, &mut ours);
    assert_eq!(ours, bytes);
    let groups = k / g;
    let of_grids = |f: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
        (0..n * groups).map(|i| f(i / groups, i % groups)).collect()
    };
    let scales = unhex(&case["weight_scale_bf16_hex"]);
    assert_eq!(bf16_bytes(of_grids(&|r, j| grid(r, j).0)), scales);
    let zeros: Vec<u8> = of_grids(&|r, j| grid(r, j).1).iter().map(|z| *z as u8).collect();
    let zero_bytes = unhex(&case["weight_zero_point_hex"]);
    assert_eq!(words_to_bytes(&zero_points::pack_row_major(&zeros, groups)), zero_bytes);
    for (i, z) in zeros.iter().enumerate() {
        assert_eq!(zero_points::read_row_major(&zero_bytes, groups, i / groups, i % groups), *z);
    }

    let packed = PackedCodes::new(&bytes, CodeLayout::Rows, [n, k]).unwrap();
    let grids = GroupGrids::RowMajor { scales: &scales, zero_points: Some(&zero_bytes) };
    let matrix = Int4Matrix::new(packed, g, grids).unwrap();
    let decoded = |zero: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
        (0..n * k)
            .map(|i| (i / k, i % k))
            .map(|(r, c)| (f32::from(codes[r * k + c]) - zero(r, c / g)) * grid(r, c / g).0)
            .collect()
    };
    check_weights(&matrix, &decoded(&|r, j| grid(r, j).1));
    // Without zero points they are eight.
    let grids = GroupGrids::RowMajor { scales: &scales, zero_points: None };
    check_weights(&Int4Matrix::new(packed, g, grids).unwrap(), &decoded(&|_, _| 8.0));
}

/// The golden case "tinygemm", and the same matrix row by row.
#[test]
fn the_golden_tinygemm_matrix() {
    let case = golden("tinygemm");
    let [n, k] = shape_of(&case);
    let g = case["group_size"].as_u64().unwrap() as usize;
    let grid = |row: usize, group: usize| {
        let values = || (group * g..(group + 1) * g).map(|c| golden_weight(row, c));
        let (lo, hi) = (values().fold(f32::MAX, f32::min), values().fold(f32::MIN, f32::max));
        let scale = round_bf16((hi - lo) / 15.0);
        (scale, round_bf16(lo + 8.0 * scale))
    };
    let code = |row: usize, c: usize| {
        let (scale, zero) = grid(row, c / g);
        (((golden_weight(row, c) - zero) / scale).round_ties_even() + 8.0).clamp(0.0, 15.0) as u8
    };
    let codes: Vec<u8> = (0..n * k).map(|i| code(i / k, i % k)).collect();
    let bytes = unhex(&case["weight_packed_hex"]);
    let layout = CodeLayout::Blocks { rows: 64 };
    let mut ours = Vec::new();
    pack_rows(layout, &codes, k, &mut ours);
    assert_eq!(ours, bytes);
    let groups = k / g;
    let grids: Vec<f32> = (0..groups)
        .flat_map(|j| (0..n).map(move |r| (r, j)))
        .flat_map(|(r, j)| [grid(r, j).0, grid(r, j).1])
        .collect();
    let scales_and_zeros = unhex(&case["scales_and_zeros_hex"]);
    assert_eq!(bf16_bytes(grids), scales_and_zeros);

    // One fused multiply-add: the product is exact in f64, so the sum is rounded once.
    let weights: Vec<f32> = (0..n * k)
        .map(|i| (codes[i], grid(i / k, i % k / g)))
        .map(|(c, (scale, zero))| ((f64::from(c) - 8.0) * f64::from(scale) + f64::from(zero)) as f32)
        .collect();
    let packed = PackedCodes::new(&bytes, layout, [n, k]).unwrap();
    let matrix = Int4Matrix::new(packed, g, GroupGrids::ScalesAndZeros(&scales_and_zeros)).unwrap();
    check_weights(&matrix, &weights);

    let mut by_row = Vec::new();
    pack_rows(CodeLayout::Rows, &codes, k, &mut by_row);
    let scales = bf16_bytes((0..n * groups).map(|i| grid(i / groups, i % groups).0));
    let zeros = bf16_bytes((0..n * groups).map(|i| grid(i / groups, i % groups).1));
    let packed = PackedCodes::new(&by_row, CodeLayout::Rows, [n, k]).unwrap();
    let grids = GroupGrids::RowMajorAffine { scales: &scales, zeros: &zeros };
    check_weights(&Int4Matrix::new(packed, g, grids).unwrap(), &weights);
}

#[test]
fn every_zero_point_survives_packing() {
    let groups = 3;
    let zeros: Vec<u8> = (0..16 * groups).map(|i| (i * 5 % 16) as u8).collect();
    let bytes = words_to_bytes(&zero_points::pack_row_major(&zeros, groups));
    for (i, z) in zeros.iter().enumerate() {
        let (row, group) = (i / groups, i % groups);
        let word = u32::from_le_bytes(std::array::from_fn(|b| bytes[4 * (row / 8 * groups + group) + b]));
        assert_eq!(word >> (4 * (row % 8)) & 15, u32::from(*z));
        assert_eq!(zero_points::read_row_major(&bytes, groups, row, group), *z);
    }
    let zeros: Vec<u8> = (0..24 * groups).map(|i| (i * 5 % 16) as u8 + 1).collect();
    let bytes = words_to_bytes(&zero_points::pack_group_major(&zeros, 24));
    for (i, z) in zeros.iter().enumerate() {
        let (group, row) = (i / 24, i % 24);
        let word = u32::from_le_bytes(std::array::from_fn(|b| bytes[4 * (group * 3 + row / 8) + b]));
        assert_eq!((word >> (4 * (row % 8)) & 15) + 1, u32::from(*z));
        assert_eq!(zero_points::read_group_major(&bytes, 24, row, group), *z);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let huge = usize::MAX / 8 * 8;
    for layout in LAYOUTS {
        let new = |len: usize, shape| PackedCodes::new(&[0; 4096][..len], layout, shape).is_some();
        assert!(new(64 * 8 / 2, [64, 8]), "{layout:?}");
        for (len, shape) in [
            (64 * 8 / 2 - 1, [64, 8]),
            (64 * 8 / 2 + 1, [64, 8]),
            (0, [64, 0]),
            (0, [0, 8]),
            (0, [huge, huge]),
            (0, [64, huge]),
            (0, [huge, 16]),
            // Odd rows, which no layout takes with fewer than all rows of a block.
            (21, [6, 7]),
        ] {
            assert!(!new(len, shape), "{layout:?} {len} {shape:?}");
        }
    }
    for rows in [0, 1, 2, 16, 48, 63, 128, usize::MAX] {
        assert_eq!(CodeLayout::Blocks { rows }.len_bytes([128, 8]), None);
    }
    assert_eq!(CodeLayout::Columns.len_bytes([8, 12]), None);
    assert_eq!(CodeLayout::Blocks { rows: 64 }.len_bytes([96, 8]), None);
    assert_eq!(CodeLayout::Rows.len_bytes([3, 6]), Some(9));

    let zeros = [0; 4096];
    let bytes = |len: usize| &zeros[..len];
    let of = |shape: [usize; 2], g, grids| {
        let packed = PackedCodes::new(bytes(shape[0] * shape[1] / 2), CodeLayout::Rows, shape).unwrap();
        Int4Matrix::new(packed, g, grids).is_some()
    };
    // 8 rows of 2 groups: 16 grids.
    let shape = [8, 64];
    for g in [0, 3, 48, 128, usize::MAX] {
        assert!(!of(shape, g, GroupGrids::GroupMajor { scales: bytes(32) }), "{g}");
    }
    for (len, fits) in [(31, false), (32, true), (33, false), (0, false)] {
        let scales = bytes(len);
        assert_eq!(of(shape, 32, GroupGrids::GroupMajor { scales }), fits);
        assert_eq!(of(shape, 32, GroupGrids::RowMajor { scales, zero_points: None }), fits);
        assert_eq!(of(shape, 32, GroupGrids::RowMajor { scales, zero_points: Some(bytes(8)) }), fits);
        assert_eq!(of(shape, 32, GroupGrids::RowMajorAffine { scales, zeros: bytes(32) }), fits);
        assert_eq!(of(shape, 32, GroupGrids::RowMajorAffine { scales: bytes(32), zeros: scales }), fits);
        assert_eq!(of(shape, 32, GroupGrids::ScalesAndZeros(bytes(2 * len))), fits);
    }
    for len in [0, 7, 9, 16] {
        let grids = GroupGrids::RowMajor { scales: bytes(32), zero_points: Some(bytes(len)) };
        assert!(!of(shape, 32, grids), "{len}");
    }
    // Zero points of rows that are no eights.
    let grids = GroupGrids::RowMajor { scales: bytes(16), zero_points: Some(bytes(4)) };
    assert!(!of([4, 64], 32, grids));
}

#[test]
fn ranges_past_the_end_panic() {
    let packed = PackedCodes::new(&[0; 32], CodeLayout::Rows, [8, 8]).unwrap();
    let panics = |rows: Range<usize>, columns: Range<usize>, len: usize| {
        std::panic::catch_unwind(|| packed.decode(rows, columns, &mut vec![0; len])).is_err()
    };
    assert!(
        panics(0..9, 0..8, 72) && panics(0..8, 0..9, 72) && panics(0..1, 0..8, 7) && panics(8..9, 0..8, 8)
    );
    assert!(!panics(7..8, 0..8, 8));
}

#[test]
fn squares_are_transposed() {
    let bytes: Vec<u8> = (0..64).collect();
    let mut words = std::array::from_fn(|i| [u64::from_le_bytes(std::array::from_fn(|j| bytes[8 * i + j]))]);
    blocks::transpose_lanes(&mut words);
    for (i, [word]) in words.into_iter().enumerate() {
        assert_eq!(word.to_le_bytes(), std::array::from_fn(|j| bytes[8 * j + i]));
    }
}

/// Grids read together are those read one by one.
#[test]
fn grids_of_rows_and_of_a_row() {
    let (n, groups, group_size) = (24, 6, 8);
    let shape = [n, groups * group_size];
    let floats: Vec<u8> = bf16_bytes((0..n * groups).map(|i| (i as f32 * 0.37).sin()));
    let pairs: Vec<u8> = bf16_bytes((0..2 * n * groups).map(|i| (i as f32 * 0.11).cos()));
    let points: Vec<u8> = random(n * groups, 3).iter().map(|x| x % 16).collect();
    let packed = words_to_bytes(&zero_points::pack_row_major(&points, groups));
    let codes = random(n * shape[1] / 2, 4);
    let codes = PackedCodes::new(&codes, CodeLayout::Rows, shape).unwrap();
    // One buffer for all: what another kind left in it does not stay.
    let mut buffer = GridBuffer::default();
    for grids in [
        GroupGrids::ScalesAndZeros(&pairs),
        GroupGrids::RowMajor { scales: &floats, zero_points: Some(&packed) },
        GroupGrids::GroupMajor { scales: &floats },
        GroupGrids::RowMajorAffine { scales: &floats, zeros: &pairs[..floats.len()] },
        GroupGrids::RowMajor { scales: &floats, zero_points: None },
    ] {
        let matrix = Int4Matrix::new(codes, group_size, grids).unwrap();
        let check = |buffer: &GridBuffer, i: usize, row: usize, group: usize| {
            let (scale, zero_point, zero) = match matrix.grid(row, group) {
                GroupGrid::ZeroPoint { scale, zero_point } => (scale, zero_point, 0.0),
                GroupGrid::Affine { scale, zero } => (scale, 8, zero),
            };
            let found = (buffer.scales()[i], buffer.zero_points()[i], buffer.zeros()[i]);
            assert_eq!(found, (scale, i32::from(zero_point), zero), "{grids:?} {row} {group}");
            assert!(zero_point == 8 || buffer.has_zero_points());
        };
        for rows in [0..n, 5..13] {
            for group in 0..groups {
                matrix.grids_of_rows(rows.clone(), group, &mut buffer);
                assert_eq!(buffer.scales().len(), rows.len());
                rows.clone().enumerate().for_each(|(i, row)| check(&buffer, i, row, group));
            }
        }
        for row in 0..n {
            matrix.grids_of_row(row, &mut buffer);
            buffer.repeat(2);
            assert_eq!(buffer.zeros().len(), 2 * groups);
            (0..2 * groups).for_each(|i| check(&buffer, i, row, i / 2));
        }
    }
}
