//! 4-bit codes in groups along a row: the codec of the W4A8 and W4A16 schemes.
//!
//! A grid says what a code means, a storage where codes and grids lie; the readers we know combine
//! them as follows (`N` = out, `K` = in, `g` = group size):
//!
//! | storage | grid | tensors of a module |
//! |---|---|---|
//! | GPTQ v1 | symmetric | `qweight` i32 `[K/8, N]`, `qzeros` i32 `[K/g, N/8]`, `scales` bf16 `[K/g, N]`, `g_idx` i32 `[K]` |
//! | pack-quantized | symmetric or zero points | `weight_packed` i32 `[N, K/8]`, `weight_scale` bf16 `[N, K/g]`, `weight_zero_point` i32 `[N/8, K/g]`, `weight_shape` i64 `[2]` |
//! | tinygemm blocks | affine | `weight_packed` u8 `[N/B, K, B/2]`, `scales_and_zeros` bf16 `[K/g, N, 2]` |
//! | row-major | affine | `weight_packed` u8 `[N, K/2]`, `weight_scale` and `weight_zero` bf16 `[N, K/g]` |
//!
//! Scales are bf16 because vLLM keeps them in the model's dtype: a wider scale would be rounded when
//! it is loaded, and every weight of its group would move. Codes are chosen against what is stored.

mod solve;

use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::read::Reader;
use super::{Choice, Codec, Encoder, Fit, Inputs, OutputTensor, Packed, Problem, SolvedRows};
use crate::checkpoint::TensorFiles;
use crate::pack::{self, CodeLayout, GroupGrids, Int4Matrix, PackedCodes};
use crate::quant::int4::{affine, symmetric, zero_point};
use crate::quant::{ErrorSums, Method};
use crate::tensor::{Dtype, EXPONENT_BITS, NonFinite, TensorView, amax_bits};

pub use crate::quant::int4::symmetric::Signs;

/// The 4-bit codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int4 {
    /// Name of the scheme, for the manifest.
    pub scheme: &'static str,
    /// What a code means.
    pub grid: Grid,
    /// Where codes and grids lie.
    pub storage: Storage,
    /// How grids are chosen.
    pub method: Method,
    /// Weights along a row that share a grid.
    pub group_size: usize,
}

/// What a code of 0..=15 means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// `(code - 8) * scale`.
    Symmetric(Signs),
    /// `(code - zero_point) * scale` with a zero point of 0..=15.
    ZeroPoint,
    /// `(code - 8) * scale + zero` with a bf16 zero.
    Affine,
}

/// Where codes and grids lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// GPTQ version 1.
    Gptq,
    /// compressed-tensors `pack-quantized`.
    PackQuantized,
    /// PyTorch's tinygemm blocks of so many rows.
    Blocks(usize),
    /// Two codes a byte along a row, scales and zeros apart.
    RowMajor,
}

/// Rows that one task encodes: a multiple of every block height, and of a cache line of GPTQ words.
const TASK_ROWS: usize = 64;

/// Bytes of transposed codes that are handed over at a time.
const PIECE_BYTES: usize = 4 << 20;

/// GPTQ version 1 stores a zero point minus one: 7 for 8.
const GPTQ_V1_ZEROS: u32 = 0x7777_7777;

impl Int4 {
    fn groups(&self, in_features: usize) -> usize {
        in_features / self.group_size
    }
}

impl Codec for Int4 {
    fn scheme(&self) -> &'static str {
        self.scheme
    }

    fn group_size(&self) -> Option<usize> {
        Some(self.group_size)
    }

    fn fits(&self, [out_features, in_features]: [usize; 2]) -> Fit {
        if !in_features.is_multiple_of(self.group_size) {
            let fitting: Vec<_> = [32, 64, 128, 256]
                .into_iter()
                .filter(|g| in_features.is_multiple_of(*g) && (*g < 256 || self.grid == Grid::Affine))
                .map(|g: usize| g.to_string())
                .collect();
            let fitting = match fitting[..] {
                [] => "no group size that the kernel takes fits".to_owned(),
                _ => format!("--group-size {} would fit", fitting.join(" or ")),
            };
            return Fit::Refuse(format!(
                "rows of {in_features} weights, which groups of {} do not divide; {fitting}",
                self.group_size
            ));
        }
        match self.storage {
            Storage::Gptq | Storage::PackQuantized if !out_features.is_multiple_of(32) => {
                Fit::Refuse(format!("{out_features} rows, and vLLM's 4-bit kernel takes multiples of 32"))
            }
            Storage::Blocks(rows) if !out_features.is_multiple_of(rows) => {
                Fit::Keep(format!("{out_features} rows are not a multiple of the layout's {rows}"))
            }
            _ => Fit::Fits,
        }
    }

    fn row_multiple(&self) -> usize {
        TASK_ROWS
    }

    fn outputs(&self, module: &str, [n, k]: [usize; 2]) -> Vec<OutputTensor> {
        let groups = self.groups(k);
        let tensor = |name: &str, dtype, shape: &[usize]| OutputTensor {
            name: format!("{module}.{name}"),
            dtype,
            shape: shape.to_vec(),
        };
        match self.storage {
            Storage::Gptq => vec![
                tensor("qweight", Dtype::I32, &[k / 8, n]),
                tensor("qzeros", Dtype::I32, &[groups, n / 8]),
                tensor("scales", Dtype::BF16, &[groups, n]),
                tensor("g_idx", Dtype::I32, &[k]),
            ],
            Storage::PackQuantized => {
                let mut tensors = vec![
                    tensor("weight_packed", Dtype::I32, &[n, k / 8]),
                    tensor("weight_scale", Dtype::BF16, &[n, groups]),
                ];
                if self.grid == Grid::ZeroPoint {
                    tensors.push(tensor("weight_zero_point", Dtype::I32, &[n / 8, groups]));
                }
                tensors.push(tensor("weight_shape", Dtype::I64, &[2]));
                tensors
            }
            Storage::Blocks(rows) => vec![
                tensor("weight_packed", Dtype::U8, &[n / rows, k, rows / 2]),
                tensor("scales_and_zeros", Dtype::BF16, &[groups, n, 2]),
            ],
            Storage::RowMajor => vec![
                tensor("weight_packed", Dtype::U8, &[n, k / 2]),
                tensor("weight_scale", Dtype::BF16, &[n, groups]),
                tensor("weight_zero", Dtype::BF16, &[n, groups]),
            ],
        }
    }

    fn encoder<'a>(
        &'a self,
        source: TensorView<'a>,
        rows: Range<usize>,
        choice: Choice<'a>,
    ) -> Box<dyn Encoder + 'a> {
        let shape = [rows.len(), source.row_len()];
        let grids = Vec::with_capacity(rows.len() * self.groups(source.row_len()));
        Box::new(Int4Encoder {
            codec: self,
            source,
            shape,
            first: rows.start,
            choice,
            grids,
            strips: Vec::new(),
            tensor: 0,
            word_row: 0,
        })
    }

    fn solve(&self, weights: &[f32], inputs: &Inputs<'_>) -> SolvedRows {
        solve::solve(self, weights, inputs)
    }

    fn solved_row_bytes(&self, in_features: usize) -> usize {
        in_features / 2 + 4 * self.groups(in_features)
    }

    fn round(&self, weights: &[f32], in_features: usize, importance: Option<&[f32]>) -> Vec<f32> {
        let mut codes = vec![0; self.group_size];
        let mut rounded = vec![0.0; weights.len()];
        let (g, groups) = (self.group_size, self.groups(in_features));
        for (i, (weights, rounded)) in weights.chunks_exact(g).zip(rounded.chunks_exact_mut(g)).enumerate() {
            let importance = importance.map(|columns| &columns[i % groups * g..][..g]);
            let (grid, _) = self.encode_group(weights, importance, &mut codes);
            self.decode_group(&codes, grid, rounded);
        }
        rounded
    }

    fn rounds_inputs(&self) -> bool {
        // tinygemm takes bf16, and a power of two does not change how that rounds.
        matches!(self.storage, Storage::Gptq | Storage::PackQuantized)
    }

    fn takes_importance(&self) -> bool {
        self.method != Method::RoundToNearest
    }

    fn encoder_bytes(&self, [n, k]: [usize; 2]) -> u64 {
        let grids = n as u64 * self.groups(k) as u64 * 4;
        // Beside the grids there is one tensor made of them, twice, since one waits while the next is
        // made; GPTQ's words lie across the rows, so all of them wait for the last row.
        let words = if self.storage == Storage::Gptq { n as u64 * k as u64 / 2 } else { 0 };
        3 * grids + words
    }

    fn missing_consequence(&self, tensor: &str) -> &'static str {
        match (self.storage, tensor.starts_with("lm_head.")) {
            (Storage::Gptq | Storage::PackQuantized, true) => {
                "vLLM leaves the head at its start values, silently, and generates garbage"
            }
            (Storage::Gptq | Storage::PackQuantized, false) => {
                "vLLM tracks missing tensors of unquantized models only: it loads and generates garbage"
            }
            _ => "the loader stops, or multiplies by what happens to be in memory",
        }
    }

    fn read<'a>(
        &self,
        files: &'a TensorFiles,
        module: &str,
        [n, k]: [usize; 2],
    ) -> Result<Packed<'a>, Vec<Problem>> {
        let mut reader = Reader::new(files, self, module, [n, k]);
        let tensors: Vec<_> =
            (0..self.outputs(module, [n, k]).len()).map(|i| reader.tensor(i, &[])).collect();
        let Some(tensors) = tensors.into_iter().collect::<Option<Vec<_>>>() else {
            return Err(reader.problems);
        };
        let (layout, grids) = match self.storage {
            Storage::Gptq => {
                check_words(
                    &mut reader,
                    tensors[1],
                    |_| GPTQ_V1_ZEROS,
                    "version 1 stores zero points of 8 as 7",
                    "readers that follow the file's zero points shift every weight of the group",
                );
                check_words(
                    &mut reader,
                    tensors[3],
                    |k| (k / self.group_size) as u32,
                    "groups in order",
                    "a reader takes the module for reordered and leaves the 4-bit kernel",
                );
                (CodeLayout::Columns, GroupGrids::GroupMajor { scales: tensors[2].bytes })
            }
            Storage::PackQuantized => {
                let zero_points = (self.grid == Grid::ZeroPoint).then(|| tensors[2].bytes);
                let shape = tensors[tensors.len() - 1];
                let expected: Vec<u8> = [n, k].iter().flat_map(|d| (*d as i64).to_le_bytes()).collect();
                if shape.bytes != expected {
                    let found: Vec<_> =
                        shape.bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
                    let what = format!("expected [{n}, {k}], found {found:?}");
                    reader.problem(shape.name, what, "the library unpacks another matrix");
                }
                (CodeLayout::Rows, GroupGrids::RowMajor { scales: tensors[1].bytes, zero_points })
            }
            Storage::Blocks(rows) => {
                (CodeLayout::Blocks { rows }, GroupGrids::ScalesAndZeros(tensors[1].bytes))
            }
            Storage::RowMajor => {
                let (scales, zeros) = (tensors[1].bytes, tensors[2].bytes);
                (CodeLayout::Rows, GroupGrids::RowMajorAffine { scales, zeros })
            }
        };
        self.check_grids(&mut reader, &tensors);
        if !reader.problems.is_empty() {
            return Err(reader.problems);
        }
        let codes = PackedCodes::new(tensors[0].bytes, layout, [n, k]);
        match codes.and_then(|codes| Int4Matrix::new(codes, self.group_size, grids)) {
            Some(matrix) => Ok(Packed::Int4(matrix)),
            None => {
                let what = format!("[{n}, {k}] does not go with groups of {}", self.group_size);
                reader.problem(tensors[0].name, what, "no kernel takes it");
                Err(reader.problems)
            }
        }
    }
}

impl Int4 {
    /// Every scale and zero is one that the codec can have written.
    fn check_grids(&self, reader: &mut Reader<'_, '_>, tensors: &[TensorView<'_>]) {
        let negative = self.grid == Grid::Symmetric(Signs::Both);
        let scale = |s: f32| s.is_finite() && if negative { s != 0.0 } else { s > 0.0 };
        let wanted = if negative { "a finite scale other than zero" } else { "a finite scale above zero" };
        let bad_scale = "the group's weights are NaN, infinite, zero or of the wrong sign";
        let bad_zero = "the group's weights are NaN or infinite";
        match self.storage {
            Storage::Gptq => check_floats(reader, tensors[2], 1, 0, scale, wanted, bad_scale),
            Storage::PackQuantized => check_floats(reader, tensors[1], 1, 0, scale, wanted, bad_scale),
            Storage::Blocks(_) => {
                check_floats(reader, tensors[1], 2, 0, scale, wanted, bad_scale);
                check_floats(reader, tensors[1], 2, 1, f32::is_finite, "a finite zero", bad_zero);
            }
            Storage::RowMajor => {
                check_floats(reader, tensors[1], 1, 0, scale, wanted, bad_scale);
                check_floats(reader, tensors[2], 1, 0, f32::is_finite, "a finite zero", bad_zero);
            }
        }
    }
}

/// Checks every `step`th bf16 of a tensor from `first` on; the first bad one is told.
fn check_floats(
    reader: &mut Reader<'_, '_>,
    tensor: TensorView<'_>,
    step: usize,
    first: usize,
    good: impl Fn(f32) -> bool,
    expected: &str,
    consequence: &'static str,
) {
    let value = |b: &[u8; 2]| bf16::from_le_bytes(*b).to_f32();
    let floats = tensor.bytes.as_chunks::<2>().0.iter().enumerate().skip(first).step_by(step);
    if let Some((at, b)) = floats.into_iter().find(|(_, b)| !good(value(b))) {
        let what = format!("at {}: expected {expected}, found {}", place(at, tensor.shape), value(b));
        reader.problem(tensor.name, what, consequence);
    }
}

/// Checks every 32-bit word of a tensor; the first that differs is told.
fn check_words(
    reader: &mut Reader<'_, '_>,
    tensor: TensorView<'_>,
    expected: impl Fn(usize) -> u32,
    rule: &str,
    consequence: &'static str,
) {
    let mut words = tensor.bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).enumerate();
    if let Some((at, word)) = words.find(|(at, word)| *word != expected(*at)) {
        let show = |w: u32| if tensor.shape.len() == 1 { w.to_string() } else { format!("{w:#010x}") };
        let what = format!(
            "at {}: expected {} ({rule}), found {}",
            place(at, tensor.shape),
            show(expected(at)),
            show(word)
        );
        reader.problem(tensor.name, what, consequence);
    }
}

/// An element's index along every dimension.
fn place(mut at: usize, shape: &[usize]) -> String {
    let mut index: Vec<String> = Vec::new();
    for d in shape.iter().rev() {
        index.push((at % d).to_string());
        at /= d;
    }
    index.reverse();
    format!("[{}]", index.join(", "))
}

/// The stored grid of a group: bits of the bf16 scale, and of the bf16 zero or the zero point.
#[derive(Clone, Copy, Debug)]
struct StoredGrid {
    scale: u16,
    zero: u16,
}

struct Int4Encoder<'a> {
    codec: &'a Int4,
    source: TensorView<'a>,
    /// `[out, in]` of the module.
    shape: [usize; 2],
    /// The first row of the module in the source.
    first: usize,
    choice: Choice<'a>,
    /// `[out, in/g]`, of the rows encoded so far.
    grids: Vec<StoredGrid>,
    /// GPTQ words `[in/8, rows]` of [`TASK_ROWS`] rows each: a word row of the file goes across all rows
    /// of the module.
    strips: Vec<Vec<u32>>,
    /// The output that `finish` is at.
    tensor: usize,
    /// The row of GPTQ words that `finish` is at.
    word_row: usize,
}

/// What a task makes of its rows.
struct Encoded {
    bytes: Vec<u8>,
    strip: Vec<u32>,
    grids: Vec<StoredGrid>,
    sums: ErrorSums,
}

impl Encoder for Int4Encoder<'_> {
    fn encode(&mut self, rows: Range<usize>, bytes: &mut Vec<u8>) -> Result<ErrorSums, NonFinite> {
        let starts: Vec<usize> = rows.clone().step_by(TASK_ROWS).collect();
        let encoded: Vec<Option<Encoded>> = starts
            .into_par_iter()
            .map_init(
                || (vec![0.0f32; self.shape[1]], vec![0u8; TASK_ROWS * self.shape[1]]),
                |(weights, codes), start| {
                    let rows = start..(start + TASK_ROWS).min(rows.end);
                    self.encode_rows(rows, weights, codes)
                },
            )
            .collect();
        let mut sums = ErrorSums::default();
        for task in encoded {
            // Counting and locating is for the error path: decode once more.
            let Some(task) = task else {
                return Err(self.source.non_finite(rows).unwrap_or(NonFinite {
                    count: 1,
                    row: 0,
                    column: 0,
                }));
            };
            bytes.extend(task.bytes);
            self.grids.extend(task.grids);
            if !task.strip.is_empty() {
                self.strips.push(task.strip);
            }
            sums += task.sums;
        }
        Ok(sums)
    }

    fn finish(&mut self, bytes: &mut Vec<u8>) -> bool {
        if self.codec.storage == Storage::Gptq && self.tensor == 0 {
            let word_rows = self.shape[1] / 8;
            let piece = (PIECE_BYTES / (self.shape[0] * 4)).max(1);
            let end = (self.word_row + piece).min(word_rows);
            self.gather_words(self.word_row..end, bytes);
            self.word_row = end;
            if end == word_rows {
                self.strips = Vec::new();
                self.tensor = 1;
            }
            return true;
        }
        // The first tensor of the other storages came from `encode`.
        self.tensor = self.tensor.max(1);
        self.append_tensor(self.tensor, bytes);
        self.tensor += 1;
        self.tensor < self.codec.outputs("", self.shape).len()
    }
}

impl Int4Encoder<'_> {
    fn encode_rows(&self, rows: Range<usize>, weights: &mut [f32], codes: &mut [u8]) -> Option<Encoded> {
        let (codec, k) = (self.codec, self.shape[1]);
        let codes = &mut codes[..rows.len() * k];
        let mut grids = Vec::with_capacity(rows.len() * codec.groups(k));
        let mut sums = ErrorSums::default();
        for (row, codes) in rows.zip(codes.chunks_mut(k)) {
            self.source.decode_row(row, weights);
            if amax_bits(weights) >= EXPONENT_BITS {
                return None;
            }
            let (chosen, importance) = match self.choice {
                Choice::Weights => (None, None),
                Choice::Weighted(importance) => (None, Some(importance)),
                Choice::Solved(solved) => (Some(solve::row(codec, solved, row - self.first, codes)), None),
            };
            let groups = weights.chunks(codec.group_size).zip(codes.chunks_mut(codec.group_size));
            for (group, (weights, codes)) in groups.enumerate() {
                let columns = group * codec.group_size..(group + 1) * codec.group_size;
                let (grid, error) = match &chosen {
                    None => codec.encode_group(weights, importance.map(|h| &h[columns]), codes),
                    Some(grids) => (grids[group], codec.group_error(weights, codes, grids[group])),
                };
                grids.push(grid);
                sums += error;
            }
        }
        let (mut bytes, mut strip) = (Vec::new(), Vec::new());
        match codec.storage {
            Storage::Gptq => strip = pack::pack_columns(codes, k),
            Storage::PackQuantized | Storage::RowMajor => {
                pack::pack_rows(CodeLayout::Rows, codes, k, &mut bytes);
            }
            Storage::Blocks(rows) => pack::pack_rows(CodeLayout::Blocks { rows }, codes, k, &mut bytes),
        }
        Some(Encoded { bytes, strip, grids, sums })
    }

    /// Rows of GPTQ words across all strips.
    fn gather_words(&self, word_rows: Range<usize>, bytes: &mut Vec<u8>) {
        let n = self.shape[0];
        let mut words = vec![0u32; word_rows.len() * n];
        words.par_chunks_mut(n).zip(word_rows).for_each(|(words, r)| {
            for (words, strip) in words.chunks_mut(TASK_ROWS).zip(&self.strips) {
                words.copy_from_slice(&strip[r * words.len()..][..words.len()]);
            }
        });
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    }

    /// The output tensors after the first, which are made of the grids.
    fn append_tensor(&self, tensor: usize, bytes: &mut Vec<u8>) {
        let [n, k] = self.shape;
        let groups = self.codec.groups(k);
        let by_row = |bits: fn(&StoredGrid) -> u16, bytes: &mut Vec<u8>| {
            bytes.extend(self.grids.iter().flat_map(|grid| bits(grid).to_le_bytes()));
        };
        let group_major = (0..groups).flat_map(|group| (0..n).map(move |row| row * groups + group));
        match (self.codec.storage, tensor) {
            (Storage::Gptq, 1) => {
                bytes.extend(std::iter::repeat_n(GPTQ_V1_ZEROS.to_le_bytes(), groups * n / 8).flatten());
            }
            (Storage::Gptq, 2) => {
                bytes.extend(group_major.flat_map(|at| self.grids[at].scale.to_le_bytes()));
            }
            (Storage::Gptq, _) => {
                let g_idx = (0..k).flat_map(|k| ((k / self.codec.group_size) as u32).to_le_bytes());
                bytes.extend(g_idx);
            }
            (Storage::PackQuantized, 2) if self.codec.grid == Grid::ZeroPoint => {
                let zeros: Vec<u8> = self.grids.iter().map(|grid| grid.zero.to_le_bytes()[0]).collect();
                bytes.extend(
                    pack::zero_points::pack_row_major(&zeros, groups).iter().flat_map(|w| w.to_le_bytes()),
                );
            }
            (Storage::PackQuantized, 2..) => {
                bytes.extend([n, k].iter().flat_map(|d| (*d as u64).to_le_bytes()))
            }
            (Storage::Blocks(_), _) => bytes.extend(group_major.flat_map(|at| {
                let StoredGrid { scale, zero } = self.grids[at];
                let ([a, b], [c, d]) = (scale.to_le_bytes(), zero.to_le_bytes());
                [a, b, c, d]
            })),
            (Storage::RowMajor, 2) => by_row(|grid| grid.zero, bytes),
            (Storage::PackQuantized | Storage::RowMajor, _) => by_row(|grid| grid.scale, bytes),
        }
    }
}

impl Int4 {
    /// Chooses the grid and the codes of a group; the errors are of what is stored.
    fn encode_group(
        &self,
        weights: &[f32],
        importance: Option<&[f32]>,
        codes: &mut [u8],
    ) -> (StoredGrid, ErrorSums) {
        let bits = |x: f32| bf16::from_f32(x).to_bits();
        let grid = match self.grid {
            Grid::Symmetric(signs) => {
                let scale = symmetric::quantize_group(weights, importance, self.method, signs, codes);
                StoredGrid { scale: bits(scale), zero: 8 }
            }
            Grid::ZeroPoint => {
                let (scale, zero) = zero_point::quantize_group(weights, importance, self.method, codes);
                StoredGrid { scale: bits(scale), zero: zero.into() }
            }
            Grid::Affine => {
                let (scale, zero) = affine::quantize_group(weights, importance, self.method, codes);
                StoredGrid { scale: bits(scale), zero: bits(zero) }
            }
        };
        (grid, self.group_error(weights, codes, grid))
    }

    /// Squared errors of a group against codes on a stored grid.
    fn group_error(&self, weights: &[f32], codes: &[u8], grid: StoredGrid) -> ErrorSums {
        let scale = bf16::from_bits(grid.scale).to_f32();
        match self.grid {
            Grid::Symmetric(_) => symmetric::group_error(weights, codes, scale),
            Grid::ZeroPoint => zero_point::group_error(weights, codes, scale, grid.zero.to_le_bytes()[0]),
            Grid::Affine => affine::group_error(weights, codes, scale, bf16::from_bits(grid.zero).to_f32()),
        }
    }
}

#[cfg(test)]
#[path = "int4_tests.rs"]
mod tests;
