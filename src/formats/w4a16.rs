//! W4A16: 4-bit asymmetric groups in the layout of PyTorch's `_weight_int4pack_mm_for_cpu`.
//!
//! The kernel's packing depends on the vector width of the machine, so the configuration names it;
//! `[out/64, in, 32]` has three dimensions on purpose: a reader of the older row-major form fails on
//! the shape instead of multiplying permuted nibbles. The row-major form is there for that reader.

use serde_json::{Map, Value, json};

use super::int4::{Grid, Storage};
use super::int8::Activations;
use super::{Codec, Format, Gates, Head, Int4, Int8, Options};
use crate::quant::Method;
use crate::spark::Module;

/// Where the codes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Blocks of 64 rows, as PyTorch packs on AVX-512.
    TinygemmAvx512,
    /// Blocks of 32 rows, as PyTorch packs on AVX2.
    TinygemmAvx2,
    /// Two codes a byte along a row; its reader repacks at load.
    RowMajor,
}

impl Layout {
    const ALL: [Self; 3] = [Self::TinygemmAvx512, Self::TinygemmAvx2, Self::RowMajor];

    /// As options and the configuration spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::TinygemmAvx512 => "tinygemm-avx512-n64",
            Self::TinygemmAvx2 => "tinygemm-avx2-n32",
            Self::RowMajor => "row-major",
        }
    }

    fn storage(self) -> Storage {
        match self {
            Self::TinygemmAvx512 => Storage::Blocks(64),
            Self::TinygemmAvx2 => Storage::Blocks(32),
            Self::RowMajor => Storage::RowMajor,
        }
    }
}

/// The W4A16 format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct W4a16 {
    codec: Int4,
    int8_head: Int8,
    layout: Layout,
    head: HeadTensors,
}

/// What the head multiplies by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeadTensors {
    /// Tensors of its own, or the source's.
    Own(Head),
    /// The embedding table, which is quantized itself and stays tied.
    QuantizedEmbedding,
}

impl W4a16 {
    /// Name of the scheme.
    pub const SCHEME: &'static str = "w4a16";

    /// Group sizes that the kernel takes.
    pub const GROUP_SIZES: [usize; 4] = [32, 64, 128, 256];

    /// A blocked or row-major artifact with a head of its own.
    pub fn new(method: Method, group_size: usize, layout: Layout, head: Head) -> Self {
        Self::with_head(method, group_size, layout, HeadTensors::Own(head))
    }

    /// A row-major artifact whose embedding table is quantized and tied to the head.
    pub fn with_quantized_embedding(method: Method, group_size: usize) -> Self {
        Self::with_head(method, group_size, Layout::RowMajor, HeadTensors::QuantizedEmbedding)
    }

    fn with_head(method: Method, group_size: usize, layout: Layout, head: HeadTensors) -> Self {
        let storage = layout.storage();
        let codec = Int4 { scheme: Self::SCHEME, grid: Grid::Affine, storage, method, group_size };
        Self { codec, int8_head: Int8 { method, activations: Activations::Float }, layout, head }
    }

    /// The inverse of [`Format::options`].
    ///
    /// # Errors
    /// The option that this version does not know.
    pub fn from_options(options: &Map<String, Value>) -> Result<Self, String> {
        let mut options = Options::new(options);
        let method = options.text("method", Method::from_name)?;
        let group_size = options.take("group_size", |g| {
            g.as_u64().and_then(|g| Self::GROUP_SIZES.into_iter().find(|known| *known as u64 == g))
        })?;
        let layout =
            options.text("layout", |name| Layout::ALL.into_iter().find(|layout| layout.name() == name))?;
        let row_major = layout == Layout::RowMajor;
        let format = if row_major && options.take("quantize_embedding", Value::as_bool)? {
            Self::with_quantized_embedding(method, group_size)
        } else {
            let head = options.text("head", |name| {
                Head::from_name(name).filter(|head| !(row_major && *head == Head::Int8))
            })?;
            Self::new(method, group_size, layout, head)
        };
        options.finish()?;
        Ok(format)
    }

    fn own_head(&self) -> Option<Head> {
        match self.head {
            HeadTensors::Own(head) => Some(head),
            HeadTensors::QuantizedEmbedding => None,
        }
    }

    fn quantization_config(&self, kept: &[String]) -> Value {
        let mut config = json!({
            "quant_method": "cpu_int4", "version": 1, "bits": 4, "group_size": self.codec.group_size,
            "sym": false, "layout": self.layout.name(), "scale_dtype": "bfloat16",
            "lm_head": self.own_head() != Some(Head::Source), "quantize_embedding": false,
            // The first of these selects the compiled graph, so they have to be here.
            "direct_dequant": true, "prefill_dequant": true, "dequant_threshold": 2,
        });
        let mut ignore: Vec<&str> = Vec::new();
        if self.layout == Layout::RowMajor {
            // That reader knows exact names and dotted suffixes only, calls the table by another name,
            // and takes an untied quantized head beside a plain table for a quantized table that is
            // ignored.
            config["quantize_embedding"] = (self.own_head() != Some(Head::Source)).into();
            ignore.push("g_proj");
            ignore.extend((self.own_head() == Some(Head::Int4)).then_some("model.embed_tokens"));
        } else {
            ignore.extend([super::compressed_tensors::HEAD_GATE, "model.embedding"]);
        }
        ignore.extend(kept.iter().map(String::as_str));
        config["ignore"] = json!(ignore);
        if self.own_head() == Some(Head::Int8) {
            config["lm_head_bits"] = 8.into();
        }
        config
    }
}

impl Format for W4a16 {
    fn scheme(&self) -> &'static str {
        Self::SCHEME
    }

    fn method(&self) -> Method {
        self.codec.method
    }

    fn options(&self) -> Map<String, Value> {
        let mut options = Map::new();
        options.insert("method".to_owned(), self.codec.method.name().into());
        options.insert("group_size".to_owned(), self.codec.group_size.into());
        options.insert("layout".to_owned(), self.layout.name().into());
        if self.layout == Layout::RowMajor {
            options.insert("quantize_embedding".to_owned(), self.own_head().is_none().into());
        }
        if let Some(head) = self.own_head() {
            options.insert("head".to_owned(), head.name().into());
        }
        options
    }

    fn name_suffix(&self) -> String {
        let group_size = self.codec.group_size;
        let group = if group_size == 128 { String::new() } else { format!("-g{group_size}") };
        [
            match self.layout {
                Layout::TinygemmAvx512 => "",
                Layout::TinygemmAvx2 => "-avx2",
                Layout::RowMajor => "-rowmajor",
            },
            &group,
            match self.own_head() {
                Some(Head::Int4) => "",
                Some(Head::Int8) => "-head8",
                Some(Head::Source) => "-head16",
                None => "-embed4",
            },
            self.codec.method.name_suffix(),
        ]
        .concat()
    }

    fn codec(&self, module: Module) -> Option<&dyn Codec> {
        match (module, self.own_head()) {
            (Module::Embedding, None) | (Module::LmHead, Some(Head::Int4)) => Some(&self.codec),
            (Module::LmHead, Some(Head::Int8)) => Some(&self.int8_head),
            (Module::Embedding | Module::LmHead, _) => None,
            (module, _) => module.is_projection().then_some(&self.codec as &dyn Codec),
        }
    }

    fn patch_config(&self, config: &mut Map<String, Value>, kept: &[String]) {
        if matches!(self.own_head(), Some(Head::Int4 | Head::Int8)) {
            config.insert("tie_word_embeddings".to_owned(), false.into());
        }
        config.insert("quantization_config".to_owned(), self.quantization_config(kept));
    }

    fn config_consequence(&self, path: &str) -> &'static str {
        match path.strip_prefix("quantization_config") {
            None if path.starts_with("tie_word_embeddings") => {
                "with the tie on, the head's tensors have no home; off, a loader looks for them"
            }
            None => "the loader builds another model than the weights belong to",
            Some(p) if p.starts_with(".layout") => {
                "the layouts differ in the order of nibbles only: the loader multiplies permuted codes"
            }
            Some(p) if p.starts_with(".direct_dequant") => "another graph is compiled",
            Some(p) if p.starts_with(".ignore") => {
                "the loader looks for codes of modules that are plain, or leaves codes unread"
            }
            Some(p) if p.starts_with(".lm_head") => "the head's tensors are taken for another width, or left",
            Some(_) => "the loader reads other groups or widths than the tensors have",
        }
    }

    fn default_gates(&self) -> Gates {
        Gates { min_weight_snr_db: 12.0, min_snr_db: 10.0, max_kld: 0.15, min_greedy: 0.1, min_actions: 0.4 }
    }
}

#[cfg(test)]
#[path = "w4a16_tests.rs"]
mod tests;
