//! Streams a checkpoint through a format into an artifact.
//!
//! Tensors go in file order, a block of rows at a time. While one block is encoded, the block before
//! it is hashed and written and the source's bytes are hashed, all on the same pool: what is in
//! memory is two encoded blocks, a row per thread, and the tensors a format only finishes at the end.

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::artifact::{
    FileRecord, MANIFEST_VERSION, Manifest, Sha256Hex, ShardWriter, Source, Staging, TensorRecord, Tool,
    WrittenShard, hash_bytes, rounded,
};
use crate::checkpoint::{CONFIG_FILE, Checkpoint, INDEX_FILE, MANIFEST_FILE, Shard};
use crate::error::{InputError, Result};
use crate::formats::{Format, kept_modules};
use crate::guidance::Guidance;
use crate::interrupt::Interrupt;
use crate::plan::{Action, Plan, PlannedShard, Step};
use crate::progress::Progress;
use crate::quant::ErrorSums;
use crate::sensitivity::Allocation;
use crate::smooth::Smoothing;
use crate::tensor::{NonFinite, TensorView};

/// Source bytes of a block. Large enough to share among threads, small enough to stay in their caches.
const BLOCK_BYTES: usize = 4 << 20;

/// Where a folded checkpoint comes from, and what was folded.
#[derive(Clone, Copy)]
pub struct Origin<'a> {
    /// The checkpoint as it was.
    pub checkpoint: &'a Checkpoint,
    /// What was moved.
    pub smoothing: &'a Smoothing,
    /// Hash of the tokens that it was chosen by.
    pub tokens_sha256: &'a Sha256Hex,
}

/// What is written, and from what.
#[derive(Clone, Copy)]
pub struct Conversion<'a> {
    /// The source, as it is quantized.
    pub checkpoint: &'a Checkpoint,
    /// The kind of artifact.
    pub format: &'a dyn Format,
    /// Its tensors.
    pub plan: &'a Plan,
    /// What codes are chosen by.
    pub guidance: &'a Guidance,
    /// Where the source is a folded one, the original.
    pub origin: Option<Origin<'a>>,
    /// Where widths were chosen for a budget, how.
    pub allocation: Option<&'a Allocation>,
}

/// Writes an artifact into `staging`, the manifest last, and returns the manifest.
///
/// # Errors
/// A weight that is NaN or infinite, a source that changed meanwhile, a failed write, an interrupt.
pub fn convert(
    conversion: Conversion<'_>,
    staging: &Staging,
    progress: &dyn Progress,
    interrupt: &Interrupt,
) -> Result<Manifest> {
    let Conversion { checkpoint, format, plan, guidance, origin, allocation } = conversion;
    let writing = Writing { checkpoint, format, guidance, staging, progress, interrupt };
    let mut source_files = BTreeMap::new();
    let mut files = BTreeMap::new();
    let mut tensors = Vec::new();

    for shard in &checkpoint.files.shards {
        let mut source_hash = SourceHash::new(shard);
        if let Some(planned) = plan.shards.iter().find(|p| p.file_name == shard.stored_as) {
            let (written, snrs) = writing.shard(shard, planned, &mut source_hash)?;
            tensors.extend(records(format, planned, &written, &snrs, guidance));
            files.insert(
                planned.file_name.clone(),
                FileRecord { bytes: written.bytes, sha256: written.sha256 },
            );
        }
        source_files.insert(shard.file_name.clone(), source_hash.finish());
    }

    if checkpoint.files.indexed {
        files.insert(INDEX_FILE.to_owned(), staging.write(INDEX_FILE, &index(plan))?);
    }
    for name in &checkpoint.side_files {
        interrupt.check()?;
        files.insert(name.clone(), staging.copy(name, checkpoint.dir.open_file(name)?)?);
    }
    let config_bytes = checkpoint.dir.read(CONFIG_FILE)?;
    let config_record = FileRecord { bytes: config_bytes.len() as u64, sha256: hash_bytes(&config_bytes) };
    source_files.insert(CONFIG_FILE.to_owned(), config_record);
    files.insert(
        CONFIG_FILE.to_owned(),
        staging.write(CONFIG_FILE, &json_bytes(&Value::Object(patched_config(checkpoint, format))))?,
    );
    for (name, json) in further_files(checkpoint, format) {
        files.insert(name.to_owned(), staging.write(name, &json_bytes(&json))?);
    }
    checkpoint.files.check_unchanged()?;
    if let Some(origin) = origin {
        source_files = records_of(origin.checkpoint)?;
    }

    let manifest = Manifest {
        self_sha256: String::new(),
        manifest_version: MANIFEST_VERSION,
        tool: Tool::this(),
        scheme: format.scheme().to_owned(),
        options: format.options(),
        source: Source { files: source_files },
        sizes: plan.sizes.into(),
        calibration_sha256: origin.map(|o| o.tokens_sha256.clone()).or_else(|| guidance.sha256()),
        smoothing: origin.map(|origin| origin.smoothing.clone()),
        allocation: allocation.cloned(),
        notes: notes(checkpoint, plan).into_iter().chain(guidance.notes()).collect(),
        files,
        tensors,
    };
    let sealed = manifest.seal().map_err(|e| InputError::file(MANIFEST_FILE).found(e))?;
    staging.write(MANIFEST_FILE, &sealed)?;
    Manifest::unseal(&sealed).map_err(|e| InputError::file(MANIFEST_FILE).found(e).into())
}

/// Hashes of a checkpoint's files.
fn records_of(checkpoint: &Checkpoint) -> Result<BTreeMap<String, FileRecord>> {
    let record = |bytes: &[u8]| FileRecord { bytes: bytes.len() as u64, sha256: hash_bytes(bytes) };
    let mut files: BTreeMap<_, _> = checkpoint
        .files
        .shards
        .iter()
        .map(|shard| (shard.file_name.clone(), record(shard.bytes())))
        .collect();
    files.insert(CONFIG_FILE.to_owned(), record(&checkpoint.dir.read(CONFIG_FILE)?));
    checkpoint.files.check_unchanged()?;
    Ok(files)
}

/// What the checkpoint's user should know, and what the format left as it was.
pub fn notes(checkpoint: &Checkpoint, plan: &Plan) -> Vec<String> {
    let kept = plan.kept.iter().map(|(module, why)| format!("{module}: not quantized, {why}"));
    checkpoint.notes.iter().cloned().chain(kept).collect()
}

/// Anonymous memory that [`convert`] stays below, in bytes: what the program itself and its threads
/// take, what opening the source took, two encoded blocks, a row of f32 per thread, and what an encoder
/// holds until the end of its module.
pub fn peak_memory_bytes(plan: &Plan, checkpoint: &Checkpoint, format: &dyn Format, threads: usize) -> u64 {
    const PROGRAM: u64 = 6 << 20;
    const PER_THREAD: u64 = 256 << 10;
    let longest_row = checkpoint.specs.iter().map(|s| s.shape.last().map_or(0, |&n| n as u64 * 4)).max();
    let longest_row = longest_row.unwrap_or(0);
    let quantized = plan.steps().filter(|(_, step)| step.action == Action::Quantize);
    let waiting =
        quantized.filter_map(|(_, s)| Some(format.codec_at(s.module, s.layer)?.encoder_bytes(s.shape))).max();
    // An f32 source is copied as it is; a block is one row at least.
    let block = (BLOCK_BYTES as u64).max(longest_row);
    PROGRAM
        + checkpoint.opening_bytes()
        + 3 * block
        + threads as u64 * (PER_THREAD + 18 * longest_row)
        + waiting.unwrap_or(0)
}

/// config.json with the format's block: key order and unknown keys are kept.
pub fn patched_config(checkpoint: &Checkpoint, format: &dyn Format) -> Map<String, Value> {
    let mut config = checkpoint.config_json.as_object().cloned().unwrap_or_default();
    let kept: Vec<String> =
        kept_modules(format, &checkpoint.config).into_iter().map(|(module, _)| module).collect();
    format.patch_config(&mut config, &kept);
    config
}

/// The format's further files; they take the place of files of the same name beside the source.
pub fn further_files(checkpoint: &Checkpoint, format: &dyn Format) -> Vec<(&'static str, Value)> {
    format.further_files(&patched_config(checkpoint, format))
}

fn json_bytes(json: &Value) -> Vec<u8> {
    let mut text = format!("{json:#}").into_bytes();
    text.push(b'\n');
    text
}

/// `model.safetensors.index.json` of the planned shards.
fn index(plan: &Plan) -> Vec<u8> {
    let weight_map: BTreeMap<_, _> = plan
        .steps()
        .flat_map(|(file, step)| step.outputs.iter().map(move |output| (output.name.as_str(), file)))
        .collect();
    let json = serde_json::json!({
        "metadata": {"total_size": plan.sizes.tensor_bytes},
        "weight_map": weight_map,
    });
    json_bytes(&json)
}

/// What writing a shard needs.
struct Writing<'a> {
    checkpoint: &'a Checkpoint,
    format: &'a dyn Format,
    guidance: &'a Guidance,
    staging: &'a Staging,
    progress: &'a dyn Progress,
    interrupt: &'a Interrupt,
}

impl Writing<'_> {
    /// Writes one shard, made from that of the source; returns it with the error sums of its steps.
    fn shard(
        &self,
        from: &Shard,
        planned: &PlannedShard,
        source_hash: &mut SourceHash<'_>,
    ) -> Result<(WrittenShard, Vec<ErrorSums>)> {
        let Self { checkpoint, format, guidance, staging, progress, interrupt } = *self;
        let outputs: Vec<_> = planned.steps.iter().flat_map(|s| s.outputs.iter().cloned()).collect();
        let file = staging.create(&planned.file_name)?;
        let mut pipe = Pipe {
            writer: ShardWriter::start(staging.path(&planned.file_name), file, &outputs)?,
            source_hash,
            waiting: Vec::new(),
        };
        let mut sums = Vec::with_capacity(planned.steps.len());
        for step in &planned.steps {
            let source = checkpoint.tensor(&step.source);
            let refused = |bad: NonFinite| refuse_non_finite(&from.file_name, source, bad);
            let codec = format.codec_at(step.module, step.layer).filter(|_| step.action == Action::Quantize);
            let multiple = codec.map_or(1, |codec| codec.row_multiple());
            let rows_per_block =
                (BLOCK_BYTES / source.row_bytes().max(1) / multiple * multiple).max(multiple);
            let Range { start, end } = step.rows;
            let blocks =
                (start..end).step_by(rows_per_block).map(|block| block..(block + rows_per_block).min(end));
            let mut total = ErrorSums::default();
            match codec {
                None => {
                    for rows in blocks {
                        interrupt.check()?;
                        let bytes = source.row_range(rows.clone());
                        let bad = pipe.step(bytes.len(), |block| {
                            block.extend_from_slice(bytes);
                            find_non_finite(source, rows)
                        })?;
                        bad.map_or(Ok(()), |bad| Err(refused(bad)))?;
                        progress.advance(bytes.len() as u64, &step.source);
                    }
                }
                Some(codec) => {
                    let mut encoder = codec.encoder(source, step.rows.clone(), guidance.choice(step));
                    for rows in blocks {
                        interrupt.check()?;
                        let bytes = source.row_range(rows.clone()).len();
                        total += pipe.step(bytes, |block| encoder.encode(rows, block))?.map_err(refused)?;
                        progress.advance(bytes as u64, &step.source);
                    }
                    while pipe.step(0, |block| encoder.finish(block))? {
                        interrupt.check()?;
                    }
                }
            }
            sums.push(total);
        }
        Ok((pipe.finish()?, sums))
    }
}

/// Two stages of one block each: what is encoded now, and what was encoded before and is being
/// written.
struct Pipe<'a, 'b> {
    writer: ShardWriter,
    source_hash: &'a mut SourceHash<'b>,
    waiting: Vec<u8>,
}

impl Pipe<'_, '_> {
    /// Runs `encode` into a new block while the block before it is written and the next
    /// `source_bytes` of the source are hashed.
    fn step<T: Send>(
        &mut self,
        source_bytes: usize,
        encode: impl FnOnce(&mut Vec<u8>) -> T + Send,
    ) -> Result<T> {
        let (writer, source_hash, waiting) = (&mut self.writer, &mut self.source_hash, &self.waiting);
        let (written, (block, encoded)) = rayon::join(
            || rayon::join(|| writer.append(waiting), || source_hash.advance(source_bytes)).0,
            || {
                let mut block = Vec::new();
                let encoded = encode(&mut block);
                (block, encoded)
            },
        );
        written?;
        self.waiting = block;
        Ok(encoded)
    }

    fn finish(mut self) -> Result<WrittenShard> {
        self.writer.append(&self.waiting)?;
        self.writer.finish()
    }
}

/// Hash of a source shard, taken alongside the work on it, while its pages are at hand.
struct SourceHash<'a> {
    hash: Sha256,
    rest: &'a [u8],
    length: u64,
}

impl<'a> SourceHash<'a> {
    fn new(shard: &'a Shard) -> Self {
        let bytes = shard.bytes();
        Self { hash: Sha256::new(), rest: bytes, length: bytes.len() as u64 }
    }

    fn advance(&mut self, bytes: usize) {
        let (now, rest) = self.rest.split_at(bytes.min(self.rest.len()));
        self.hash.update(now);
        self.rest = rest;
    }

    fn finish(mut self) -> FileRecord {
        self.advance(usize::MAX);
        FileRecord { bytes: self.length, sha256: crate::artifact::finish_hash(self.hash) }
    }
}

/// Looks for NaN and infinity, rows in parallel; the first row that has any is told.
fn find_non_finite(source: TensorView<'_>, rows: std::ops::Range<usize>) -> Option<NonFinite> {
    use rayon::prelude::*;
    const ROWS: usize = 64;
    let start = rows.start;
    let chunks = rows.len().div_ceil(ROWS);
    let found: Vec<NonFinite> = (0..chunks)
        .into_par_iter()
        .filter_map(|c| source.non_finite(start + c * ROWS..(start + (c + 1) * ROWS).min(rows.end)))
        .collect();
    let count = found.iter().map(|bad| bad.count).sum();
    found.first().map(|first| NonFinite { count, ..*first })
}

fn refuse_non_finite(file: &str, source: TensorView<'_>, bad: NonFinite) -> crate::error::Failure {
    let place = match source.shape.len() {
        2 => format!("[{}, {}]", bad.row, bad.column),
        _ => format!("[{}]", bad.column),
    };
    InputError::file(file)
        .subject(source.name)
        .expected("finite weights")
        .found(format!("{} NaN or infinite in the block of rows that has the first, at {place}", bad.count))
        .hint("the checkpoint is damaged, or training diverged")
        .into()
}

fn records(
    format: &dyn Format,
    planned: &PlannedShard,
    written: &WrittenShard,
    sums: &[ErrorSums],
    guidance: &Guidance,
) -> Vec<TensorRecord> {
    let mut hashes = written.tensors.iter();
    let mut records = Vec::new();
    for (step, sums) in planned.steps.iter().zip(sums) {
        let Step { source, action, module, layer, outputs, .. } = step;
        let codec = format.codec_at(*module, *layer).filter(|_| *action == Action::Quantize);
        for (i, output) in outputs.iter().enumerate() {
            records.push(TensorRecord {
                name: output.name.clone(),
                file: planned.file_name.clone(),
                source: source.clone(),
                action: (*action).into(),
                scheme: codec.map(|codec| codec.scheme().to_owned()),
                group_size: codec.and_then(|codec| codec.group_size()).map(|g| g as u32),
                bytes: output.len_bytes(),
                sha256: hashes.next().cloned().unwrap_or_default(),
                snr_db: sums.snr_db().filter(|_| codec.is_some() && i == 0).map(rounded),
                output_snr_db: guidance.output_snr_db(step).filter(|_| codec.is_some() && i == 0),
            });
        }
    }
    records
}
