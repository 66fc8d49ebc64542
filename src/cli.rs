//! What can be typed. Declarations only: what it means is decided by the commands.

mod plan;
mod size;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
pub use plan::{ConsumerArg, PlanArgs, PriorityArg, TargetArg};

use crate::progress::Style;

/// Convert Spark-X2.5 checkpoints for real machines, and prove what was written.
#[derive(Debug, Parser)]
#[command(
    name = "spark-convert",
    version,
    max_term_width = 100,
    arg_required_else_help = true,
    after_help = "Exit codes: 0 done; 1 a gate failed; 2 usage; 3 input invalid or unsupported; \
                  4 I/O or space; 5 interrupted."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Say what a checkpoint, artifact or GGUF file is: architecture, tensors, sizes, problems
    Inspect(InspectArgs),
    /// Say which artifact to make for which machine, and what it costs
    Plan(PlanArgs),
    /// Write a quantized artifact
    Quantize(QuantizeArgs),
    /// Write the decode step as calibrated ONNX graphs for an NPU
    ExportNpu(Box<ExportNpuArgs>),
    /// Measure artifacts against the checkpoint they were made from; exit 1 when one fails
    Verify(Box<VerifyArgs>),
    /// Generate text greedily from a checkpoint, an artifact or a GGUF file
    Generate(GenerateArgs),
}

/// How much is said on stderr.
#[derive(Clone, Copy, Debug, Args)]
pub struct LogArgs {
    /// Say only warnings and errors
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Say more: every tensor
    #[arg(short, long)]
    pub verbose: bool,
    /// Form of the lines on stderr
    #[arg(long, value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    pub log_format: LogFormat,
}

/// Form of the lines on stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// How much of the machine is used.
#[derive(Clone, Copy, Debug, Args)]
pub struct ThreadArgs {
    /// Threads to work with; the result does not depend on it [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
}

/// How a long run works.
#[derive(Clone, Copy, Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub threads: ThreadArgs,
    /// How to show progress
    #[arg(long, value_enum, default_value_t = Style::Auto, value_name = "STYLE")]
    pub progress: Style,
}

/// Form of GELU that a GGUF file runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GeluArg {
    /// As the model was trained
    Exact,
    /// The tanh form through a table of f16 numbers, as llama.cpp computes it on a CPU
    Tanh,
}

/// `inspect`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    spark-convert inspect Spark-X2.5-1.7B\n  \
    spark-convert inspect Spark-X2.5-1.7B --tensors | head\n  \
    spark-convert inspect out/spark-w4a8 --json")]
pub struct InspectArgs {
    /// Checkpoint or artifact: a directory, its config.json, or a hub-cache snapshot; or a GGUF file
    /// [default: $SPARK_CHECKPOINT, else the current directory]
    #[arg(value_name = "MODEL|ARTIFACT")]
    pub path: Option<PathBuf>,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub log: LogArgs,
}

/// Schemes of `quantize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SchemeArg {
    /// int8 weights per output channel, int8 activations per token: compressed-tensors, for vLLM CPU
    W8a8,
    /// 4-bit weights in groups, int8 activations per token: GPTQ, for vLLM's AMX kernel
    W4a8,
    /// 4-bit asymmetric weights in groups, bf16 activations: blocks of PyTorch's tinygemm kernel
    W4a16,
}

/// How scales are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MethodArg {
    /// Round to nearest on the full range of each row or group
    Rtn,
    /// Search each row or group for the range with the least squared error
    Search,
}

/// How scales and codes are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QuantizeMethodArg {
    /// Round to nearest on the full range of each row or group
    Rtn,
    /// Search each row or group for the range with the least squared error
    Search,
    /// Search for the inputs that calibration texts give, and let codes make up for each other's errors
    Gptq,
}

/// Form of the output head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HeadArg {
    /// As the source has it: tied to the embedding, or its own
    Bf16,
    /// Untied and quantized to int8
    Int8,
    /// Untied and quantized to 4 bits like the rest (w4a8, w4a16)
    #[value(name = "4bit")]
    Int4,
}

/// How 4-bit codes are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PackingArg {
    /// GPTQ version 1: symmetric only, one width
    Gptq,
    /// compressed-tensors pack-quantized: zero points and mixed widths, too
    CompressedTensors,
}

/// Whether q, k and v are one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QkvArg {
    /// As the checkpoint has them, for the published vLLM plugin
    Fused,
    /// Apart, for loaders that cut fused tensors along their first dimension
    Split,
}

/// Where the codes of w4a16 lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LayoutArg {
    /// Blocks of 64 rows: PyTorch on AVX-512
    #[value(name = "tinygemm-avx512-n64")]
    TinygemmAvx512,
    /// Blocks of 32 rows: PyTorch on AVX2
    #[value(name = "tinygemm-avx2-n32")]
    TinygemmAvx2,
    /// Two codes a byte along a row, for readers that repack at load
    RowMajor,
}

/// `quantize`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    spark-convert quantize --scheme w4a8\n  \
    spark-convert quantize Spark-X2.5-1.7B --scheme w4a8 --asymmetric --group-size 64 --head int8\n  \
    spark-convert quantize Spark-X2.5-1.7B --scheme w4a16 --out out/spark-w4a16\n  \
    spark-convert quantize Spark-X2.5-1.7B --scheme w4a8 --method gptq --calib texts/\n  \
    spark-convert quantize Spark-X2.5-1.7B --scheme w4a8 --asymmetric --target-bytes 1.1GB --calib texts/\n  \
    spark-convert quantize Spark-X2.5-1.7B-BF16.gguf --tokenizer Spark-X2.5-1.7B --scheme w4a8\n  \
    spark-convert quantize Spark-X2.5-1.7B --scheme w8a8 --dry-run --json")]
pub struct QuantizeArgs {
    /// Checkpoint: a directory, its config.json, or a hub-cache snapshot; or a GGUF file of floats
    /// [default: $SPARK_CHECKPOINT, else the current directory]
    pub model: Option<PathBuf>,
    /// Model directory with config.json, tokenizer and all else that goes with a GGUF file's weights
    /// [default: the directory that the file lies in]
    #[arg(long, value_name = "MODEL")]
    pub tokenizer: Option<PathBuf>,
    /// What to write
    #[arg(long, value_enum)]
    pub scheme: SchemeArg,
    /// How scales are chosen
    #[arg(long, value_enum, default_value_t = QuantizeMethodArg::Search)]
    pub method: QuantizeMethodArg,
    /// Texts that show the inputs of each matrix (gptq, --smooth, --target-bytes): a .txt, .md or .jsonl file, or a
    /// directory of them [default: the bundled texts]
    #[arg(long, value_name = "DIR|FILE")]
    pub calib: Option<PathBuf>,
    /// Take at most so many tokens, of texts spread evenly over the list (gptq, --smooth, --target-bytes)
    /// [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub calib_tokens: Option<u32>,
    /// Move powers of two from inputs into weights where that lowers the error of a matrix's outputs on the
    /// texts; the function stays the same
    #[arg(long)]
    pub smooth: bool,
    /// With --smooth, also write the checkpoint with these scales moved, for tools that compare with it
    #[arg(long, value_name = "DIR", requires = "smooth")]
    pub write_folded: Option<PathBuf>,
    /// Importance matrix of llama-imatrix, made from this model's GGUF: weights whose inputs are large count
    /// more when a group's scale is searched (4 bits)
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,
    /// What becomes of the output head [default: bf16 with w8a8, 4bit with w4a8 and w4a16]
    #[arg(long, value_enum)]
    pub head: Option<HeadArg>,
    /// Weights along a row that share a scale (w4a8: 32, 64 or 128; w4a16: also 256) [default: 128]
    #[arg(long, value_name = "N")]
    pub group_size: Option<u16>,
    /// Zero points, in compressed-tensors packing (w4a8)
    #[arg(long)]
    pub asymmetric: bool,
    /// How codes are packed (w4a8) [default: gptq where it can say it]
    #[arg(long, value_enum)]
    pub packing: Option<PackingArg>,
    /// Store the projections whose names match in another width, int8, bf16 or 4 bits in groups of another size
    /// (g32, g64, g128), in compressed-tensors packing (w4a8); a * stands for any text, and the last pattern that
    /// matches holds
    #[arg(long = "override", value_name = "PATTERN=WIDTH")]
    pub overrides: Vec<String>,
    /// Choose widths and group sizes of projections and head so that a decoded token reads at most so many bytes
    /// (12MB, 900MiB), more for those that lose most (w4a8, in compressed-tensors packing). What --override, --head
    /// and --group-size say stays. Inputs count by --imatrix, or by texts with --calib or --calib-tokens (gptq: always)
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub target_bytes: Option<u64>,
    /// Whether q, k and v stay one module (w4a8 in GPTQ packing) [default: fused]
    #[arg(long, value_enum)]
    pub qkv: Option<QkvArg>,
    /// Keep every scale positive, for readers never tried with negative ones (w4a8 in GPTQ packing)
    #[arg(long)]
    pub no_negative_scales: bool,
    /// Where codes lie (w4a16) [default: tinygemm-avx512-n64]
    #[arg(long, value_enum)]
    pub layout: Option<LayoutArg>,
    /// Quantize the embedding table itself and leave the head tied to it (w4a16 row-major)
    #[arg(long)]
    pub quantize_embedding: bool,
    /// Directory to write [default: artifacts/NAME]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Replace what is at --out
    #[arg(long)]
    pub force: bool,
    /// Print the plan and stop
    #[arg(long)]
    pub dry_run: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub run: RunArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub log: LogArgs,
}

/// Types of an export's weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PrecisionArg {
    /// int8 weights per output channel, 16-bit activations
    W8a16,
    /// int8 weights, float activations: what the weights alone cost
    W8,
    /// 16-bit weights and activations
    W16a16,
    /// int8 weights, 8-bit activations
    W8a8,
    /// Everything in f32: the reference twin
    Fp32,
}

/// How an export is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SplitArg {
    /// One graph
    Whole,
    /// A graph per layer, and one for the head
    Layer,
    /// A graph per four layers, and one for the head
    Block4,
}

/// Form of the graphs of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DialectArg {
    /// Operator set 23, one node per norm and GELU, encodings in the graph
    Qdq23,
    /// Operator set 21, norms and GELU of several float nodes, encodings in the graph
    Qdq21,
    /// Operator set 18, float throughout, for readers without the newer operators; implies fp32
    Float18,
    /// The float graph, with the encodings of --precision in a file beside it
    Aimet,
}

/// Codes of caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CacheTypeArg {
    /// int16 with zero point 0
    S16,
    /// uint16 with zero in the middle, like the tensor that entries come from: nothing is re-coded
    U16sym,
}

/// Caches of sliding layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SlidingCacheArg {
    /// The graph returns the new entry; the runtime writes it over the oldest
    Ring,
    /// The graph returns the whole window, moved by one
    Roll,
}

/// Caches of full layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FullCacheArg {
    /// The graph returns the new entry; the runtime appends it
    Roll,
    /// The same graph, with slots counted round
    Ring,
    /// The graph returns the whole cache, moved by one
    RollCache,
}

/// `export-npu`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    spark-convert export-npu --calib texts/\n  \
    spark-convert export-npu Spark-X2.5-1.7B --split layer --context 4096\n  \
    spark-convert export-npu Spark-X2.5-1.7B --precision fp32 --out out/spark-npu-fp32\n  \
    spark-convert export-npu Spark-X2.5-1.7B --dry-run --json")]
pub struct ExportNpuArgs {
    /// Checkpoint: a directory, its config.json, or a hub-cache snapshot
    /// [default: $SPARK_CHECKPOINT, else the current directory]
    pub model: Option<PathBuf>,
    /// Texts that show which values flow where: a .txt, .md or .jsonl file, or a directory of them
    /// [default: the bundled texts]
    #[arg(long, value_name = "DIR|FILE")]
    pub calib: Option<PathBuf>,
    /// Take at most so many tokens, of texts spread evenly over the list [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub calib_tokens: Option<u32>,
    /// Types of weights and activations [default: w8a16]
    #[arg(long, value_enum)]
    pub precision: Option<PrecisionArg>,
    /// Form of the graphs
    #[arg(long, value_enum, default_value_t = DialectArg::Qdq23)]
    pub dialect: DialectArg,
    /// How scales of int8 weights are chosen [default: search]
    #[arg(long, value_enum)]
    pub method: Option<MethodArg>,
    /// How the step is cut into graphs
    #[arg(long, value_enum, default_value_t = SplitArg::Whole)]
    pub split: SplitArg,
    /// Tokens that a full layer sees, the current one included
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub context: u32,
    /// Also write samples of the graphs' inputs, as HDF5 in the form that AI Hub's quantize job takes
    #[arg(long)]
    pub dump_calib: bool,
    /// How caches of sliding layers move on [default: ring]
    #[arg(long, value_enum)]
    pub sliding_cache: Option<SlidingCacheArg>,
    /// How caches of full layers move on [default: roll]
    #[arg(long, value_enum)]
    pub full_cache: Option<FullCacheArg>,
    /// Codes of caches [default: s16; aimet: u16sym]
    #[arg(long, value_enum)]
    pub cache_type: Option<CacheTypeArg>,
    /// Also write graphs that take N tokens of a prompt at once, with the same weights and caches
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub prefill: Option<u32>,
    /// Directory to write [default: artifacts/NAME]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Replace what is at --out
    #[arg(long)]
    pub force: bool,
    /// Print the plan and stop
    #[arg(long)]
    pub dry_run: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub run: RunArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub log: LogArgs,
}

/// `verify`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    spark-convert verify\n  \
    spark-convert verify out/spark-w8a8 --reference Spark-X2.5-1.7B\n  \
    spark-convert verify out/spark-w8a8 --min-weight-snr-db 35 --json\n  \
    spark-convert verify out/spark-w8a8 out/spark-w4a8 --gates gates.toml --report report --junit verify.xml\n  \
    spark-convert verify out/spark-w4a8 Spark-X2.5-1.7B-Q4_K_M.gguf --reference Spark-X2.5-1.7B")]
pub struct VerifyArgs {
    /// Artifacts, and GGUF files to compare them with [default: every artifact under artifacts/]
    #[arg(value_name = "ARTIFACT")]
    pub artifacts: Vec<PathBuf>,
    /// The checkpoint, or the GGUF file, they were made from
    /// [default: $SPARK_CHECKPOINT, else the current directory]
    #[arg(long, value_name = "MODEL")]
    pub reference: Option<PathBuf>,
    /// Model directory with config.json, tokenizer and all else that goes with a GGUF reference
    /// [default: the directory that the file lies in]
    #[arg(long, value_name = "MODEL")]
    pub tokenizer: Option<PathBuf>,
    /// Prompts of your own: a directory of .txt, .md and .jsonl files [default: the bundled suite]
    #[arg(long, value_name = "DIR")]
    pub suite: Option<PathBuf>,
    /// Scenarios of the suite to run, or none [default: all]
    #[arg(long, value_name = "NAME")]
    pub scenario: Vec<String>,
    /// Keep what the checkpoint itself computes in DIR, and take from there what an earlier run has computed on the
    /// same checkpoint and prompts. Takes 8 bytes per token and hidden dimension (16 KiB a token of the 1.7B),
    /// and once per suite, for layers alone, 4 bytes per token, hidden dimension and layer of the first two windows
    /// of the longest prompt (238 MB). May be removed at any time
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Bars of a TOML file, for all artifacts, a scheme or a scenario; the options below win over it
    #[arg(long, value_name = "FILE")]
    pub gates: Option<PathBuf>,
    /// Lowest weight SNR of any module, in dB [default: by scheme]
    #[arg(long, value_name = "DB", allow_negative_numbers = true)]
    pub min_weight_snr_db: Option<f64>,
    /// Lowest SNR of the logits over all scenarios, in dB [default: by scheme]
    #[arg(long, value_name = "DB", allow_negative_numbers = true)]
    pub min_snr_db: Option<f64>,
    /// Lowest SNR of the logits of one step of an NPU export, in dB [default: by precision]
    #[arg(long, value_name = "DB", allow_negative_numbers = true)]
    pub min_step_snr_db: Option<f64>,
    /// Lowest SNR of the keys or values that a layer of an NPU export returns, in dB [default: by precision]
    #[arg(long, value_name = "DB", allow_negative_numbers = true)]
    pub min_kv_snr_db: Option<f64>,
    /// Lowest SNR of a graph by itself of an NPU export that is split, in dB [default: by precision]
    #[arg(long, value_name = "DB", allow_negative_numbers = true)]
    pub min_graph_snr_db: Option<f64>,
    /// Highest mean KL divergence over all scenarios, in nats per token [default: by scheme]
    #[arg(long, value_name = "NATS")]
    pub max_kld: Option<f64>,
    /// Lowest share of the greedy tokens kept, from 0 to 1 [default: by scheme]
    #[arg(long, value_name = "SHARE")]
    pub min_greedy: Option<f64>,
    /// Form of GELU that GGUF files run with [default: exact]
    #[arg(long, value_enum)]
    pub gelu: Option<GeluArg>,
    /// Lowest share of the tool calls kept, from 0 to 1 [default: by scheme, from ten calls on]
    #[arg(long, value_name = "SHARE")]
    pub min_actions: Option<f64>,
    /// Write report.json, report.md and report.html into this directory
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Write JUnit XML
    #[arg(long, value_name = "FILE")]
    pub junit: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub run: RunArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub log: LogArgs,
}

/// `generate`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    spark-convert generate --prompt \"What is the capital of France?\"\n  \
    spark-convert generate out/spark-w8a8 --prompt \"def add(a, b):\" --raw --max-new-tokens 40\n  \
    spark-convert generate out/spark-w8a8 --tokens 3,17,42 --json\n  \
    spark-convert generate spark-Q8_0.gguf --tokenizer Spark-X2.5-1.7B --prompt \"Hello\"")]
pub struct GenerateArgs {
    /// Checkpoint, artifact or GGUF file [default: $SPARK_CHECKPOINT, else the current directory]
    #[arg(value_name = "MODEL|ARTIFACT")]
    pub model: Option<PathBuf>,
    /// What the user says, put into the checkpoint's chat template
    #[arg(long, value_name = "TEXT", required_unless_present = "tokens", conflicts_with = "tokens")]
    pub prompt: Option<String>,
    /// Token ids to continue from, as they are
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub tokens: Option<Vec<u32>>,
    /// Continue the text of --prompt as it is, without the chat template
    #[arg(long, requires = "prompt", conflicts_with = "tokens")]
    pub raw: bool,
    /// Answer without thinking first
    #[arg(long, requires = "prompt", conflicts_with_all = ["raw", "tokens"])]
    pub no_think: bool,
    /// Model directory with the tokenizer and the chat template [default: that of the model]
    #[arg(long, value_name = "MODEL")]
    pub tokenizer: Option<PathBuf>,
    /// Form of GELU that a GGUF file runs with [default: exact]
    #[arg(long, value_enum)]
    pub gelu: Option<GeluArg>,
    /// Stop after so many tokens, if the model does not stop before
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_new_tokens: u32,
    /// Print JSON: tokens and text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub threads: ThreadArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub log: LogArgs,
}
