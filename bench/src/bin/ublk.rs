//! Ringtap by ublk and its peers, as block devices of one host.

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use ringtap_bench::arms::ringtap_program;
use ringtap_bench::devices::{Host, Peers, Plan};
use ringtap_bench::experiment::progress;
use ringtap_bench::lines::{Line, usual};
use ringtap_bench::options::{Options, Output};
use ringtap_bench::report::{Report, machine};
use ringtap_bench::{goals, interrupt};
use ringtap_lab::process::find;
use std::path::PathBuf;
use std::process::ExitCode;

/// Ringtap by ublk, a loop device, rublk and the kernel's NBD client side by side, inside a guest.
///
/// Where the guest's processor is translated (TCG) ratios are those of instructions, more or less:
/// system calls, switches and copies cost something else on a real one.
#[derive(Parser)]
struct Cli {
    /// Rounds; below 6 no interval is given.
    #[arg(long, value_name = "N", default_value_t = 6)]
    rounds: usize,

    /// Seconds per measurement.
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,

    /// Versions of the guest's kernel, at least: without zero copy, and with it.
    #[arg(long, value_name = "VERSION", value_delimiter = ',', default_value = "6.5,6.16")]
    kernel: Vec<Version>,

    /// Only workloads whose name contains one of these (randread-4k-d32, write-1M-d8).
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    only: Vec<String>,

    /// MiB of the file.
    #[arg(long, default_value_t = 128)]
    size: u64,

    /// Folder for the guest's disk.
    #[arg(long, value_name = "PATH", default_value = "/dev/shm")]
    dir: PathBuf,

    /// The Ringtap to measure [default: beside this program, else in PATH].
    #[arg(long, value_name = "PATH")]
    ringtap: Option<PathBuf>,

    /// Another build of Ringtap, to set beside it.
    #[arg(long, value_name = "PATH")]
    other: Option<PathBuf>,

    /// rublk's binary [default: in PATH].
    #[arg(long, value_name = "PATH")]
    rublk: Option<PathBuf>,

    /// How to print the result.
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

#[derive(Clone)]
struct Version(Vec<u64>);

impl std::str::FromStr for Version {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Version, Self::Err> {
        text.split('.').map(str::parse).collect::<Result<_, _>>().map(Version)
    }
}

fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    interrupt::install()?;
    let mut lines = usual();
    lines.retain(|line| Options::wanted(&cli.only, &line.name));
    ensure!(cli.rounds > 0 && !lines.is_empty(), "nothing to measure: --rounds or --only");
    let mut reports = Vec::new();
    for Version(kernel) in &cli.kernel {
        match measure(&cli, &lines, kernel) {
            Ok(report) => {
                if cli.output == Output::Table {
                    println!("{report}");
                }
                reports.push(report);
            }
            Err(error) => {
                interrupt::check()?;
                eprintln!("Linux {kernel:?} or later: not measured: {error:#}");
            }
        }
    }
    if cli.output == Output::Json {
        println!("{}", serde_json::to_string(&reports)?);
    }
    if reports.is_empty() {
        bail!("nothing could be measured");
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(cli: &Cli, lines: &[Line], kernel: &[u64]) -> Result<Report> {
    let dir = tempfile::Builder::new()
        .prefix("ringtap-bench-")
        .tempdir_in(&cli.dir)
        .context("cannot make a folder for the guest's disk")?;
    let ringtap = ringtap_program(cli.ringtap.as_deref());
    let rublk = cli.rublk.clone().or_else(|| find("rublk"));
    let plan = Plan {
        kernel,
        size: cli.size << 20,
        dir: dir.path(),
        lines,
        rounds: cli.rounds,
        seconds: cli.seconds,
    };
    let peers = Peers { ringtap: &ringtap, other: cli.other.as_deref(), rublk: rublk.as_deref() };
    let host = Host::boot(&plan, &peers)?;
    let arms = host.arms();
    let mut conditions = vec![machine()];
    conditions.extend(host.conditions()?);
    conditions.push(format!(
        "One file of {} MiB on ext4, fio with io_uring and O_DIRECT; {} rounds of {} s, interleaved; \
         medians; ratios with a bootstrap interval over rounds",
        cli.size, cli.rounds, cli.seconds
    ));
    let bar = progress((cli.rounds * lines.len() * arms.len()) as u64);
    let results = host.measure(&plan, |round, line, arm| {
        bar.set_message(format!("round {} of {}, {line}, {arm}", round + 1, cli.rounds));
        bar.inc(1);
    });
    bar.finish_and_clear();
    if results.interrupted {
        conditions.push("INTERRUPTED: only what was measured until then".into());
    }
    let title = "block devices of one host".into();
    Ok(Report::new(title, conditions, &arms, lines, results, goals::devices))
}
