//! A mapped input that becomes shorter while it is read.
//!
//! The system then answers a read with SIGBUS, of which a program usually dies without a word. There is
//! nothing to go on with: what was read may be half of one file and half of another.

use crate::error::Exit;

/// Ends the program on SIGBUS with a line on stderr and the exit code of failed reading. `json` says that
/// lines are JSON objects. What was being written stays under its hidden name and is cleared by the next
/// run.
///
/// # Errors
/// When the handler cannot be installed.
#[allow(unsafe_code)]
pub fn end_on_shortened_input(json: bool) -> std::io::Result<()> {
    let line: &'static [u8] = if json {
        b"{\"level\":\"ERROR\",\"fields\":{\"message\":\"an input became shorter while it was being read; nothing was published, run again when nothing else writes to it\"}}\n"
    } else {
        b"error: an input became shorter while it was being read; nothing was published, run again when nothing else writes to it\n"
    };
    let end = move || {
        // What cannot be said cannot be helped.
        let _ = rustix::io::write(rustix::stdio::stderr(), line);
        signal_hook::low_level::exit(Exit::Io as i32);
    };
    // SAFETY: the handler makes two system calls on constant data, allocates nothing, takes no lock and does
    // not return.
    unsafe { signal_hook::low_level::register(signal_hook::consts::SIGBUS, end) }.map(drop)
}
