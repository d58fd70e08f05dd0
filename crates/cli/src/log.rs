//! What the library has to say on the way, on stderr: the log of a server, and the warnings of a verb.

mod line;

use std::io::{IsTerminal, Write, stderr};
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

use anyhow::Context;
use clap::{Args, ValueEnum};
use ringtap_daemon::Error;
use ringtap_vbd::DISK;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use self::line::{Form, Line, NamesDisks};

const LEVELS: [(&str, LevelFilter); 6] = [
    ("off", LevelFilter::OFF),
    ("error", LevelFilter::ERROR),
    ("warn", LevelFilter::WARN),
    ("info", LevelFilter::INFO),
    ("debug", LevelFilter::DEBUG),
    ("trace", LevelFilter::TRACE),
];
/// The parts that log, by their crates.
const PARTS: [&str; 5] =
    ["ringtap", "ringtap_daemon", "ringtap_export", "ringtap_image", "ringtap_vbd"];

/// How a server logs.
#[derive(Debug, Args)]
pub(crate) struct LogArgs {
    /// What to log to stderr: off, error, warn, info, debug, trace, or per part, such as
    /// warn,ringtap_export=debug [default: $RUST_LOG, else info]
    #[arg(long, value_name = "FILTER", value_parser = named_filter)]
    log: Option<Targets>,

    /// How to log: text for people (with priorities where stderr is the journal's), or one JSON object a line
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// For people, and for the journal.
    Text,
    /// JSON, for programs.
    Json,
}

/// The form that a server's log has; none in verbs.
static SERVER: OnceLock<Form> = OnceLock::new();

/// Begin to log, as a server does.
pub(crate) fn start(args: &LogArgs) -> anyhow::Result<()> {
    let filter = match (&args.log, from_env()) {
        (Some(filter), _) => filter.clone(),
        (None, None) => Targets::new().with_default(LevelFilter::INFO),
        (None, Some(filter)) => filter.map_err(|why| Error::Usage(format!("RUST_LOG: {why}")))?,
    };
    let form = match args.log_format {
        LogFormat::Json => Form::Json,
        LogFormat::Text if is_journal() => Form::Journal,
        LogFormat::Text => Form::Text,
    };
    init(form, filter).context("cannot start the log")?;
    let _ = SERVER.set(form);
    Ok(())
}

/// Have warnings and errors shown as a verb says things itself. They are about what its result is worth,
/// so nothing but RUST_LOG turns them off.
pub(crate) fn show_warnings() {
    let warnings = Targets::new().with_default(LevelFilter::WARN);
    let (filter, wrong) = match from_env() {
        None => (warnings, None),
        Some(Ok(filter)) => (filter, None),
        Some(Err(why)) => (warnings, Some(why)),
    };
    // Nobody else starts one; without it the verb still does its work.
    let _ = init(Form::Verb, filter);
    if let Some(why) = wrong {
        tracing::warn!("RUST_LOG is not heeded: {why}");
    }
}

fn init(form: Form, filter: Targets) -> anyhow::Result<()> {
    let lines = fmt::layer().with_writer(stderr).with_ansi(stderr().is_terminal());
    let lines = match form {
        Form::Json => lines.json().flatten_event(true).with_span_list(false).boxed(),
        form => lines.event_format(Line { form }).boxed(),
    };
    // Whatever is shown, it is shown of which disk.
    let filter = filter.with_target(DISK, LevelFilter::ERROR);
    tracing_subscriber::registry().with(filter).with(NamesDisks).with(lines).try_init()?;
    Ok(())
}

/// Say why the program fails, in the form of its log.
pub(crate) fn say_failure(text: &str) {
    let line = match SERVER.get() {
        Some(Form::Json) => {
            let mut time = String::new();
            // Writing to a String cannot fail.
            let _ = SystemTime.format_time(&mut Writer::new(&mut time));
            serde_json::json!({ "timestamp": time, "level": "ERROR", "message": text }).to_string()
        }
        Some(Form::Journal) => format!("<3>ringtap: {text}"),
        _ => format!("ringtap: {text}"),
    };
    let _ = writeln!(stderr(), "{line}");
}

/// Whether stderr is the very stream that systemd has connected to its journal. (A program that passes its
/// environment on may have passed another stderr on.)
fn is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let file = std::fs::metadata("/proc/self/fd/2");
    file.is_ok_and(|file| stream == format!("{}:{}", file.dev(), file.ino()))
}

/// RUST_LOG is everybody's: parts of other programs may be named in it.
fn from_env() -> Option<Result<Targets, String>> {
    let text = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty())?;
    Some(filter(&text, |_| true))
}

fn named_filter(text: &str) -> Result<Targets, String> {
    filter(text, |part| PARTS.contains(&part))
}

/// What to log, level by level and part by part.
fn filter(text: &str, is_part: impl Fn(&str) -> bool) -> Result<Targets, String> {
    let level = |text: &str| {
        let known = LEVELS.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
        known.map(|(_, level)| *level).ok_or_else(|| {
            let names = LEVELS.map(|(name, _)| name).join(", ");
            format!("{text:?} is no level: known are {names}, and PART=LEVEL for one part")
        })
    };
    text.split(',').map(str::trim).try_fold(Targets::new(), |filter, wish| {
        match wish.split_once('=') {
            None => Ok(filter.with_default(level(wish)?)),
            Some((part, _)) if !is_part(part.split("::").next().unwrap_or_default()) => {
                Err(format!("no part is named {part:?}: known are {}", PARTS.join(", ")))
            }
            Some((part, wish)) => Ok(filter.with_target(part, level(wish)?)),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Level;

    #[test]
    fn levels_are_taken_for_all_and_for_parts() {
        let filter = named_filter("warn, ringtap_export::nbd=Debug").expect("a filter");
        assert!(filter.would_enable("ringtap_image", &Level::WARN));
        assert!(!filter.would_enable("ringtap_image", &Level::INFO));
        assert!(filter.would_enable("ringtap_export::nbd::server", &Level::DEBUG));
        assert!(!filter.would_enable("ringtap_export::fuse", &Level::DEBUG));
    }

    #[test]
    fn parts_of_other_programs_may_be_named_in_the_environment() {
        assert!(filter("info,hyper=trace", |_| true).is_ok());
    }

    #[test]
    fn what_is_unknown_is_refused_with_what_is_known() {
        for (wrong, said) in [
            ("inof", "off, error, warn, info, debug, trace"),
            ("", "is no level"),
            ("ringtap_export", "PART=LEVEL"),
            ("ringtap_export=loud", "\"loud\" is no level"),
            ("ringtap_exprot=debug", "ringtap_daemon, ringtap_export"),
            ("info,", "is no level"),
        ] {
            let message = named_filter(wrong).expect_err(wrong);
            assert!(message.contains(said), "{wrong}: {message}");
        }
    }
}
