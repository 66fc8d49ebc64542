//! What the scheme and its options mean: a format, or a word on what has no effect.

use crate::cli::{HeadArg, LayoutArg, PackingArg, QkvArg, QuantizeArgs, QuantizeMethodArg, SchemeArg};
use crate::error::{Failure, Result};
use crate::formats::{Format, Head, Layout, Overrides, QkvTensors, Signs, W4a8, W4a16, W8a8};
use crate::quant::Method;
use crate::sensitivity::Fixed;
use crate::spark::SparkConfig;

/// The format that the arguments ask for.
///
/// # Errors
/// An option that would have no effect, or options that contradict each other.
pub(crate) fn format(args: &QuantizeArgs, config: &SparkConfig) -> Result<Box<dyn Format>> {
    let method = method(args)?;
    Ok(match args.scheme {
        SchemeArg::W8a8 => Box::new(w8a8(args, method)?),
        SchemeArg::W4a8 => Box::new(w4a8(args, method, config)?),
        SchemeArg::W4a16 => Box::new(w4a16(args, method)?),
    })
}

/// With `--target-bytes`: the builds to start from, the smallest first, and what the other options decide.
///
/// # Errors
/// As [`format`]; and a scheme whose consumer knows one width only.
pub(crate) fn to_choose(args: &QuantizeArgs, config: &SparkConfig) -> Result<(Vec<W4a8>, Fixed)> {
    let method = method(args)?;
    match args.scheme {
        SchemeArg::W4a8 => {}
        SchemeArg::W8a8 => w8a8(args, method).map(drop)?,
        SchemeArg::W4a16 => w4a16(args, method).map(drop)?,
    }
    let (build, overrides) = (w4a8(args, method, config)?, overrides(args, config)?);
    let of_size = |size| build.clone().with_group_size(size).with_overrides(overrides.clone());
    let builds = match args.group_size {
        Some(_) => vec![build],
        None => W4a8::GROUP_SIZES.into_iter().rev().map(of_size).collect(),
    };
    Ok((builds, Fixed { group_size: args.group_size.is_some(), head: args.head.is_some(), overrides }))
}

fn method(args: &QuantizeArgs) -> Result<Method> {
    let method = match args.method {
        QuantizeMethodArg::Rtn => Method::RoundToNearest,
        QuantizeMethodArg::Search => Method::Search,
        QuantizeMethodArg::Gptq => Method::Gptq,
    };
    if method != Method::Gptq && !args.smooth && args.target_bytes.is_none() {
        refuse(args.calib.is_some(), "--calib: goes with --method gptq, --smooth or --target-bytes")?;
        refuse(
            args.calib_tokens.is_some(),
            "--calib-tokens: goes with --method gptq, --smooth or --target-bytes",
        )?;
    }
    if args.imatrix.is_some() {
        let calibrated = args.calib.is_some() || args.calib_tokens.is_some();
        refuse(
            calibrated,
            "--imatrix: says how much inputs count, and so does --calib; leave one of them out",
        )?;
        refuse(args.smooth, "--imatrix: was measured on inputs that --smooth would change")?;
        refuse(method == Method::RoundToNearest, "--imatrix: --method rtn searches nothing")?;
        refuse(method == Method::Gptq, "--imatrix: --method gptq measures the inputs itself, with --calib")?;
        refuse(
            matches!(args.scheme, SchemeArg::W8a8),
            "--imatrix: has no effect with w8a8, whose scales are of whole rows",
        )?;
    }
    Ok(method)
}

fn w8a8(args: &QuantizeArgs, method: Method) -> Result<W8a8> {
    refuse(args.group_size.is_some(), "--group-size: w8a8 has a scale per row")?;
    refuse_w4a8_options(args, "w8a8")?;
    refuse_w4a16_options(args, "w8a8")?;
    match args.head {
        None | Some(HeadArg::Bf16) => Ok(W8a8::new(method, false)),
        Some(HeadArg::Int8) => Ok(W8a8::new(method, true)),
        Some(HeadArg::Int4) => Err(Failure::usage("--head 4bit: w8a8 takes bf16 or int8")),
    }
}

fn w4a8(args: &QuantizeArgs, method: Method, config: &SparkConfig) -> Result<W4a8> {
    refuse_w4a16_options(args, "w4a8")?;
    let group_size = group_size(args, &W4a8::GROUP_SIZES, "vLLM")?;
    let head = head(args);
    let needs_compressed_tensors = [
        (args.asymmetric, "--asymmetric"),
        (head == Head::Int8, "--head int8"),
        (!args.overrides.is_empty(), "--override"),
        (args.target_bytes.is_some(), "--target-bytes"),
    ];
    let reason = needs_compressed_tensors.into_iter().find(|(needed, _)| *needed).map(|(_, option)| option);
    let packing = match (args.packing, reason) {
        (Some(PackingArg::Gptq), Some(reason)) => {
            return Err(Failure::usage(format!(
                "--packing gptq: GPTQ cannot say {reason}; leave one of them out"
            )));
        }
        (Some(packing), _) => packing,
        (None, Some(_)) => PackingArg::CompressedTensors,
        (None, None) => PackingArg::Gptq,
    };
    match packing {
        PackingArg::Gptq => {
            let signs = if args.no_negative_scales { Signs::Positive } else { Signs::Both };
            let qkv = match args.qkv {
                Some(QkvArg::Split) => QkvTensors::Split,
                _ => QkvTensors::Fused,
            };
            refuse(
                args.no_negative_scales && method == Method::RoundToNearest,
                "--no-negative-scales: --method rtn makes none",
            )?;
            Ok(W4a8::gptq(method, group_size, signs, head == Head::Int4, qkv))
        }
        PackingArg::CompressedTensors => {
            refuse(args.qkv.is_some(), "--qkv: compressed-tensors packing keeps q, k and v fused")?;
            refuse(args.no_negative_scales, "--no-negative-scales: compressed-tensors packing has none")?;
            let format = W4a8::compressed_tensors(method, group_size, args.asymmetric, head)
                .with_overrides(overrides(args, config)?);
            refuse(
                !args.overrides.is_empty() && format.overrides().is_empty() && args.target_bytes.is_none(),
                &format!("--override: every module is in groups of {group_size} anyhow"),
            )?;
            Ok(format)
        }
    }
}

fn overrides(args: &QuantizeArgs, config: &SparkConfig) -> Result<Overrides> {
    Overrides::resolve(&args.overrides, config).map_err(|why| Failure::usage(format!("--override {why}")))
}

fn w4a16(args: &QuantizeArgs, method: Method) -> Result<W4a16> {
    refuse_w4a8_options(args, "w4a16")?;
    let group_size = group_size(args, &W4a16::GROUP_SIZES, "the kernel")?;
    let layout = match args.layout {
        None | Some(LayoutArg::TinygemmAvx512) => Layout::TinygemmAvx512,
        Some(LayoutArg::TinygemmAvx2) => Layout::TinygemmAvx2,
        Some(LayoutArg::RowMajor) => Layout::RowMajor,
    };
    if args.quantize_embedding {
        refuse(layout != Layout::RowMajor, "--quantize-embedding: goes with --layout row-major only")?;
        refuse(args.head.is_some(), "--head: with --quantize-embedding the head is the embedding")?;
        refuse(
            method == Method::Gptq,
            "--method gptq: with --quantize-embedding the head's matrix is looked up, too, and no inputs say \
             how to round that",
        )?;
        return Ok(W4a16::with_quantized_embedding(method, group_size));
    }
    let head = head(args);
    refuse(
        layout == Layout::RowMajor && head == Head::Int8,
        "--head int8: the reader of the row-major layout knows no int8 head",
    )?;
    Ok(W4a16::new(method, group_size, layout, head))
}

fn head(args: &QuantizeArgs) -> Head {
    match args.head {
        None | Some(HeadArg::Int4) => Head::Int4,
        Some(HeadArg::Int8) => Head::Int8,
        Some(HeadArg::Bf16) => {
            tracing::warn!(
                "--head bf16: the head is the largest matrix that every token reads, and stays four times as large \
                 as in 4 bits; --head int8 costs little fidelity"
            );
            Head::Source
        }
    }
}

fn group_size(args: &QuantizeArgs, known: &[usize], who: &str) -> Result<usize> {
    let asked = args.group_size.map_or(128, usize::from);
    if known.contains(&asked) {
        return Ok(asked);
    }
    let known: Vec<_> = known.iter().map(ToString::to_string).collect();
    Err(Failure::usage(format!("--group-size {asked}: {who} takes {}", known.join(", "))))
}

fn refuse_w4a8_options(args: &QuantizeArgs, scheme: &str) -> Result<()> {
    for (given, option) in [
        (args.asymmetric, "--asymmetric"),
        (args.packing.is_some(), "--packing"),
        (!args.overrides.is_empty(), "--override"),
        (args.target_bytes.is_some(), "--target-bytes"),
        (args.qkv.is_some(), "--qkv"),
        (args.no_negative_scales, "--no-negative-scales"),
    ] {
        let why = match option {
            "--override" | "--target-bytes" => ", whose consumers know one width for all projections",
            _ => "",
        };
        refuse(given, &format!("{option}: has no effect with {scheme}{why}"))?;
    }
    Ok(())
}

fn refuse_w4a16_options(args: &QuantizeArgs, scheme: &str) -> Result<()> {
    for (given, option) in
        [(args.layout.is_some(), "--layout"), (args.quantize_embedding, "--quantize-embedding")]
    {
        refuse(given, &format!("{option}: has no effect with {scheme}"))?;
    }
    Ok(())
}

fn refuse(when: bool, why: &str) -> Result<()> {
    if when { Err(Failure::usage(why.to_owned())) } else { Ok(()) }
}
