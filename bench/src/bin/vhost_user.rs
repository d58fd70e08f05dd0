//! Ringtap and its peers over vhost-user-blk.

use anyhow::Result;
use clap::Parser;
use ringtap_bench::client::{self, Client};
use ringtap_bench::options::{Judge, Options};
use ringtap_bench::qemu10::Qemu10;
use ringtap_bench::{goals, interrupt, lines, suite, vhost_user};
use std::process::ExitCode;

/// Ringtap, qemu-storage-daemon, ubiblk and io_uring alone, side by side over vhost-user-blk.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: Options,

    /// Who puts the load on.
    #[arg(long, value_enum, default_value = "blkio")]
    judge: Judge,

    /// Fetch QEMU 10 from Debian 13 for its qemu-storage-daemon (used anyway once it is there).
    #[arg(long)]
    qemu10: bool,
}

fn main() -> Result<ExitCode> {
    if let Some(code) = client::as_client() {
        return Ok(code);
    }
    let cli = Cli::parse();
    interrupt::install()?;
    let qemu10 = match cli.qemu10 || cli.judge == Judge::Qemu10 {
        true => Some(Qemu10::fetch()?),
        false => Qemu10::cached(),
    };
    let (client, lines) = match (cli.judge, &qemu10) {
        (Judge::Qemu10, Some(qemu)) => (Client::QemuImg(qemu.clone()), lines::sequential()),
        _ => (Client::Blkio, lines::usual()),
    };
    let suite = suite::Suite {
        wire: "vhost-user-blk",
        options: &cli.options,
        client: &client,
        lines,
        with_cached: false,
    };
    suite.run(
        |fs, images, run| vhost_user::arms(fs, &cli.options, images, qemu10.as_ref(), run),
        goals::vhost_user,
    )
}
