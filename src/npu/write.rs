//! Writing an export: weights streamed into data files a block of rows at a time, then the models that
//! point into them, the embedding, and the manifests.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::PathBuf;

use half::f16;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::aimet::{self, WeightGrid};
use super::dialect::Dialect;
use super::layout::{Layout, Part, PlacedWeight};
use super::logical::LogicalGraph;
use super::lower::lower;
use super::manifest::{DATA_FILE, DECODE_MANIFEST_FILE, EMBEDDING_FILE, ENCODINGS_FILE, MODEL_FILE};
use super::weights::{Coding, Scales, Weight, WeightEncoder};
use super::{Export, Phase};
use crate::artifact::{
    FileRecord, Sha256Hex, Staging, TensorAction, TensorRecord, Tool, finish_hash, rounded,
};
use crate::checkpoint::Checkpoint;
use crate::error::{Failure, InputError, Result};
use crate::interrupt::Interrupt;
use crate::onnx::{Initializer, Model, TensorData};
use crate::progress::Progress;
use crate::quant::ErrorSums;
use crate::spark::Module;
use crate::tensor::{NonFinite, TensorView};

/// Source bytes of a block of rows.
const BLOCK_BYTES: usize = 4 << 20;

/// The files of graphs and embedding, as they were written.
#[derive(Clone, Debug, Default)]
pub struct Written {
    /// By path relative to the artifact.
    pub files: BTreeMap<String, FileRecord>,
    /// One per constant of a weight, in file order.
    pub tensors: Vec<TensorRecord>,
    /// What the user should know, one sentence each.
    pub notes: Vec<String>,
}

/// What the models of a data file say of its weights.
#[derive(Default)]
struct Constants {
    /// All parts of all weights, in file order.
    initializers: Vec<Initializer>,
    /// One per weight, where encodings stand beside the model.
    grids: Vec<WeightGrid>,
}

/// Everything that writing a part takes.
pub struct Writer<'a> {
    /// Where the weights are.
    pub checkpoint: &'a Checkpoint,
    /// What is written.
    pub export: &'a Export,
    /// Where it is written.
    pub staging: &'a Staging,
    /// Told of every block.
    pub progress: &'a dyn Progress,
    /// Looked at before every block.
    pub interrupt: &'a Interrupt,
}

impl Writer<'_> {
    /// Writes all graphs, the embedding and the runtime's manifest.
    ///
    /// # Errors
    /// A weight that is NaN or infinite or that the embedding file cannot hold, a failed write, an
    /// interrupt.
    pub fn write(&self) -> Result<Written> {
        let mut written = Written::default();
        for index in 0..self.export.graphs.len() {
            self.graph(index, &mut written)?;
        }
        written.files.insert(EMBEDDING_FILE.to_owned(), self.embedding()?);
        let manifest = serde_json::to_vec_pretty(&self.export.manifest());
        let mut manifest = manifest.map_err(|e| InputError::file(DECODE_MANIFEST_FILE).found(e))?;
        manifest.push(b'\n');
        let record = self.staging.write(DECODE_MANIFEST_FILE, &manifest)?;
        written.files.insert(DECODE_MANIFEST_FILE.to_owned(), record);
        Ok(written)
    }

    /// Writes a decode graph, and the prefill graph that has the same weights.
    fn graph(&self, index: usize, written: &mut Written) -> Result<()> {
        let (graph, layout) = (&self.export.graphs[index], &self.export.layouts[index]);
        self.staging.create_dir(&graph.name)?;
        let data_name = format!("{}/{DATA_FILE}", graph.name);
        let mut data = DataFile::create(self.staging, &data_name)?;
        let mut constants = Constants::default();
        for (weight, placed) in graph.weights.iter().zip(&layout.weights) {
            self.weight(weight, placed, &mut data, &mut constants, &data_name, written)?;
        }
        let record = data.finish(layout)?;
        written.files.insert(data_name.clone(), record);
        self.model(Phase::Decode, index, &constants, written)?;
        let Some(prefill) = self.export.prefill.get(index) else { return Ok(()) };
        self.interrupt.check()?;
        self.staging.create_dir(&prefill.name)?;
        let start_name = format!("{}/{DATA_FILE}", prefill.name);
        let bytes = layout.bytes_of_first(prefill.weights.len());
        written.files.insert(start_name.clone(), self.staging.copy_start(&start_name, &data_name, bytes)?);
        self.model(Phase::Prefill, index, &constants, written)
    }

    /// Writes the model of a graph whose data file is there.
    fn model(&self, phase: Phase, index: usize, constants: &Constants, written: &mut Written) -> Result<()> {
        let graph = &self.export.graphs_of(phase)[index];
        let options = &self.export.options;
        // A prefill graph has the first weights of its decode graph.
        let placed = &self.export.layouts[index].weights[..graph.weights.len()];
        let encodings = self.export.encodings(phase, index);
        let in_graph = encodings.filter(|_| options.is_quantized());
        let mut lowered = lower(graph, placed, in_graph, options.dialect);
        let parts = placed.iter().flat_map(PlacedWeight::parts).count();
        lowered.initializers.extend_from_slice(&constants.initializers[..parts]);
        let tool = Tool::this();
        let model = Model {
            ir_version: options.dialect.ir_version(),
            opset: options.dialect.opset(),
            producer_name: tool.name,
            producer_version: tool.version,
            graph: lowered,
        };
        let mut write = |file: &str, bytes: &[u8]| -> Result<()> {
            let name = format!("{}/{file}", graph.name);
            let record = self.staging.write(&name, bytes)?;
            written.files.insert(name, record);
            Ok(())
        };
        write(MODEL_FILE, &model.encode(DATA_FILE)?)?;
        if let (Dialect::Aimet, Some(encodings)) = (options.dialect, encodings) {
            let grids = &constants.grids[..graph.weights.len()];
            let text = format!("{}\n", aimet::encodings(graph, encodings, grids, options.precision));
            write(ENCODINGS_FILE, text.as_bytes())?;
        }
        self.staging.sync_dir(&graph.name)
    }

    /// Streams a weight into the data file, or into the model where it is small.
    fn weight(
        &self,
        weight: &Weight,
        placed: &PlacedWeight,
        data: &mut DataFile,
        constants: &mut Constants,
        data_name: &str,
        written: &mut Written,
    ) -> Result<()> {
        let source = self.checkpoint.tensor(&weight.source);
        let refused = |bad: NonFinite| refuse_non_finite(source, bad);
        let mut encoder =
            WeightEncoder::new(source, weight, placed.coding, self.export.options.method).map_err(refused)?;
        let mut sink = Sink::start(data, &placed.codes)?;
        let mut sums = ErrorSums::default();
        for block in blocks(source, weight.rows.len()) {
            self.interrupt.check()?;
            let bytes = (block.len() * source.row_bytes()) as u64;
            sums += sink.step(|out| encoder.encode(block, out))?.map_err(refused)?;
            self.progress.advance(bytes, &weight.source);
        }
        let (initializer, sha256) = sink.finish()?;
        constants.initializers.push(initializer);
        let record = |part: &Part, sha256, snr_db| TensorRecord {
            name: part.name.clone(),
            file: data_name.to_owned(),
            source: weight.source.clone(),
            action: TensorAction::Quantized,
            scheme: Some(part.element.name().to_owned()),
            group_size: None,
            bytes: part.len_bytes(),
            sha256,
            snr_db,
        };
        let snr_db = sums.snr_db().filter(|_| placed.coding != Coding::Float).map(rounded);
        written.tensors.push(record(&placed.codes, sha256, snr_db));
        let scales = encoder.finish();
        let beside = match self.export.options.dialect {
            Dialect::Aimet => Some(self.scales(weight, source)?),
            _ => None,
        };
        let zero_rows = beside.as_ref().map_or(0, |(_, scales)| scales.zero_rows).max(scales.zero_rows);
        if zero_rows > 0 {
            written.notes.push(format!(
                "{}: {zero_rows} of {} rows are all zero; their scale is 1",
                weight.name,
                weight.rows.len()
            ));
        }
        constants.grids.extend(beside.map(|(coding, scales)| WeightGrid::new(weight, coding, &scales)));
        for (part, bytes) in placed.grid.iter().flatten().zip([scales.scales, scales.zero_points]) {
            let mut sink = Sink::start(data, part)?;
            sink.step(|out| out.extend_from_slice(&bytes))?;
            let (initializer, sha256) = sink.finish()?;
            constants.initializers.push(initializer);
            written.tensors.push(record(part, sha256, None));
        }
        Ok(())
    }

    /// The grid of a weight that is stored as floats, and how the precision codes it.
    fn scales(&self, weight: &Weight, source: TensorView<'_>) -> Result<(Coding, Scales)> {
        let options = &self.export.options;
        let coding = Coding::of(weight.role, options.precision);
        let refused = |bad: NonFinite| refuse_non_finite(source, bad);
        let mut encoder = WeightEncoder::new(source, weight, coding, options.method).map_err(refused)?;
        let mut codes = Vec::new();
        for block in blocks(source, weight.rows.len()) {
            self.interrupt.check()?;
            codes.clear();
            encoder.encode(block, &mut codes).map_err(refused)?;
        }
        Ok((coding, encoder.finish()))
    }

    /// The rows for `hidden_in`, `[vocab, hidden]`.
    fn embedding(&self) -> Result<FileRecord> {
        let spec = self.checkpoint.specs.iter().find(|s| s.module == Module::Embedding);
        let source = self.checkpoint.tensor(spec.map_or("", |s| &s.name));
        let half = self.export.options.is_quantized();
        let mut file = DataFile::create(self.staging, EMBEDDING_FILE)?;
        for block in blocks(source, source.rows()) {
            self.interrupt.check()?;
            file.append(&embedding_rows(source, block.clone(), half)?)?;
            self.progress.advance((block.len() * source.row_bytes()) as u64, source.name);
        }
        file.close()
    }
}

/// Ranges of `rows` rows, as many in each as a block of the source has.
fn blocks(source: TensorView<'_>, rows: usize) -> impl Iterator<Item = Range<usize>> {
    let length = (BLOCK_BYTES / source.row_bytes().max(1)).max(1);
    (0..rows).step_by(length).map(move |start| start..(start + length).min(rows))
}

/// Rows of the embedding in the type of the file, little endian.
fn embedding_rows(source: TensorView<'_>, rows: Range<usize>, half: bool) -> Result<Vec<u8>> {
    let encoded: Vec<Result<Vec<u8>>> = rows
        .into_par_iter()
        .map(|r| {
            let mut row = vec![0.0; source.row_len()];
            source.decode_row(r, &mut row);
            if let Some(column) = row.iter().position(|x| !x.is_finite()) {
                return Err(refuse_non_finite(source, NonFinite { count: 1, row: r, column }));
            }
            if !half {
                return Ok(row.iter().flat_map(|x| x.to_le_bytes()).collect());
            }
            let halves = row.iter().map(|x| f16::from_f32(*x));
            if let Some(column) = halves.clone().position(f16::is_infinite) {
                return Err(InputError::default()
                    .subject(source.name)
                    .expected("values that float16 holds")
                    .found(format!("{} at [{r}, {column}]", row[column]))
                    .into());
            }
            Ok(halves.flat_map(f16::to_le_bytes).collect())
        })
        .collect();
    let mut bytes = Vec::new();
    for row in encoded {
        bytes.extend(row?);
    }
    Ok(bytes)
}

fn refuse_non_finite(source: TensorView<'_>, bad: NonFinite) -> Failure {
    InputError::default()
        .subject(source.name)
        .expected("finite weights")
        .found(format!("NaN or infinity in row {}, the first at [{}, {}]", bad.row, bad.row, bad.column))
        .hint("the checkpoint is damaged, or training diverged")
        .into()
}

/// Where the bytes of a constant go: into the data file, or into the model. While a block is encoded,
/// the block before it is hashed and written.
struct Sink<'a> {
    data: &'a mut DataFile,
    part: &'a Part,
    inline: Vec<u8>,
    hash: Sha256,
    waiting: Vec<u8>,
    length: u64,
}

impl<'a> Sink<'a> {
    fn start(data: &'a mut DataFile, part: &'a Part) -> Result<Self> {
        if let Some(offset) = part.offset {
            data.pad_to(offset)?;
        }
        let (inline, waiting) = (Vec::new(), Vec::new());
        Ok(Self { data, part, inline, hash: Sha256::new(), waiting, length: 0 })
    }

    fn step<T: Send>(&mut self, encode: impl FnOnce(&mut Vec<u8>) -> T + Send) -> Result<T> {
        let waiting = std::mem::take(&mut self.waiting);
        let (taken, (block, encoded)) = rayon::join(
            || self.take(&waiting),
            || {
                let mut block = Vec::new();
                let encoded = encode(&mut block);
                (block, encoded)
            },
        );
        taken?;
        self.waiting = block;
        Ok(encoded)
    }

    fn take(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.length += bytes.len() as u64;
        match self.part.offset {
            Some(_) => self.data.append(bytes),
            None => {
                self.inline.extend_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// The initializer and the hash of its bytes.
    ///
    /// # Panics
    /// When there are more or fewer bytes than laid out.
    fn finish(mut self) -> Result<(Initializer, Sha256Hex)> {
        let waiting = std::mem::take(&mut self.waiting);
        self.take(&waiting)?;
        let Self { part, inline, hash, length, .. } = self;
        assert_eq!(length, part.len_bytes(), "{}: other bytes than laid out", part.name);
        let data = match part.offset {
            Some(offset) => TensorData::External { offset, length },
            None => TensorData::Inline(inline),
        };
        let (name, shape) = (part.name.clone(), part.shape.clone());
        Ok((Initializer { name, element: part.element, shape, data }, finish_hash(hash)))
    }
}

/// A file written front to back and hashed on the way.
pub(super) struct DataFile {
    path: PathBuf,
    file: File,
    hash: Sha256,
    written: u64,
}

impl DataFile {
    pub(super) fn create(staging: &Staging, name: &str) -> Result<Self> {
        let file = staging.create(name)?;
        Ok(Self { path: staging.path(name), file, hash: Sha256::new(), written: 0 })
    }

    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.file.write_all(bytes).map_err(|e| Failure::io(&self.path, "cannot write", e))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Zeros up to an offset.
    fn pad_to(&mut self, offset: u64) -> Result<()> {
        const ZEROS: [u8; 4096] = [0; 4096];
        while self.written < offset {
            let missing = usize::try_from(offset - self.written).unwrap_or(usize::MAX);
            self.append(&ZEROS[..missing.min(ZEROS.len())])?;
        }
        Ok(())
    }

    /// Waits until a data file, which must be as long as laid out, is on disk.
    fn finish(self, layout: &Layout) -> Result<FileRecord> {
        assert_eq!(self.written, layout.file_bytes, "{}: other bytes than laid out", self.path.display());
        self.close()
    }

    pub(super) fn close(self) -> Result<FileRecord> {
        self.file.sync_all().map_err(|e| Failure::io(&self.path, "cannot write", e))?;
        Ok(FileRecord { bytes: self.written, sha256: finish_hash(self.hash) })
    }
}

/// Anonymous memory that writing stays below, in bytes: the program, blocks in flight, a row of floats
/// and codes per thread, and the scales of the largest weight.
pub fn peak_bytes(graphs: &[LogicalGraph], threads: usize) -> u64 {
    const PROGRAM: u64 = 8 << 20;
    const PER_THREAD: u64 = 256 << 10;
    let weights = || graphs.iter().flat_map(|g| &g.weights);
    let longest = weights().map(|w| w.columns as u64 * 4).max().unwrap_or(0);
    let rows = weights().map(|w| w.rows.len() as u64).max().unwrap_or(0);
    PROGRAM + 6 * (BLOCK_BYTES as u64).max(longest) + threads as u64 * (PER_THREAD + 3 * longest) + 16 * rows
}
