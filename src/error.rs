//! What can go wrong, and the exit code each kind of failure ends with.
//!
//! Modules return [`Failure`]; commands pass it up through `anyhow`, and `main` maps it back to an
//! [`Exit`]. A failure is always a single line: where, what was expected, what was found, what to do.

use std::fmt;
use std::path::{Path, PathBuf};

/// Exit codes of the binary; pipelines branch on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Everything asked for was done.
    Done = 0,
    /// A gate failed: the artifact does not hold what it promises.
    Gate = 1,
    /// The command line asks for something that has no meaning.
    Usage = 2,
    /// An input is invalid, incomplete or not supported.
    Input = 3,
    /// Reading or writing failed, or there is not enough space.
    Io = 4,
    /// Stopped by a signal; nothing was published.
    Interrupted = 5,
}

/// An input that cannot be used, told in one line.
///
/// Rendered as `file: subject: expected E, found F; hint`, leaving out what is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InputError {
    /// The file at fault, relative to the model directory where that is clearer.
    pub file: String,
    /// The tensor or configuration key at fault.
    pub subject: String,
    /// What would have been right.
    pub expected: String,
    /// What is there.
    pub found: String,
    /// What the user can do about it.
    pub hint: String,
}

impl InputError {
    /// Starts an error about `file`.
    pub fn file(file: impl fmt::Display) -> Self {
        Self { file: file.to_string(), ..Self::default() }
    }

    /// Names the tensor or key.
    pub fn subject(mut self, subject: impl fmt::Display) -> Self {
        self.subject = subject.to_string();
        self
    }

    /// Says what would have been right.
    pub fn expected(mut self, expected: impl fmt::Display) -> Self {
        self.expected = expected.to_string();
        self
    }

    /// Says what is there.
    pub fn found(mut self, found: impl fmt::Display) -> Self {
        self.found = found.to_string();
        self
    }

    /// Says what to do next.
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = hint.to_string();
        self
    }
}

impl fmt::Display for InputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = self.file.clone();
        let mut part = |separator: &str, text: String| {
            if !line.is_empty() {
                line.push_str(separator);
            }
            line.push_str(&text);
        };
        if !self.subject.is_empty() {
            part(": ", self.subject.clone());
        }
        match (self.expected.is_empty(), self.found.is_empty()) {
            (false, false) => part(": ", format!("expected {}, found {}", self.expected, self.found)),
            (false, true) => part(": ", format!("expected {}", self.expected)),
            (true, false) => part(": ", self.found.clone()),
            (true, true) => {}
        }
        if !self.hint.is_empty() {
            part("; ", self.hint.clone());
        }
        // File names and JSON strings may hold line breaks; the promise is one line.
        f.write_str(&one_line(&line))
    }
}

impl std::error::Error for InputError {}

/// Replaces control characters, so that hostile names can neither break the line nor drive a terminal.
pub fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A failure of any kind; the variant decides the exit code.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// See [`Exit::Gate`].
    #[error("{0}")]
    Gate(String),
    /// See [`Exit::Usage`].
    #[error("{0}")]
    Usage(String),
    /// See [`Exit::Input`].
    #[error(transparent)]
    Input(Box<InputError>),
    /// See [`Exit::Io`].
    #[error("{}: {action}: {source}", one_line(&path.display().to_string()))]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was being done, as in "cannot write".
        action: &'static str,
        /// The system's own word.
        source: std::io::Error,
    },
    /// Too little space for what was planned.
    #[error("{}: needs {needed_bytes} bytes, {free_bytes} are free; free some space or choose another --out", one_line(&path.display().to_string()))]
    Space {
        /// The directory whose file system is too small.
        path: PathBuf,
        /// Bytes the plan writes.
        needed_bytes: u64,
        /// Bytes available to this user.
        free_bytes: u64,
    },
    /// See [`Exit::Interrupted`].
    #[error("interrupted; nothing was written, run the same command again")]
    Interrupted,
}

impl Failure {
    /// A usage error.
    pub fn usage(message: impl fmt::Display) -> Self {
        Self::Usage(message.to_string())
    }

    /// Wraps an I/O error with the path and the action that met it.
    pub fn io(path: &Path, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), action, source }
    }

    /// The exit code this failure ends with.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Gate(_) => Exit::Gate,
            Self::Usage(_) => Exit::Usage,
            Self::Input(_) => Exit::Input,
            Self::Io { .. } | Self::Space { .. } => Exit::Io,
            Self::Interrupted => Exit::Interrupted,
        }
    }
}

impl From<InputError> for Failure {
    fn from(error: InputError) -> Self {
        Self::Input(Box::new(error))
    }
}

/// Result of everything below the commands.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_error_is_one_line_with_every_part() {
        let error =
            InputError::file("a\nb.json").subject("key").expected("1").found("2\x1b[31m").hint("fix it");
        let text = error.to_string();
        assert_eq!(text, "a\u{fffd}b.json: key: expected 1, found 2\u{fffd}[31m; fix it");
    }

    #[test]
    fn parts_left_out_leave_no_separator() {
        assert_eq!(InputError::file("f").found("is empty").to_string(), "f: is empty");
        assert_eq!(InputError::file("f").subject("k").expected("1").to_string(), "f: k: expected 1");
    }
}
