//! Running the binary and looking at what it leaves.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;
use xtask::fixtures::FixtureSpec;

/// What a run of the binary came to.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }

    /// The one line that says why a run failed.
    #[track_caller]
    pub(crate) fn error(&self) -> &str {
        let errors: Vec<_> = self.stderr.lines().filter(|l| l.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "one line says why: {}", self.stderr);
        assert!(!self.stderr.contains("panicked") && !self.stderr.contains("backtrace"), "{}", self.stderr);
        errors[0]
    }
}

/// The binary, in a directory of its own, without the environment's checkpoint.
pub(crate) fn command(dir: &Path) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("spark-convert"));
    command.current_dir(dir).env_remove("SPARK_CHECKPOINT");
    command
}

#[track_caller]
pub(crate) fn run<S: AsRef<OsStr>>(dir: &Path, args: impl IntoIterator<Item = S>) -> Run {
    let output = command(dir).args(args).output().unwrap();
    Run {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A checkpoint in a fresh directory, with room beside it.
pub(crate) struct Model {
    pub(crate) root: TempDir,
    /// Where the checkpoint is (inside a cache for hub-cache fixtures).
    pub(crate) dir: PathBuf,
}

impl Model {
    pub(crate) fn new(spec: FixtureSpec) -> Self {
        let root = TempDir::new().unwrap();
        let dir = spec.write(root.path().join("model")).unwrap().model_dir;
        Self { root, dir }
    }

    pub(crate) fn tiny() -> Self {
        Self::new(FixtureSpec::tiny())
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub(crate) fn out(&self) -> PathBuf {
        self.root.path().join("out")
    }

    /// Runs `quantize --scheme w8a8 --out out` with more arguments.
    pub(crate) fn quantize(&self, more: &[&str]) -> Run {
        self.quantize_to("w8a8", more)
    }

    /// Runs `quantize --scheme SCHEME --out out` with more arguments.
    pub(crate) fn quantize_to(&self, scheme: &str, more: &[&str]) -> Run {
        let mut args =
            vec!["quantize".into(), self.dir.clone().into_os_string(), "--scheme".into(), scheme.into()];
        args.extend(["--out".into(), self.out().into_os_string()]);
        args.extend(more.iter().map(Into::into));
        run(self.root.path(), args)
    }

    /// Runs `verify out --scenario none` against the checkpoint, with more arguments: what the bytes
    /// are, not what the model says.
    pub(crate) fn verify(&self, more: &[&str]) -> Run {
        self.verify_scenario("none", more)
    }

    /// Runs `verify out` with one scenario.
    pub(crate) fn verify_scenario(&self, scenario: &str, more: &[&str]) -> Run {
        let mut args = vec!["verify".into(), self.out().into_os_string(), "--reference".into()];
        args.push(self.dir.clone().into_os_string());
        args.extend(["--scenario".into(), scenario.into()]);
        args.extend(more.iter().map(Into::into));
        run(self.root.path(), args)
    }

    /// The input is refused: exit 3, one line with all of `words`, nothing left beside the model.
    #[track_caller]
    pub(crate) fn refused(&self, words: &[&str]) {
        let before = tree(self.root.path());
        let run = self.quantize(&[]).expect(3);
        for word in words {
            assert!(run.error().contains(word), "{word:?} in {}", run.error());
        }
        assert_eq!(tree(self.root.path()), before, "something was left behind");
        assert_eq!(run.stdout, "");
    }
}

/// Every file below a directory with its bytes.
pub(crate) fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(next) = todo.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.is_symlink() {
                found.insert(path.strip_prefix(dir).unwrap().to_owned(), b"a directory".to_vec());
                todo.push(path);
            } else {
                // A dangling link has no bytes.
                found.insert(path.strip_prefix(dir).unwrap().to_owned(), fs::read(&path).unwrap_or_default());
            }
        }
    }
    found
}

pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

pub(crate) fn write_json(path: &Path, json: &Value) {
    fs::write(path, serde_json::to_vec_pretty(json).unwrap()).unwrap();
}

/// Changes a JSON file.
pub(crate) fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut json = read_json(path);
    edit(&mut json);
    write_json(path, &json);
}

/// A safetensors file taken apart: name, dtype, shape, bytes, in file order, and its metadata.
pub(crate) struct Tensors {
    pub(crate) metadata: Value,
    pub(crate) tensors: Vec<(String, String, Value, Vec<u8>)>,
}

impl Tensors {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let data = &bytes[8 + length..];
        let mut tensors = Vec::new();
        let mut metadata = Value::Null;
        for (name, entry) in header.as_object().unwrap() {
            if name == "__metadata__" {
                metadata = entry.clone();
                continue;
            }
            let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
            let dtype = entry["dtype"].as_str().unwrap().to_owned();
            tensors.push((name.clone(), dtype, entry["shape"].clone(), data[at(0)..at(1)].to_vec()));
        }
        Self { metadata, tensors }
    }

    pub(crate) fn write(&self, path: &Path) {
        let mut header = serde_json::Map::new();
        if !self.metadata.is_null() {
            header.insert("__metadata__".into(), self.metadata.clone());
        }
        let mut data = Vec::new();
        for (name, dtype, shape, bytes) in &self.tensors {
            let start = data.len();
            data.extend(bytes);
            header.insert(
                name.clone(),
                serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}),
            );
        }
        let mut text = Value::Object(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        let file = [(text.len() as u64).to_le_bytes().to_vec(), text, data].concat();
        fs::write(path, file).unwrap();
    }

    pub(crate) fn get(&mut self, name: &str) -> Option<&mut Vec<u8>> {
        self.tensors.iter_mut().find(|t| t.0 == name).map(|t| &mut t.3)
    }
}

/// Every shard of a directory.
pub(crate) fn shards(dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    found.sort();
    found
}

/// All tensors of a directory by name.
pub(crate) fn all_tensors(dir: &Path) -> BTreeMap<String, (String, Value, Vec<u8>)> {
    shards(dir)
        .iter()
        .flat_map(|p| Tensors::read(p).tensors)
        .map(|(name, dtype, shape, bytes)| (name, (dtype, shape, bytes)))
        .collect()
}
