//! `ringtap convert`: an image copied into another, of any format.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::Format;
use ringtap_image::qcow2::SnapshotName;
use ringtap_image_tools::Watcher;
use ringtap_image_tools::convert::{Bitmaps, Convert, Target, convert};

use super::bar::Talk;
use super::source::{Force, Sources};
use super::target::NewImage;
use super::watch::Work;
use crate::manual::section::{EXIT_WRITING, Section};
use crate::names::{self, CacheName};

/// What `ringtap convert` is told.
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// The images to read, one after the other as one disk; the last FILE is the one to write
    #[arg(value_name = "FILE", num_args = 1.., required_unless_present = "options")]
    files: Vec<PathBuf>,

    /// Format of the sources [default: as recorded, else by their signatures]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// Format of the target [default: raw; qcow2 with -B]
    #[arg(
        short = 'O',
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    output_format: Option<Format>,

    #[command(flatten)]
    new: NewImage,

    /// Make an overlay over this image, with only what differs from it. Relative to the target's folder
    #[arg(
        short = 'B',
        long,
        visible_short_alias = 'b',
        value_parser = names::backing(),
        value_name = "FILE"
    )]
    backing: Option<String>,

    /// Compress what is written; qcow2 only, with -o compression_type=zlib|zstd
    #[arg(short, long)]
    compress: bool,

    /// Read the source as it was at this snapshot inside it: its name or ID, or
    /// snapshot.name=NAME,snapshot.id=ID
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<SnapshotName>,

    /// Of an image of Ceph: copy only what was written since this snapshot, into a copy that was made of that (-n), or into an
    /// overlay upon one (-B)
    #[arg(long, value_name = "SNAPSHOT", conflicts_with_all = ["snapshot", "bitmaps", "compress", "target_is_zero"])]
    since: Option<String>,

    /// Copy the bitmaps inside the source too; those not saved are an error
    #[arg(long, conflicts_with = "snapshot")]
    bitmaps: bool,

    /// With --bitmaps: leave out those that were not saved when the source was last used
    #[arg(long, requires = "bitmaps")]
    skip_broken_bitmaps: bool,

    /// Write to a target that is there already
    #[arg(short = 'n', long)]
    no_create: bool,

    /// With -n: the target is known to read as zeros
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,

    /// Leave out zeros of at least so many bytes, in holes: a multiple of 512, at most 16M; 0: keep every byte as data
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = names::hole, default_value = "4k")]
    sparse: u64,

    /// Requests in flight at once [default: 4 where the target's page cache is used, else 16]
    #[arg(short = 'm', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    parallel: Option<u16>,

    /// Read no more than so many bytes in a second
    #[arg(short, long, value_name = "SIZE", value_parser = names::size)]
    rate: Option<u64>,

    /// Go on where the source cannot be read, with zeros instead; what was lost is told
    #[arg(long)]
    salvage: bool,

    /// Taken for the sake of qemu-img: how bytes are copied is for Ringtap to choose
    #[arg(short = 'C', hide = true)]
    copy_range: bool,

    /// Taken for the sake of qemu-img: writes go out of order anyway, within a few MiB
    #[arg(short = 'W', long)]
    out_of_order: bool,

    /// How host caching is used for the target
    #[arg(short = 't', long, value_enum, value_name = "MODE", default_value = "unsafe")]
    cache: CacheName,

    /// How host caching is used for the sources
    #[arg(short = 'T', long, value_enum, value_name = "MODE", default_value = "writeback")]
    source_cache: CacheName,

    #[command(flatten)]
    talk: Talk,

    #[command(flatten)]
    sources: Sources,

    #[command(flatten)]
    force: Force,
}

pub(crate) fn run(args: &ConvertArgs) -> anyhow::Result<ExitCode> {
    let format = args.output_format.unwrap_or(match args.backing {
        Some(_) => Format::Qcow2,
        None => Format::Raw,
    });
    if let Some(text) = args.new.help_wanted(format) {
        crate::say::out(&text);
        return Ok(ExitCode::SUCCESS);
    }
    let Some((target, sources)) = args.files.split_last().filter(|(_, rest)| !rest.is_empty())
    else {
        return Err(Fault::Usage("name the image to read and the image to write".into()).into());
    };
    let recipe = args.new.recipe(target, Some(format), args.backing.as_deref())?;
    let into = match args.no_create {
        true => Target::Existing {
            format: args.output_format,
            secret: args.new.secret(),
            backing: recipe.backing,
            zeroed: args.target_is_zero,
        },
        false => Target::New(recipe.read(args.new.secret())?),
    };
    start(
        args.talk,
        &Convert {
            sources: sources.to_owned(),
            format: args.format,
            snapshot: args.snapshot.clone(),
            part: None,
            since: args.since.clone(),
            source_cache: args.source_cache.into(),
            reading: args.sources.reading(),
            target: target.clone(),
            into,
            cache: args.cache.into(),
            force_format: args.force.force_format,
            bitmaps: match (args.bitmaps, args.skip_broken_bitmaps) {
                (false, _) => Bitmaps::Leave,
                (true, false) => Bitmaps::All,
                (true, true) => Bitmaps::Saved,
            },
            compress: args.compress,
            sparse: args.sparse as usize,
            parallel: args.parallel.map(usize::from),
            rate: args.rate,
            salvage: args.salvage,
        },
    )
}

/// Copy, and show how far that is.
pub(crate) fn start(talk: Talk, job: &Convert) -> anyhow::Result<ExitCode> {
    let work = Work::stoppable(talk);
    let watch: Watcher = work.clone();
    work.ended(convert(job, &watch))?;
    Ok(ExitCode::SUCCESS)
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            ("ringtap convert vm.raw -O qcow2 vm.qcow2", "raw to qcow2"),
            (
                "ringtap convert vm.raw -c -O qcow2 -o compression_type=zstd vm.qcow2",
                "compressed, on all cores",
            ),
            (
                "ringtap convert -f qcow2 vm.qcow2 -O raw -n -t none /dev/vg/vm",
                "qcow2 onto a logical volume that is there already",
            ),
            (
                "ringtap convert today.qcow2 -B vm.qcow2 -F qcow2 thin.qcow2",
                "a thin overlay with what today.qcow2 has and vm.qcow2 has not",
            ),
        ],
    ),
    EXIT_WRITING,
];
