//! W8A8: compressed-tensors `int-quantized`, as vLLM's CPU backend reads it.
//!
//! Every projection is stored by the [`Int8`] codec, with activations quantized per token at run time.

use serde_json::{Map, Value};

use super::int8::Activations;
use super::{Codec, Format, Gates, Head, Int8, Options, compressed_tensors as ct};
use crate::quant::Method;
use crate::spark::Module;

/// The W8A8 format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct W8a8 {
    codec: Int8,
    head: Head,
}

impl W8a8 {
    /// Name of the scheme.
    pub const SCHEME: &'static str = "w8a8";

    /// `int8_head` makes the head an int8 module of its own.
    pub fn new(method: Method, int8_head: bool) -> Self {
        let head = if int8_head { Head::Int8 } else { Head::Source };
        Self { codec: Int8 { method, activations: Activations::Int8 }, head }
    }

    /// The inverse of [`Format::options`].
    ///
    /// # Errors
    /// The option that this version does not know.
    pub fn from_options(options: &Map<String, Value>) -> Result<Self, String> {
        let mut options = Options::new(options);
        let method = options.text("method", Method::from_name)?;
        let head = options.text("head", |name| Head::from_name(name).filter(|h| *h != Head::Int4))?;
        options.finish()?;
        Ok(Self::new(method, head == Head::Int8))
    }

    fn quantization_config(&self) -> Value {
        let (targets, ignore) = match self.head {
            // The head's class in vLLM is not a Linear: only its name reaches it.
            Head::Int8 => (["Linear", "lm_head"].as_slice(), [ct::HEAD_GATE].as_slice()),
            _ => (["Linear"].as_slice(), ["lm_head", ct::HEAD_GATE].as_slice()),
        };
        ct::block("int-quantized", ignore, vec![ct::int8_group(targets)])
    }
}

impl Format for W8a8 {
    fn scheme(&self) -> &'static str {
        Self::SCHEME
    }

    fn method(&self) -> Method {
        self.codec.method
    }

    fn options(&self) -> Map<String, Value> {
        let mut options = Map::new();
        options.insert("method".to_owned(), self.codec.method.name().into());
        options.insert("head".to_owned(), self.head.name().into());
        options
    }

    fn name_suffix(&self) -> String {
        let method = self.codec.method.name_suffix();
        let head = if self.head == Head::Int8 { "-head8" } else { "" };
        format!("{head}{method}")
    }

    fn codec(&self, module: Module) -> Option<&dyn Codec> {
        let quantized = match module {
            Module::LmHead => self.head == Head::Int8,
            module => module.is_projection(),
        };
        quantized.then_some(&self.codec)
    }

    fn patch_config(&self, config: &mut Map<String, Value>, _kept: &[String]) {
        if self.head == Head::Int8 {
            config.insert("tie_word_embeddings".to_owned(), false.into());
        }
        config.insert("quantization_config".to_owned(), self.quantization_config());
    }

    fn config_consequence(&self, path: &str) -> &'static str {
        ct::consequence(path)
    }

    /// Trained checkpoints measure 36.9 to 40.9 dB per module and heavy-tailed matrices 30; a small
    /// trained model measured 38.9 dB, KL 0.0004 and a greedy share of 0.92; random weights 31 dB, 0.004
    /// and 0.48, since they decide little. The bars leave room for models with outliers and catch
    /// anything that is broken.
    fn default_gates(&self) -> Gates {
        Gates { min_weight_snr_db: 25.0, min_snr_db: 20.0, max_kld: 0.05, min_greedy: 0.25, min_actions: 0.6 }
    }
}

#[cfg(test)]
#[path = "w8a8_tests.rs"]
mod tests;
