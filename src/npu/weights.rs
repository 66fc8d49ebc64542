//! Weights of a graph: which rows of which tensor, in which coding, and the bytes of a block of rows.

use std::ops::Range;

use rayon::prelude::*;

use super::encoding::{Bits, Encoding};
use super::options::{Options, Precision};
use crate::calibrate::Range as Values;
use crate::onnx::ElementType;
use crate::quant::{ErrorSums, Method, int8};
use crate::spark::Module;
use crate::tensor::{EXPONENT_BITS, NonFinite, TensorView, amax_bits};

/// What a weight is to its operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightRole {
    /// Matrix of a linear.
    Linear,
    /// Matrix of the head gates: a row scales a whole head, so it gets 16 bits beside 16-bit
    /// activations.
    HeadGate,
    /// Vector of a norm.
    Norm,
}

/// Rows of a tensor of the checkpoint, as a constant of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// Name of the initializer.
    pub name: String,
    /// Tensor of the checkpoint.
    pub source: String,
    /// Its rows; a vector is one row.
    pub rows: Range<usize>,
    /// Length of a row.
    pub columns: usize,
    /// What every weight is multiplied by before it is encoded.
    pub factor: f32,
    /// What it is for.
    pub role: WeightRole,
    /// The module it belongs to.
    pub module: Module,
}

impl Weight {
    /// `[out, in]`, or `[hidden]` of a norm.
    pub fn shape(&self) -> Vec<usize> {
        match self.role {
            WeightRole::Norm => vec![self.columns],
            WeightRole::Linear | WeightRole::HeadGate => vec![self.rows.len(), self.columns],
        }
    }

    /// Number of weights.
    pub fn count(&self) -> u64 {
        self.rows.len() as u64 * self.columns as u64
    }
}

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// f32.
    Float,
    /// Signed codes, symmetric, one scale per row (that is, output channel).
    Rows(Bits),
    /// Signed codes, symmetric, one scale.
    Symmetric(Bits),
    /// Unsigned codes with a zero point, one scale.
    Asymmetric(Bits),
}

impl Coding {
    /// How a weight is stored in the graphs of an export.
    pub fn stored(role: WeightRole, options: &Options) -> Self {
        match role {
            // A decomposed norm is float inside.
            WeightRole::Norm if options.dialect.decomposes() => Self::Float,
            _ => Self::of(role, options.stored()),
        }
    }

    /// How a precision codes a weight.
    pub fn of(role: WeightRole, precision: Precision) -> Self {
        match (role, precision) {
            (_, Precision::Fp32) | (WeightRole::Norm, Precision::W8) => Self::Float,
            // A norm's weight as signed 8 bits is rejected by HTP; unsigned is not.
            (WeightRole::Norm, Precision::W8a8) => Self::Asymmetric(Bits::Eight),
            (WeightRole::Norm, Precision::W8a16 | Precision::W16a16) => Self::Asymmetric(Bits::Sixteen),
            (WeightRole::HeadGate, Precision::W8a8) => Self::Rows(Bits::Eight),
            (WeightRole::HeadGate, _) => Self::Symmetric(Bits::Sixteen),
            (WeightRole::Linear, Precision::W16a16) => Self::Rows(Bits::Sixteen),
            (WeightRole::Linear, _) => Self::Rows(Bits::Eight),
        }
    }

    /// Type of the stored elements.
    pub fn element(self) -> ElementType {
        match self {
            Self::Float => ElementType::F32,
            Self::Rows(bits) | Self::Symmetric(bits) => bits.signed(),
            Self::Asymmetric(bits) => bits.unsigned(),
        }
    }

    /// Shape of scale and zero point; `None` where there are none.
    pub fn scale_shape(self, weight: &Weight) -> Option<Vec<usize>> {
        match self {
            Self::Float => None,
            Self::Rows(_) => Some(vec![weight.rows.len()]),
            Self::Symmetric(_) | Self::Asymmetric(_) => Some(Vec::new()),
        }
    }
}

/// A weight on its way into a file: codes come out block by block, scales at the end.
pub struct WeightEncoder<'a> {
    source: TensorView<'a>,
    weight: &'a Weight,
    coding: Coding,
    method: Method,
    /// Of the whole tensor, where the coding has one.
    tensor: Option<Encoding>,
    scales: Vec<f32>,
    zero_rows: usize,
}

/// What is left when all rows are encoded.
#[derive(Clone, Debug, PartialEq)]
pub struct Scales {
    /// Little-endian f32, one per row or one.
    pub scales: Vec<u8>,
    /// Zero points, as many, in the type of the codes.
    pub zero_points: Vec<u8>,
    /// Rows of nothing but zeros, which got a scale all the same.
    pub zero_rows: usize,
}

impl<'a> WeightEncoder<'a> {
    /// Starts a weight. A coding with one scale for all looks at all rows first.
    ///
    /// # Errors
    /// When it does and a weight is NaN or infinite.
    pub fn new(
        source: TensorView<'a>,
        weight: &'a Weight,
        coding: Coding,
        method: Method,
    ) -> Result<Self, NonFinite> {
        let mut this =
            Self { source, weight, coding, method, tensor: None, scales: Vec::new(), zero_rows: 0 };
        // An all-zero tensor has no range; any scale is as good as another then.
        this.tensor = match coding {
            Coding::Float | Coding::Rows(_) => None,
            Coding::Symmetric(bits) => {
                let amax = this.range()?.amax();
                Encoding::signed(amax, bits).or(Encoding::signed(1.0, bits))
            }
            Coding::Asymmetric(bits) => Encoding::asymmetric(this.range()?, bits)
                .or(Encoding::asymmetric(Values::new(0.0, 1.0), bits)),
        };
        Ok(this)
    }

    fn range(&self) -> Result<Values, NonFinite> {
        let mut range = Values::EMPTY;
        let mut row = vec![0.0; self.weight.columns];
        for r in self.weight.rows.clone() {
            self.read(r, &mut row)?;
            range = range.union(Values::of(&row).unwrap_or(Values::EMPTY));
        }
        Ok(range)
    }

    /// A row of the source times the factor.
    fn read(&self, row: usize, out: &mut [f32]) -> Result<(), NonFinite> {
        self.source.decode_row(row, out);
        if amax_bits(out) >= EXPONENT_BITS {
            let column = out.iter().position(|x| !x.is_finite()).unwrap_or(0);
            let count = out.iter().filter(|x| !x.is_finite()).count();
            return Err(NonFinite { count, row, column });
        }
        if self.weight.factor != 1.0 {
            for x in out {
                *x *= self.weight.factor;
            }
        }
        Ok(())
    }

    /// Appends the codes of some rows, counted from the first of the weight; the sums are of the decoded
    /// codes against the source.
    ///
    /// # Errors
    /// When a weight is NaN or infinite.
    pub fn encode(&mut self, rows: Range<usize>, bytes: &mut Vec<u8>) -> Result<ErrorSums, NonFinite> {
        let row_bytes = self.weight.columns * self.coding.element().bytes();
        let start = bytes.len();
        bytes.resize(start + rows.len() * row_bytes, 0);
        let first = self.weight.rows.start + rows.start;
        let encoded: Vec<Result<(f32, ErrorSums), NonFinite>> = bytes[start..]
            .par_chunks_exact_mut(row_bytes)
            .enumerate()
            .map_init(
                || (vec![0.0; self.weight.columns], vec![0i8; self.weight.columns]),
                |(row, codes), (i, out)| {
                    self.read(first + i, row)?;
                    Ok(self.encode_row(row, codes, out))
                },
            )
            .collect();
        let mut sums = ErrorSums::default();
        for row in encoded {
            let (scale, row_sums) = row?;
            sums += row_sums;
            if matches!(self.coding, Coding::Rows(_)) {
                self.zero_rows += usize::from(row_sums.signal == 0.0);
                self.scales.push(scale);
            }
        }
        Ok(sums)
    }

    /// Writes the codes of a row; its scale, and the error sums.
    fn encode_row(&self, row: &[f32], codes: &mut [i8], out: &mut [u8]) -> (f32, ErrorSums) {
        let amax = f32::from_bits(amax_bits(row));
        match (self.coding, self.tensor) {
            (Coding::Rows(Bits::Eight), _) => {
                let scale = int8::row_scale(row, amax, self.method);
                int8::encode_row(row, scale, codes);
                out.copy_from_slice(bytemuck::cast_slice(codes));
                (scale, int8::row_error(row, codes, scale))
            }
            (Coding::Rows(Bits::Sixteen), _) => {
                let encoding = Encoding::signed(amax, Bits::Sixteen).or(Encoding::signed(1.0, Bits::Sixteen));
                encode_on(encoding, row, out)
            }
            (Coding::Symmetric(_) | Coding::Asymmetric(_), tensor) => encode_on(tensor, row, out),
            (Coding::Float, _) => {
                for (out, x) in out.as_chunks_mut::<4>().0.iter_mut().zip(row) {
                    *out = x.to_le_bytes();
                }
                (
                    1.0,
                    ErrorSums { signal: row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum(), noise: 0.0 },
                )
            }
        }
    }

    /// Scales and zero points, when all rows are encoded.
    pub fn finish(self) -> Scales {
        let element = self.coding.element();
        let (scales, zero_points) = match self.tensor {
            Some(encoding) => (vec![encoding.scale], encoding.zero_point_bytes()),
            None => {
                let zeros = vec![0; self.scales.len() * element.bytes()];
                (self.scales, zeros)
            }
        };
        let scales = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        Scales { scales, zero_points, zero_rows: self.zero_rows }
    }
}

/// Codes of a row on a grid, little endian; the scale, and the error sums.
fn encode_on(encoding: Option<Encoding>, row: &[f32], out: &mut [u8]) -> (f32, ErrorSums) {
    let encoding = encoding.expect("a range of 1 has an encoding");
    let Encoding { element, scale, zero_point } = encoding;
    let (low, high) = match element {
        ElementType::I8 => (-127, 127),
        ElementType::I16 => (-32767, 32767),
        ElementType::U8 => (0, 255),
        _ => (0, 65535),
    };
    let mut sums = ErrorSums::default();
    for (x, out) in row.iter().zip(out.chunks_exact_mut(element.bytes())) {
        #[expect(clippy::cast_possible_truncation, reason = "the clamp is within 17 bits")]
        let steps = (f64::from(*x) / f64::from(scale)).round_ties_even().clamp(-1e6, 1e6) as i32;
        let code = (steps + i32::from(zero_point)).clamp(low, high);
        out.copy_from_slice(&code.to_le_bytes()[..element.bytes()]);
        let error = f64::from(*x) - f64::from(code - i32::from(zero_point)) * f64::from(scale);
        sums += ErrorSums { signal: f64::from(*x) * f64::from(*x), noise: error * error };
    }
    (scale, sums)
}

#[cfg(test)]
#[path = "weights_tests.rs"]
mod tests;
