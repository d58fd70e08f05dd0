//! `ringtap rebase`: another image below an overlay.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::{CacheMode, Format, OpenOptions, Role, on_a_ring, open, qcow2};
use ringtap_image_tools::BackingFile;
use ringtap_vbd::{Copy, Progress, Vbd, copy};

use super::bar::{Bar, Talk};
use super::chain;
use super::convert::{finish, same_file};
use super::offline::{self, Writing};
use super::source::{Force, Sources, open_source};
use super::stop::Signals;
use super::target::find_backing;
use crate::names::{self, CacheName};

/// What `ringtap rebase` is told.
#[derive(Debug, Args)]
pub(crate) struct RebaseArgs {
    /// The overlay; nobody may use it
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Format of the overlay [default: as written down]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// The image that is to be below, relative to the folder of FILE; '' for none, which with --unsafe may be left out
    #[arg(short, long, value_name = "FILE", required_unless_present = "unsafely")]
    backing: Option<String>,

    /// Its format [default: as written down when Ringtap made it]
    #[arg(
        short = 'F',
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    backing_format: Option<Format>,

    /// Only change the name: what the overlay reads as is up to you
    #[arg(short, long = "unsafe")]
    unsafely: bool,

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
    let file = &args.file;
    let format = offline::format(file, args.format, true)?;
    if format != Format::Qcow2 {
        return Err(offline::cannot(file, format, "cannot change what is below them"));
    }
    let backing = match args.backing.as_deref() {
        None | Some("") => None,
        Some(name) => Some(find_backing(file, name.to_owned(), args.backing_format)?),
    };
    if let Some(backing) = &backing {
        if same_file(file, &backing.path) {
            return Err(Fault::Usage("an image cannot lie below itself".into()).into());
        }
    }
    if !args.unsafely {
        if let Some(backing) = &backing {
            let below =
                chain::layers(&backing.path, Some(backing.format), true, &args.sources.names)?;
            if below.iter().any(|layer| same_file(&layer.path, file)) {
                bail!("{} lies over {} itself", backing.path.display(), file.display());
            }
        }
        keep_content(args, file, backing.as_ref()).context(
            "what the overlay reads as is unchanged, and so is what it names as its backing file",
        )?;
    }
    let writing = Writing::new(format, &args.force, &args.sources.names.data);
    let container = offline::settled(file, writing)?;
    let changed = container.clone();
    let new = backing.as_ref().map(|it| (it.name.clone(), it.format));
    if let Some(backing) = &backing {
        chain::also_allow(&changed.place(), Role::Backing, &backing.path);
    }
    on_a_ring(file, |io| async move {
        let backing = new.as_ref().map(|(name, format)| (name.as_str(), *format));
        qcow2::set_backing(&io, &container, backing).await
    })??;
    changed.confirm_format(format);
    let file = backing.map(|it| it.path);
    chain::record(&changed.place(), Role::Backing, file.as_deref());
    Ok(ExitCode::SUCCESS)
}

/// Write into the overlay what it gets from below and the new backing file has not.
fn keep_content(args: &RebaseArgs, file: &Path, new: Option<&BackingFile>) -> anyhow::Result<()> {
    let cache = CacheMode::from(args.cache);
    let options = OpenOptions {
        read_only: false,
        force_share: false,
        force_format: args.force.force_format,
        ..args.sources.options(Format::Qcow2, cache)?
    };
    let overlay = Vbd::new(open(file, &options)?, cache);
    let below = match new {
        Some(new) => {
            let cache = CacheMode::Writeback;
            Some(open_source(&new.path, Some(new.format), cache, &args.sources)?)
        }
        None => None,
    };
    let size = overlay.size();
    let progress = Arc::new(Progress::default());
    let signals = Signals::stop(&progress)?;
    let bar = Bar::show(args.talk, &progress, size);
    let job = Copy {
        // The overlay's own content stays where it is.
        layers: 1..u32::MAX,
        zeroed: below.is_none(),
        zeros_stay: true,
        unless_in: below.map(Into::into),
        ..Copy::new(overlay.fork(), overlay.fork())
    };
    let end = signals.ended(copy(job, &progress));
    let stable = finish(overlay, file);
    drop(bar);
    end.and(stable).with_context(|| format!("{} reads as before: rebase again", file.display()))
}
