//! Blocks of codes to f32: slices in, slices out.
//!
//! Every value is made by the f32 operations of the `gguf` package, in its order, each rounded: a scale
//! times a small integer, the product times the code, and for the types with a minimum one subtraction.

use half::f16;

use crate::simd::multiversion;

/// A type whose elements are codes in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockType {
    /// 32 codes of 8 bits and a f16 scale.
    Q8_0,
    /// 256 codes of 4 bits; 8 groups with scale and minimum of 6 bits, in units of two f16 numbers.
    Q4K,
    /// The same with codes of 5 bits, whose high bits lie apart.
    Q5K,
    /// 256 codes of 6 bits; 16 groups with a scale of 8 bits, in units of a f16 number.
    Q6K,
}

/// Codes in a block of the K types.
const SUPER: usize = 256;
/// Codes of a group of Q4_K and Q5_K.
const GROUP: usize = 32;
/// Bytes in front of the codes of Q4_K and Q5_K: two f16 numbers, and eight scales and minima in 12 bytes.
const K_HEAD: usize = 16;

impl BlockType {
    /// The name that ggml gives it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Elements of a block.
    pub fn elements(self) -> usize {
        match self {
            Self::Q8_0 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => SUPER,
        }
    }

    /// Bytes of a block.
    pub fn bytes(self) -> usize {
        match self {
            Self::Q8_0 => Q8_0_BYTES,
            Self::Q4K => Q4K_BYTES,
            Self::Q5K => Q5K_BYTES,
            Self::Q6K => Q6K_BYTES,
        }
    }

    /// Decodes whole blocks.
    ///
    /// # Panics
    /// When `bytes` are not the blocks of as many elements as `out` has.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        let blocks = bytes.len() / self.bytes();
        assert!(
            bytes.len() == blocks * self.bytes() && out.len() == blocks * self.elements(),
            "{} bytes of {} for {} elements",
            bytes.len(),
            self.name(),
            out.len(),
        );
        match self {
            Self::Q8_0 => decode_q8_0(bytes, out),
            Self::Q4K => decode_q4k(bytes, out),
            Self::Q5K => decode_q5k(bytes, out),
            Self::Q6K => decode_q6k(bytes, out),
        }
    }
}

const Q8_0_BYTES: usize = 2 + 32;
const Q4K_BYTES: usize = K_HEAD + SUPER / 2;
const Q5K_BYTES: usize = K_HEAD + SUPER / 8 + SUPER / 2;
const Q6K_BYTES: usize = SUPER / 2 + SUPER / 4 + SUPER / 16 + 2;

#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Scale and minimum of group `g` of eight, 6 bits each, of the 12 bytes that hold them: those of the
/// first four groups in the low bits of bytes 0 to 7; of the last four the low halves in bytes 8 to 11 and
/// the high bits on top of bytes 0 to 7.
#[inline(always)]
fn scale_and_minimum(packed: &[u8], g: usize) -> (f32, f32) {
    let (scale, minimum) = if g < 4 {
        (packed[g] & 63, packed[g + 4] & 63)
    } else {
        let i = g - 4;
        let low = packed[8 + i];
        ((low & 15) | ((packed[i] >> 2) & 48), (low >> 4) | ((packed[4 + i] >> 2) & 48))
    };
    (f32::from(scale), f32::from(minimum))
}

multiversion! {
    /// Scale, 32 codes: `scale * code`.
    fn decode_q8_0(bytes: &[u8], out: &mut [f32]) {
        for (block, out) in bytes.as_chunks::<Q8_0_BYTES>().0.iter().zip(out.as_chunks_mut::<32>().0) {
            let scale = half_at(block, 0);
            for (x, code) in out.iter_mut().zip(&block[2..]) {
                *x = scale * f32::from(i8::from_le_bytes([*code]));
            }
        }
    }
}

multiversion! {
    /// Scale, minimum, their 12 bytes, 128 bytes of codes: `(scale * s) * code - minimum * m`. Of every 32
    /// bytes of codes the low halves are a group, the high halves the next.
    fn decode_q4k(bytes: &[u8], out: &mut [f32]) {
        for (block, out) in bytes.as_chunks::<Q4K_BYTES>().0.iter().zip(out.as_chunks_mut::<SUPER>().0) {
            let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
            for (g, out) in out.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
                let (s, m) = scale_and_minimum(&block[4..K_HEAD], g);
                let (s, m) = (scale * s, minimum * m);
                let shift = g % 2 * 4;
                for (x, code) in out.iter_mut().zip(&block[K_HEAD + g / 2 * GROUP..][..GROUP]) {
                    *x = s * f32::from((code >> shift) & 15) - m;
                }
            }
        }
    }
}

multiversion! {
    /// As Q4_K, with 32 bytes between head and codes whose bit `g` is the fifth bit of the codes of group
    /// `g`.
    fn decode_q5k(bytes: &[u8], out: &mut [f32]) {
        const CODES: usize = K_HEAD + SUPER / 8;
        for (block, out) in bytes.as_chunks::<Q5K_BYTES>().0.iter().zip(out.as_chunks_mut::<SUPER>().0) {
            let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
            let high = &block[K_HEAD..CODES];
            for (g, out) in out.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
                let (s, m) = scale_and_minimum(&block[4..K_HEAD], g);
                let (s, m) = (scale * s, minimum * m);
                let shift = g % 2 * 4;
                let low = &block[CODES + g / 2 * GROUP..][..GROUP];
                for ((x, low), high) in out.iter_mut().zip(low).zip(high) {
                    *x = s * f32::from(((low >> shift) & 15) | (((high >> g) & 1) << 4)) - m;
                }
            }
        }
    }
}

multiversion! {
    /// 128 bytes of low halves, 64 of high pairs, 16 signed scales, the unit: `(unit * s) * (code - 32)`,
    /// `s` for each 16 codes. Each half of the block is four runs of 32: their low bits are the low and
    /// then the high halves of two times 32 bytes, their high bits the four pairs of 32 bytes.
    fn decode_q6k(bytes: &[u8], out: &mut [f32]) {
        const HIGH: usize = SUPER / 2;
        const SCALES: usize = HIGH + SUPER / 4;
        const UNIT: usize = SCALES + SUPER / 16;
        for (block, out) in bytes.as_chunks::<Q6K_BYTES>().0.iter().zip(out.as_chunks_mut::<SUPER>().0) {
            let unit = half_at(block, UNIT);
            for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                let (half, i) = (run / 4, run % 4);
                let low = &block[half * 64 + i % 2 * 32..][..32];
                let high = &block[HIGH + half * 32..][..32];
                for part in 0..2 {
                    let scale = unit * f32::from(i8::from_le_bytes([block[SCALES + run * 2 + part]]));
                    let of_part = part * 16..part * 16 + 16;
                    let codes = low[of_part.clone()].iter().zip(&high[of_part.clone()]);
                    for (x, (low, high)) in out[of_part].iter_mut().zip(codes) {
                        let code = ((low >> (i / 2 * 4)) & 15) | (((high >> (i * 2)) & 3) << 4);
                        *x = scale * (f32::from(code) - 32.0);
                    }
                }
            }
        }
    }
}

/// The baseline builds of the kernels.
#[cfg(test)]
pub(super) fn scalar(kind: BlockType, bytes: &[u8], out: &mut [f32]) {
    match kind {
        BlockType::Q8_0 => decode_q8_0::scalar(bytes, out),
        BlockType::Q4K => decode_q4k::scalar(bytes, out),
        BlockType::Q5K => decode_q5k::scalar(bytes, out),
        BlockType::Q6K => decode_q6k::scalar(bytes, out),
    }
}
