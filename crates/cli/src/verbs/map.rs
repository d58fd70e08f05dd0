//! `ringtap map`: where the content of an image lies, in the form of `qemu-img map`.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use ringtap_image::Format;
use ringtap_image_tools::map::{Map, Stretch, changes_since, of_context};
use serde::Serialize;

use super::source::{Sources, backing};
use super::watch;
use crate::args::Output;
use crate::manual::{EXIT, Section};
use crate::names;

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

    /// Of an NBD export: what this metadata context of it says, in place of what is allocated: zero and data are its first two
    /// bits, data where the first is not set. qemu:dirty-bitmap:NAME shows a bitmap so: its regions are data: false
    #[arg(
        long,
        value_name = "CONTEXT",
        conflicts_with = "since",
        value_parser = clap::builder::NonEmptyStringValueParser::new()
    )]
    context: Option<String>,

    /// How to print it; json is what `qemu-img map` prints
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,

    #[command(flatten)]
    sources: Sources,
}

/// A stretch of the disk, as `qemu-img map` tells it.
#[derive(Debug, Serialize)]
struct Facts {
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

impl From<&Stretch> for Facts {
    fn from(stretch: &Stretch) -> Facts {
        let Stretch { start, length, depth, present, zero, data, compressed, offset } = *stretch;
        Facts { start, length, depth, present, zero, data, compressed, offset }
    }
}

/// Stretches of a disk that is one file.
fn print(args: &MapArgs, stretches: &[Stretch]) -> anyhow::Result<ExitCode> {
    let layers = [args.file.clone()];
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut printer = Printer { output: args.output, layers: &layers, first: true };
    printer.begin(&mut out)?;
    for stretch in stretches {
        printer.print(&mut out, stretch)?;
    }
    printer.end(&mut out)?;
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run(args: &MapArgs) -> anyhow::Result<ExitCode> {
    if let Some(snapshot) = &args.since {
        return print(args, &changes_since(&args.file, args.format, snapshot)?);
    }
    if let Some(context) = &args.context {
        let (start, len) = (args.start_offset, args.max_length);
        return print(args, &of_context(&args.file, args.format, context, start, len)?);
    }
    let map = Map::open(&args.file, args.format, &args.sources.reading(), &watch::notes())?;
    let layers = map.files().to_owned();
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut printer = Printer { output: args.output, layers: &layers, first: true };
    printer.begin(&mut out)?;
    let end = map.stretches(args.start_offset, args.max_length, |stretch| {
        match printer.print(&mut out, &stretch) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => ControlFlow::Break(error),
        }
    })?;
    if let ControlFlow::Break(error) = end {
        return Err(error);
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
                let line = serde_json::to_string(&Facts::from(stretch))?;
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

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            ("ringtap map vm.qcow2", "what lies where, in which file"),
            ("ringtap map vm.qcow2 --output json", "all of it, holes too, for programs"),
        ],
    ),
    EXIT,
];
