//! `ringtap compare A B`: whether two images have the same content. Without two images the same verb is
//! the lab's ([`crate::lab`]).

use std::ffi::OsString;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, Command};
use ringtap_image::Format;
use ringtap_image_tools::compare::{CompareError, Found, Pair};
use ringtap_image_tools::{LazySecret, Watcher};

use super::bar::Talk;
use super::source::{Sources, backing};
use super::watch::Work;
use crate::manual::section::Section;
use crate::names::{self, CacheName};
use crate::outcome::{self, Usage};
use crate::{lab, secret};

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

/// Whether a command line that names no two images to compare is the lab's: then become that.
pub(crate) fn takes(words: &[OsString], error: &clap::Error) -> Option<anyhow::Result<ExitCode>> {
    let (verb, rest) = words.get(1..)?.split_first()?;
    if verb != "compare" {
        return None;
    }
    match error.kind() {
        // Of images first.
        ErrorKind::DisplayHelp => {
            let _ = error.print();
            let _ = writeln!(
                stdout(),
                "\nWithout two images, ways of serving a disk are measured, by {}:\n",
                lab::PROGRAM
            );
            if let Some(missing) = lab::missing() {
                let _ = writeln!(stdout(), "{missing}");
                return Some(Ok(ExitCode::SUCCESS));
            }
        }
        ErrorKind::DisplayVersion => return None,
        // With what only images have, the mistake is in that.
        _ if of_images(rest) => return None,
        _ => {}
    }
    Some(lab::compare(rest))
}

pub(crate) fn run(args: &CompareVerb) -> anyhow::Result<ExitCode> {
    match &args.images[..] {
        [one, other] => Ok(images(args, one, other)),
        // A plan's name, or an image alone.
        _ => one_word().unwrap_or_else(|| {
            Err(Usage("two images are compared, and one is named".to_owned()).into())
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

/// Become the lab, if what was parsed as the options of two images and is not need not be about images.
fn one_word() -> Option<anyhow::Result<ExitCode>> {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let (verb, rest) = words.split_first()?;
    (verb == "compare" && !of_images(rest)).then(|| lab::compare(rest))
}

/// Whether the words are about two images: two of them follow one another before any option or behind the last one, or one is an
/// option that the lab has not.
fn of_images(words: &[OsString]) -> bool {
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    let is_name = |word: &&std::borrow::Cow<'_, str>| !word.starts_with('-');
    // Behind an option the first word may be its value.
    let last = words.iter().rev().take_while(is_name).count();
    if words.iter().take_while(is_name).count() > 1 || last > 2 {
        return true;
    }
    let command = CompareVerb::augment_args(Command::new("compare"));
    let own: Vec<String> = command
        .get_opts()
        .flat_map(|option| {
            let long = option.get_long().map(|name| format!("--{name}"));
            long.into_iter().chain(option.get_short().map(|name| format!("-{name}")))
        })
        .collect();
    words.iter().any(|word| own.iter().any(|option| word.split('=').next() == Some(option)))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_about_images_is_known() {
        let of = |line: &str| {
            of_images(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>())
        };
        assert!(
            of("--bogus a b c")
                && of("a b c")
                && of("-f raw a")
                && of("--second-format=raw a")
                && of("--strict")
        );
        assert!(!of("") && !of("published --within 40m") && !of("--stages host --seconds 1"));
    }
}
