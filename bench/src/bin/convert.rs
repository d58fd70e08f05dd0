//! Copying images from format to format.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use ringtap_bench::arms::ringtap_program;
use ringtap_bench::copies::{Case, Sources, Way, measure};
use ringtap_bench::image::Fs;
use ringtap_bench::options::{Options, Output};
use ringtap_bench::{interrupt, report};
use ringtap_load::parse_size;
use serde_json::json;
use std::path::{Path, PathBuf};

/// `ringtap convert` beside `qemu-img convert`, nbdcopy and an older Ringtap where one is given, which all leave it to the page cache to
/// write, but for the cases named `direct`.
#[derive(Parser)]
struct Cli {
    /// Rounds; below 6 no interval is given.
    #[arg(long, value_name = "N", default_value_t = 6)]
    rounds: usize,

    /// The Ringtap to measure [default: beside this program, else in PATH].
    #[arg(long, value_name = "PATH")]
    ringtap: Option<PathBuf>,

    /// An older Ringtap, to be measured beside it [default: $RINGTAP_BEFORE, if that is set].
    #[arg(long, value_name = "PATH")]
    before: Option<PathBuf>,

    /// Where the images lie.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "tmpfs,ext4")]
    fs: Vec<Fs>,

    /// Only cases whose name contains one of these (raw-raw, qcow2-raw, zstd, direct).
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    only: Vec<String>,

    /// Bytes of the disk.
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = parse_size)]
    size: u64,

    /// Folder on a disk, for --fs ext4.
    #[arg(long, value_name = "PATH", default_value = ".")]
    dir: PathBuf,

    /// How to print the result.
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

fn main() -> Result<()> {
    let mut cli = Cli::parse();
    interrupt::install()?;
    // A no-op device holds nothing to be copied.
    cli.fs.retain(|fs| *fs != Fs::Null);
    let wanted = |fs: &Fs| -> Vec<Case> {
        let all = Case::all(*fs).into_iter();
        all.filter(|case| Options::wanted(&cli.only, &case.name)).collect()
    };
    ensure!(
        cli.rounds > 0 && cli.fs.iter().any(|fs| !wanted(fs).is_empty()),
        "nothing to measure: --rounds at least 1, --fs of tmpfs, ext4, --only of the cases' names"
    );
    let mut ways = Way::all(ringtap_program(cli.ringtap.as_deref()));
    let before = cli.before.or_else(|| std::env::var_os("RINGTAP_BEFORE").map(PathBuf::from));
    if let Some(before) = before {
        ensure!(before.is_file(), "no older Ringtap: {} is no file", before.display());
        ways.push(Way::Build("before".into(), before));
    }
    let mut reports = Vec::new();
    for fs in &cli.fs {
        let parent = if *fs == Fs::Tmpfs { Path::new("/dev/shm") } else { &cli.dir };
        let dir = tempfile::Builder::new().prefix("ringtap-bench-").tempdir_in(parent);
        let dir = dir.with_context(|| format!("cannot make a folder in {}", parent.display()))?;
        let conditions = report::machine();
        let sources = Sources::write(dir.path(), cli.size)?;
        let place = sources.place()?;
        if cli.output == Output::Table {
            println!("## convert on {}\n{conditions}\nDisk: {place}", fs.name());
            println!(
                "{} rounds, interleaved; medians; ratios with a bootstrap interval",
                cli.rounds
            );
        }
        let mut sections = Vec::new();
        for case in wanted(fs) {
            let section = measure(case, &ways, &sources, cli.rounds)?;
            if cli.output == Output::Table {
                println!("\n{section}");
            }
            sections.push(section);
        }
        reports.push(json!({
            "fs": fs, "machine": conditions, "disk": place, "rounds": cli.rounds, "cases": sections,
        }));
    }
    if cli.output == Output::Json {
        println!("{}", serde_json::to_string(&reports)?);
    }
    Ok(())
}
