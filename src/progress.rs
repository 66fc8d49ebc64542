//! How far a long run has come: a bar on a terminal, plain lines elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// What was asked for on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Style {
    /// A bar when stderr is a terminal, plain lines otherwise.
    #[default]
    Auto,
    /// A bar, if stderr is a terminal.
    Bar,
    /// One line every ten seconds.
    Plain,
    /// Nothing.
    None,
}

/// Told how much of the work is done, in bytes or in tokens.
pub trait Progress: Send + Sync {
    /// `bytes` (or tokens) more are done; `what` is being worked on.
    fn advance(&self, bytes: u64, what: &str);
    /// All work is done.
    fn finish(&self);
}

/// A progress of the style asked for, over `total_bytes` of work called `task`.
pub fn new(style: Style, task: &'static str, total_bytes: u64) -> Box<dyn Progress> {
    let terminal = std::io::stderr().is_terminal();
    match style {
        Style::None => Box::new(Silent),
        // A bar on something that is not a terminal draws nothing, and nothing is not what was asked for.
        Style::Auto | Style::Bar if terminal => Box::new(Bar::new(task, total_bytes)),
        _ => Box::new(Plain::new(task, total_bytes)),
    }
}

/// The same for work that is counted in tokens.
pub fn new_in_tokens(style: Style, task: &'static str, total: usize) -> Box<dyn Progress> {
    match style {
        Style::Auto | Style::Bar if std::io::stderr().is_terminal() => {
            let bar = Bar::new(task, total as u64);
            let template = "{prefix} [{bar:30}] {pos}/{len} tokens eta {eta}  {wide_msg}";
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.0.set_style(style.progress_chars("=> "));
            }
            Box::new(bar)
        }
        _ => new(style, task, total as u64),
    }
}

/// No output.
#[derive(Debug)]
pub struct Silent;

impl Progress for Silent {
    fn advance(&self, _bytes: u64, _what: &str) {}
    fn finish(&self) {}
}

struct Bar(ProgressBar);

impl Bar {
    fn new(task: &'static str, total_bytes: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total_bytes), ProgressDrawTarget::stderr());
        let template =
            "{prefix} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec} eta {eta}  {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(task);
        Self(bar)
    }
}

impl Progress for Bar {
    fn advance(&self, bytes: u64, what: &str) {
        self.0.inc(bytes);
        self.0.set_message(what.to_owned());
    }

    fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// A line every [`Plain::EVERY`], so that a log shows life without drowning.
struct Plain {
    task: &'static str,
    total_bytes: u64,
    state: Mutex<(u64, Instant)>,
}

impl Plain {
    const EVERY: Duration = Duration::from_secs(10);

    fn new(task: &'static str, total_bytes: u64) -> Self {
        Self { task, total_bytes, state: Mutex::new((0, Instant::now())) }
    }
}

impl Progress for Plain {
    fn advance(&self, bytes: u64, what: &str) {
        let Ok(mut state) = self.state.lock() else { return };
        state.0 += bytes;
        if state.1.elapsed() >= Self::EVERY {
            state.1 = Instant::now();
            let percent = state.0.saturating_mul(100) / self.total_bytes.max(1);
            // A closed stderr is no reason to stop working.
            let _ = writeln!(std::io::stderr(), "{}: {percent} % ({what})", self.task);
        }
    }

    fn finish(&self) {}
}
