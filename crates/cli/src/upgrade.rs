//! `ringtap upgrade`: a running server is followed by a new process, which may be of another version. `ringtap reload`: it looks
//! again at what it serves. `ringtap stop`: it ends.

use std::ffi::OsStr;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::json;

use crate::output::Output;
use crate::qmp::Qmp;
use crate::sockets::CONTROL;

/// How much longer than the new process may take to prepare an answer is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// What `ringtap upgrade` is told.
#[derive(Debug, Args)]
pub(crate) struct UpgradeArgs {
    /// The server: unix:PATH of its control socket, or the id of its process
    #[arg(value_name = "unix:PATH|PID", value_parser = server, default_value = CONTROL)]
    server: Server,

    /// The program that takes over, with the arguments that the server was started with [default: what is at the
    /// path that it was started from]; only by a control socket
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,

    /// How long the new process may take to prepare, in seconds, while the old one serves; only by a control socket
    /// [default: 30]
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,

    /// Close NBD clients that speak TLS, whose keys are not passed on, once their requests are answered: each has to
    /// connect again by itself (QEMU's reconnect-delay). Else the upgrade is refused while there is one; only by a control
    /// socket
    #[arg(long)]
    close_tls: bool,

    /// Do nothing where the server runs the very program that is at that path now; only by the id of its process
    #[arg(long)]
    if_changed: bool,

    /// How to print it
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,
}

/// What `ringtap reload` is told.
#[derive(Debug, Args)]
pub(crate) struct ProcessArgs {
    /// The id of the server's process
    #[arg(value_name = "PID", value_parser = process)]
    server: Pid,
}

/// What `ringtap stop` is told.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    #[command(flatten)]
    process: ProcessArgs,

    /// Leave block devices of this host (--ublk) there, with what is mounted on them: their requests wait for the next server of
    /// the same disks
    #[arg(long)]
    keep: bool,

    /// As --keep where systemd stops this unit to start it again, as `systemctl restart` does; else as without
    #[arg(long, value_name = "NAME", conflicts_with = "keep")]
    unit: Option<String>,
}

#[derive(Clone, Debug)]
enum Server {
    Control(PathBuf),
    Process(Pid),
}

fn server(text: &str) -> Result<Server, String> {
    if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
        return Ok(Server::Control(path.into()));
    }
    let wrong = |_| "write unix:PATH or the id of a process".to_owned();
    process(text).map(Server::Process).map_err(wrong)
}

fn process(text: &str) -> Result<Pid, String> {
    let pid = text.parse().ok().and_then(Pid::from_raw);
    pid.ok_or_else(|| "write the id of a process".to_owned())
}

/// Send it SIGHUP. Done here and not by kill(1): that is not on every machine, nor in the profile of a unit.
pub(crate) fn reload(args: &ProcessArgs) -> anyhow::Result<ExitCode> {
    let (handle, number) = (found(args.server)?, args.server.as_raw_nonzero());
    if !catches(number.get(), Signal::HUP) {
        bail!("process {number} is a ringtap that serves nothing");
    }
    pidfd_send_signal(&handle, Signal::HUP).with_context(|| unknown(args.server))?;
    Ok(ExitCode::SUCCESS)
}

/// Send it SIGTERM, and wait until it has ended. A service manager that is not its parent when it becomes the service's main
/// process may not wait for its end, and kill it at once.
pub(crate) fn stop(args: &StopArgs) -> anyhow::Result<ExitCode> {
    let server = args.process.server;
    let (handle, number) = (found(server)?, server.as_raw_nonzero());
    // Where that cannot be told the devices go, as they do without it.
    let restarts = |unit: &String| {
        is_restarting(unit).unwrap_or_else(|error| {
            tracing::warn!("{error:#}: block devices are taken away");
            false
        })
    };
    let keep = args.keep || args.unit.as_ref().is_some_and(restarts);
    let signal = if keep { Signal::QUIT } else { Signal::TERM };
    if !catches(number.get(), Signal::TERM) {
        bail!("process {number} is a ringtap that serves nothing");
    }
    if !catches(number.get(), signal) {
        bail!("process {number} is a ringtap that leaves no block devices: stop it without --keep");
    }
    pidfd_send_signal(&handle, signal).with_context(|| unknown(server))?;
    let mut ended = [PollFd::new(&handle, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut ended, None))
        .with_context(|| format!("cannot wait for the end of process {number}"))?;
    Ok(ExitCode::SUCCESS)
}

/// Whether systemd stops a unit to start it again. It tells that by its list of jobs alone.
fn is_restarting(unit: &str) -> anyhow::Result<bool> {
    let tried = || format!("cannot ask systemd whether it restarts {unit} (systemctl list-jobs)");
    let words = ["list-jobs", "--full", "--plain", "--no-legend", "--no-pager"];
    let output = Command::new("systemctl").args(words).output().with_context(tried)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(anyhow!("{}", said.trim())).with_context(tried);
    }
    Ok(restarts(&String::from_utf8_lossy(&output.stdout), unit))
}

/// Whether these lines, each a job's number, its unit and what is done with that, say that a unit is restarted.
fn restarts(jobs: &str, unit: &str) -> bool {
    jobs.lines().map(|line| line.split_whitespace().skip(1)).any(|mut words| {
        words.next() == Some(unit) && words.next().is_some_and(|job| job.ends_with("restart"))
    })
}

/// Have it done, and say which process serves then.
pub(crate) fn run(args: &UpgradeArgs) -> anyhow::Result<ExitCode> {
    let pid = match &args.server {
        Server::Control(_) if args.if_changed => bail!("--if-changed needs the id of the process"),
        Server::Control(path) => by_control(path, args)?,
        Server::Process(_) if args.binary.is_some() || args.timeout.is_some() || args.close_tls => {
            bail!("--binary, --timeout and --close-tls need the server's control socket: unix:PATH")
        }
        Server::Process(pid) if args.if_changed && !is_changed(*pid)? => {
            return Ok(ExitCode::SUCCESS);
        }
        Server::Process(pid) => by_signal(*pid)?,
    };
    match args.output {
        Output::Text => writeln!(std::io::stdout(), "process {pid} serves from now on")?,
        Output::Json => writeln!(std::io::stdout(), "{}", json!({ "pid": pid }))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn by_control(path: &Path, args: &UpgradeArgs) -> anyhow::Result<u64> {
    let mut arguments = json!({});
    if let Some(binary) = &args.binary {
        let whole = std::path::absolute(binary)?;
        let text = whole.to_str().with_context(|| format!("{} is not UTF-8", whole.display()))?;
        arguments["binary"] = text.into();
        // Where the server is confined its broker looks for these words in this process.
        arguments["asked-by"] = std::process::id().into();
    }
    if let Some(timeout) = args.timeout {
        arguments["timeout"] = timeout.into();
    }
    if args.close_tls {
        arguments["close-tls"] = true.into();
    }
    let ask = |arguments| Qmp::open(path)?.call("__ringtap_upgrade", arguments);
    let answer = match ask(arguments.clone()) {
        // A server of before has nothing to do with that.
        Err(error) if error.to_string().contains("'asked-by'") => {
            arguments.as_object_mut().map(|all| all.remove("asked-by"));
            ask(arguments)?
        }
        answer => answer?,
    };
    answer["pid"].as_u64().context("the server does not say which process takes over")
}

/// Whether another program is now where the process found its own.
fn is_changed(pid: Pid) -> anyhow::Result<bool> {
    let number = pid.as_raw_nonzero().get();
    let own = link_of(number);
    // Into a confined server nobody looks who may not trace it, as in a unit; its broker runs the same program.
    let by_broker = || broker_of(number).map(link_of).filter(|link| fs::read_link(link).is_ok());
    let link = match fs::read_link(&own) {
        Ok(_) => own,
        // Without one, what has a secret in its memory shows its own user nothing of itself: the same program again does no harm.
        Err(error) => match by_broker() {
            None if error.kind() == ErrorKind::PermissionDenied => return Ok(true),
            found => found.unwrap_or(own),
        },
    };
    let context = || format!("cannot see which program process {} runs", pid.as_raw_nonzero());
    let (path, runs) = (fs::read_link(&link).with_context(context)?, fs::metadata(&link));
    let runs = runs.with_context(context)?;
    let path = path.to_string_lossy();
    let path = path.strip_suffix(" (deleted)").unwrap_or(&path);
    // Of a mount namespace of its own, as a unit has, that may be a path that leads nowhere here; what it was called by does.
    let all = [Some(PathBuf::from(path)), called(number)];
    let there = all.into_iter().flatten().find_map(|path| fs::metadata(path).ok());
    let there = there.with_context(|| {
        format!("the program that process {number} runs is not at {path} any more, and no other is")
    })?;
    Ok((there.dev(), there.ino()) != (runs.dev(), runs.ino()))
}

/// The path that a process was called by, where it is a whole one.
fn called(process: i32) -> Option<PathBuf> {
    let words = fs::read(format!("/proc/{process}/cmdline")).ok()?;
    let first = words.split(|byte| *byte == 0).next()?;
    let path = PathBuf::from(OsStr::from_bytes(first));
    path.is_absolute().then_some(path)
}

fn link_of(process: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{process}/exe"))
}

fn broker_of(server: i32) -> Option<i32> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut numbers = processes.filter_map(|it| it.file_name().to_str()?.parse::<i32>().ok());
    numbers.find(|number| {
        let text = fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
        let found =
            text.split_once(" (ringtap-broker) ").and_then(|(_, rest)| rest.split(' ').nth(1));
        found == Some(server.to_string().as_str())
    })
}

/// Whether a process has something to do when that signal comes, and does not just end.
fn catches(process: i32, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    caught & (1 << (signal.as_raw() - 1)) != 0
}

fn unknown(pid: Pid) -> String {
    format!("there is no process {} that this user may signal", pid.as_raw_nonzero())
}

/// A process that is a ringtap: another program would end by the signal.
fn found(pid: Pid) -> anyhow::Result<OwnedFd> {
    let number = pid.as_raw_nonzero();
    let handle = pidfd_open(pid, PidfdFlags::empty()).with_context(|| unknown(pid))?;
    let name = fs::read_to_string(format!("/proc/{number}/comm")).unwrap_or_default();
    if name.trim() != "ringtap" {
        bail!("process {number} is {:?}, and no ringtap", name.trim());
    }
    Ok(handle)
}

/// Tell the process by SIGUSR2, and hear what became of it by a socket whose name it knows.
fn by_signal(pid: Pid) -> anyhow::Result<u64> {
    let number = pid.as_raw_nonzero();
    let handle = found(pid)?;
    if !catches(number.get(), Signal::USR2) {
        bail!("process {number} is a ringtap that cannot be followed by another: restart it");
    }
    let address = SocketAddr::from_abstract_name(format!("ringtap-upgrade-{number}"))?;
    let socket = UnixDatagram::bind_addr(&address).with_context(|| {
        format!(
            "cannot wait for the answer of process {number}: is another `ringtap upgrade` at work?"
        )
    })?;
    socket.set_read_timeout(Some(PATIENCE))?;
    pidfd_send_signal(&handle, Signal::USR2).with_context(|| unknown(pid))?;
    let mut answer = [0; 4096];
    let len = match socket.recv(&mut answer) {
        Ok(len) => len,
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            bail!("process {number} has not answered: its log may say more")
        }
        Err(error) => return Err(error.into()),
    };
    let answer = String::from_utf8_lossy(&answer[..len]).into_owned();
    match answer.split_once(' ') {
        Some(("ok", pid)) => Ok(pid.parse()?),
        Some((_, why)) => bail!("{why}"),
        None => bail!("process {number} says {answer:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::restarts;

    #[test]
    fn a_job_of_the_unit_itself_is_looked_for() {
        let jobs = "12 srv-a.mount restart waiting\n7 ringtap-ublk@a\\x2db.service restart running\n\
                    8 ringtap-ublk@b.service stop running\n";
        assert!(restarts(jobs, r"ringtap-ublk@a\x2db.service"));
        for other in ["ringtap-ublk@b.service", "ringtap-ublk@a.service", "restart", "7"] {
            assert!(!restarts(jobs, other), "{other}");
        }
        assert!(restarts("3 a.service try-restart waiting", "a.service") && !restarts("", ""));
    }
}
