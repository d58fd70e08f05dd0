//! `ringtap measure`: how much space a new image would take.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::Format;
use ringtap_image::qcow2::SnapshotName;
use ringtap_image_tools::measure::{Measurement, Source, measure};
use serde::Serialize;

use super::bar::{Bar, Talk};
use super::source::{Sources, backing};
use super::target::NewImage;
use super::watch;
use crate::manual::section::{EXIT, Section};
use crate::names;
use crate::output::{Output, pretty};

/// What `ringtap measure` is told.
#[derive(Debug, Args)]
#[command(mut_arg("allow_backing", backing))]
pub(crate) struct MeasureArgs {
    /// The image that is to be converted
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,

    /// Measure an empty disk of this size instead
    #[arg(long, value_name = "SIZE", value_parser = names::size, conflicts_with = "file")]
    size: Option<u64>,

    /// Format of FILE [default: as recorded, else by its signature]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// Format of the image that would be made: raw, qcow2 or luks
    #[arg(
        short = 'O',
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true,
        default_value = "raw"
    )]
    output_format: Format,

    #[command(flatten)]
    new: NewImage,

    /// Measure FILE as it was at this snapshot inside it: its name or ID
    #[arg(short = 'l', long, value_name = "SNAPSHOT", requires = "file")]
    snapshot: Option<SnapshotName>,

    /// How to print it; json is what `qemu-img measure` prints
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,

    #[command(flatten)]
    sources: Sources,
}

/// What is printed.
#[derive(Debug, Serialize)]
struct Facts {
    required: u64,
    #[serde(rename = "fully-allocated")]
    fully_allocated: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    bitmaps: Option<u64>,
}

pub(crate) fn run(args: &MeasureArgs) -> anyhow::Result<ExitCode> {
    let format = args.output_format;
    if let Some(text) = args.new.help_wanted(format) {
        crate::say::out(&text);
        return Ok(ExitCode::SUCCESS);
    }
    let target = args.file.as_deref().unwrap_or(Path::new("."));
    let mut recipe = args.new.recipe(target, Some(format), None)?;
    recipe.size = args.size.or(recipe.size);
    if !matches!(format, Format::Raw | Format::Qcow2 | Format::Luks) {
        let why = format!("what {format} images take is not measured: raw, qcow2 and luks are");
        return Err(Fault::Usage(why).into());
    }
    let new = recipe.read(args.new.secret())?;
    let source = args.file.clone().map(|path| Source {
        path,
        format: args.format,
        snapshot: args.snapshot.clone(),
    });
    let bar = Bar::ticking(Talk::default());
    let watch = watch::notes_beside(args.output);
    let found = measure(&new, source.as_ref(), &args.sources.reading(), &watch);
    drop(bar);
    let found = found?;
    let Measurement { required, fully_allocated, bitmaps } = found;
    match args.output {
        Output::Json => say!("{}", pretty(&Facts { required, fully_allocated, bitmaps })?),
        Output::Text => {
            say!("required size: {required}");
            say!("fully allocated size: {fully_allocated}");
            if let Some(bitmaps) = bitmaps {
                say!("bitmaps size: {bitmaps}");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            ("ringtap measure -O qcow2 vm.raw", "what `convert -O qcow2 vm.raw` would need"),
            (
                "ringtap measure -O qcow2 --size 1T --output json",
                "an empty disk, and the same once it is full",
            ),
        ],
    ),
    EXIT,
];
