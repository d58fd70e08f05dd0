//! A running guest and the commands sent to it.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::channel::{Channel, Gone};
use crate::error::{Error, Result, first_line, io, last_words, tail};
use crate::process::{Group, run_tool};
use crate::processor::on_one;
use crate::rundir::RunDir;

/// How a command in a guest ended.
#[derive(Debug, Clone)]
pub struct Output {
    /// Its exit status; 128 + N when signal N ended it.
    pub status: i32,
    /// What it wrote to stdout, bytes that are not UTF-8 replaced.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
    /// How long it ran by the host's clock, which unlike a guest's cannot be fooled.
    pub elapsed: Duration,
    command: String,
}

impl Output {
    /// The output of a command that must have succeeded.
    ///
    /// # Errors
    /// [`Error::Failed`] with the end of its stdout and stderr when the status is not 0.
    pub fn success(self) -> Result<Self> {
        if self.status == 0 {
            return Ok(self);
        }
        Err(Error::Failed {
            command: self.command,
            status: self.status,
            stdout: tail(&self.stdout, 20),
            stderr: tail(&self.stderr, 20),
        })
    }
}

/// A booted guest. Dropping it kills it at once and leaves no process and no file.
pub struct Guest {
    body: Mutex<Box<dyn Body>>,
    channel: Channel,
    boot_time: Duration,
    disks: Vec<String>,
    accelerator: &'static str,
}

/// What a guest runs in; it ends when this is dropped.
pub(crate) trait Body: Send {
    /// Waits for the guest to end by itself; says how it did.
    fn wait(&mut self, timeout: Duration) -> Option<String>;

    /// All it has printed on its console, the last 256 KiB.
    fn console(&self) -> String;

    /// The process of this host, and process group, that it is part of.
    fn pid(&self) -> u32;

    /// User and system time of that process group.
    fn cpu_time(&self) -> Duration;

    /// Where its links, logs and sockets are; none where it shares them with others.
    fn folder(&self) -> Option<&Path> {
        None
    }
}

/// A monitor with one guest.
struct Monitor {
    // Fields drop in this order: the processes go before the files they use.
    process: Group,
    console: PathBuf,
    files: RunDir,
}

impl Body for Monitor {
    fn wait(&mut self, timeout: Duration) -> Option<String> {
        self.process.wait(timeout).map(|status| format!("with {status}"))
    }

    fn console(&self) -> String {
        read_tail(&self.console)
    }

    fn pid(&self) -> u32 {
        self.process.id()
    }

    fn cpu_time(&self) -> Duration {
        self.process.cpu_time()
    }

    fn folder(&self) -> Option<&Path> {
        Some(self.files.path())
    }
}

impl Monitor {
    /// Starts it, its console in a file of that folder, and its agent's stream at `stdin`.
    fn start(
        command: &mut Command,
        files: RunDir,
        stdin: OwnedFd,
        one_processor: bool,
    ) -> Result<Monitor> {
        let console = files.path().join("console");
        let log = File::create(&console).map_err(io("make", &console))?;
        let log_too = log.try_clone().map_err(io("write", &console))?;
        command.stdin(Stdio::from(stdin)).stdout(log).stderr(log_too);
        let mut start = || Group::spawn(command);
        let started = if one_processor { on_one(start) } else { start() };
        let process = started.map_err(io("start", command.get_program()))?;
        Ok(Monitor { process, console, files })
    }
}

/// Another monitor, for a guest that is running already.
pub(crate) fn body(mut command: Command, files: RunDir, stdin: OwnedFd) -> Result<Box<dyn Body>> {
    Ok(Box::new(Monitor::start(&mut command, files, stdin, false)?))
}

/// A command that runs in a guest in the background.
pub struct Job<'a> {
    guest: &'a Guest,
    id: u64,
    command: String,
}

/// What the monitors of this crate (UML, QEMU) hand over to have a guest started.
pub(crate) struct Launch {
    /// For messages.
    pub(crate) machine: &'static str,
    /// What runs the guest's processor.
    pub(crate) accelerator: &'static str,
    /// The monitor's command; its stdin becomes the agent's stream.
    pub(crate) command: Command,
    /// Holds the links, logs and sockets of this guest.
    pub(crate) files: RunDir,
    /// Run in the guest before anything else, by busybox.
    pub(crate) set_up: String,
    /// The device nodes that must be there then, in the order the caller gave its disks.
    pub(crate) disks: Vec<String>,
    pub(crate) timeout: Duration,
    /// Ends the boot, and what waits for the guest later, once it is true.
    pub(crate) interrupt: Arc<AtomicBool>,
    /// Turns the console's text into advice, where it knows some.
    pub(crate) advise: fn(&str) -> Option<String>,
    /// Whether its processes are to stay on one of the host's processors.
    pub(crate) one_processor: bool,
}

impl Launch {
    /// Boots the guest and has its root, shares and disks ready.
    pub(crate) fn start(mut self) -> Result<Guest> {
        let started = Instant::now();
        let (host, guest) =
            UnixStream::pair().map_err(io("make a socket in", self.files.path()))?;
        let body = Monitor::start(&mut self.command, self.files, guest.into(), self.one_processor)?;
        // The command still owns the guest's end, and while it does no end of file can be seen.
        drop(self.command);
        let Launch { machine, set_up, disks, advise, timeout, accelerator, .. } = self;
        let channel = Channel::new(host, self.interrupt, None)
            .map_err(io("read from the guest at", &body.console))?;
        Arrival { body: Box::new(body), channel, started, timeout }.ready(
            machine,
            accelerator,
            &set_up,
            disks,
            advise,
        )
    }
}

/// A guest that has been started and has not said anything yet.
pub(crate) struct Arrival {
    pub(crate) body: Box<dyn Body>,
    pub(crate) channel: Channel,
    pub(crate) started: Instant,
    /// Counted from then.
    pub(crate) timeout: Duration,
}

impl Arrival {
    /// Waits for the agent's greeting and has it run `set_up`.
    pub(crate) fn ready(
        mut self,
        machine: &str,
        accelerator: &'static str,
        set_up: &str,
        disks: Vec<String>,
        advise: fn(&str) -> Option<String>,
    ) -> Result<Guest> {
        if let Err(why) = self.greet(set_up, &disks) {
            if self.channel.interrupt().load(Ordering::SeqCst) {
                return Err(Error::Interrupted(format!("the boot of {machine}")));
            }
            // Its console is complete once it has ended, or will say no more.
            self.body.wait(Duration::from_secs(1));
            let text = self.body.console();
            let remedy = advise(&text).unwrap_or_else(|| {
                "Its console's last lines may tell why; a slow machine may need more time \
                 (boot_timeout; --boot-limit of ringtap compare)"
                    .into()
            });
            let console = last_words(&text);
            return Err(Error::Boot { machine: machine.into(), why, remedy, console });
        }
        Ok(Guest {
            body: Mutex::new(self.body),
            channel: self.channel,
            boot_time: self.started.elapsed(),
            disks,
            accelerator,
        })
    }

    fn greet(&mut self, set_up: &str, disks: &[String]) -> std::result::Result<(), String> {
        let end = self.started + self.timeout;
        let hello = self.channel.wait_hello(end);
        hello.map_err(|why| self.gone(&why, "the agent's greeting"))?;
        let mut script = format!("set -e\n{set_up}\n");
        for disk in disks {
            script.push_str(&format!("[ -b {disk} ] || {{ echo no {disk} >&2; exit 1; }}\n"));
        }
        let id = self.channel.start(&script, "init");
        let done = id.and_then(|id| self.channel.wait_done(id, end));
        let done = done.map_err(|why| self.gone(&why, "the end of its set-up"))?;
        if done.status == 0 {
            return Ok(());
        }
        Err(format!("its set-up failed: {}", String::from_utf8_lossy(&done.stderr).trim()))
    }

    fn gone(&mut self, gone: &Gone, step: &str) -> String {
        match gone {
            Gone::TimedOut => {
                format!("{step} did not come within {} s", self.timeout.as_secs_f32())
            }
            Gone::Interrupted => format!("nobody waited any longer for {step}"),
            Gone::Closed => match self.body.wait(Duration::from_secs(1)) {
                Some(how) => format!("it ended {how} before {step}"),
                None => format!("it closed its agent's line before {step}"),
            },
        }
    }
}

impl Guest {
    /// Runs a script with the guest's `/bin/sh` and waits for its end.
    ///
    /// # Errors
    /// [`Error::Timeout`] when it takes too long (it is killed then, the guest goes on),
    /// [`Error::Ended`] when the guest is gone. A status other than 0 is no error here, see
    /// [`Output::success`].
    pub fn exec(&self, script: &str, timeout: Duration) -> Result<Output> {
        self.start(script)?.wait(timeout)
    }

    /// Starts a script in the background; several may run at a time. Scripts may be up to 100 KiB.
    ///
    /// # Errors
    /// [`Error::Ended`] when the guest is gone.
    pub fn start(&self, script: &str) -> Result<Job<'_>> {
        let command = first_line(script);
        match self.channel.start(script, "root") {
            Ok(id) => Ok(Job { guest: self, id, command }),
            Err(gone) => Err(self.lost(gone, command)),
        }
    }

    /// The flag that ends all waiting for it.
    pub(crate) fn interrupt(&self) -> &Arc<AtomicBool> {
        self.channel.interrupt()
    }

    /// The device nodes of the disks, in the order in which the builder was given them, `ubd`,
    /// virtio and vhost-user disks each counted apart.
    pub fn disks(&self) -> &[String] {
        &self.disks
    }

    /// From the start of the monitor until the guest could take its first command.
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// What runs the guest's processor: `uml`, `kvm` or `tcg`.
    pub fn accelerator(&self) -> &'static str {
        self.accelerator
    }

    /// All the guest has printed on its console, the last 256 KiB.
    pub fn console(&self) -> String {
        self.body().console()
    }

    /// The process id of the monitor, and of its process group. All domains of one Xen have one.
    pub fn pid(&self) -> u32 {
        self.body().pid()
    }

    /// User and system time on the host of the monitor and all its processes so far.
    pub fn cpu_time(&self) -> Duration {
        self.body().cpu_time()
    }

    /// Has QEMU's own thread, in which its devices are emulated, go before those of the processors. Where a
    /// translated guest keeps all processors of this machine busy its disks would answer only when one of
    /// them halts or its time is over, and a real disk waits for no processor.
    ///
    /// # Errors
    /// [`Error::Tool`] where this machine does not allow it.
    pub fn put_devices_first(&self) -> Result<()> {
        let pid = self.pid().to_string();
        let mut command = Command::new("chrt");
        command.args(["--reset-on-fork", "--fifo", "--pid", "1", &pid]);
        run_tool(&mut command, Duration::from_secs(20)).map(drop)
    }

    /// Kills the guest as a power cut would; nothing is left of it.
    pub fn kill(self) {
        drop(self);
    }

    /// Has the guest write back its caches and switch itself off.
    ///
    /// # Errors
    /// [`Error::Timeout`] when it does not; it has been killed then.
    pub fn shutdown(self, timeout: Duration) -> Result<()> {
        // A guest that is gone already has nothing left to write back.
        let _ = self.channel.off();
        if self.body().wait(timeout).is_some() {
            return Ok(());
        }
        let console = last_words(&self.console());
        Err(Error::Timeout { command: "poweroff".into(), given: timeout, console })
    }

    pub(crate) fn body(&self) -> std::sync::MutexGuard<'_, Box<dyn Body>> {
        self.body.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What has become of a command without which there is nothing to wait for.
    fn lost(&self, gone: Gone, command: String) -> Error {
        if gone == Gone::Interrupted {
            return Error::Interrupted(format!("`{command}` in the guest"));
        }
        // The last words of a dying kernel come a moment after its line closes.
        self.body().wait(Duration::from_millis(500));
        Error::Ended { command, console: last_words(&self.console()) }
    }
}

impl Job<'_> {
    /// Whether it has ended.
    pub fn is_done(&self) -> bool {
        self.guest.channel.is_done(self.id)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// As [`Guest::exec`].
    pub fn wait(self, timeout: Duration) -> Result<Output> {
        let guest = self.guest;
        match guest.channel.wait_done(self.id, Instant::now() + timeout) {
            Ok(done) => Ok(Output {
                status: done.status,
                stdout: String::from_utf8_lossy(&done.stdout).into_owned(),
                stderr: String::from_utf8_lossy(&done.stderr).into_owned(),
                elapsed: done.elapsed,
                command: self.command,
            }),
            Err(Gone::TimedOut) => {
                let _ = guest.channel.kill(self.id);
                let console = last_words(&guest.console());
                Err(Error::Timeout { command: self.command, given: timeout, console })
            }
            Err(gone) => Err(guest.lost(gone, self.command)),
        }
    }

    /// Kills it and all it started; [`Job::wait`] then gives status 137.
    ///
    /// # Errors
    /// [`Error::Ended`] when the guest is gone.
    pub fn kill(&self) -> Result<()> {
        let sent = self.guest.channel.kill(self.id);
        sent.map_err(|gone| self.guest.lost(gone, self.command.clone()))
    }
}

/// The last 256 KiB of a console log, carriage returns and escape codes removed.
fn read_tail(path: &Path) -> String {
    const KEPT: u64 = 256 << 10;
    let Ok(mut file) = File::open(path) else { return String::new() };
    let len = file.metadata().map_or(0, |m| m.len());
    let mut data = Vec::new();
    if file.seek(SeekFrom::Start(len.saturating_sub(KEPT))).is_err() {
        return String::new();
    }
    // What can be read is better than nothing.
    let _ = file.read_to_end(&mut data);
    let text = String::from_utf8_lossy(&data);
    text.chars().filter(|&c| c == '\n' || c == '\t' || !c.is_control()).collect()
}

/// Makes `name` in the run directory a link to `target` and returns the link's path: monitors
/// give commas, colons and spaces in their arguments meanings of their own, and a socket's path
/// may have 107 bytes at most.
pub(crate) fn link(dir: &Path, name: &str, target: &Path) -> Result<String> {
    let target = std::path::absolute(target).map_err(io("find", target))?;
    fs::metadata(&target).map_err(io("find", &target))?;
    let link = dir.join(name);
    std::os::unix::fs::symlink(&target, &link).map_err(io("make the link", &link))?;
    Ok(link.to_string_lossy().into_owned())
}

/// Quotes a word for the guest's shell.
pub(crate) fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_words_survive_a_shell() {
        let odd = "a 'b' \"c\" $d `e` \\";
        let out = Command::new("sh").arg("-c").arg(format!("printf %s {}", quote(odd))).output();
        assert_eq!(String::from_utf8(out.unwrap().stdout).unwrap(), odd);
    }
}
