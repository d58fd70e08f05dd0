//! How long a server of many disks takes to begin, and one disk more beside those that are there, idle or loaded.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;
use ringtap_bench::arms::ringtap_program;
use ringtap_bench::options::Output;
use ringtap_bench::{interrupt, report};
use ringtap_lab::process::launch::{Launch, Process};
use ringtap_lab::stats::medians::median;
use serde::Serialize;
use serde_json::{Value, json};

/// Bytes of each disk, with nothing in it.
const SIZE: u64 = 1 << 20;
/// How long a server may take to begin, and `ringtap disk` to end.
const LIMIT: Duration = Duration::from_secs(120);
/// Until loads have connected, and until the driver of a removed disk has gone.
const SETTLES: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(2);

/// Starts `ringtap daemon` with many idle disks, confined and not, and with none, and adds a disk to each in turns: by its
/// control socket, and by `ringtap disk add`.
#[derive(Parser)]
struct Cli {
    /// Disks of each of the servers that have any.
    #[arg(long, value_name = "N", default_value_t = 991)]
    disks: usize,

    /// Of which format those are; what is added is raw.
    #[arg(long, value_name = "raw|qcow2", default_value = "raw", value_parser = ["raw", "qcow2"])]
    format: String,

    /// How often each server is started.
    #[arg(long, value_name = "N", default_value_t = 5)]
    starts: usize,

    /// How often a disk is added and removed.
    #[arg(long, value_name = "N", default_value_t = 20)]
    rounds: usize,

    /// So many disks are loaded in the end.
    #[arg(long, value_name = "N", default_value_t = 8)]
    loaded: usize,

    /// The Ringtap to measure, with ringtap-lab beside it [default: beside this program, else in PATH].
    #[arg(long, value_name = "PATH")]
    ringtap: Option<PathBuf>,

    /// Where the images are [default: where temporary files are].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Where the sockets are [default: where the images are].
    #[arg(long, value_name = "DIR")]
    sockets: Option<PathBuf>,

    /// How to print the result.
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

/// What was seen of one server.
#[derive(Default, Serialize)]
struct Seen {
    disks: usize,
    sandbox: &'static str,
    /// Each, from its start to the word that it is ready.
    start_ms: Vec<f64>,
    /// Each `blockdev-add` with `block-export-add` on an open control socket, beside idle disks and beside loaded ones.
    control_ms: Vec<f64>,
    control_loaded_ms: Vec<f64>,
    /// Each `ringtap disk add` and `remove`, from its start to its end.
    add_ms: Vec<f64>,
    remove_ms: Vec<f64>,
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// A client of a control socket.
struct Control {
    socket: UnixStream,
    answers: BufReader<UnixStream>,
}

impl Control {
    fn connect(path: &Path) -> Result<Control> {
        let socket = UnixStream::connect(path)
            .with_context(|| format!("cannot connect to {}", path.display()))?;
        let answers = BufReader::new(socket.try_clone()?);
        let mut control = Control { socket, answers };
        control.ask("qmp_capabilities", json!({}))?;
        Ok(control)
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Result<()> {
        let text = json!({ "execute": command, "arguments": arguments });
        writeln!(self.socket, "{text}")?;
        loop {
            let mut line = String::new();
            self.answers.read_line(&mut line)?;
            let told: Value = serde_json::from_str(&line)
                .with_context(|| format!("{command}: the server has answered {line:?}"))?;
            if !told["return"].is_null() {
                return Ok(());
            }
            if !told["error"].is_null() {
                bail!("{command}: {}", told["error"]["desc"]);
            }
        }
    }

    /// Have a disk more, and take it away again; how long the first took.
    fn round(&mut self, image: &Path, socket: &Path) -> Result<f64> {
        let file = json!({ "driver": "file", "filename": image });
        let addr = json!({ "type": "unix", "path": socket });
        let began = Instant::now();
        self.ask("blockdev-add", json!({ "driver": "raw", "node-name": "new", "file": file }))?;
        let export = json!({ "type": "vhost-user-blk", "id": "new", "node-name": "new", "writable": true, "addr": addr });
        self.ask("block-export-add", export)?;
        let took = ms(began.elapsed());
        self.ask("block-export-del", json!({ "id": "new" }))?;
        // The export goes a moment later.
        let until = Instant::now() + SETTLES;
        while let Err(error) = self.ask("blockdev-del", json!({ "node-name": "new" })) {
            if Instant::now() > until {
                return Err(error);
            }
            interrupt::sleep(LOOK)?;
        }
        Ok(took)
    }
}

/// One server, with a folder of its own.
struct Server {
    program: PathBuf,
    folder: PathBuf,
    sockets: PathBuf,
    process: Option<Process>,
    seen: Seen,
}

impl Server {
    /// Its disks, described in a folder.
    fn describe(
        program: &Path,
        at: [PathBuf; 2],
        disks: usize,
        format: &str,
        sandbox: &'static str,
    ) -> Result<Server> {
        let [folder, sockets] = at;
        let described = folder.join("disks");
        for made in [&described, &sockets] {
            fs::create_dir_all(made)?;
        }
        for number in 0..disks {
            let image = folder.join(format!("{number}.{format}"));
            let shown = image.display().to_string();
            match format {
                "raw" => File::create(&image)?.set_len(SIZE)?,
                _ => {
                    let words = ["create", "-q", "-f", format, &shown, &SIZE.to_string()];
                    Launch::new(program, words).output(LIMIT, interrupt::stop())?;
                }
            }
            let text = format!(
                "image = '{shown}'\nformat = '{format}'\nvhost-user = '{}'\n",
                sockets.join(format!("{number}.sock")).display()
            );
            fs::write(described.join(format!("d{number}.toml")), text)?;
        }
        File::create(folder.join("new.raw"))?.set_len(SIZE)?;
        let seen = Seen { disks, sandbox, ..Seen::default() };
        Ok(Server { program: program.to_owned(), folder, sockets, process: None, seen })
    }

    /// Start it, where it runs anew.
    fn start(&mut self) -> Result<()> {
        drop(self.process.take());
        let (control, described) = (self.control(), self.folder.join("disks"));
        let words = ["daemon", "--sandbox", self.seen.sandbox, "--control", &control];
        let words = words.into_iter().map(Into::into);
        let mut words: Vec<std::ffi::OsString> =
            words.chain(["--disks".into(), described.into()]).collect();
        if self.seen.sandbox == "on" {
            let allowed = [&self.folder, &self.sockets];
            words.extend(
                allowed.iter().flat_map(|folder| ["--allow".into(), folder.as_os_str().into()]),
            );
        }
        let launch = Launch::new(&self.program, words);
        let began = Instant::now();
        let (process, output) = Process::start_piped(&launch, &self.folder.join("log"))?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        if !line.contains("ready") {
            bail!("ringtap does not begin: {}", process.last_words());
        }
        self.seen.start_ms.push(ms(began.elapsed()));
        self.process = Some(process);
        Ok(())
    }

    fn control(&self) -> String {
        format!("unix:{}", self.sockets.join("control").display())
    }

    fn by_control(&self) -> Result<f64> {
        let mut control = Control::connect(&self.sockets.join("control"))?;
        control.round(&self.folder.join("new.raw"), &self.sockets.join("new.sock"))
    }

    fn disk(&self, words: &[&str]) -> Result<f64> {
        let control = self.control();
        let words =
            ["disk"].into_iter().chain(words.iter().copied()).chain(["--control", &control]);
        let began = Instant::now();
        Launch::new(&self.program, words).output(LIMIT, interrupt::stop())?;
        Ok(ms(began.elapsed()))
    }

    /// Add a disk, and take it away again.
    fn round(&mut self) -> Result<()> {
        let by_control = self.by_control()?;
        self.seen.control_ms.push(by_control);
        let image = self.folder.join("new.raw").display().to_string();
        let socket = self.sockets.join("new.sock").display().to_string();
        let add = ["add", &image, "-f", "raw", "--node-name", "new", "--vhost-user", &socket];
        let (added, removed) = (self.disk(&add)?, self.disk(&["remove", "new"])?);
        self.seen.add_ms.push(added);
        self.seen.remove_ms.push(removed);
        Ok(())
    }

    /// Loads on so many of its disks, until they drop.
    fn load(&self, loaded: usize) -> Result<Vec<Process>> {
        let lab = self.program.with_file_name("ringtap-lab");
        let load = |number: usize| {
            let socket = self.sockets.join(format!("{number}.sock")).display().to_string();
            let seconds = LIMIT.as_secs().to_string();
            let words = [
                "load",
                "--socket",
                &socket,
                "--rw",
                "randrw",
                "--depth",
                "4",
                "--seconds",
                &seconds,
            ];
            let launch = Launch::new(&lab, words);
            Ok(Process::start(&launch, &self.folder.join(format!("load{number}")))?)
        };
        (0..loaded.min(self.seen.disks)).map(load).collect()
    }
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    interrupt::install()?;
    let made = |within: Option<&Path>| {
        let mut made = tempfile::Builder::new();
        made.prefix("ringtap-bench-");
        within.map_or_else(|| made.tempdir(), |dir| made.tempdir_in(dir))
    };
    let images = made(cli.dir.as_deref())?;
    let sockets = made(cli.sockets.as_deref().or(cli.dir.as_deref()))?;
    let program = ringtap_program(cli.ringtap.as_deref());
    let of = |name: &str| [images.path().join(name), sockets.path().join(name)];
    let mut servers = [
        Server::describe(&program, of("none"), 0, "raw", "on")?,
        Server::describe(&program, of("confined"), cli.disks, &cli.format, "on")?,
        Server::describe(&program, of("free"), cli.disks, &cli.format, "off")?,
    ];
    for _ in 0..cli.starts.max(1) {
        for server in &mut servers {
            interrupt::check()?;
            server.start()?;
        }
    }
    for round in 0..cli.rounds {
        // Who comes first is not the next time.
        for turn in 0..servers.len() {
            interrupt::check()?;
            let which = (round + turn) % servers.len();
            servers[which].round()?;
        }
    }
    for server in &mut servers {
        let loads = server.load(cli.loaded)?;
        if loads.is_empty() {
            continue;
        }
        interrupt::sleep(SETTLES)?;
        for _ in 0..cli.rounds {
            interrupt::check()?;
            let by_control = server.by_control()?;
            server.seen.control_loaded_ms.push(by_control);
        }
    }
    let seen: Vec<&Seen> = servers.iter().map(|server| &server.seen).collect();
    match cli.output {
        Output::Json => println!("{}", serde_json::to_string(&seen)?),
        Output::Table => print(&cli, &seen),
    }
    Ok(())
}

fn print(cli: &Cli, seen: &[&Seen]) {
    let (starts, rounds, loaded) = (cli.starts, cli.rounds, cli.loaded);
    println!(
        "## Many disks, and one more: ms, median (most) of {starts} starts and {rounds} disks added"
    );
    println!("{}", report::machine());
    println!(
        "{:>6} {:>8} {:>15} {:>14} {:>14} {:>16} {:>18}",
        "disks",
        "sandbox",
        "start",
        "by control",
        format!("{loaded} loaded"),
        "ringtap disk add",
        "ringtap disk remove"
    );
    let told = |values: &[f64]| match values.iter().copied().reduce(f64::max) {
        Some(most) => format!("{:.1} ({most:.1})", median(values)),
        None => "-".to_owned(),
    };
    for Seen { disks, sandbox, start_ms, control_ms, control_loaded_ms, add_ms, remove_ms } in seen
    {
        println!(
            "{disks:>6} {sandbox:>8} {:>15} {:>14} {:>14} {:>16} {:>18}",
            told(start_ms),
            told(control_ms),
            told(control_loaded_ms),
            told(add_ms),
            told(remove_ms)
        );
    }
}
