//! Rows of f32 and rows of weights as they lie in a file.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::ops::Range;

use half::{bf16, f16};

/// A weight row whose elements widen to f32 exactly.
pub(crate) trait Row: Copy + Sync {
    /// Elements.
    fn len(self) -> usize;

    /// Element `i`.
    fn get(self, i: usize) -> f32;

    /// Some of the elements.
    fn slice(self, range: Range<usize>) -> Self;

    /// Elements `i..i + 8`.
    ///
    /// # Safety
    /// The processor has AVX2, FMA and F16C, and `i + 8 <= len()`.
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code)]
    unsafe fn load(self, i: usize) -> __m256;
}

/// Elements already in memory as f32.
impl Row for &[f32] {
    #[inline(always)]
    fn len(self) -> usize {
        <[f32]>::len(self)
    }

    #[inline(always)]
    fn get(self, i: usize) -> f32 {
        self[i]
    }

    #[inline(always)]
    fn slice(self, range: Range<usize>) -> Self {
        &self[range]
    }

    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code)]
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(self, i: usize) -> __m256 {
        // SAFETY: the caller keeps i + 8 within the row.
        unsafe { _mm256_loadu_ps(self.as_ptr().add(i)) }
    }
}

macro_rules! byte_row {
    ($(#[$meta:meta])* $name:ident, $width:literal, $get:expr, $bytes:ident => $load:expr) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name<'a>(pub(crate) &'a [u8]);

        impl Row for $name<'_> {
            #[inline(always)]
            fn len(self) -> usize {
                self.0.len() / $width
            }

            #[inline(always)]
            fn get(self, i: usize) -> f32 {
                let bytes: [u8; $width] = std::array::from_fn(|b| self.0[i * $width + b]);
                $get(bytes)
            }

            #[inline(always)]
            fn slice(self, range: Range<usize>) -> Self {
                Self(&self.0[range.start * $width..range.end * $width])
            }

            #[cfg(target_arch = "x86_64")]
            #[allow(unsafe_code)]
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn load(self, i: usize) -> __m256 {
                // SAFETY: the caller keeps i + 8 within the row; the loads take any alignment.
                unsafe {
                    let $bytes = self.0.as_ptr().add(i * $width);
                    $load
                }
            }
        }
    };
}

byte_row!(
    /// Little-endian f32.
    F32Row, 4, f32::from_le_bytes, bytes => _mm256_loadu_ps(bytes.cast())
);
byte_row!(
    /// Little-endian f16.
    F16Row, 2, |b| f16::from_le_bytes(b).to_f32(), bytes => _mm256_cvtph_ps(_mm_loadu_si128(bytes.cast()))
);
byte_row!(
    /// Little-endian bf16: the upper half of an f32.
    Bf16Row, 2, |b| bf16::from_le_bytes(b).to_f32(), bytes =>
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(bytes.cast()))))
);

byte_row!(
    /// Integers of eight bits.
    I8Row, 1, |b| f32::from(i8::from_le_bytes(b)), bytes =>
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(bytes.cast())))
);

/// Equally long rows of f32, `stride` apart.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    data: &'a [f32],
    /// Elements of a row.
    pub(crate) len: usize,
    stride: usize,
}

impl<'a> Rows<'a> {
    /// Rows without gaps.
    pub(crate) fn dense(data: &'a [f32], len: usize) -> Self {
        debug_assert!(len > 0 && data.len().is_multiple_of(len));
        Self { data, len, stride: len }
    }

    /// Number of rows.
    pub(crate) fn count(self) -> usize {
        self.data.len() / self.stride
    }

    /// Row `i`.
    #[inline(always)]
    pub(crate) fn row(self, i: usize) -> &'a [f32] {
        &self.data[i * self.stride..][..self.len]
    }
}
