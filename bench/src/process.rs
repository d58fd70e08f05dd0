//! Programs that are started for a measurement and stopped after it, on every path.

use crate::interrupt;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, WaitOptions};
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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
    /// Where it writes its process id, if it goes to the background.
    pub pid_file: Option<PathBuf>,
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
        }
    }

    /// The same program, asked for its version.
    pub fn version(&self) -> Launch {
        let args = vec!["--version".into()];
        Launch { args, pid_file: None, ..self.clone() }
    }
}

/// A program that goes to the background.
struct Daemon {
    pid_file: PathBuf,
    pid: Option<Pid>,
}

/// A running program: terminated, and if need be killed, when dropped.
pub struct Process {
    child: Child,
    daemon: Option<Daemon>,
    name: String,
    log: PathBuf,
}

impl Process {
    /// Starts `launch`; its standard error, and its output unless piped, go to `log`. With a
    /// number in `cpu` it runs on that CPU alone.
    pub fn start(launch: &Launch, log: &Path, pipe: bool, cpu: Option<usize>) -> Result<Process> {
        let name = launch.program.display().to_string();
        let output =
            File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = Command::new(&launch.program);
        command
            .args(launch.runner.iter().chain(&launch.args))
            .envs(launch.env.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .stderr(output.try_clone()?)
            .stdout(if pipe { Stdio::piped() } else { output.into() });
        let daemon = launch.pid_file.clone().map(|pid_file| Daemon { pid_file, pid: None });
        if let Some(daemon) = &daemon {
            let _ = fs::remove_file(&daemon.pid_file);
            // What goes to the background becomes our child again.
            rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        }
        // SAFETY: between fork and exec only two system calls are made, without allocation.
        unsafe {
            command.pre_exec(move || {
                // Outlives us by no means, not even after kill -9.
                let kill = Signal::KILL;
                rustix::process::set_parent_process_death_signal(Some(kill))?;
                if let Some(cpu) = cpu {
                    let mut set = rustix::thread::CpuSet::new();
                    set.set(cpu);
                    rustix::thread::sched_setaffinity(None, &set)?;
                }
                Ok(())
            })
        };
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Process { child, daemon, name, log: log.to_path_buf() })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        match &self.daemon {
            Some(Daemon { pid: Some(pid), .. }) => pid.as_raw_nonzero().get() as u32,
            _ => self.child.id(),
        }
    }

    /// Fails once the program has ended; learns the process id of one in the background.
    fn check_running(&mut self) -> Result<()> {
        let Some(status) = self.child.try_wait()? else {
            return Ok(());
        };
        match &mut self.daemon {
            Some(daemon) if status.success() => {
                if daemon.pid.is_none() {
                    // Not written yet is no error.
                    let text = fs::read_to_string(&daemon.pid_file).unwrap_or_default();
                    daemon.pid = text.trim().parse().ok().and_then(Pid::from_raw);
                }
                Ok(())
            }
            _ => {
                bail!("{} ended with {status} instead of serving: {}", self.name, self.last_words())
            }
        }
    }

    /// Waits until the program listens on the UNIX socket `socket`.
    ///
    /// Asks the kernel's list of sockets: a connection made to try would be a client, and some
    /// servers take only one.
    pub fn wait_listening(&mut self, socket: &Path) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(10) {
            self.check_running()?;
            let known = self.daemon.as_ref().is_none_or(|daemon| daemon.pid.is_some());
            if known && listening(socket)? {
                return Ok(());
            }
            interrupt::sleep(Duration::from_millis(2))?;
        }
        bail!(
            "{} does not listen on {} after 10 s: {}",
            self.name,
            socket.display(),
            self.last_words()
        )
    }

    /// Waits for the program to end well within `limit` and returns what it printed.
    pub fn output(mut self, limit: Duration) -> Result<String> {
        let pipe = self.child.stdout.take();
        let reader = std::thread::spawn(move || match pipe {
            Some(pipe) => std::io::read_to_string(pipe),
            None => Ok(String::new()),
        });
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if begin.elapsed() > limit {
                bail!("{} still ran after {limit:?}: {}", self.name, self.last_words());
            }
            interrupt::sleep(Duration::from_millis(5))?;
        };
        let text = match reader.join() {
            Ok(text) => text.with_context(|| format!("cannot read what {} prints", self.name))?,
            Err(_) => bail!("reading what {} prints panicked", self.name),
        };
        if !status.success() {
            bail!("{} ended with {status}: {}", self.name, self.last_words());
        }
        Ok(text)
    }

    /// The pipe that the program prints to, once.
    pub fn take_stdout(&mut self) -> Option<std::process::ChildStdout> {
        self.child.stdout.take()
    }

    /// The end of its log, on one line.
    pub fn last_words(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(3).collect();
        let line = lines.into_iter().rev().collect::<Vec<_>>().join(" | ");
        line.chars().take(300).collect()
    }

    /// Never to an id that is no longer ours: one that was waited for may be another's by now.
    fn signal(&mut self, signal: Signal) {
        let child = matches!(self.child.try_wait(), Ok(None)).then(|| self.child.id());
        let daemon = self.daemon.as_ref().and_then(|daemon| daemon.pid);
        let pid = daemon.or(child.and_then(|id| Pid::from_raw(id as i32)));
        if let Some(pid) = pid {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    fn ended(&mut self) -> bool {
        let child = !matches!(self.child.try_wait(), Ok(None));
        match &self.daemon {
            Some(Daemon { pid: Some(pid), .. }) => {
                let waited = rustix::process::waitpid(Some(*pid), WaitOptions::NOHANG);
                child && !matches!(waited, Ok(None))
            }
            _ => child,
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have gone to the background without being asked for its id yet.
        let _ = self.check_running();
        self.signal(Signal::TERM);
        let begin = Instant::now();
        while !self.ended() {
            if begin.elapsed() > Duration::from_secs(10) {
                self.signal(Signal::KILL);
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// True if somebody listens on the UNIX socket `path`.
pub fn listening(path: &Path) -> Result<bool> {
    let sockets = fs::read_to_string("/proc/net/unix").context("cannot read /proc/net/unix")?;
    let path = path.to_string_lossy();
    Ok(sockets.lines().any(|line| {
        let mut fields = line.split_whitespace();
        // Flags 0x10000: accepts connections.
        fields.nth(3) == Some("00010000") && fields.nth(3) == Some(&*path)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn sees_who_listens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        assert!(!listening(&path).unwrap());
        let listener = UnixListener::bind(&path).unwrap();
        assert!(listening(&path).unwrap());
        drop(listener);
        assert!(path.exists() && !listening(&path).unwrap());
    }

    #[test]
    fn follows_a_program_into_the_background() {
        let dir = tempfile::tempdir().unwrap();
        let (pid_file, socket) = (dir.path().join("pid"), dir.path().join("socket"));
        let script = format!(
            "import os, signal, socket\n\
             if os.fork(): os._exit(0)\n\
             s = socket.socket(socket.AF_UNIX); s.bind('{}'); s.listen()\n\
             open('{}', 'w').write(str(os.getpid()))\n\
             signal.pause()",
            socket.display(),
            pid_file.display()
        );
        let launch = Launch::new("python3", ["-c", &script]);
        let launch = Launch { pid_file: Some(pid_file.clone()), ..launch };
        let mut process = Process::start(&launch, &dir.path().join("log"), false, None).unwrap();
        process.wait_listening(&socket).unwrap();
        assert_eq!(fs::read_to_string(pid_file).unwrap(), process.id().to_string());
        let proc = format!("/proc/{}", process.id());
        assert!(Path::new(&proc).exists());
        drop(process);
        assert!(!Path::new(&proc).exists(), "left behind");
    }

    #[test]
    fn failures_carry_the_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let script = "echo out; echo no such disk >&2; exit 3";
        let launch = Launch::new("sh", ["-c", script]);
        let log = dir.path().join("log");
        let process = Process::start(&launch, &log, true, Some(0)).unwrap();
        let error = process.output(Duration::from_secs(10)).unwrap_err().to_string();
        assert!(error.contains("no such disk") && error.contains('3'), "{error}");
        let sleep = Launch::new("sleep", ["1000"]);
        let process = Process::start(&sleep, &log, true, None).unwrap();
        let pid = process.id();
        let error = process.output(Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("still ran"), "{error}");
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "left behind");
    }
}
