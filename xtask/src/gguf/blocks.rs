//! Blocks of codes. Q8_0 is rounded as ggml does it, to the same bytes. ggml searches for the scales of
//! Q4_K and Q6_K; here they are those of plain rounding, which makes other codes in the same layout.

use anyhow::{Result, ensure};
use half::f16;

/// All blocks of `LEN` values, one after the other.
pub(super) fn encode<const LEN: usize, const BYTES: usize>(
    values: &[f32],
    block: fn(&[f32; LEN]) -> [u8; BYTES],
) -> Result<Vec<u8>> {
    let (blocks, rest) = values.as_chunks::<LEN>();
    ensure!(rest.is_empty(), "{} values are no whole blocks of {LEN}", values.len());
    Ok(blocks.iter().flat_map(block).collect())
}

fn amax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |m, x| m.max(x.abs()))
}

fn inverse(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { 1.0 / x }
}

/// `quantize_row_q8_0_ref` of ggml.
pub(super) fn q8_0(values: &[f32; 32]) -> [u8; 34] {
    let scale = amax(values) / 127.0;
    let inverse = inverse(scale);
    let mut out = [0; 34];
    out[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    for (code, x) in out[2..].iter_mut().zip(values) {
        *code = ((x * inverse).round() as i8).cast_unsigned();
    }
    out
}

/// `block_q4_K`: 8 groups of 32; value = d * scale * code - dmin * minimum.
pub(super) fn q4_k(values: &[f32; 256]) -> [u8; 144] {
    let groups = values.as_chunks::<32>().0;
    let lowest = |group: &[f32; 32]| group.iter().fold(0.0f32, |m, x| m.min(*x));
    let highest = |group: &[f32; 32]| group.iter().fold(0.0f32, |m, x| m.max(*x));
    let minima: Vec<f32> = groups.iter().map(|g| -lowest(g)).collect();
    let scales: Vec<f32> = groups.iter().map(|g| (highest(g) - lowest(g)) / 15.0).collect();
    let (d, dmin) = (f16::from_f32(amax(&scales) / 63.0), f16::from_f32(amax(&minima) / 63.0));
    let six = |x: &f32, unit: f16| (x * inverse(unit.to_f32())).round().clamp(0.0, 63.0) as u8;
    let scales: Vec<u8> = scales.iter().map(|s| six(s, d)).collect();
    let minima: Vec<u8> = minima.iter().map(|m| six(m, dmin)).collect();
    let mut out = [0; 144];
    out[..2].copy_from_slice(&d.to_le_bytes());
    out[2..4].copy_from_slice(&dmin.to_le_bytes());
    // Groups 0 to 3: six bits of bytes 0 to 3 and 4 to 7. Groups 4 to 7: four bits in bytes 8 to 11, the
    // two above on top of bytes 0 to 7.
    for g in 0..4 {
        out[4 + g] = scales[g] | (scales[g + 4] >> 4) << 6;
        out[8 + g] = minima[g] | (minima[g + 4] >> 4) << 6;
        out[12 + g] = scales[g + 4] & 15 | (minima[g + 4] & 15) << 4;
    }
    for (g, group) in groups.iter().enumerate() {
        let step = inverse(d.to_f32() * f32::from(scales[g]));
        let minimum = dmin.to_f32() * f32::from(minima[g]);
        for (i, x) in group.iter().enumerate() {
            let code = ((x + minimum) * step).round().clamp(0.0, 15.0) as u8;
            out[16 + g / 2 * 32 + i] |= code << (g % 2 * 4);
        }
    }
    out
}

/// `block_q6_K`: 16 groups of 16; value = d * scale * (code - 32).
pub(super) fn q6_k(values: &[f32; 256]) -> [u8; 210] {
    let groups = values.as_chunks::<16>().0;
    let scales: Vec<f32> = groups.iter().map(|g| amax(g) / 31.0).collect();
    let d = f16::from_f32(amax(&scales) / 127.0);
    let mut out = [0; 210];
    out[208..].copy_from_slice(&d.to_le_bytes());
    for (g, group) in groups.iter().enumerate() {
        let scale = (scales[g] * inverse(d.to_f32())).round().clamp(0.0, 127.0);
        out[192 + g] = (scale as i8).cast_unsigned();
        let step = inverse(d.to_f32() * scale);
        for (i, x) in group.iter().enumerate() {
            let code = ((x * step).round().clamp(-32.0, 31.0) as i8 + 32).cast_unsigned();
            // Halves of 128; in each, runs of 32: the low bits of runs 0 and 1 are low halves of 64 bytes,
            // those of runs 2 and 3 the high ones; run r has the r-th pair of bits of 32 bytes.
            let (half, run, at) = (g / 8, g % 8 / 2, g % 2 * 16 + i);
            out[half * 64 + run % 2 * 32 + at] |= (code & 15) << (run / 2 * 4);
            out[128 + half * 32 + at] |= (code >> 4) << (run * 2);
        }
    }
    out
}
