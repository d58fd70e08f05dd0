//! NBD through TLS: nbdcopy reads a whole disk from Ringtap, qemu-nbd and nbdkit, each with the same certificates.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use ringtap_bench::arms::ringtap_program;
use ringtap_bench::experiment::order;
use ringtap_bench::report::{machine, show};
use ringtap_bench::{cpu, interrupt};
use ringtap_lab::process::launch::{Launch, Process};
use ringtap_lab::stats::medians::{Ratio, median};
use ringtap_load::parse_size;

/// The longest that one copy may take.
const LIMIT: Duration = Duration::from_secs(300);

/// Throughput of NBD through TLS 1.3: one nbdcopy with four connections reads a disk on tmpfs.
#[derive(Parser)]
struct Cli {
    /// Rounds; below 6 no interval is given.
    #[arg(long, value_name = "N", default_value_t = 6)]
    rounds: usize,

    /// The Ringtap to measure [default: beside this program, else in PATH].
    #[arg(long, value_name = "PATH")]
    ringtap: Option<PathBuf>,

    /// Bytes of the disk.
    #[arg(long, value_name = "BYTES", default_value = "512M", value_parser = parse_size)]
    size: u64,
}

struct Arm {
    name: &'static str,
    socket: PathBuf,
    tls: bool,
    server: Process,
    /// Seconds of each round, and the server's CPU time.
    took: Vec<f64>,
    cpu: Vec<f64>,
}

/// Run a program to its end.
fn run(words: &[&str]) -> Result<()> {
    Ok(Launch::new(words[0], &words[1..]).output(LIMIT, interrupt::stop()).map(drop)?)
}

/// An authority, and certificates of a server and a client below it, laid out as QEMU has them.
fn certificates(dir: &Path) -> Result<()> {
    let at = |name: &str| dir.join(name).display().to_string();
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "9"];
    let authority = [&["openssl", "req", "-x509"][..], &key, &["-subj", "/CN=bench"]].concat();
    let (ca_key, ca) = (at("ca-key.pem"), at("ca-cert.pem"));
    run(&[&authority[..], &["-keyout", &ca_key, "-out", &ca]].concat())?;
    for (who, usage) in [("server", "serverAuth"), ("client", "clientAuth")] {
        let (own, cert) = (at(&format!("{who}-key.pem")), at(&format!("{who}-cert.pem")));
        let usage = format!("extendedKeyUsage={usage}");
        let leaf = [&["openssl", "req", "-x509"][..], &key].concat();
        let more = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-addext"];
        let below =
            ["-addext", "basicConstraints=critical,CA:FALSE", "-CA", &ca, "-CAkey", &ca_key];
        let files = [&usage, "-keyout", &own, "-out", &cert];
        run(&[&leaf[..], &more, &files, &below].concat())?;
    }
    Ok(())
}

fn write_disk(path: &Path, size: u64) -> Result<()> {
    let mut file = File::create(path)?;
    let mut random = fastrand::Rng::with_seed(1);
    let mut piece = vec![0; 1 << 20];
    for _ in 0..size >> 20 {
        interrupt::check()?;
        random.fill(&mut piece);
        file.write_all(&piece)?;
    }
    Ok(())
}

/// The servers, each at its socket.
fn arms(cli: &Cli, dir: &Path) -> Result<Vec<Arm>> {
    let disk = dir.join("disk.raw").display().to_string();
    let certs = dir.join("certs").display().to_string();
    let ringtap = ringtap_program(cli.ringtap.as_deref()).display().to_string();
    let socket = |name: &str| dir.join(name).display().to_string();
    let (ours, plain, qemu, kit) =
        (socket("ringtap"), socket("plain"), socket("qemu"), socket("nbdkit"));
    let (at, at_plain) = (format!("unix:{ours}"), format!("unix:{plain}"));
    let creds = format!("tls-creds-x509,id=tls,endpoint=server,dir={certs},verify-peer=yes");
    let (kit_certs, kit_file) = (format!("--tls-certificates={certs}"), format!("file={disk}"));
    let serve = ["serve", &disk, "-f", "raw", "--read-only", "--cache", "writeback"];
    let secured = ["--tls-dir", &certs, "--tls", "require"];
    let all: [(&str, &str, bool, Vec<&str>); 4] = [
        ("Ringtap", &ours, true, [&[&ringtap[..]], &serve[..], &["--nbd", &at], &secured].concat()),
        (
            "Ringtap, plain",
            &plain,
            false,
            [&[&ringtap[..]], &serve[..], &["--nbd", &at_plain]].concat(),
        ),
        (
            "qemu-nbd",
            &qemu,
            true,
            vec![
                "qemu-nbd",
                "-r",
                "-t",
                "-e",
                "16",
                "-f",
                "raw",
                "-k",
                &qemu,
                "--object",
                &creds,
                "--tls-creds",
                "tls",
                &disk,
            ],
        ),
        (
            "nbdkit",
            &kit,
            true,
            vec![
                "nbdkit",
                "-f",
                "-r",
                "-U",
                &kit,
                "--tls=require",
                "--tls-verify-peer",
                &kit_certs,
                "file",
                &kit_file,
            ],
        ),
    ];
    let start = |(name, socket, tls, words): (&'static str, &str, bool, Vec<&str>)| {
        let launch = Launch::new(words[0], &words[1..]);
        let mut server = Process::start(&launch, &dir.join(format!("{name}.log")))?;
        let socket = PathBuf::from(socket);
        server.wait_listening(&socket, interrupt::stop())?;
        Ok(Arm { name, socket, tls, server, took: vec![], cpu: vec![] })
    };
    all.into_iter().map(start).collect()
}

fn read_once(arm: &mut Arm, dir: &Path) -> Result<()> {
    let socket = arm.socket.display();
    let certs = dir.join("certs");
    let uri = match arm.tls {
        true => format!(
            "nbds+unix://localhost/?socket={socket}&tls-certificates={}&tls-hostname=localhost",
            certs.display()
        ),
        false => format!("nbd+unix:///?socket={socket}"),
    };
    let (began, before) = (Instant::now(), cpu::of_tree(arm.server.id())?);
    run(&["nbdcopy", "--connections=4", &uri, "null:"])
        .with_context(|| format!("nbdcopy from {}", arm.name))?;
    arm.took.push(began.elapsed().as_secs_f64());
    arm.cpu.push((cpu::of_tree(arm.server.id())? - before).as_secs_f64());
    Ok(())
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    interrupt::install()?;
    ensure!(cli.rounds > 0, "nothing to measure: --rounds at least 1");
    let dir = tempfile::Builder::new().prefix("ringtap-bench-").tempdir_in("/dev/shm")?;
    fs::create_dir(dir.path().join("certs"))?;
    certificates(&dir.path().join("certs"))?;
    write_disk(&dir.path().join("disk.raw"), cli.size)?;
    let mut arms = arms(&cli, dir.path())?;
    println!("## NBD through TLS on tmpfs\n{}", machine());
    for round in 0..=cli.rounds {
        for place in order(arms.len(), round) {
            interrupt::check()?;
            read_once(&mut arms[place], dir.path())?;
        }
        if round == 0 {
            // Programs and pages come into memory.
            arms.iter_mut().for_each(|arm| (arm.took, arm.cpu) = Default::default());
        }
    }
    let mebibytes = (cli.size >> 20) as f64;
    let rates = |arm: &Arm| arm.took.iter().map(|took| mebibytes / took).collect::<Vec<f64>>();
    println!("| server | MiB/s | Ringtap against it | CPU, ms per MiB |\n|---|---|---|---|");
    for arm in &arms {
        let ratio = Ratio::of_rounds(&rates(&arms[0]), &rates(arm));
        let ratio = ratio.filter(|_| arm.name != "Ringtap").map(show).unwrap_or_default();
        let cpu = median(&arm.cpu) * 1000.0 / mebibytes;
        println!("| {} | {:.0} | {ratio} | {cpu:.2} |", arm.name, median(&rates(arm)));
    }
    Ok(())
}
