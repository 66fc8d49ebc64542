//! What an export can be asked for.

use serde_json::{Map, Value};

use super::dialect::Dialect;
use super::encoding::Bits;
use crate::quant::Method;
use crate::spark::LayerType;

/// Types of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// int8 weights, 16-bit activations.
    W8a16,
    /// int8 weights, float activations: what the weights alone cost.
    W8,
    /// 16-bit weights and activations.
    W16a16,
    /// int8 weights, 8-bit activations.
    W8a8,
    /// Everything in f32: the reference twin.
    Fp32,
}

impl Precision {
    const ALL: [Self; 5] = [Self::W8a16, Self::W8, Self::W16a16, Self::W8a8, Self::Fp32];

    /// As options and manifests spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::W8a16 => "w8a16",
            Self::W8 => "w8",
            Self::W16a16 => "w16a16",
            Self::W8a8 => "w8a8",
            Self::Fp32 => "fp32",
        }
    }

    /// The inverse of [`Precision::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.name() == name)
    }

    /// Bits of an activation; `None` where they are floats.
    pub fn activation_bits(self) -> Option<Bits> {
        match self {
            Self::W8a16 | Self::W16a16 => Some(Bits::Sixteen),
            Self::W8a8 => Some(Bits::Eight),
            Self::W8 | Self::Fp32 => None,
        }
    }

    /// Whether weights are int8 codes.
    pub fn has_int8_weights(self) -> bool {
        matches!(self, Self::W8a16 | Self::W8 | Self::W8a8)
    }
}

/// How the step is cut into graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// One graph, `step`.
    Whole,
    /// One graph for every layer, and `head`.
    Layer,
    /// One graph for every four layers, and `head`.
    Block4,
}

impl Split {
    const ALL: [Self; 3] = [Self::Whole, Self::Layer, Self::Block4];

    /// As options spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Layer => "layer",
            Self::Block4 => "block4",
        }
    }

    /// The inverse of [`Split::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.name() == name)
    }
}

/// Who moves a cache on, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheKind {
    /// The graph returns the new entry, the runtime writes it into slot `p mod capacity`.
    RingEntry,
    /// The graph returns the new entry, the runtime writes it into slot `p`, up to the capacity.
    RollEntry,
    /// The graph returns the whole cache moved by one, the newest last.
    RollCache,
}

impl CacheKind {
    /// The word of the manifest for the order of the slots.
    pub fn layout(self) -> &'static str {
        match self {
            Self::RingEntry => "ring",
            Self::RollEntry | Self::RollCache => "roll",
        }
    }

    /// The word of the manifest for what the graph returns.
    pub fn returns(self) -> &'static str {
        match self {
            Self::RingEntry | Self::RollEntry => "entry",
            Self::RollCache => "cache",
        }
    }

    /// The word of `--sliding-cache` and `--full-cache` for it: `roll` is what the layer type rolls by.
    pub fn option(self, layer: LayerType) -> &'static str {
        match (layer, self) {
            (_, Self::RingEntry) => "ring",
            (LayerType::Sliding, _) | (LayerType::Full, Self::RollEntry) => "roll",
            (LayerType::Full, Self::RollCache) => "roll-cache",
        }
    }

    /// The inverse of [`CacheKind::option`]. Sliding layers have no roll/entry, which would end at the
    /// window.
    pub fn from_option(layer: LayerType, word: &str) -> Option<Self> {
        let kinds = match layer {
            LayerType::Sliding => &[Self::RingEntry, Self::RollCache][..],
            LayerType::Full => &[Self::RollEntry, Self::RingEntry, Self::RollCache],
        };
        kinds.iter().copied().find(|kind| kind.option(layer) == word)
    }
}

/// How entries of caches become codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheType {
    /// Signed, zero point 0: the second operand of a product stays 16 bits wide on HTP. The tensor they
    /// come from is re-coded.
    Signed,
    /// Unsigned with zero in the middle, and so is the tensor they come from: nothing is re-coded, which
    /// a converter may not take.
    Symmetric,
}

impl CacheType {
    /// As options and manifests spell it.
    pub fn name(self, bits: Bits) -> &'static str {
        match (self, bits) {
            (Self::Signed, Bits::Sixteen) => "s16",
            (Self::Signed, Bits::Eight) => "s8",
            (Self::Symmetric, Bits::Sixteen) => "u16sym",
            (Self::Symmetric, Bits::Eight) => "u8sym",
        }
    }

    /// What a dialect has unless it is asked for another.
    pub fn default_of(dialect: Dialect) -> Self {
        if dialect == Dialect::Aimet { Self::Symmetric } else { Self::Signed }
    }
}

/// An export, as asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Types of weights and activations; of the aimet dialect those of its encodings.
    pub precision: Precision,
    /// The form of the graphs.
    pub dialect: Dialect,
    /// How scales of int8 weights are chosen.
    pub method: Method,
    /// How the step is cut into graphs.
    pub split: Split,
    /// Tokens visible to a full layer, the current one included; at least 2.
    pub context: usize,
    /// Caches of sliding layers: ring/entry or roll/cache.
    pub sliding_cache: CacheKind,
    /// Caches of full layers: any kind.
    pub full_cache: CacheKind,
    /// Codes of caches, where activations have encodings.
    pub cache_type: CacheType,
    /// Tokens of a prefill graph, at least 2; `None` where there are none.
    pub prefill: Option<usize>,
    /// Whether samples of the inputs are written beside the graphs, for jobs that calibrate again.
    pub samples: bool,
}

/// Context of an export that names none.
pub const DEFAULT_CONTEXT: usize = 1024;

impl Default for Options {
    fn default() -> Self {
        Self {
            precision: Precision::W8a16,
            dialect: Dialect::Qdq23,
            method: Method::Search,
            split: Split::Whole,
            context: DEFAULT_CONTEXT,
            sliding_cache: CacheKind::RingEntry,
            full_cache: CacheKind::RollEntry,
            cache_type: CacheType::Signed,
            prefill: None,
            samples: false,
        }
    }
}

impl Options {
    /// The scheme of the manifest.
    pub const SCHEME: &'static str = "npu";

    /// The kind of cache that layers of a type have.
    pub fn cache(&self, layer: LayerType) -> CacheKind {
        match layer {
            LayerType::Sliding => self.sliding_cache,
            LayerType::Full => self.full_cache,
        }
    }

    /// Types of what the graphs hold: those of the aimet dialect are float, whatever their encodings.
    pub fn stored(&self) -> Precision {
        if self.dialect == Dialect::Aimet { Precision::Fp32 } else { self.precision }
    }

    /// Whether activations are codes in the graphs.
    pub fn is_quantized(&self) -> bool {
        self.stored().activation_bits().is_some()
    }

    /// Whether activations have encodings, in the graphs or beside them.
    pub fn has_encodings(&self) -> bool {
        self.precision.activation_bits().is_some()
    }

    /// Whether texts are run: for encodings, or for samples (whose masks follow from the scores).
    pub fn is_calibrated(&self) -> bool {
        self.has_encodings() || self.samples
    }

    /// The word for the codes of caches, where there are any.
    pub fn cache_type_name(&self) -> Option<&'static str> {
        self.precision.activation_bits().map(|bits| self.cache_type.name(bits))
    }

    /// What the default name says beyond the scheme: everything that is not the default.
    pub fn name_suffix(&self) -> String {
        let default = Self::default();
        let mut suffix = String::new();
        let mut add = |differs: bool, word: String| {
            if differs {
                suffix.push('-');
                suffix += &word;
            }
        };
        add(self.dialect != default.dialect, self.dialect.name().to_owned());
        let implied = self.dialect == Dialect::Float18;
        add(self.precision != default.precision && !implied, self.precision.name().to_owned());
        add(self.method != default.method, self.method.name().to_owned());
        add(self.split != default.split, self.split.name().to_owned());
        add(self.context != default.context, format!("c{}", self.context));
        let sliding = self.sliding_cache.option(LayerType::Sliding);
        add(self.sliding_cache != default.sliding_cache, format!("sliding-{sliding}"));
        let full = self.full_cache.option(LayerType::Full);
        add(self.full_cache != default.full_cache, format!("full-{full}"));
        let cache_type = self.cache_type_name().unwrap_or_default();
        add(self.cache_type != CacheType::default_of(self.dialect), cache_type.to_owned());
        add(self.prefill.is_some(), format!("prefill{}", self.prefill.unwrap_or_default()));
        add(self.samples, "samples".to_owned());
        suffix
    }

    /// The normalised options, for the manifest.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut options = Map::new();
        let mut put = |key: &str, value: Value| options.insert(key.to_owned(), value);
        put("precision", self.precision.name().into());
        put("dialect", self.dialect.name().into());
        if self.precision.has_int8_weights() {
            put("method", self.method.name().into());
        }
        put("split", self.split.name().into());
        put("context", self.context.into());
        put("sliding_cache", self.sliding_cache.option(LayerType::Sliding).into());
        put("full_cache", self.full_cache.option(LayerType::Full).into());
        if let Some(cache_type) = self.cache_type_name() {
            put("cache_type", cache_type.into());
        }
        if let Some(rows) = self.prefill {
            put("prefill", rows.into());
        }
        put("samples", self.samples.into());
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for precision in Precision::ALL {
            assert_eq!(Precision::from_name(precision.name()), Some(precision));
        }
        for split in Split::ALL {
            assert_eq!(Split::from_name(split.name()), Some(split));
        }
        for layer in [LayerType::Sliding, LayerType::Full] {
            for kind in [CacheKind::RingEntry, CacheKind::RollEntry, CacheKind::RollCache] {
                let legal = layer == LayerType::Full || kind != CacheKind::RollEntry;
                let back = CacheKind::from_option(layer, kind.option(layer));
                assert_eq!(back == Some(kind), legal, "{layer:?} {kind:?} {back:?}");
            }
        }
    }

    #[test]
    fn the_default_has_no_suffix_and_every_departure_has_one() {
        assert_eq!(Options::default().name_suffix(), "");
        let other = Options {
            precision: Precision::W16a16,
            dialect: Dialect::Qdq21,
            method: Method::RoundToNearest,
            split: Split::Block4,
            context: 64,
            sliding_cache: CacheKind::RollCache,
            full_cache: CacheKind::RingEntry,
            cache_type: CacheType::Symmetric,
            prefill: Some(128),
            samples: true,
        };
        assert_eq!(
            other.name_suffix(),
            "-qdq21-w16a16-rtn-block4-c64-sliding-roll-full-ring-u16sym-prefill128-samples"
        );
        // What a dialect implies is not said again.
        let float = Options { dialect: Dialect::Float18, precision: Precision::Fp32, ..Options::default() };
        assert_eq!(float.name_suffix(), "-float18");
        let cache_type = CacheType::default_of(Dialect::Aimet);
        let aimet = Options { dialect: Dialect::Aimet, cache_type, ..Options::default() };
        assert_eq!((aimet.name_suffix().as_str(), aimet.stored()), ("-aimet", Precision::Fp32));
        assert!(aimet.has_encodings() && !aimet.is_quantized());
    }
}
