//! `ringtap bitmap`: the persistent dirty bitmaps of an image.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgGroup, ArgMatches, Args};
use ringtap_image::Format;
use ringtap_image::qcow2::BitmapChange;
use ringtap_image_tools::bitmap::{Changes, Step, change};

use super::bar::Talk;
use super::source::{DataFiles, Force};
use super::watch;
use crate::manual::section::{EXIT, Section};
use crate::names;

/// What `ringtap bitmap` is told.
#[derive(Debug, Args)]
#[command(group(
    ArgGroup::new("changes")
        .args(["add", "remove", "clear", "enable", "disable", "merge"])
        .multiple(true)
        .required(true)
))]
pub(crate) struct BitmapArgs {
    /// Add the bitmap, enabled
    #[arg(long)]
    add: bool,

    /// Remove it
    #[arg(long)]
    remove: bool,

    /// Clear all its bits
    #[arg(long)]
    clear: bool,

    /// Let it note every write from now on
    #[arg(long)]
    enable: bool,

    /// Let it note no write from now on
    #[arg(long)]
    disable: bool,

    /// Set in it what is set in the bitmap SOURCE; repeatable
    #[arg(long, value_name = "SOURCE")]
    merge: Vec<String>,

    /// The image that SOURCE is in [default: FILE]
    #[arg(short = 'b', long, value_name = "FILE", requires = "merge")]
    source_file: Option<PathBuf>,

    /// Format of the image that SOURCE is in
    #[arg(
        short = 'F',
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true,
        requires = "source_file"
    )]
    source_format: Option<Format>,

    /// Bytes of the disk for each bit, with --add [default: the cluster size, at least 4k]
    #[arg(short, long, value_name = "SIZE", value_parser = names::size, requires = "add")]
    granularity: Option<u64>,

    /// An image that nobody uses
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// The bitmap's name
    #[arg(value_name = "BITMAP")]
    bitmap: String,

    /// Format of the image [default: as recorded]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    #[command(flatten)]
    force: Force,

    #[command(flatten)]
    data: DataFiles,
}

pub(crate) fn run(args: &BitmapArgs, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let changes = Changes {
        path: &args.file,
        format: args.format,
        force_format: args.force.force_format,
        data_files: &args.data.data_file,
        bitmap: &args.bitmap,
        source: args.source_file.as_deref().map(|path| (path, args.source_format)),
        steps: steps(args, matches),
    };
    watch::show(Talk::default(), || change(changes))?;
    Ok(ExitCode::SUCCESS)
}

/// The changes in the order in which they are on the command line.
fn steps(args: &BitmapArgs, matches: &ArgMatches) -> Vec<Step> {
    let name = || args.bitmap.clone();
    let add = BitmapChange::Add { name: name(), granularity: args.granularity };
    let flags = [
        ("add", args.add, add),
        ("remove", args.remove, BitmapChange::Remove(name())),
        ("clear", args.clear, BitmapChange::Clear(name())),
        ("enable", args.enable, BitmapChange::Enable(name())),
        ("disable", args.disable, BitmapChange::Disable(name())),
    ];
    let place = |id: &str| matches.index_of(id).unwrap_or(0);
    let mut steps: Vec<(usize, Step)> = flags
        .into_iter()
        .filter(|(_, given, _)| *given)
        .map(|(id, _, change)| (place(id), Step::Change(change)))
        .collect();
    let merges = matches.indices_of("merge").into_iter().flatten();
    steps.extend(merges.zip(&args.merge).map(|(at, from)| (at, Step::Merge(from.clone()))));
    steps.sort_by_key(|(at, _)| *at);
    steps.into_iter().map(|(_, step)| step).collect()
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            ("ringtap bitmap --add vm.qcow2 backup", "note what is written from now on"),
            (
                "ringtap bitmap --merge monday --merge tuesday vm.qcow2 week",
                "what was written on either day",
            ),
            ("ringtap bitmap --remove vm.qcow2 backup", "remove it"),
        ],
    ),
    EXIT,
];
