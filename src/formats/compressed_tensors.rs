//! W8A8: compressed-tensors `int-quantized`, as vLLM's CPU backend reads it.
//!
//! Per quantized module `M`: `M.weight` int8 `[out, in]` under the source's name, `M.weight_scale`
//! f32 `[out, 1]`; `w = weight * weight_scale`. No zero point, no input scale (activations are
//! quantized per token at run time), no packing. vLLM allocates the scale as f32 `[out, 1]`, so f32
//! loses nothing, and a one-dimensional scale fails its shape check.

use std::ops::Range;

use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::{Encoder, Format, Gates, Head, OutputTensor, Packed, Problem};
use crate::checkpoint::TensorFiles;
use crate::quant::{ErrorSums, Method, int8};
use crate::spark::Module;
use crate::tensor::{Dtype, EXPONENT_BITS, NonFinite, TensorView, amax_bits};

/// The W8A8 format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct W8a8 {
    /// How scales are chosen.
    pub method: Method,
    /// Whether the head becomes an int8 module of its own.
    pub head: Head,
}

impl W8a8 {
    /// Name of the scheme.
    pub const SCHEME: &'static str = "w8a8";

    /// The inverse of [`Format::options`].
    ///
    /// # Errors
    /// The option that this version does not know.
    pub fn from_options(options: &Map<String, Value>) -> Result<Self, String> {
        let text = |key: &str| options.get(key).and_then(Value::as_str).unwrap_or_default();
        let method = match text("method") {
            "rtn" => Method::RoundToNearest,
            "search" => Method::Search,
            other => return Err(format!("options.method {other:?} is not known to this version")),
        };
        let head = match text("head") {
            "bf16" => Head::Source,
            "int8" => Head::Quantized,
            other => return Err(format!("options.head {other:?} is not known to this version")),
        };
        Ok(Self { method, head })
    }

    fn method_name(&self) -> &'static str {
        match self.method {
            Method::RoundToNearest => "rtn",
            Method::Search => "search",
        }
    }

    fn head_name(&self) -> &'static str {
        match self.head {
            Head::Source => "bf16",
            Head::Quantized => "int8",
        }
    }

    /// The block of config.json. The library's models of `weights` and `input_activations` forbid
    /// unknown keys, so nothing is added to them.
    fn quantization_config(&self) -> Value {
        let (targets, ignore) = match self.head {
            Head::Source => (json!(["Linear"]), json!(["lm_head", "re:.*g_proj$"])),
            // The head's class in vLLM is not a Linear: only its name reaches it.
            Head::Quantized => (json!(["Linear", "lm_head"]), json!(["re:.*g_proj$"])),
        };
        json!({
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "global_compression_ratio": null,
            "kv_cache_scheme": null,
            "version": "0.17.0",
            "ignore": ignore,
            "config_groups": {
                "group_0": {
                    "targets": targets,
                    "format": "int-quantized",
                    "weights": {
                        "num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel",
                        "group_size": null, "block_structure": null, "dynamic": false,
                        "actorder": null, "observer": "minmax", "observer_kwargs": {}
                    },
                    "input_activations": {
                        "num_bits": 8, "type": "int", "symmetric": true, "strategy": "token",
                        "group_size": null, "block_structure": null, "dynamic": true,
                        "actorder": null, "observer": null, "observer_kwargs": {}
                    },
                    "output_activations": null
                }
            }
        })
    }
}

impl Format for W8a8 {
    fn scheme(&self) -> &'static str {
        Self::SCHEME
    }

    fn options(&self) -> Map<String, Value> {
        let mut options = Map::new();
        options.insert("method".to_owned(), self.method_name().into());
        options.insert("head".to_owned(), self.head_name().into());
        options
    }

    fn name_suffix(&self) -> String {
        let method = if self.method == Method::RoundToNearest { "-rtn" } else { "" };
        let head = if self.head == Head::Quantized { "-head8" } else { "" };
        format!("{head}{method}")
    }

    fn head(&self) -> Head {
        self.head
    }

    fn quantizes(&self, module: Module) -> bool {
        module.is_projection()
    }

    fn outputs(&self, module: &str, [out_features, in_features]: [usize; 2]) -> Vec<OutputTensor> {
        vec![
            OutputTensor {
                name: format!("{module}.weight"),
                dtype: Dtype::I8,
                shape: vec![out_features, in_features],
            },
            OutputTensor {
                name: format!("{module}.weight_scale"),
                dtype: Dtype::F32,
                shape: vec![out_features, 1],
            },
        ]
    }

    fn encoder<'a>(&self, source: TensorView<'a>) -> Box<dyn Encoder + 'a> {
        Box::new(Int8Encoder { source, method: self.method, scales: Vec::with_capacity(source.rows() * 4) })
    }

    fn patch_config(&self, config: &mut Map<String, Value>) {
        if self.head == Head::Quantized {
            config.insert("tie_word_embeddings".to_owned(), false.into());
        }
        config.insert("quantization_config".to_owned(), self.quantization_config());
    }

    fn config_consequence(&self, path: &str) -> &'static str {
        let quantization = path.strip_prefix("quantization_config");
        match quantization {
            None if path.starts_with("tie_word_embeddings") => {
                "with the tie on, vLLM drops the head's tensors and multiplies by the embedding; off, it looks for them"
            }
            None => "the loader builds another model than the weights belong to",
            Some("") => "without the block vLLM takes the model for unquantized and stops at the first scale",
            Some(p) if p.starts_with(".quant_method") => "vLLM selects its loader by this key",
            Some(p) if p.starts_with(".ignore") => {
                "the loader looks for codes of g_proj or of the head that are not there, or leaves theirs unread"
            }
            Some(p) if p.contains(".targets") => "modules outside the targets are loaded as unquantized",
            Some(p) if p.contains(".format") => {
                "the loader expects another packing and finds no kernel for these tensors"
            }
            Some(p) if p.contains("strategy") => "vLLM fails the shape check of the scales",
            Some(p) if p.contains(".weights.") || p.contains(".input_activations.") => {
                "compressed-tensors refuses unknown or contradictory arguments; others change the arithmetic"
            }
            Some(_) => "compressed-tensors reads another scheme than the tensors follow",
        }
    }

    fn missing_consequence(&self, tensor: &str) -> &'static str {
        if tensor.ends_with(".weight_scale") {
            "vLLM loads the module without a scale, does not complain, and generates garbage"
        } else {
            "the loader leaves the module at its start values or stops"
        }
    }

    /// Trained checkpoints measure 36.9 to 40.9 dB per module and heavy-tailed matrices 30; a small
    /// trained model measured 38.9 dB, KL 0.0004 and a greedy share of 0.92; random weights 31 dB, 0.004
    /// and 0.48, since they decide little. The bars leave room for models with outliers and catch
    /// anything that is broken.
    fn default_gates(&self) -> Gates {
        Gates { min_weight_snr_db: 25.0, min_snr_db: 20.0, max_kld: 0.05, min_greedy: 0.25 }
    }

    fn read<'a>(
        &self,
        files: &'a TensorFiles,
        module: &str,
        [out_features, in_features]: [usize; 2],
    ) -> Result<Packed<'a>, Vec<Problem>> {
        let mut problems = Vec::new();
        let mut get = |wanted: &OutputTensor, dtypes: &[Dtype]| {
            let problem =
                |what: String, consequence| Problem { tensor: wanted.name.clone(), what, consequence };
            let Some(tensor) = files.get(&wanted.name) else {
                problems.push(problem("missing".to_owned(), self.missing_consequence(&wanted.name)));
                return None;
            };
            if !dtypes.contains(&tensor.dtype) {
                let what = format!("expected {}, found {}", wanted.dtype, tensor.dtype);
                problems.push(problem(what, "vLLM copies it into a parameter of another type"));
                return None;
            }
            if tensor.shape != wanted.shape {
                let what = format!("expected shape {:?}, found {:?}", wanted.shape, tensor.shape);
                problems.push(problem(what, "vLLM fails an assertion in its parameter loader"));
                return None;
            }
            Some(tensor)
        };
        let outputs = self.outputs(module, [out_features, in_features]);
        let weight = get(&outputs[0], &[Dtype::I8]);
        // bf16 scales load as well, widened; this tool writes f32.
        let scale = get(&outputs[1], &[Dtype::F32, Dtype::BF16]);
        let (Some(weight), Some(scale)) = (weight, scale) else { return Err(problems) };
        let mut scales = vec![0.0; out_features];
        crate::tensor::widen(scale.dtype, scale.bytes, &mut scales);
        if let Some(row) = scales.iter().position(|s| !s.is_finite() || *s <= 0.0) {
            problems.push(Problem {
                tensor: scale.name.to_owned(),
                what: format!("row {row}: expected a finite scale above zero, found {}", scales[row]),
                consequence: "the row's outputs are NaN, infinite, zero or of the wrong sign",
            });
            return Err(problems);
        }
        let codes: &[i8] = bytemuck_codes(weight.bytes);
        if let Some(at) = codes.iter().position(|c| *c == i8::MIN) {
            problems.push(Problem {
                tensor: weight.name.to_owned(),
                what: format!("row {}: code -128, outside -127..=127", at / in_features),
                consequence: "kernels that negate codes overflow",
            });
            return Err(problems);
        }
        Ok(Packed::Int8(Int8Matrix { in_features, codes, scales }))
    }
}

/// Reinterprets bytes as codes; both have size and alignment one.
fn bytemuck_codes(bytes: &[u8]) -> &[i8] {
    bytemuck::cast_slice(bytes)
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
}

impl<'a> Int8Matrix<'a> {
    /// The codes of a row.
    pub fn row_codes(&self, row: usize) -> &'a [i8] {
        &self.codes[row * self.in_features..(row + 1) * self.in_features]
    }
}

struct Int8Encoder<'a> {
    source: TensorView<'a>,
    method: Method,
    /// The scales of the rows encoded so far, as they are written.
    scales: Vec<u8>,
}

impl Encoder for Int8Encoder<'_> {
    fn encode(&mut self, rows: Range<usize>, bytes: &mut Vec<u8>) -> Result<ErrorSums, NonFinite> {
        let (source, method) = (self.source, self.method);
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
                    let scale = int8::row_scale(weights, f32::from_bits(amax), method);
                    int8::encode_row(weights, scale, codes);
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
            self.scales.extend(scale.to_le_bytes());
            sums += error;
        }
        Ok(sums)
    }

    fn finish(self: Box<Self>) -> Vec<Vec<u8>> {
        vec![self.scales]
    }
}

#[cfg(test)]
#[path = "compressed_tensors_tests.rs"]
mod tests;
