//! Bars that an artifact is held to, and what comes of it.
//!
//! A bar comes from the scheme, from a file, or from the command line, and the later one wins. What was
//! asked for and cannot be measured has failed: a pipeline must not go on because a figure is missing.

mod export;
mod file;

use serde::{Deserialize, Serialize};

use crate::formats::Gates;
use crate::metrics::{Greedy, Summary};
use crate::verify::{ActionTally, Behaviour, ModuleSnr};

pub use export::{default_export_bars, judge_export};
pub use file::GateFile;

/// A figure that can be held against a bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Lowest weight SNR of any module, in dB.
    WeightSnrDb,
    /// Lowest SNR of a layer's output, in dB.
    LayerSnrDb,
    /// SNR of the logits, in dB.
    SnrDb,
    /// Mean KL divergence, in nats per token.
    Kld,
    /// 99.9 % of the positions diverge by at most so many nats.
    KldP999,
    /// Share of positions with the same most likely token.
    SameTop,
    /// Perplexity on the prompts over that of the reference.
    PerplexityRatio,
    /// Share of the greedy tokens kept.
    Greedy,
    /// Share of the reference's tool calls kept.
    Actions,
    /// Of an export: lowest SNR of the logits of a step, in dB.
    StepSnrDb,
    /// Of an export: lowest SNR of the keys or values that a layer returns, in dB.
    KvSnrDb,
    /// Of an export: lowest SNR of a graph that is fed what the checkpoint feeds it, in dB.
    GraphSnrDb,
}

/// A bar for a figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// The figure.
    pub metric: Metric,
    /// Of one scenario; of all together where there is none.
    pub scenario: Option<String>,
    /// The bar.
    pub bar: f64,
    /// Whether a user wants it; else it is the scheme's own.
    pub asked: bool,
}

/// A figure against its bar.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gate {
    /// The figure.
    pub name: Metric,
    /// Of one scenario; of all together where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scenario: Option<String>,
    /// Whether the bar is the highest that passes, else the lowest.
    pub at_most: bool,
    /// The bar.
    pub bar: f64,
    /// The figure; null where nothing was lost, and where `reason` says why it is missing.
    pub measured: Option<f64>,
    /// Whether it passes.
    pub passed: bool,
    /// Why there is no figure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What a figure came to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Figure {
    Value(f64),
    /// Nothing was lost: better than any bar.
    Exact,
    Missing(&'static str),
}

impl Metric {
    /// Every figure.
    pub const ALL: [Self; 12] = [
        Self::WeightSnrDb,
        Self::LayerSnrDb,
        Self::SnrDb,
        Self::Kld,
        Self::KldP999,
        Self::SameTop,
        Self::PerplexityRatio,
        Self::Greedy,
        Self::Actions,
        Self::StepSnrDb,
        Self::KvSnrDb,
        Self::GraphSnrDb,
    ];

    /// As reports spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::WeightSnrDb => "weight_snr_db",
            Self::LayerSnrDb => "layer_snr_db",
            Self::SnrDb => "snr_db",
            Self::Kld => "kld",
            Self::KldP999 => "kld_p999",
            Self::SameTop => "same_top",
            Self::PerplexityRatio => "perplexity_ratio",
            Self::Greedy => "greedy",
            Self::Actions => "actions",
            Self::StepSnrDb => "step_snr_db",
            Self::KvSnrDb => "kv_snr_db",
            Self::GraphSnrDb => "graph_snr_db",
        }
    }

    /// Whether a bar is the highest that passes.
    pub fn at_most(self) -> bool {
        matches!(self, Self::Kld | Self::KldP999 | Self::PerplexityRatio)
    }

    /// As a gate file spells its bar: `min_snr_db`, `max_kld`.
    pub fn key(self) -> String {
        format!("{}_{}", if self.at_most() { "max" } else { "min" }, self.name())
    }

    /// Whether a single scenario has it.
    pub fn is_per_scenario(self) -> bool {
        self.is_of_artifacts() && !matches!(self, Self::WeightSnrDb | Self::LayerSnrDb)
    }

    /// Whether an artifact of weights has it.
    pub fn is_of_artifacts(self) -> bool {
        !matches!(self, Self::StepSnrDb | Self::KvSnrDb | Self::GraphSnrDb)
    }

    /// Whether an NPU export has it.
    pub fn is_of_exports(self) -> bool {
        !self.is_of_artifacts() || matches!(self, Self::WeightSnrDb | Self::SnrDb | Self::Kld | Self::Greedy)
    }

    /// Whether it takes running the artifact.
    pub fn is_behaviour(self) -> bool {
        self != Self::WeightSnrDb
    }

    /// Bars that nothing, or everything, would pass are mistakes.
    ///
    /// # Errors
    /// What would have been right.
    pub fn check(self, bar: f64) -> Result<(), &'static str> {
        let (range, expected) = match self {
            Self::WeightSnrDb
            | Self::LayerSnrDb
            | Self::SnrDb
            | Self::StepSnrDb
            | Self::KvSnrDb
            | Self::GraphSnrDb => (f64::NEG_INFINITY..=f64::INFINITY, "a number of decibels"),
            Self::Kld | Self::KldP999 => (0.0..=f64::INFINITY, "a number of nats, not negative"),
            Self::PerplexityRatio => (1.0..=f64::INFINITY, "a ratio from 1 on"),
            Self::SameTop | Self::Greedy | Self::Actions => (0.0..=1.0, "a number from 0 to 1"),
        };
        if bar.is_finite() && range.contains(&bar) { Ok(()) } else { Err(expected) }
    }
}

/// The scheme's own bars.
pub fn default_bars(gates: Gates) -> Vec<Bar> {
    let bar = |metric, bar| Bar { metric, scenario: None, bar, asked: false };
    vec![
        bar(Metric::WeightSnrDb, gates.min_weight_snr_db),
        bar(Metric::SnrDb, gates.min_snr_db),
        bar(Metric::Kld, gates.max_kld),
        bar(Metric::Greedy, gates.min_greedy),
        bar(Metric::Actions, gates.min_actions),
    ]
}

/// Puts bars over others: the same figure of the same scenario is replaced, anything else added.
pub fn overlay(bars: &mut Vec<Bar>, over: &[Bar]) {
    for bar in over {
        match bars.iter_mut().find(|b| b.metric == bar.metric && b.scenario == bar.scenario) {
            Some(old) => *old = bar.clone(),
            None => bars.push(bar.clone()),
        }
    }
}

/// Fewer tool calls than this are a matter of luck: the standard error of a share of ten is up to 0.16. The
/// scheme's own bar on them is left out then; one that was asked for is not.
pub const FEW_CALLS: usize = 10;

/// Holds an artifact against its bars. Without a `behaviour` the scheme's own bars on it are left out, and
/// those that were asked for have failed.
pub fn judge(bars: &[Bar], modules: &[ModuleSnr], behaviour: Option<&Behaviour>) -> Vec<Gate> {
    let calls = behaviour.and_then(|b| b.actions).map_or(0, |tally| tally.of);
    let applies = |bar: &Bar| match bar.metric {
        Metric::Actions => calls >= FEW_CALLS,
        metric => behaviour.is_some() || !metric.is_behaviour(),
    };
    bars.iter()
        .filter(|bar| bar.asked || applies(bar))
        .map(|bar| {
            let figure = match behaviour {
                _ if bar.metric == Metric::WeightSnrDb => weights(modules),
                None => Figure::Missing("the artifact was not run"),
                Some(behaviour) => measure(bar, behaviour),
            };
            bar.against(figure)
        })
        .collect()
}

impl Bar {
    fn against(&self, figure: Figure) -> Gate {
        let at_most = self.metric.at_most();
        let (measured, passed, reason) = match figure {
            // A comparison with NaN is false: what is not a number does not pass.
            Figure::Value(x) => (Some(x), if at_most { x <= self.bar } else { x >= self.bar }, None),
            Figure::Exact => (None, true, None),
            Figure::Missing(why) => (None, false, Some(why.to_owned())),
        };
        let (name, scenario, bar) = (self.metric, self.scenario.clone(), self.bar);
        Gate { name, scenario, at_most, bar, measured, passed, reason }
    }
}

fn weights(modules: &[ModuleSnr]) -> Figure {
    match modules.iter().filter_map(|m| m.snr_db).min_by(f64::total_cmp) {
        Some(db) => Figure::Value(crate::artifact::rounded(db)),
        None if modules.is_empty() => Figure::Missing("no module was measured"),
        None => Figure::Exact,
    }
}

fn measure(bar: &Bar, behaviour: &Behaviour) -> Figure {
    let (summary, greedy, actions) = match &bar.scenario {
        None => (&behaviour.total, &behaviour.greedy, behaviour.actions),
        Some(name) => match behaviour.scenarios.iter().find(|s| s.scenario == *name) {
            Some(s) => (&s.artifact, &s.greedy, s.actions),
            None => return Figure::Missing("the scenario was not run"),
        },
    };
    if bar.metric == Metric::LayerSnrDb {
        return match &behaviour.layers {
            None => Figure::Missing("no layer was measured"),
            Some(layers) => layers.lowest_db().map_or(Figure::Exact, Figure::Value),
        };
    }
    of_summary(bar.metric, summary, greedy, actions)
}

fn of_summary(metric: Metric, summary: &Summary, greedy: &Greedy, actions: Option<ActionTally>) -> Figure {
    if summary.positions == 0 {
        return Figure::Missing("no position could be compared");
    }
    match metric {
        Metric::WeightSnrDb
        | Metric::LayerSnrDb
        | Metric::StepSnrDb
        | Metric::KvSnrDb
        | Metric::GraphSnrDb => Figure::Missing("it belongs to no scenario"),
        Metric::SnrDb => summary.logits_snr_db.map_or(Figure::Exact, Figure::Value),
        Metric::Kld => Figure::Value(summary.kl.mean),
        Metric::KldP999 => Figure::Value(summary.kl.p999),
        Metric::SameTop => Figure::Value(summary.same_top),
        Metric::PerplexityRatio => match summary.perplexity {
            Some(p) => Figure::Value(p.ln_ratio.mean.exp()),
            None => Figure::Missing("no prompt of two tokens"),
        },
        Metric::Greedy => Figure::Value(greedy.share()),
        Metric::Actions => match actions {
            Some(tally) => Figure::Value(tally.share()),
            None => Figure::Missing("the reference makes no tool call"),
        },
    }
}

#[cfg(test)]
mod tests;
