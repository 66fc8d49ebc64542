use clap::Parser;

use super::*;
use crate::cli::{Cli, Command};
use crate::spark::SparkConfig;

const fn w8a8() -> Build {
    Build::W8a8 { int8_head: false }
}

const fn w4a16(layout: Layout, fine: bool) -> Build {
    Build::W4a16 { layout, fine }
}

/// Row by row: target, consumer, priority, sessions, what to make, whether that was measured.
#[test]
fn every_row_of_the_table() {
    use Consumer::{Pytorch, Vllm};
    use Layout::{RowMajor, TinygemmAvx2, TinygemmAvx512};
    use Priority::{Fidelity, Speed};
    use Target::{Arm64, Gpu, Hexagon, X86Amx, X86Avx2, X86Avx512, X86Vnni};
    let rows = [
        // With AMX: GPTQ into the int4 kernel for speed, zero points wherever fidelity counts.
        (X86Amx, Vllm, Speed, 1, Build::W4a8, true),
        (X86Amx, Vllm, Speed, 11, Build::W4a8, true),
        (X86Amx, Vllm, Fidelity, 1, Build::W4a8Asymmetric, false),
        (X86Amx, Vllm, Speed, 12, w8a8(), true),
        (X86Amx, Vllm, Fidelity, 64, w8a8(), true),
        (X86Amx, Pytorch, Speed, 1, w4a16(TinygemmAvx512, false), true),
        (X86Amx, Pytorch, Fidelity, 1, w4a16(TinygemmAvx512, true), false),
        // Without: w8a8 in vLLM, since its 4 bits are slower than bf16 there.
        (X86Vnni, Vllm, Speed, 1, w8a8(), true),
        (X86Vnni, Vllm, Fidelity, 1, w8a8(), true),
        (X86Vnni, Vllm, Fidelity, 64, w8a8(), true),
        (X86Vnni, Pytorch, Speed, 1, w4a16(TinygemmAvx512, false), false),
        (X86Avx512, Vllm, Speed, 1, Build::Source, false),
        (X86Avx512, Pytorch, Fidelity, 1, w4a16(TinygemmAvx512, true), false),
        // AVX2 only: the int8 product saturates and there is no 4-bit kernel, both seen.
        (X86Avx2, Vllm, Speed, 1, Build::Source, true),
        (X86Avx2, Vllm, Fidelity, 1, Build::Source, true),
        (X86Avx2, Pytorch, Speed, 1, w4a16(TinygemmAvx2, false), false),
        // Never verified.
        (Arm64, Vllm, Speed, 1, w4a16(RowMajor, false), false),
        (Arm64, Vllm, Fidelity, 1, w4a16(RowMajor, true), false),
        (Hexagon, Vllm, Speed, 1, Build::Npu, true),
        (Hexagon, Vllm, Fidelity, 1, Build::Npu, true),
        (Gpu, Vllm, Speed, 1, Build::Source, false),
    ];
    for (target, consumer, priority, sessions, build, measured) in rows {
        let choice = choose(target, consumer, priority, sessions);
        let row = format!("{} {} {} {sessions}", target.name(), consumer.name(), priority.name());
        assert_eq!(choice.build, build, "{row}");
        assert_eq!(matches!(choice.evidence, Evidence::Measured(_)), measured, "{row}");
        assert!(Build::candidates(target).contains(&build), "{row}");
    }
}

/// What the plan says to type makes the format whose sizes it states.
#[test]
fn arguments_and_format_are_the_same_build() {
    let config = serde_json::from_str(include_str!("../../fixtures/spark-tiny/config.json")).unwrap();
    let config = SparkConfig::parse(&config).unwrap();
    for target in Target::ALL {
        for build in Build::candidates(target) {
            let Some(arguments) = build.arguments() else {
                assert_eq!(build, Build::Source);
                continue;
            };
            let words = ["spark-convert"].into_iter().chain(arguments.split(' '));
            match (Cli::try_parse_from(words).unwrap().command, build.format()) {
                (Command::Quantize(args), Some(format)) => {
                    let typed = crate::commands::format_of(&args, &config).unwrap();
                    assert_eq!(typed.scheme(), format.scheme(), "{arguments}");
                    assert_eq!(typed.options(), format.options(), "{arguments}");
                }
                (Command::ExportNpu(_), None) => assert_eq!(build, Build::Npu),
                (command, _) => panic!("{arguments}: {command:?}"),
            }
        }
    }
}

/// The figures are those of the README's table: KL mean and same top are its columns 6 and 8.
#[test]
fn measured_figures_are_those_of_the_readme() {
    let readme = include_str!("../../README.md");
    let figures = |name: &str| {
        // The other tables have fewer columns.
        let wide = |line: &&str| line.starts_with('|') && line.split('|').count() > 8;
        let named =
            |line: &&str| line.split('|').nth(1).is_some_and(|cell| cell.trim().replace('*', "") == name);
        let row = readme.lines().filter(wide).find(named);
        let cells: Vec<_> =
            row.unwrap_or_else(|| panic!("no row {name}")).split('|').map(str::trim).collect();
        (cells[6].parse::<f64>().unwrap(), cells[8].trim_end_matches(" %").parse::<f64>().unwrap())
    };
    for (build, name) in [
        (Build::Source, "bf16 arithmetic (the floor)"),
        (w8a8(), "`w8a8`"),
        (Build::W8a8 { int8_head: true }, "`w8a8 --head int8`"),
        (Build::W4a8, "`w4a8`"),
        (Build::W4a8Asymmetric, "`w4a8 --asymmetric --head int8`"),
        (w4a16(Layout::TinygemmAvx512, false), "`w4a16`"),
        (w4a16(Layout::TinygemmAvx2, true), "`w4a16 --group-size 64 --head int8`"),
        (w4a16(Layout::RowMajor, true), "`w4a16 --group-size 64`"),
    ] {
        let fidelity = build.fidelity().unwrap();
        assert_eq!((fidelity.kl_mean, fidelity.same_top_percent), figures(name), "{name}");
    }
}

/// Nothing that is recommended has a warning against it, and what was measured to be wrong has one.
#[test]
fn caveats_are_where_trouble_was_seen() {
    for target in Target::ALL {
        for consumer in [Consumer::Vllm, Consumer::Pytorch] {
            for priority in [Priority::Fidelity, Priority::Speed] {
                let build = choose(target, consumer, priority, 1).build;
                assert_eq!(caveat(target, consumer, build), None, "{} {}", target.name(), consumer.name());
            }
        }
    }
    for int8_head in [false, true] {
        let said = caveat(Target::X86Avx2, Consumer::Vllm, Build::W8a8 { int8_head }).unwrap();
        assert!(matches!(said, Caveat::Broken(text) if text.contains("saturate")), "{said:?}");
    }
    let slow = caveat(Target::X86Vnni, Consumer::Vllm, Build::W4a8).unwrap();
    assert!(matches!(slow, Caveat::Unsuited(text) if text.contains("slower than bf16")), "{slow:?}");
}
