//! The server that is to follow this one: its program, started with the same words. A server that has a broker starts
//! none; the broker does, and only the one that it is itself of.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};

use rustix::io::Errno;
use rustix::process::{Pid, Signal};

use crate::call::{Call, What};
use crate::client::{ask, ask_with, is_there};

/// What the broker ignores, and the next is not to.
const IGNORED: [i32; 6] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2, libc::SIGQUIT];

/// From now on these signals are nothing to this process.
pub(crate) fn ignore_signals() {
    for signal in IGNORED {
        // SAFETY: to ignore a signal runs no code of ours.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// A process that was started to follow this one.
#[derive(Debug)]
pub struct Next(Process);

#[derive(Debug)]
enum Process {
    Ours(Child),
    Brokers(u32),
}

impl Next {
    /// Start the program at that path, with the words and the environment of this process, and one end of a channel, which
    /// it finds by a variable: the process that it is from, and a number. The other end. A broker starts its own program, or
    /// one that a process asks for in its words (`chosen`: which).
    pub fn start(
        binary: &Path,
        chosen: Option<u32>,
        variable: &'static str,
    ) -> io::Result<(Next, UnixStream)> {
        if !is_there() {
            let (child, channel) = spawn(binary, variable, vec![])?;
            return Ok((Next(Process::Ours(child)), channel));
        }
        let usual = [0, 1, 2].map(|number| {
            // SAFETY: the standard files are open for as long as the process lives.
            unsafe { BorrowedFd::borrow_raw(number) }
        });
        let call = match chosen {
            None => Call::new(What::Start),
            Some(by) => Call::path(What::Start, binary).number(by.into()),
        };
        let answer = ask_with(&call, &usual).ok_or(Errno::IO)??;
        let text = String::from_utf8_lossy(&answer.text);
        let id = text.parse().map_err(|_| io::Error::from(Errno::IO))?;
        let channel = answer.files.into_iter().next().ok_or(Errno::IO)?;
        Ok((Next(Process::Brokers(id)), UnixStream::from(channel)))
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        match &self.0 {
            Process::Ours(child) => child.id(),
            Process::Brokers(id) => *id,
        }
    }

    /// How it has ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        match &mut self.0 {
            Process::Ours(child) => child.try_wait().ok().flatten(),
            Process::Brokers(id) => of_broker(*id, None),
        }
    }

    /// Tell it to end in order.
    pub fn stop(&mut self) {
        match &mut self.0 {
            Process::Ours(child) => signal(child, Signal::TERM),
            Process::Brokers(id) => _ = of_broker(*id, Some(Signal::TERM)),
        }
    }

    /// It is no more when this returns.
    pub fn end(&mut self) {
        match &mut self.0 {
            Process::Ours(child) => end(child),
            Process::Brokers(id) => _ = of_broker(*id, Some(Signal::KILL)),
        }
    }
}

/// Have the broker send it that signal, and say how it has ended.
fn of_broker(id: u32, signal: Option<Signal>) -> Option<ExitStatus> {
    let signal = signal.map_or(0, |signal| signal.as_raw() as u64);
    let call = Call { numbers: [id.into(), signal, 0, 0], ..Call::new(What::Next) };
    let text = ask(&call)?.ok()?.text;
    Some(ExitStatus::from_raw(String::from_utf8(text).ok()?.parse().ok()?))
}

pub(crate) fn signal(child: &Child, signal: Signal) {
    // One that has ended was not waited for yet, so that its number is nobody else's.
    let _ = rustix::process::kill_process(Pid::from_child(child), signal);
}

/// Kill it, and wait until it has ended.
pub(crate) fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// Start it, with these as its standard files, or this process's.
pub(crate) fn spawn(
    binary: &Path,
    variable: &str,
    usual: Vec<OwnedFd>,
) -> io::Result<(Child, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut command = Command::new(binary);
    let mut words = std::env::args_os();
    command.arg0(words.next().unwrap_or_default()).args(words);
    command.env(variable, format!("{}:{}", std::process::id(), theirs.as_raw_fd()));
    for of_ours in ["LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"] {
        command.env_remove(of_ours);
    }
    let mut usual = usual.into_iter();
    if let Some(file) = usual.next() {
        command.stdin(file);
    }
    if let Some(file) = usual.next() {
        command.stdout(file);
    }
    if let Some(file) = usual.next() {
        command.stderr(file);
    }
    let passed = OwnedFd::from(theirs);
    // SAFETY: between fork and exec it sets signals to their defaults, and changes a flag of a descriptor that is open:
    // both may be done there.
    unsafe {
        command.pre_exec(move || {
            for signal in IGNORED {
                libc::signal(signal, libc::SIG_DFL);
            }
            rustix::io::fcntl_setfd(passed.as_fd(), rustix::io::FdFlags::empty())?;
            Ok(())
        });
    }
    Ok((command.spawn()?, ours))
}
