//! Zero points, eight neighbours along `out` to a little-endian int32.

use super::columns::join;

/// Packs for GPTQ: zero points `[in/g, out]` to `qzeros` `[in/g, out/8]`. `checkpoint_format` "gptq" (the
/// first version) stores each less one, so 8 is written as 7; zero points of 1..=16 can be said.
///
/// # Panics
/// When `out_features` is no multiple of 8, the rows are not whole, or a zero point is out of range.
pub fn pack_group_major(zero_points: &[u8], out_features: usize) -> Vec<u32> {
    assert!(
        out_features > 0 && out_features.is_multiple_of(8) && zero_points.len().is_multiple_of(out_features),
        "{} zero points are no whole rows of {out_features}",
        zero_points.len()
    );
    assert!(zero_points.iter().all(|z| (1..=16).contains(z)), "a zero point outside of 1..=16");
    zero_points.as_chunks::<8>().0.iter().map(|eight| join(eight.map(|z| z - 1))).collect()
}

/// The zero point, 1..=16, of a row and group in the bytes of GPTQ's `qzeros` (first version).
///
/// # Panics
/// When it lies past the end.
pub fn read_group_major(bytes: &[u8], out_features: usize, row: usize, group: usize) -> u8 {
    nibble(bytes, group * (out_features / 8) + row / 8, row % 8) + 1
}

/// Packs for compressed-tensors: zero points `[out, groups]`, 0..=15, to `weight_zero_point`
/// `[out/8, groups]`, as they are.
///
/// # Panics
/// When there are not eight rows to each word or a zero point has more than four bits.
pub fn pack_row_major(zero_points: &[u8], groups: usize) -> Vec<u32> {
    assert!(
        groups > 0 && zero_points.len().is_multiple_of(8 * groups),
        "{} zero points are no eights of rows of {groups}",
        zero_points.len()
    );
    assert!(zero_points.iter().all(|z| *z < 16), "a zero point above 15");
    let eights = zero_points.chunks_exact(8 * groups);
    let word = |rows: &[u8], group| join(std::array::from_fn(|i| rows[i * groups + group]));
    eights.flat_map(|rows| (0..groups).map(move |group| word(rows, group))).collect()
}

/// The zero point, 0..=15, of a row and group in the bytes of compressed-tensors' `weight_zero_point`.
///
/// # Panics
/// When it lies past the end.
pub fn read_row_major(bytes: &[u8], groups: usize, row: usize, group: usize) -> u8 {
    nibble(bytes, row / 8 * groups + group, row % 8)
}

/// Nibble `i` of a little-endian word.
fn nibble(bytes: &[u8], word: usize, i: usize) -> u8 {
    bytes[word * 4 + i / 2] >> (i % 2 * 4) & 15
}
