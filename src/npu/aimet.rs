//! Encodings beside a float graph, in the form of AIMET 1.0.0: what Qualcomm's converter and AI Hub read
//! to quantize a model with ranges that they have not measured themselves.
//!
//! An offset is that of the unsigned code, with the opposite sign of a zero point: `-zp` of unsigned
//! codes, `-(zp + 2^(bits - 1))` of signed ones. Tensors inside a decomposed norm or GELU have no entry:
//! the converter is to see the pattern as one operator.

use serde_json::{Value, json};

use super::encode::Encodings;
use super::encoding::{Bits, Encoding};
use super::logical::{LogicalGraph, TensorId};
use super::options::Precision;
use super::weights::{Coding, Scales, Weight};
use crate::onnx::ElementType;

const VERSION: &str = "1.0.0";

/// The grid of a weight that the graph has as floats.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightGrid {
    name: String,
    element: ElementType,
    /// One per output channel, or one.
    scales: Vec<f32>,
    per_channel: bool,
    /// The same for all.
    zero_point: u16,
}

impl WeightGrid {
    /// The grid that a coding gave a weight.
    pub fn new(weight: &Weight, coding: Coding, scales: &Scales) -> Self {
        let zero_point = match *scales.zero_points {
            [low, high, ..] if coding.element() == ElementType::U16 => u16::from_le_bytes([low, high]),
            [code, ..] if coding.element() == ElementType::U8 => code.into(),
            // Signed codes are symmetric.
            _ => 0,
        };
        Self {
            name: weight.name.clone(),
            element: coding.element(),
            scales: scales.scales.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            per_channel: matches!(coding, Coding::Rows(_)),
            zero_point,
        }
    }

    fn to_json(&self) -> Value {
        let kind = if self.per_channel { "PER_CHANNEL" } else { "PER_TENSOR" };
        entry(&self.name, kind, self.element, &self.scales, self.zero_point)
    }
}

/// The content of the file beside the model of a graph, whose tensors have these encodings and whose
/// weights these grids.
pub fn encodings(
    graph: &LogicalGraph,
    encodings: &Encodings,
    weights: &[WeightGrid],
    precision: Precision,
) -> Value {
    let activation = |i: usize| {
        let Encoding { element, scale, zero_point } = encodings.of(TensorId(i));
        entry(&graph.tensors[i].name, "PER_TENSOR", element, &[scale], zero_point)
    };
    let width = |bits: Bits| bits.unsigned().bytes() * 8;
    json!({
        "version": VERSION,
        "activation_encodings": (0..graph.tensors.len()).map(activation).collect::<Vec<_>>(),
        "param_encodings": weights.iter().map(WeightGrid::to_json).collect::<Vec<_>>(),
        "quantizer_args": {
            "activation_bitwidth": precision.activation_bits().map(width),
            "dtype": "int",
            "is_symmetric": true,
            "param_bitwidth": if precision.has_int8_weights() { 8 } else { 16 },
            "per_channel_quantization": true,
            "quant_scheme": "post_training_tf",
        },
    })
}

fn entry(name: &str, kind: &str, element: ElementType, scales: &[f32], zero_point: u16) -> Value {
    let bits = element.bytes() * 8;
    let middle = 1i64 << (bits - 1);
    let signed = matches!(element, ElementType::I8 | ElementType::I16);
    let code_of_zero = i64::from(zero_point) + if signed { middle } else { 0 };
    json!({
        "name": name,
        "dtype": "INT",
        "bw": bits,
        "is_sym": code_of_zero == middle,
        "enc_type": kind,
        "scale": scales.iter().map(|s| f64::from(*s)).collect::<Vec<_>>(),
        "offset": vec![-code_of_zero; scales.len()],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::npu::weights::WeightRole;
    use crate::spark::Module;

    fn weight(role: WeightRole) -> Weight {
        let (name, source) = ("w".to_owned(), "s".to_owned());
        Weight { name, source, rows: 0..2, columns: 4, factor: 1.0, role, module: Module::QkvProj }
    }

    /// Section 3.3 of the contract: int8 symmetric is -128, int16 symmetric -32768, unsigned `-zp`.
    #[test]
    fn offsets_are_those_of_unsigned_codes() {
        for (element, zero_point, offset, symmetric) in [
            (ElementType::I8, 0, -128, true),
            (ElementType::I16, 0, -32768, true),
            (ElementType::U16, 32768, -32768, true),
            (ElementType::U16, 0, 0, false),
            (ElementType::U16, 65535, -65535, false),
            (ElementType::U8, 128, -128, true),
        ] {
            let entry = entry("x", "PER_TENSOR", element, &[0.5], zero_point);
            assert_eq!(
                (&entry["offset"], &entry["is_sym"]),
                (&json!([offset]), &json!(symmetric)),
                "{entry}"
            );
            assert_eq!((&entry["scale"], &entry["bw"]), (&json!([0.5]), &json!(8 * element.bytes())));
        }
    }

    #[test]
    fn weights_have_a_scale_per_channel_and_norms_a_zero_point() {
        let scales = |zero_points: Vec<u8>, count: usize| Scales {
            scales: [0.25f32, 2.0][..count].iter().flat_map(|s| s.to_le_bytes()).collect(),
            zero_points,
            zero_rows: 0,
        };
        let linear =
            WeightGrid::new(&weight(WeightRole::Linear), Coding::Rows(Bits::Eight), &scales(vec![0, 0], 2));
        let json = linear.to_json();
        assert_eq!((&json["scale"], &json["offset"]), (&json!([0.25, 2.0]), &json!([-128, -128])));
        assert_eq!((&json["enc_type"], &json["name"]), (&json!("PER_CHANNEL"), &json!("w")));
        let norm = Coding::Asymmetric(Bits::Sixteen);
        let norm = WeightGrid::new(&weight(WeightRole::Norm), norm, &scales(vec![0x34, 0x12], 1)).to_json();
        assert_eq!((&norm["offset"], &norm["is_sym"]), (&json!([-0x1234]), &json!(false)));
        assert_eq!(norm["enc_type"], "PER_TENSOR");
    }
}
