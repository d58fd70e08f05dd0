//! Ringtap and its peers over NBD.

use anyhow::Result;
use clap::Parser;
use ringtap_bench::client::{self, Client};
use ringtap_bench::options::Options;
use ringtap_bench::{goals, interrupt, lines, nbd, suite};
use std::process::ExitCode;

/// Ringtap, QEMU, nbdkit, nbd-server and io_uring alone, side by side over NBD.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: Options,
}

fn main() -> Result<ExitCode> {
    if let Some(code) = client::as_client() {
        return Ok(code);
    }
    let cli = Cli::parse();
    interrupt::install()?;
    let suite = suite::Suite {
        wire: "NBD",
        options: &cli.options,
        client: &Client::FioNbd,
        lines: lines::usual(),
        with_cached: true,
    };
    suite.run(|fs, images, run| nbd::arms(fs, &cli.options, images, run), goals::nbd)
}
