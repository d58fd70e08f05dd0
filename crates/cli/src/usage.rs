//! A command line that is not understood, and with which status it ends.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::ErrorKind;

use crate::{args, say};

/// The command line was not understood, or only asked for help.
pub(crate) fn refused(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        say::note(error.print().and_then(|()| io::stdout().flush()));
        return ExitCode::SUCCESS;
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        tell!("{}", error.render());
        return status_of_usage();
    }
    told(&on_one_line(&error.render().to_string()))
}

/// The command line makes no sense: say why, on one line as scripts expect it.
pub(crate) fn told(why: &str) -> ExitCode {
    let verb = words().find(|word| args::command().find_subcommand(word).is_some());
    let help =
        verb.as_ref().map_or("ringtap help".to_owned(), |verb| format!("ringtap help {verb}"));
    tell!("ringtap: {why} (see {help})");
    status_of_usage()
}

/// What was found cannot be written.
pub(crate) fn unwritten(error: &io::Error) -> ExitCode {
    tell!("ringtap: what was found cannot be written to stdout: {error}");
    let verb = words().find(|word| args::command().find_subcommand(word).is_some());
    // To those who compare, 1 says that the images differ.
    ExitCode::from(if verb.as_deref() == Some("compare") { 2 } else { 1 })
}

fn words() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}

fn status_of_usage() -> ExitCode {
    // To those who ask for a check, 2 says that the image is corrupt.
    ExitCode::from(if asks_for_check(words()) { 1 } else { 2 })
}

/// Whether words of a command line are `check`, or `disk check`, whatever options stand between.
fn asks_for_check(mut words: impl Iterator<Item = String>) -> bool {
    match words.next().as_deref() {
        Some("disk") => {
            let command = args::command();
            let disk = command.find_subcommand("disk");
            let is_verb = |word: &String| disk.is_some_and(|of| of.find_subcommand(word).is_some());
            words.find(is_verb).is_some_and(|verb| verb == "check")
        }
        verb => verb == Some("check"),
    }
}

/// What clap says in several lines, without what it says of usage.
fn on_one_line(text: &str) -> String {
    let text = text.trim_start_matches("error:");
    let lines = text.lines().map(str::trim);
    let told = lines.take_while(|line| {
        !line.starts_with("Usage:") && !line.starts_with("For more information")
    });
    told.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_told_on_one_line() {
        let error = args::command().try_get_matches_from(["ringtap", "info", "-f", "none", "a"]);
        let said = on_one_line(&error.expect_err("no such format").render().to_string());
        assert!(
            said.starts_with("invalid value 'none' for '--format <FORMAT>' [possible values: raw"),
            "{said}"
        );
        assert!(!said.contains('\n') && !said.contains("--help"), "{said}");
    }

    #[test]
    fn two_says_to_nobody_who_asks_for_a_check_that_the_command_line_is_wrong() {
        let asks = |line: &str| asks_for_check(line.split(' ').map(str::to_owned));
        for line in ["check a", "disk check", "disk --control unix:/a check vm", "disk check info"]
        {
            assert!(asks(line), "{line}");
        }
        for line in
            ["info check", "disk info check", "disk remove --nope check", "disk", "job list"]
        {
            assert!(!asks(line), "{line}");
        }
    }
}
