//! `ringtap create`: new images.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use ringtap_image::Format;
use ringtap_image_tools::{self as tools, rbd};

use super::bar::{Bar, Talk};
use super::source::Sources;
use super::stop::Unmade;
use super::target::NewImage;
use super::watch;
use crate::manual::section::{EXIT, Section};
use crate::names;
use crate::output::human;

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
    #[arg(short, long, value_parser = names::backing(), value_name = "FILE")]
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
        crate::say::out(&text);
        return Ok(ExitCode::SUCCESS);
    }
    let Some(file) = &args.file else {
        return Err(ringtap_daemon::Error::Usage("name the FILE to make".into()).into());
    };
    let (reading, watch) = (args.sources.reading(), watch::notes());
    let say = |format: Format, size: u64, of: String| {
        if !args.quiet {
            say!("created {}: {format}, {}{of}", file.display(), human(size));
        }
    };
    if let Some(of) = parent_of_clone(args, file) {
        let size = tools::create::clone_of_snapshot(of, file, args.size)?;
        say(Format::Raw, size, format!(", a clone of {of}"));
        return Ok(ExitCode::SUCCESS);
    }
    let mut recipe = args.new.recipe(file, args.format, args.backing.as_deref())?;
    if args.size.is_some() && recipe.size.is_some() {
        let why = "the size is said twice, on the command line and with -o: say it once";
        return Err(ringtap_daemon::Error::Usage(why.into()).into());
    }
    recipe.size = args.size.or(recipe.size);
    let new = recipe.read(args.new.secret().or(reading.secret.clone()))?;
    // Room that is written, and keys that are derived, take long.
    let _watch = Unmade::watch(new.files(file))?;
    let bar = Bar::ticking(Talk::unasked(args.quiet));
    let made = tools::create::create(file, &new, args.unsafely, &reading, &watch);
    drop(bar);
    let size = made?;
    let over = new.backing.as_ref().map(|it| format!(" over {}", it.path.display()));
    say(new.options.format(), size, over.unwrap_or_default());
    Ok(ExitCode::SUCCESS)
}

/// The snapshot that a raw image of Ceph is to be a clone of.
fn parent_of_clone<'a>(args: &'a CreateArgs, file: &Path) -> Option<&'a str> {
    rbd::name(file).filter(|_| args.format.is_none_or(|format| format == Format::Raw))?;
    args.backing.as_deref().filter(|of| rbd::snapshot_name(Path::new(of)).is_some())
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            ("ringtap create vm.raw 10G", "a raw image, all of it a hole"),
            ("ringtap create -f qcow2 vm.qcow2 10G", "a qcow2 image"),
            (
                "ringtap create -b vm.qcow2 -F qcow2 today.qcow2",
                "an overlay: vm.qcow2 stays as it is, and today.qcow2 holds what changes",
            ),
            ("ringtap create -f qcow2 -o help", "what -o takes for qcow2"),
        ],
    ),
    EXIT,
];
