//! Which steps of an export are run: a step costs a pass over all weights, and the interesting positions are
//! far apart. What caches hold where a stretch begins comes from the checkpoint.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::spark::{LayerType, SparkConfig};

/// Weights that all steps together may multiply by: a minute or two on two cores.
const BUDGET: u64 = 100_000_000_000;

/// The same for tokens that only the checkpoint takes in, many in one call.
const PREFILL_BUDGET: u64 = 4_000_000_000_000;

/// Windows that the first stretch is long, if it may.
const WINDOWS: usize = 3;

/// Steps at the end of the context.
const LAST: usize = 8;

/// Fewest steps of a stretch, however large the model.
const FEWEST: usize = 4;

/// Positions that are run one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stretch {
    /// The first.
    pub from: usize,
    /// One past the last.
    pub to: usize,
}

/// What is run, and what is not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stretches {
    /// In order; the first begins with an empty cache, the others with the checkpoint's keys and values.
    pub run: Vec<Stretch>,
    /// Why some positions are left out, if any are.
    pub left_out: Option<String>,
}

impl Stretches {
    /// Of an export of `context` positions of a model with `weights` weights. The whole beginning, through
    /// three windows, and the end of the context where that fits the budget; else the beginning, the steps
    /// around the one that fills the window, and the end.
    pub fn new(config: &SparkConfig, context: usize, weights: u64) -> Self {
        let weights = weights.max(1);
        let steps = usize::try_from(BUDGET / weights).unwrap_or(usize::MAX).max(3 * FEWEST);
        let prefill = usize::try_from(PREFILL_BUDGET / weights).unwrap_or(usize::MAX);
        let slides = config.layer_types.contains(&LayerType::Sliding);
        let window = if slides { config.sliding_window.min(context) } else { context };
        let wanted = WINDOWS.saturating_mul(window).min(context);
        let small = wanted.saturating_add(LAST) <= steps;
        let ranges: [Range<usize>; 3] = if small {
            [0..wanted, wanted..wanted, context.saturating_sub(LAST)..context]
        } else {
            let third = (steps / 3).max(FEWEST);
            let wrap = window.saturating_sub(third / 2 + 1);
            [0..third.min(context), wrap..(wrap + third).min(context), context.saturating_sub(third)..context]
        };
        let mut run: Vec<Stretch> = Vec::new();
        for range in ranges {
            let from = range.start.max(run.last().map_or(0, |s| s.to));
            // Where a stretch meets the one before it there is nothing to take over.
            match run.last_mut() {
                _ if from >= range.end || (from > 0 && range.end > prefill) => {}
                Some(last) if last.to == from => last.to = range.end,
                _ => run.push(Stretch { from, to: range.end }),
            }
        }
        let total: usize = run.iter().map(|s| s.to - s.from).sum();
        let left_out = (total < context).then(|| {
            let why = match small {
                true => String::new(),
                false => format!(": a step is a pass over {weights} weights"),
            };
            format!("{total} of {context} positions{why}")
        });
        Self { run, left_out }
    }

    /// Steps of all stretches.
    pub fn steps(&self) -> usize {
        self.run.iter().map(|s| s.to - s.from).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(window: usize, context: usize, weights: u64) -> Vec<(usize, usize)> {
        let config = crate::npu::test_config(|c| c["sliding_window"] = window.into());
        Stretches::new(&config, context, weights).run.iter().map(|s| (s.from, s.to)).collect()
    }

    #[test]
    fn a_small_model_goes_through_three_windows_and_to_the_end() {
        assert_eq!(of(32, 1024, 8_000_000), [(0, 96), (1016, 1024)]);
        assert_eq!(of(32, 100, 8_000_000), [(0, 100)]);
        assert_eq!(of(32, 40, 8_000_000), [(0, 40)]);
        assert_eq!(of(8, 2, 8_000_000), [(0, 2)]);
    }

    /// 10^11 over 1.7 * 10^9 are 58 steps, three stretches of 19.
    #[test]
    fn a_large_model_is_looked_at_in_three_places() {
        assert_eq!(of(512, 1024, 1_700_000_000), [(0, 19), (502, 521), (1005, 1024)]);
        // The step at 511 is the first with a full window.
        assert_eq!(of(512, 512, 1_700_000_000), [(0, 19), (502, 512)]);
        // 4 * 10^12 over 1.7 * 10^9 are 2352 tokens: the end of a longer context is not reached.
        assert_eq!(of(512, 4096, 1_700_000_000), [(0, 19), (502, 521)]);
        assert_eq!(of(512, 1024, u64::MAX), [(0, 4)]);
    }

    #[test]
    fn what_is_left_out_is_told() {
        let config = crate::npu::test_config(|_| ());
        assert_eq!(Stretches::new(&config, 20, 1).left_out, None);
        let left = Stretches::new(&config, 1000, 1).left_out.unwrap();
        assert_eq!(left, "32 of 1000 positions");
    }
}
