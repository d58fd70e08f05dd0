//! `ringtap commit`: what an overlay holds, written into an image below it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::{CacheMode, Format, OpenOptions, on_a_ring, open, open_on, qcow2, record};
use ringtap_vbd::{Copy, Progress, Vbd, copy};

use super::bar::{Bar, Talk};
use super::chain;
use super::convert::{finish, same_file};
use super::offline::{self, Writing};
use super::resize;
use super::source::{Force, Sources, backing};
use super::stop::Signals;
use crate::names::{self, CacheName};

/// What `ringtap commit` is told.
#[derive(Debug, Args)]
#[command(mut_arg("allow_backing", backing))]
pub(crate) struct CommitArgs {
    /// The overlay; nobody may use it, nor what lies below it
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

    /// Write into this image of the chain [default: the overlay's own backing file]. Those between are
    /// then worthless, and the overlay stays as it is
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
    let file = &args.file;
    let format = offline::format(file, args.format, true)?;
    let layers = chain::layers(file, Some(format), true, &args.sources.names)?;
    if layers.len() < 2 {
        return Err(Fault::Usage(format!("{} has no backing file", file.display())).into());
    }
    let depth = match &args.base {
        None => 1,
        Some(base) => {
            // As seen from here, else as the overlay would name it.
            let position =
                |base: &Path| layers.iter().position(|layer| same_file(&layer.path, base));
            let found = position(base).or_else(|| position(&chain::beside(file, base)));
            match found.filter(|depth| *depth > 0) {
                Some(depth) => depth,
                None => bail!("{} is not below {}", base.display(), file.display()),
            }
        }
    };
    let base = &layers[depth];
    let writing = |format| Writing::new(format, &args.force, &args.sources.names.data);
    // Kept off everybody from here on; the overlay is then read without a lock of its own.
    let top = match format {
        Format::Qcow2 => offline::settled(file, writing(format))?,
        _ => offline::to_change(file, writing(format))?,
    };
    let overlay = OpenOptions {
        force_share: true,
        layers: Some(depth as u32),
        ..args.sources.options(format, CacheMode::Writeback)?
    };
    let from = Vbd::new(open(file, &overlay)?, CacheMode::Writeback);
    let below = Writing { succeeded: true, ..writing(base.format) };
    resize::grow(&base.place, below, from.size(), &args.sources)
        .with_context(|| format!("cannot make {} as large as the overlay", base.path.display()))?;
    let cache = CacheMode::from(args.cache);
    let options = OpenOptions {
        read_only: false,
        force_share: false,
        force_format: args.force.force_format,
        succeeded: true,
        ..args.sources.options(base.format, cache)?
    };
    let opened = base.place.clone();
    let image = on_a_ring(&base.path, |io| async move { open_on(&io, &opened, &options).await })??;
    let to = Vbd::new(image, cache);
    let size = from.size();
    let progress = Arc::new(Progress::default());
    let signals = Signals::stop(&progress)?;
    let bar = Bar::show(args.talk, &progress, size);
    let job = Copy { layers: 0..depth as u32, rate: args.rate, ..Copy::new(from, to.fork()) };
    let end = signals.ended(copy(job, &progress));
    let stable = finish(to, &base.path);
    drop(bar);
    end.and(stable).with_context(|| {
        format!(
            "{} holds a part of the overlay, which is as it was: commit again",
            base.path.display()
        )
    })?;
    record::confirm_format(&base.place, base.format);
    // All that was written since a snapshot is in it.
    record::forget_successor(&base.place.at())
        .with_context(|| format!("cannot write down that {} has it all", base.path.display()))?;
    if !args.keep && args.base.is_none() {
        if format != Format::Qcow2 {
            bail!(
                "{format} overlays cannot be emptied: all is committed, remove {}",
                file.display()
            );
        }
        on_a_ring(file, |io| async move { qcow2::make_empty(&io, &top).await })??;
    }
    if !args.talk.quiet {
        println!("Image committed.");
    }
    Ok(ExitCode::SUCCESS)
}
