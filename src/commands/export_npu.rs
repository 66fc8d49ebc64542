//! `export-npu`: open, plan, read texts, calibrate, write graphs, publish.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;
use serde_json::json;

use super::export_options::options;
use super::quantize::{occupied, refuse_precious, same_side_file};
use super::{calibration, model_arg, on_threads, print, print_json, table};
use crate::artifact::{Manifest, Staging, Tool, check_space, free_bytes, hash_file, refuse_overlap};
use crate::calibrate::{Coverage, Sequences, Site, calibrate};
use crate::checkpoint::{Checkpoint, MANIFEST_FILE, ModelDir};
use crate::cli::ExportNpuArgs;
use crate::error::{Exit, Failure, Result};
use crate::estimate;
use crate::interrupt::Interrupt;
use crate::npu::options::Options;
use crate::npu::package::{Calibration, calibration_json, notes, side_files, sizes, write_artifact};
use crate::npu::write::{Writer, peak_bytes};
use crate::npu::{Export, samples, table_range};
use crate::opened::checkpoint_model;
use crate::runtime::Rounding;
use crate::spark::Module;
use crate::{progress, verify};

/// What was asked for, worked out: everything that a run needs to know.
struct Request {
    checkpoint: Checkpoint,
    export: Export,
    /// What to calibrate with; `None` where activations are floats.
    sequences: Option<Sequences>,
    out: PathBuf,
    force: bool,
}

/// What is printed in the end.
#[derive(Serialize)]
struct Outcome<'a> {
    artifact: &'a Path,
    status: &'static str,
    scheme: &'a str,
    options: &'a serde_json::Map<String, serde_json::Value>,
    graphs: usize,
    bytes: u64,
    bytes_per_token: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    calibration: Option<serde_json::Value>,
    notes: &'a [String],
}

pub(super) fn run(args: &ExportNpuArgs) -> anyhow::Result<Exit> {
    let request = request(args)?;
    for note in notes(&request.checkpoint, &request.export) {
        tracing::info!("{note}");
    }
    if args.dry_run {
        let threads = args.run.threads.threads.map_or_else(rayon::current_num_threads, usize::from);
        let tokens = request.sequences.as_ref().map_or(0, Sequences::total);
        let phases = || estimate::exporting(&request.checkpoint, &request.export, tokens);
        let phases = on_threads(args.run.threads, phases)??;
        print_plan(&request, args.json, peak_bytes(&request.export.graphs, threads), &phases)?;
        return Ok(Exit::Done);
    }
    let interrupt = Interrupt::install()?;
    let produced = on_threads(args.run.threads, || produce(request, args.run.progress, &interrupt))??;
    print_outcome(&produced, args.json)?;
    Ok(Exit::Done)
}

fn request(args: &ExportNpuArgs) -> Result<Request> {
    let model = model_arg::resolve(args.model.as_deref(), "MODEL")?;
    let checkpoint = Checkpoint::open(&model)?;
    let options = options(args, &checkpoint.config)?;
    let export = Export::plan(&checkpoint.config, options)?;
    let sequences = match options.is_calibrated() {
        true => Some(calibration::sequences(
            args.calib.as_deref(),
            args.calib_tokens,
            &checkpoint,
            options.context,
        )?),
        false => None,
    };
    let default_name =
        || format!("{}-{}{}", checkpoint.dir.model_name(), Options::SCHEME, options.name_suffix());
    let out = args.out.clone().unwrap_or_else(|| Path::new("artifacts").join(default_name()));
    if out.as_os_str().is_empty() {
        return Err(Failure::usage("--out is empty; is a variable not set?"));
    }
    // A trailing slash or "/." would hide the name that the staging directory is made from.
    let out: PathBuf = out.components().collect();
    refuse_overlap(&out, checkpoint.dir.path())?;
    Ok(Request { checkpoint, export, sequences, out, force: args.force })
}

/// What a run ends with.
struct Produced {
    out: PathBuf,
    manifest: Manifest,
    status: &'static str,
    graphs: usize,
    /// What was told before the run.
    told: Vec<String>,
    /// The content of calibration.json, of a run that calibrated.
    calibration: Option<serde_json::Value>,
}

/// Makes the artifact, unless it is there already.
fn produce(request: Request, style: progress::Style, interrupt: &Interrupt) -> Result<Produced> {
    let graphs = count_graphs(&request.export);
    let told = notes(&request.checkpoint, &request.export);
    let occupied = occupied(&request.out)?;
    if occupied && !request.force {
        return match up_to_date(&request)? {
            Ok(manifest) => {
                let (out, status) = (request.out, "up to date");
                Ok(Produced { out, manifest, status, graphs, told, calibration: None })
            }
            Err(why) => Err(Failure::usage(format!(
                "{}: exists and is not what this command would write ({why}); choose another --out, or replace it with --force",
                request.out.display()
            ))),
        };
    }
    if occupied {
        refuse_precious(&request.out)?;
    }
    check_space(&request.out, request.export.data_bytes())?;
    let staging = Staging::begin(&request.out)?;
    let Request { checkpoint, mut export, sequences, out, force } = request;
    let mut samples = BTreeMap::new();
    let calibration = match &sequences {
        None => None,
        Some(sequences) => {
            let progress = progress::new_in_tokens(style, "calibrate", sequences.total());
            let model = checkpoint_model(&checkpoint, Rounding::None)?;
            let began = Instant::now();
            let mut ranges = calibrate(&model, sequences, progress.as_ref(), interrupt)?;
            progress.finish();
            let seconds = began.elapsed().as_secs_f64();
            tracing::info!("calibrated on {} tokens in {seconds:.1} s", sequences.total());
            let coverage = Coverage::new(sequences, &ranges, &checkpoint.config, export.options.context);
            let table = checkpoint.specs.iter().find(|s| s.module == Module::Embedding);
            ranges.include(Site::Embedding, table_range(checkpoint.tensor(table.map_or("", |s| &s.name)))?);
            export.calibrate(&ranges);
            if export.options.samples {
                samples = samples::write(&model, &export, sequences, &staging, interrupt)?;
            }
            Some(Calibration { ranges, coverage, notes: sequences.notes.clone() })
        }
    };
    let progress = progress::new(style, "export", work(&export, &checkpoint));
    let writer = Writer {
        checkpoint: &checkpoint,
        export: &export,
        staging: &staging,
        progress: progress.as_ref(),
        interrupt,
    };
    let began = Instant::now();
    let manifest = write_artifact(&writer, calibration.as_ref(), samples)?;
    progress.finish();
    interrupt.check()?;
    staging.publish(force)?;
    tracing::info!("wrote {graphs} graphs in {:.1} s", began.elapsed().as_secs_f64());
    let calibration = calibration.map(|c| calibration_json(&c, &export));
    Ok(Produced { out, manifest, status: "written", graphs, told, calibration })
}

/// Source bytes that writing reads: every weight, and the embedding.
fn work(export: &Export, checkpoint: &Checkpoint) -> u64 {
    let weights = export.graphs.iter().flat_map(|g| &g.weights);
    let weights = weights.map(|w| (w.rows.len() * checkpoint.tensor(&w.source).row_bytes()) as u64);
    let table = checkpoint.specs.iter().find(|s| s.module == Module::Embedding);
    weights.sum::<u64>() + table.map_or(0, |s| checkpoint.tensor(&s.name).bytes.len() as u64)
}

/// Whether the target holds, byte for byte, what this command would write: its manifest has the same
/// options, version and calibration tokens, and source and files still hash to what it says. The inner
/// error says what differs.
fn up_to_date(request: &Request) -> Result<Result<Manifest, String>> {
    let Request { checkpoint, export, sequences, out, .. } = request;
    let dir = ModelDir::open(out)?;
    if !dir.has(MANIFEST_FILE) {
        return Ok(Err("it is no artifact of this tool".to_owned()));
    }
    let manifest = match verify::read_manifest(&dir)? {
        Ok(manifest) => manifest,
        Err(finding) => return Ok(Err(finding.to_string())),
    };
    if manifest.tool != Tool::this() {
        return Ok(Err(format!("made by version {}", manifest.tool.version)));
    }
    if manifest.scheme != Options::SCHEME || manifest.options != export.options.to_json() {
        let options = serde_json::Value::Object(manifest.options);
        return Ok(Err(format!("it is {} with {options}", manifest.scheme)));
    }
    if manifest.sizes != sizes(export) || verify::check_source(checkpoint, &manifest.source.files).is_err() {
        return Ok(Err("it was made from another checkpoint".to_owned()));
    }
    if manifest.calibration_sha256 != sequences.as_ref().map(Sequences::sha256) {
        return Ok(Err("it was calibrated with other texts".to_owned()));
    }
    if let Some(name) =
        side_files(checkpoint, export).find(|name| !same_side_file(checkpoint, &manifest, name))
    {
        return Ok(Err(format!("the checkpoint's {name} is another")));
    }
    for (path, record) in &manifest.files {
        let hash = match path.split_once('/') {
            None => dir.open_file(path),
            Some((sub, name)) => ModelDir::open(&out.join(sub)).and_then(|sub| sub.open_file(name)),
        }
        .ok()
        .and_then(|mut file| hash_file(&mut file).ok());
        if hash != Some((record.sha256.clone(), record.bytes)) {
            return Ok(Err(format!("{path} is not what was written")));
        }
    }
    Ok(Ok(manifest))
}

fn print_plan(
    request: &Request,
    json: bool,
    peak_memory_bytes: u64,
    phases: &[estimate::Phase],
) -> anyhow::Result<()> {
    let Request { checkpoint, export, sequences, out, .. } = request;
    let sizes = sizes(export);
    let weights = || {
        let graphs = export.graphs.iter().zip(&export.layouts);
        graphs.flat_map(|(graph, layout)| {
            graph.weights.iter().zip(&layout.weights).map(move |(weight, placed)| (graph, weight, placed))
        })
    };
    let total: usize = sequences.as_ref().map_or(0, Sequences::total);
    if json {
        let tensors: Vec<_> = weights()
            .flat_map(|(graph, weight, placed)| {
                placed.parts().map(move |part| {
                    json!({
                        "name": part.name, "graph": graph.name, "source": weight.source,
                        "dtype": part.element.name(), "shape": part.shape, "bytes": part.len_bytes(),
                    })
                })
            })
            .collect();
        return print_json(&json!({
            "artifact": out, "scheme": Options::SCHEME, "options": export.options.to_json(), "sizes": sizes,
            "bytes": export.data_bytes(), "free_disk_bytes": free_bytes(out), "peak_memory_bytes": peak_memory_bytes,
            "estimated_seconds": estimate::total(phases), "phases": phases,
            "calibration_tokens": total, "notes": notes(checkpoint, export), "tensors": tensors,
        }));
    }
    let mut rows =
        vec![["constant", "graph", "dtype", "shape", "bytes", "bits/weight"].map(str::to_owned).to_vec()];
    for (graph, weight, placed) in weights() {
        for (i, part) in placed.parts().enumerate() {
            #[expect(clippy::cast_precision_loss, reason = "for display")]
            let bits = placed.len_bytes() as f64 * 8.0 / weight.count() as f64;
            rows.push(vec![
                part.name.clone(),
                graph.name.clone(),
                part.element.name().to_owned(),
                format!("{:?}", part.shape),
                part.len_bytes().to_string(),
                if i == 0 { format!("{bits:.2}") } else { String::new() },
            ]);
        }
    }
    let mut text = table::table(&rows);
    text += &format!(
        "\n{}: {} of {} in {}, {} read per token, {:.2} bits per weight{}\n\
         takes {}; writing takes at most {} of anonymous memory\n\
         {} on this machine; nothing was written\n",
        out.display(),
        export.options.precision.name(),
        table::bytes(export.data_bytes()),
        graphs_text(count_graphs(export)),
        table::bytes(sizes.bytes_per_token),
        sizes.bits_per_weight,
        if total > 0 { format!("; calibration on {total} tokens") } else { String::new() },
        table::disk(export.data_bytes(), free_bytes(out)),
        table::bytes(peak_memory_bytes),
        table::estimate(phases),
    );
    Ok(print(&text)?)
}

fn count_graphs(export: &Export) -> usize {
    export.graphs.len() + export.prefill.len()
}

fn graphs_text(graphs: usize) -> String {
    if graphs == 1 { "1 graph".to_owned() } else { format!("{graphs} graphs") }
}

fn print_outcome(produced: &Produced, json: bool) -> anyhow::Result<()> {
    let Produced { out, manifest, status, graphs, told, calibration } = produced;
    let bytes = manifest.files.values().map(|f| f.bytes).sum();
    if json {
        return print_json(&Outcome {
            artifact: out,
            status,
            scheme: &manifest.scheme,
            options: &manifest.options,
            graphs: *graphs,
            bytes,
            bytes_per_token: manifest.sizes.bytes_per_token,
            calibration: calibration.clone(),
            notes: &manifest.notes,
        });
    }
    let mut text = String::new();
    if let Some(calibration) = calibration {
        text += &coverage_table(calibration);
    }
    let snrs = manifest.tensors.iter().filter_map(|t| Some((t.snr_db?, &t.name)));
    let lowest = snrs.min_by(|a, b| a.0.total_cmp(&b.0));
    let snr =
        lowest.map_or_else(String::new, |(db, name)| format!("; lowest weight SNR {db:.2} dB ({name})"));
    text += &format!(
        "{}: {status}; {}, {}, {} read per token{snr}\n",
        out.display(),
        graphs_text(*graphs),
        table::bytes(bytes),
        table::bytes(manifest.sizes.bytes_per_token),
    );
    for note in manifest.notes.iter().filter(|note| !told.contains(note)) {
        tracing::info!("{note}");
    }
    Ok(print(&text)?)
}

/// What calibration has seen: the range of every site, and a line on the texts.
fn coverage_table(calibration: &serde_json::Value) -> String {
    let mut rows = vec![["site", "min", "max", "settled by sequence"].map(str::to_owned).to_vec()];
    for site in calibration["ranges"].as_array().into_iter().flatten() {
        let number = |key: &str| format!("{:.4}", site[key].as_f64().unwrap_or(f64::NAN));
        rows.push(vec![
            site["site"].as_str().unwrap_or_default().to_owned(),
            number("min"),
            number("max"),
            site["last_sequence_that_widened_it"].to_string(),
        ]);
    }
    let coverage = &calibration["coverage"];
    format!(
        "{}\ncalibration: {} texts, {} sequences, {} tokens; longest position {} (window {}, context {})\n",
        table::table(&rows),
        coverage["texts"],
        coverage["sequences"],
        coverage["tokens"],
        coverage["longest_position"],
        coverage["sliding_window"],
        coverage["context"],
    )
}
