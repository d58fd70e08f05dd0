//! `ringtap commit`: what an overlay holds, written into an image below it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ringtap_image::Format;
use ringtap_image_tools::Watcher;
use ringtap_image_tools::commit::{Commit, commit};

use super::bar::Talk;
use super::source::{Force, Sources, backing};
use super::watch::Work;
use crate::manual::section::{EXIT_WRITING, Section};
use crate::names::{self, CacheName};

/// What `ringtap commit` is told.
#[derive(Debug, Args)]
#[command(mut_arg("allow_backing", backing))]
pub(crate) struct CommitArgs {
    /// The overlay; nobody may use it, nor what lies below it
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

    /// Write into this image of the chain, relative to the folder of FILE [default: the overlay's own backing file].
    /// Those between are then worthless, and the overlay stays as it is
    #[arg(short, long, value_name = "FILE")]
    base: Option<PathBuf>,

    /// Leave the overlay as it is, instead of emptying it
    #[arg(short = 'd', long)]
    keep: bool,

    /// Read no more than so many bytes in a second
    #[arg(short, long, value_name = "SIZE", value_parser = names::size)]
    rate: Option<u64>,

    /// How host caching is used for the image written to
    #[arg(short = 't', long, value_enum, value_name = "MODE", default_value = "writeback")]
    cache: CacheName,

    #[command(flatten)]
    talk: Talk,

    #[command(flatten)]
    sources: Sources,

    #[command(flatten)]
    force: Force,
}

pub(crate) fn run(args: &CommitArgs) -> anyhow::Result<ExitCode> {
    let job = Commit {
        path: args.file.clone(),
        format: args.format,
        force_format: args.force.force_format,
        base: args.base.clone(),
        keep: args.keep,
        rate: args.rate,
        cache: args.cache.into(),
        reading: args.sources.reading(),
    };
    let work = Work::stoppable(args.talk);
    let watch: Watcher = work.clone();
    work.ended(commit(&job, &watch))?;
    if !args.talk.quiet {
        say!("Image committed.");
    }
    Ok(ExitCode::SUCCESS)
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            (
                "ringtap commit today.qcow2",
                "into its backing file; today.qcow2 is empty afterwards",
            ),
            (
                "ringtap commit -b base.raw today.qcow2",
                "into an image further down; those between are then worthless",
            ),
        ],
    ),
    EXIT_WRITING,
];
