//! A `ringtap serve` under test, and programs run beside it with an end to their time.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// How long anything that should be quick may take on a busy machine.
pub fn patience() -> Duration {
    Duration::from_secs(60)
}

/// The binary under test: `RINGTAP`, or the one built beside this test.
pub fn ringtap() -> PathBuf {
    if let Some(path) = std::env::var_os("RINGTAP") {
        return path.into();
    }
    built("ringtap")
}

/// The lab's binary: `RINGTAP_LAB`, or the one built beside this test.
pub fn lab() -> PathBuf {
    std::env::var_os("RINGTAP_LAB").map_or_else(|| built("ringtap-lab"), Into::into)
}

fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the test's own path");
    let path = test.ancestors().nth(2).expect("the target folder").join(name);
    assert!(path.is_file(), "{} is missing: cargo build -p {name}", path.display());
    path
}

/// A `ringtap serve` that is ready; killed when dropped.
pub struct Server {
    child: Child,
    stderr: mpsc::Receiver<String>,
}

impl Server {
    /// Start it and wait until it says that it is ready.
    pub fn start<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Server {
        Server::start_as("serve", args)
    }

    /// The same, with what it knows of images in a folder of its own.
    pub fn start_in<S: AsRef<OsStr>>(state: &Path, args: impl IntoIterator<Item = S>) -> Server {
        let mut command = Command::new(ringtap());
        Server::begin(command.arg("serve").args(args).env("STATE_DIRECTORY", state))
    }

    /// Start a `ringtap daemon`, and wait as for the other.
    pub fn daemon<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Server {
        Server::start_as("daemon", args)
    }

    fn start_as<S: AsRef<OsStr>>(verb: &str, args: impl IntoIterator<Item = S>) -> Server {
        Server::begin(Command::new(ringtap()).arg(verb).args(args))
    }

    fn begin(command: &mut Command) -> Server {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("ringtap starts");
        let (said, ready) = mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().expect("its output"));
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = said.send(line);
            }
        });
        let (told, stderr) = mpsc::channel();
        let mut errors = child.stderr.take().expect("its errors");
        thread::spawn(move || {
            let mut text = String::new();
            let _ = errors.read_to_string(&mut text);
            let _ = told.send(text);
        });
        let mut server = Server { child, stderr };
        if !ready.recv_timeout(patience()).is_ok_and(|line| line.contains("ready")) {
            let _ = server.child.kill();
            let _ = server.child.wait();
            panic!("ringtap was not ready: {}", server.said());
        }
        server
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Send it a signal.
    pub fn signal(&self, signal: i32) {
        let pid = rustix::process::Pid::from_raw(self.pid() as i32).expect("a process");
        let signal = rustix::process::Signal::from_named_raw(signal).expect("a signal");
        rustix::process::kill_process(pid, signal).expect("it is there");
    }

    /// As `kill -9`.
    pub fn kill(mut self) {
        self.kill_now();
    }

    /// The same, of one that another takes the place of.
    pub fn kill_now(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// SIGTERM; what it said on stderr, once it has ended well.
    pub fn stop(self) -> String {
        self.signal(libc::SIGTERM);
        self.ends()
    }

    /// SIGTERM; what it said on stderr, once it has ended with a failure.
    pub fn stop_badly(mut self) -> String {
        self.signal(libc::SIGTERM);
        let (status, said) = self.end();
        assert!(!status.success(), "ringtap ended well: {said}");
        said
    }

    /// What it said on stderr, once it has ended well.
    pub fn ends(mut self) -> String {
        let (status, said) = self.end();
        assert!(status.success(), "ringtap ended with {status}: {said}");
        said
    }

    fn end(&mut self) -> (ExitStatus, String) {
        let end = Instant::now() + patience();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("its status") {
                break status;
            }
            assert!(Instant::now() < end, "ringtap does not stop");
            thread::sleep(Duration::from_millis(5));
        };
        (status, self.said())
    }

    fn said(&self) -> String {
        self.stderr.recv_timeout(Duration::from_secs(5)).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("ringtap said: {}", self.said());
        }
    }
}

/// Run a program to its end, which must come within [`patience`].
pub fn program<S: AsRef<OsStr>>(
    name: &str,
    package: &str,
    args: impl IntoIterator<Item = S>,
) -> Output {
    let mut command = Command::new("timeout");
    command.arg(patience().as_secs().to_string()).arg(name).args(args);
    let output = command.stdin(Stdio::null()).output().expect("timeout of coreutils");
    let code = output.status.code();
    assert!(code != Some(127), "{name} is missing: apt-get install {package}");
    assert!(code != Some(124), "{name} did not end");
    output
}
