//! `ringtap rebase`: another image below an overlay.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ringtap_image::Format;
use ringtap_image_tools::rebase::{Rebase, rebase};
use ringtap_image_tools::{NamedFormat, Watcher};

use super::bar::Talk;
use super::source::{Force, Sources};
use super::watch::{self, Work};
use crate::manual::section::{EXIT_WRITING, Section};
use crate::names::{self, CacheName};

/// What `ringtap rebase` is told.
#[derive(Debug, Args)]
pub(crate) struct RebaseArgs {
    /// The overlay; nobody may use it
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Format of the overlay [default: as recorded]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// The image that is to be below, relative to the folder of FILE; '' for none, which with --unsafe may be left out
    #[arg(
        short,
        long,
        value_parser = names::backing(),
        value_name = "FILE",
        required_unless_present = "unsafely"
    )]
    backing: Option<String>,

    /// Its format [default: as recorded when Ringtap made it]
    #[arg(
        short = 'F',
        long,
        value_parser = names::named_format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    backing_format: Option<NamedFormat>,

    /// Only change the name: what the overlay reads as is up to you
    #[arg(short, long = "unsafe")]
    unsafely: bool,

    /// Compress what is copied in
    #[arg(short, long)]
    compress: bool,

    /// How host caching is used for the overlay
    #[arg(short = 't', long, value_enum, value_name = "MODE", default_value = "writeback")]
    cache: CacheName,

    #[command(flatten)]
    talk: Talk,

    #[command(flatten)]
    sources: Sources,

    #[command(flatten)]
    force: Force,
}

pub(crate) fn run(args: &RebaseArgs) -> anyhow::Result<ExitCode> {
    let backing = args.backing.clone().filter(|name| !name.is_empty());
    let job = Rebase {
        path: args.file.clone(),
        format: args.format,
        force_format: args.force.force_format,
        backing: backing.map(|name| (name, args.backing_format)),
        blindly: args.unsafely,
        compress: args.compress,
        cache: args.cache.into(),
        reading: args.sources.reading(),
    };
    if args.unsafely {
        // A name is written, and nothing copied.
        watch::show(args.talk, || rebase(&job, &watch::notes()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let work = Work::stoppable(args.talk);
    let watch: Watcher = work.clone();
    work.ended(rebase(&job, &watch))?;
    Ok(ExitCode::SUCCESS)
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            (
                "ringtap rebase -b new.qcow2 -F qcow2 today.qcow2",
                "another image below, the content stays: what differs is copied in",
            ),
            ("ringtap rebase -b \'\' today.qcow2", "nothing below: all is copied in"),
            (
                "ringtap rebase -u -b moved/base.raw -F raw today.qcow2",
                "the image below was moved: only the name changes",
            ),
        ],
    ),
    EXIT_WRITING,
];
