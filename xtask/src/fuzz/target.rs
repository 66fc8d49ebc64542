//! The readers, and the files that they are given.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};
use spark_convert::artifact::Manifest;
use spark_convert::calibrate::Importance;
use spark_convert::checkpoint::{Checkpoint, ModelDir, TensorFiles};
use spark_convert::formats::from_manifest;
use spark_convert::interpreter::{Session, Tensor};
use spark_convert::npu::runner::OpenedExport;
use spark_convert::onnx::{Model, ValueInfo};
use spark_convert::opened::Opened;
use spark_convert::spark::{SparkConfig, tensor_specs};
use spark_convert::tokenize::{Chat, ChatTemplate, Tokenizer};
use spark_convert::verify::npu::{ExportFiles, check_export_contract};
use spark_convert::verify::{Finding, check_contract, read_manifest};

use super::memory;
use crate::fixtures::FixtureSpec;
use crate::gguf::{Gguf, Kind, Pair};

/// Every target.
pub const NAMES: [&str; 14] = [
    "safetensors",
    "index",
    "config",
    "tokenizer",
    "chat-template",
    "manifest",
    "artifact-config",
    "artifact-weights",
    "artifact-contract",
    "npu-manifest",
    "onnx",
    "export-contract",
    "gguf",
    "imatrix",
];

/// Longest that reading one small file may take, on a busy machine.
const LONGEST: Duration = Duration::from_secs(20);

/// How a file was read.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// It was taken for good.
    pub accepted: bool,
    /// Most bytes of memory that were held at once.
    pub peak_bytes: u64,
}

/// One kind of file with the reader that is tried on it.
pub struct Target {
    name: &'static str,
    /// Holds the model or artifact, with the damaged file in the place of one of its own.
    root: tempfile::TempDir,
    /// The damaged file, relative to the directory that is opened.
    file: &'static str,
    /// What is damaged instead in runs whose bytes begin as JSON does.
    json_file: Option<&'static str>,
    /// Undamaged files, as far as they are parsed; the first is the one of the directory.
    wholes: Vec<Vec<u8>>,
    /// What follows in the file, which is data.
    tail: Vec<u8>,
    /// Bytes of the whole directory, which is read with it.
    beside: u64,
    /// What the weights of a graph lie in.
    data: Vec<u8>,
    /// Of an artifact, what it was made from, and its manifest.
    made: Option<(Checkpoint, Manifest)>,
}

const MODEL: &str = "model";
const SOURCE: &str = "source";
const GGUF: &str = "model.gguf";
const SINGLE_FILE: &str = "model.safetensors";
const FIRST_SHARD: &str = "model-00001-of-00002.safetensors";

impl Target {
    /// Makes the files of a target.
    ///
    /// # Errors
    /// When there is no target of that name, or `binary` cannot make an artifact.
    pub fn new(binary: &Path, name: &str) -> Result<Self> {
        let Some(name) = NAMES.into_iter().find(|known| *known == name) else {
            bail!("{name}: no such target; there are {}", NAMES.join(", "))
        };
        let root = tempfile::tempdir()?;
        let model = root.path().join(MODEL);
        let fixture = match name {
            // Without an index, which would refuse most of what is wrong before the header is compared.
            "safetensors" => FixtureSpec::tiny().single_file().rotary_buffers().mixed(),
            // A layer of each type; with more of them nothing is new but the time it takes.
            "artifact-contract" | "export-contract" => {
                FixtureSpec::tiny().sizes(|sizes| sizes.layers = 2).edit_config(|config| {
                    config["layer_types"] = json!(["sliding_attention", "full_attention"]);
                })
            }
            _ => FixtureSpec::tiny(),
        };
        fixture.write(&model)?;
        // Between them 4-bit and 8-bit modules, and the operators of both operator sets.
        const QUANTIZE: &[&str] = &["quantize", "--scheme", "w4a8", "--group-size", "32", "--head", "int8"];
        const EXPORT: &[&str] = &["export-npu", "--context", "16", "--prefill", "2", "--calib-tokens", "64"];
        const EXPORT_OLDER: &[&str] =
            &["export-npu", "--context", "16", "--dialect", "qdq21", "--calib-tokens", "64"];
        let json_file = match name {
            "artifact-contract" => Some("config.json"),
            "export-contract" => Some("manifest.json"),
            _ => None,
        };
        let (made_by, file) = match name {
            "safetensors" => (None, SINGLE_FILE),
            "index" => (None, "model.safetensors.index.json"),
            "config" => (None, "config.json"),
            "tokenizer" => (None, "tokenizer.json"),
            "chat-template" => (None, "tokenizer_config.json"),
            "manifest" => (Some(QUANTIZE), "spark-convert.json"),
            "artifact-config" => (Some(QUANTIZE), "config.json"),
            "artifact-weights" | "artifact-contract" => (Some(QUANTIZE), FIRST_SHARD),
            "npu-manifest" => (Some(EXPORT), "manifest.json"),
            "export-contract" => (Some(EXPORT), "step/model.onnx"),
            "gguf" => (None, GGUF),
            "imatrix" => (None, "imatrix.dat"),
            _ => (Some(EXPORT_OLDER), "step/model.onnx"),
        };
        let made = match made_by {
            Some(arguments) => {
                make(binary, arguments, &model, root.path())?;
                let manifest = read_manifest(&ModelDir::open(&model)?)?;
                let manifest = manifest.map_err(|finding| anyhow!("{finding}"))?;
                Some((Checkpoint::open(&root.path().join(SOURCE))?, manifest))
            }
            None => None,
        };
        let data_bytes = match name {
            "gguf" => write_gguf(&model)?,
            "imatrix" => {
                fs::write(model.join(file), importance(&model)?)?;
                0
            }
            _ => 0,
        };
        let mut head = fs::read(model.join(file))?;
        // Weights are data; damage to them is what hashes are for.
        let parsed = match file {
            FIRST_SHARD | SINGLE_FILE => header_end(&head)?,
            GGUF => head.len() - data_bytes,
            _ => head.len(),
        };
        let tail = head.split_off(parsed);
        let mut wholes = vec![head];
        match name {
            "chat-template" => wholes.push(rich_template(&wholes[0])?),
            "imatrix" => wholes.push(importance_gguf(&model)?),
            _ => (),
        }
        if let Some(json) = json_file {
            wholes.push(fs::read(model.join(json))?);
        }
        let data = match name {
            "onnx" => fs::read(model.join("step/model.data"))?,
            _ => Vec::new(),
        };
        let beside = bytes_below(root.path())?;
        let target = Self { name, file, json_file, wholes, tail, beside, data, made, root };
        for whole in &target.wholes {
            target.read(whole).with_context(|| format!("{name}: an undamaged file is refused"))?;
        }
        Ok(target)
    }

    /// Undamaged files, as far as they are parsed.
    pub fn wholes(&self) -> &[Vec<u8>] {
        &self.wholes
    }

    /// Reads a file that begins with these bytes, and holds the reader against its promises. Panics when
    /// the reader does.
    ///
    /// # Errors
    /// What must not be: a refusal that is not one line, too long a time, too much memory.
    pub fn try_on(&self, head: &[u8]) -> Result<Read, String> {
        let start = Instant::now();
        let (read, peak_bytes) = memory::peak(|| self.read(head));
        let time = start.elapsed();
        if let Err(refusal) = &read {
            let line = refusal.to_string();
            if line.is_empty() || line.contains(char::is_control) {
                return Err(format!("the refusal is not one line: {line:?}"));
            }
        }
        if time > LONGEST {
            return Err(format!("took {time:?}"));
        }
        if peak_bytes > self.memory_bound(head.len()) {
            return Err(format!("held {peak_bytes} bytes for a file of {}", head.len()));
        }
        Ok(Read { accepted: read.is_ok(), peak_bytes })
    }

    /// What reading a file may take: JSON as a tree is some tens of times its text, and the rest of the
    /// directory is read with it.
    fn memory_bound(&self, len: usize) -> u64 {
        (16 << 20) + 256 * len as u64 + 64 * self.beside
    }

    /// Reads a file that begins with these bytes, as far as a command would.
    ///
    /// # Errors
    /// When it is refused.
    fn read(&self, head: &[u8]) -> Result<()> {
        let dir = self.root.path().join(MODEL);
        let write = |bytes: &[u8]| fs::write(dir.join(self.file), [bytes, &self.tail].concat());
        // Of data that nobody looks at the length is enough; writing it takes longer than reading the header.
        let write_with_hole = |bytes: &[u8]| -> Result<()> {
            fs::write(dir.join(self.file), bytes)?;
            let file = fs::OpenOptions::new().write(true).open(dir.join(self.file))?;
            Ok(file.set_len((bytes.len() + self.tail.len()) as u64)?)
        };
        // A length in front that was left as it was is made to fit, or nothing but the length would be tried.
        let fitted = |bytes: &[u8]| match bytes.split_at_checked(8) {
            Some((length, text)) if length == &self.wholes[0][..8] => {
                [(text.len() as u64).to_le_bytes().as_slice(), text].concat()
            }
            _ => bytes.to_vec(),
        };
        match self.name {
            "config" => {
                let Ok(json) = serde_json::from_slice(head) else { bail!("not JSON") };
                let config = SparkConfig::parse(&json)?;
                ensure!(!tensor_specs(&config).is_empty());
                look_at(&config.notes)?;
            }
            "tokenizer" => {
                let tokenizer = Tokenizer::from_json(head, 448)?;
                let ids = tokenizer.encode("Tap <tool_call> 42, \u{4f60}\u{597d}\n\t\u{0} caf\u{e9}")?;
                tokenizer.decode(&ids)?;
            }
            "chat-template" => {
                let template = ChatTemplate::from_config(head, None)?;
                let (messages, tools) = conversation();
                template.render(&Chat {
                    messages: &messages,
                    tools: Some(&tools),
                    add_generation_prompt: true,
                    enable_thinking: Some(false),
                })?;
            }
            "manifest" => {
                // With its hash made right, or nothing but the hash would be tried.
                match serde_json::from_slice::<Manifest>(head) {
                    Ok(manifest) => write(&manifest.seal()?)?,
                    Err(_) => write(head)?,
                }
                Opened::open(&dir)?.model()?;
            }
            "npu-manifest" => {
                write(head)?;
                let export = OpenedExport::open(&dir)?;
                let mut runner = export.runner()?;
                runner.prompt(&[export.embedding(3)?, export.embedding(17)?, export.embedding(42)?])?;
                runner.step(&export.embedding(3)?)?;
            }
            "onnx" => {
                let model = Model::decode(head, "model.data")?;
                let session = Session::new(&model, &self.data)?;
                let zeros = |input: &ValueInfo| -> Result<_> {
                    let count = input.shape.iter().try_fold(input.element.bytes(), |n, d| n.checked_mul(*d));
                    // What a caller makes of a shape is the caller's.
                    let zeros = vec![0; count.filter(|n| *n <= 1 << 20).context("a large input")?];
                    Ok((input.name.clone(), Tensor::from_le_bytes(input.element, &*input.shape, &zeros)?))
                };
                session.run(&session.inputs().map(zeros).collect::<Result<_>>()?)?;
            }
            "gguf" => {
                write_with_hole(head)?;
                look_at(&Checkpoint::open_gguf(&dir.join(GGUF), None)?.notes)?;
            }
            "imatrix" => {
                let config = serde_json::from_slice(&fs::read(dir.join("config.json"))?)?;
                look_at(&Importance::parse("imatrix.dat", head, &SparkConfig::parse(&config)?)?.notes)?;
            }
            "artifact-config" => {
                write(head)?;
                Opened::open(&dir)?.model()?;
            }
            "artifact-contract" => {
                match self.json_file.filter(|_| head.starts_with(b"{")) {
                    Some(json) => fs::write(dir.join(json), head)?,
                    None => write(&fitted(head))?,
                }
                let checked = self.artifact_contract(&ModelDir::open(&dir)?);
                self.mend(&dir, head, |whole| Ok(write(whole)?))?;
                refuse(checked?)?;
            }
            "export-contract" => {
                match self.json_file.filter(|_| head.starts_with(b"{")) {
                    Some(json) => fs::write(dir.join(json), head)?,
                    None => write(head)?,
                }
                let checked = self.export_contract(&ModelDir::open(&dir)?);
                self.mend(&dir, head, |whole| Ok(write(whole)?))?;
                refuse(checked?)?;
            }
            "artifact-weights" => {
                write(&fitted(head))?;
                Opened::open(&dir)?.model()?;
            }
            "safetensors" => {
                write_with_hole(&fitted(head))?;
                look_at(&Checkpoint::open(&dir)?.notes)?;
            }
            _ => {
                write(head)?;
                look_at(&Checkpoint::open(&dir)?.notes)?;
            }
        }
        Ok(())
    }
}

impl Target {
    /// Puts the undamaged file back in the place of damaged bytes.
    fn mend(&self, dir: &Path, head: &[u8], write: impl Fn(&[u8]) -> Result<()>) -> Result<()> {
        match self.json_file.filter(|_| head.starts_with(b"{")) {
            Some(json) => Ok(fs::write(dir.join(json), &self.wholes[1])?),
            None => write(&self.wholes[0]),
        }
    }

    /// What verify says of a quantized artifact's configuration and tensors.
    fn artifact_contract(&self, dir: &ModelDir) -> Result<Vec<Finding>> {
        let (source, manifest) = self.made.as_ref().context("an artifact")?;
        let format = from_manifest(&manifest.scheme, &manifest.options).map_err(|e| anyhow!(e))?;
        let files = TensorFiles::open(dir)?;
        Ok(check_contract(dir, &files, source, None, &*format))
    }

    /// What verify says of an export's manifest and graphs.
    fn export_contract(&self, dir: &ModelDir) -> Result<Vec<Finding>> {
        let (source, manifest) = self.made.as_ref().context("an artifact")?;
        let (files, mut findings) = ExportFiles::open(dir).map_err(|finding| anyhow!("{finding}"))?;
        findings.extend(check_export_contract(&files, manifest, source));
        Ok(findings)
    }
}

/// A note that is not one line is told as a refusal that is none.
fn look_at(notes: &[String]) -> Result<()> {
    match notes.iter().find(|note| note.contains(char::is_control)) {
        Some(note) => bail!("{note}"),
        None => Ok(()),
    }
}

/// What verify finds, as a refusal of its first finding.
fn refuse(findings: Vec<Finding>) -> Result<()> {
    for finding in &findings {
        let line = finding.to_string();
        ensure!(!line.is_empty() && !line.contains(char::is_control), "{line}");
    }
    match findings.into_iter().next() {
        Some(first) => bail!("{first}"),
        None => Ok(()),
    }
}

/// Makes an artifact of the model, and puts it in the model's place.
fn make(binary: &Path, arguments: &[&str], model: &Path, root: &Path) -> Result<()> {
    let out = &root.join("artifact");
    let mut command = Command::new(binary);
    command.arg(arguments[0]).arg(model).args(&arguments[1..]).arg("--out").arg(out);
    command.args(["--progress", "none"]).env_remove("SPARK_CHECKPOINT");
    let made = command.output().context("cannot start the binary")?;
    ensure!(made.status.success(), "{command:?}: {}", String::from_utf8_lossy(&made.stderr));
    fs::rename(model, root.join(SOURCE))?;
    fs::rename(out, model)?;
    Ok(())
}

/// A conversation with a tool, for templates.
fn conversation() -> (Vec<Value>, Vec<Value>) {
    let call =
        json!({"function": {"name": "tap", "arguments": {"x": 4.5, "on": "home", "deep": [{"y": null}]}}});
    let messages = vec![
        json!({"role": "system", "content": "Be brief. "}),
        json!({"role": "user", "content": "Hello world, you all\nagain"}),
        json!({"role": "assistant", "content": "<think>hm</think>\n\n", "tool_calls": [call]}),
        json!({"role": "tool", "content": "done \u{e9}\u{1f600}"}),
        json!({"role": "assistant", "content": null, "reasoning_content": "so"}),
    ];
    let parameters = json!({"properties": {"x": {"type": "number"}, "on": {}}});
    (messages, vec![json!({"type": "function", "function": {"name": "tap", "parameters": parameters}})])
}

/// The configuration of a tokenizer with a template that uses most of what the language has.
fn rich_template(tokenizer_config: &[u8]) -> Result<Vec<u8>> {
    let mut config: Value = serde_json::from_slice(tokenizer_config)?;
    let template = json!({"name": "default", "template": include_str!("features.jinja")});
    config["chat_template"] = json!([{"name": "other", "template": ""}, template]);
    config["bos_token"] = json!({"content": "<s>", "special": true});
    Ok(serde_json::to_vec(&config)?)
}

/// An importance matrix of a model as GGUF.
fn importance_gguf(model: &Path) -> Result<Vec<u8>> {
    let mut file = Gguf::of_checkpoint(model, Kind::F32)?;
    file.pairs = vec![("general.type".to_owned(), Pair::Text("imatrix".to_owned()))];
    file.tensors.retain(|t| t.shape.len() == 2);
    for tensor in &mut file.tensors {
        tensor.name += ".in_sum2";
        tensor.shape.remove(0);
        tensor.bytes = (0..tensor.shape[0]).flat_map(|k| (k as f32 + 0.5).to_le_bytes()).collect();
    }
    Ok(file.bytes())
}

/// An importance matrix of a model, in the form that is not GGUF.
fn importance(model: &Path) -> Result<Vec<u8>> {
    let file = Gguf::of_checkpoint(model, Kind::F32)?;
    let matrices: Vec<_> = file.tensors.iter().filter(|t| t.shape.len() == 2).collect();
    let number = |n: u64| -> Result<[u8; 4]> { Ok(i32::try_from(n)?.to_le_bytes()) };
    let mut out = number(matrices.len() as u64)?.to_vec();
    for tensor in matrices {
        out.extend(number(tensor.name.len() as u64)?);
        out.extend(tensor.name.as_bytes());
        out.extend(number(4)?);
        out.extend(number(tensor.shape[1])?);
        out.extend((0..tensor.shape[1]).flat_map(|k| (k as f32 + 0.5).to_le_bytes()));
    }
    Ok(out)
}

/// Writes the model as a GGUF file into its own directory, with the vocabulary that its tokenizer has.
/// Returns the bytes of all tensors.
fn write_gguf(model: &Path) -> Result<usize> {
    let mut file = Gguf::of_checkpoint(model, Kind::Bf16)?;
    let tokenizer: Value = serde_json::from_slice(&fs::read(model.join("tokenizer.json"))?)?;
    let vocabulary = tokenizer["model"]["vocab"].as_object().context("model.vocab")?;
    // Ordinary tokens are 1, unused ones 5.
    let (mut tokens, mut types) = (vec![String::new(); 448], vec![5; 448]);
    for (token, id) in vocabulary {
        let id = usize::try_from(id.as_u64().context("an id")?)?;
        (tokens[id], types[id]) = (token.clone(), 1);
    }
    file.set("tokenizer.ggml.tokens", Pair::Texts(tokens));
    file.set("tokenizer.ggml.token_type", Pair::Numbers(types));
    fs::write(model.join(GGUF), file.bytes())?;
    Ok(file.data_bytes())
}

/// Where the data of a safetensors file begins.
fn header_end(bytes: &[u8]) -> Result<usize> {
    let (length, _) = bytes.split_first_chunk().context("a file of less than 8 bytes")?;
    Ok(8 + usize::try_from(u64::from_le_bytes(*length))?)
}

fn bytes_below(dir: &Path) -> Result<u64> {
    let mut total = 0;
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        total += if path.is_dir() { bytes_below(&path)? } else { path.metadata()?.len() };
    }
    Ok(total)
}
