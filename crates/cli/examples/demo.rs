//! A real guest on a disk that Ringtap serves, in a few lines: the first half of `make demo`.
//!
//! A sparse file is served over vhost-user. A User-Mode Linux guest makes a file system on it, writes
//! and reads, and goes down; another boots from what the first left there.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringtap_guest::{Appliance, Guest, Machine, Uml};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

const SIZE: u64 = 1 << 30;
const PATIENCE: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    match demo() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn demo() -> Result<()> {
    // Not in /tmp, which may be memory: a disk is meant.
    let folder = tempfile::Builder::new().prefix("ringtap-demo-").tempdir_in("/var/tmp")?;
    // Whoever waits looks at this; all that was made goes as the errors unwind.
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, stop.clone())?;
    }
    let (disk, socket) = (folder.path().join("disk.raw"), folder.path().join("vm.sock"));
    File::create(&disk)?.set_len(SIZE)?;

    let mut server = serve(&disk, &socket)?;
    let began = Instant::now();
    let appliance = Appliance::builder(Machine::Uml)
        .programs(["mke2fs", "dd", "sha256sum", "busybox"])
        .build(&Appliance::default_cache())?;
    println!("appliance from this machine's packages: {:.1?}", began.elapsed());

    let guest = boot(&appliance, &socket, &stop)?;
    say(&guest, &stop, "uname -a; cat /sys/block/vda/size | sed 's/$/ sectors on \\/dev\\/vda/'")?;
    say(
        &guest,
        &stop,
        "mke2fs -q -t ext4 /dev/vda && mkdir -p /d && mount /dev/vda /d && df -h /d",
    )?;
    let write = "mkdir -p /d/bin /d/proc && cp $(command -v busybox) /d/bin/busybox && \
        dd if=/dev/urandom of=/d/random bs=1M count=64 conv=fsync 2>&1 | tail -n 1 && \
        cd /d && sha256sum random > sum && sync";
    say(&guest, &stop, write)?;
    guest.shutdown(PATIENCE)?;
    let (taken, seen) = (fs::metadata(&disk)?.blocks() * 512, SIZE >> 20);
    println!("the guest is down; its disk of {seen} MiB takes {} MiB here", taken >> 20);

    let guest = boot(&appliance, &socket, &stop)?;
    say(&guest, &stop, "mkdir -p /d && mount /dev/vda /d && cd /d && sha256sum -c sum")?;
    say(
        &guest,
        &stop,
        "chroot /d /bin/busybox sh -c 'echo a shell from that disk: $0; busybox | head -n 1'",
    )?;
    guest.shutdown(PATIENCE)?;
    server.stop()
}

fn serve(disk: &Path, socket: &Path) -> Result<Server> {
    let own = std::env::current_exe()?;
    let ringtap = own.ancestors().nth(2).unwrap_or(Path::new("/")).join("ringtap");
    println!("$ ringtap serve {} -f raw --vhost-user {}", disk.display(), socket.display());
    let mut command = Command::new(&ringtap);
    command.arg("serve").arg(disk).args(["-f", "raw", "--log", "off", "--vhost-user"]).arg(socket);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: between fork and exec it makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
    }
    let began = Instant::now();
    let mut child =
        command.spawn().with_context(|| format!("cannot start {}", ringtap.display()))?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    let server = Server(child);
    ensure!(line.trim() == "ready", "ringtap serve was not ready");
    println!("ready in {:.1?}", began.elapsed());
    Ok(server)
}

fn boot(appliance: &Appliance, socket: &Path, stop: &AtomicBool) -> Result<Guest> {
    let guest = Uml::new(appliance).vhost_user(socket).boot();
    // Ctrl-C ends the server as well: what the kernel says of that is not the reason.
    ensure!(!stop.load(Relaxed), "interrupted");
    let guest = guest?;
    println!("a guest ({}) booted in {:.1?}", guest.accelerator(), guest.boot_time());
    Ok(guest)
}

/// Run a script in the guest and show what it says.
fn say(guest: &Guest, stop: &AtomicBool, script: &str) -> Result<()> {
    let job = guest.start(script)?;
    while !job.is_done() {
        ensure!(!stop.load(Relaxed), "interrupted");
        thread::sleep(Duration::from_millis(10));
    }
    let output = job.wait(PATIENCE)?.success()?;
    output.stdout.lines().for_each(|line| println!("  guest: {line}"));
    Ok(())
}

struct Server(Child);

impl Server {
    /// Print the statistics and stop it.
    fn stop(&mut self) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.0.id())?).context("no process id")?;
        kill_process(pid, Signal::USR1)?;
        let mut line = String::new();
        if let Some(stderr) = self.0.stderr.take() {
            BufReader::new(stderr).read_line(&mut line)?;
        }
        let all: serde_json::Value = serde_json::from_str(&line)?;
        for kind in ["read", "write", "flush"] {
            let counts = &all["stats"][0][kind];
            println!(
                "served: {:>6} {kind} requests, {:>4} MiB, p50 {} us",
                counts["ended"],
                counts["bytes"].as_u64().unwrap_or(0) >> 20,
                counts["latency_ns"]["p50"].as_u64().unwrap_or(0) / 1000
            );
        }
        kill_process(pid, Signal::TERM)?;
        let status = self.0.wait()?;
        ensure!(status.success(), "ringtap serve ended with {status}");
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
