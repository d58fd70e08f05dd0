//! What the library has to say on the way, on stderr.

use std::fmt;
use std::io::{IsTerminal, stderr};

use anyhow::Context;
use ringtap_daemon::Error;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::registry::LookupSpan;

/// Begin to log, as a server does.
pub(crate) fn start(filter: Option<&str>) -> anyhow::Result<()> {
    let from_env = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty());
    let text = filter.map(str::to_owned).or(from_env).unwrap_or_else(|| "info".into());
    let filter = EnvFilter::try_new(&text).map_err(|error| {
        Error::Usage(format!("{text:?} is not a log filter ({error}): try info, or ringtap=debug"))
    })?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        .with_target(false);
    // The journal writes the time itself.
    let started = if std::env::var_os("JOURNAL_STREAM").is_some() {
        log.without_time().try_init()
    } else {
        log.try_init()
    };
    started.map_err(|error| anyhow::anyhow!(error)).context("cannot start the log")
}

/// Have warnings and errors shown as a verb says things itself. They are about what its result is worth,
/// so nothing but RUST_LOG turns them off.
pub(crate) fn show_warnings() {
    let from_env = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty());
    let filter = from_env.and_then(|text| EnvFilter::try_new(text).ok());
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|| EnvFilter::new("warn")))
        .with_writer(stderr)
        .with_ansi(false)
        .event_format(OfVerb);
    // Nobody else starts one; without it the verb still does its work.
    let _ = log.try_init();
}

/// `ringtap: warning: TEXT`
struct OfVerb;

impl<S, N> FormatEvent<S, N> for OfVerb
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let level = match *event.metadata().level() {
            Level::ERROR => "error: ",
            Level::WARN => "warning: ",
            Level::INFO => "",
            Level::DEBUG => "debug: ",
            Level::TRACE => "trace: ",
        };
        write!(out, "ringtap: {level}")?;
        context.format_fields(out.by_ref(), event)?;
        writeln!(out)
    }
}
