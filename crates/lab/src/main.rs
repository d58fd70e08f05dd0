//! `ringtap-lab`: ways of serving a disk set side by side. `ringtap compare` and `ringtap report` start it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use ringtap_lab::{CompareArgs, ReportArgs, ToolArgs, USAGE, process};
use ringtap_load::LoadArgs;

/// Ways of serving a disk to virtual machines, set side by side on this machine
#[derive(Debug, Parser)]
#[command(name = "ringtap-lab", version = env!("RINGTAP_VERSION"), propagate_version = true, max_term_width = 100)]
struct Lab {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Compare {
        /// A plan that the lab knows: quick, published, nbd, vhost-user, remote
        #[arg(value_name = "PLAN")]
        known: Option<String>,
        #[command(flatten)]
        args: Box<CompareArgs>,
    },
    Report(ReportArgs),
    /// Put load on a vhost-user socket
    #[command(hide = true)]
    Load(LoadArgs),
    /// Copy files or make a tree of them; inside guests too
    #[command(hide = true)]
    Tool(ToolArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write the manual pages, one for each command
    Man {
        /// The folder to write them to.
        dir: PathBuf,
    },
}

fn main() -> anyhow::Result<ExitCode> {
    let lab = match Lab::try_parse() {
        Ok(lab) => lab,
        Err(error) => return Ok(refused(&error)),
    };
    match lab.verb {
        Verb::Compare { known, args } => {
            let own = std::env::current_exe().context("cannot find this program's own file")?;
            ringtap_lab::compare(&CompareArgs { known, ..*args }, measured(&own), own)
        }
        Verb::Report(args) => ringtap_lab::report(&args),
        Verb::Load(args) => load(args),
        Verb::Tool(args) => ringtap_lab::tool::run(&args).map(|()| ExitCode::SUCCESS),
        Verb::Completions { shell } => {
            let mut text = vec![];
            clap_complete::generate(shell, &mut Lab::command(), "ringtap-lab", &mut text);
            std::io::stdout().write_all(&text).context("cannot print")?;
            Ok(ExitCode::SUCCESS)
        }
        Verb::Man { dir } => pages(&dir),
    }
}

/// The command line was not understood, told on one line as `ringtap` does; or it only asks for help.
fn refused(error: &clap::Error) -> ExitCode {
    let whole = error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if whole || !error.use_stderr() {
        // A reader that has gone needs no help.
        let _ = error.print();
        return ExitCode::from(if whole { USAGE } else { 0 });
    }
    let text = error.render().to_string();
    let lines = text.trim_start_matches("error:").lines().map(str::trim);
    let told =
        lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let told: Vec<_> = told.filter(|line| !line.is_empty()).collect();
    eprintln!("ringtap-lab: {} (see ringtap-lab help)", told.join(" "));
    ExitCode::from(USAGE)
}

/// The `ringtap` that is measured: `RINGTAP`, else the one beside this program, else the one of PATH.
fn measured(own: &Path) -> PathBuf {
    let beside = own.with_file_name("ringtap");
    let named = std::env::var_os("RINGTAP").map(PathBuf::from);
    let beside = || beside.is_file().then_some(beside);
    named.or_else(beside).or_else(|| process::find("ringtap")).unwrap_or_else(|| "ringtap".into())
}

fn load(args: LoadArgs) -> anyhow::Result<ExitCode> {
    let output = args.output;
    let measured = ringtap_load::run(args)?;
    writeln!(std::io::stdout(), "{}", measured.render(output)).context("cannot print")?;
    anyhow::ensure!(!measured.failed(), "requests failed, or did not read back as written");
    Ok(ExitCode::SUCCESS)
}

fn pages(dir: &Path) -> anyhow::Result<ExitCode> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let command = Lab::command().disable_help_subcommand(true);
    clap_mangen::generate_to(command, dir)
        .with_context(|| format!("cannot write pages to {}", dir.display()))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Lab::command().debug_assert();
    }
}
