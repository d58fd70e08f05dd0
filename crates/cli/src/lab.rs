//! `ringtap compare` without two images, and `ringtap report`: verbs of `ringtap-lab`, a program of its own. Who serves disks
//! needs none of it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Args;

use crate::outcome::Usage;

pub(crate) const PROGRAM: &str = "ringtap-lab";
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

/// Become `ringtap-lab compare`.
pub(crate) fn compare(words: &[OsString]) -> anyhow::Result<ExitCode> {
    start("compare", words)
}

/// Where the lab is not, what is said of that.
pub(crate) fn missing() -> Option<&'static str> {
    program().is_none().then_some(NOT_HERE)
}

/// Become the lab. Where it does not start both verbs end with 2: `compare` says by 1 that images differ.
fn start(verb: &str, words: &[OsString]) -> anyhow::Result<ExitCode> {
    let own = std::env::current_exe().ok();
    let Some(program) = program() else {
        return Err(Usage(format!("ringtap {verb}: {NOT_HERE}")).into());
    };
    let mut command = Command::new(&program);
    command.arg(verb).args(words);
    if let Some(own) = own.filter(|_| std::env::var_os("RINGTAP").is_none()) {
        command.env("RINGTAP", own);
    }
    let error = command.exec();
    Err(Usage(format!("ringtap {verb}: cannot start {}: {error}", program.display())).into())
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
