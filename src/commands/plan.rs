//! `plan`: which artifact to make of a checkpoint for which machine, and what it costs.
//!
//! Reads headers only. Sizes are those of the plans that `quantize` and `export-npu` would follow.

use std::path::Path;

use serde::Serialize;
use serde_json::json;

use super::{model_arg, print, print_json, table};
use crate::checkpoint::Checkpoint;
use crate::cli::{ConsumerArg, PlanArgs, PriorityArg, TargetArg};
use crate::convert::peak_memory_bytes;
use crate::device::budget::{KvBudget, RotaryTables};
use crate::device::choice::{Build, Caveat, Choice, Evidence, Fidelity, caveat, choose};
use crate::device::probe::Machine;
use crate::device::{Consumer, Priority, Target};
use crate::error::{Exit, Failure, InputError, Result, one_line};
use crate::formats::Layout;
use crate::npu::Export;
use crate::npu::options::Options;
use crate::npu::write::peak_bytes;
use crate::plan::{Action, Plan, stored_bytes_per_token};

/// What was asked for, worked out.
struct Request {
    target: Target,
    /// This machine, where the plan is for it.
    machine: Option<Machine>,
    consumer: Consumer,
    priority: Priority,
    sessions: u32,
    context: u32,
    threads: usize,
}

/// One thing that could be made.
#[derive(Serialize)]
struct Candidate {
    #[serde(skip)]
    build: Build,
    /// What to type; `None` where the checkpoint stays as it is.
    command: Option<String>,
    #[serde(flatten)]
    costs: Option<Costs>,
    /// Why this checkpoint cannot be stored so.
    not_possible: Option<String>,
    #[serde(serialize_with = "text_of")]
    caveat: Option<Caveat>,
    fidelity: Option<Fidelity>,
    agents: Option<&'static str>,
}

/// What a caveat says.
fn text_of<S: serde::Serializer>(caveat: &Option<Caveat>, serializer: S) -> Result<S::Ok, S::Error> {
    caveat.map(Caveat::text).serialize(serializer)
}

/// What one thing costs, in bytes.
#[derive(Clone, Copy, Serialize)]
struct Costs {
    bits_per_weight: f64,
    disk_bytes: u64,
    bytes_per_token: u64,
    /// Anonymous memory that making it takes at most; of an export, without the calibration before.
    making_peak_bytes: u64,
    /// The weights, and what a loader that widens a whole matrix of 4-bit codes to 32 bits takes for the
    /// largest. Mapped weights need less.
    loading_peak_bytes: u64,
}

pub(super) fn run(args: &PlanArgs) -> anyhow::Result<Exit> {
    let request = request(args)?;
    let model = model_arg::resolve(args.model.as_deref(), "MODEL")?;
    let checkpoint = model_arg::open(&model, args.tokenizer.as_deref())?;
    let longest = checkpoint.config.max_position_embeddings;
    if u64::from(request.context) > longest as u64 {
        return Err(Failure::usage(format!(
            "--context {}: expected 2 to {longest}, the positions the model was made for",
            request.context
        ))
        .into());
    }
    let choice = choose(request.target, request.consumer, request.priority, request.sessions);
    let candidates: Vec<_> =
        Build::candidates(request.target).into_iter().map(|b| candidate(b, &checkpoint, &request)).collect();
    let report = Report::new(&request, &checkpoint, choice, candidates);
    match args.json {
        true => print_json(&report.json())?,
        false => print(&report.text())?,
    }
    Ok(Exit::Done)
}

/// From what was typed to what it means. An option without effect is a usage error.
fn request(args: &PlanArgs) -> Result<Request> {
    let mut machine = None;
    let target = match args.target {
        TargetArg::Auto => {
            let probed = Machine::probe();
            let Some(target) = probed.target() else {
                return Err(Failure::usage(format!(
                    "--target auto: this processor ({}) is none that builds are known for; name a target, or take w4a16",
                    probed.architecture
                )));
            };
            machine = Some(probed);
            target
        }
        TargetArg::X86Amx => Target::X86Amx,
        TargetArg::X86Vnni => Target::X86Vnni,
        TargetArg::X86Avx512 => Target::X86Avx512,
        TargetArg::X86Avx2 => Target::X86Avx2,
        TargetArg::Arm64 => Target::Arm64,
        TargetArg::Hexagon => Target::Hexagon,
        TargetArg::Gpu => Target::Gpu,
    };
    if args.consumer.is_some() && !target.has_consumers() {
        return Err(Failure::usage(format!("--consumer has no effect with --target {}", target.name())));
    }
    Ok(Request {
        target,
        machine,
        consumer: match args.consumer {
            None | Some(ConsumerArg::Vllm) => Consumer::Vllm,
            Some(ConsumerArg::Pytorch) => Consumer::Pytorch,
        },
        priority: match args.priority {
            PriorityArg::Fidelity => Priority::Fidelity,
            PriorityArg::Speed => Priority::Speed,
        },
        sessions: args.sessions,
        context: args.context,
        threads: args.threads.threads.map_or_else(rayon::current_num_threads, usize::from),
    })
}

fn candidate(build: Build, checkpoint: &Checkpoint, request: &Request) -> Candidate {
    let (costs, not_possible) = match costs(build, checkpoint, request) {
        Ok(costs) => (Some(costs), None),
        Err(why) => (None, Some(why.to_string())),
    };
    Candidate {
        build,
        command: command_line(build, checkpoint, request),
        costs,
        not_possible,
        caveat: caveat(request.target, request.consumer, build),
        fidelity: build.fidelity(),
        agents: build.agents(),
    }
}

/// What to type for a build.
fn command_line(build: Build, checkpoint: &Checkpoint, request: &Request) -> Option<String> {
    let no_source = build == Build::Npu && checkpoint.gguf.is_some();
    let arguments = build.arguments().filter(|_| !no_source)?;
    let (verb, options) = arguments.split_once(' ').unwrap_or((&arguments, ""));
    let word = |path: &Path| quoted(&one_line(&path.display().to_string()));
    let mut line = format!("spark-convert {verb} {}", word(checkpoint.path()));
    if checkpoint.gguf.is_some() {
        line += &format!(" --tokenizer {}", word(checkpoint.dir.path()));
    }
    if !options.is_empty() {
        line += &format!(" {options}");
    }
    if build == Build::Npu {
        line += &format!(" --context {}", request.context);
    }
    Some(line)
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The sizes of a build, from the plan of the command that makes it.
fn costs(build: Build, checkpoint: &Checkpoint, request: &Request) -> Result<Costs> {
    if build == Build::Npu && checkpoint.gguf.is_some() {
        return Err(InputError::default().found("export-npu takes a checkpoint, not a GGUF file").into());
    }
    if build == Build::Npu {
        let context = usize::try_from(request.context).unwrap_or(usize::MAX);
        let export = Export::plan(&checkpoint.config, Options { context, ..Options::default() })?;
        let sizes = crate::npu::package::sizes(&export);
        return Ok(Costs {
            bits_per_weight: sizes.bits_per_weight,
            disk_bytes: export.data_bytes(),
            bytes_per_token: sizes.bytes_per_token,
            making_peak_bytes: peak_bytes(&export.graphs, request.threads),
            loading_peak_bytes: export.data_bytes(),
        });
    }
    let Some(format) = build.format() else {
        let bytes = checkpoint.files.total_bytes();
        let weights: u64 = checkpoint.specs.iter().map(|s| s.shape.iter().product::<usize>() as u64).sum();
        #[expect(clippy::cast_precision_loss, reason = "for display")]
        let bits_per_weight = bytes as f64 * 8.0 / weights.max(1) as f64;
        return Ok(Costs {
            bits_per_weight,
            disk_bytes: bytes,
            bytes_per_token: stored_bytes_per_token(&checkpoint.files, &checkpoint.config),
            making_peak_bytes: 0,
            loading_peak_bytes: bytes,
        });
    };
    let plan = Plan::new(checkpoint, format.as_ref())?;
    // The blocked layouts are multiplied as they are stored; all other 4-bit codes are packed anew.
    let repacked =
        !matches!(build, Build::W4a16 { layout: Layout::TinygemmAvx512 | Layout::TinygemmAvx2, .. });
    let four_bits = plan.steps().filter(|(_, step)| {
        step.action == Action::Quantize
            && format.codec_at(step.module, step.layer).is_some_and(|c| c.group_size().is_some())
    });
    let widened = four_bits.map(|(_, step)| step.weights().saturating_mul(4)).max().unwrap_or(0);
    let disk_bytes = plan.sizes.tensor_bytes;
    Ok(Costs {
        bits_per_weight: plan.sizes.bits_per_weight,
        disk_bytes,
        bytes_per_token: plan.sizes.bytes_per_token,
        making_peak_bytes: peak_memory_bytes(&plan, checkpoint, format.as_ref(), request.threads),
        loading_peak_bytes: disk_bytes + if repacked { widened } else { 0 },
    })
}

/// Everything that is printed.
struct Report<'a> {
    request: &'a Request,
    checkpoint: &'a Checkpoint,
    choice: Choice,
    candidates: Vec<Candidate>,
    kv: KvBudget,
    rotary: RotaryTables,
    warnings: Vec<String>,
}

impl<'a> Report<'a> {
    fn new(
        request: &'a Request,
        checkpoint: &'a Checkpoint,
        choice: Choice,
        candidates: Vec<Candidate>,
    ) -> Self {
        let (context, sessions) = (u64::from(request.context), u64::from(request.sessions));
        let kv = KvBudget::new(&checkpoint.config, context, sessions);
        let rotary = RotaryTables::new(&checkpoint.config, context);
        let mut report = Self { request, checkpoint, choice, candidates, kv, rotary, warnings: Vec::new() };
        report.warnings = report.warn();
        report
    }

    fn recommended(&self) -> Option<&Candidate> {
        self.candidates.iter().find(|c| c.build == self.choice.build)
    }

    /// Bytes that serving the recommended build takes: loading it, flat caches with room to spare, capped
    /// tables.
    fn needed_bytes(&self) -> Option<u64> {
        let costs = self.recommended()?.costs?;
        let caches =
            if self.choice.build == Build::Npu { self.kv.npu_bytes } else { self.kv.flat_padded_bytes };
        Some(costs.loading_peak_bytes.saturating_add(caches).saturating_add(self.rotary.bytes_served))
    }

    fn memory_bytes(&self) -> Option<u64> {
        self.request.machine.as_ref()?.memory_bytes
    }

    fn warn(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(why) = self.recommended().and_then(|c| c.not_possible.as_ref()) {
            warnings.push(format!("this checkpoint does not go with what is recommended: {why}"));
        }
        if let (Some(needed), Some(there)) = (self.needed_bytes(), self.memory_bytes())
            && needed > there
        {
            warnings.push(format!(
                "serving takes about {}, and this machine has {}: lower --context or --sessions, or take fewer bits",
                table::bytes(needed),
                table::bytes(there)
            ));
        }
        for candidate in &self.candidates {
            if let Some(Caveat::Broken(text)) = candidate.caveat {
                warnings.push(format!("{}: {text}", name(candidate.build)));
            }
        }
        warnings
    }

    fn json(&self) -> serde_json::Value {
        let Choice { build, reason, evidence } = self.choice;
        let (measured, what) = match evidence {
            Evidence::Measured(what) => (true, what),
            Evidence::NotMeasured(what) => (false, what),
        };
        let format = build.format();
        let request = self.request;
        json!({
            "model": self.checkpoint.path(),
            "target": request.target.name(),
            "machine": request.machine,
            "consumer": request.target.has_consumers().then(|| request.consumer.name()),
            "priority": request.priority.name(),
            "sessions": request.sessions,
            "context": request.context,
            "recommendation": {
                "command": self.recommended().and_then(|c| c.command.as_ref()),
                "scheme": format.as_ref().map(|f| f.scheme()),
                "options": format.as_ref().map(|f| f.options()),
                "reason": reason,
                "measured": measured,
                "evidence": what,
                "needed_bytes": self.needed_bytes(),
            },
            "candidates": self.candidates,
            "kv_cache": self.kv,
            "rotary_tables": self.rotary,
            "warnings": self.warnings,
        })
    }

    fn text(&self) -> String {
        let request = self.request;
        let mut text = format!("{}: for {}", self.checkpoint.path().display(), request.target.name());
        if let Some(machine) = &request.machine {
            text += &format!(" (this machine: {} {}", machine.architecture, machine.features.join(" "));
            text += &machine.memory_bytes.map_or_else(String::new, |m| format!(", {}", table::bytes(m)));
            text.push(')');
        }
        if request.target.has_consumers() {
            text += &format!(", {}", request.consumer.name());
        }
        text += &format!(", {} first\n", request.priority.name());
        let command = self.recommended().and_then(|c| c.command.clone());
        text += &format!(
            "  make      {}\n",
            command.unwrap_or_else(|| "nothing: serve the checkpoint as it is".into())
        );
        text += &format!("  why       {}\n", self.choice.reason);
        text += &match self.choice.evidence {
            Evidence::Measured(what) => format!("  measured  {what}\n"),
            Evidence::NotMeasured(what) => format!("  not measured: {what}\n"),
        };
        if let Some(agents) = self.recommended().and_then(|c| c.agents) {
            text += &format!("  agents    {agents}\n");
        }
        if self.choice.build.format().is_some() {
            text += "  closer    the same with --method gptq: as many bytes, nearer outputs, and calibration texts run first\n";
        }
        text.push('\n');
        text += &self.table();
        text += "fidelity: verify on the checkpoint that comes with the project, of 8.4 M parameters; read the order, not \
                 the level\n\n";
        text += &self.budget();
        for candidate in &self.candidates {
            if let Some(Caveat::Unsuited(why)) = candidate.caveat {
                text += &format!("note: {}: {why}\n", name(candidate.build));
            }
        }
        for warning in &self.warnings {
            text += &format!("warning: {warning}\n");
        }
        text
    }

    fn table(&self) -> String {
        let head =
            ["build", "bits/weight", "on disk", "per token", "making", "loading", "KL mean", "same top"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for candidate in &self.candidates {
            let mut row = vec![name(candidate.build)];
            match &candidate.costs {
                Some(costs) => row.extend([
                    format!("{:.2}", costs.bits_per_weight),
                    table::bytes(costs.disk_bytes),
                    table::bytes(costs.bytes_per_token),
                    table::bytes(costs.making_peak_bytes),
                    table::bytes(costs.loading_peak_bytes),
                ]),
                None => row.extend(vec!["-".to_owned(); 5]),
            }
            match candidate.fidelity {
                Some(f) => row.extend([format!("{}", f.kl_mean), format!("{:.1} %", f.same_top_percent)]),
                None => row.extend(["-".to_owned(), "-".to_owned()]),
            }
            rows.push(row);
        }
        table::table(&rows)
    }

    fn budget(&self) -> String {
        let (request, kv, rotary) = (self.request, self.kv, self.rotary);
        let sessions = match request.sessions {
            1 => "1 session".to_owned(),
            n => format!("{n} sessions"),
        };
        let mut text = format!(
            "keys and values of {sessions} of {} positions: {} flat ({} with a quarter to spare), {} where sliding \
             layers keep their window only, {} in an export\n\
             rotary tables in bf16: {} at the model's {} positions, {} at {}: serve with that length\n",
            request.context,
            table::bytes(kv.flat_bytes),
            table::bytes(kv.flat_padded_bytes),
            table::bytes(kv.hybrid_bytes),
            table::bytes(kv.npu_bytes),
            table::bytes(rotary.bytes_at_max),
            rotary.max_positions,
            table::bytes(rotary.bytes_served),
            rotary.served_positions,
        );
        if let Some(needed) = self.needed_bytes() {
            text +=
                &format!("loading and serving what is recommended takes about {}\n", table::bytes(needed));
        }
        text
    }
}

/// A build by what is typed for it.
fn name(build: Build) -> String {
    match build.arguments() {
        None => "the checkpoint".to_owned(),
        Some(arguments) => arguments.trim_start_matches("quantize --scheme ").to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_a_shell_as_they_are() {
        assert_eq!(quoted("out/spark-w4a8.v1"), "out/spark-w4a8.v1");
        assert_eq!(quoted("my model"), "'my model'");
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(quoted(""), "''");
    }
}
