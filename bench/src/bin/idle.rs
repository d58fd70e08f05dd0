//! What an idle disk costs.

use anyhow::{Result, bail};
use clap::Parser;
use ringtap_bench::image::{Fs, Images};
use ringtap_bench::options::Output;
use ringtap_bench::{idle, interrupt, report};
use std::path::PathBuf;

/// Watches a server of one disk with an idle guest on vhost-user and an idle client on NBD.
#[derive(Parser)]
struct Cli {
    /// Seconds to watch each server.
    #[arg(long, value_name = "S", default_value_t = 60.0)]
    seconds: f64,

    /// The Ringtap to measure [default: beside this program, else in PATH].
    #[arg(long, value_name = "PATH")]
    ringtap: Option<PathBuf>,

    /// Servers to watch: ringtap, qsd.
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "ringtap,qsd")]
    servers: Vec<String>,

    /// How to print the result.
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    interrupt::install()?;
    let run = tempfile::Builder::new().prefix("ringtap-bench-").tempdir()?;
    let images = Images::write(Fs::Tmpfs, run.path(), 64 << 20, false)?;
    if cli.output == Output::Table {
        println!("## One idle disk, a guest on vhost-user and a client on NBD, {} s", cli.seconds);
        println!("{}", report::machine());
        println!(
            "To reach: under {} ms CPU per minute, RSS under {} MiB",
            idle::CPU_MS_PER_MINUTE,
            idle::MEMORY >> 20
        );
    }
    let mut seen = Vec::new();
    for name in &cli.servers {
        let (vhost_user, nbd) =
            (run.path().join(format!("{name}.vhost")), run.path().join(format!("{name}.nbd")));
        let launch = match name.as_str() {
            "ringtap" => idle::ringtap(cli.ringtap.as_deref(), images.direct(), &vhost_user, &nbd),
            "qsd" => idle::qsd(images.direct(), &vhost_user, &nbd),
            other => bail!("--servers {other}: ringtap or qsd"),
        };
        match idle::watch(name, &launch, &vhost_user, &nbd, cli.seconds, run.path()) {
            Ok(idle) => {
                if cli.output == Output::Table {
                    println!("{idle}");
                }
                seen.push(idle);
            }
            Err(error) => {
                interrupt::check()?;
                eprintln!("{name}: not measured: {error:#}");
            }
        }
    }
    if cli.output == Output::Json {
        println!("{}", serde_json::to_string(&seen)?);
    }
    if seen.is_empty() {
        bail!("no server could be watched");
    }
    Ok(())
}
