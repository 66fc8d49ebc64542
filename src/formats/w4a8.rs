//! W4A8: 4-bit groups for vLLM's CPU kernel, as GPTQ or as compressed-tensors `pack-quantized`.
//!
//! Both packings reach the same kernel, which quantizes activations per token to int8. GPTQ can only
//! say a symmetric grid and one width; zero points and an int8 head take compressed-tensors. The head
//! is the largest matrix of a decode step: by default it is untied from the embedding, which stays in
//! bf16 since only a row of it is looked up, and quantized like everything else.

use serde_json::{Map, Value, json};

use super::int4::{Grid, Signs, Storage};
use super::int8::Activations;
use super::{Codec, Format, Gates, Head, Int4, Int8, Options, Overrides, Width, compressed_tensors as ct};
use crate::quant::Method;
use crate::spark::Module;

/// How 4-bit codes are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// GPTQ version 1.
    Gptq,
    /// compressed-tensors `pack-quantized`.
    CompressedTensors,
}

/// Whether q, k and v are stored as one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkvTensors {
    /// As the source has them, for the published vLLM plugin.
    Fused,
    /// Apart, for a loader that cuts every fused tensor along its first dimension and so would cut
    /// GPTQ's along the input.
    Split,
}

/// The W4A8 format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct W4a8 {
    codec: Int4,
    /// The same in each of [`W4a8::GROUP_SIZES`], of modules in those.
    grouped: [Int4; 3],
    /// Of an int8 head, and of modules in that width.
    int8: Int8,
    head: Head,
    qkv: QkvTensors,
    overrides: Overrides,
}

impl W4a8 {
    /// Name of the scheme.
    pub const SCHEME: &'static str = "w4a8";

    /// Group sizes that vLLM takes; 256 is refused by its GPTQ method.
    pub const GROUP_SIZES: [usize; 3] = [32, 64, 128];

    /// The symmetric grid in GPTQ packing; the head in 4 bits or left alone.
    pub fn gptq(
        method: Method,
        group_size: usize,
        signs: Signs,
        four_bit_head: bool,
        qkv: QkvTensors,
    ) -> Self {
        let head = if four_bit_head { Head::Int4 } else { Head::Source };
        Self::new(Grid::Symmetric(signs), Storage::Gptq, method, group_size, head, qkv)
    }

    /// Zero points or the symmetric grid in compressed-tensors packing. Its symmetric scales are
    /// positive, as the library's own are.
    pub fn compressed_tensors(method: Method, group_size: usize, asymmetric: bool, head: Head) -> Self {
        let grid = if asymmetric { Grid::ZeroPoint } else { Grid::Symmetric(Signs::Positive) };
        Self::new(grid, Storage::PackQuantized, method, group_size, head, QkvTensors::Fused)
    }

    /// Stores some modules in another width; of compressed-tensors packing.
    #[must_use]
    pub fn with_overrides(self, overrides: Overrides) -> Self {
        let overrides = overrides.without(self.width());
        Self { overrides, ..self }
    }

    /// The same in groups of another size, of [`W4a8::GROUP_SIZES`], where modules are not overridden.
    #[must_use]
    pub fn with_group_size(self, group_size: usize) -> Self {
        let overrides = self.overrides.clone();
        Self { codec: Int4 { group_size, ..self.codec }, ..self }.with_overrides(overrides)
    }

    /// The modules in another width.
    pub fn overrides(&self) -> &Overrides {
        &self.overrides
    }

    /// The same with another head; of compressed-tensors packing.
    #[must_use]
    pub fn with_head(self, head: Head) -> Self {
        Self { head, ..self }
    }

    /// What becomes of the head.
    pub fn head(&self) -> Head {
        self.head
    }

    /// What a projection is stored in unless it is overridden, and a 4-bit head.
    pub fn width(&self) -> Width {
        let is_ours = |width: &Width| width.group_size() == Some(self.codec.group_size);
        Width::ALL.into_iter().find(is_ours).unwrap_or(Width::Groups128)
    }

    /// How a matrix is stored in a width; `None` leaves it as the source has it.
    pub fn codec_of(&self, width: Width) -> Option<&dyn Codec> {
        match width {
            Width::Int8 => Some(&self.int8),
            Width::Source => None,
            Width::Groups32 | Width::Groups64 | Width::Groups128 => {
                let codec = self.grouped.iter().find(|codec| Some(codec.group_size) == width.group_size());
                Some(codec.unwrap_or(&self.codec))
            }
        }
    }

    fn new(
        grid: Grid,
        storage: Storage,
        method: Method,
        group_size: usize,
        head: Head,
        qkv: QkvTensors,
    ) -> Self {
        let codec = Int4 { scheme: Self::SCHEME, grid, storage, method, group_size };
        Self {
            codec,
            grouped: Self::GROUP_SIZES.map(|group_size| Int4 { group_size, ..codec }),
            int8: Int8 { method, activations: Activations::Int8 },
            head,
            qkv,
            overrides: Overrides::default(),
        }
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
        let asymmetric = options.take("asymmetric", Value::as_bool)?;
        let head = options.text("head", Head::from_name)?;
        let packing = options.text("packing", |name| match name {
            "gptq" if !asymmetric && head != Head::Int8 => Some(Packing::Gptq),
            "compressed-tensors" => Some(Packing::CompressedTensors),
            _ => None,
        })?;
        let format = match packing {
            Packing::CompressedTensors => {
                let overrides = options.take("overrides", |json| match json {
                    Value::Null => Some(Overrides::default()),
                    json => Overrides::from_json(json).filter(|o| !o.is_empty()),
                })?;
                Self::compressed_tensors(method, group_size, asymmetric, head).with_overrides(overrides)
            }
            Packing::Gptq => {
                let signs = options.take("negative_scales", |both| {
                    both.as_bool().map(|both| if both { Signs::Both } else { Signs::Positive })
                })?;
                let qkv = options.text("qkv", |name| match name {
                    "fused" => Some(QkvTensors::Fused),
                    "split" => Some(QkvTensors::Split),
                    _ => None,
                })?;
                Self::gptq(method, group_size, signs, head == Head::Int4, qkv)
            }
        };
        options.finish()?;
        Ok(format)
    }

    fn packing(&self) -> Packing {
        if self.codec.storage == Storage::Gptq { Packing::Gptq } else { Packing::CompressedTensors }
    }

    /// vLLM finds the quantized linears by substrings of their names. Without the list it looks for
    /// int32 tensors, finds `q_k_v_proj`, then asks for q, k and v, of which the published plugin says
    /// that they make it up, and stops. `q_k_v_proj` itself is there for other readers of GPTQ.
    fn modules(&self) -> Vec<&'static str> {
        let mut modules =
            vec!["q_k_v_proj", "q_proj", "k_proj", "v_proj", "out_proj", "gate_proj", "up_proj", "down_proj"];
        modules.extend((self.head == Head::Int4).then_some("lm_head"));
        modules
    }

    fn gptq_config(&self) -> Value {
        let mut config = json!({
            "quant_method": "gptq",
            "bits": 4,
            "group_size": self.codec.group_size,
            "desc_act": false,
            "sym": true,
            "lm_head": self.head == Head::Int4,
            "checkpoint_format": "gptq",
            "pack_dtype": "int32",
            "meta": {"quantizer": [concat!("spark-convert:", env!("CARGO_PKG_VERSION"))]},
        });
        if self.qkv == QkvTensors::Fused {
            config["modules_in_block_to_quantize"] = json!(self.modules());
        }
        config
    }

    fn compressed_tensors_config(&self) -> Value {
        let symmetric = self.codec.grid != Grid::ZeroPoint;
        let (mut four, mut eight) = (vec!["Linear"], Vec::new());
        let mut ignore = vec![ct::HEAD_GATE];
        match self.head {
            Head::Source => ignore.insert(0, "lm_head"),
            // The head's class in vLLM is not a Linear: only its name reaches it.
            Head::Int4 => four.push("lm_head"),
            Head::Int8 => eight.push("re:.*lm_head$"),
        }
        // A name counts before the class does, so these are not taken for 4-bit ones.
        let [int8, source] = [Width::Int8, Width::Source].map(|width| self.overrides.expressions(width));
        eight.extend(int8.iter().map(String::as_str));
        ignore.extend(source.iter().map(String::as_str));
        let mut groups = vec![ct::int4_group(&four, self.codec.group_size, symmetric)];
        for width in Width::ALL {
            let (Some(size), expressions) = (width.group_size(), self.overrides.expressions(width)) else {
                continue;
            };
            let targets: Vec<&str> = expressions.iter().map(String::as_str).collect();
            groups.extend((!targets.is_empty()).then(|| ct::int4_group(&targets, size, symmetric)));
        }
        let format = if eight.is_empty() { "pack-quantized" } else { "mixed-precision" };
        groups.extend((!eight.is_empty()).then(|| ct::int8_group(&eight)));
        ct::block(format, &ignore, groups)
    }
}

impl Format for W4a8 {
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
        options.insert("asymmetric".to_owned(), (self.codec.grid == Grid::ZeroPoint).into());
        options.insert("head".to_owned(), self.head.name().into());
        match self.packing() {
            Packing::CompressedTensors => {
                options.insert("packing".to_owned(), "compressed-tensors".into());
                if !self.overrides.is_empty() {
                    options.insert("overrides".to_owned(), self.overrides.to_json());
                }
            }
            Packing::Gptq => {
                options.insert("packing".to_owned(), "gptq".into());
                let negative = self.codec.grid == Grid::Symmetric(Signs::Both);
                options.insert("negative_scales".to_owned(), negative.into());
                let qkv = if self.qkv == QkvTensors::Split { "split" } else { "fused" };
                options.insert("qkv".to_owned(), qkv.into());
            }
        }
        options
    }

    fn name_suffix(&self) -> String {
        let asymmetric = self.codec.grid == Grid::ZeroPoint;
        let mixed = !self.overrides.is_empty();
        let implied = asymmetric || mixed || self.head == Head::Int8;
        let group_size = self.codec.group_size;
        let group = if group_size == 128 { String::new() } else { format!("-g{group_size}") };
        [
            if asymmetric { "-asym" } else { "" },
            if self.packing() == Packing::CompressedTensors && !implied { "-ct" } else { "" },
            &group,
            match self.head {
                Head::Int4 => "",
                Head::Int8 => "-head8",
                Head::Source => "-head16",
            },
            if self.qkv == QkvTensors::Split { "-qkv" } else { "" },
            if mixed { "-mixed" } else { "" },
            if self.packing() == Packing::Gptq && self.codec.grid == Grid::Symmetric(Signs::Positive) {
                "-pos"
            } else {
                ""
            },
            self.codec.method.name_suffix(),
        ]
        .concat()
    }

    fn codec(&self, module: Module) -> Option<&dyn Codec> {
        match (module, self.head) {
            (Module::LmHead, Head::Source) => None,
            (Module::LmHead, Head::Int8) => Some(&self.int8),
            (Module::LmHead, Head::Int4) => Some(&self.codec),
            (module, _) => module.is_projection().then_some(&self.codec as &dyn Codec),
        }
    }

    fn codec_at(&self, module: Module, layer: Option<usize>) -> Option<&dyn Codec> {
        match self.overrides.of(module, layer) {
            Some(width) => self.codec_of(width),
            None => self.codec(module),
        }
    }

    fn splits_qkv(&self) -> bool {
        self.qkv == QkvTensors::Split
    }

    fn patch_config(&self, config: &mut Map<String, Value>, _kept: &[String]) {
        if self.head != Head::Source {
            config.insert("tie_word_embeddings".to_owned(), false.into());
        }
        let block = match self.packing() {
            Packing::Gptq => self.gptq_config(),
            Packing::CompressedTensors => self.compressed_tensors_config(),
        };
        config.insert("quantization_config".to_owned(), block);
    }

    /// GPTQ readers other than vLLM look for the block in a file of its own.
    fn further_files(&self, config: &Map<String, Value>) -> Vec<(&'static str, Value)> {
        let block = config.get("quantization_config").filter(|_| self.packing() == Packing::Gptq);
        block.map(|block| ("quantize_config.json", block.clone())).into_iter().collect()
    }

    fn config_consequence(&self, path: &str) -> &'static str {
        if self.packing() == Packing::CompressedTensors {
            return ct::consequence(path);
        }
        match path.strip_prefix("quantization_config") {
            None => ct::consequence(path),
            Some("") => "without the block vLLM takes the model for unquantized and stops at the first code",
            Some(p) if p.starts_with(".quant_method") => "vLLM selects its loader by this key",
            Some(p) if p.starts_with(".modules_in_block_to_quantize") => {
                "vLLM calls a linear unquantized that it does not find there, and stops at its codes"
            }
            Some(p) if p.starts_with(".lm_head") => {
                "the head's tensors have no home: the load stops, or the largest product stays in bf16"
            }
            Some(p) if p.starts_with(".checkpoint_format") => {
                "version 1 stores zero points minus one, version 2 as they are: every weight moves by a step"
            }
            Some(p) if p.starts_with(".desc_act") || p.starts_with(".sym") => "vLLM refuses the model",
            Some(_) => "the loader reads other groups or widths than the tensors have",
        }
    }

    fn default_gates(&self) -> Gates {
        Gates { min_weight_snr_db: 10.0, min_snr_db: 10.0, max_kld: 0.15, min_greedy: 0.1, min_actions: 0.4 }
    }
}

#[cfg(test)]
#[path = "w4a8_tests.rs"]
mod tests;
