//! Image formats over vhost-user-blk: allocated, fresh, and just after a snapshot.

use anyhow::Result;
use clap::Parser;
use ringtap_bench::client::{self, Client};
use ringtap_bench::formats::{Formats, Scenario};
use ringtap_bench::options::Options;
use ringtap_bench::{goals, interrupt, lines, suite};
use std::process::ExitCode;

/// Ringtap's image formats beside its own raw image, first writes to a sparse file, and
/// qemu-storage-daemon, over vhost-user-blk. `--size` is that of the full image (try 4G: writes to
/// an overlay should seldom meet twice).
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: Options,

    /// What state the images are in.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "allocated,fresh,overlay,vhd,luks,wide,queues"
    )]
    scenario: Vec<Scenario>,
}

fn main() -> Result<ExitCode> {
    if let Some(code) = client::as_client() {
        return Ok(code);
    }
    let mut cli = Cli::parse();
    interrupt::install()?;
    // A no-op device has no format.
    cli.options.fs.retain(|fs| *fs != ringtap_bench::image::Fs::Null);
    let mut code = ExitCode::SUCCESS;
    for scenario in cli.scenario {
        let (wire, lines, goals): (_, _, fn(_, &_) -> _) = match scenario {
            Scenario::Allocated => ("allocated qcow2", lines::usual(), goals::allocated),
            Scenario::Fresh => ("empty qcow2", lines::first_writes(), goals::fresh),
            Scenario::Overlay => ("fresh overlay", lines::overlay(), goals::overlay),
            Scenario::Vhd => ("empty dynamic VHD", lines::first_writes(), goals::vhd),
            Scenario::Luks => ("LUKS1", lines::usual(), goals::luks),
            Scenario::Wide => ("qcow2 of 1 TiB", lines::random_reads(), goals::wide),
            Scenario::Queues => ("two queues on one qcow2", lines::random(), goals::queues),
        };
        let suite = suite::Suite {
            wire,
            options: &cli.options,
            client: &Client::Blkio,
            lines,
            with_cached: false,
        };
        let options = &cli.options;
        code = suite
            .run(|fs, images, run| Formats { fs, options, images, run }.arms(scenario), goals)?;
        interrupt::check()?;
    }
    Ok(code)
}
