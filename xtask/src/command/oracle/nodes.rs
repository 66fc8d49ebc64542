//! The interpreter against ONNX Runtime, node by node: each is given what the referee had, and the
//! codes are compared; then whole graphs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use safetensors::{Dtype, SafeTensors};
use spark_convert::interpreter::{Data, Session, SliceMut, Tensor, Tensors};
use spark_convert::onnx::{ElementType, Model};

use crate::command::process::{program, root, run};

/// Codes may be this far apart ...
const MAX_STEPS: u32 = 1;
/// ... and this share of what one operator makes has to be equal.
const MIN_EQUAL: f64 = 0.98;
/// Results in float, per node. Both are f32 sums in different orders.
const NODE_DB: f64 = 100.0;
/// Whole graphs between quantized edges, where single steps add up; in 8 bits a step is large.
const WHOLE_DB: f64 = 60.0;
const WHOLE_8_BIT_DB: f64 = 30.0;

/// Makes the graphs, compares, and has the referee read what the converter wrote of them.
pub(super) fn check(python: &str) -> Result<()> {
    let script = root().join("tests/oracle/onnx_nodes.py");
    let temp = tempfile::tempdir()?;
    run(program(python).arg(&script).args(["make", "--out"]).arg(temp.path()))?;
    let mut graphs: Vec<PathBuf> =
        fs::read_dir(temp.path())?.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
    graphs.sort();
    ensure!(!graphs.is_empty(), "the referee made no graphs");
    let mut missed = Vec::new();
    for graph in &graphs {
        compare(graph, &mut missed).with_context(|| graph.display().to_string())?;
    }
    run(program(python).arg(&script).args(["check", "--out"]).arg(temp.path()))?;
    ensure!(missed.is_empty(), "{}", missed.join("; "));
    Ok(())
}

/// What the nodes of one operator came to.
struct Kind {
    codes: usize,
    equal: usize,
    steps: u32,
    /// Smallest signal to noise of a float result.
    db: f64,
}

impl Default for Kind {
    fn default() -> Self {
        Self { codes: 0, equal: 0, steps: 0, db: f64::INFINITY }
    }
}

fn compare(dir: &Path, missed: &mut Vec<String>) -> Result<()> {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let model = Model::decode(&fs::read(dir.join("model.onnx"))?, "model.data")?;
    fs::write(dir.join("again.onnx"), model.encode("model.data")?)?;
    let data = fs::read(dir.join("model.data"))?;
    let file = fs::read(dir.join("tensors.safetensors"))?;
    let (inputs, expected) = tensors(&file)?;
    let session = Session::new(&model, &data)?;
    let makers: BTreeMap<&str, &str> =
        model.graph.nodes.iter().map(|n| (n.outputs[0].as_str(), n.op_type.as_str())).collect();
    let mut kinds: BTreeMap<&str, Kind> = BTreeMap::new();
    let mut unknown = Vec::new();
    session.run_with(&inputs, |tensor, found| {
        let Some(reference) = expected.get(tensor) else {
            return unknown.push(tensor.to_owned());
        };
        // A rounding goes on from our own result and shows how far apart the operator before it was;
        // everything else starts from the referee's.
        let unit = tensor.strip_suffix("_raw");
        let made_by = if unit.is_some() { tensor.to_owned() } else { format!("{tensor}_raw") };
        let op = makers.get(made_by.as_str()).or_else(|| makers.get(tensor)).copied().unwrap_or_default();
        note(kinds.entry(op).or_default(), found, reference);
        if unit.is_none() {
            replace(found, reference);
        }
    })?;
    ensure!(unknown.is_empty(), "the referee did not compute {unknown:?}");
    let (mut least_equal, mut least_db) = ((1.0, "any"), (f64::INFINITY, "any"));
    for (op, kind) in &kinds {
        let share = kind.equal as f64 / kind.codes.max(1) as f64;
        if kind.codes > 0 && (share < MIN_EQUAL || kind.steps > MAX_STEPS) {
            missed.push(format!("{name}: {op}: {:.2} % equal, at most {} apart", 100.0 * share, kind.steps));
        }
        if kind.db.is_nan() || kind.db < NODE_DB {
            missed.push(format!("{name}: {op}: {:.1} dB", kind.db));
        }
        if kind.codes > 0 && share < least_equal.0 {
            least_equal = (share, op);
        }
        if kind.db < least_db.0 {
            least_db = (kind.db, op);
        }
    }
    let steps = kinds.values().map(|k| k.steps).max().unwrap_or_default();
    print!("{name}: {} operators, floats from {:.1} dB ({})", kinds.len(), least_db.0, least_db.1);
    if kinds.values().any(|k| k.codes > 0) {
        let share = 100.0 * least_equal.0;
        print!(", codes at most {steps} apart and from {share:.2} % equal ({})", least_equal.1);
    }
    whole(&name, &session, &inputs, &expected, missed)
}

/// The graph as it runs, without corrections in between: its float outputs.
fn whole(
    name: &str,
    session: &Session<'_>,
    inputs: &Tensors,
    expected: &Tensors,
    missed: &mut Vec<String>,
) -> Result<()> {
    let bar = if name.ends_with("-8") { WHOLE_8_BIT_DB } else { WHOLE_DB };
    let found = session.run(inputs)?;
    let ends = found.iter().filter(|(n, _)| n.ends_with("_f") || name.ends_with("float"));
    let worst = ends
        .map(|(n, tensor)| {
            let reference = expected.get(n).with_context(|| format!("the referee did not compute {n}"))?;
            let (Some(reference), Some(found)) = (reference.floats(), tensor.floats()) else {
                anyhow::bail!("{n} is not float");
            };
            Ok(snr_db(reference, found))
        })
        .collect::<Result<Vec<f64>>>()?
        .into_iter()
        .fold(f64::INFINITY, f64::min);
    println!(", as a whole {worst:.1} dB");
    if worst.is_nan() || worst < bar {
        missed.push(format!("{name}: {worst:.1} dB as a whole, expected {bar}"));
    }
    Ok(())
}

fn note(kind: &mut Kind, found: &Tensor, reference: &Tensor) {
    if let (Some(found), Some(reference)) = (found.floats(), reference.floats()) {
        let db = snr_db(reference, found);
        // A NaN is to stay.
        kind.db = if db.is_nan() { db } else { kind.db.min(db) };
        return;
    }
    let (found, reference) = (codes(found), codes(reference));
    kind.codes += reference.len();
    for (found, reference) in found.iter().zip(&reference) {
        kind.equal += usize::from(found == reference);
        kind.steps = kind.steps.max(found.abs_diff(*reference));
    }
}

fn codes(tensor: &Tensor) -> Vec<i32> {
    match tensor.data() {
        Data::U8(x) => x.iter().map(|x| i32::from(*x)).collect(),
        Data::I8(x) => x.iter().map(|x| i32::from(*x)).collect(),
        Data::U16(x) => x.iter().map(|x| i32::from(*x)).collect(),
        Data::I16(x) => x.iter().map(|x| i32::from(*x)).collect(),
        Data::F32(_) | Data::I64(_) => Vec::new(),
    }
}

/// Gives what follows the referee's elements.
fn replace(found: &mut Tensor, reference: &Tensor) {
    match (found.slice_mut(), reference.data()) {
        (SliceMut::F32(to), Data::F32(from)) => to.copy_from_slice(from),
        (SliceMut::U8(to), Data::U8(from)) => to.copy_from_slice(from),
        (SliceMut::I8(to), Data::I8(from)) => to.copy_from_slice(from),
        (SliceMut::U16(to), Data::U16(from)) => to.copy_from_slice(from),
        (SliceMut::I16(to), Data::I16(from)) => to.copy_from_slice(from),
        (_, other) => panic!("the referee has {}", other.element()),
    }
}

/// Inputs and what the nodes make.
fn tensors(file: &[u8]) -> Result<(Tensors, Tensors)> {
    let (mut inputs, mut made) = (Tensors::new(), Tensors::new());
    for (name, view) in SafeTensors::deserialize(file)?.tensors() {
        let element = match view.dtype() {
            Dtype::F32 => ElementType::F32,
            Dtype::U8 => ElementType::U8,
            Dtype::I8 => ElementType::I8,
            Dtype::U16 => ElementType::U16,
            Dtype::I16 => ElementType::I16,
            other => anyhow::bail!("{name} is {other:?}"),
        };
        let tensor = Tensor::from_le_bytes(element, view.shape(), view.data())?;
        let (kind, name) = name.split_once('.').with_context(|| name.clone())?;
        if kind == "in" { &mut inputs } else { &mut made }.insert(name.to_owned(), tensor);
    }
    Ok((inputs, made))
}

/// Signal to noise in dB; infinite when all is equal.
fn snr_db(signal: &[f32], found: &[f32]) -> f64 {
    assert_eq!(signal.len(), found.len(), "results of different lengths");
    let difference = |(s, f): (&f32, &f32)| f64::from(*s) - f64::from(*f);
    let noise: f64 = signal.iter().zip(found).map(|pair| difference(pair).powi(2)).sum();
    if noise == 0.0 {
        return f64::INFINITY;
    }
    10.0 * (signal.iter().map(|s| f64::from(*s).powi(2)).sum::<f64>() / noise).log10()
}
