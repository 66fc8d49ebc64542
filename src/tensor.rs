//! A tensor as it lies in a file: dtype, shape and bytes, and its rows widened to f32.

use std::ops::Range;

use half::{bf16, f16};
pub use safetensors::Dtype;

use crate::simd::multiversion;

/// A borrowed tensor. Matrices are `[out, in]`, row-major; nothing is assumed about the alignment
/// of `bytes` (safetensors does not promise any).
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Full name.
    pub name: &'a str,
    /// Element type, from the tensor's own header.
    pub dtype: Dtype,
    /// Dimensions, slowest first.
    pub shape: &'a [usize],
    /// The elements, little endian, `shape.product() * element size` of them.
    pub bytes: &'a [u8],
}

/// A NaN or an infinity met while decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// How many there are in the rows that were decoded.
    pub count: usize,
    /// Row of the first.
    pub row: usize,
    /// Column of the first.
    pub column: usize,
}

impl<'a> TensorView<'a> {
    /// Rows: the first dimension of a matrix; a vector is one row.
    pub fn rows(&self) -> usize {
        if self.shape.len() < 2 { 1 } else { self.shape[0] }
    }

    /// Elements of a row.
    pub fn row_len(&self) -> usize {
        if self.shape.len() < 2 {
            self.shape.first().copied().unwrap_or(1)
        } else {
            self.shape[1..].iter().product()
        }
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_len() * element_bytes(self.dtype)
    }

    /// The bytes of some rows.
    pub fn row_range(&self, rows: Range<usize>) -> &'a [u8] {
        &self.bytes[rows.start * self.row_bytes()..rows.end * self.row_bytes()]
    }

    /// Whether the element type is one that [`widen`] takes.
    pub fn is_float(&self) -> bool {
        is_float(self.dtype)
    }

    /// Decodes one row into `out`, `[row_len]`.
    ///
    /// # Panics
    /// When `out` has another length or the dtype is not a float of 16 or 32 bits.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        widen(self.dtype, self.row_range(row..row + 1), out);
    }

    /// Looks for NaN and infinity in some rows.
    pub fn non_finite(&self, rows: Range<usize>) -> Option<NonFinite> {
        let mut row = vec![0.0; self.row_len()];
        let mut first: Option<NonFinite> = None;
        for r in rows {
            self.decode_row(r, &mut row);
            if amax_bits(&row) < EXPONENT_BITS {
                continue;
            }
            for (column, _) in row.iter().enumerate().filter(|(_, x)| !x.is_finite()) {
                first.get_or_insert(NonFinite { count: 0, row: r, column }).count += 1;
            }
        }
        first
    }
}

/// Bits of the f32 exponent: an absolute value at or above is an infinity or a NaN.
pub const EXPONENT_BITS: u32 = 0x7f80_0000;

/// Whether the dtype is BF16, F16 or F32.
pub fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32)
}

/// Bytes of an element (of the byte-sized types; sub-byte types never pass the header checks).
pub fn element_bytes(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// The name safetensors headers use.
pub fn dtype_name(dtype: Dtype) -> String {
    dtype.to_string()
}

/// Widens BF16, F16 or F32 bytes to f32; exact.
///
/// # Panics
/// When the lengths differ or the dtype is another.
pub fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * element_bytes(dtype), "bytes and elements differ");
    match dtype {
        Dtype::BF16 => widen_bf16(bytes, out),
        Dtype::F16 => widen_f16(bytes, out),
        Dtype::F32 => {
            for (x, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *x = f32::from_le_bytes(*b);
            }
        }
        other => panic!("{other:?} is not a float"),
    }
}

multiversion! {
    fn widen_bf16(bytes: &[u8], out: &mut [f32]) {
        for (x, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *x = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
        }
    }
}

fn widen_f16(bytes: &[u8], out: &mut [f32]) {
    for (x, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *x = f16::from_le_bytes(*b).to_f32();
    }
}

/// Rounds to bf16, half to even.
pub fn to_bf16(x: f32) -> bf16 {
    bf16::from_f32(x)
}

multiversion! {
    /// The largest absolute value of a row, as the bits of an f32. Since the bits of non-negative
    /// floats order like the floats, an infinity or NaN shows as [`EXPONENT_BITS`] or more, and one
    /// pass finds both.
    pub fn amax_bits(row: &[f32]) -> u32 {
        let mut lanes = [0u32; crate::simd::LANES];
        let (chunks, rest) = row.as_chunks::<{ crate::simd::LANES }>();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane = (*lane).max(x.to_bits() & 0x7fff_ffff);
            }
        }
        let tail = rest.iter().map(|x| x.to_bits() & 0x7fff_ffff);
        lanes.into_iter().chain(tail).max().unwrap_or(0)
    }
}

multiversion! {
    /// The smallest and the largest value of a row; infinity and minus infinity of none. A NaN is
    /// passed over ([`amax_bits`] finds it).
    pub fn extremes(row: &[f32]) -> [f32; 2] {
        let mut low = [f32::INFINITY; crate::simd::LANES];
        let mut high = [f32::NEG_INFINITY; crate::simd::LANES];
        let (chunks, rest) = row.as_chunks::<{ crate::simd::LANES }>();
        for chunk in chunks {
            for ((low, high), x) in low.iter_mut().zip(&mut high).zip(chunk) {
                *low = if *x < *low { *x } else { *low };
                *high = if *x > *high { *x } else { *high };
            }
        }
        let low = low.iter().chain(rest).fold(f32::INFINITY, |m, x| if *x < m { *x } else { m });
        let high = high.iter().chain(rest).fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m });
        [low, high]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bf16_and_f16_widens_exactly() {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let mut out = vec![0.0; 1 << 16];
        widen(Dtype::BF16, &bytes, &mut out);
        for (bits, x) in out.iter().enumerate() {
            assert_eq!(x.to_bits(), (bits as u32) << 16);
        }
        widen(Dtype::F16, &bytes, &mut out);
        // 1 sign, 5 exponent, 10 fraction bits: the definition of binary16.
        for (bits, x) in out.iter().enumerate() {
            let (sign, e, f) = (bits >> 15, (bits >> 10) & 31, (bits & 1023) as f64);
            let magnitude = match e {
                0 => f * 2f64.powi(-24),
                31 if f == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                _ => (1.0 + f / 1024.0) * 2f64.powi(e as i32 - 15),
            };
            let expected = if sign == 1 { -magnitude } else { magnitude };
            assert!(f64::from(*x) == expected || (x.is_nan() && expected.is_nan()), "{bits:#x}");
        }
    }

    #[test]
    fn non_finite_values_are_counted_and_located() {
        let mut values = vec![1.0f32; 3 * 20];
        values[20 + 17] = f32::NAN;
        values[2 * 20] = f32::NEG_INFINITY;
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let view = TensorView { name: "t", dtype: Dtype::F32, shape: &[3, 20], bytes: &bytes };
        assert_eq!(view.non_finite(0..3), Some(NonFinite { count: 2, row: 1, column: 17 }));
        assert_eq!(view.non_finite(0..1), None);
    }

    #[test]
    fn builds_of_a_kernel_agree() {
        let row: Vec<f32> = (0..1003).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        assert_eq!(amax_bits(&row), amax_bits::scalar(&row));
        assert_eq!(f32::from_bits(amax_bits(&row)), row.iter().fold(0.0f32, |m, x| m.max(x.abs())));
        assert_eq!(extremes(&row), extremes::scalar(&row));
    }

    #[test]
    fn extremes_pass_over_nan_and_of_nothing_are_nothing() {
        assert_eq!(extremes(&[1.5, f32::NAN, -2.0, 0.0]), [-2.0, 1.5]);
        let mut row = vec![0.0; 100];
        (row[37], row[98]) = (-3.0, 4.0);
        assert_eq!(extremes(&row), [-3.0, 4.0]);
        assert_eq!(extremes(&[]), [f32::INFINITY, f32::NEG_INFINITY]);
    }
}
