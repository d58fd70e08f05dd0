//! Live migration of a QEMU guest to another QEMU of this host.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::{Value, json};

use crate::error::{Error, Result, io};
use crate::guest::{Guest, body};
use crate::qemu::{QMP, Qemu};

/// How often it is looked how far it is.
const TICK: Duration = Duration::from_millis(50);

/// How many bytes of memory go in a second at first.
const SLOWLY: u64 = 4 << 20;

/// What a migration was like, as the QEMU that the guest has left says.
#[derive(Debug, Clone, Copy)]
pub struct Migrated {
    /// How long the guest stood still.
    pub downtime: Duration,
    /// From the first page until then.
    pub total: Duration,
    /// Bytes of its memory that went.
    pub transferred: u64,
}

/// A connection to QEMU's monitor.
struct Monitor {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
}

impl Monitor {
    fn connect(folder: &Path, until: Instant) -> Result<Monitor> {
        let path = folder.join(QMP);
        let stream = loop {
            match UnixStream::connect(&path) {
                Err(_) if Instant::now() < until => thread::sleep(TICK),
                end => break end.map_err(io("connect to", &path))?,
            }
        };
        let theirs = stream.try_clone().map_err(io("connect to", &path))?;
        stream.set_read_timeout(Some(Duration::from_secs(60))).map_err(io("read from", &path))?;
        let mut monitor = Monitor { stream, lines: BufReader::new(theirs) };
        monitor.next()?;
        monitor.ask("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    fn next(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.lines.read_line(&mut line).map_err(io("read from", QMP))?;
        serde_json::from_str(&line).map_err(|_| failed(format!("its monitor said {line:?}")))
    }

    /// What a command answers; events on the way are passed over.
    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let text = json!({ "execute": command, "arguments": arguments }).to_string();
        self.stream.write_all(text.as_bytes()).map_err(io("write to", QMP))?;
        loop {
            let answer = self.next()?;
            if let Some(error) = answer.get("error") {
                return Err(failed(format!("{command}: {error}")));
            }
            if let Some(answer) = answer.get("return") {
                return Ok(answer.clone());
            }
        }
    }

    /// The word that a query gives for a status.
    fn status(&mut self, query: &str) -> Result<(String, Value)> {
        let answer = self.ask(query, json!({}))?;
        Ok((answer["status"].as_str().unwrap_or_default().to_owned(), answer))
    }
}

fn failed(why: String) -> Error {
    Error::Migration { why }
}

impl Guest {
    /// Moves the guest, while it runs, into another QEMU, which is started for that: the same machine with disks elsewhere.
    /// Whatever runs in the guest goes on, commands too. The QEMU that it leaves is ended. The guest must have no shares
    /// and no root on the host.
    ///
    /// # Errors
    /// [`Error::Migration`] when it does not take place within `timeout`; the guest goes on where it was, if it can.
    pub fn migrate(&self, to: Qemu, timeout: Duration) -> Result<Migrated> {
        self.migrate_and(to, timeout, || {})
    }

    /// The same; `stopped` is done while the guest stands still, neither here nor there.
    ///
    /// # Errors
    /// As [`Guest::migrate`].
    pub fn migrate_and(
        &self,
        to: Qemu,
        timeout: Duration,
        stopped: impl FnOnce(),
    ) -> Result<Migrated> {
        self.migrate_between(to, timeout, || {}, stopped)
    }

    /// The same; `begun` is done while its memory goes, slowly until then, and the guest still runs where it was.
    ///
    /// # Errors
    /// As [`Guest::migrate`].
    pub fn migrate_between(
        &self,
        to: Qemu,
        timeout: Duration,
        begun: impl FnOnce(),
        stopped: impl FnOnce(),
    ) -> Result<Migrated> {
        let until = Instant::now() + timeout;
        let (stream, mut here) = {
            let body = self.body();
            let folder = body.folder().ok_or_else(|| failed("it is no guest of QEMU's".into()))?;
            (stream_of(body.pid())?, Monitor::connect(folder, until)?)
        };
        let mut there = to.prepare()?;
        let socket = there.files.path().join("incoming").display().to_string();
        there.command.args(["-incoming", &format!("unix:{socket}")]);
        let folder = there.files.path().to_owned();
        let next = body(there.command, there.files, stream)?;
        let end = Monitor::connect(&folder, until).and_then(|mut monitor| {
            let pauses = json!([{ "capability": "pause-before-switchover", "state": true }]);
            here.ask("migrate-set-capabilities", json!({ "capabilities": pauses }))?;
            here.ask("migrate-set-parameters", json!({ "max-bandwidth": SLOWLY }))?;
            here.ask("migrate", json!({ "uri": format!("unix:{socket}") }))?;
            while here.status("query-migrate")?.0 == "setup" && Instant::now() < until {
                thread::sleep(TICK);
            }
            begun();
            here.ask("migrate-set-parameters", json!({ "max-bandwidth": 1u64 << 30 }))?;
            let migrated = here.wait_until_migrated(until, stopped)?;
            while monitor.status("query-status")?.0 != "running" {
                if Instant::now() > until {
                    return Err(failed("it does not run where it has arrived".into()));
                }
                thread::sleep(TICK);
            }
            Ok(migrated)
        });
        let migrated = end.map_err(|error| failed(format!("{error}; {}", next.console())))?;
        *self.body() = next;
        Ok(migrated)
    }
}

impl Monitor {
    fn wait_until_migrated(&mut self, until: Instant, stopped: impl FnOnce()) -> Result<Migrated> {
        let mut stopped = Some(stopped);
        loop {
            let (status, info) = self.status("query-migrate")?;
            match &*status {
                "completed" => {
                    let time = |key: &str| info[key].as_u64().unwrap_or_default();
                    return Ok(Migrated {
                        downtime: Duration::from_millis(time("downtime")),
                        total: Duration::from_millis(time("total-time")),
                        transferred: info["ram"]["transferred"].as_u64().unwrap_or_default(),
                    });
                }
                "pre-switchover" => {
                    if let Some(stopped) = stopped.take() {
                        stopped();
                        self.ask("migrate-continue", json!({ "state": "pre-switchover" }))?;
                    }
                }
                "failed" | "cancelled" => return Err(failed(format!("it has {status}: {info}"))),
                _ if Instant::now() > until => {
                    // It goes on where it is.
                    let _ = self.ask("migrate_cancel", json!({}));
                    return Err(failed(format!("it takes too long: {info}")));
                }
                _ => thread::sleep(TICK),
            }
        }
    }
}

/// The guest's end of its agent's stream, which a QEMU has as its stdin.
fn stream_of(pid: u32) -> Result<OwnedFd> {
    let open = || {
        let pid = Pid::from_raw(pid as i32).ok_or(rustix::io::Errno::SRCH)?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        pidfd_getfd(process, 0, PidfdGetfdFlags::empty())
    };
    open().map_err(|error| io("take over the agent's stream of", pid.to_string())(error.into()))
}
