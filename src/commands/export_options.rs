//! Options of `export-npu`: from what was typed to what it means. An option without effect is a usage
//! error.

use crate::cli::{
    CacheTypeArg, DialectArg, ExportNpuArgs, FullCacheArg, MethodArg, PrecisionArg, SlidingCacheArg, SplitArg,
};
use crate::error::{Failure, Result};
use crate::npu::dialect::Dialect;
use crate::npu::encoding::Bits;
use crate::npu::options::{CacheKind, CacheType, Options, Precision, Split};
use crate::quant::Method;
use crate::spark::{LayerType, SparkConfig};

pub(super) fn options(args: &ExportNpuArgs, config: &SparkConfig) -> Result<Options> {
    let dialect = match args.dialect {
        DialectArg::Qdq23 => Dialect::Qdq23,
        DialectArg::Qdq21 => Dialect::Qdq21,
        DialectArg::Float18 => Dialect::Float18,
        DialectArg::Aimet => Dialect::Aimet,
    };
    let precision = precision(args, dialect)?;
    let without_effect = |option: &str, why: &str| {
        Failure::usage(format!("{option} has no effect with --precision {}: {why}", precision.name()))
    };
    if args.method.is_some() && !precision.has_int8_weights() {
        return Err(without_effect("--method", "no weight is int8"));
    }
    if precision.activation_bits().is_none() && !args.dump_calib {
        let floats = "activations are floats, and without --dump-calib no text is read";
        if args.calib.is_some() {
            return Err(without_effect("--calib", floats));
        }
        if args.calib_tokens.is_some() {
            return Err(without_effect("--calib-tokens", floats));
        }
    }
    if args.cache_type.is_some() && precision.activation_bits() != Some(Bits::Sixteen) {
        return Err(without_effect("--cache-type", "caches are not of 16 bits"));
    }
    for (given, option, kind) in [
        (args.sliding_cache.is_some(), "--sliding-cache", LayerType::Sliding),
        (args.full_cache.is_some(), "--full-cache", LayerType::Full),
    ] {
        if given && !config.layer_types.contains(&kind) {
            return Err(Failure::usage(format!(
                "{option} has no effect: the model has no {} layers",
                kind.name()
            )));
        }
    }
    let default = Options::default();
    let whole = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    Ok(Options {
        precision,
        dialect,
        method: match args.method {
            None => default.method,
            Some(MethodArg::Rtn) => Method::RoundToNearest,
            Some(MethodArg::Search) => Method::Search,
        },
        split: match args.split {
            SplitArg::Whole => Split::Whole,
            SplitArg::Layer => Split::Layer,
            SplitArg::Block4 => Split::Block4,
        },
        context: whole(args.context),
        sliding_cache: match args.sliding_cache {
            None => default.sliding_cache,
            Some(SlidingCacheArg::Ring) => CacheKind::RingEntry,
            Some(SlidingCacheArg::Roll) => CacheKind::RollCache,
        },
        full_cache: match args.full_cache {
            None => default.full_cache,
            Some(FullCacheArg::Roll) => CacheKind::RollEntry,
            Some(FullCacheArg::Ring) => CacheKind::RingEntry,
            Some(FullCacheArg::RollCache) => CacheKind::RollCache,
        },
        cache_type: match args.cache_type {
            None => CacheType::default_of(dialect),
            Some(CacheTypeArg::S16) => CacheType::Signed,
            Some(CacheTypeArg::U16sym) => CacheType::Symmetric,
        },
        prefill: args.prefill.map(whole),
        samples: args.dump_calib,
    })
}

/// The precision that was asked for, or that the dialect has without being asked.
fn precision(args: &ExportNpuArgs, dialect: Dialect) -> Result<Precision> {
    let asked = args.precision.map(|precision| match precision {
        PrecisionArg::W8a16 => Precision::W8a16,
        PrecisionArg::W8 => Precision::W8,
        PrecisionArg::W16a16 => Precision::W16a16,
        PrecisionArg::W8a8 => Precision::W8a8,
        PrecisionArg::Fp32 => Precision::Fp32,
    });
    let refused = |precision: Precision, why: &str| {
        let (precision, dialect) = (precision.name(), dialect.name());
        Err(Failure::usage(format!("--precision {precision} has no effect with --dialect {dialect}: {why}")))
    };
    match (dialect, asked) {
        (Dialect::Float18, None) => Ok(Precision::Fp32),
        (Dialect::Float18, Some(other)) if other != Precision::Fp32 => {
            refused(other, "its graphs are fp32 throughout")
        }
        (Dialect::Aimet, Some(float @ (Precision::Fp32 | Precision::W8))) => refused(
            float,
            "activations of that precision have no encodings; float18 is the float graph alone",
        ),
        (_, asked) => Ok(asked.unwrap_or(Options::default().precision)),
    }
}
