//! `ringtap bitmap`: the persistent dirty bitmaps of an image.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{ArgGroup, ArgMatches, Args};
use ringtap_image::qcow2::{self, BitmapChange};
use ringtap_image::{Format, on_a_ring};

use super::convert::same_file;
use super::offline::{self, Writing};
use super::source::{DataFiles, Force};
use crate::names;

/// What `ringtap bitmap` is told.
#[derive(Debug, Args)]
#[command(group(
    ArgGroup::new("changes")
        .args(["add", "remove", "clear", "enable", "disable", "merge"])
        .multiple(true)
        .required(true)
))]
pub(crate) struct BitmapArgs {
    /// Add the bitmap, enabled
    #[arg(long)]
    add: bool,

    /// Remove it
    #[arg(long)]
    remove: bool,

    /// Clear all its bits
    #[arg(long)]
    clear: bool,

    /// Let it note every write from now on
    #[arg(long)]
    enable: bool,

    /// Let it note no write from now on
    #[arg(long)]
    disable: bool,

    /// Set in it what is set in the bitmap SOURCE; repeatable
    #[arg(long, value_name = "SOURCE")]
    merge: Vec<String>,

    /// The image that SOURCE is in [default: FILE]
    #[arg(short = 'b', long, value_name = "FILE", requires = "merge")]
    source_file: Option<PathBuf>,

    /// Format of the image that SOURCE is in
    #[arg(
        short = 'F',
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true,
        requires = "source_file"
    )]
    source_format: Option<Format>,

    /// Bytes of the disk for each bit, with --add [default: the cluster size, at least 4k]
    #[arg(short, long, value_name = "SIZE", value_parser = names::size, requires = "add")]
    granularity: Option<u64>,

    /// An image that nobody uses
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// The bitmap's name
    #[arg(value_name = "BITMAP")]
    bitmap: String,

    /// Format of the image [default: as written down]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    #[command(flatten)]
    force: Force,

    #[command(flatten)]
    data: DataFiles,
}

/// One of the changes on the command line.
#[derive(Clone, Debug)]
enum Step {
    Change(BitmapChange),
    Merge(String),
}

pub(crate) fn run(args: &BitmapArgs, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let format = offline::format(&args.file, args.format, true)?;
    if format != Format::Qcow2 {
        return Err(offline::cannot(&args.file, format, "have no bitmaps"));
    }
    let steps = steps(args, matches);
    let writing = Writing::new(format, &args.force, &args.data);
    let container = offline::settled(&args.file, writing)?;
    let changed = container.clone();
    let other = match &args.source_file {
        Some(path) if same_file(path, &args.file) => None,
        Some(path) => {
            let format = offline::format(path, args.source_format, false)?;
            if format != Format::Qcow2 {
                return Err(offline::cannot(path, format, "have no bitmaps"));
            }
            Some(offline::container(path, false)?)
        }
        None => None,
    };
    let name = args.bitmap.clone();
    on_a_ring(&args.file, |io| async move {
        let mut changes = vec![];
        for step in steps {
            match step {
                Step::Change(change) => changes.push(change),
                Step::Merge(source) => {
                    // What is merged from this very image is as the steps before have left it.
                    if other.is_none() && !changes.is_empty() {
                        qcow2::change_bitmaps(&io, &container, &std::mem::take(&mut changes))
                            .await?;
                    }
                    let from = other.as_ref().unwrap_or(&container);
                    let from = Arc::new(qcow2::load_bitmap(&io, from, &source).await?);
                    changes.push(BitmapChange::Merge { into: name.clone(), from });
                }
            }
        }
        qcow2::change_bitmaps(&io, &container, &changes).await
    })??;
    changed.confirm_format(format);
    Ok(ExitCode::SUCCESS)
}

/// The changes in the order in which they are on the command line.
fn steps(args: &BitmapArgs, matches: &ArgMatches) -> Vec<Step> {
    let name = || args.bitmap.clone();
    let add = BitmapChange::Add { name: name(), granularity: args.granularity };
    let flags = [
        ("add", args.add, add),
        ("remove", args.remove, BitmapChange::Remove(name())),
        ("clear", args.clear, BitmapChange::Clear(name())),
        ("enable", args.enable, BitmapChange::Enable(name())),
        ("disable", args.disable, BitmapChange::Disable(name())),
    ];
    let place = |id: &str| matches.index_of(id).unwrap_or(0);
    let mut steps: Vec<(usize, Step)> = flags
        .into_iter()
        .filter(|(_, given, _)| *given)
        .map(|(id, _, change)| (place(id), Step::Change(change)))
        .collect();
    let merges = matches.indices_of("merge").into_iter().flatten();
    steps.extend(merges.zip(&args.merge).map(|(at, from)| (at, Step::Merge(from.clone()))));
    steps.sort_by_key(|(at, _)| *at);
    steps.into_iter().map(|(_, step)| step).collect()
}
