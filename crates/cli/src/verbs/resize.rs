//! `ringtap resize`: disks made larger, or smaller where that is asked for.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use ringtap_daemon::Error as Fault;
use ringtap_image::qcow2::Preallocation;
use ringtap_image::{Format, parse_size};
use ringtap_image_tools::resize::{NewSize, Resize, resize};
use ringtap_image_tools::{Error, Watcher};

use super::bar::Talk;
use super::source::{Force, Sources, backing};
use super::watch::Work;
use crate::manual::section::{EXIT, Section};
use crate::names;
use crate::output::human;

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

    /// Format of the image [default: as recorded]
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

    /// What becomes of the room that is new: a hole, tables (qcow2), space reserved too, or zeros written
    #[arg(long, value_enum, value_name = "HOW", default_value = "off")]
    preallocation: How,

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
enum How {
    /// A hole.
    Off,
    /// Tables that lead to a hole, of qcow2.
    Metadata,
    /// Space reserved.
    Falloc,
    /// Zeros, written.
    Full,
}

impl From<How> for Preallocation {
    fn from(name: How) -> Preallocation {
        match name {
            How::Off => Preallocation::Off,
            How::Metadata => Preallocation::Metadata,
            How::Falloc => Preallocation::Falloc,
            How::Full => Preallocation::Full,
        }
    }
}

pub(crate) fn run(args: &ResizeArgs) -> anyhow::Result<ExitCode> {
    let file = &args.file;
    let wrong = || Fault::Usage(format!("{}: write a size like 10G, +1G or -1G", args.size));
    let job = Resize {
        path: file.clone(),
        format: args.format,
        force_format: args.force.force_format,
        size: wanted(&args.size).ok_or_else(wrong)?,
        shrink: args.shrink,
        preallocation: args.preallocation.into(),
        reading: args.sources.reading(),
    };
    let work = Work::ticking(Talk::unasked(args.quiet));
    let watch: Watcher = work.clone();
    let size = match work.ended(resize(&job, &watch)) {
        Err(error) if matches!(error.downcast_ref(), Some(Error::Size)) => {
            return Err(wrong().into());
        }
        end => end?,
    };
    if !args.quiet {
        say!("{}: {} ({size} bytes)", file.display(), human(size));
    }
    Ok(ExitCode::SUCCESS)
}

/// The size a text asks for.
fn wanted(text: &str) -> Option<NewSize> {
    if let Some(more) = text.strip_prefix('+') {
        return parse_size(more).map(NewSize::More);
    }
    match text.strip_prefix('-') {
        Some(less) => parse_size(less).map(NewSize::Less),
        None => parse_size(text).map(NewSize::To),
    }
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            ("ringtap resize vm.qcow2 20G", "20 GiB, if that is more than it has"),
            ("ringtap resize -f raw vm.raw +5G", "5 GiB more"),
            (
                "ringtap resize --shrink vm.qcow2 8G",
                "smaller: first let the guest shrink its file systems and partitions",
            ),
        ],
    ),
    EXIT,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_new_or_more_or_less() {
        assert_eq!(wanted("10G"), Some(NewSize::To(10 << 30)));
        assert_eq!(wanted("+1M"), Some(NewSize::More(1 << 20)));
        assert_eq!(wanted("-1k"), Some(NewSize::Less(1024)));
        for text in ["ten", "+", "-", ""] {
            assert_eq!(wanted(text), None, "{text}");
        }
    }
}
