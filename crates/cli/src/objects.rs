//! What is said of images in object stores and behind HTTP.

use std::path::PathBuf;

use clap::Args;

use crate::names;

/// What stands above the options that every command has, behind its own.
pub(crate) const OF_ALL: &str = "Options of every command";

/// Options of all objects of a process.
#[derive(Debug, Args)]
pub(crate) struct ObjectArgs {
    /// Folder in which chunks of images at s3://, https:// and http:// are kept, for all who use it [default:
    /// RINGTAP_CACHE_DIR, else they are read again each time]
    #[arg(long, global = true, value_name = "DIR", hide_default_value = true, help_heading = OF_ALL)]
    cache_dir: Option<PathBuf>,

    /// The most that --cache-dir takes: images that nobody uses make room [default: RINGTAP_CACHE_SIZE, else no bound]
    #[arg(
        long,
        global = true,
        value_name = "SIZE",
        value_parser = names::size,
        hide_default_value = true,
        help_heading = OF_ALL
    )]
    cache_size: Option<u64>,
}

/// What `ringtap serve` is told of them besides.
#[derive(Debug, Default, Args)]
pub(crate) struct BootArgs {
    /// Write down which chunks of an image at s3://, https:// or http:// are read, in their order: a list for --boot-list
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    /// Fetch what that list names before and while guests ask, 32 chunks at a time; with --cache-dir [default: the
    /// list beside the image, IMAGE.rtboot]
    #[arg(long, value_name = "FILE")]
    boot_list: Option<PathBuf>,

    /// Bring all of an image at s3://, https:// or http:// into --cache-dir while guests read, 16 chunks at a time, behind what
    /// the boot list names
    #[arg(long)]
    fill: bool,
}

/// Have this process open objects, as it was told.
#[cfg(feature = "object")]
pub(crate) fn start(args: &ObjectArgs, boot: Option<&BootArgs>) -> anyhow::Result<()> {
    use anyhow::Context;
    use ringtap_objects::{CacheDir, Settings};

    let told = |name| std::env::var_os(name).filter(|text| !text.is_empty());
    let size = match (args.cache_size, told("RINGTAP_CACHE_SIZE")) {
        (None, Some(text)) => {
            let size = names::size(&text.to_string_lossy());
            Some(size.map_err(anyhow::Error::msg).context("RINGTAP_CACHE_SIZE")?)
        }
        (size, _) => size,
    };
    let path = args.cache_dir.clone().or(told("RINGTAP_CACHE_DIR").map(PathBuf::from));
    ringtap_objects::start(Settings {
        cache: path.map(|path| CacheDir { path, size }),
        record: boot.and_then(|boot| boot.record.clone()),
        record_goes_on: ringtap_daemon::takes_over(),
        boot_list: boot.and_then(|boot| boot.boot_list.clone()),
        fill: boot.is_some_and(|boot| boot.fill),
    });
    Ok(())
}

#[cfg(not(feature = "object"))]
pub(crate) fn start(_: &ObjectArgs, _: Option<&BootArgs>) -> anyhow::Result<()> {
    Ok(())
}
