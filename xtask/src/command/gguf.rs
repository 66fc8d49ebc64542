//! `cargo xtask gguf`

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use spark_convert::artifact::hash_bytes;
use spark_convert::checkpoint::GgufFile;
use spark_convert::gguf::tensor_name;
use xtask::gguf::{Gguf, Kind};

/// Options of the task.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Checkpoint
    #[arg(long, value_name = "DIR", required_unless_present = "digests", requires_all = ["kind", "out"])]
    model: Option<PathBuf>,
    /// What matrices are stored as; q4-k-m has the types of llama.cpp's, with the codes of plain rounding
    #[arg(long, value_enum, requires = "model")]
    kind: Option<Kind>,
    /// File to write
    #[arg(long, value_name = "FILE", requires = "model")]
    out: Option<PathBuf>,
    /// Print the SHA-256 of every tensor of a file as f32 instead, to be compared with what
    /// `tests/oracle/llama_goldens.py --digests FILE` prints
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "kind", "out"])]
    digests: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(path) = &args.digests {
        println!("{}", serde_json::to_string_pretty(&digests(path)?)?);
    }
    if let (Some(model), Some(kind), Some(out)) = (&args.model, args.kind, &args.out) {
        let file = Gguf::of_checkpoint(model, kind)?;
        fs::write(out, file.bytes()).with_context(|| out.display().to_string())?;
    }
    Ok(())
}

/// Type and SHA-256 of the values by the file's names.
fn digests(path: &Path) -> Result<BTreeMap<String, (&'static str, String)>> {
    let file = GgufFile::open(path)?;
    let kinds: BTreeMap<&str, _> = file.tensors().iter().map(|t| (t.name.as_str(), t.kind)).collect();
    let mut digests = BTreeMap::new();
    for spec in &file.specs {
        let name = tensor_name(spec);
        let row_len = *spec.shape.last().context("a shape")?;
        let mut bytes = Vec::new();
        let mut row = vec![0.0; row_len];
        for r in 0..spec.shape.iter().product::<usize>() / row_len {
            match (file.blocks(&spec.name)?, file.floats(&spec.name)) {
                (Some(blocks), _) => blocks.decode_row(r, &mut row),
                (None, view) => view.with_context(|| name.clone())?.decode_row(r, &mut row),
            }
            bytes.extend(row.iter().flat_map(|x| x.to_le_bytes()));
        }
        digests.insert(name.clone(), (kinds[name.as_str()].name(), hash_bytes(&bytes)));
    }
    Ok(digests)
}
