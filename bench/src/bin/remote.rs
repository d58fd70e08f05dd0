//! Ringtap and QEMU on disks that are elsewhere.

use anyhow::Result;
use clap::Parser;
use ringtap_bench::arms::Arm;
use ringtap_bench::client::{self, Client, Rbd};
use ringtap_bench::experiment::Experiment;
use ringtap_bench::goals::Goal;
use ringtap_bench::lines::{self, Line};
use ringtap_bench::options::{Options, Output};
use ringtap_bench::report::{Report, machine};
use ringtap_bench::{interrupt, remote};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Ringtap and qemu-storage-daemon, side by side over vhost-user-blk, on NBD servers (qemu-nbd, nbdkit, Ringtap) and on
/// images of Ceph, beside fio's rbd engine.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: Options,

    /// Configuration of a cluster with a pool `rbd`; without it NBD servers only. Images bench-1 to bench-3 are made there,
    /// and removed.
    #[arg(long, value_name = "FILE")]
    ceph_conf: Option<PathBuf>,
}

fn main() -> Result<ExitCode> {
    if let Some(code) = client::as_client() {
        return Ok(code);
    }
    let cli = Cli::parse();
    let options = &cli.options;
    interrupt::install()?;
    let run = tempfile::Builder::new().prefix("ringtap-bench-").tempdir()?;
    let run = run.path();
    let mut reports = Vec::new();
    let names = remote::SERVERS.iter().filter(|name| Options::wanted(&options.servers, name));
    for name in names {
        let images = remote::image(options)?;
        let (_server, socket) = remote::start(name, options, &images, run)?;
        let arms = remote::nbd(options, &socket, run);
        let title = format!("a disk on {name}");
        reports.push(measure(&cli, title, &arms, &Client::Blkio, remote::nbd_goals, run)?);
    }
    if let Some(conf) = &cli.ceph_conf {
        let [ours, theirs, fio] = ["bench-1", "bench-2", "bench-3"];
        let names = [ours, theirs, fio];
        remote::make_images(conf, &names, options.size)?;
        let arms = remote::rbd(options, conf, [ours, theirs], run);
        let conf_of_fio = remote::uncached(conf, run)?;
        let client = Client::Rbd(Rbd { conf: conf_of_fio, image: fio.into() });
        let measured = measure(&cli, "Ceph".into(), &arms, &client, remote::rbd_goals, run);
        remote::remove_images(conf, &names)?;
        reports.push(measured?);
    }
    if options.output == Output::Json {
        println!("{}", serde_json::to_string(&reports)?);
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(
    cli: &Cli,
    title: String,
    arms: &[Arm],
    client: &Client,
    goals: impl Fn(&Line) -> Vec<Goal>,
    run: &Path,
) -> Result<Report> {
    let options = &cli.options;
    let mut lines = lines::usual();
    lines.retain(|line| Options::wanted(&options.only, &line.name));
    let conditions = vec![
        machine(),
        format!("Client: {}", client.name()),
        format!("{} rounds of {} s, interleaved; medians", options.rounds, options.seconds),
    ];
    let (rounds, seconds, pin) = (options.rounds, options.seconds, options.pin);
    let results = Experiment { arms, lines: &lines, client, rounds, seconds, pin, run }.run();
    let report = Report::new(title, conditions, arms, &lines, results, goals);
    if options.output == Output::Table {
        println!("{report}");
    }
    Ok(report)
}
