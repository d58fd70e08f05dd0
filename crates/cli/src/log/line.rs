//! One line of text for each event.

use std::fmt::{self, Write};

use ringtap_vbd::DISK;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

/// How whoever reads stderr wants lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// As a verb says things itself.
    Verb,
    /// With the time.
    Text,
    /// With a priority, as sd-daemon(3) has it; the journal writes the time itself.
    Journal,
    Json,
}

/// Which disk a span is of.
struct Disk(String);

/// Keeps the name of the disk with each span that has one.
pub(super) struct NamesDisks;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for NamesDisks {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut found = Found(None);
        attributes.record(&mut found);
        if let (Some(disk), Some(span)) = (found.0, context.span(id)) {
            span.extensions_mut().insert(Disk(disk));
        }
    }
}

struct Found(Option<String>);

impl Visit for Found {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == DISK {
            self.0 = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}

/// `TIME LEVEL DISK: MESSAGE FIELDS`, or as the form has it.
pub(super) struct Line {
    pub(super) form: Form,
}

impl<S, N> FormatEvent<S, N> for Line
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
        let mut text = String::new();
        context.format_fields(Writer::new(&mut text), event)?;
        let level = *event.metadata().level();
        match self.form {
            Form::Verb => write!(out, "ringtap: {}", in_words(level))?,
            Form::Journal => write!(out, "<{}>", priority(level))?,
            Form::Text | Form::Json => {
                SystemTime.format_time(&mut out)?;
                match (out.has_ansi_escapes(), colour(level)) {
                    (true, Some(colour)) => write!(out, " \x1b[{colour}m{level:>5}\x1b[0m ")?,
                    _ => write!(out, " {level:>5} ")?,
                }
            }
        }
        let span = context.lookup_current();
        let extensions = span.as_ref().map(|span| span.extensions());
        if let Some(Disk(disk)) = extensions.as_ref().and_then(|found| found.get::<Disk>()) {
            // The library tells of an image by its path, which mostly is what the disk is called.
            if !text.strip_prefix(&**disk).is_some_and(|rest| rest.starts_with(':')) {
                write_on_a_line(&mut out, disk)?;
                out.write_str(": ")?;
            }
        }
        write_on_a_line(&mut out, &text)?;
        writeln!(out)
    }
}

/// What a guest, a client or an image has put into a name must not begin another line.
fn write_on_a_line(out: &mut impl Write, text: &str) -> fmt::Result {
    text.chars().try_for_each(|c| match c.is_control() {
        true => write!(out, "{}", c.escape_default()),
        false => out.write_char(c),
    })
}

fn in_words(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error: ",
        Level::WARN => "warning: ",
        Level::INFO => "",
        Level::DEBUG => "debug: ",
        Level::TRACE => "trace: ",
    }
}

/// Source: syslog(3).
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Red, yellow and green, by their SGR numbers.
fn colour(level: Level) -> Option<u8> {
    match level {
        Level::ERROR => Some(31),
        Level::WARN => Some(33),
        Level::INFO => Some(32),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_forge_lines() {
        let mut out = String::new();
        write_on_a_line(&mut out, "a\n<3>b\x1b[31mé").expect("text");
        assert_eq!(out, "a\\n<3>b\\u{1b}[31mé");
    }
}
