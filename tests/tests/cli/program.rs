//! Programs that end in time and never outlive the test.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

/// How long a program may take unless a test says otherwise; a busy machine is slow.
const PATIENCE: Duration = Duration::from_secs(180);

/// What a program left behind.
#[derive(Debug)]
pub(crate) struct Output {
    /// How it ended.
    pub(crate) status: ExitStatus,
    /// What it wrote to stdout.
    pub(crate) stdout: String,
    /// What it wrote to stderr.
    pub(crate) stderr: String,
}

impl Output {
    /// Its stdout, once it is known to have ended well.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert!(self.status.success(), "{}: {}{}", self.status, self.stdout, self.stderr);
        self.stdout
    }

    /// Its stderr, once it is known to have ended with this status.
    #[track_caller]
    pub(crate) fn failed(self, code: i32) -> String {
        assert_eq!(self.status.code(), Some(code), "{}{}", self.stdout, self.stderr);
        self.stderr
    }
}

/// A program under way, killed when this drops.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    name: String,
    stdout: File,
    stderr: File,
}

impl Running {
    /// Start it, with nothing on stdin.
    #[track_caller]
    pub(crate) fn start(mut command: Command) -> Running {
        let name = command.get_program().to_string_lossy().into_owned();
        let file = || tempfile::tempfile().expect("a temporary file");
        let (stdout, stderr) = (file(), file());
        let to = |file: &File| Stdio::from(file.try_clone().expect("a descriptor"));
        command.stdin(Stdio::null()).stdout(to(&stdout)).stderr(to(&stderr));
        // SAFETY: between fork and exec it makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        match command.spawn() {
            Ok(child) => Running { child, name, stdout, stderr },
            Err(error) => panic!("cannot start {name}: {error}"),
        }
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Send it a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id() as i32).expect("a process id");
        kill_process(pid, signal).expect("a signal sent");
    }

    /// Whether it has ended.
    pub(crate) fn ended(&mut self) -> bool {
        self.child.try_wait().expect("waited").is_some()
    }

    /// What it has written to stdout so far.
    pub(crate) fn stdout(&mut self) -> String {
        read_all(&mut self.stdout)
    }

    /// What it has written to stderr so far.
    pub(crate) fn stderr(&mut self) -> String {
        read_all(&mut self.stderr)
    }

    /// Wait until it ends.
    #[track_caller]
    pub(crate) fn wait(mut self) -> Output {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("waited") {
                return Output { status, stdout: self.stdout(), stderr: self.stderr() };
            }
            if Instant::now() > until {
                let (out, err) = (self.stdout(), self.stderr());
                panic!("{} did not end within {PATIENCE:?}: {out}{err}", self.name);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Wait until `look` finds something.
    #[track_caller]
    pub(crate) fn until<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut(&mut Running) -> Option<T>,
    ) -> T {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look(self) {
                return found;
            }
            if self.ended() || Instant::now() > until {
                let (out, err) = (self.stdout(), self.stderr());
                panic!("{}: no {what}: {out}{err}", self.name);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_all(file: &mut File) -> String {
    // The program writes at its own end of the same open file: read by place, leave its place be.
    let mut text = String::new();
    let mut own = File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file)))
        .expect("the output file");
    own.rewind().and_then(|()| own.read_to_string(&mut text)).expect("the output");
    text
}

/// A program to run. Fails with the name of its package where it is not installed.
#[track_caller]
pub(crate) fn program(name: &str, package: &str) -> Command {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut folders = path.split(':').chain(["/usr/sbin", "/sbin"]);
    let found = folders.find_map(|folder| {
        let file = std::path::Path::new(folder).join(name);
        file.is_file().then_some(file)
    });
    match found {
        Some(file) => Command::new(file),
        None => {
            panic!("{name} is not installed: apt-get install {package} (or scripts/setup.sh test)")
        }
    }
}

/// A Python program with libnbd's module. Debian's Python has it, another one on PATH may not.
pub(crate) fn python(text: &str, args: &[&str]) -> Command {
    let mut command = Command::new("/usr/bin/python3");
    command.arg("-c").arg(text).args(args);
    command
}
