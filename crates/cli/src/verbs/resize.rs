//! `ringtap resize`: disks made larger, or smaller where that is asked for.

use std::ffi::OsStr;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use ringtap_daemon::Error as Fault;
use ringtap_image::qcow2::{self, ResizeOptions};
use ringtap_image::{
    CacheMode, Container, Format, OpenOptions, Place, Role, find_named, on_a_ring, open_place,
    parse_size, record, vhd,
};
use ringtap_vbd::{Copy, Progress, Vbd, copy};

use super::chain;
use super::convert::finish;
use super::info::human;
use super::offline::{self, Writing};
use super::source::{Force, Sources, backing};
use super::target::or_limit;
use crate::names;

/// What `ringtap resize` is told.
#[derive(Debug, Args)]
#[command(mut_arg("allow_backing", backing))]
pub(crate) struct ResizeArgs {
    /// An image that nobody uses
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// The new size, like 10G; +1G or -1G from what it is
    #[arg(value_name = "SIZE", allow_hyphen_values = true)]
    size: String,

    /// Format of the image [default: as written down]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// Make it smaller: what lies past the new end is lost
    #[arg(long)]
    shrink: bool,

    /// What becomes of the room that is new: a hole, space reserved, or zeros written
    #[arg(long, value_enum, value_name = "HOW", default_value = "off")]
    preallocation: Preallocation,

    /// Say nothing but warnings and errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    sources: Sources,

    #[command(flatten)]
    force: Force,
}

/// What becomes of the room that is new.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Preallocation {
    /// A hole.
    Off,
    /// Space reserved, of raw images.
    Falloc,
    /// Zeros, written.
    Full,
}

pub(crate) fn run(args: &ResizeArgs) -> anyhow::Result<ExitCode> {
    let file = &args.file;
    let format = offline::format(file, args.format, true)?;
    let writing = Writing::new(format, &args.force, &args.sources.names.data);
    let place = Place::from(file);
    let container = to_change(&place, writing)?;
    let changed = container.clone();
    let old = size_of(file, format, &container)?;
    let new = wanted(&args.size, old)
        .ok_or_else(|| Fault::Usage(format!("{}: write a size like 10G, +1G or -1G", args.size)))?;
    if new < old && !args.shrink {
        let why = format!(
            "{} would become smaller, from {old} to {new} bytes, and lose what lies past that: \
             add --shrink if its guest has made room",
            file.display()
        );
        return Err(Fault::Usage(why).into());
    }
    let preallocated = args.preallocation != Preallocation::Off && new != old;
    if preallocated && new < old {
        return Err(Fault::Usage("--preallocation is for disks that become larger".into()).into());
    }
    if preallocated && (format, args.preallocation) != (Format::Raw, Preallocation::Falloc) {
        let known = matches!(format, Format::Raw | Format::Qcow2);
        if !known || args.preallocation == Preallocation::Falloc {
            return Err(offline::cannot(
                file,
                format,
                "take --preallocation full only, if any: raw and qcow2 do",
            ));
        }
    }
    change(&place, writing, container, new, &args.sources)?;
    changed.confirm_format(format);
    drop(changed);
    if preallocated {
        preallocate(args, writing, old..new).with_context(|| {
            format!("{} has its new size, and not all of it is allocated", file.display())
        })?;
    }
    if !args.quiet {
        println!("{}: {} ({new} bytes)", file.display(), human(new));
    }
    Ok(ExitCode::SUCCESS)
}

/// Have the new part of a disk in the image.
fn preallocate(args: &ResizeArgs, writing: Writing<'_>, part: Range<u64>) -> anyhow::Result<()> {
    let file = &args.file;
    if args.preallocation == Preallocation::Falloc {
        let container = offline::to_change(file, writing)?;
        let end = on_a_ring(file, |io| async move {
            container.allocate(&io, part.start, part.end - part.start).await?;
            container.sync(&io).await
        })?;
        return Ok(end?);
    }
    let cache = CacheMode::Writeback;
    let options = OpenOptions {
        read_only: false,
        force_share: false,
        force_format: args.force.force_format,
        ..args.sources.options(writing.format, cache)?
    };
    let disk = Vbd::new(open_place(&Place::from(file), &options)?, cache);
    let progress = Arc::new(Progress::default());
    // Every byte of it as data, zeros as they are.
    let job = Copy {
        range: part.clone(),
        to_offset: part.start,
        sparse: 0,
        ..Copy::new(disk.fork(), disk.fork())
    };
    let end = copy(job, &progress);
    let stable = finish(disk, file);
    end?;
    stable
}

/// The size a text asks for, rounded up to 512.
fn wanted(text: &str, old: u64) -> Option<u64> {
    let size = match text.strip_prefix('+') {
        Some(more) => old.checked_add(parse_size(more)?)?,
        None => match text.strip_prefix('-') {
            Some(less) => old.checked_sub(parse_size(less)?)?,
            None => parse_size(text)?,
        },
    };
    size.checked_next_multiple_of(512)
}

/// Make a disk at least so large.
pub(crate) fn grow(
    place: &Place,
    writing: Writing<'_>,
    size: u64,
    sources: &Sources,
) -> anyhow::Result<()> {
    let container = to_change(place, writing)?;
    if size_of(place.path(), writing.format, &container)? < size {
        change(place, writing, container, size, sources)?;
    }
    Ok(())
}

/// Make a disk larger, or nothing but what it is; one that would become smaller is refused.
pub(crate) fn set(
    place: &Place,
    writing: Writing<'_>,
    size: u64,
    sources: &Sources,
) -> anyhow::Result<()> {
    let container = to_change(place, writing)?;
    let old = size_of(place.path(), writing.format, &container)?;
    let size = size.checked_next_multiple_of(512).context("the size is too large")?;
    if size < old {
        let why = format!(
            "{} has {old} bytes: make it smaller with ringtap resize --shrink",
            place.path().display()
        );
        return Err(Fault::Usage(why).into());
    }
    change(place, writing, container, size, sources)
}

fn to_change(place: &Place, writing: Writing<'_>) -> anyhow::Result<Container> {
    match writing.format {
        Format::Qcow2 => offline::settled(place, writing),
        Format::Vhd => offline::settled_vhd(place, writing),
        _ => Ok(offline::to_change(place, writing)?),
    }
}

fn size_of(path: &Path, format: Format, container: &Container) -> anyhow::Result<u64> {
    match format {
        Format::Raw => Ok(container.len().next_multiple_of(512)),
        Format::Qcow2 => {
            let container = container.clone();
            let header = on_a_ring(path, |io| async move {
                ringtap_image::qcow2::Header::read(&io, &container).await
            })??;
            Ok(header.size.next_multiple_of(512))
        }
        Format::Vhd => {
            let container = container.clone();
            let facts = on_a_ring(path, |io| async move { vhd::facts(&io, &container).await })??;
            Ok(facts.size)
        }
        other => Err(offline::cannot(path, other, "cannot be resized here")),
    }
}

fn change(
    place: &Place,
    writing: Writing<'_>,
    container: Container,
    size: u64,
    sources: &Sources,
) -> anyhow::Result<()> {
    let (format, path) = (writing.format, place.path());
    match format {
        Format::Raw => {
            if !container.traits().regular {
                bail!("{} is a block device, whose size others decide", path.display());
            }
            on_a_ring(path, |io| async move {
                container.set_len(&io, size).await?;
                container.sync(&io).await
            })?
            .map_err(|error| or_limit(error, path, size))
            .with_context(|| format!("cannot make {} {size} bytes long", path.display()))
        }
        Format::Qcow2 => {
            let own = chain::layer(place, Some(format), true)?;
            let data = match own.header.as_ref().and_then(|header| header.data_file()) {
                Some(name) => {
                    let name = PathBuf::from(OsStr::from_bytes(name));
                    let found =
                        find_named(&container, Role::DataFile, &[name], &writing.options())?;
                    record::may_own(place, &found, !writing.data.data_file.is_empty())?;
                    let writing = Writing { format: Format::Raw, ..writing };
                    Some(offline::to_change(&found, writing)?)
                }
                None => None,
            };
            let backing_size = match &own.backing {
                Some(_) => Some(backing_size(path, sources)?),
                None => None,
            };
            let options = ResizeOptions { size, shrink: true, backing_size };
            Ok(on_a_ring(path, |io| async move {
                qcow2::resize(&io, &container, data.as_ref(), &options).await
            })??)
        }
        Format::Vhd => {
            Ok(on_a_ring(path, |io| async move { vhd::resize(&io, &container, size).await })??)
        }
        other => Err(offline::cannot(path, other, "cannot be resized here")),
    }
}

/// Bytes of the disk below an image.
fn backing_size(path: &Path, sources: &Sources) -> anyhow::Result<u64> {
    let layers = chain::layers(path, Some(Format::Qcow2), true, &sources.names)?;
    let Some(below) = layers.get(1) else { return Ok(0) };
    match &below.header {
        Some(header) => Ok(header.size),
        None => {
            let options = OpenOptions {
                force_share: true,
                ..sources.options(below.format, CacheMode::Writeback)?
            };
            Ok(open_place(&below.place, &options)?.info().size)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_new_or_more_or_less() {
        assert_eq!(wanted("10G", 5), Some(10 << 30));
        assert_eq!(wanted("+1M", 1 << 20), Some(2 << 20));
        assert_eq!(wanted("-1k", 2048), Some(1024));
        assert_eq!(wanted("1000", 0), Some(1024));
        for text in ["-3k", "ten", "+", "-", ""] {
            assert_eq!(wanted(text, 2048), None, "{text}");
        }
    }
}
