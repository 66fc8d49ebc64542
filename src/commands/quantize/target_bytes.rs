//! `--target-bytes`: from options to widths, and what is said of them.

use super::Request;
use crate::calibrate::Energies;
use crate::checkpoint::Checkpoint;
use crate::cli::QuantizeArgs;
use crate::commands::scheme;
use crate::error::{Failure, Result};
use crate::formats::W4a8;
use crate::interrupt::Interrupt;
use crate::plan::Plan;
use crate::runtime::Rounding;
use crate::sensitivity::{self, Allocation, Choosing, Fixed, Known};
use crate::{opened, progress};

/// What `--target-bytes` asks for.
pub(super) struct Budget {
    target_bytes: u64,
    pub(super) base: W4a8,
    fixed: Fixed,
}

impl Budget {
    pub(super) fn new(args: &QuantizeArgs, checkpoint: &Checkpoint, target_bytes: u64) -> Result<Self> {
        let (builds, fixed) = scheme::to_choose(args, &checkpoint.config)?;
        Ok(Self { target_bytes, base: sensitivity::smallest(checkpoint, builds)?, fixed })
    }

    /// Chooses the widths of a request's modules.
    pub(super) fn spend(
        &self,
        request: &mut Request,
        style: progress::Style,
        interrupt: &Interrupt,
    ) -> Result<()> {
        let checkpoint = &request.checkpoint;
        let choosing = Choosing::new(checkpoint, &self.base, &self.fixed, self.target_bytes)?;
        let texts = request.sequences.as_ref().map(|sequences| {
            let model = opened::checkpoint_model(checkpoint, Rounding::None)?;
            let progress = progress::new_in_tokens(style, "calibrate", sequences.total());
            let energies = Energies::collect(&model, sequences, progress.as_ref(), interrupt)?;
            progress.finish();
            Ok::<_, Failure>((energies, sequences.sha256()))
        });
        let texts = texts.transpose()?;
        let known = match (&texts, &request.importance) {
            (Some((energies, tokens_sha256)), _) => Known::Energies { energies, tokens_sha256 },
            (None, Some(importance)) => Known::Importance(importance),
            (None, None) => {
                tracing::info!(
                    "--target-bytes: what modules lose is judged by their weights alone; with --calib it is judged by texts"
                );
                Known::Nothing
            }
        };
        let progress = progress::new(style, "sensitivity", choosing.work());
        let (format, allocation) = choosing.run(known, progress.as_ref(), interrupt)?;
        progress.finish();
        request.plan = Plan::new(checkpoint, &format)?;
        request.format = Box::new(format);
        request.allocation = Some(allocation);
        Ok(())
    }
}

/// Modules that a table has room for.
const TABLE_MODULES: usize = 12;

/// The modules that would lose most in the smallest build, and what became of the budget.
pub(super) fn table(allocation: &Allocation) -> String {
    let Allocation { target_bytes, bytes_per_token, error_before, error, modules, .. } = allocation;
    let mut rows = vec![["module", "width", "per token", "lost before", "lost"].map(str::to_owned).to_vec()];
    for module in modules.iter().take(TABLE_MODULES) {
        // Of names that go together the first, and how the others end.
        let (first, others) = module.modules.split_first().map_or(("", &[][..]), |(f, o)| (f.as_str(), o));
        let ends = others.iter().filter_map(|name| Some(format!(", {}", name.rsplit_once('.')?.1)));
        let fixed = if module.fixed { " (as asked)" } else { "" };
        rows.push(vec![
            format!("{first}{}", ends.collect::<String>()),
            format!("{}{fixed}", module.width),
            crate::table::bytes(module.bytes),
            percent(module.error_before),
            percent(module.error),
        ]);
    }
    let more = match modules.len().saturating_sub(TABLE_MODULES) {
        0 => String::new(),
        more => format!("and {more} more, which lose less; --json has all\n"),
    };
    format!(
        "\n{}{more}{bytes_per_token} bytes read per token, of {target_bytes}; errors come to {} of the signal's energy in \
         all, and to {} in the smallest build\n",
        crate::table::table(&rows),
        percent(*error),
        percent(*error_before),
    )
}

fn percent(part: f64) -> String {
    format!("{:.4} %", 100.0 * part)
}
