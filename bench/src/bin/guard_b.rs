//! Builds of Ringtap beside each other, line by line.

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use ringtap_bench::guard::{self, Builds, Guard, Missing, Suite};
use ringtap_bench::options::{Options, Output};
use ringtap_bench::{client, interrupt};
use std::path::PathBuf;
use std::process::ExitCode;

/// Is a newer build as good as an older one? Several links of each, interleaved; exit code 1 where it is not.
/// scripts/guard-b.sh makes the links.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: Options,

    /// A link of the older side; several of each.
    #[arg(long, value_name = "PATH", required_unless_present = "names")]
    old: Vec<PathBuf>,

    /// A link of the newer side.
    #[arg(long, value_name = "PATH", required_unless_present = "names")]
    new: Vec<PathBuf>,

    /// Only lines whose name contains one of these: vhost-user, nbd, allocated, fresh, overlay, convert, ublk,
    /// memory, idle, or more of a name.
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    lines: Vec<String>,

    /// Print the names of the lines, and measure nothing.
    #[arg(long)]
    names: bool,
}

fn main() -> Result<ExitCode> {
    if let Some(code) = client::as_client() {
        return Ok(code);
    }
    let cli = Cli::parse();
    interrupt::install()?;
    let builds = Builds { old: cli.old.clone(), new: cli.new.clone() };
    let guard = Guard { builds: &builds, options: &cli.options, wanted: &cli.lines };
    let places = |suite: &Suite| {
        let suite = *suite;
        suite.places(&cli.options.fs).into_iter().map(move |place| (suite, place))
    };
    let mut all: Vec<_> = Suite::value_variants().iter().flat_map(places).collect();
    all.retain(|(suite, place)| !guard.lines(*suite, *place).is_empty());
    ensure!(!all.is_empty() && cli.options.rounds > 0, "no such line: --names prints them");
    if cli.names {
        for (suite, place) in all {
            guard.lines(suite, place).iter().for_each(|name| println!("{name}"));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let (mut points, mut missing) = (Vec::new(), Vec::new());
    for (suite, place) in all {
        let names = guard.lines(suite, place);
        eprintln!("{}", names.join(", "));
        let found = interrupt::check().and_then(|()| guard.measure(suite, place));
        match found {
            Ok(found) => {
                for line in guard::lines(&found.0, &builds) {
                    eprintln!("{line}");
                }
                points.extend(found.0);
                missing.extend(found.1);
            }
            // The others are measured all the same, unless Ctrl-C was pressed: then what there is is told.
            Err(error) => missing.extend(names.into_iter().map(|line| Missing {
                line,
                arm: "new and old".into(),
                reason: ringtap_bench::experiment::reason(&error),
            })),
        }
    }
    let verdict = guard::verdict(guard::lines(&points, &builds), missing);
    match cli.options.output {
        Output::Table => println!("{verdict}"),
        Output::Json => println!("{}", serde_json::to_string(&verdict)?),
    }
    Ok(if verdict.holds { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
