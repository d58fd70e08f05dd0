//! A real guest's start from an image in a store that is far away: a Debian of its own, booted by QEMU from an overlay upon the image.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;
use ringtap_bench::arms::ringtap_program;
use ringtap_bench::experiment::order;
use ringtap_bench::interrupt;
use ringtap_bench::report::machine;
use ringtap_lab::backend::origin::Origin;
use ringtap_lab::process::launch::{Launch, Process};
use ringtap_lab::process::listens;
use ringtap_lab::stats::medians::median;

/// The longest that one step may take.
const LIMIT: Duration = Duration::from_secs(600);
/// What the guest says once all of its services have started.
const STARTED: &str = "ALL HAS STARTED";
const UNIT: &str = "[Unit]
Description=Tells that all has started
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/echo ALL HAS STARTED
StandardOutput=tty
TTYPath=/dev/ttyS0
";
const UNITS: &str = "/etc/systemd/system";

/// How long a Debian guest takes to start with nothing of its image on this machine, over how long it takes from a local file, as a
/// part of a download of the image. The store takes 20 ms for a request, and sends 100 MB/s.
#[derive(Parser)]
struct Cli {
    /// A Debian's root, with its kernel and initramfs, such as scripts/try-deb.sh makes in /var/tmp/ringtap-debian
    #[arg(long, value_name = "DIR")]
    root: PathBuf,

    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,

    /// The Ringtap to measure [default: beside this program, else in PATH]
    #[arg(long, value_name = "PATH")]
    ringtap: Option<PathBuf>,

    /// QEMU's accelerator
    #[arg(long, value_name = "NAME", default_value = "tcg,thread=multi")]
    accel: String,
}

/// Where the guest's disk comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// A file.
    Local,
    /// The store, as it is read.
    Lazy,
    /// The store, by the list of an earlier start.
    List,
    /// The store, and all that the start before it has left in the cache.
    Second,
}

const ARMS: [Source; 3] = [Source::Local, Source::Lazy, Source::List];

struct Bench {
    dir: tempfile::TempDir,
    ringtap: String,
    accel: String,
    kernel: String,
    initrd: String,
    url: String,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    interrupt::install()?;
    let dir = tempfile::Builder::new().prefix("ringtap-start-").tempdir_in("/var/tmp")?;
    let image = dir.path().join("base.raw");
    make_image(&cli.root, &image, dir.path())?;
    let origin = Origin::start(&image)?;
    let bench = Bench {
        ringtap: ringtap_program(cli.ringtap.as_deref()).display().to_string(),
        accel: cli.accel,
        kernel: newest(&cli.root, "vmlinuz-")?,
        initrd: newest(&cli.root, "initrd.img-")?,
        url: origin.url(),
        dir,
    };
    println!("{}", machine());
    let size = fs::metadata(&image)?.len();
    println!("An image of {} MiB; a guest under {}", size >> 20, bench.accel);
    let list = bench.text("list");
    let recorded = bench.start(Source::Lazy, &["--record", &list])?;
    println!("Recorded: {recorded:.2} s; {} chunks of 256 KiB", lines(&list)?.saturating_sub(1));
    // Once more, so that what the first start of all had to find out is known to each.
    bench.start(Source::Local, &[])?;
    let mut took: Vec<[f64; 5]> = vec![];
    for round in 0..cli.rounds {
        let download = bench.download()?;
        let mut of = [0.0; 5];
        for arm in order(ARMS.len(), round).map(|at| ARMS[at]) {
            match arm {
                Source::List => {
                    of[arm as usize] = bench.start(arm, &["--boot-list", &list])?;
                    of[Source::Second as usize] = bench.start(Source::Second, &[])?;
                }
                arm => of[arm as usize] = bench.start(arm, &[])?,
            }
        }
        of[4] = download;
        let [local, lazy, list, second, download] = of;
        println!(
            "Round {}: local {local:.2} s, on demand {lazy:.2} s, by list {list:.2} s, second guest {second:.2} s; download {download:.2} s",
            round + 1
        );
        took.push(of);
    }
    let over = |arm: Source| -> Vec<f64> {
        took.iter().map(|of| (of[arm as usize] - of[0]) / of[4]).collect()
    };
    let second: Vec<f64> = took.iter().map(|of| of[Source::Second as usize] / of[0]).collect();
    println!("\n| start | median | of each round | wanted |\n|---|---|---|---|");
    for (what, values, wanted) in [
        ("by list, over local, of a download", over(Source::List), "at most 0.2"),
        ("on demand, over local, of a download", over(Source::Lazy), "at most 0.8"),
        ("a second guest, of local", second, "at most 1.1"),
    ] {
        let each: Vec<String> = values.iter().map(|value| format!("{value:.2}")).collect();
        println!("| {what} | {:.2} | {} | {wanted} |", median(&values), each.join(", "));
    }
    Ok(())
}

/// Run a program to its end.
fn run(words: &[&str]) -> Result<String> {
    Ok(Launch::new(words[0], &words[1..]).output(LIMIT, interrupt::stop())?)
}

/// An ext4 of that root, hardly larger than what is in it, with a unit that tells when all has started.
fn make_image(root: &Path, image: &Path, dir: &Path) -> Result<()> {
    let (from, to) = (root.display().to_string(), image.display().to_string());
    let used = run(&["du", "-sxm", &from])?;
    let used: u64 = used.split_whitespace().next().unwrap_or_default().parse()?;
    run(&["truncate", "-s", &format!("{}M", used + used / 8 + 64), &to])?;
    run(&["mke2fs", "-q", "-t", "ext4", "-L", "root", "-d", &from, &to])?;
    let unit = dir.join("unit");
    fs::write(&unit, UNIT)?;
    let write = format!("write {} {UNITS}/started.service", unit.display());
    run(&["debugfs", "-w", "-R", &write, &to]).map(drop)
}

/// The last of that name in the root's /boot.
fn newest(root: &Path, prefix: &str) -> Result<String> {
    let boot = root.join("boot");
    let found = fs::read_dir(&boot).with_context(|| format!("cannot read {}", boot.display()))?;
    let names = found.flatten().map(|entry| entry.path());
    let is_it = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
    };
    let last = names.filter(is_it).max();
    let last = last.with_context(|| format!("{} has no {prefix}*", boot.display()))?;
    Ok(last.display().to_string())
}

fn lines(path: &str) -> Result<usize> {
    Ok(fs::read_to_string(path)?.lines().count())
}

impl Bench {
    fn text(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// Seconds that the whole image takes.
    fn download(&self) -> Result<f64> {
        let clock = Instant::now();
        run(&["curl", "-sS", "--fail", "-o", "/dev/null", &self.url])?;
        Ok(clock.elapsed().as_secs_f64())
    }

    /// Seconds from when the disk is asked for until all has started in the guest.
    fn start(&self, from: Source, more: &[&str]) -> Result<f64> {
        let [top, cache, socket] = ["top.qcow2", "cache", "socket"].map(|name| self.text(name));
        let base = match from {
            Source::Local => self.text("base.raw"),
            _ => self.url.clone(),
        };
        if from != Source::Second {
            let _ = fs::remove_dir_all(&cache);
        }
        let _ = fs::remove_file(&top);
        let dir = self.dir.path();
        run(&[&*self.ringtap, "create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &top])?;
        let clock = Instant::now();
        let mut serve = vec!["serve", &top, "-f", "qcow2", "--vhost-user", &socket];
        if from != Source::Local {
            serve.extend(["--cache-dir", &cache]);
        }
        serve.extend(more);
        let launch = Launch::new(&self.ringtap, serve);
        let mut server = Process::start(&launch, &dir.join("serve.log"))?;
        server.wait_listening(Path::new(&socket), interrupt::stop())?;
        let (guest, said) = Process::start_piped(&self.qemu(&socket), &dir.join("qemu.log"))?;
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(said).split(b'\n').map_while(|line| line.ok());
            if lines.any(|line| String::from_utf8_lossy(&line).contains(STARTED)) {
                let _ = tell.send(Instant::now());
            }
            // What it says further is taken from it.
            lines.for_each(drop);
        });
        let until = Instant::now() + LIMIT;
        let at = loop {
            match told.recv_timeout(Duration::from_millis(100)) {
                Ok(at) => break at,
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => interrupt::check()?,
                Err(_) => bail!("the guest has ended: {}", guest.last_words()),
            }
            if Instant::now() > until {
                bail!("the guest did not start within {LIMIT:?}");
            }
        };
        drop(guest);
        drop(server);
        while listens(Path::new(&socket)) {
            interrupt::sleep(Duration::from_millis(20))?;
        }
        Ok((at - clock).as_secs_f64())
    }

    fn qemu(&self, socket: &str) -> Launch {
        let options = "root=LABEL=root console=ttyS0 panic=-1 quiet no_timer_check nowatchdog \
                       rcupdate.rcu_cpu_stall_suppress=1 systemd.mask=story.service \
                       systemd.mask=serial-getty@ttyS0.service systemd.unit=graphical.target \
                       systemd.wants=started.service";
        let chardev = format!("socket,id=disk,path={socket}");
        let words = [
            ["-accel", &self.accel],
            ["-cpu", "max"],
            ["-smp", "2"],
            ["-m", "1024"],
            ["-object", "memory-backend-memfd,id=mem,size=1024M,share=on"],
            ["-machine", "memory-backend=mem"],
            ["-display", "none"],
            ["-kernel", &self.kernel],
            ["-initrd", &self.initrd],
            ["-append", options],
            ["-chardev", &chardev],
            ["-device", "vhost-user-blk-pci,chardev=disk"],
            ["-serial", "stdio"],
            ["-monitor", "none"],
        ];
        let words = words.as_flattened().iter().copied();
        Launch::new("qemu-system-x86_64", ["-nodefaults", "-no-reboot"].into_iter().chain(words))
    }
}
