//! SIGINT and SIGTERM as a flag that long loops look at, and the signals that would end the program
//! without a word.

mod shortened;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use shortened::end_on_shortened_input;

use crate::error::{Exit, Failure, Result};

/// Whether the user has asked the program to stop. Clones share the flag.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Sets the flag on SIGINT and SIGTERM; a second signal ends the process at once. A file that grows
    /// beyond what the user may write (`ulimit -f`) becomes a failed write instead of the end.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub fn install() -> std::io::Result<Self> {
        let this = Self::default();
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // Order matters: the conditional exit sees the flag of the first signal only.
            signal_hook::flag::register_conditional_shutdown(
                signal,
                Exit::Interrupted as i32,
                this.0.clone(),
            )?;
            signal_hook::flag::register(signal, this.0.clone())?;
        }
        // Any handler will do: with one, the call fails with EFBIG.
        signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default())?;
        Ok(this)
    }

    /// Asks to stop, as a signal would.
    pub fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// # Errors
    /// [`Failure::Interrupted`] once the flag is set.
    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(Failure::Interrupted) } else { Ok(()) }
    }
}
