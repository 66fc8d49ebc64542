//! `cargo xtask goldens`: logits that the figures of `verify` are compared on with NumPy's.

use std::fs;

use anyhow::Result;
use serde_json::json;
use spark_convert::opened::{Opened, tokenizer};
use spark_convert::runtime::State;

use super::process::{output, program, release_binary, root};

/// No options.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Positions of a text, then of its continuation.
const PROMPT: usize = 12;
const NEW: usize = 4;

/// Writes logits of the bundled checkpoint and of its w4a8 artifact, for the script that makes goldens:
/// `python tests/oracle/metrics_goldens.py --make fixtures/goldens/metrics` says what they come to.
pub(crate) fn run(_args: &Args) -> Result<()> {
    let (bundled, goldens) = (root().join("fixtures/spark-tiny"), root().join("fixtures/goldens/metrics"));
    let temp = tempfile::tempdir()?;
    let out = temp.path().join("out");
    let mut quantize = program(release_binary()?);
    output(quantize.arg("quantize").arg(&bundled).args(["--scheme", "w4a8", "--out"]).arg(&out))?;
    let (source, artifact) = (Opened::open(&bundled)?, Opened::open(&out)?);
    let (reference, other) = (source.model()?, artifact.model()?);
    let tokenizer = tokenizer(source.dir(), source.config())?;
    let mut tokens = tokenizer.encode(&fs::read_to_string(root().join("fixtures/heldout/english.txt"))?)?;
    tokens.truncate(PROMPT);
    let next: Vec<u32> = tokens[1..].to_vec();
    let continuation = reference.greedy(&mut State::new(source.config()), &tokens, NEW, |_| false)?;
    tokens.extend(&continuation[..NEW - 1]);
    let mut bytes = Vec::new();
    for model in [&reference, &other] {
        let hidden = model.forward(&mut State::new(model.config()), &tokens)?;
        bytes.extend(model.logits(&hidden).iter().flat_map(|x| x.to_le_bytes()));
    }
    fs::write(goldens.join("trained.bin"), bytes)?;
    let golden = json!({"vocab": source.config().vocab_size, "prompt_tokens": PROMPT, "next": next});
    fs::write(goldens.join("trained.json"), golden.to_string())?;
    Ok(())
}
