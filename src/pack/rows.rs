//! Row-major nibbles.

use std::ops::Range;

use crate::simd::multiversion;

/// See [`super::PackedCodes::decode`]; the ranges have been checked and are not empty.
pub(super) fn decode(
    bytes: &[u8],
    in_features: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [u8],
) {
    let row_bytes = in_features / 2;
    let width = columns.len();
    for (row, out) in rows.zip(out.chunks_exact_mut(width)) {
        let bytes = &bytes[row * row_bytes..][..row_bytes];
        let mut start = columns.start;
        let mut rest = out;
        if start % 2 == 1 {
            rest[0] = bytes[start / 2] >> 4;
            rest = &mut rest[1..];
            start += 1;
        }
        let bytes = &bytes[start / 2..];
        let (pairs, last) = rest.as_chunks_mut::<2>();
        let (whole, half) = bytes.split_at(pairs.len());
        unpack(whole, pairs);
        if let [last] = last {
            *last = half[0] & 15;
        }
    }
}

multiversion! {
    /// Each byte to its low and its high nibble.
    fn unpack(bytes: &[u8], out: &mut [[u8; 2]]) {
        for (pair, byte) in out.iter_mut().zip(bytes) {
            let byte = u16::from(*byte);
            *pair = ((byte | byte << 4) & 0x0f0f).to_le_bytes();
        }
    }
}

/// See [`super::pack_rows`].
pub(super) fn pack(codes: &[u8], out: &mut [u8]) {
    for (byte, pair) in out.iter_mut().zip(codes.as_chunks::<2>().0) {
        *byte = pair[0] & 15 | pair[1] << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_of_a_kernel_agree() {
        let bytes: Vec<u8> = (0..1003).map(|i| (i * 37 % 256) as u8).collect();
        let (mut a, mut b) = (vec![[0; 2]; 1003], vec![[1; 2]; 1003]);
        unpack(&bytes, &mut a);
        unpack::scalar(&bytes, &mut b);
        assert_eq!(a, b);
        assert!(bytes.iter().zip(&a).all(|(byte, [low, high])| *byte == low | high << 4));
    }
}
