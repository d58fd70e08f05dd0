//! `ringtap compare` without two images, and `ringtap report`: verbs of `ringtap-lab`, a program of its own. Who serves disks
//! needs none of it.

use std::ffi::OsString;
use std::io::{Write, stdout};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Args;
use clap::error::ErrorKind;

use crate::{args, outcome};

const PROGRAM: &str = "ringtap-lab";
const NOT_HERE: &str = "the lab is a program of its own, and not here: install the package ringtap-lab, or put that program \
                        beside ringtap";

/// What is handed on.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// As `ringtap-lab report --help` says
    #[arg(value_name = "ARGUMENT", num_args = 0.., allow_hyphen_values = true, trailing_var_arg = true)]
    words: Vec<OsString>,
}

/// Become `ringtap-lab report`.
pub(crate) fn report(args: &ReportArgs) -> anyhow::Result<ExitCode> {
    start("report", &args.words)
}

/// Whether a command line that names no two images to compare is the lab's: then become that.
pub(crate) fn takes(words: &[OsString], error: &clap::Error) -> Option<ExitCode> {
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
                "\nWithout two images, ways of serving a disk are measured, by {PROGRAM}:\n"
            );
            if program().is_none() {
                let _ = writeln!(stdout(), "{NOT_HERE}");
                return Some(ExitCode::SUCCESS);
            }
        }
        ErrorKind::DisplayVersion => return None,
        // With what only images have, the mistake is in that.
        _ if of_images(rest) => return None,
        _ => {}
    }
    Some(compare(rest))
}

/// Become the lab, if what was parsed as the options of two images and is not need not be about images.
pub(crate) fn one_word() -> Option<anyhow::Result<ExitCode>> {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let (verb, rest) = words.split_first()?;
    (verb == "compare" && !of_images(rest)).then(|| Ok(compare(rest)))
}

/// Exit status 1 would say that images differ.
fn compare(words: &[OsString]) -> ExitCode {
    match start("compare", words) {
        Ok(code) => code,
        Err(error) => outcome::usage(&format!("{error:#}")),
    }
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
    let command = args::command();
    let own = command.find_subcommand("compare").into_iter().flat_map(clap::Command::get_opts);
    let own: Vec<String> = own
        .flat_map(|option| {
            let long = option.get_long().map(|name| format!("--{name}"));
            long.into_iter().chain(option.get_short().map(|name| format!("-{name}")))
        })
        .collect();
    words.iter().any(|word| own.iter().any(|option| word.split('=').next() == Some(option)))
}

fn start(verb: &str, words: &[OsString]) -> anyhow::Result<ExitCode> {
    let own = std::env::current_exe().ok();
    let Some(program) = program() else { anyhow::bail!("ringtap {verb}: {NOT_HERE}") };
    let mut command = Command::new(&program);
    command.arg(verb).args(words);
    if let Some(own) = own.filter(|_| std::env::var_os("RINGTAP").is_none()) {
        command.env("RINGTAP", own);
    }
    let error = command.exec();
    anyhow::bail!("ringtap {verb}: cannot start {}: {error}", program.display())
}

/// The one beside this program, else that of PATH.
fn program() -> Option<PathBuf> {
    let own = std::env::current_exe().ok();
    let beside = own.map(|own| own.with_file_name(PROGRAM)).filter(|path| path.is_file());
    let path = std::env::var_os("PATH").unwrap_or_default();
    let named =
        || std::env::split_paths(&path).map(|dir| dir.join(PROGRAM)).find(|it| it.is_file());
    beside.or_else(named)
}

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
