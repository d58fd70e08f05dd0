//! The command line.

use std::path::PathBuf;

use clap::{CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::info::InfoArgs;
use crate::manual;
use crate::serve::ServeArgs;

/// Virtual disks served to virtual machines as fast as the bare block device
///
/// A disk image (a plain file, or a block device) is served over vhost-user-blk straight to a
/// virtual machine's memory, and over NBD to everything else. The lab measures that against the
/// other ways of serving the same disk.
#[derive(Debug, Parser)]
#[command(name = "ringtap", version, propagate_version = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant)] // one of them lives, once
pub(crate) enum Command {
    /// Serve disks to virtual machines and NBD clients
    ///
    /// Runs in the foreground. Each DISK is followed by its own options; options before the first
    /// DISK belong to the first. Once every socket listens it prints `ready`.
    Serve(ServeArgs),
    /// Say what an image is: sizes, alignment, who uses it
    ///
    /// Works on an image in use, too: it says who has it.
    Info(InfoArgs),
    /// Measure ways of serving a disk, side by side
    Compare(ringtap_lab::CompareArgs),
    /// Make the report of a comparison again from its samples
    Report(ringtap_lab::ReportArgs),
    /// Put load on a vhost-user socket (used by the lab)
    #[command(hide = true)]
    Load(ringtap_load::LoadArgs),
    /// Copy files or make a tree of them (used by the lab, inside guests too)
    #[command(hide = true)]
    LabTool(ringtap_lab::ToolArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write the manual pages, one for each command
    Man {
        /// The folder to write them to; without it the page of `ringtap` itself goes to stdout.
        dir: Option<PathBuf>,
    },
}

/// How facts are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people.
    #[default]
    Text,
    /// JSON, for programs.
    Json,
}

/// The command line with the examples and exit codes that its help and its manual pages share.
pub(crate) fn command() -> clap::Command {
    manual::with_sections(Cli::command())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn every_command_that_is_shown_has_examples() {
        for command in command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let help = command.get_after_long_help().or(command.get_after_help());
            let help = help.map(ToString::to_string).unwrap_or_default();
            assert!(help.contains(&format!("ringtap {}", command.get_name())), "{command}");
        }
    }
}
