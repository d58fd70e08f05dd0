//! How long a server of many disks takes to begin, and one disk more beside those that nobody uses.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Parser;
use ringtap_bench::arms::ringtap_program;
use ringtap_bench::options::Output;
use ringtap_bench::process::{Launch, Process};
use ringtap_bench::stats::median;
use ringtap_bench::{interrupt, report};
use serde::Serialize;

/// Bytes of each disk, with nothing in it.
const SIZE: u64 = 1 << 20;
/// How long a server may take to begin, and `ringtap disk` to end.
const LIMIT: Duration = Duration::from_secs(120);

/// Starts `ringtap daemon` with many idle disks and with none, and adds a disk to each by `ringtap disk add`, in turns.
#[derive(Parser)]
struct Cli {
    /// Idle disks of the one server.
    #[arg(long, value_name = "N", default_value_t = 991)]
    disks: usize,

    /// How often a disk is added and removed.
    #[arg(long, value_name = "N", default_value_t = 20)]
    rounds: usize,

    /// The Ringtap to measure [default: beside this program, else in PATH].
    #[arg(long, value_name = "PATH")]
    ringtap: Option<PathBuf>,

    /// Where the images are [default: where temporary files are].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// How to print the result.
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

/// What was seen of one server.
#[derive(Default, Serialize)]
struct Seen {
    idle_disks: usize,
    /// From its start to the word that it is ready.
    start_ms: f64,
    /// Each `ringtap disk add` and `remove`, from its start to its end.
    add_ms: Vec<f64>,
    remove_ms: Vec<f64>,
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// One server, with a folder of its own.
struct Server {
    program: PathBuf,
    folder: PathBuf,
    _process: Process,
    seen: Seen,
}

impl Server {
    fn start(program: &Path, folder: PathBuf, disks: usize) -> Result<Server> {
        let described = folder.join("disks");
        fs::create_dir_all(&described)?;
        for number in 0..disks {
            let image = folder.join(format!("{number}.raw"));
            File::create(&image)?.set_len(SIZE)?;
            let socket = folder.join(format!("{number}.sock"));
            let text = format!(
                "image = '{}'\nformat = 'raw'\nvhost-user = '{}'\n",
                image.display(),
                socket.display()
            );
            fs::write(described.join(format!("d{number}.toml")), text)?;
        }
        File::create(folder.join("new.raw"))?.set_len(SIZE)?;
        let control = control(&folder);
        let words = ["daemon", "--control", &control, "--disks", &described.display().to_string()];
        let launch = Launch::new(program, words);
        let began = Instant::now();
        let (process, output) = Process::start_piped(&launch, &folder.join("log"))?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        if !line.contains("ready") {
            bail!("ringtap does not begin: {}", process.last_words());
        }
        let start_ms = ms(began.elapsed());
        let seen = Seen { idle_disks: disks, start_ms, ..Seen::default() };
        Ok(Server { program: program.to_owned(), folder, _process: process, seen })
    }

    fn disk(&self, words: &[&str]) -> Result<f64> {
        let control = control(&self.folder);
        let words =
            ["disk"].into_iter().chain(words.iter().copied()).chain(["--control", &control]);
        let began = Instant::now();
        Launch::new(&self.program, words).output(LIMIT)?;
        Ok(ms(began.elapsed()))
    }

    /// Add a disk, and take it away again.
    fn round(&mut self) -> Result<()> {
        let at = |name: &str| self.folder.join(name).display().to_string();
        let (image, socket) = (at("new.raw"), at("new.sock"));
        let add = ["add", &image, "-f", "raw", "--node-name", "new", "--vhost-user", &socket];
        let (added, removed) = (self.disk(&add)?, self.disk(&["remove", "new"])?);
        self.seen.add_ms.push(added);
        self.seen.remove_ms.push(removed);
        Ok(())
    }
}

fn control(folder: &Path) -> String {
    format!("unix:{}", folder.join("control").display())
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    interrupt::install()?;
    let mut made = tempfile::Builder::new();
    made.prefix("ringtap-bench-");
    let run = match &cli.dir {
        Some(dir) => made.tempdir_in(dir)?,
        None => made.tempdir()?,
    };
    let program = ringtap_program(cli.ringtap.as_deref());
    let mut servers = [
        Server::start(&program, run.path().join("none"), 0)?,
        Server::start(&program, run.path().join("many"), cli.disks)?,
    ];
    for round in 0..cli.rounds {
        // Who comes first is second the next time.
        for turn in 0..servers.len() {
            interrupt::check()?;
            let which = (round + turn) % servers.len();
            servers[which].round()?;
        }
    }
    let seen: Vec<&Seen> = servers.iter().map(|server| &server.seen).collect();
    match cli.output {
        Output::Json => println!("{}", serde_json::to_string(&seen)?),
        Output::Table => {
            println!("## One disk more, beside idle ones; medians of {} rounds", cli.rounds);
            println!("{}", report::machine());
            println!(
                "{:>10} {:>12} {:>16} {:>19}",
                "idle disks", "start, ms", "disk add, ms", "disk remove, ms"
            );
            for Seen { idle_disks, start_ms, add_ms, remove_ms } in seen {
                let (added, removed) = (median(add_ms), median(remove_ms));
                println!("{idle_disks:>10} {start_ms:>12.1} {added:>16.2} {removed:>19.2}");
            }
        }
    }
    Ok(())
}
