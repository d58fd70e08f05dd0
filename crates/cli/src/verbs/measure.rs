//! `ringtap measure`: how much space a new image would take.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::qcow2::{BitmapEntry, CreateOptions, Preallocation, SnapshotName};
use ringtap_image::{CacheMode, Format, luks, on_a_ring, open};
use ringtap_vbd::Vbd;
use serde::Serialize;

use super::source::{Sources, backing, format_of, open_source};
use super::target::NewImage;
use super::{chain, offline};
use crate::args::{Output, pretty};
use crate::names;

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

    /// Format of FILE [default: as written down, else by its mark]
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

/// Bytes of a file.
#[derive(Debug, Serialize)]
struct Measure {
    /// With what the source holds.
    required: u64,
    /// Once every byte of the disk is written.
    #[serde(rename = "fully-allocated")]
    fully_allocated: u64,
    /// What the source's bitmaps would take besides.
    #[serde(skip_serializing_if = "Option::is_none")]
    bitmaps: Option<u64>,
}

pub(crate) fn run(args: &MeasureArgs) -> anyhow::Result<ExitCode> {
    let format = args.output_format;
    if let Some(text) = args.new.help_wanted(format) {
        print!("{text}");
        return Ok(ExitCode::SUCCESS);
    }
    let target = args.file.as_deref().unwrap_or(Path::new("."));
    let mut recipe = args.new.recipe(target, Some(format), None)?;
    let source = args.file.as_deref().map(|file| open_at(args, file)).transpose()?;
    let size = source.as_ref().map(|vbd| vbd.size()).or(args.size).or(recipe.size);
    let none = || Fault::Usage("name an image, or a size with --size".into());
    let size = size.and_then(|size| size.checked_next_multiple_of(512)).ok_or_else(none)?;
    recipe.size = Some(size);
    let measure = match format {
        Format::Raw => Measure { required: size, fully_allocated: size, bitmaps: None },
        Format::Qcow2 => {
            let options = recipe.qcow2_options(args.new.secret()?.as_ref())?;
            qcow2(args, &options, source)?
        }
        Format::Luks => {
            let bytes = luks::front_len(&recipe.luks_options()?) + size;
            Measure { required: bytes, fully_allocated: bytes, bitmaps: None }
        }
        other => {
            let why = format!("what {other} images take is not measured: raw, qcow2 and luks are");
            return Err(Fault::Usage(why).into());
        }
    };
    match args.output {
        Output::Json => println!("{}", pretty(&measure)?),
        Output::Text => {
            println!("required size: {}", measure.required);
            println!("fully allocated size: {}", measure.fully_allocated);
            if let Some(bitmaps) = measure.bitmaps {
                println!("bitmaps size: {bitmaps}");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn open_at(args: &MeasureArgs, file: &Path) -> anyhow::Result<Vbd> {
    let Some(snapshot) = &args.snapshot else {
        return open_source(file, args.format, CacheMode::Writeback, &args.sources);
    };
    let (format, _) = format_of(file, args.format)?;
    if format != Format::Qcow2 {
        return Err(offline::cannot(file, format, "have no snapshots: leave -l out"));
    }
    let mut options = args.sources.options(format, CacheMode::Writeback)?;
    options.snapshot = Some(snapshot.clone());
    Ok(Vbd::new(open(file, &options)?, CacheMode::Writeback))
}

fn qcow2(
    args: &MeasureArgs,
    options: &CreateOptions,
    source: Option<Vbd>,
) -> anyhow::Result<Measure> {
    if options.data_file.is_some() {
        let why = "what an image with an external data file takes is not measured: leave \
                   data_file out";
        return Err(Fault::Usage(why.into()).into());
    }
    let fully_allocated = options.full_size().map_err(|why| Fault::Usage(why.to_owned()))?;
    let cluster = options.cluster_size;
    let all = options.size.next_multiple_of(cluster);
    let mut measure = Measure { required: fully_allocated - all, fully_allocated, bitmaps: None };
    let reserved = !matches!(options.preallocation, Preallocation::Off | Preallocation::Metadata);
    if let Some((file, vbd)) = args.file.as_deref().zip(source) {
        let layer = chain::layer(file, args.format, args.sources.force_share)?;
        if options.version > 2 && layer.header.is_some_and(|header| header.version > 2) {
            measure.bitmaps = Some(bitmaps(&layer.bitmaps, vbd.size(), cluster));
        }
        // How much of it the backing file holds already is not known.
        let known = options.backing_file.is_none() && !reserved;
        measure.required += if known { data(file, vbd, cluster)? } else { all };
    } else if reserved {
        measure.required += all;
    }
    Ok(measure)
}

/// Bytes of the clusters that a disk's data lies in.
fn data(path: &Path, vbd: Vbd, cluster: u64) -> anyhow::Result<u64> {
    let place = path.display().to_string();
    on_a_ring(path, |io| async move {
        let (mut at, mut clusters, mut counted) = (0, 0, 0);
        while at < vbd.size() {
            let status = vbd.status(&io, at, vbd.size() - at).await;
            let status = status.map_err(|error| {
                anyhow::anyhow!("{place}: what lies at {at} cannot be found out: {error}")
            })?;
            let end = at + status.len.max(1);
            if status.allocated && !status.zero {
                let last = end.div_ceil(cluster);
                clusters += last.saturating_sub(counted.max(at / cluster));
                counted = last;
            }
            at = end;
        }
        Ok(clusters * cluster)
    })?
}

/// Bytes of bitmaps, all of their clusters there, their tables and the directory.
fn bitmaps(entries: &[BitmapEntry], size: u64, cluster: u64) -> u64 {
    let (mut bytes, mut directory) = (0, 0);
    for entry in entries.iter().filter(|entry| !entry.is_in_use()) {
        let bits = size.div_ceil(1 << entry.granularity_bits);
        let clusters = bits.div_ceil(8).div_ceil(cluster);
        bytes += clusters * cluster + (clusters * 8).next_multiple_of(cluster);
        directory += (24 + entry.name.len() as u64).next_multiple_of(8);
    }
    bytes + directory.next_multiple_of(cluster)
}
