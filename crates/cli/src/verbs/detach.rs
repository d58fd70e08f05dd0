//! `ringtap detach`: an overlay that needs nothing below any more.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ringtap_image::{Format, OpenError};
use ringtap_image_tools::detach::{Detach, Detached, detach};
use ringtap_image_tools::{Error, Watcher};
use serde_json::{Value, json};

use super::bar::Talk;
use super::source::{Force, Sources, backing};
use super::watch::Work;
use crate::manual::section::{EXIT_WRITING, Section};
use crate::names::{self, CacheName};
use crate::output::{Output, human, pretty};

/// What `ringtap detach` is told.
#[derive(Debug, Args)]
#[command(mut_arg("allow_backing", backing))]
pub(crate) struct DetachArgs {
    /// The overlay; nobody may use it: `ringtap disk detach` does the same with a disk that is served
    #[arg(value_name = "DISK")]
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

    /// How host caching is used for the overlay
    #[arg(short = 't', long, value_enum, value_name = "MODE", default_value = "writeback")]
    cache: CacheName,

    /// How to print it
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,

    #[command(flatten)]
    talk: Talk,

    #[command(flatten)]
    sources: Sources,

    #[command(flatten)]
    force: Force,
}

pub(crate) fn run(args: &DetachArgs) -> anyhow::Result<ExitCode> {
    let job = Detach {
        path: args.file.clone(),
        format: args.format,
        force_format: args.force.force_format,
        cache: args.cache.into(),
        reading: args.sources.reading(),
    };
    let work = Work::stoppable(args.talk.beside(args.output));
    let watch: Watcher = work.clone();
    let done = work.ended(detach(&job, &watch)).map_err(served)?;
    match args.output {
        Output::Json => writeln!(std::io::stdout(), "{}", pretty(&told(args, &done))?)?,
        Output::Text if args.talk.quiet => {}
        Output::Text => write!(std::io::stdout(), "{}", text(args, &done))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Where a server has it, that server can do it.
fn served(error: anyhow::Error) -> anyhow::Error {
    let cause = error.downcast_ref::<Error>().map(Error::cause);
    if !matches!(cause, Some(Error::Open(OpenError::Locked { .. }))) {
        return error;
    }
    error.context("ringtap disk detach NODE does it while the disk is served")
}

fn told(args: &DetachArgs, done: &Detached) -> Value {
    let below = done.below.iter().map(|below| {
        let mut one = json!({
            "filename": below.path.display().to_string(),
            "format": below.format.name(),
        });
        if let Some(verified) = below.verified {
            one["verified"] = verified.into();
        }
        one
    });
    json!({
        "filename": args.file.display().to_string(),
        "format": done.format.name(),
        "detached": below.collect::<Vec<_>>(),
        "brought": done.brought,
    })
}

fn text(args: &DetachArgs, done: &Detached) -> String {
    let file = args.file.display();
    let [first, ..] = &done.below[..] else { return format!("{file}: nothing lies below it\n") };
    let mut text = format!(
        "{file} needs nothing below any more: {} brought from {}\n",
        human(done.brought),
        first.path.display()
    );
    for below in done.below.iter().filter(|below| below.verified == Some(false)) {
        text.push_str(&format!(
            "{}: it has no index (.rtidx), so that what came is what its server sent for its ETag, compared with nothing\n",
            below.path.display()
        ));
    }
    text
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            (
                "ringtap detach vm.qcow2 --cache-dir /var/cache/images",
                "all that it shows of its base in a store comes into it, what the cache has from there; then the store may go",
            ),
            (
                "ringtap disk detach vm",
                "the same while a guest runs, of a disk of `ringtap daemon`",
            ),
        ],
    ),
    EXIT_WRITING,
];
