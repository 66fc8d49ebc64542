//! The story on stderr: `error: ...`, `warning: ...`, `note: ...`, or JSON lines.

use std::fmt;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use crate::cli::{LogArgs, LogFormat};

/// Starts logging. No time stamps and no colours: logs are compared and grepped.
pub fn init(args: LogArgs) {
    let level = match (args.quiet, args.verbose) {
        (true, _) => LevelFilter::WARN,
        (_, true) => LevelFilter::DEBUG,
        _ => LevelFilter::INFO,
    };
    let builder =
        tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level).with_ansi(false);
    match args.log_format {
        LogFormat::Text => builder.event_format(Lines).init(),
        LogFormat::Json => builder.json().without_time().with_target(false).init(),
    }
}

/// One plain line per event.
struct Lines;

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let word = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "note",
            _ => "debug",
        };
        write!(writer, "{word}: ")?;
        let mut fields = FormattedFields::<N>::new(String::new());
        ctx.format_fields(fields.as_writer(), event)?;
        // A file name may hold anything; a line stays a line.
        writeln!(writer, "{}", crate::error::one_line(&fields.fields))
    }
}
