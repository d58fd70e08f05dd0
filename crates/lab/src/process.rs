//! Programs that the lab starts: servers that must answer on a socket, tools that must end in time.
//! Each runs in a process group of its own, so that Ctrl-C reaches the lab alone and the lab stops them in order,
//! and dies with the lab, however the lab dies.

pub mod launch;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use ringtap_guest::process::{self, End};
use rustix::process::Signal;

use crate::cost;
use crate::error::{Error, Result};
use crate::stop::Stop;

pub use ringtap_guest::process::{Group, find};

/// How often a waiting lab looks again.
const TICK: Duration = Duration::from_millis(5);
/// How long a server may take to end after SIGTERM before it is killed.
const GRACE: Duration = Duration::from_secs(5);

/// Starts `command` in a process group of its own.
pub fn spawn(mut command: Command) -> Result<Group> {
    prepare(&mut command);
    Group::spawn(&mut command).map_err(|error| not_started(&command, &error))
}

/// What programs print is read as they print it untranslated; and none outlives the lab.
fn prepare(command: &mut Command) {
    command.env("LC_ALL", "C");
    die_with_parent(command);
}

fn not_started(command: &Command, error: &std::io::Error) -> Error {
    Error::Program {
        program: name_of(command.get_program()),
        what: format!("cannot be started: {error}"),
        said: String::new(),
    }
}

#[allow(unsafe_code)]
fn die_with_parent(command: &mut Command) {
    // SAFETY: prctl(PR_SET_PDEATHSIG) is async-signal-safe, touches no memory of the parent and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            Ok(())
        });
    }
}

/// A server of the lab: runs until it is stopped or dropped, which both let it end in order, and keeps its stderr in a
/// file of the run's folder.
#[derive(Debug)]
pub struct Server {
    name: String,
    group: Group,
    log: PathBuf,
    log_from: u64,
    /// The command line, for the report.
    pub command_line: String,
}

impl Server {
    /// Starts `command` with stderr appended to `log`.
    pub fn start(command: Command, log: &Path) -> Result<Server> {
        Server::with_stdout(command, log, Stdio::null())
    }

    /// The same, and the pipe that it prints to.
    pub fn start_piped(command: Command, log: &Path) -> Result<(Server, ChildStdout)> {
        let mut server = Server::with_stdout(command, log, Stdio::piped())?;
        match server.group.stdout() {
            Some(pipe) => Ok((server, pipe)),
            None => Err(server.failed("has no pipe to print to".into())),
        }
    }

    fn with_stdout(mut command: Command, log: &Path, stdout: Stdio) -> Result<Server> {
        let file = File::options()
            .create(true)
            .append(true)
            .open(log)
            .map_err(Error::file("open", log))?;
        let log_from = file.metadata().map(|m| m.len()).unwrap_or(0);
        let (name, command_line) = (name_of(command.get_program()), command_line(&command));
        command.stdin(Stdio::null()).stdout(stdout).stderr(file);
        Ok(Server { name, group: spawn(command)?, log: log.to_owned(), log_from, command_line })
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.group.id()
    }

    /// CPU seconds used so far by the server and its children.
    pub fn cpu_seconds(&self) -> f64 {
        cost::tree_cpu_seconds(self.pid())
    }

    /// Waits until a connection to the UNIX socket `path` is accepted.
    pub fn wait_for_socket(&mut self, path: &Path, limit: Duration, stop: &Stop) -> Result<()> {
        self.wait_until(path, limit, stop, || UnixStream::connect(path).is_ok())
    }

    /// Waits until the UNIX socket `path` listens, without connecting: a vhost-user server has one client at a time,
    /// and some take a first, empty connection for that client.
    pub fn wait_for_socket_file(
        &mut self,
        path: &Path,
        limit: Duration,
        stop: &Stop,
    ) -> Result<()> {
        self.wait_until(path, limit, stop, || listens(path))
    }

    /// Waits until `ready` says so; `path` is what the server opens, for the message.
    pub fn wait_until(
        &mut self,
        path: &Path,
        limit: Duration,
        stop: &Stop,
        ready: impl Fn() -> bool,
    ) -> Result<()> {
        let until = Instant::now() + limit;
        loop {
            stop.check()?;
            if let Some(status) = self.group.ended() {
                return Err(
                    self.failed(format!("ended ({status}) before it opened {}", path.display()))
                );
            }
            if ready() {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(self.failed(format!(
                    "did not open {} within {} s",
                    path.display(),
                    limit.as_secs()
                )));
            }
            std::thread::sleep(TICK);
        }
    }

    /// An error when the server has ended by itself.
    pub fn check(&mut self) -> Result<()> {
        match self.group.ended() {
            Some(status) => Err(self.failed(format!("ended by itself ({status})"))),
            None => Ok(()),
        }
    }

    /// Asks the server to end (SIGTERM) and waits; kills it when it does not.
    pub fn stop(mut self) -> Result<()> {
        self.check()?;
        if self.end() {
            return Ok(());
        }
        Err(self
            .failed(format!("did not end within {} s of SIGTERM and was killed", GRACE.as_secs())))
    }

    /// Whether it ended when it was asked to; it is gone in any case.
    fn end(&mut self) -> bool {
        self.group.terminate();
        let ended = self.group.wait(GRACE).is_some();
        self.group.kill();
        ended
    }

    /// The end of what this server wrote to stderr since it was started.
    pub fn said(&self) -> String {
        let mut text = String::new();
        if let Ok(mut file) = File::open(&self.log) {
            let _ = file.seek(SeekFrom::Start(self.log_from));
            let mut bytes = Vec::new();
            let _ = file.read_to_end(&mut bytes);
            text = String::from_utf8_lossy(&bytes).into_owned();
        }
        tail(&text)
    }

    fn failed(&self, what: String) -> Error {
        Error::Program { program: self.name.clone(), what, said: self.said() }
    }
}

impl Drop for Server {
    /// A mount or a device of the server's would outlive it where it is killed at once.
    fn drop(&mut self) {
        if self.group.ended().is_none() {
            self.end();
        }
    }
}

/// What a tool printed.
#[derive(Debug)]
pub struct Output {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// Runs a tool to its end, for at most `limit`, and returns what it printed. A failing status is an error that
/// quotes stderr; Ctrl-C kills the tool at once.
pub fn run(mut command: Command, limit: Duration, stop: &Stop) -> Result<Output> {
    stop.check()?;
    prepare(&mut command);
    let ran = process::run(&mut command, limit, || stop.asked());
    let ran = ran.map_err(|error| not_started(&command, &error))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let output = Output { stdout: text(&ran.stdout), stderr: text(&ran.stderr) };
    let what = match ran.end {
        End::Itself(status) if status.success() => return Ok(output),
        End::Itself(status) => format!("failed ({status})"),
        End::Stopped => return Err(Error::Interrupted),
        End::Late => format!("did not end within {} s and was killed", limit.as_secs()),
    };
    let program = name_of(command.get_program());
    Err(Error::Program { program, what, said: tail(&output.stderr) })
}

/// Runs a short helper command (losetup, mkfs) with a limit of 60 s.
pub fn run_short<S: AsRef<OsStr>>(
    program: &str,
    args: impl IntoIterator<Item = S>,
    stop: &Stop,
) -> Result<Output> {
    let mut command = Command::new(program);
    command.args(args);
    run(command, Duration::from_secs(60), stop)
}

/// A command as a person would type it.
pub fn command_line(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| {
            let word = word.to_string_lossy();
            if word.chars().all(|c| c.is_ascii_alphanumeric() || "-_=./,:+".contains(c))
                && !word.is_empty()
            {
                word.into_owned()
            } else {
                format!("'{}'", word.replace('\'', "'\\''"))
            }
        })
        .collect::<Vec<_>>()
        .join(" ")
}

/// Whether the kernel lists a listening UNIX socket at `path` (flag 0x10000 is "accepts connections").
pub fn listens(path: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let end = format!(" {}", path.display());
    table.lines().filter(|line| line.ends_with(&end)).any(|line| {
        let flags =
            line.split_whitespace().nth(3).and_then(|word| u32::from_str_radix(word, 16).ok());
        flags.unwrap_or(0) & 0x10000 != 0
    })
}

fn name_of(program: &OsStr) -> String {
    Path::new(program).file_name().unwrap_or(program).to_string_lossy().into_owned()
}

/// The beginning and the end of a long text: a panic's reason stands first, a tool's last.
fn tail(text: &str) -> String {
    const HEAD: usize = 400;
    const TAIL: usize = 500;
    let text = text.trim();
    let letters: Vec<char> = text.chars().collect();
    if letters.len() <= HEAD + TAIL {
        return text.to_owned();
    }
    let head: String = letters[..HEAD].iter().collect();
    let end: String = letters[letters.len() - TAIL..].iter().collect();
    format!("{head} […] {end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_speak_no_language_of_the_users() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $LC_ALL"]).env("LC_ALL", "de_DE.UTF-8");
        let output = run(command, Duration::from_secs(60), &Stop::default());
        assert_eq!(output.unwrap_or_else(|e| panic!("{e}")).stdout, "C\n");
    }

    /// A server that is ready when this returns, and does that at SIGTERM.
    fn server(dir: &Path, at_term: &str) -> Server {
        let mut command = Command::new("sh");
        let script = format!("trap '{at_term}' TERM; touch ready; while :; do sleep 0.02; done");
        command.args(["-c", &script]).current_dir(dir);
        let mut server = Server::start(command, &dir.join("log")).unwrap();
        let ready = dir.join("ready");
        let limit = Duration::from_secs(60);
        server.wait_until(&ready, limit, &Stop::default(), || ready.exists()).unwrap();
        server
    }

    #[test]
    fn a_server_that_is_dropped_ends_in_order() {
        let dir = tempfile::tempdir().unwrap();
        drop(server(dir.path(), "touch unmounted; exit"));
        assert!(dir.path().join("unmounted").exists());
    }

    #[test]
    fn a_server_that_does_not_end_is_killed_and_waited_for_once() {
        let dir = tempfile::tempdir().unwrap();
        let (server, began) = (server(dir.path(), ""), Instant::now());
        let pid = server.pid();
        let error = server.stop().unwrap_err().to_string();
        assert!(error.contains("was killed"), "{error}");
        assert!(began.elapsed() < 2 * GRACE, "{:?}", began.elapsed());
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}
