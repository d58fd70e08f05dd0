//! `ringtap top`: what the disks of a running server do, again and again.

mod look;

use std::io::{ErrorKind, IsTerminal, Write, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde_json::json;
use terminal_size::{Height, Width, terminal_size_of};

use crate::output::Output;
use crate::qmp::Qmp;
use crate::sockets::{CONTROL, control};
use look::{Look, Row};

/// To the upper left corner, and nothing below it.
const CLEAR: &str = "\x1b[H\x1b[J";
/// Lines of a terminal that are no disks': the headings, and one for the cursor.
const OTHER_LINES: usize = 3;

/// What `ringtap top` is told.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// The control socket of the server
    #[arg(long, value_name = "unix:PATH", value_parser = control, default_value = CONTROL)]
    control: PathBuf,

    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", value_parser = interval, default_value = "1")]
    interval: Duration,

    /// Show one interval, and end
    #[arg(long)]
    once: bool,

    /// How to print it: a table, or a line of JSON for each interval
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.05..=3600.0).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "write seconds, from 0.05 to 3600".to_owned())
}

/// Look until somebody ends it.
pub(crate) fn run(args: &TopArgs) -> anyhow::Result<ExitCode> {
    let mut qmp = Qmp::open(&args.control)?;
    let mut before = Look::take(&mut qmp)?;
    let mut due = Instant::now();
    loop {
        due = (due + args.interval).max(Instant::now());
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let now = Look::take(&mut qmp)?;
        let rows = now.since(&before);
        let text = match args.output {
            Output::Json => {
                let seconds = now.seconds_since(&before);
                let all = json!({ "seconds": seconds, "disks": rows, "jobs": now.jobs });
                format!("{all}\n")
            }
            Output::Text => screen(&rows, &now),
        };
        let mut out = stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            // Who read it has seen enough.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(ExitCode::SUCCESS),
            other => other?,
        }
        if args.once {
            return Ok(ExitCode::SUCCESS);
        }
        before = now;
    }
}

/// What is shown of an interval: on a terminal in the place of the last, as much as there is room for.
fn screen(rows: &[Row], now: &Look) -> String {
    let in_place = stdout().is_terminal();
    let size = if in_place { terminal_size_of(stdout()) } else { None };
    let room = size.map_or(usize::MAX, |(_, Height(lines))| {
        usize::from(lines).saturating_sub(OTHER_LINES + now.jobs.len()).max(1)
    });
    let mut text = if in_place { CLEAR } else { "" }.to_owned();
    text += &table(&rows[..rows.len().min(room)], size.map(|(Width(columns), _)| columns));
    if rows.len() > room {
        text += &format!("{} more disks\n", rows.len() - room);
    }
    now.jobs.iter().for_each(|job| text += &format!("{job}\n"));
    if !in_place {
        text += "\n";
    }
    text
}

fn table(rows: &[Row], width: Option<u16>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    if let Some(width) = width {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    table.set_header([
        "disk",
        "read/s",
        "write/s",
        "MiB/s r",
        "MiB/s w",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "queue",
        "oldest ms",
        "held",
        "throttled s/s",
        "chain",
        "state",
    ]);
    for row in rows {
        let micros =
            |nanos: Option<u64>| nanos.map_or("-".to_owned(), |nanos| (nanos / 1000).to_string());
        let mib = |bytes: f64| format!("{:.1}", bytes / f64::from(1 << 20));
        table.add_row([
            row.node.clone(),
            format!("{:.0}", row.reads),
            format!("{:.0}", row.writes),
            mib(row.read_bytes),
            mib(row.written_bytes),
            micros(row.p50),
            micros(row.p99),
            micros(row.p999),
            row.in_flight.to_string(),
            format!("{:.1}", row.oldest_us as f64 / 1000.0),
            row.held.to_string(),
            format!("{:.2}", row.held_seconds_per_second),
            row.chain.to_string(),
            row.state().to_owned(),
        ]);
    }
    for (place, column) in table.column_iter_mut().enumerate() {
        let is_text = place == 0 || place == 13;
        column.set_cell_alignment(if is_text { CellAlignment::Left } else { CellAlignment::Right });
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned() + "\n").collect();
    lines.concat()
}
