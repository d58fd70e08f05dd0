//! `ringtap publish`: an image put where guests of other hosts read it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use anyhow::Context;
use clap::Args;
use ringtap_image::{CacheMode, Container, OpenError, OpenOptions, probe, record};
use ringtap_image_tools::{format_of, named_below, waits_for_nothing};
use ringtap_objects::Publication;
use ringtap_vbd::Progress;

use super::bar::{Bar, Talk};
use super::stop::Signals;
use crate::manual::section::{EXIT, Section};
use crate::names;

/// What `ringtap publish` is told.
#[derive(Debug, Args)]
pub(crate) struct PublishArgs {
    /// The image, of any format
    #[arg(value_name = "FILE", value_parser = names::image())]
    file: PathBuf,

    /// Where it goes: s3://BUCKET/KEY, s3://BUCKET/FOLDER/, or a folder that a web server shows
    #[arg(value_name = "TARGET")]
    target: String,

    /// A list that `ringtap serve --record` wrote, for whoever starts from it
    #[arg(long, value_name = "FILE")]
    boot_list: Option<PathBuf>,

    /// Replace another image of that name; who has that one open has I/O errors from then on
    #[arg(long)]
    replace: bool,

    #[command(flatten)]
    talk: Talk,
}

pub(crate) fn run(args: &PublishArgs) -> anyhow::Result<ExitCode> {
    let cache = CacheMode::Writeback;
    let options = OpenOptions { read_only: true, cache, ..OpenOptions::default() };
    is_whole(&args.file)?;
    // Keeps writers off.
    let held = Container::open(&args.file, &options)?;
    let (format, _) = format_of(&args.file, None)?;
    waits_for_nothing(
        &held,
        format,
        options,
        "`ringtap check --restart-log use` takes them up, `--restart-log drop` leaves the image as it is",
    )?;
    let below = named_below(&args.file, format)?;
    let progress = Arc::new(Progress::default());
    let (signals, stop) = (Signals::stop(&progress)?, progress.stop_flag());
    let bar = Bar::show(args.talk, &progress, 2 * held.len());
    // Where there is none, one that is broken off begins anew.
    let uploads = record::state_folder("uploads").ok();
    let what = Publication {
        file: &args.file,
        boot_list: args.boot_list.as_deref(),
        replace: args.replace,
        uploads: uploads.as_deref(),
        stop: Some(&*stop),
    };
    let published = ringtap_objects::publish(what, &args.target, &|bytes| {
        progress.set(progress.done() + bytes)
    });
    drop(bar);
    // Who began meanwhile heeds no locks.
    is_whole(&args.file)?;
    let published = published
        .map_err(|why| match stop.load(SeqCst) {
            true => anyhow::Error::from(signals.stopped()).context(why),
            false => anyhow::Error::msg(why),
        })
        .with_context(|| format!("cannot publish {} to {}", args.file.display(), args.target))?;
    if let Some(below) = below.filter(|_| !args.talk.quiet) {
        tell!(
            "ringtap: {} lies upon {below}, which is not published with it: who opens it says --backing, and where that lies",
            args.file.display()
        );
    }
    if !args.talk.quiet {
        say!("{}", published.name);
        say!("digest=sha256:{}", hex::encode(published.digest));
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuse what a verb was at work on and has not ended.
fn is_whole(file: &Path) -> Result<(), OpenError> {
    match probe::unfinished_work(file) {
        Some(verb) => Err(OpenError::Unfinished { path: file.to_owned(), verb }),
        None => Ok(()),
    }
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            (
                "ringtap publish base.raw s3://images/base.raw",
                "upload it; the name that is printed opens these bytes or none",
            ),
            (
                "ringtap publish base.qcow2 /srv/www --boot-list base.list",
                "beside what a web server shows, with what a guest reads as it starts",
            ),
        ],
    ),
    EXIT,
];
