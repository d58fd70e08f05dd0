//! `ringtap compare A B`: whether two images have the same content. Without two images the same verb is
//! the lab's ([`crate::lab`]).

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use ringtap_image::Format;
use ringtap_image_tools::compare::{CompareError, Found, Pair};
use ringtap_image_tools::{LazySecret, Watcher};

use super::bar::Talk;
use super::source::{Sources, backing};
use super::watch::Work;
use crate::manual::Section;
use crate::names::{self, CacheName};
use crate::{lab, outcome, secret};

/// What `ringtap compare` is told.
#[derive(Debug, Args)]
#[command(mut_arg("allow_backing", backing))]
pub(crate) struct CompareVerb {
    /// The two images
    #[arg(value_name = "IMAGE", num_args = 1..=2, required = true)]
    images: Vec<PathBuf>,

    /// Format of the first image [default: as recorded, else by its signature]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// Format of the second image
    #[arg(
        short = 'F',
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    second_format: Option<Format>,

    /// Where the secret of the second image is, if that is another [default: that of --secret]
    #[arg(long, value_name = "SOURCE", value_parser = secret::lazy)]
    second_secret: Option<LazySecret>,

    /// Their sizes, and what is allocated in them, must be the same too
    #[arg(short, long)]
    strict: bool,

    /// How host caching is used
    #[arg(
        short = 'T',
        long = "source-cache",
        value_enum,
        value_name = "MODE",
        default_value = "writeback"
    )]
    cache: CacheName,

    #[command(flatten)]
    talk: Talk,

    #[command(flatten)]
    sources: Sources,
}

pub(crate) fn run(args: &CompareVerb) -> anyhow::Result<ExitCode> {
    match &args.images[..] {
        [one, other] => Ok(images(args, one, other)),
        // A plan's name, or an image alone.
        _ => lab::one_word().unwrap_or_else(|| {
            let why = "two images are compared, and one is named";
            Ok(outcome::usage(why))
        }),
    }
}

/// Exit status as `qemu-img compare`: 0 the same, 1 they differ, 2 to 4 it could not be found out.
fn images(args: &CompareVerb, one: &Path, other: &Path) -> ExitCode {
    let work = Work::shown(args.talk);
    let watch: Watcher = work.clone();
    let images = [(one, args.format), (other, args.second_format)];
    let (reading, second) = (args.sources.reading(), args.second_secret.as_ref());
    let pair = Pair::open(images, args.cache.into(), &reading, second, &watch);
    let pair = match pair {
        Ok(pair) => pair,
        Err(error) => {
            outcome::failed(&error.into());
            return ExitCode::from(2);
        }
    };
    let say = |text: &str| {
        if !args.talk.quiet {
            say!("{text}");
        }
    };
    let sizes = pair.sizes();
    if sizes[0] != sizes[1] && args.strict {
        say(&format!("Strict mode: Image size mismatch! ({} and {} bytes)", sizes[0], sizes[1]));
        return ExitCode::from(1);
    }
    let found = pair.compare(args.strict, &watch);
    work.over();
    let less = sizes[0].min(sizes[1]);
    // Of no interest where what both have differs.
    let early = matches!(found, Ok(Found::Content(offset)) if offset < less);
    if sizes[0] != sizes[1] && !early {
        say(&format!("Warning: Image size mismatch! ({} and {} bytes)", sizes[0], sizes[1]));
    }
    match found {
        Ok(Found::Same) => {
            say("Images are identical.");
            ExitCode::SUCCESS
        }
        Ok(Found::Content(offset)) => {
            say(&format!("Content mismatch at offset {offset}!"));
            ExitCode::from(1)
        }
        Ok(Found::Allocation(offset)) => {
            say(&format!("Strict mode: Offset {offset} block status mismatch!"));
            ExitCode::from(1)
        }
        Err(error) => {
            let paths = [one, other];
            let (code, which) = match &error {
                CompareError::Read { disk, .. } => (4, Some(*disk)),
                CompareError::Status { disk, .. } => (3, Some(*disk)),
                _ => (4, None),
            };
            let path = which.and_then(|disk| paths.get(disk));
            let of =
                path.map_or_else(|| "cannot compare".into(), |path| path.display().to_string());
            outcome::failed(&anyhow::Error::new(error).context(of));
            ExitCode::from(code)
        }
    }
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples of comparing two images",
        &[
            ("ringtap compare vm.raw vm.qcow2", "whether a guest reads the same from both"),
            ("ringtap compare -s a.qcow2 b.qcow2", "sizes and allocation must agree too"),
        ],
    ),
    (
        "Examples of measuring",
        &[
            ("ringtap compare", "which way should I serve a guest's disk on this machine?"),
            ("ringtap-lab compare --help", "all that can be measured, and how"),
        ],
    ),
    (
        "Exit status of comparing two images",
        &[
            ("0", "a guest reads the same from both"),
            ("1", "they differ"),
            ("2", "one could not be opened, or the command line makes no sense"),
            ("3", "what is allocated could not be found out"),
            ("4", "reading failed"),
        ],
    ),
];
