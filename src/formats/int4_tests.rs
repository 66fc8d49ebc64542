use super::*;

fn goldens() -> serde_json::Value {
    serde_json::from_str(include_str!("../../fixtures/goldens/cpu_formats.json")).unwrap()
}

fn unhex(hex: &serde_json::Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

/// The golden file's weights, as bf16 bytes.
fn weights(n: usize, k: usize, shifted: bool) -> Vec<u8> {
    let weight = |r: usize, c: usize| {
        let w =
            (((r * 31 + c * 17) % 97) as f32 - 48.0) / 256.0 * if c.is_multiple_of(5) { 4.0 } else { 1.0 };
        if shifted && c < 32 { w + 0.125 } else { w }
    };
    (0..n * k).flat_map(|i| bf16::from_f32(weight(i / k, i % k)).to_le_bytes()).collect()
}

/// Every output tensor of a module, encoded in two calls.
fn encode(codec: &Int4, source: TensorView<'_>, rows: Range<usize>, split: usize) -> Vec<Vec<u8>> {
    let mut encoder = codec.encoder(source, rows.clone(), Choice::Weights);
    let mut bytes = Vec::new();
    for part in [rows.start..rows.start + split, rows.start + split..rows.end] {
        if !part.is_empty() {
            encoder.encode(part, &mut bytes).unwrap();
        }
    }
    while encoder.finish(&mut bytes) {}
    let shape = [rows.len(), source.row_len()];
    let lengths = codec.outputs("m", shape).into_iter().map(|o| usize::try_from(o.len_bytes()).unwrap());
    let tensors: Vec<Vec<u8>> = lengths.map(|len| bytes.drain(..len).collect()).collect();
    assert!(bytes.is_empty());
    tensors
}

fn codec(grid: Grid, storage: Storage, group_size: usize) -> Int4 {
    Int4 { scheme: "w4", grid, storage, method: Method::RoundToNearest, group_size }
}

fn golden_case(name: &str, codec: &Int4, tensors: &[&str]) {
    let golden = goldens();
    let case = &golden[name];
    let size = |key: &str| usize::try_from(case[key].as_u64().unwrap()).unwrap();
    let (n, k) = (size("N"), size("K"));
    let bytes = weights(n, k, name == "packed");
    let source = TensorView { name: "m.weight", dtype: Dtype::BF16, shape: &[n, k], bytes: &bytes };
    let written = encode(codec, source, 0..n, n);
    assert_eq!(written.len(), tensors.len());
    for (bytes, key) in written.iter().zip(tensors) {
        assert_eq!(*bytes, unhex(&case[*key]), "{key}");
    }
}

#[test]
fn bytes_are_those_of_the_golden_cases() {
    golden_case(
        "gptq",
        &codec(Grid::Symmetric(Signs::Both), Storage::Gptq, 32),
        &["qweight_hex", "qzeros_hex", "scales_hex", "g_idx_hex"],
    );
    golden_case(
        "packed",
        &codec(Grid::ZeroPoint, Storage::PackQuantized, 32),
        &["weight_packed_hex", "weight_scale_bf16_hex", "weight_zero_point_hex", "weight_shape_hex"],
    );
    golden_case(
        "tinygemm",
        &codec(Grid::Affine, Storage::Blocks(64), 32),
        &["weight_packed_hex", "scales_and_zeros_hex"],
    );
}

/// 200 rows are three tasks and a rest; a part of a source is encoded as if it stood alone.
#[test]
fn bytes_do_not_depend_on_calls_or_on_where_the_rows_lie() {
    let (n, k) = (224, 64);
    let bytes = weights(2 * n, k, false);
    let whole = TensorView { name: "m.weight", dtype: Dtype::BF16, shape: &[2 * n, k], bytes: &bytes };
    let alone = TensorView { shape: &[n, k], bytes: &bytes[n * k * 2..], ..whole };
    for codec in [
        codec(Grid::Symmetric(Signs::Both), Storage::Gptq, 32),
        codec(Grid::ZeroPoint, Storage::PackQuantized, 32),
        codec(Grid::Affine, Storage::Blocks(32), 32),
        codec(Grid::Affine, Storage::RowMajor, 32),
    ] {
        let expected = encode(&codec, alone, 0..n, n);
        assert_eq!(encode(&codec, alone, 0..n, 128), expected);
        assert_eq!(encode(&codec, whole, n..2 * n, 64), expected);
    }
}

#[test]
fn a_nan_is_located() {
    let mut bytes = weights(64, 32, false);
    bytes[(40 * 32 + 7) * 2..][..2].copy_from_slice(&bf16::NAN.to_le_bytes());
    let source = TensorView { name: "m.weight", dtype: Dtype::BF16, shape: &[64, 32], bytes: &bytes };
    let codec = codec(Grid::Affine, Storage::RowMajor, 32);
    let error = codec.encoder(source, 0..64, Choice::Weights).encode(0..64, &mut Vec::new()).unwrap_err();
    assert_eq!(error, NonFinite { count: 1, row: 40, column: 7 });
}
