//! The `spark-convert` binary: parses, runs a command, maps failures to exit codes.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use spark_convert::cli::{Cli, LogFormat};
use spark_convert::error::{Exit, Failure};
use spark_convert::interrupt::end_on_shortened_input;
use spark_convert::{commands, logging};

fn main() -> ExitCode {
    // clap ends the process itself: 0 for help and version, 2 for usage.
    let cli = Cli::parse();
    let log = commands::log_args(&cli.command);
    logging::init(log);
    let handler = end_on_shortened_input(log.log_format == LogFormat::Json);
    let exit = match handler.map_err(anyhow::Error::from).and_then(|()| commands::run(cli.command)) {
        Ok(exit) => exit,
        Err(error) if is_broken_pipe(&error) => Exit::Done,
        Err(error) => match error.downcast_ref::<Failure>() {
            // It says its cause itself.
            Some(failure) => {
                tracing::error!("{failure}");
                failure.exit()
            }
            None => {
                tracing::error!("{error:#}");
                Exit::Io
            }
        },
    };
    // What a closed stderr swallows cannot be told anywhere else.
    let _ = std::io::stderr().flush();
    ExitCode::from(exit as u8)
}

/// Whoever read stdout has seen enough (`spark-convert inspect | head`).
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}
