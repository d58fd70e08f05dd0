//! `ringtap map`: where the content of an image lies, in the form of `qemu-img map`.

use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use ringtap_image::Format;
use ringtap_image_tools::map::{Map, Stretch, changes_since, of_context};
use ringtap_image_tools::{Error, Watcher};
use serde::ser::SerializeSeq;
use serde::{Serialize, Serializer as _};
use serde_json::Serializer;
use serde_json::ser::Formatter;

use super::bar::Talk;
use super::source::{Sources, backing};
use super::watch::{self, Work};
use crate::manual::section::{EXIT, Section};
use crate::names;
use crate::output::Output;

/// What `ringtap map` is told.
#[derive(Debug, Args)]
#[command(mut_arg("allow_backing", backing))]
pub(crate) struct MapArgs {
    /// An image
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Format of the image [default: as recorded, else by its signature]
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

pub(crate) fn run(args: &MapArgs) -> anyhow::Result<ExitCode> {
    let own = [args.file.clone()];
    if let Some(snapshot) = &args.since {
        let changes = changes_since(&args.file, args.format, snapshot)?;
        return tell(args, &own, |tell| {
            let broken = changes.into_iter().map(tell).find(ControlFlow::is_break);
            Ok(broken.unwrap_or(ControlFlow::Continue(())))
        });
    }
    let range = (args.start_offset, args.max_length);
    if let Some(context) = &args.context {
        return tell(args, &own, |tell| of_context(&args.file, args.format, context, range, tell));
    }
    let map = Map::open(
        &args.file,
        args.format,
        &args.sources.reading(),
        &watch::notes_beside(args.output),
    )?;
    let layers = map.files().to_owned();
    // Between lines on the same terminal it would be in the way.
    let quiet = io::stdout().is_terminal();
    let work: Watcher = Work::shown(Talk::unasked(quiet));
    tell(args, &layers, |tell| map.stretches(range.0, range.1, &work, tell))
}

/// What is given each stretch.
type Tell<'t> = &'t mut dyn FnMut(Stretch) -> ControlFlow<anyhow::Error>;

/// Print the stretches that `walk` gives, one after the other.
fn tell(
    args: &MapArgs,
    layers: &[PathBuf],
    walk: impl FnOnce(Tell<'_>) -> Result<ControlFlow<anyhow::Error>, Error>,
) -> anyhow::Result<ExitCode> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let print = |written: anyhow::Result<()>| match written {
        Ok(()) => ControlFlow::Continue(()),
        Err(error) => ControlFlow::Break(error),
    };
    let end = match args.output {
        Output::Json => {
            let mut serializer = Serializer::with_formatter(&mut out, ByLine);
            let mut all = serializer.serialize_seq(None)?;
            let end = walk(&mut |stretch| {
                print(all.serialize_element(&Facts::from(&stretch)).map_err(Into::into))
            })?;
            all.end()?;
            end
        }
        Output::Text => {
            writeln!(out, "{:<16}{:<16}{:<16}File", "Offset", "Length", "Mapped to")?;
            walk(&mut |stretch| print(line(&mut out, layers, &stretch)))?
        }
    };
    if let ControlFlow::Break(error) = end {
        return Err(error);
    }
    if args.output == Output::Json {
        writeln!(out)?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// One stretch a line, spaced as qemu-img does it, for those who read it by lines.
struct ByLine;

impl Formatter for ByLine {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b",\n") }
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b"{ ")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

/// A stretch for people, who are told of data alone.
fn line(out: &mut impl Write, layers: &[PathBuf], stretch: &Stretch) -> anyhow::Result<()> {
    if !stretch.data || stretch.zero {
        return Ok(());
    }
    let file = layers.get(stretch.depth as usize).map(PathBuf::as_path);
    let file = file.unwrap_or(Path::new("?")).display();
    let Some(at) = stretch.offset else {
        bail!(
            "what lies at {:#x} is compressed or encrypted, and has no place that could be shown here: add --output json",
            stretch.start
        );
    };
    let hex = |number: u64| if number == 0 { "0".into() } else { format!("{number:#x}") };
    let (start, length, at) = (hex(stretch.start), hex(stretch.length), hex(at));
    Ok(writeln!(out, "{start:<16}{length:<16}{at:<16}{file}")?)
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
