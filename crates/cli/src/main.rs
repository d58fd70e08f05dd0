//! `ringtap`: disks served to virtual machines.

#[macro_use]
mod say;

mod args;
mod bound;
mod checkpoint;
mod container;
mod copies;
mod daemon;
mod detach;
mod disk;
mod disk_info;
mod folder;
mod job;
mod lab;
mod limits;
mod list;
mod log;
mod manual;
mod migrate;
mod names;
mod nbd;
mod objects;
mod online_check;
mod outcome;
mod output;
mod qmp;
mod rbd;
mod running;
mod sandbox;
mod secret;
mod serve;
mod sockets;
mod spelling;
mod top;
mod upgrade;
mod usage;
mod verbs;
mod xen;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::{CommandFactory, FromArgMatches};
use ringtap_io::Panic;

use crate::args::{Cli, Command};
use crate::outcome::Usage;
use crate::verbs::compare;
use crate::verbs::source::backing_is_another;

/// What Rust's own programs end with after a panic.
const PANICKED: u8 = 101;

fn main() -> ExitCode {
    // A write past the limit of a file's size is an error like others, and not the end of the process.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    ringtap_daemon::report_panics();
    let code = ringtap();
    ringtap_stores::forget_left();
    match say::failure() {
        _ if Panic::any() => ExitCode::from(PANICKED),
        Some(error) if code == ExitCode::SUCCESS => usage::unwritten(error),
        _ => code,
    }
}

fn ringtap() -> ExitCode {
    let words: Vec<_> = std::env::args_os().collect();
    let program = args::command_for(&words);
    let words = match spelling::translate(words, &program) {
        Ok(words) => words,
        Err(why) => return usage::told(&why),
    };
    let matches = match program.try_get_matches_from(&words) {
        Ok(matches) => matches,
        Err(error) => {
            return match compare::takes(&words, &error) {
                Some(done) => done.unwrap_or_else(|error| failed(&error)),
                None => usage::refused(&error),
            };
        }
    };
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => return usage::refused(&error.format(&mut Cli::command())),
    };
    let options = matches.subcommand().map(|(_, options)| options);
    if let Err(error) = settle_state_dir(cli.state_dir.as_deref()) {
        return failed(&error);
    }
    let boot = match &cli.command {
        Command::Serve(args) => Some(args.boot()),
        _ => None,
    };
    if let Err(error) = objects::start(&cli.objects, boot) {
        return failed(&error);
    }
    rbd::start();
    if let Some(engine) = cli.io {
        // Nothing has asked for one yet.
        ringtap_io::use_engine(engine.into());
    }
    match run(cli.command, options.unwrap_or(&matches)) {
        Ok(code) => code,
        Err(error) => failed(&error),
    }
}

/// Say why.
fn failed(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref::<Usage>() {
        Some(why) => usage::told(&why.0),
        None => outcome::failed(error),
    }
}

/// Where restart logs lie, if the operator says.
fn settle_state_dir(named: Option<&Path>) -> anyhow::Result<()> {
    let told = std::env::var_os("RINGTAP_STATE_DIR").filter(|dir| !dir.is_empty());
    match named.map(Path::to_owned).or(told.map(PathBuf::from)) {
        Some(dir) => ringtap_image::set_folder(&dir)
            .with_context(|| format!("cannot keep restart logs in --state-dir {}", dir.display())),
        None => Ok(()),
    }
}

fn run(command: Command, matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    // Servers log, each as its own options say.
    if !matches!(command, Command::Serve(_) | Command::Daemon(_) | Command::Xen(_)) {
        log::show_warnings();
    }
    match command {
        Command::Serve(args) => serve::run(args, matches, folder::reader()),
        Command::Daemon(args) => daemon::run(args, matches),
        Command::Disk(args) => disk::run(args),
        Command::Job(args) => job::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Upgrade(args) => upgrade::run(&args),
        Command::Reload(args) => upgrade::reload(&args),
        Command::Stop(args) => upgrade::stop(&args),
        Command::Xen(args) => xen::run(args),
        Command::Create(args) => verbs::create::run(&args).map_err(backing_is_another),
        Command::Info(args) => verbs::info::run(&args),
        Command::Map(args) => verbs::map::run(&args),
        Command::Measure(args) => verbs::measure::run(&args),
        Command::Convert(args) => verbs::convert::run(&args).map_err(backing_is_another),
        Command::Dd(args) => verbs::dd::run(&args),
        #[cfg(feature = "object")]
        Command::Publish(args) => verbs::publish::run(&args),
        Command::Check(args) => Ok(verbs::check::run(&args)),
        Command::Resize(args) => verbs::resize::run(&args),
        Command::Amend(args) => verbs::amend::run(&args),
        Command::Snapshot(args) => verbs::snapshot::run(&args),
        Command::Bitmap(args) => verbs::bitmap::run(&args, matches),
        Command::Commit(args) => verbs::commit::run(&args),
        Command::Rebase(args) => verbs::rebase::run(&args).map_err(backing_is_another),
        Command::Detach(args) => verbs::detach::run(&args),
        Command::Bench(args) => verbs::bench::run(&args),
        Command::Compare(args) => verbs::compare::run(&args),
        Command::List(args) => list::run(&args),
        Command::Report(args) => lab::report(&args),
        Command::Completions { shell } => {
            let mut text = vec![];
            clap_complete::generate(shell, &mut args::command(), "ringtap", &mut text);
            std::io::stdout().write_all(&text)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { dir } => manual::run(args::command(), dir.as_deref()),
    }
}
