//! Programs that are written down before they run, on a processor of their own or going to the background by themselves.

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions};

use super::{Server, listens, name_of};
use crate::error::{Error, Result};
use crate::stop::Stop;

/// How long a server may take until it listens.
const START: Duration = Duration::from_secs(10);
/// How often who waits looks again.
const TICK: Duration = Duration::from_millis(2);

/// How a program is started.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Name in PATH, or path.
    pub program: PathBuf,
    /// Arguments before its own, where `program` is what runs it: a dynamic linker.
    pub runner: Vec<OsString>,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Variables added to its environment.
    pub env: Vec<(String, OsString)>,
    /// Where it writes its process id, if it goes to the background, to a session of its own.
    pub pid_file: Option<PathBuf>,
    /// The only processor that it runs on.
    pub cpu: Option<usize>,
}

impl Launch {
    /// A program and its arguments.
    pub fn new<I: Into<OsString>>(
        program: impl Into<PathBuf>,
        args: impl IntoIterator<Item = I>,
    ) -> Launch {
        let args = args.into_iter().map(Into::into).collect();
        Launch {
            program: program.into(),
            runner: Vec::new(),
            args,
            env: Vec::new(),
            pid_file: None,
            cpu: None,
        }
    }

    /// The same program, asked for its version.
    pub fn version(&self) -> Launch {
        let args = vec!["--version".into()];
        Launch { args, pid_file: None, ..self.clone() }
    }

    /// The same on that processor alone.
    pub fn on(&self, cpu: Option<usize>) -> Launch {
        Launch { cpu, ..self.clone() }
    }

    /// Runs it to its end, well within `limit`, and returns what it printed.
    pub fn output(&self, limit: Duration, stop: &Stop) -> Result<String> {
        super::run(self.command(), limit, stop).map(|output| output.stdout)
    }

    #[allow(unsafe_code)]
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(self.runner.iter().chain(&self.args))
            .envs(self.env.iter().map(|(key, value)| (key, value)));
        if let Some(cpu) = self.cpu {
            let mut set = rustix::thread::CpuSet::new();
            set.set(cpu);
            // SAFETY: between fork and exec only a system call is made, without allocation.
            unsafe {
                command.pre_exec(move || Ok(rustix::thread::sched_setaffinity(None, &set)?));
            }
        }
        command
    }
}

/// A running program: terminated, and if need be killed, when dropped.
pub struct Process {
    // Until the server that was started has ended, who went to the background is its child and not ours.
    server: Server,
    background: Option<Background>,
}

impl Process {
    /// Starts `launch`; its standard error goes to `log`.
    pub fn start(launch: &Launch, log: &Path) -> Result<Process> {
        let expected = |file| Background::expected(&launch.program, file);
        let background = launch.pid_file.as_deref().map(expected).transpose()?;
        Ok(Process { server: Server::start(launch.command(), log)?, background })
    }

    /// The same, and the pipe that it prints to.
    pub fn start_piped(launch: &Launch, log: &Path) -> Result<(Process, ChildStdout)> {
        let (server, pipe) = Server::start_piped(launch.command(), log)?;
        Ok((Process { server, background: None }, pipe))
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        let in_background = self.background.as_ref().and_then(|background| background.pid);
        in_background.map_or(self.server.pid(), |pid| pid.as_raw_nonzero().get() as u32)
    }

    /// Waits until the program listens on the UNIX socket `socket`, without connecting: some servers take only one client.
    pub fn wait_listening(&mut self, socket: &Path, stop: &Stop) -> Result<()> {
        match &mut self.background {
            None => self.server.wait_for_socket_file(socket, START, stop),
            Some(background) => background.wait_listening(socket, stop),
        }
    }

    /// The end of its log.
    pub fn last_words(&self) -> String {
        self.server.said()
    }
}

/// A server that goes to the background once it has been started, and becomes our child again.
struct Background {
    program: String,
    pid_file: PathBuf,
    pid: Option<Pid>,
}

impl Background {
    fn expected(program: &Path, pid_file: &Path) -> Result<Background> {
        let _may_not_be_there = fs::remove_file(pid_file);
        let program = name_of(program.as_os_str());
        let adopted = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
        adopted.map_err(|error| Error::Program {
            program: program.clone(),
            what: format!("would be lost in the background: {error}"),
            said: String::new(),
        })?;
        Ok(Background { program, pid_file: pid_file.to_owned(), pid: None })
    }

    /// Its process id, once it is written.
    fn look(&mut self) {
        if self.pid.is_none() {
            let text = fs::read_to_string(&self.pid_file).unwrap_or_default();
            self.pid = text.trim().parse().ok().and_then(Pid::from_raw);
        }
    }

    fn wait_listening(&mut self, socket: &Path, stop: &Stop) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < START {
            stop.check()?;
            self.look();
            if self.pid.is_some() && listens(socket) {
                return Ok(());
            }
            std::thread::sleep(TICK);
        }
        Err(Error::Program {
            program: self.program.clone(),
            what: format!(
                "has left nobody in the background, by {}, who listens on {} after {START:?}",
                self.pid_file.display(),
                socket.display()
            ),
            said: String::new(),
        })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.look();
        let Some(pid) = self.pid else { return };
        let ended =
            || !matches!(rustix::process::waitpid(Some(pid), WaitOptions::NOHANG), Ok(None));
        if ended() {
            return;
        }
        let _ = rustix::process::kill_process(pid, Signal::TERM);
        let begin = Instant::now();
        while !ended() {
            if begin.elapsed() > START {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
                let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
                return;
            }
            std::thread::sleep(TICK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_a_program_into_the_background() {
        let dir = tempfile::tempdir().unwrap();
        let (pid_file, socket) = (dir.path().join("pid"), dir.path().join("socket"));
        let script = format!(
            "import os, signal, socket\n\
             if os.fork(): os._exit(0)\n\
             os.setsid()\n\
             s = socket.socket(socket.AF_UNIX); s.bind('{}'); s.listen()\n\
             open('{}', 'w').write(str(os.getpid()))\n\
             signal.pause()",
            socket.display(),
            pid_file.display()
        );
        let launch = Launch::new("python3", ["-c", &script]);
        let launch = Launch { pid_file: Some(pid_file.clone()), ..launch };
        let mut process = Process::start(&launch, &dir.path().join("log")).unwrap();
        process.wait_listening(&socket, &Stop::default()).unwrap();
        assert_eq!(fs::read_to_string(pid_file).unwrap(), process.id().to_string());
        let proc = format!("/proc/{}", process.id());
        assert!(Path::new(&proc).exists());
        drop(process);
        assert!(!Path::new(&proc).exists(), "left behind");
    }

    #[test]
    fn a_program_runs_on_its_processor() {
        let launch = Launch::new("sh", ["-c", "grep Cpus_allowed_list: /proc/self/status"]);
        let said = launch.on(Some(0)).output(Duration::from_secs(60), &Stop::default()).unwrap();
        assert_eq!(said.split_whitespace().last(), Some("0"), "{said}");
    }

    #[test]
    fn failures_carry_the_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let launch = Launch::new("sh", ["-c", "echo out; echo no such disk >&2; exit 3"]);
        let error =
            launch.output(Duration::from_secs(60), &Stop::default()).unwrap_err().to_string();
        assert!(error.contains("no such disk") && error.contains('3'), "{error}");
        let mut process = Process::start(&launch, &dir.path().join("log")).unwrap();
        let error = process
            .wait_listening(&dir.path().join("socket"), &Stop::default())
            .unwrap_err()
            .to_string();
        assert!(error.contains("no such disk") && error.contains('3'), "{error}");
    }
}
