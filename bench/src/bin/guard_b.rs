//! Builds of Ringtap beside each other, over vhost-user and NBD, raw and qcow2.

use anyhow::{Context, Result, bail};
use clap::Parser;
use ringtap_bench::client::{self, Client};
use ringtap_bench::experiment::Experiment;
use ringtap_bench::formats::{Formats, Scenario};
use ringtap_bench::guard::{self, Builds};
use ringtap_bench::image::{Fs, Images};
use ringtap_bench::options::{Options, Output};
use ringtap_bench::{interrupt, lines, nbd, vhost_user};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Is a newer build as fast as an older one? Several links of each, interleaved; exit code 1 where it is not.
/// scripts/guard-b.sh makes the links.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: Options,

    /// A link of the older side; several of each.
    #[arg(long, value_name = "PATH", required = true)]
    old: Vec<PathBuf>,

    /// A link of the newer side.
    #[arg(long, value_name = "PATH", required = true)]
    new: Vec<PathBuf>,

    /// What is measured.
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "vhost-user,nbd,allocated,fresh,overlay"
    )]
    suites: Vec<String>,
}

fn main() -> Result<ExitCode> {
    if let Some(code) = client::as_client() {
        return Ok(code);
    }
    let cli = Cli::parse();
    interrupt::install()?;
    let builds = Builds { old: cli.old.clone(), new: cli.new.clone() };
    let mut all = Vec::new();
    for suite in &cli.suites {
        for &fs in &cli.options.fs {
            // A no-op device has no format.
            if fs == Fs::Null && !["vhost-user", "nbd"].contains(&suite.as_str()) {
                continue;
            }
            all.extend(measure(&cli, &builds, suite, fs)?);
            interrupt::check()?;
        }
    }
    let verdict = guard::verdict(all);
    match cli.options.output {
        Output::Table => println!("{verdict}"),
        Output::Json => println!("{}", serde_json::to_string(&verdict)?),
    }
    Ok(if verdict.holds { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn measure(cli: &Cli, builds: &Builds, suite: &str, fs: Fs) -> Result<Vec<guard::Line>> {
    let run = tempfile::Builder::new()
        .prefix("ringtap-guard-")
        .tempdir()
        .context("cannot make a folder for sockets and logs")?;
    let images = Images::write(fs, &cli.options.disk(), cli.options.size, suite == "nbd")?;
    let mut arms = Vec::new();
    for (name, program) in builds.named() {
        let options = Options { ringtap: Some(program.to_owned()), ..cli.options.clone() };
        let made = made(suite, fs, &options, &images, run.path())?;
        let ours = if suite == "nbd" { nbd::DIRECT } else { vhost_user::RINGTAP };
        arms.extend(guard::renamed(made, ours, &name));
    }
    let lines = match suite {
        "fresh" => lines::first_writes(),
        "overlay" => lines::overlay(),
        _ => lines::usual(),
    };
    let wanted = |line: &lines::Line| Options::wanted(&cli.options.only, &line.name);
    let lines: Vec<_> = lines.into_iter().filter(wanted).collect();
    let client = if suite == "nbd" { Client::FioNbd } else { Client::Blkio };
    let experiment = Experiment {
        arms: &arms,
        lines: &lines,
        client: &client,
        rounds: cli.options.rounds,
        seconds: cli.options.seconds,
        pin: cli.options.pin,
        run: run.path(),
    };
    let results = experiment.run();
    for failure in &results.failures {
        eprintln!("{suite} {}: {}, {}: {}", fs.name(), failure.line, failure.arm, failure.reason);
    }
    Ok(guard::lines(&format!("{suite} {}", fs.name()), &results, builds))
}

fn made(
    suite: &str,
    fs: Fs,
    options: &Options,
    images: &Images,
    run: &Path,
) -> Result<Vec<ringtap_bench::arms::Arm>> {
    let of = |scenario| Formats { fs, options, images, run }.arms(scenario);
    match suite {
        "vhost-user" => vhost_user::arms(fs, options, images, None, run),
        "nbd" => nbd::arms(fs, options, images, run),
        "allocated" => of(Scenario::Allocated),
        "fresh" => of(Scenario::Fresh),
        "overlay" => of(Scenario::Overlay),
        other => bail!("no suite {other:?}: vhost-user, nbd, allocated, fresh, overlay"),
    }
}
