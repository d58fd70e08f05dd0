//! `ringtap create`: new images.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use clap::Args;
use ringtap_image::{CacheMode, Container, Format, OpenOptions, on_a_ring};

use super::info::human;
use super::source::{Sources, read_secret};
use super::target::NewImage;
use crate::{names, rbd};

/// What `ringtap create` is told.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The image to make; what is there is lost
    #[arg(value_name = "FILE", required_unless_present = "options")]
    file: Option<PathBuf>,

    /// Virtual size, like 10G [default: that of the backing file]
    #[arg(value_name = "SIZE", value_parser = names::size)]
    size: Option<u64>,

    /// Format of the image [default: qcow2 with a backing file, else raw]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// The image below: the new one holds only what differs. Relative to the folder of FILE
    #[arg(short, long, value_name = "FILE")]
    backing: Option<String>,

    #[command(flatten)]
    new: NewImage,

    /// Do not look at the backing file; a SIZE is then needed
    #[arg(short, long = "unsafe")]
    unsafely: bool,

    /// Say nothing but warnings and errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    sources: Sources,
}

pub(crate) fn run(args: &CreateArgs) -> anyhow::Result<ExitCode> {
    let format = args.format.unwrap_or(match args.backing {
        Some(_) => Format::Qcow2,
        None => Format::Raw,
    });
    if let Some(text) = args.new.help_wanted(format) {
        print!("{text}");
        return Ok(ExitCode::SUCCESS);
    }
    let Some(file) = &args.file else {
        return Err(ringtap_daemon::Error::Usage("name the FILE to make".into()).into());
    };
    if let Some(of) = parent_of_clone(args, file) {
        return clone(args, of, file);
    }
    let mut recipe = args.new.recipe(file, args.format, args.backing.as_deref())?;
    recipe.size = args.size.or(recipe.size);
    let size = recipe.settle_size(&args.sources, args.unsafely)?;
    let secret = match args.new.secret()? {
        Some(secret) => Some(secret),
        None => read_secret(args.sources.secret.as_ref(), &args.sources.known)?,
    };
    recipe.make(file, secret.as_ref())?;
    if !args.quiet {
        let over = recipe.backing.map(|it| format!(" over {}", it.path.display()));
        let (format, over) = (recipe.format, over.unwrap_or_default());
        println!("created {}: {format}, {}{over}", file.display(), human(size));
    }
    Ok(ExitCode::SUCCESS)
}

/// The snapshot that a raw image of Ceph is to be a clone of.
fn parent_of_clone<'a>(args: &'a CreateArgs, file: &Path) -> Option<&'a str> {
    rbd::name(file).filter(|_| args.format.is_none_or(|format| format == Format::Raw))?;
    args.backing.as_deref().filter(|of| rbd::snapshot_name(Path::new(of)).is_some())
}

/// Have the cluster make one, which writes nothing.
fn clone(args: &CreateArgs, of: &str, file: &Path) -> anyhow::Result<ExitCode> {
    let name = file.display();
    let failed = |why: String| anyhow!("cannot create {name}: {why}");
    rbd::snapshots::clone(of, &file.to_string_lossy()).map_err(failed)?;
    let mut size = rbd::snapshots::size(&file.to_string_lossy()).map_err(failed)?;
    if let Some(wanted) = args.size.filter(|wanted| *wanted != size) {
        let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
        let container = Container::open(file, &options)?;
        on_a_ring(file, |io| async move { container.set_len(&io, wanted).await })?
            .with_context(|| format!("cannot make {name} {wanted} bytes long"))?;
        size = wanted;
    }
    if !args.quiet {
        println!("created {name}: raw, {}, a clone of {of}", human(size));
    }
    Ok(ExitCode::SUCCESS)
}
