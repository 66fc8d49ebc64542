//! `quantize`: open, plan, check the destination, convert, publish.

mod target_bytes;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;

use super::{calibration, model_arg, on_threads, print, print_json, scheme, table};
use crate::artifact::{Manifest, Sha256Hex, Staging, check_space, free_bytes, refuse_overlap};
use crate::calibrate::{Energies, Importance, Sequences};
use crate::checkpoint::{Checkpoint, MANIFEST_FILE, ModelDir};
use crate::cli::QuantizeArgs;
use crate::convert::{Conversion, Origin, convert, notes, peak_memory_bytes};
use crate::error::{Exit, Failure, Result};
use crate::estimate::{self, Phase};
use crate::formats::Format;
use crate::guidance::Guidance;
use crate::interrupt::Interrupt;
use crate::plan::{Action, Plan, Step};
use crate::quant::Method;
use crate::sensitivity::{self, Allocation};
use crate::spark::Module;
use crate::{progress, smooth, solve, verify};

/// What was asked for, worked out: everything that a run needs to know.
struct Request {
    checkpoint: Checkpoint,
    format: Box<dyn Format>,
    plan: Plan,
    /// What to calibrate with, where that is done.
    sequences: Option<Sequences>,
    importance: Option<Importance>,
    /// How widths were chosen for a budget.
    allocation: Option<Allocation>,
    /// How long that took.
    choosing: Option<Duration>,
    smooth: bool,
    write_folded: Option<PathBuf>,
    out: PathBuf,
    force: bool,
}

impl Request {
    /// What the user should know before anything is run.
    fn notes(&self) -> Vec<String> {
        let calibration = self.sequences.iter().flat_map(|s| s.notes.iter().cloned());
        let importance = self.importance.iter().flat_map(|i| i.notes.iter().cloned());
        notes(&self.checkpoint, &self.plan).into_iter().chain(calibration).chain(importance).collect()
    }

    /// Adds what the format cannot do with an importance matrix.
    fn note_importance(&mut self) {
        let Some(importance) = &mut self.importance else { return };
        match self.format.codec(Module::LmHead) {
            Some(codec) if !codec.takes_importance() => importance
                .notes
                .push("lm_head: 8 bits have a scale per row, so importance has no effect".to_owned()),
            Some(_) if !importance.has_head() => importance.notes.push(
                "lm_head: the importance matrix says nothing of it, so all of its columns count alike \
                 (llama-imatrix --process-output measures it)"
                    .to_owned(),
            ),
            _ => {}
        }
    }

    /// Hash of what the codes are chosen by beyond the weights.
    fn calibration_sha256(&self) -> Option<Sha256Hex> {
        let decides = self.smooth || self.format.method() == Method::Gptq;
        let tokens = self.sequences.as_ref().filter(|_| decides).map(Sequences::sha256);
        tokens.or_else(|| self.importance.as_ref().map(|importance| importance.sha256.clone()))
    }

    /// Anonymous memory at most.
    fn peak_memory_bytes(&self, threads: usize) -> u64 {
        let converting = peak_memory_bytes(&self.plan, &self.checkpoint, self.format.as_ref(), threads);
        let config = &self.checkpoint.config;
        let solving = if self.format.method() == Method::Gptq { solve::peak_bytes(config) } else { 0 };
        let smoothing = if self.smooth { smooth::peak_bytes(config) } else { 0 };
        let choosing = self.allocation.as_ref().map_or(0, |_| {
            let texts = self.sequences.as_ref().map_or(0, |_| Energies::peak_bytes(config));
            sensitivity::peak_bytes(&self.checkpoint, threads) + texts
        });
        converting.max(solving).max(smoothing).max(choosing)
    }

    /// How long the run will take here.
    fn estimate(&self) -> Result<Vec<Phase>> {
        let (checkpoint, plan, format) = (&self.checkpoint, &self.plan, self.format.as_ref());
        let tokens = self.sequences.as_ref().map_or(0, Sequences::total);
        // A dry run has chosen already, as the run will do.
        let choosing = self.choosing.map(|time| Phase { phase: "choose", seconds: time.as_secs_f64() });
        let mut phases: Vec<Phase> = choosing.into_iter().collect();
        if self.smooth {
            // Looking takes one pass of the texts, and trying about as long again.
            phases.push(Phase { phase: "smooth", seconds: estimate::forward(checkpoint, tokens, 2)? });
        }
        if format.method() == Method::Gptq {
            phases.extend(estimate::solving(checkpoint, format, plan, tokens)?);
        } else {
            let guidance = self.importance.clone().map_or(Guidance::Weights, Guidance::Importance);
            phases.push(estimate::quantizing(checkpoint, format, plan, &guidance)?);
        }
        Ok(phases)
    }

    /// Bytes that the run takes on disk, the work in progress included.
    fn disk_bytes(&self) -> u64 {
        let scratch = |s| solve::scratch_bytes(&self.plan, &self.checkpoint.config, s);
        let solving =
            self.sequences.as_ref().filter(|_| self.format.method() == Method::Gptq).map_or(0, scratch);
        let folded = if self.smooth { self.checkpoint.files.total_bytes() } else { 0 };
        self.plan.sizes.tensor_bytes + solving + folded
    }
}

/// Tokens of a calibration sequence at most: positions beyond it look like those before.
const CALIBRATION_CONTEXT: usize = 2048;

/// What is printed in the end.
#[derive(Serialize)]
struct Outcome<'a> {
    artifact: &'a Path,
    status: &'static str,
    scheme: &'a str,
    tensor_bytes: u64,
    bytes_per_token: u64,
    bits_per_weight: f64,
    quantized_modules: usize,
    weight_snr_db: SnrSummary,
    notes: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    allocation: Option<&'a Allocation>,
}

#[derive(Serialize)]
struct SnrSummary {
    min: Option<f64>,
    mean: Option<f64>,
    lowest_module: Option<String>,
}

pub(super) fn run(args: &QuantizeArgs) -> anyhow::Result<Exit> {
    let interrupt = Interrupt::install()?;
    let request = request(args, &interrupt)?;
    for note in request.notes() {
        tracing::info!("{note}");
    }
    if args.dry_run {
        let threads = args.run.threads.threads.map_or_else(rayon::current_num_threads, usize::from);
        let phases = on_threads(args.run.threads, || request.estimate())??;
        print_plan(&request, args.json, request.peak_memory_bytes(threads), &phases)?;
        return Ok(Exit::Done);
    }
    let (manifest, status) =
        on_threads(args.run.threads, || produce(&request, args.run.progress, &interrupt))??;
    print_outcome(&request, &manifest, status, args.json)?;
    Ok(Exit::Done)
}

fn request(args: &QuantizeArgs, interrupt: &Interrupt) -> anyhow::Result<Request> {
    let model = model_arg::resolve(args.model.as_deref(), "MODEL")?;
    let checkpoint = model_arg::open(&model, args.tokenizer.as_deref())?;
    let budget = args
        .target_bytes
        .map(|target_bytes| target_bytes::Budget::new(args, &checkpoint, target_bytes))
        .transpose()?;
    let format: Box<dyn Format> = match &budget {
        Some(budget) => Box::new(budget.base.clone()),
        None => scheme::format(args, &checkpoint.config)?,
    };
    let plan = Plan::new(&checkpoint, format.as_ref())?;
    let target = args.target_bytes.map_or_else(String::new, |bytes| format!("-{bytes}B"));
    let imatrix = if args.imatrix.is_some() { "-imatrix" } else { "" };
    let smooth = if args.smooth { "-smooth" } else { "" };
    let default_name = || {
        let (name, scheme, suffix) = (checkpoint.model_name(), format.scheme(), format.name_suffix());
        format!("{name}-{scheme}{suffix}{target}{imatrix}{smooth}")
    };
    let out = args.out.clone().unwrap_or_else(|| Path::new("artifacts").join(default_name()));
    if out.as_os_str().is_empty() {
        return Err(Failure::usage("--out is empty; is a variable not set?").into());
    }
    // A trailing slash or "/." would hide the name that the staging directory is made from.
    let out: PathBuf = out.components().collect();
    refuse_overlap(&out, checkpoint.dir.path())?;
    refuse_overlap(&out, checkpoint.path())?;
    if args.smooth && checkpoint.gguf.is_some() {
        return Err(Failure::usage(
            "--smooth: takes a checkpoint in safetensors, of which it makes a folded copy",
        )
        .into());
    }
    let asked_for = budget.is_some() && (args.calib.is_some() || args.calib_tokens.is_some());
    let sequences = if args.smooth || format.method() == Method::Gptq || asked_for {
        let context = CALIBRATION_CONTEXT.min(checkpoint.config.max_position_embeddings);
        Some(calibration::sequences(args.calib.as_deref(), args.calib_tokens, &checkpoint, context)?)
    } else {
        None
    };
    let write_folded: Option<PathBuf> = args.write_folded.as_ref().map(|dir| dir.components().collect());
    if let Some(folded) = &write_folded {
        refuse_overlap(folded, checkpoint.dir.path())?;
        if *folded == out {
            return Err(Failure::usage("--write-folded: is where the artifact goes").into());
        }
    }
    let importance = args.imatrix.as_deref().map(|path| Importance::read(path, &checkpoint.config));
    let mut request = Request {
        importance: importance.transpose()?,
        checkpoint,
        format,
        plan,
        sequences,
        allocation: None,
        choosing: None,
        smooth: args.smooth,
        write_folded,
        out,
        force: args.force,
    };
    if let Some(budget) = budget {
        let start = Instant::now();
        on_threads(args.run.threads, || budget.spend(&mut request, args.run.progress, interrupt))??;
        request.choosing = Some(start.elapsed());
    }
    request.note_importance();
    Ok(request)
}

/// Makes the artifact, unless it is there already.
fn produce(
    request: &Request,
    style: progress::Style,
    interrupt: &Interrupt,
) -> Result<(Manifest, &'static str)> {
    let Request { out, force, write_folded, .. } = request;
    if occupied(out)? && !force {
        return match up_to_date(request)? {
            Ok(manifest) => Ok((manifest, "up to date")),
            Err(why) => Err(Failure::usage(format!(
                "{}: exists and is not what this command would write ({why}); choose another --out, or replace it with --force",
                out.display()
            ))),
        };
    }
    for dir in [Some(out), write_folded.as_ref()].into_iter().flatten() {
        if occupied(dir)? {
            if !force {
                let why = "exists; choose another --write-folded, or replace it with --force";
                return Err(Failure::usage(format!("{}: {why}", dir.display())));
            }
            refuse_precious(dir)?;
        }
    }
    check_space(out, request.disk_bytes())?;
    let staging = Staging::begin(out)?;
    let (manifest, guidance) = match &request.sequences {
        Some(sequences) if request.smooth => {
            smooth_and_write(request, sequences, &staging, style, interrupt)?
        }
        _ => write(request, &request.checkpoint, None, &staging, style, interrupt)?,
    };
    staging.publish(*force)?;
    // The work in progress goes when the artifact is there.
    if let Guidance::Solution(solution) = guidance {
        solution.remove()?;
    }
    Ok((manifest, "written"))
}

/// Moves scales in a copy of the checkpoint, and quantizes that.
fn smooth_and_write(
    request: &Request,
    sequences: &Sequences,
    staging: &Staging,
    style: progress::Style,
    interrupt: &Interrupt,
) -> Result<(Manifest, Guidance)> {
    let Request { checkpoint, format, out, force, write_folded, .. } = request;
    let progress = progress::new_in_tokens(style, "smooth", smooth::work(sequences));
    let smoothing = smooth::choose(checkpoint, format.as_ref(), sequences, progress.as_ref(), interrupt)?;
    progress.finish();
    let (moved, of) = smoothing.count();
    tracing::info!("scales were moved in {moved} of {of} places, where the outputs lost less for it");
    // A copy that nobody asked to keep goes with its staging.
    let beside = || out.with_file_name(format!(".{}.folded", out.file_name().unwrap_or_default().display()));
    let folded = Staging::begin(&write_folded.clone().unwrap_or_else(beside))?;
    smooth::write_folded(checkpoint, &smoothing, &folded, interrupt)?;
    let tokens_sha256 = sequences.sha256();
    let origin = Origin { checkpoint, smoothing: &smoothing, tokens_sha256: &tokens_sha256 };
    let written =
        write(request, &Checkpoint::open(&folded.path(""))?, Some(origin), staging, style, interrupt)?;
    if write_folded.is_some() {
        folded.publish(*force)?;
    }
    Ok(written)
}

/// Writes the artifact of `checkpoint`, which is that of the request or a folded one.
fn write(
    request: &Request,
    checkpoint: &Checkpoint,
    origin: Option<Origin<'_>>,
    staging: &Staging,
    style: progress::Style,
    interrupt: &Interrupt,
) -> Result<(Manifest, Guidance)> {
    let Request { format, plan, sequences, importance, allocation, out, .. } = request;
    let guidance = match (sequences, importance) {
        (Some(sequences), _) if format.method() == Method::Gptq => {
            let work = solve::work(&checkpoint.config, sequences);
            let progress = progress::new_in_tokens(style, "calibrate", work);
            let solution = solve::solve(
                checkpoint,
                format.as_ref(),
                plan,
                sequences,
                out,
                progress.as_ref(),
                interrupt,
            )?;
            progress.finish();
            Guidance::Solution(solution)
        }
        (_, Some(importance)) => Guidance::Importance(importance.clone()),
        _ => Guidance::Weights,
    };
    let progress = progress::new(style, "quantize", work(plan, checkpoint));
    let (format, allocation) = (format.as_ref(), allocation.as_ref());
    let conversion = Conversion { checkpoint, format, plan, guidance: &guidance, origin, allocation };
    let manifest = convert(conversion, staging, progress.as_ref(), interrupt)?;
    progress.finish();
    interrupt.check()?;
    Ok((manifest, guidance))
}

/// Source bytes that the steps of a plan read.
fn work(plan: &Plan, checkpoint: &Checkpoint) -> u64 {
    let bytes = |step: &Step| step.rows.len() * checkpoint.tensor(&step.source).row_bytes();
    plan.steps().map(|(_, step)| bytes(step) as u64).sum()
}

/// Whether something is at the target (an empty directory is nothing).
pub(super) fn occupied(out: &Path) -> Result<bool> {
    match std::fs::symlink_metadata(out) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Failure::io(out, "cannot open", e)),
        Ok(_) if !out.is_dir() => Err(Failure::usage(format!("{}: is not a directory", out.display()))),
        Ok(_) => {
            let mut entries = std::fs::read_dir(out).map_err(|e| Failure::io(out, "cannot list", e))?;
            Ok(entries.next().is_some())
        }
    }
}

/// `--force` replaces a directory, not the one the user stands in.
pub(super) fn refuse_precious(out: &Path) -> Result<()> {
    let here = std::env::current_dir().map_err(|e| Failure::io(Path::new("."), "cannot open", e))?;
    match out.canonicalize() {
        Ok(target) if here.starts_with(&target) => {
            Err(Failure::usage(format!("{}: is or holds the current directory", out.display())))
        }
        _ => Ok(()),
    }
}

/// Whether the target holds, byte for byte, what this command would write: its manifest has the same
/// options and version, and source and files still hash to what it says. The inner error says what
/// differs.
fn up_to_date(request: &Request) -> Result<Result<Manifest, String>> {
    let Request { checkpoint, format, plan, out, .. } = request;
    let dir = ModelDir::open(out)?;
    if !dir.has(MANIFEST_FILE) {
        return Ok(Err("it is no artifact of this tool".to_owned()));
    }
    let manifest = match verify::read_manifest(&dir)? {
        Ok(manifest) => manifest,
        Err(finding) => return Ok(Err(finding.to_string())),
    };
    if manifest.tool != crate::artifact::Tool::this() {
        return Ok(Err(format!("made by version {}", manifest.tool.version)));
    }
    if manifest.scheme != format.scheme() || manifest.options != format.options() {
        let options = serde_json::Value::Object(manifest.options);
        return Ok(Err(format!("it is {} with {options}", manifest.scheme)));
    }
    if manifest.allocation != request.allocation {
        let target = |a: &Option<Allocation>| {
            a.as_ref()
                .map_or("no --target-bytes".to_owned(), |a| format!("--target-bytes {}", a.target_bytes))
        };
        let (made, asked) = (target(&manifest.allocation), target(&request.allocation));
        let why = if made == asked { "other texts, or another importance matrix".to_owned() } else { made };
        return Ok(Err(format!("it was made with {why}")));
    }
    if manifest.calibration_sha256 != request.calibration_sha256() {
        return Ok(Err("it was calibrated with other texts, or another importance matrix".to_owned()));
    }
    if manifest.smoothing.is_some() != request.smooth {
        return Ok(Err(format!("it was made {} --smooth", if request.smooth { "without" } else { "with" })));
    }
    if manifest.sizes != plan.sizes.into()
        || verify::check_source(checkpoint, &manifest.source.files).is_err()
    {
        return Ok(Err("it was made from another checkpoint".to_owned()));
    }
    if let Some(name) = checkpoint.side_files.iter().find(|name| !same_side_file(checkpoint, &manifest, name))
    {
        return Ok(Err(format!("the checkpoint's {name} is another")));
    }
    Ok(match verify::check_integrity(&dir, &manifest, None)?.first() {
        Some(finding) => Err(finding.to_string()),
        None => Ok(manifest),
    })
}

pub(super) fn same_side_file(checkpoint: &Checkpoint, manifest: &Manifest, name: &str) -> bool {
    let hash = checkpoint.dir.open_file(name).ok().and_then(|mut f| crate::artifact::hash_file(&mut f).ok());
    matches!((hash, manifest.files.get(name)), (Some((sha256, _)), Some(record)) if sha256 == record.sha256)
}

fn print_plan(request: &Request, json: bool, peak_memory_bytes: u64, phases: &[Phase]) -> anyhow::Result<()> {
    let Request { format, plan, out, .. } = request;
    let sizes = plan.sizes;
    if json {
        let tensors: Vec<_> = plan
            .steps()
            .flat_map(|(file, step)| {
                step.outputs.iter().map(move |output| {
                    json!({
                        "name": output.name, "file": file, "source": step.source, "action": step.action,
                        "dtype": output.dtype.to_string(), "shape": output.shape, "bytes": output.len_bytes(),
                    })
                })
            })
            .collect();
        let mut report = json!({
            "artifact": out, "scheme": format.scheme(), "options": format.options(), "sizes": sizes,
            "disk_bytes": request.disk_bytes(), "free_disk_bytes": free_bytes(out),
            "peak_memory_bytes": peak_memory_bytes, "estimated_seconds": estimate::total(phases),
            "phases": phases, "notes": request.notes(), "tensors": tensors,
        });
        if let Some(allocation) = &request.allocation {
            report["allocation"] = json!(allocation);
        }
        return print_json(&report);
    }
    let mut rows =
        vec![["tensor", "action", "dtype", "shape", "bytes", "bits/weight"].map(str::to_owned).to_vec()];
    for (_, step) in plan.steps() {
        for (i, output) in step.outputs.iter().enumerate() {
            #[expect(clippy::cast_precision_loss, reason = "for display")]
            let bits = step.len_bytes() as f64 * 8.0 / step.weights() as f64;
            rows.push(vec![
                output.name.clone(),
                if step.action == Action::Copy { "copy" } else { "quantize" }.to_owned(),
                output.dtype.to_string(),
                format!("{:?}", output.shape),
                output.len_bytes().to_string(),
                if i == 0 { format!("{bits:.2}") } else { String::new() },
            ]);
        }
    }
    let mut text = table::table(&rows);
    text += &format!(
        "\n{}: {} of {}, {} read per token, {:.2} bits per weight, {} modules quantized\n\
         takes {} and at most {} of anonymous memory\n\
         {} on this machine; nothing was written\n",
        out.display(),
        format.scheme(),
        table::bytes(sizes.tensor_bytes),
        table::bytes(sizes.bytes_per_token),
        sizes.bits_per_weight,
        sizes.quantized_modules,
        table::disk(request.disk_bytes(), free_bytes(out)),
        table::bytes(peak_memory_bytes),
        table::estimate(phases),
    );
    text += &request.allocation.as_ref().map_or_else(String::new, target_bytes::table);
    Ok(print(&text)?)
}

fn print_outcome(
    request: &Request,
    manifest: &Manifest,
    status: &'static str,
    json: bool,
) -> anyhow::Result<()> {
    let sizes = manifest.sizes;
    let snrs: Vec<_> = manifest.tensors.iter().filter_map(|t| Some((t.snr_db?, &t.name))).collect();
    let lowest = snrs.iter().min_by(|a, b| a.0.total_cmp(&b.0));
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    let mean = (!snrs.is_empty()).then(|| snrs.iter().map(|s| s.0).sum::<f64>() / snrs.len() as f64);
    if json {
        return print_json(&Outcome {
            artifact: &request.out,
            status,
            scheme: &manifest.scheme,
            tensor_bytes: sizes.tensor_bytes,
            bytes_per_token: sizes.bytes_per_token,
            bits_per_weight: sizes.bits_per_weight,
            quantized_modules: sizes.quantized_modules,
            weight_snr_db: SnrSummary {
                min: lowest.map(|l| l.0),
                mean: mean.map(crate::artifact::rounded),
                lowest_module: lowest.map(|l| crate::plan::module_of(l.1).to_owned()),
            },
            notes: &manifest.notes,
            allocation: manifest.allocation.as_ref(),
        });
    }
    let snr = match (lowest, mean) {
        (Some((min, name)), Some(mean)) => {
            format!("; weight SNR mean {mean:.2} dB, lowest {min:.2} dB ({})", crate::plan::module_of(name))
        }
        _ => String::new(),
    };
    let allocation = manifest.allocation.as_ref().map_or_else(String::new, target_bytes::table);
    Ok(print(&format!(
        "{}: {status}; {} {}, {} read per token, {:.2} bits per weight, {} modules quantized{snr}\n{allocation}",
        request.out.display(),
        manifest.scheme,
        table::bytes(sizes.tensor_bytes),
        table::bytes(sizes.bytes_per_token),
        sizes.bits_per_weight,
        sizes.quantized_modules,
    ))?)
}
