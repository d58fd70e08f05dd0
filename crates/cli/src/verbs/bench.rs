//! `ringtap bench`: how long an image takes for many requests, as `qemu-img bench` asks and tells.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use ringtap_image::Format;
use ringtap_image_tools::bench::{Bench, bench};
use ringtap_io::{Engine, use_engine};

use super::source::{Force, Sources, backing};
use super::watch;
use crate::manual::section::{EXIT, Section};
use crate::names::{self, CacheName};

/// What `ringtap bench` is told.
#[derive(Debug, Args)]
#[command(mut_arg("allow_backing", backing))]
pub(crate) struct BenchArgs {
    /// An image; with -w its content is lost, and nobody may use it
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Format of the image [default: as recorded; without -w also by its signature]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// So many requests
    #[arg(short, long, value_name = "N", default_value = "75000")]
    count: u64,

    /// So many of them in flight at once
    #[arg(short, long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u32).range(1..=65536))]
    depth: u32,

    /// Where the first one begins
    #[arg(short, long, value_name = "OFFSET", value_parser = names::size, default_value = "0")]
    offset: u64,

    /// Bytes of each
    #[arg(short = 's', long, value_name = "SIZE", value_parser = length, default_value = "4096")]
    buffer_size: u32,

    /// How much further each begins than the one before [default: their size]
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = names::size)]
    step_size: Option<u64>,

    /// Write, and lose what the image holds
    #[arg(short, long)]
    write: bool,

    /// Of which byte writes consist
    #[arg(long, value_name = "BYTE", value_parser = byte, default_value = "0")]
    pattern: u8,

    /// Flush each time so many writes have ended; no fewer than are in flight at once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    flush_interval: Option<u32>,

    /// Do not wait for requests in flight before a flush
    #[arg(long)]
    no_drain: bool,

    /// How host caching is used
    #[arg(short = 't', long, value_enum, value_name = "MODE", default_value = "writeback")]
    cache: CacheName,

    /// What carries requests out: threads, or io_uring, for which `native` stands too [default: as --io]
    #[arg(short = 'i', long, value_enum, value_name = "WAY")]
    aio: Option<Aio>,

    /// Taken for the sake of qemu-img: requests do not block a thread each anyway
    #[arg(short, long, hide = true)]
    native: bool,

    /// Say nothing but warnings and errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    force: Force,

    #[command(flatten)]
    sources: Sources,
}

/// What carries requests out, as QEMU names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Aio {
    Threads,
    Native,
    #[value(name = "io_uring")]
    IoUring,
}

fn length(text: &str) -> Result<u32, String> {
    let length = names::size(text)?;
    let found = u32::try_from(length).ok().filter(|length| (1..=1 << 30).contains(length));
    found.ok_or_else(|| "1 byte to 1G are possible".into())
}

fn byte(text: &str) -> Result<u8, String> {
    let found = match text.strip_prefix("0x") {
        Some(digits) => u8::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    found.ok_or_else(|| "write a byte, such as 90 or 0x5a".into())
}

pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    match args.aio {
        Some(Aio::Threads) => use_engine(Engine::Threads),
        Some(Aio::Native | Aio::IoUring) => use_engine(Engine::IoUring),
        None => true,
    };
    let size = u64::from(args.buffer_size);
    let step = args.step_size.filter(|step| *step > 0).unwrap_or(size);
    let job = Bench {
        path: &args.file,
        format: args.format,
        write: args.write.then_some(args.pattern),
        force_format: args.force.force_format,
        count: args.count,
        depth: args.depth,
        offset: args.offset,
        size: args.buffer_size,
        step,
        flush: args.flush_interval,
        drain: !args.no_drain,
        cache: args.cache.into(),
        reading: args.sources.reading(),
    };
    let begins = || {
        if args.quiet {
            return;
        }
        say!(
            "Sending {} {} requests, {size} bytes each, {} in parallel (starting at offset {}, step size {step})",
            args.count,
            if args.write { "write" } else { "read" },
            args.depth,
            args.offset
        );
        if let Some(every) = args.flush_interval {
            say!("Sending flush every {every} requests");
        }
    };
    let took = bench(&job, &watch::notes(), begins)?;
    if !args.quiet {
        say!("Run completed in {:.3} seconds.", took.as_secs_f64());
    }
    Ok(ExitCode::SUCCESS)
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            ("ringtap bench vm.qcow2", "75000 reads of 4 KiB, 64 at once"),
            (
                "ringtap bench -f raw -t none -w -c 10000 -d 32 -s 64k scratch.raw",
                "writes; what the image held is lost",
            ),
        ],
    ),
    EXIT,
];
