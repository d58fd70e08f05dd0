//! What a server costs that serves an idle disk.

use crate::arms::ringtap_program;
use crate::nbd::EXPORT;
use crate::{cpu, interrupt, memory};
use anyhow::{Context, Result, bail};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};
use ringtap_lab::process::launch::{Launch, Process};
use serde::Serialize;
use std::fmt;
use std::fs;
use std::io::{BufRead, BufReader};
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

/// CPU milliseconds per minute an idle disk may cost.
pub const CPU_MS_PER_MINUTE: f64 = 1.0;
/// Bytes of resident memory an idle disk may cost.
pub const MEMORY: u64 = 8 << 20;

/// What an idle server was seen to use.
#[derive(Clone, Debug, Serialize)]
pub struct Idle {
    /// Which server.
    pub server: String,
    /// How long was watched.
    pub seconds: f64,
    /// CPU time per minute in milliseconds.
    pub cpu_ms_per_minute: f64,
    /// Times its threads went to sleep, per minute: how often something woke it.
    pub wakeups_per_minute: f64,
    /// Resident memory in bytes.
    pub rss: u64,
    /// The same with shared pages counted in parts.
    pub pss: u64,
    /// Threads.
    pub threads: usize,
    /// Within both bounds.
    pub reached: bool,
}

/// How Ringtap serves `image` on both sockets.
pub fn ringtap(asked: Option<&Path>, image: &Path, vhost_user: &Path, nbd: &Path) -> Launch {
    let nbd = format!("unix:{}", nbd.display());
    let (image, vhost_user) = (image.display().to_string(), vhost_user.display().to_string());
    let words = [
        "serve",
        &image,
        "-f",
        "raw",
        "--vhost-user",
        &vhost_user,
        "--nbd",
        &nbd,
        "--name",
        EXPORT,
    ];
    Launch::new(ringtap_program(asked), words)
}

/// How qemu-storage-daemon does.
pub fn qsd(image: &Path, vhost_user: &Path, nbd: &Path) -> Launch {
    let words = [
        "--blockdev".into(),
        format!(
            "driver=file,node-name=disk,filename={},cache.direct=on,aio=io_uring",
            image.display()
        ),
        "--nbd-server".into(),
        format!("addr.type=unix,addr.path={}", nbd.display()),
        "--export".into(),
        format!("nbd,id=nbd,node-name=disk,name={EXPORT},writable=on"),
        "--export".into(),
        format!(
            "vhost-user-blk,id=vhost,node-name=disk,writable=on,addr.type=unix,addr.path={}",
            vhost_user.display()
        ),
    ];
    Launch::new("qemu-storage-daemon", words)
}

/// Starts a server, has one client on each wire read a block and then do nothing, and watches.
pub fn watch(
    name: &str,
    launch: &Launch,
    vhost_user: &Path,
    nbd: &Path,
    seconds: f64,
    run: &Path,
) -> Result<Idle> {
    let mut server = Process::start(launch, &run.join("server.log"))?;
    server.wait_listening(vhost_user, crate::interrupt::stop())?;
    server.wait_listening(nbd, crate::interrupt::stop())?;
    let guest = Guest::connect(vhost_user)?;
    let client = nbd_client(nbd, run)?;
    // Whatever a server does after a request (polling, caches) is not idleness yet.
    interrupt::sleep(Duration::from_secs(2))?;

    let (cpu, wakeups) = (cpu::of_tree(server.id())?, sleeps(server.id())?);
    interrupt::sleep(Duration::from_secs_f64(seconds))?;
    let cpu = cpu::of_tree(server.id())?.saturating_sub(cpu).as_secs_f64();
    let wakeups = sleeps(server.id())?.saturating_sub(wakeups) as f64;
    let (rss, pss) = memory::resident(server.id())?;
    let threads = fs::read_dir(format!("/proc/{}/task", server.id()))?.count();
    drop((guest, client));

    let per_minute = 60.0 / seconds;
    let cpu_ms_per_minute = cpu * 1000.0 * per_minute;
    Ok(Idle {
        server: name.into(),
        seconds,
        cpu_ms_per_minute,
        wakeups_per_minute: wakeups * per_minute,
        rss,
        pss,
        threads,
        reached: cpu_ms_per_minute < CPU_MS_PER_MINUTE && rss < MEMORY,
    })
}

/// A guest that has read one block and now sleeps.
struct Guest {
    // Queues go before the device.
    _queue: Blkioq,
    _device: Blkio,
}

impl Guest {
    fn connect(socket: &Path) -> Result<Guest> {
        let path = socket.to_str().context("the socket's path is not UTF-8")?;
        let mut device = Blkio::new("virtio-blk-vhost-user")?;
        device.set_str("path", path)?;
        device.connect().with_context(|| format!("cannot connect to {path}"))?;
        let mut queue = device.start()?.queues.pop().context("no queue")?;
        let region = device.alloc_mem_region(1 << 20)?;
        device.map_mem_region(&region)?;
        queue.read(0, region.addr as *mut u8, 4096, 0, ReqFlags::empty());
        let mut completions = [MaybeUninit::<Completion>::uninit()];
        let mut wait = Duration::from_secs(10);
        queue.do_io(&mut completions, 1, Some(&mut wait), None).context("the first read")?;
        // SAFETY: do_io was asked for one completion and filled it.
        let ret = unsafe { completions[0].assume_init_ref() }.ret;
        if ret != 0 {
            bail!("the first read failed with error {}", -ret);
        }
        // As a guest driver that sleeps: the next completion shall interrupt it.
        queue.set_completion_fd_enabled(true);
        Ok(Guest { _queue: queue, _device: device })
    }
}

/// libnbd's shell, connected, after one read.
fn nbd_client(socket: &Path, run: &Path) -> Result<Process> {
    let uri = format!("nbd+unix:///{EXPORT}?socket={}", socket.display());
    let script = "import time; h.pread(4096, 0); print('ready', flush=True); time.sleep(1e6)";
    let mut launch = Launch::new("nbdsh", ["-u", &uri, "-c", script]);
    // nbdsh takes the first python3 in PATH; only the system's has libnbd's module for sure.
    let path = std::env::var("PATH").unwrap_or_default();
    launch.env.push(("PATH".into(), format!("/usr/bin:{path}").into()));
    let (client, pipe) = Process::start_piped(&launch, &run.join("nbdsh.log"))?;
    let mut line = String::new();
    BufReader::new(pipe).read_line(&mut line)?;
    if line.trim() != "ready" {
        bail!("nbdsh cannot read from {uri}: {}", client.last_words());
    }
    Ok(client)
}

/// How often the threads of `pid` have gone to sleep.
fn sleeps(pid: u32) -> Result<u64> {
    let mut sum = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
        // A thread may be gone by now.
        let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        sum += count.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or_default();
    }
    Ok(sum)
}

impl fmt::Display for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / 1048576.0;
        write!(
            f,
            "{:<10} {:>10.3} ms CPU/min  {:>8.1} wakeups/min  RSS {:>6.1} MiB  PSS {:>6.1} MiB  {} threads  {}",
            self.server,
            self.cpu_ms_per_minute,
            self.wakeups_per_minute,
            mib(self.rss),
            mib(self.pss),
            self.threads,
            if self.reached { "reached" } else { "NOT REACHED" }
        )
    }
}
