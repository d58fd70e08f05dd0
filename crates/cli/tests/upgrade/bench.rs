//! A folder with servers, and what is done with them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::said::members;

/// What a program says, by the channel that it was given, before it has prepared anything: that it is ready.
pub const READY: &str = "exec 3>&\"${RINGTAP_HANDOVER#*:}\"; printf '\\2\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0' >&3";

pub const RINGTAP: &str = env!("CARGO_BIN_EXE_ringtap");

/// A folder, and the servers that began there: they end with it.
pub struct Bench {
    pub dir: TempDir,
    pub pids: Vec<u32>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        for pid in &self.pids {
            let _ = kill_process(self::pid(*pid), Signal::KILL);
        }
        // Of those that were killed.
        let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
        let places = mounts.lines().filter_map(|line| line.split(' ').nth(1));
        for place in places.filter(|place| place.starts_with(&*self.dir.path().to_string_lossy())) {
            let _ = Command::new("umount").args(["-l", place]).status();
        }
    }
}

pub fn pid(of: u32) -> Pid {
    Pid::from_raw(of as i32).expect("a process")
}

pub fn lives(of: u32) -> bool {
    let state = fs::read_to_string(format!("/proc/{of}/stat")).unwrap_or_default();
    test_kill_process(pid(of)).is_ok() && !state.contains(") Z")
}

pub fn ends(of: u32) {
    let until = Instant::now() + Duration::from_secs(30);
    while lives(of) {
        assert!(Instant::now() < until, "process {of} does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Have a server end in order.
pub fn stop(of: u32) {
    let _ = kill_process(pid(of), Signal::TERM);
    ends(of);
}

pub fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

impl Bench {
    pub fn new() -> Bench {
        let bench =
            Bench { dir: tempfile::tempdir_in("/var/tmp").expect("a folder"), pids: vec![] };
        bench.install_again();
        bench
    }

    /// The program, where others can be put in its place.
    pub fn program(&self) -> PathBuf {
        self.path("bin/ringtap")
    }

    fn put(&self, there: &dyn Fn(&Path)) {
        let (program, next) = (self.program(), self.path("bin/next"));
        fs::create_dir_all(self.path("bin")).expect("a folder");
        // Links to one file are not renamed over each other.
        let _ = fs::remove_file(&next);
        let _ = fs::remove_file(&program);
        there(&next);
        fs::rename(next, program).expect("in its place");
    }

    /// Put the program there.
    pub fn install_again(&self) {
        self.put(&|next| {
            fs::hard_link(RINGTAP, next)
                .or_else(|_| fs::copy(RINGTAP, next).map(drop))
                .expect("the program");
        });
    }

    /// Put the program there, as another file.
    pub fn install_a_copy(&self) {
        self.install_file(Path::new(RINGTAP));
    }

    /// Put another program there.
    pub fn install_file(&self, program: &Path) {
        self.put(&|next| _ = fs::copy(program, next).expect("the program"));
    }

    /// Put a script there.
    pub fn install(&self, text: &str) {
        self.put(&|next| write_script(next, text));
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn command(&self, line: &str) -> Command {
        self.command_of(Path::new(RINGTAP), line)
    }

    fn command_of(&self, program: &Path, line: &str) -> Command {
        let mut command = Command::new(program);
        command.args(line.split_whitespace()).current_dir(self.dir.path());
        command.env("RINGTAP_STATE_DIR", self.path("state"));
        command
    }

    pub fn ends_with(&self, line: &str, code: i32) -> String {
        let output = self.command(line).output().expect("it runs");
        assert_eq!(output.status.code(), Some(code), "{line}: {}\n{}", said(&output), self.log());
        said(&output)
    }

    /// Begin a server, confined as far as that can be where nothing else is said; its process.
    pub fn serve(&mut self, line: &str) -> (Child, u32) {
        let line = &match line.contains("--sandbox") {
            true => line.to_owned(),
            false => line.replacen(' ', " --sandbox auto ", 1),
        };
        fs::create_dir_all(self.path("state")).expect("a folder");
        let log = fs::File::options().append(true).create(true).open(self.path("log"));
        let mut command = self.command_of(&self.program(), line);
        command.stdout(Stdio::piped()).stderr(log.expect("a log"));
        command.env("NOTIFY_SOCKET", self.path("notify"));
        let mut child = command.spawn().expect("it begins");
        self.pids.push(child.id());
        let mut ready = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("its output"));
        out.read_line(&mut ready).expect("a line");
        assert_eq!(ready.trim(), "ready", "{}", self.log());
        // Who comes after it writes there, too.
        std::thread::spawn(move || for _ in out.lines() {});
        let pid = child.id();
        (child, pid)
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Have the server followed by the next: which it is.
    pub fn upgrade(&mut self, of: &str) -> u32 {
        let output =
            self.command(&format!("upgrade {of} --output json")).output().expect("it runs");
        self.followed_by(&output)
    }

    /// The process that serves from now on, as `ringtap upgrade --output json` has said.
    pub fn followed_by(&mut self, output: &Output) -> u32 {
        assert!(output.status.success(), "{}\n{}", said(output), self.log());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let digits: String = text.chars().filter(char::is_ascii_digit).collect();
        let pid = digits.parse().expect("a process");
        self.pids.push(pid);
        pid
    }

    /// The same over NBD.
    pub fn nbd_load(&self, socket: &str, export: &str, seconds: u32) -> Child {
        let uri = format!("nbd+unix:///{export}?socket={}", self.path(socket).display());
        let mut command = Command::new("fio");
        command.args([
            "--name=load",
            "--ioengine=nbd",
            "--rw=randrw",
            "--bs=4k",
            "--iodepth=16",
            "--verify=crc32c",
            "--size=16M",
            "--numjobs=2",
            "--offset_increment=16M",
            "--time_based",
            "--verify_fatal=1",
            "--fsync=64",
            "--output-format=json",
        ]);
        command.arg(format!("--uri={uri}")).arg(format!("--runtime={seconds}"));
        command.current_dir(self.dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("fio begins")
    }

    /// Reads over NBD, for so long.
    pub fn nbd_reads(&self, socket: &str, export: &str, seconds: u32) -> Child {
        let uri = format!("nbd+unix:///{export}?socket={}", self.path(socket).display());
        let mut command = Command::new("fio");
        command.args(["--name=reads", "--ioengine=nbd", "--rw=randread", "--bs=4k", "--size=16M"]);
        command.args(["--iodepth=4", "--time_based", "--readonly", "--output-format=json"]);
        command.arg(format!("--uri={uri}")).arg(format!("--runtime={seconds}"));
        command.current_dir(self.dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("fio begins")
    }

    /// A program of a few words; where it is.
    pub fn script(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        write_script(&path, text);
        path.display().to_string()
    }

    /// A load that reads back what it wrote, for so long.
    pub fn load(&self, socket: &str, seconds: u32) -> Child {
        let seconds = seconds.to_string();
        // Built beside the program under test.
        let mut command = Command::new(Path::new(RINGTAP).with_file_name("ringtap-lab"));
        command.current_dir(self.dir.path()).args(["load", "--socket", socket]);
        command.args(["--rw", "randrw", "--bs", "4k", "--depth", "16", "--queues", "2"]);
        command.args(["--seconds", &seconds, "--fsync-every", "64", "--verify"]);
        command.args(["--output", "json"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it begins")
    }

    pub fn verified(&self, load: Child) {
        let output = load.wait_with_output().expect("it ends");
        let text = said(&output);
        assert!(output.status.success(), "{text}\n{}", self.log());
        let blocks = members(&text, "blocks").first().and_then(Value::as_u64).unwrap_or(0);
        assert!(blocks > 100, "{text}");
    }
}

/// An image of a format, or an encrypted qcow2: then of the secret in the file `key`.
pub fn image(bench: &Bench, name: &str) -> &'static str {
    let (file, options) = match name {
        "raw" => ("a.raw", "-f raw"),
        "vpc" => ("a.vhd", "-f vpc"),
        "luks" => ("a.luks", "-f luks --secret file:key -o iter-time=10"),
        "encrypted" => {
            ("a.qcow2", "-f qcow2 --secret file:key -o encrypt.format=luks,encrypt.iter-time=10")
        }
        _ => ("a.qcow2", "-f qcow2"),
    };
    if options.contains("file:key") {
        fs::write(bench.path("key"), "a secret").expect("a file");
        fs::set_permissions(bench.path("key"), fs::Permissions::from_mode(0o600))
            .expect("its mode");
    }
    bench.ends_with(&format!("create -q {options} {file} 64M"), 0);
    file
}

fn write_script(path: &Path, text: &str) {
    fs::write(path, format!("#!/bin/bash\n{text}\n")).expect("a script");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("its mode");
}

/// Whether files can be mounted here.
pub fn mounts() -> bool {
    rustix::process::geteuid().is_root() && fs::File::open("/dev/fuse").is_ok()
}
