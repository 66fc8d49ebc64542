//! Int8 codes with a scale per row: the codec of W8A8 and of the int8 heads of the 4-bit schemes.
//!
//! Per module `M`: `M.weight` int8 `[out, in]` under the source's name, `M.weight_scale`;
//! `w = weight * weight_scale`. No zero point, no input scale, no packing.

use std::ops::Range;

use rayon::prelude::*;

use super::read::Reader;
use super::{Choice, Codec, Encoder, Fit, Inputs, OutputTensor, Packed, Problem, SolvedRows};
use crate::checkpoint::TensorFiles;
use crate::quant::{ErrorSums, Method, int8};
use crate::tensor::{Dtype, EXPONENT_BITS, NonFinite, TensorView, amax_bits, to_bf16};

/// The int8 codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int8 {
    /// How scales are chosen.
    pub method: Method,
    /// What the consumer multiplies by.
    pub activations: Activations,
}

/// What an int8 matrix is multiplied by, which decides how its scales are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// Int8 with a scale per token, as vLLM's W8A8 does. It allocates the scales as f32 `[out, 1]`, so
    /// f32 loses nothing, and a one-dimensional scale fails its shape check.
    Int8,
    /// Floats, as PyTorch's `_weight_int8pack_mm` does, which takes bf16 scales `[out]`.
    Float,
}

impl Codec for Int8 {
    fn scheme(&self) -> &'static str {
        match self.activations {
            Activations::Int8 => "w8a8",
            Activations::Float => "w8a16",
        }
    }

    fn group_size(&self) -> Option<usize> {
        None
    }

    fn fits(&self, [_, in_features]: [usize; 2]) -> Fit {
        match self.activations {
            // The kernel reads whole vectors of codes.
            Activations::Float if !in_features.is_multiple_of(32) => {
                Fit::Refuse(format!("rows of {in_features}, and an int8 head takes multiples of 32"))
            }
            _ => Fit::Fits,
        }
    }

    fn outputs(&self, module: &str, [out_features, in_features]: [usize; 2]) -> Vec<OutputTensor> {
        let (dtype, shape) = match self.activations {
            Activations::Int8 => (Dtype::F32, vec![out_features, 1]),
            Activations::Float => (Dtype::BF16, vec![out_features]),
        };
        vec![
            OutputTensor {
                name: format!("{module}.weight"),
                dtype: Dtype::I8,
                shape: vec![out_features, in_features],
            },
            OutputTensor { name: format!("{module}.weight_scale"), dtype, shape },
        ]
    }

    fn encoder<'a>(
        &'a self,
        source: TensorView<'a>,
        rows: Range<usize>,
        choice: Choice<'a>,
    ) -> Box<dyn Encoder + 'a> {
        let solved = match choice {
            Choice::Solved(solved) => Some(solved),
            Choice::Weights | Choice::Weighted(_) => None,
        };
        let scales = Vec::with_capacity(rows.len() * 4);
        Box::new(Int8Encoder { source, codec: *self, scales, first: rows.start, solved })
    }

    fn solve(&self, weights: &[f32], inputs: &Inputs<'_>) -> SolvedRows {
        let k = inputs.importance.len();
        let scales: Vec<f32> =
            weights.chunks_exact(k).map(|row| self.row_scale(row, f32::from_bits(amax_bits(row)))).collect();
        let mut codes = vec![0; weights.len()];
        let nearest = |row: usize, _, weight: f32| {
            let code = (weight / scales[row]).clamp(-int8::MAX_CODE, int8::MAX_CODE).round_ties_even();
            #[expect(clippy::cast_possible_truncation, reason = "clamped")]
            let bits = (code as i8).cast_unsigned();
            (bits, code * scales[row])
        };
        let output_noise = inputs.solver.solve(weights, nearest, &mut codes);
        let mut bytes = Vec::with_capacity(scales.len() * self.solved_row_bytes(k));
        let mut decoded = vec![0.0; weights.len()];
        for ((codes, decoded), scale) in codes.chunks_exact(k).zip(decoded.chunks_exact_mut(k)).zip(&scales) {
            bytes.extend_from_slice(codes);
            bytes.extend(scale.to_le_bytes());
            int8::decode_row(bytemuck::cast_slice(codes), *scale, decoded);
        }
        SolvedRows { bytes, decoded, output_noise }
    }

    fn solved_row_bytes(&self, in_features: usize) -> usize {
        in_features + 4
    }

    fn round(&self, weights: &[f32], in_features: usize, _importance: Option<&[f32]>) -> Vec<f32> {
        let mut codes = vec![0; in_features];
        let mut rounded = vec![0.0; weights.len()];
        for (row, rounded) in weights.chunks_exact(in_features).zip(rounded.chunks_exact_mut(in_features)) {
            let scale = self.row_scale(row, f32::from_bits(amax_bits(row)));
            int8::encode_row(row, scale, &mut codes);
            int8::decode_row(&codes, scale, rounded);
        }
        rounded
    }

    fn rounds_inputs(&self) -> bool {
        self.activations == Activations::Int8
    }

    fn takes_importance(&self) -> bool {
        false
    }

    fn encoder_bytes(&self, [out_features, _]: [usize; 2]) -> u64 {
        out_features as u64 * 4
    }

    fn missing_consequence(&self, tensor: &str) -> &'static str {
        match self.activations {
            Activations::Int8 if tensor.ends_with(".weight_scale") => {
                "vLLM loads the module without a scale, does not complain, and generates garbage"
            }
            _ => "the loader leaves the module at its start values or stops",
        }
    }

    fn read<'a>(
        &self,
        files: &'a TensorFiles,
        module: &str,
        [out_features, in_features]: [usize; 2],
    ) -> Result<Packed<'a>, Vec<Problem>> {
        let mut reader = Reader::new(files, self, module, [out_features, in_features]);
        let weight = reader.tensor(0, &[]);
        // bf16 scales load as well in vLLM, widened; this tool writes f32 for it.
        let scale = reader.tensor(1, &[Dtype::F32, Dtype::BF16]);
        let (Some(weight), Some(scale)) = (weight, scale) else { return Err(reader.problems) };
        let mut scales = vec![0.0; out_features];
        crate::tensor::widen(scale.dtype, scale.bytes, &mut scales);
        if let Some(row) = scales.iter().position(|s| !s.is_finite() || *s <= 0.0) {
            reader.problem(
                scale.name,
                format!("row {row}: expected a finite scale above zero, found {}", scales[row]),
                "the row's outputs are NaN, infinite, zero or of the wrong sign",
            );
            return Err(reader.problems);
        }
        let codes: &[i8] = bytemuck::cast_slice(weight.bytes);
        if let Some(at) = codes.iter().position(|c| *c == i8::MIN) {
            reader.problem(
                weight.name,
                format!("row {}: code -128, outside -127..=127", at / in_features),
                "kernels that negate codes overflow",
            );
            return Err(reader.problems);
        }
        Ok(Packed::Int8(Int8Matrix { in_features, codes, scales, activations: self.activations }))
    }
}

/// An int8 module as stored: `w[n, k] = codes[n, k] * scales[n]`.
#[derive(Clone, Debug)]
pub struct Int8Matrix<'a> {
    /// Row length.
    pub in_features: usize,
    /// `[out, in]`, borrowed from the artifact.
    pub codes: &'a [i8],
    /// `[out]`, finite and positive.
    pub scales: Vec<f32>,
    /// What the consumer multiplies by.
    pub activations: Activations,
}

impl<'a> Int8Matrix<'a> {
    /// The codes of a row.
    pub fn row_codes(&self, row: usize) -> &'a [i8] {
        &self.codes[row * self.in_features..(row + 1) * self.in_features]
    }
}

impl Int8 {
    /// The scale of a row as it is stored, so that the codes are chosen against it.
    fn row_scale(&self, weights: &[f32], amax: f32) -> f32 {
        let scale = int8::row_scale(weights, amax, self.method);
        match self.activations {
            Activations::Int8 => scale,
            Activations::Float => to_bf16(scale).to_f32(),
        }
    }
}

struct Int8Encoder<'a> {
    source: TensorView<'a>,
    codec: Int8,
    /// The first row of the module in the source.
    first: usize,
    /// Scales and codes that were chosen beforehand.
    solved: Option<&'a [u8]>,
    /// The scales of the rows encoded so far, as they are written.
    scales: Vec<u8>,
}

impl Encoder for Int8Encoder<'_> {
    fn encode(&mut self, rows: Range<usize>, bytes: &mut Vec<u8>) -> Result<ErrorSums, NonFinite> {
        let (source, codec, first, solved) = (self.source, self.codec, self.first, self.solved);
        let row_len = source.row_len();
        let start = bytes.len();
        bytes.resize(start + rows.len() * row_len, 0);
        let codes: &mut [i8] = bytemuck::cast_slice_mut(&mut bytes[start..]);
        let encoded: Vec<Option<(f32, ErrorSums)>> = rows
            .clone()
            .into_par_iter()
            .zip(codes.par_chunks_mut(row_len))
            .map_init(
                || vec![0.0f32; row_len],
                |weights, (row, codes)| {
                    source.decode_row(row, weights);
                    let amax = amax_bits(weights);
                    if amax >= EXPONENT_BITS {
                        return None;
                    }
                    let scale = match solved {
                        None => {
                            let scale = codec.row_scale(weights, f32::from_bits(amax));
                            int8::encode_row(weights, scale, codes);
                            scale
                        }
                        Some(solved) => {
                            let row = &solved[(row - first) * (row_len + 4)..][..row_len + 4];
                            codes.copy_from_slice(bytemuck::cast_slice(&row[..row_len]));
                            f32::from_le_bytes(row[row_len..].try_into().unwrap_or_default())
                        }
                    };
                    Some((scale, int8::row_error(weights, codes, scale)))
                },
            )
            .collect();
        let mut sums = ErrorSums::default();
        for row in encoded {
            // Counting and locating is for the error path: decode once more.
            let Some((scale, error)) = row else {
                return Err(source.non_finite(rows).unwrap_or(NonFinite { count: 1, row: 0, column: 0 }));
            };
            match codec.activations {
                Activations::Int8 => self.scales.extend(scale.to_le_bytes()),
                Activations::Float => self.scales.extend(to_bf16(scale).to_le_bytes()),
            }
            sums += error;
        }
        Ok(sums)
    }

    fn finish(&mut self, bytes: &mut Vec<u8>) -> bool {
        bytes.append(&mut self.scales);
        false
    }
}
