//! `ringtap map`: where the content of an image lies, in the form of `qemu-img map`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use ringtap_image::{CacheMode, Format, Status, on_a_ring};
use serde::Serialize;

use super::chain;
use super::source::{Sources, backing, open_source};
use crate::args::Output;
use crate::{names, rbd};

/// What `ringtap map` is told.
#[derive(Debug, Args)]
#[command(mut_arg("allow_backing", backing))]
pub(crate) struct MapArgs {
    /// An image
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Format of the image [default: as written down, else by its mark]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// Begin here
    #[arg(short, long, value_name = "OFFSET", value_parser = names::size, default_value = "0")]
    start_offset: u64,

    /// For so many bytes [default: to the end]
    #[arg(short = 'l', long, value_name = "LEN", value_parser = names::size)]
    max_length: Option<u64>,

    /// Of an image of Ceph: only what has become another since this snapshot, for an incremental backup
    #[arg(long, value_name = "SNAPSHOT", conflicts_with_all = ["start_offset", "max_length"])]
    since: Option<String>,

    /// How to print it; json is what `qemu-img map` prints
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,

    #[command(flatten)]
    sources: Sources,
}

/// A stretch of the disk, as `qemu-img map` tells it.
#[derive(Debug, Serialize)]
struct Stretch {
    start: u64,
    length: u64,
    depth: u32,
    present: bool,
    zero: bool,
    data: bool,
    compressed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
}

impl Stretch {
    fn new(start: u64, status: &Status, deepest: u32) -> Stretch {
        Stretch {
            start,
            length: status.len,
            depth: status.depth.min(deepest),
            present: status.present,
            zero: status.zero,
            data: status.allocated && !status.zero,
            compressed: status.compressed,
            offset: status.at,
        }
    }

    /// Take in the next one, if they are one to a reader.
    fn take_in(&mut self, next: &Stretch) -> bool {
        let goes_on = match (self.offset, next.offset) {
            (Some(at), Some(next_at)) => at.checked_add(self.length) == Some(next_at),
            (None, None) => true,
            _ => false,
        };
        let kind = |it: &Stretch| (it.depth, it.present, it.zero, it.data, it.compressed);
        let same = goes_on && kind(self) == kind(next);
        if same {
            self.length += next.length;
        }
        same
    }
}

/// What has changed since a snapshot.
fn since(args: &MapArgs, snapshot: &str) -> anyhow::Result<ExitCode> {
    let Some(name) =
        rbd::name(&args.file).filter(|_| args.format.is_none_or(|it| it == Format::Raw))
    else {
        let why = "--since takes a raw image of Ceph: of others bitmaps say what has changed";
        return Err(ringtap_daemon::Error::Usage(why.into()).into());
    };
    let changes = rbd::snapshots::changes(name, snapshot);
    let changes = changes.map_err(|why| anyhow::anyhow!("{name}: {why}"))?;
    let layers = [args.file.clone()];
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut printer = Printer { output: args.output, layers: &layers, first: true };
    printer.begin(&mut out)?;
    for change in changes {
        let stretch = Stretch {
            start: change.offset,
            length: change.len,
            depth: 0,
            present: true,
            zero: change.zero,
            data: !change.zero,
            compressed: false,
            offset: Some(change.offset),
        };
        printer.print(&mut out, &stretch)?;
    }
    printer.end(&mut out)?;
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run(args: &MapArgs) -> anyhow::Result<ExitCode> {
    if let Some(snapshot) = &args.since {
        return since(args, snapshot);
    }
    let vbd = open_source(&args.file, args.format, CacheMode::Writeback, &args.sources)?;
    let layers = chain::files(&args.file, args.format, &args.sources.names)?;
    let deepest = layers.len().saturating_sub(1) as u32;
    let start = args.start_offset;
    let end = args.max_length.map_or(vbd.size(), |len| start.saturating_add(len)).min(vbd.size());
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut printer = Printer { output: args.output, layers: &layers, first: true };
    printer.begin(&mut out)?;
    // The stretches come through a channel so that a large map needs no memory.
    let (send, stretches) = std::sync::mpsc::sync_channel(1024);
    let path = args.file.clone();
    let walk = std::thread::spawn(move || -> anyhow::Result<()> {
        on_a_ring(&path.clone(), |io| async move {
            let mut at = start;
            while at < end {
                let status = vbd.status(&io, at, end - at).await;
                let status = status.map_err(|error| {
                    anyhow::anyhow!(
                        "{}: what lies at {at} cannot be found out: {error}",
                        path.display()
                    )
                })?;
                if send.send(Stretch::new(at, &status, deepest)).is_err() {
                    return Ok(()); // the reader has gone
                }
                at += status.len.max(1);
            }
            Ok(())
        })?
    });
    let mut last: Option<Stretch> = None;
    for stretch in stretches {
        if last.as_mut().is_some_and(|one| one.take_in(&stretch)) {
            continue;
        }
        if let Some(one) = last.replace(stretch) {
            printer.print(&mut out, &one)?;
        }
    }
    walk.join().map_err(|_| anyhow::anyhow!("the walk over the image panicked"))??;
    if let Some(one) = last {
        printer.print(&mut out, &one)?;
    }
    printer.end(&mut out)?;
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

struct Printer<'a> {
    output: Output,
    layers: &'a [PathBuf],
    first: bool,
}

impl Printer<'_> {
    fn begin(&self, out: &mut impl Write) -> io::Result<()> {
        match self.output {
            Output::Json => write!(out, "["),
            Output::Text => {
                writeln!(out, "{:<16}{:<16}{:<16}File", "Offset", "Length", "Mapped to")
            }
        }
    }

    fn print(&mut self, out: &mut impl Write, stretch: &Stretch) -> anyhow::Result<()> {
        match self.output {
            Output::Json => {
                // One stretch a line, spaced as qemu-img does, for those who read it by lines.
                let line = serde_json::to_string(stretch)?;
                let line = line.replace("\":", "\": ").replace(",\"", ", \"");
                let line = line.trim_start_matches('{').trim_end_matches('}');
                write!(out, "{}{{ {line}}}", if self.first { "" } else { ",\n" })?;
                self.first = false;
            }
            Output::Text if stretch.data && !stretch.zero => {
                let file = self.layers.get(stretch.depth as usize).map(PathBuf::as_path);
                let file = file.unwrap_or(Path::new("?")).display();
                let Some(at) = stretch.offset else {
                    bail!(
                        "what lies at {:#x} is compressed or encrypted, and has no place \
                         that could be shown here: add --output json",
                        stretch.start
                    );
                };
                let hex =
                    |number: u64| if number == 0 { "0".into() } else { format!("{number:#x}") };
                let (start, length, at) = (hex(stretch.start), hex(stretch.length), hex(at));
                writeln!(out, "{start:<16}{length:<16}{at:<16}{file}")?;
            }
            Output::Text => {}
        }
        Ok(())
    }

    fn end(&self, out: &mut impl Write) -> io::Result<()> {
        match self.output {
            Output::Json => writeln!(out, "]"),
            Output::Text => Ok(()),
        }
    }
}
