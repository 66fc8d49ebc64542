//! The table of what to make for which machine, and how each row is known.
//!
//! Rows come from measurements: on a Xeon 8480C with AMX and on a Galaxy S25 (published with the edge
//! work on this model), and on two-core machines with AVX-512 and with AVX2, where vLLM's CPU build was
//! run on artifacts of this tool. A row that nobody has measured says so.

use super::{Consumer, Priority, Target};
use crate::formats::{Format, Head, Layout, QkvTensors, Signs, W4a8, W4a16, W8a8};
use crate::quant::Method;

/// Sessions at once from which on int8 weights are faster than 4-bit ones on AMX.
pub const MANY_SESSIONS: u32 = 12;

/// Something that a checkpoint can become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    /// The checkpoint as it is.
    Source,
    /// Int8 rows; the head as it is, or int8 as well.
    W8a8 {
        /// Whether the head is int8.
        int8_head: bool,
    },
    /// 4-bit symmetric groups in GPTQ packing.
    W4a8,
    /// 4-bit groups with zero points, and an int8 head.
    W4a8Asymmetric,
    /// 4-bit groups with float scales and zeros.
    W4a16 {
        /// Where the codes lie.
        layout: Layout,
        /// Groups of 64 and, where the layout's readers know one, an int8 head: the most fidelity that
        /// 4 bits buy.
        fine: bool,
    },
    /// ONNX graphs with int8 weights and 16-bit activations.
    Npu,
}

/// What `verify` measured of a build on the bundled checkpoint, against f32.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Fidelity {
    /// Mean divergence of the next token's distribution, in nats.
    pub kl_mean: f64,
    /// Positions with the same most likely token, in per cent.
    pub same_top_percent: f64,
}

impl Build {
    /// Everything that is worth weighing on a machine, the largest first.
    pub fn candidates(target: Target) -> Vec<Self> {
        let layout = layout(target);
        vec![
            Self::Source,
            Self::W8a8 { int8_head: false },
            Self::W8a8 { int8_head: true },
            Self::W4a16 { layout, fine: true },
            Self::W4a16 { layout, fine: false },
            Self::W4a8Asymmetric,
            Self::W4a8,
            Self::Npu,
        ]
    }

    /// The arguments of `spark-convert` that make it, without the model; `None` for the checkpoint itself.
    pub fn arguments(self) -> Option<String> {
        Some(match self {
            Self::Source => return None,
            Self::W8a8 { int8_head: false } => "quantize --scheme w8a8".to_owned(),
            Self::W8a8 { int8_head: true } => "quantize --scheme w8a8 --head int8".to_owned(),
            Self::W4a8 => "quantize --scheme w4a8".to_owned(),
            Self::W4a8Asymmetric => "quantize --scheme w4a8 --asymmetric --head int8".to_owned(),
            Self::W4a16 { layout, fine } => {
                let mut text = "quantize --scheme w4a16".to_owned();
                if layout != Layout::TinygemmAvx512 {
                    text += &format!(" --layout {}", layout.name());
                }
                if fine {
                    text += " --group-size 64";
                }
                if fine && layout != Layout::RowMajor {
                    text += " --head int8";
                }
                text
            }
            Self::Npu => "export-npu".to_owned(),
        })
    }

    /// The format of a quantized artifact.
    pub fn format(self) -> Option<Box<dyn Format>> {
        let method = Method::Search;
        Some(match self {
            Self::Source | Self::Npu => return None,
            Self::W8a8 { int8_head } => Box::new(W8a8::new(method, int8_head)),
            Self::W4a8 => Box::new(W4a8::gptq(method, 128, Signs::Both, true, QkvTensors::Fused)),
            Self::W4a8Asymmetric => Box::new(W4a8::compressed_tensors(method, 128, true, Head::Int8)),
            Self::W4a16 { layout, fine } => {
                let head = if fine && layout != Layout::RowMajor { Head::Int8 } else { Head::Int4 };
                Box::new(W4a16::new(method, if fine { 64 } else { 128 }, layout, head))
            }
        })
    }

    /// What was measured of it on the bundled checkpoint; the README has the whole table.
    pub fn fidelity(self) -> Option<Fidelity> {
        let measured = |kl_mean, same_top_percent| Some(Fidelity { kl_mean, same_top_percent });
        match self {
            // bf16 arithmetic on the same weights: the floor.
            Self::Source => measured(0.00009, 99.4),
            Self::W8a8 { int8_head: false } => measured(0.00095, 98.4),
            Self::W8a8 { int8_head: true } => measured(0.00108, 98.4),
            Self::W4a8 => measured(0.0404, 89.5),
            Self::W4a8Asymmetric => measured(0.0299, 90.0),
            // Where the codes lie changes no number.
            Self::W4a16 { fine: false, .. } => measured(0.0350, 89.5),
            Self::W4a16 { fine: true, layout: Layout::RowMajor } => measured(0.0281, 90.9),
            Self::W4a16 { fine: true, .. } => measured(0.0208, 92.4),
            Self::Npu => None,
        }
    }

    /// What was seen of it at work as an agent that operates a phone.
    pub fn agents(self) -> Option<&'static str> {
        match self {
            Self::W4a8 => Some(
                "measured on the 1.7B as a phone agent: it navigates, and undid the finished task in two runs of two",
            ),
            Self::W4a16 { .. } => {
                Some("measured on the 1.7B as a phone agent: it navigates and finished the task")
            }
            _ => None,
        }
    }
}

/// How a row of the table is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// It was measured: what and where.
    Measured(&'static str),
    /// It was not: what is known instead.
    NotMeasured(&'static str),
}

/// What to make, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// What to make.
    pub build: Build,
    /// Why.
    pub reason: &'static str,
    /// How that is known.
    pub evidence: Evidence,
}

/// The row for a machine. `consumer` matters where [`Target::has_consumers`].
pub fn choose(target: Target, consumer: Consumer, priority: Priority, sessions: u32) -> Choice {
    use Evidence::{Measured, NotMeasured};
    let row = |build, reason, evidence| Choice { build, reason, evidence };
    let layout = layout(target);
    let fine = priority == Priority::Fidelity;
    match (target, consumer) {
        (Target::X86Amx, Consumer::Vllm) if sessions >= MANY_SESSIONS => row(
            Build::W8a8 { int8_head: false },
            "many sessions share the reading of the weights, and int8 products are then faster than 4-bit ones",
            Measured(
                "Xeon 8480C: 1.13 times the tokens of llama.cpp at 16 sessions, 1.72 times at 64; below 12 four bits win",
            ),
        ),
        (Target::X86Amx, Consumer::Vllm) if fine => row(
            Build::W4a8Asymmetric,
            "the same kernel as w4a8 with zero points and a finer head: the most fidelity of the forms that vLLM \
             runs with int8 activations",
            NotMeasured(
                "vLLM loads and runs it; its speed on AMX was not measured (w4a8 on the same kernel: 86.6 tokens/s), \
                 nor was it tried as an agent",
            ),
        ),
        (Target::X86Amx, Consumer::Vllm) => row(
            Build::W4a8,
            "vLLM multiplies 4-bit codes by int8 activations in AMX tiles",
            Measured("Xeon 8480C: 86.6 tokens/s; bf16 41.0, llama.cpp Q4_K_M 90.0"),
        ),
        (Target::X86Vnni, Consumer::Vllm) => row(
            Build::W8a8 { int8_head: false },
            "without AMX vLLM runs 4-bit weights with bf16 activations, more slowly than bf16 itself: there four bits \
             save memory, not time",
            Measured(
                "two cores with AVX-512 and VNNI, decoded tokens per CPU second: bf16 48.7, w8a8 58.5, 4-bit GPTQ 26.5; \
                 prefill 1004, 1624, 460",
            ),
        ),
        (Target::X86Avx512, Consumer::Vllm) => row(
            Build::Source,
            "without VNNI an int8 product is made of 16-bit sums that can saturate, and 4-bit weights decode more \
             slowly than bf16",
            NotMeasured(
                "saturation was measured on AVX2, not on AVX-512 without VNNI; try w8a8 against bf16 before use",
            ),
        ),
        (Target::X86Avx2, Consumer::Vllm) => row(
            Build::Source,
            "vLLM's int8 product saturates there, and its build for AVX2 has no kernel for 4-bit weights: they load \
             and stop at the first token",
            Measured("two cores with AVX2: 11 to 16 % relative error of int8 products of full-range codes"),
        ),
        (Target::X86Amx, Consumer::Pytorch) if !fine => row(
            Build::W4a16 { layout, fine },
            "the kernel multiplies the stored blocks as they are, with bf16 activations",
            Measured("Xeon 8480C: 80.0 tokens/s; bf16 41.0"),
        ),
        (Target::X86Amx, Consumer::Pytorch) => row(
            Build::W4a16 { layout, fine },
            "bf16 activations lose nothing, and smaller groups with an int8 head keep the most of the weights",
            NotMeasured(
                "in groups of 128 with a 4-bit head: 80.0 tokens/s on a Xeon 8480C; this form was not timed",
            ),
        ),
        (Target::X86Vnni | Target::X86Avx512 | Target::X86Avx2, Consumer::Pytorch) => row(
            Build::W4a16 { layout, fine },
            "the only form that PyTorch's 4-bit kernel reads; bf16 activations lose nothing",
            NotMeasured("the kernel was run here for its numbers; its speed without AMX was not measured"),
        ),
        (Target::Arm64, _) => row(
            Build::W4a16 { layout, fine },
            "bf16 activations need no int8 instruction; the kernel and its packing differ there, so the reader repacks",
            NotMeasured("nothing was run on arm64"),
        ),
        (Target::Hexagon, _) => row(
            Build::Npu,
            "int8 weights and 16-bit activations compile to integer operations only; 4-bit weights do not convert \
             and are not faster",
            Measured("Galaxy S25: 36.9 dB against f32 with w8a16, 5.1 dB with w8a8"),
        ),
        (Target::Gpu, _) => row(
            Build::Source,
            "graphics cards run the checkpoint as it is; builds for them are not what this tool makes",
            NotMeasured("nothing was run on a graphics card"),
        ),
    }
}

/// What a build meets on a machine that is not for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caveat {
    /// It loads, and what comes out is wrong or nothing.
    Broken(&'static str),
    /// It is not read there, or has no advantage.
    Unsuited(&'static str),
}

impl Caveat {
    /// What is to be known.
    pub fn text(self) -> &'static str {
        match self {
            Self::Broken(text) | Self::Unsuited(text) => text,
        }
    }
}

/// What a build meets on a machine, where that is known to be trouble.
pub fn caveat(target: Target, consumer: Consumer, build: Build) -> Option<Caveat> {
    use Caveat::{Broken, Unsuited};
    match target {
        Target::Hexagon => (build != Build::Npu).then_some(Unsuited("not for an NPU")),
        Target::Gpu => (build != Build::Source).then_some(Unsuited("not for a graphics card")),
        _ if build == Build::Npu => Some(Unsuited("for NPUs")),
        Target::Arm64 => match build {
            Build::W8a8 { .. } | Build::W4a8 | Build::W4a8Asymmetric => {
                Some(Unsuited("nothing was run on arm64"))
            }
            _ => None,
        },
        _ => on_x86(target, consumer, build)
            .map(|(broken, text)| if broken { Broken(text) } else { Unsuited(text) }),
    }
}

/// The same on x86-64, where it depends on who reads it: whether it is broken there, and a word on it.
fn on_x86(target: Target, consumer: Consumer, build: Build) -> Option<(bool, &'static str)> {
    let for_vllm = matches!(build, Build::W8a8 { .. } | Build::W4a8 | Build::W4a8Asymmetric);
    match (consumer, target, build) {
        (Consumer::Pytorch, ..) if for_vllm => Some((false, "read by vLLM, not by PyTorch's kernel")),
        (Consumer::Vllm, _, Build::W4a16 { .. }) => Some((false, "not read by vLLM: for PyTorch's kernel")),
        (Consumer::Vllm, Target::X86Avx2, Build::W8a8 { .. }) => {
            Some((true, "do not serve: int8 products saturate in vLLM, 11 to 16 % relative error measured"))
        }
        (Consumer::Vllm, Target::X86Avx2, Build::W4a8 | Build::W4a8Asymmetric) => Some((
            true,
            "do not serve: it loads in vLLM and stops at the first token, for which there is no kernel",
        )),
        (Consumer::Vllm, Target::X86Avx512, Build::W8a8 { .. }) => {
            Some((false, "int8 products may saturate without VNNI: not measured"))
        }
        (Consumer::Vllm, Target::X86Vnni | Target::X86Avx512, Build::W4a8 | Build::W4a8Asymmetric) => Some((
            false,
            "slower than bf16 in vLLM without AMX (decode 1.8 times, prefill 2.2 times, measured)",
        )),
        _ => None,
    }
}

/// The packing of PyTorch's kernel on a machine.
fn layout(target: Target) -> Layout {
    match target {
        Target::X86Avx2 => Layout::TinygemmAvx2,
        Target::Arm64 => Layout::RowMajor,
        _ => Layout::TinygemmAvx512,
    }
}

#[cfg(test)]
#[path = "choice_tests.rs"]
mod tests;
