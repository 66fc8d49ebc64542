//! The programs that artifacts are for, against this runtime on the same artifact.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use safetensors::SafeTensors;
use serde_json::Value;
use spark_convert::opened::{Artifact, Kernels, Opened};
use spark_convert::runtime::{Model, State, argmax};
use spark_convert::tensor::Dtype;

use super::{Source, make};
use crate::command::process::{output, program, root};

/// A form of artifact that vLLM loads, and how many of its modules get which kernel beside the four
/// linears of every layer (gate_proj and up_proj are one module at load).
struct Form {
    scheme: &'static str,
    options: &'static [&'static str],
    /// Part of the kernel's name.
    kernel: &'static str,
    /// Whether the head is one of them.
    head: bool,
    /// Linears of a layer on that kernel, gate and up being one.
    per_layer: u64,
}

const VLLM_FORMS: [Form; 11] = [
    Form { scheme: "w8a8", options: &[], kernel: "Int8", head: false, per_layer: 4 },
    Form { scheme: "w8a8", options: &["--head", "int8"], kernel: "Int8", head: true, per_layer: 4 },
    Form { scheme: "w4a8", options: &["--group-size", "32"], kernel: "WNA16", head: true, per_layer: 4 },
    Form { scheme: "w4a8", options: &["--group-size", "64"], kernel: "WNA16", head: true, per_layer: 4 },
    Form {
        scheme: "w4a8",
        options: &["--group-size", "64", "--head", "bf16"],
        kernel: "WNA16",
        head: false,
        per_layer: 4,
    },
    Form {
        scheme: "w4a8",
        options: &["--group-size", "64", "--asymmetric"],
        kernel: "WNA16",
        head: true,
        per_layer: 4,
    },
    Form {
        scheme: "w4a8",
        options: &["--group-size", "64", "--asymmetric", "--head", "int8"],
        kernel: "WNA16",
        head: false,
        per_layer: 4,
    },
    Form {
        scheme: "w4a8",
        options: &["--group-size", "64", "--head", "int8"],
        kernel: "WNA16",
        head: false,
        per_layer: 4,
    },
    Form { scheme: "w4a8", options: &["--group-size", "128"], kernel: "WNA16", head: true, per_layer: 4 },
    Form {
        scheme: "w4a8",
        options: &["--group-size", "64", "--asymmetric", "--override", "*down_proj=int8"],
        kernel: "WNA16",
        head: true,
        per_layer: 3,
    },
    // What --target-bytes may choose: gate and up in int8, q, k and v left alone, two group sizes.
    Form {
        scheme: "w4a8",
        options: &[
            "--group-size",
            "64",
            "--asymmetric",
            "--override",
            "*gate_proj=int8",
            "--override",
            "*up_proj=int8",
            "--override",
            "*q_k_v_proj=bf16",
            "--override",
            "*down_proj=g32",
        ],
        kernel: "WNA16",
        head: true,
        per_layer: 2,
    },
];

/// Prompts from shorter than the window to several times as long.
fn prompts(vocab: u32) -> Vec<Vec<u32>> {
    let prompt = |n: u32| (0..n).map(|i| (i * i * 31 + i * 17 + 7 * n) % vocab).collect();
    [4, 15, 17, 80].map(prompt).into()
}

/// vLLM loads every form, each linear on the kernel of its scheme, and its log-probabilities are this
/// runtime's.
pub(super) fn vllm(dir: &Path, python: &str, binary: &Path, sources: &[Source]) -> Result<()> {
    let temp = tempfile::tempdir()?;
    let file = temp.path().join("prompts.json");
    fs::write(&file, serde_json::to_string(&prompts(512))?)?;
    if !has_vnni() {
        println!(
            "no VNNI here: the consumer's int8 kernel saturates on full codes, so codes are halved first"
        );
    }
    for source in sources {
        for (i, form) in VLLM_FORMS.iter().enumerate() {
            let four_bits = form.scheme != "w8a8";
            if form.options.contains(&"128") && source.name != "spark-tiny" {
                continue;
            }
            let artifact = temp.path().join(format!("{}-{i}", source.name));
            make(binary, source, form.scheme, form.options, &artifact)?;
            let has_int8 = !four_bits || form.options.iter().any(|o| o.ends_with("int8"));
            if has_int8 && !has_vnni() {
                seven_bits(&artifact)?;
            }
            let mut load = program(python);
            load.arg(dir.join("run_vllm.py")).arg(&artifact).arg(&file);
            // float32 activations where vLLM takes them: bf16 rounding would flip int8 codes.
            load.args(["--threads", "1", "--max-tokens", "24"]);
            load.args(["--dtype", if four_bits { "bfloat16" } else { "float32" }]);
            // A run that fails says where on stdout, too.
            let run = load.env("VLLM_CPU_KVCACHE_SPACE", "1").output()?;
            let said: Value = serde_json::from_slice(&run.stdout).context("vLLM said nothing")?;
            let methods = said["methods"].as_object().context("methods")?;
            let count: u64 = methods
                .iter()
                .filter(|(name, _)| name.contains(form.kernel))
                .filter_map(|(_, count)| count[0].as_u64())
                .sum();
            let label = format!("vllm {}: {} {:?}", source.name, form.scheme, form.options);
            let expected = form.per_layer * source.layers + u64::from(form.head);
            if count != expected {
                bail!("{label}: {count} modules on {}, expected {expected}: {methods:?}", form.kernel);
            }
            if !run.status.success() {
                // vLLM's build for AVX2 has no kernel of 4-bit weights: it loads them and stops at the
                // first token.
                let error = said["error"].as_str().unwrap_or_default();
                ensure!(said["stage"] == "generate" && error.contains("cpu_gemm_wna16"), "{label}: {error}");
                println!("{label}: {count} modules on {}; NOT RUN: {error}", form.kernel);
                fs::remove_dir_all(&artifact)?;
                continue;
            }
            // Without AMX vLLM runs 4-bit weights with float activations.
            let opened = Opened::open(&artifact)?;
            let Opened::Artifact(opened) = &opened else { bail!("{label}: not an artifact") };
            let kernels = if four_bits { Kernels::FloatActivations } else { Kernels::OfTheScheme };
            let all = compare(&label, opened, kernels, said["results"].as_array().context("results")?)?;
            all.check(has_int8 && !has_vnni())?;
            fs::remove_dir_all(&artifact)?;
        }
    }
    Ok(())
}

/// The project's own loader maps w4a16 artifacts into PyTorch's kernel. Its blocks are those of the
/// processor's vector width, so one layout can be run here.
pub(super) fn tinygemm(python: &str, binary: &Path, sources: &[Source]) -> Result<()> {
    let temp = tempfile::tempdir()?;
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let wide = flags.split_whitespace().any(|flag| flag == "avx512vl");
    let layout = if wide { "tinygemm-avx512-n64" } else { "tinygemm-avx2-n32" };
    for source in sources.iter().filter(|source| source.name != "wide") {
        for head in ["4bit", "int8", "bf16"] {
            let artifact = temp.path().join(format!("{}-{head}", source.name));
            make(
                binary,
                source,
                "w4a16",
                &["--group-size", "64", "--layout", layout, "--head", head],
                &artifact,
            )?;
            let mut results = Vec::new();
            // Each prompt starts the program anew; one within and one beyond the window will do.
            for prompt in prompts(512).into_iter().skip(2) {
                let ids: Vec<String> = prompt.iter().map(ToString::to_string).collect();
                let mut decode = program(python);
                decode.arg(root().join("tests/consumers/tinygemm_decode.py")).arg(&artifact);
                let said = output(decode.args(["--tokens", &ids.join(","), "--max-new-tokens", "12"]))?;
                results.push(serde_json::from_str(&said)?);
            }
            let Opened::Artifact(opened) = Opened::open(&artifact)? else { bail!("not an artifact") };
            let label = format!("tinygemm {}: {layout}, {head} head", source.name);
            compare(&label, &opened, Kernels::OfTheScheme, &results)?.check(false)?;
        }
    }
    Ok(())
}

fn compare(label: &str, artifact: &Artifact, kernels: Kernels, results: &[Value]) -> Result<Agreement> {
    let model = artifact.model_on(kernels)?;
    let mut all = Agreement::default();
    for result in results {
        all.add(&agreement(&model, result)?);
    }
    println!("{label}: {all}");
    Ok(all)
}

/// Whether the processor sums products of bytes in 32 bits. Without it oneDNN, which vLLM multiplies
/// int8 with, adds pairs of products in 16 bits, and they saturate: measured on AVX2, 11 to 16 %
/// relative error at codes up to 127, none at codes up to 64.
fn has_vnni() -> bool {
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    flags.split_whitespace().any(|flag| flag == "avx512_vnni" || flag == "avx_vnni")
}

/// Halves the int8 codes of an artifact and doubles their scales, in place: another artifact, which
/// both implementations can compute exactly.
fn seven_bits(artifact: &Path) -> Result<()> {
    for entry in fs::read_dir(artifact)? {
        let path = entry?.path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let mut bytes = fs::read(&path)?;
        let (header, metadata) = SafeTensors::read_metadata(&bytes)?;
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let data = &mut bytes[8 + header + start..8 + header + end];
            if info.dtype == Dtype::I8 {
                for code in data {
                    *code = (code.cast_signed() / 2).cast_unsigned();
                }
            } else if name.ends_with(".weight_scale") && info.dtype == Dtype::F32 {
                for scale in data.as_chunks_mut::<4>().0 {
                    *scale = (f32::from_le_bytes(*scale) * 2.0).to_le_bytes();
                }
            }
        }
        fs::write(&path, bytes)?;
    }
    Ok(())
}

/// How far two implementations of one artifact are from each other.
///
/// They agree to the last bits until a sum on the edge between two int8 codes falls to different
/// sides; from there on they differ as two roundings of the same model do.
#[derive(Default)]
struct Agreement {
    /// Sum of |log-probability difference| over the other's 20 most likely tokens.
    diff_sum: f64,
    /// Log-probabilities compared.
    compared: u32,
    /// Positions whose choice differs although the margin is above 0.1 nats.
    decided_otherwise: usize,
    positions: usize,
}

impl Agreement {
    fn add(&mut self, other: &Self) {
        self.diff_sum += other.diff_sum;
        self.compared += other.compared;
        self.decided_otherwise += other.decided_otherwise;
        self.positions += other.positions;
    }

    fn mean_diff(&self) -> f64 {
        self.diff_sum / f64::from(self.compared)
    }

    /// # Errors
    /// Above a mean of 0.05 nats, or with a decided choice that differs. The choices of an artifact
    /// whose codes were halved are only counted: it is not one that is shipped, and its coarser
    /// weights leave less decided.
    fn check(&self, halved: bool) -> Result<()> {
        let chosen_alike = halved || self.decided_otherwise == 0;
        ensure!(self.mean_diff() <= 0.05 && chosen_alike, "too far apart: {self}");
        Ok(())
    }
}

impl std::fmt::Display for Agreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (mean, otherwise, positions) = (self.mean_diff(), self.decided_otherwise, self.positions);
        write!(f, "mean logprob difference {mean:.5}, {otherwise} of {positions} decided choices differ")
    }
}

/// Feeds what vLLM generated to this runtime and compares the log-probabilities of every position.
fn agreement(model: &Model<'_>, result: &Value) -> Result<Agreement> {
    let ids = |v: &Value| -> Result<Vec<u32>> { Ok(serde_json::from_value(v.clone())?) };
    let (prompt, generated) = (ids(&result["prompt"])?, ids(&result["tokens"])?);
    let fed = [&prompt[..], &generated[..generated.len() - 1]].concat();
    let width = model.config().hidden_size;
    let hidden = model.forward(&mut State::new(model.config()), &fed)?;
    let mut agreement = Agreement::default();
    let tops: Vec<Vec<(u32, f64)>> = serde_json::from_value(result["top"].clone())?;
    for (i, top) in tops.iter().enumerate() {
        let at = prompt.len() - 1 + i;
        let logits = model.logits(&hidden[at * width..(at + 1) * width]);
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let log_sum = max + logits.iter().map(|x| (f64::from(*x) - max).exp()).sum::<f64>().ln();
        for (token, logprob) in top {
            agreement.diff_sum += (f64::from(logits[*token as usize]) - log_sum - logprob).abs();
            agreement.compared += 1;
        }
        let margin = top[0].1 - top[1].1;
        agreement.decided_otherwise += usize::from(argmax(&logits) != top[0].0 && margin > 0.1);
        agreement.positions += 1;
    }
    Ok(agreement)
}
