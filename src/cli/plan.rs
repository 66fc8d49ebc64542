//! What `plan` takes.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{LogArgs, ThreadArgs};

/// Machines that `plan` knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TargetArg {
    /// This machine
    Auto,
    /// x86-64 with AMX tiles
    X86Amx,
    /// x86-64 with AVX-512 and VNNI, without AMX
    X86Vnni,
    /// x86-64 with AVX-512, without VNNI
    X86Avx512,
    /// x86-64 with AVX2 only
    X86Avx2,
    /// 64-bit ARM
    Arm64,
    /// A phone's Hexagon NPU
    Hexagon,
    /// A graphics card
    Gpu,
}

/// Programs that run artifacts on x86-64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ConsumerArg {
    /// vLLM's CPU backend
    Vllm,
    /// PyTorch's 4-bit kernel
    Pytorch,
}

/// What counts more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PriorityArg {
    /// That the model does what it did before; what agents need
    Fidelity,
    /// Tokens per second
    Speed,
}

/// `plan`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    spark-convert plan Spark-X2.5-1.7B\n  \
    spark-convert plan Spark-X2.5-1.7B --target hexagon --context 1024\n  \
    spark-convert plan Spark-X2.5-1.7B --target x86-amx --priority speed --sessions 16 --json")]
pub struct PlanArgs {
    /// Checkpoint: a directory, its config.json, or a hub-cache snapshot; or a GGUF file of floats
    /// [default: $SPARK_CHECKPOINT, else the current directory]
    pub model: Option<PathBuf>,
    /// Model directory with config.json, tokenizer and all else that goes with a GGUF file's weights
    /// [default: the directory that the file lies in]
    #[arg(long, value_name = "MODEL")]
    pub tokenizer: Option<PathBuf>,
    /// The machine it is for
    #[arg(long, value_enum, default_value_t = TargetArg::Auto, value_name = "MACHINE")]
    pub target: TargetArg,
    /// The program that runs it, where there is more than one [default: vllm]
    #[arg(long, value_enum, value_name = "PROGRAM")]
    pub consumer: Option<ConsumerArg>,
    /// What counts more
    #[arg(long, value_enum, default_value_t = PriorityArg::Fidelity)]
    pub priority: PriorityArg,
    /// Positions to be served per session, prompt and answer together
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(2..))]
    pub context: u32,
    /// Sessions at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub sessions: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub threads: ThreadArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub log: LogArgs,
}
