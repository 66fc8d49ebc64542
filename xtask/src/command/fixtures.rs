//! `cargo xtask fixtures`

use std::ops::Range;
use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use xtask::fixtures::{Dtype, FixtureSpec, Geometry, Head, Preset};

/// Options of the task. Sizes that are not given come from the preset.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Named set of sizes to start from
    #[arg(long, value_enum)]
    preset: Preset,
    /// Directory to write into; must be empty or not exist
    #[arg(long)]
    out: PathBuf,
    /// Seed of all weights
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Threads to draw weights with; changes no byte [default: all cores]
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    threads: usize,
    /// Bytes of data after which a new shard starts
    #[arg(long)]
    shard_bytes: Option<u64>,
    #[command(flatten)]
    sizes: Sizes,
    /// Element type of the tensors
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: DtypeChoice,
    /// One model.safetensors without an index
    #[arg(long)]
    single_file: bool,
    /// A head of its own (tie_word_embeddings false)
    #[arg(long, conflicts_with = "redundant_head")]
    untied: bool,
    /// A stored head although the config ties it to the embedding
    #[arg(long, value_enum)]
    redundant_head: Option<RedundantHead>,
    /// Store the rotary frequencies of every layer
    #[arg(long)]
    rotary_buffers: bool,
    /// Headers without padding, so that data starts at an odd offset
    #[arg(long)]
    unpadded_header: bool,
    /// Headers without __metadata__
    #[arg(long)]
    no_metadata: bool,
    /// Lay the directory out as a download cache of this repository
    #[arg(long, value_name = "OWNER/NAME")]
    hub_cache: Option<String>,
    /// Make rows of a tensor zero; may be repeated
    #[arg(long, value_name = "TENSOR:START..END", value_parser = zero_rows)]
    zero_rows: Vec<(String, Range<usize>)>,
    /// Leave a tensor out; may be repeated
    #[arg(long, value_name = "TENSOR")]
    omit: Vec<String>,
    /// Only the JSON files
    #[arg(long)]
    no_weights: bool,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Sizes")]
struct Sizes {
    /// Decoder layers
    #[arg(long)]
    layers: Option<usize>,
    /// Width of the residual stream
    #[arg(long)]
    hidden: Option<usize>,
    /// Query heads
    #[arg(long)]
    heads: Option<usize>,
    /// Key-value heads
    #[arg(long)]
    kv_heads: Option<usize>,
    /// Width of one head
    #[arg(long)]
    head_dim: Option<usize>,
    /// Width of the MLP
    #[arg(long)]
    ffn: Option<usize>,
    /// Number of token ids
    #[arg(long)]
    vocab: Option<usize>,
    /// Sliding window
    #[arg(long)]
    window: Option<usize>,
    /// Maximum number of positions
    #[arg(long)]
    max_positions: Option<usize>,
}

#[derive(Clone, Copy, ValueEnum)]
enum DtypeChoice {
    Bf16,
    F16,
    F32,
    /// Norms and attention gates F32, out_proj F16, the rest BF16
    Mixed,
}

#[derive(Clone, Copy, ValueEnum)]
enum RedundantHead {
    /// Equal to the embedding
    Copy,
    /// Different from it
    Other,
}

impl Sizes {
    fn apply(&self, g: &mut Geometry) {
        let pairs = [
            (self.layers, &mut g.layers),
            (self.hidden, &mut g.hidden),
            (self.heads, &mut g.heads),
            (self.kv_heads, &mut g.kv_heads),
            (self.head_dim, &mut g.head_dim),
            (self.ffn, &mut g.ffn),
            (self.vocab, &mut g.vocab),
            (self.window, &mut g.window),
            (self.max_positions, &mut g.max_positions),
        ];
        for (given, size) in pairs {
            *size = given.unwrap_or(*size);
        }
    }
}

impl Args {
    fn spec(&self) -> FixtureSpec {
        let mut spec = FixtureSpec::from(self.preset).seed(self.seed).threads(self.threads);
        self.sizes.apply(&mut spec.geometry);
        spec.shard_bytes = self.shard_bytes.unwrap_or(spec.shard_bytes);
        spec.single_file = self.single_file;
        spec.head = match self.redundant_head {
            Some(RedundantHead::Copy) => Head::TiedWithCopy,
            Some(RedundantHead::Other) => Head::TiedWithOther,
            None if self.untied => Head::Untied,
            None => Head::Tied,
        };
        spec.rotary_buffers = self.rotary_buffers;
        spec.padded_header = !self.unpadded_header;
        spec.metadata = !self.no_metadata;
        spec.hub_cache = self.hub_cache.clone();
        spec.without_weights = self.no_weights;
        spec.omitted = self.omit.clone();
        for (tensor, rows) in &self.zero_rows {
            spec = spec.zero_rows(tensor, rows.clone());
        }
        match self.dtype {
            DtypeChoice::Bf16 => spec,
            DtypeChoice::F16 => spec.dtype(Dtype::F16),
            DtypeChoice::F32 => spec.dtype(Dtype::F32),
            DtypeChoice::Mixed => spec.mixed(),
        }
    }
}

fn zero_rows(text: &str) -> Result<(String, Range<usize>), String> {
    let parse = || {
        let (tensor, rows) = text.rsplit_once(':')?;
        let (start, end) = rows.split_once("..")?;
        Some((tensor.to_owned(), start.parse().ok()?..end.parse().ok()?))
    };
    parse().ok_or_else(|| "expected TENSOR:START..END".to_owned())
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let written = args.spec().write(&args.out)?;
    for file in &written.files {
        println!("{:>13}  {}", file.bytes, written.model_dir.join(&file.name).display());
    }
    Ok(())
}
