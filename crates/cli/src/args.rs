//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::daemon::DaemonArgs;
use crate::disk::DiskArgs;
use crate::job::JobArgs;
use crate::lab::ReportArgs;
use crate::list::ListArgs;
use crate::manual;
use crate::names::{self, EngineName};
use crate::objects::{OF_ALL, ObjectArgs};
use crate::serve::ServeArgs;
use crate::spelling;
use crate::top::TopArgs;
use crate::upgrade::{ProcessArgs, StopArgs, UpgradeArgs};
use crate::verbs::amend::AmendArgs;
use crate::verbs::bench::BenchArgs;
use crate::verbs::bitmap::BitmapArgs;
use crate::verbs::check::CheckArgs;
use crate::verbs::commit::CommitArgs;
use crate::verbs::compare::CompareVerb;
use crate::verbs::convert::ConvertArgs;
use crate::verbs::create::CreateArgs;
use crate::verbs::dd::DdArgs;
use crate::verbs::detach::DetachArgs;
use crate::verbs::info::InfoArgs;
use crate::verbs::map::MapArgs;
use crate::verbs::measure::MeasureArgs;
#[cfg(feature = "object")]
use crate::verbs::publish::PublishArgs;
use crate::verbs::rebase::RebaseArgs;
use crate::verbs::resize::ResizeArgs;
use crate::verbs::snapshot::SnapshotArgs;
use crate::xen::XenArgs;

/// Virtual disks served to virtual machines as fast as the bare block device
///
/// A disk image (a plain file, or a block device) is served over vhost-user-blk straight to a
/// virtual machine's memory, and over NBD to everything else. The lab measures that against the
/// other ways of serving the same disk.
#[derive(Debug, Parser)]
#[command(name = "ringtap", version = env!("RINGTAP_VERSION"), propagate_version = true, max_term_width = 100)]
pub(crate) struct Cli {
    /// Folder for restart logs, on tmpfs; the same for all who use an image. In a container one that
    /// outlives it [default: RINGTAP_STATE_DIR, else /run/ringtap, of users in XDG_RUNTIME_DIR or /dev/shm]
    #[arg(long, global = true, value_name = "DIR", hide_default_value = true, help_heading = OF_ALL)]
    pub(crate) state_dir: Option<PathBuf>,

    /// What carries out reads and writes: io_uring, or threads that block, which cost more [default: RINGTAP_IO,
    /// else io_uring, and threads where it is forbidden]
    #[arg(long, global = true, value_enum, value_name = "WAY", hide_default_value = true, help_heading = OF_ALL)]
    pub(crate) io: Option<EngineName>,

    #[command(flatten)]
    pub(crate) objects: ObjectArgs,

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
    /// Serve the disks of a folder, and those that a control socket is told of, as QEMU's storage daemon does
    ///
    /// Runs in the foreground, and begins with the disks that a folder describes. `ringtap disk` and clients of QMP add others. Once
    /// all are served and the control socket listens it prints `ready`.
    Daemon(DaemonArgs),
    /// List, add, remove, resize, snapshot, merge and move the disks of a running server
    ///
    /// Of `ringtap daemon`, or of `ringtap serve --control`: by the control socket.
    Disk(DiskArgs),
    /// List, pause, limit, cancel and wait for the jobs of a running server
    ///
    /// Those that `ringtap disk commit` and `ringtap disk mirror` begin, and clients of QMP.
    Job(JobArgs),
    /// Show what the disks of a running server do, again and again
    ///
    /// Requests and bytes a second, latencies of the last interval, requests in flight, those that limits hold, and jobs; the
    /// busiest disk first.
    Top(TopArgs),
    /// Have a running server followed by a new process, while its guests go on
    ///
    /// The new process prepares while the old one serves; then all disks stand still for a moment, and it takes over the images,
    /// sockets and connections. Where that fails the old one goes on as before.
    Upgrade(UpgradeArgs),
    /// Have a running server look again at what it serves: SIGHUP
    ///
    /// Images that have grown are as large from then on, disks whose image or file has come are served, certificates are read
    /// again. Units of systemd do it where `systemctl reload` is called.
    Reload(ProcessArgs),
    /// Have a running server end, and wait until it has: SIGTERM, or SIGQUIT with --keep
    ///
    /// It ends as with `systemctl stop`: what is in flight is answered, all is written back, devices and sockets are gone. Units
    /// of systemd do it where they are stopped, for systemd kills a server that has followed another at once.
    Stop(StopArgs),
    /// Serve disks to the guests of this Xen host
    ///
    /// Runs in the foreground, in dom0. Serves every disk of a guest's configuration with
    /// script=block-ringtap, as its target= says: /PATH is a raw image, FORMAT:/PATH one of another
    /// format. Guests stay connected while it is stopped, and wait for the next.
    Xen(XenArgs),
    /// Make an image
    Create(CreateArgs),
    /// Say what an image is: format, sizes, what lies below it, who uses it
    ///
    /// Works on an image in use, too: it says who has it.
    Info(InfoArgs),
    /// Say where the content of an image lies
    Map(MapArgs),
    /// Say how much space an image would take
    ///
    /// Of a file that is not there yet: the bytes it needs for what FILE holds, and those it would have once
    /// every byte of the disk is written.
    Measure(MeasureArgs),
    /// Copy an image into another, of any format
    ///
    /// Holes stay holes, and zeros become holes. The sources are read under a lock that keeps writers
    /// off. A target that is not finished says so, and is refused from then on.
    Convert(ConvertArgs),
    /// Copy a part of an image into a new one, with the operands of dd(1)
    ///
    /// As `convert` otherwise. `skip=` and `count=` together mean what they mean to dd(1): so many blocks
    /// behind those left out.
    Dd(DdArgs),
    /// Put an image where guests of other hosts read it: an object store, or a folder of a web server
    ///
    /// Beside it goes an index, IMAGE.rtidx, with SHA-256 of each 256 KiB. What is printed names the image with the digest of that:
    /// who opens it by that name reads these bytes or none.
    #[cfg(feature = "object")]
    Publish(PublishArgs),
    /// Look whether an image contradicts itself, and repair it
    ///
    /// A repair writes new tables beside the old ones and switches to them at the end.
    Check(CheckArgs),
    /// Make a disk larger or smaller
    Resize(ResizeArgs),
    /// Change what an image says of itself: its version, lazy refcounts, keyslots
    Amend(AmendArgs),
    /// List, take, apply and delete the snapshots inside an image
    Snapshot(SnapshotArgs),
    /// Add, remove and change the dirty bitmaps inside an image
    ///
    /// The changes are made in the order in which they are written.
    Bitmap(BitmapArgs),
    /// Write what an overlay holds into the image below it, and empty the overlay
    Commit(CommitArgs),
    /// Put another image below an overlay, which goes on reading as before
    Rebase(RebaseArgs),
    /// Bring what lies below an overlay into it, so that it needs that no more
    ///
    /// What it shows of its base, in an object store say, is fetched, compared with the base's index, written into the overlay and made
    /// stable; then the overlay names no base any more, and runs with the store gone. Broken off at any moment, by kill -9 too,
    /// it is as good as before, and the same command goes on with what is missing.
    Detach(DetachArgs),
    /// Say how long an image takes for many requests
    ///
    /// By this program's own engine, without a server. `ringtap compare` measures what guests see.
    Bench(BenchArgs),
    /// Compare two images, or measure ways of serving a disk side by side
    ///
    /// With two images: whether a guest reads the same from both. Without: `ringtap-lab compare`, with the same arguments.
    Compare(CompareVerb),
    /// List the block devices of this host that are served by ublk
    ///
    /// Those whose server was killed wait for the next one of the same disk; `--reap` gives them up.
    List(ListArgs),
    /// Make the report of a measurement again, merge several, or compare two: `ringtap-lab report`
    #[command(disable_help_flag = true)]
    Report(ReportArgs),
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

/// The command line with the examples and exit codes that its help and its manual pages share.
pub(crate) fn command() -> clap::Command {
    command_for(&[])
}

/// The same to be read with these words: of a verb that none of them names its name alone is right.
pub(crate) fn command_for(words: &[OsString]) -> clap::Command {
    let command = Cli::command();
    let names: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
    let named = words.iter().filter_map(|word| names.iter().find(|name| *word == **name));
    let named: Vec<String> = named.map(|name| (*name).to_owned()).collect();
    let is_meant = |verb: &str| named.is_empty() || named.iter().any(|name| name == verb);
    let images = ["base", "disk", "file", "files", "images", "source_file"];
    let image = |arg: Arg| match images.contains(&arg.get_id().as_str()) {
        true => arg.value_parser(names::image()),
        false => arg,
    };
    let settled = |verb: clap::Command| {
        let verb = manual::with_sections(verb).mut_args(image);
        // As with QEMU's programs, what is said last of one thing counts.
        if spelling::VERBS.contains(&verb.get_name()) {
            verb.args_override_self(true)
        } else {
            verb
        }
    };
    let all = |verb: clap::Command| if is_meant(verb.get_name()) { settled(verb) } else { verb };
    manual::with_sections(command).mut_subcommands(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn what_every_command_has_stands_behind_its_own_options() {
        let mut program = command();
        program.build();
        for command in program.get_subcommands_mut().filter(|command| !command.is_hide_set()) {
            let name = command.get_name().to_owned();
            if ["compare", "report", "help"].contains(&name.as_str()) {
                continue; // the lab's follow
            }
            let help = command.render_long_help().to_string();
            let (own, rest) = help.split_once(OF_ALL).expect("all have options");
            let rest = rest.split("\n\n\n").next().expect("a section");
            for option in
                ["--state-dir <DIR>", "--io <WAY>", "--cache-dir <DIR>", "--cache-size <SIZE>"]
            {
                assert!(
                    !own.contains(&format!("      {option}")),
                    "{name}: {option} among its own"
                );
                assert!(rest.contains(option), "{name}: {option}");
            }
        }
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
