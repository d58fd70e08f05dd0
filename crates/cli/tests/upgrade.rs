//! Servers that are followed by others while their guests go on.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;

const RINGTAP: &str = env!("CARGO_BIN_EXE_ringtap");

/// A folder, and the servers that began there: they end with it.
struct Bench {
    dir: TempDir,
    pids: Vec<u32>,
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

fn pid(of: u32) -> Pid {
    Pid::from_raw(of as i32).expect("a process")
}

fn lives(of: u32) -> bool {
    let state = fs::read_to_string(format!("/proc/{of}/stat")).unwrap_or_default();
    test_kill_process(pid(of)).is_ok() && !state.contains(") Z")
}

fn ends(of: u32) {
    let until = Instant::now() + Duration::from_secs(30);
    while lives(of) {
        assert!(Instant::now() < until, "process {of} does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

impl Bench {
    fn new() -> Bench {
        Bench { dir: tempfile::tempdir_in("/var/tmp").expect("a folder"), pids: vec![] }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(RINGTAP);
        command.args(line.split_whitespace()).current_dir(self.dir.path());
        command.env("RINGTAP_STATE_DIR", self.path("state"));
        command
    }

    fn ends_with(&self, line: &str, code: i32) -> String {
        let output = self.command(line).output().expect("it runs");
        assert_eq!(output.status.code(), Some(code), "{line}: {}", said(&output));
        said(&output)
    }

    /// Begin a server; its process.
    fn serve(&mut self, line: &str) -> (Child, u32) {
        fs::create_dir_all(self.path("state")).expect("a folder");
        let log = fs::File::options().append(true).create(true).open(self.path("log"));
        let mut command = self.command(line);
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

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Have the server followed by the next: which it is.
    fn upgrade(&mut self, of: &str) -> u32 {
        let output =
            self.command(&format!("upgrade {of} --output json")).output().expect("it runs");
        assert!(output.status.success(), "{}\n{}", said(&output), self.log());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let digits: String = text.chars().filter(char::is_ascii_digit).collect();
        let pid = digits.parse().expect("a process");
        self.pids.push(pid);
        pid
    }

    /// The same over NBD.
    fn nbd_load(&self, socket: &str, export: &str, seconds: u32) -> Child {
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
    fn nbd_reads(&self, socket: &str, export: &str, seconds: u32) -> Child {
        let uri = format!("nbd+unix:///{export}?socket={}", self.path(socket).display());
        let mut command = Command::new("fio");
        command.args(["--name=reads", "--ioengine=nbd", "--rw=randread", "--bs=4k", "--size=16M"]);
        command.args(["--iodepth=4", "--time_based", "--readonly", "--output-format=json"]);
        command.arg(format!("--uri={uri}")).arg(format!("--runtime={seconds}"));
        command.current_dir(self.dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("fio begins")
    }

    /// A load that reads back what it wrote, for so long.
    fn load(&self, socket: &str, seconds: u32) -> Child {
        let seconds = seconds.to_string();
        // Built beside the program under test.
        let mut command = Command::new(Path::new(RINGTAP).with_file_name("ringtap-lab"));
        command.current_dir(self.dir.path()).args(["load", "--socket", socket]);
        command.args(["--rw", "randrw", "--bs", "4k", "--depth", "16", "--queues", "2"]);
        command.args(["--seconds", &seconds, "--fsync-every", "64", "--verify"]);
        command.args(["--output", "json"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it begins")
    }

    fn verified(&self, load: Child) {
        let output = load.wait_with_output().expect("it ends");
        let text = said(&output);
        assert!(output.status.success(), "{text}\n{}", self.log());
        let verified = text.split("\"blocks\":").nth(1).map(|rest| {
            rest.chars()
                .skip_while(|c| *c == ' ')
                .take_while(char::is_ascii_digit)
                .collect::<String>()
        });
        let blocks: u64 = verified.and_then(|digits| digits.parse().ok()).unwrap_or(0);
        assert!(blocks > 100, "{text}");
    }

    fn script(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        fs::write(&path, format!("#!/bin/bash\n{text}\n")).expect("a script");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its mode");
        path.display().to_string()
    }
}

fn image(bench: &Bench, name: &str) -> &'static str {
    let (file, format) = match name {
        "raw" => ("a.raw", "raw"),
        _ => ("a.qcow2", "qcow2"),
    };
    bench.ends_with(&format!("create -q -f {format} {file} 64M"), 0);
    file
}

#[test]
fn guests_go_on_over_many_upgrades() {
    for format in ["raw", "qcow2"] {
        let mut bench = Bench::new();
        let file = image(&bench, format);
        let line = format!(
            "serve --control unix:c.sock --pid-file pid {file} -f {format} --vhost-user vu.sock"
        );
        let manager = UnixDatagram::bind(bench.path("notify")).expect("a socket");
        let (mut first, mut server) = bench.serve(&line);
        let load = bench.load("vu.sock", 4);
        std::thread::sleep(Duration::from_secs(1));
        for by_signal in [false, true, false] {
            let of = if by_signal { server.to_string() } else { "unix:c.sock".to_owned() };
            let next = bench.upgrade(&of);
            assert_ne!(next, server);
            if server == first.id() {
                assert!(first.wait().expect("it ends").success(), "{}", bench.log());
            }
            ends(server);
            server = next;
            assert_eq!(
                fs::read_to_string(bench.path("pid")).expect("it is written").trim(),
                server.to_string()
            );
            std::thread::sleep(Duration::from_millis(300));
        }
        bench.verified(load);
        // The service manager is told which process is the unit's.
        manager.set_nonblocking(true).expect("its flags");
        let mut told = String::new();
        let mut message = [0; 4096];
        while let Ok(len) = manager.recv(&mut message) {
            told += &String::from_utf8_lossy(&message[..len]);
            told += "\n";
        }
        assert!(told.contains(&format!("MAINPID={server}\n")), "{told}");
        assert!(told.matches("READY=1").count() == 4 && !told.contains("STOPPING"), "{told}");
        let same = bench.ends_with(&format!("upgrade {server} --if-changed"), 0);
        assert!(same.is_empty() && lives(server), "{same}");
        // What was written after the last of them outlives a kill, as ever.
        let load = bench.load("vu.sock", 1);
        bench.verified(load);
        let _ = kill_process(pid(server), Signal::TERM);
        ends(server);
        assert!(!bench.path("vu.sock").exists() && !bench.path("pid").exists());
        if format == "qcow2" {
            bench.ends_with(&format!("check -f qcow2 {file}"), 0);
        }
    }
}

#[test]
fn a_program_that_cannot_take_over_leaves_the_old_one_serving() {
    let mut bench = Bench::new();
    let file = image(&bench, "qcow2");
    let line = format!("serve --control unix:c.sock {file} -f qcow2 --vhost-user vu.sock");
    let (_child, server) = bench.serve(&line);
    let load = bench.load("vu.sock", 9);
    let channel = "exec 3>&\"${RINGTAP_HANDOVER#*:}\"";
    for (name, text, timeout, why) in [
        ("crashes", "exit 3".to_owned(), 30, "status 3"),
        ("hangs", "exec sleep 60".to_owned(), 1, "after 1 s"),
        ("is none", String::new(), 30, "cannot start"),
        (
            "refuses",
            format!(
                "{channel}; printf '\\5\\0\\0\\0\\14\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0another kind' >&3; exec sleep 60"
            ),
            30,
            "another kind",
        ),
        // It says that it is ready, and ends when the disks stand still; or hangs then, past the deadline.
        (
            "ends",
            format!(
                "{channel}; printf '\\2\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0' >&3; sleep 0.3; exit 4"
            ),
            30,
            "has ended",
        ),
        (
            "stalls",
            format!(
                "{channel}; printf '\\2\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0' >&3; exec sleep 60"
            ),
            1,
            "after 1 s",
        ),
    ] {
        let binary = match text.is_empty() {
            true => "/nowhere/ringtap".to_owned(),
            false => bench.script(&name.replace(' ', "-"), &text),
        };
        let line = format!("upgrade unix:c.sock --binary {binary} --timeout {timeout}");
        let said = bench.ends_with(&line, 1);
        assert!(said.contains(why), "{name}: {said}");
        assert!(lives(server), "{name}: {}", bench.log());
        std::thread::sleep(Duration::from_millis(200));
    }
    bench.verified(load);
    // And then one that can.
    let load = bench.load("vu.sock", 3);
    std::thread::sleep(Duration::from_millis(500));
    let next = bench.upgrade("unix:c.sock");
    bench.verified(load);
    ends(server);
    // It is a server like any other: what it acknowledged is there after a kill.
    let load = bench.load("vu.sock", 30);
    std::thread::sleep(Duration::from_millis(500));
    let _ = kill_process(pid(next), Signal::KILL);
    let mut load = load;
    let _ = load.kill();
    let _ = load.wait();
    ends(next);
    bench.serve(&line);
    let load = bench.load("vu.sock", 1);
    bench.verified(load);
}

#[test]
fn nbd_clients_go_on_over_many_upgrades() {
    let mut bench = Bench::new();
    let (raw, qcow2) = (image(&bench, "raw"), image(&bench, "qcow2"));
    let line = format!(
        "serve --control unix:c.sock {raw} -f raw --name a --nbd unix:nbd.sock {qcow2} -f qcow2 --name b --nbd unix:nbd.sock"
    );
    let (_child, mut server) = bench.serve(&line);
    let loads = [bench.nbd_load("nbd.sock", "a", 4), bench.nbd_load("nbd.sock", "b", 4)];
    std::thread::sleep(Duration::from_secs(1));
    for _ in 0..3 {
        let next = bench.upgrade("unix:c.sock");
        ends(server);
        server = next;
        std::thread::sleep(Duration::from_millis(300));
    }
    let said = bench.ends_with("upgrade unix:c.sock --binary /bin/false", 1);
    assert!(said.contains("status 1"), "{said}");
    let binary = bench.script(
        "ends",
        "exec 3>&\"${RINGTAP_HANDOVER#*:}\"; printf '\\2\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0' >&3; sleep 0.3",
    );
    let said = bench.ends_with(&format!("upgrade unix:c.sock --binary {binary}"), 1);
    assert!(said.contains("has ended"), "{said}");
    for load in loads {
        let output = load.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}\n{}", self::said(&output), bench.log());
    }
    assert!(lives(server), "{}", bench.log());
}

#[test]
fn what_has_come_at_run_time_goes_on() {
    let mut bench = Bench::new();
    for (name, format) in
        [("a.qcow2", "qcow2"), ("b.raw", "raw"), ("c.qcow2", "qcow2"), ("late.raw", "raw")]
    {
        bench.ends_with(&format!("create -q -f {format} {name} 64M"), 0);
    }
    fs::create_dir(bench.path("d")).expect("a folder");
    let (_child, mut server) = bench.serve("daemon --control unix:c.sock --disks d --persist");
    let own = |words: &str| format!("disk {words} --control unix:c.sock");
    bench.ends_with(&own("add a.qcow2 -f qcow2 --node-name a --vhost-user a.sock"), 0);
    bench.ends_with(&own("add b.raw -f raw --node-name b --nbd b --nbd-server unix:n.sock"), 0);
    let fuse = mounts();
    if fuse {
        bench.ends_with(&own("add c.qcow2 -f qcow2 --node-name c --fuse c.img"), 0);
    }
    bench.ends_with(&own("limit b --iops 4000"), 0);
    bench.ends_with(&own("checkpoint add a monday"), 0);
    bench.ends_with(&own("snapshot b b.qcow2"), 0);
    let loads = [bench.load("a.sock", 3), bench.nbd_load("n.sock", "b", 3)];
    std::thread::sleep(Duration::from_secs(1));
    let listed = |bench: &Bench| bench.ends_with(&own("list"), 0);
    let before = listed(&bench);
    // One that fails when all stand still has the same server go on with all of it.
    let binary = bench.script(
        "ends",
        "exec 3>&\"${RINGTAP_HANDOVER#*:}\"; printf '\\2\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0' >&3; sleep 0.3",
    );
    bench.ends_with(&format!("upgrade unix:c.sock --binary {binary}"), 1);
    for round in 0..2 {
        let next = bench.upgrade("unix:c.sock");
        ends(server);
        server = next;
        assert_eq!(listed(&bench), before, "{}", bench.log());
        assert!(bench.ends_with(&own("limit b"), 0).contains("iops-total 4000"));
        let noted = bench.ends_with(&own("checkpoint list a"), 0);
        assert!(noted.starts_with("monday: ") && noted.lines().count() == 1, "{noted}");
        assert!(!noted.contains(": 0 bytes") && !noted.contains("lost"), "{noted}");
        if fuse {
            let part = [round + 1; 4096];
            let file = fs::File::options().read(true).write(true).open(bench.path("c.img"));
            std::os::unix::fs::FileExt::write_all_at(&file.expect("the disk"), &part, 4096)
                .expect("written");
        }
    }
    bench.ends_with(&own("add late.raw -f raw --node-name late --vhost-user late.sock"), 0);
    for load in loads {
        let output = load.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}\n{}", said(&output), bench.log());
    }
    // Another program would end by the signal.
    let refused = Command::new(RINGTAP).args(["upgrade", "1"]).output().expect("it runs");
    assert!(
        !refused.status.success() && said(&refused).contains("no ringtap"),
        "{}",
        said(&refused)
    );
    let _ = kill_process(pid(server), Signal::TERM);
    ends(server);
    let left = ["a.sock", "n.sock", "c.sock", "late.sock"].map(|name| bench.path(name).exists());
    assert_eq!(left, [false; 4], "{}", bench.log());
    if fuse {
        assert!(!bench.path("c.img").exists(), "it was made for the mount");
        bench.ends_with("check -f qcow2 c.qcow2", 0);
    }
    bench.ends_with("check -f qcow2 a.qcow2", 0);
}

/// Whether files can be mounted here.
fn mounts() -> bool {
    rustix::process::geteuid().is_root() && fs::File::open("/dev/fuse").is_ok()
}

#[test]
fn what_would_be_another_disk_is_not_passed_on() {
    let mut bench = Bench::new();
    for name in ["a.raw", "b.raw"] {
        fs::File::create(bench.path(name)).and_then(|file| file.set_len(1 << 20)).expect("a file");
    }
    let shown = if mounts() { "--growable --fuse file" } else { "--nbd unix:n" };
    let (_child, first) = bench.serve(&format!("serve a.raw -f raw --control unix:c {shown}"));
    // One that is made larger by who writes is as good as any.
    let second = bench.upgrade("unix:c");
    ends(first);
    fs::rename(bench.path("b.raw"), bench.path("a.raw")).expect("another file is there");
    let why = bench.ends_with("upgrade unix:c", 1);
    assert!(why.contains("another file now"), "{why}");
    assert!(lives(second));
    // A program that has nothing to do at the signal would end by it.
    let sleeper = bench.path("ringtap");
    fs::copy("/bin/sleep", &sleeper).expect("a program");
    let mut other = Command::new(&sleeper).arg("60").spawn().expect("it begins");
    let why = bench.ends_with(&format!("upgrade {}", other.id()), 1);
    assert!(why.contains("restart it") && lives(other.id()), "{why}");
    other.kill().and_then(|()| other.wait()).expect("its end");
}

/// An NBD server of a file; it ends with this.
struct Source(Child);

impl Drop for Source {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Source {
    fn of(bench: &Bench, file: &str, socket: &str) -> Source {
        let mut command = Command::new("nbdkit");
        command.args(["-f", "-U", socket, "file", file]).current_dir(bench.dir.path());
        let source = Source(command.spawn().expect("nbdkit begins"));
        let until = Instant::now() + Duration::from_secs(30);
        while std::os::unix::net::UnixStream::connect(bench.path(socket)).is_err() {
            assert!(Instant::now() < until, "nbdkit does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        source
    }

    fn signal(&self, signal: Signal) {
        kill_process(pid(self.0.id()), signal).expect("it is there");
    }
}

#[test]
fn storage_that_is_silent_holds_up_no_other_disk() {
    let mut bench = Bench::new();
    for name in ["a.raw", "b.raw", "d.raw"] {
        bench.ends_with(&format!("create -q -f raw {name} 64M"), 0);
    }
    let sources = ["b", "d"].map(|of| Source::of(&bench, &format!("{of}.raw"), of));
    let [b, d] = ["b", "d"].map(|of| format!("nbd+unix:///?socket={}", bench.path(of).display()));
    let line = format!(
        "serve --control unix:c.sock a.raw -f raw --vhost-user vu.sock {b} -f raw --name b --nbd unix:b.sock {d} -f raw --read-only --name d --node-name d --nbd unix:d.sock"
    );
    let (_child, server) = bench.serve(&line);
    // It says that it is ready, and takes nothing over.
    let next = bench.script(
        "stalls",
        "exec 3>&\"${RINGTAP_HANDOVER#*:}\"; printf '\\2\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0' >&3; exec sleep 60",
    );
    let line = format!("upgrade unix:c.sock --binary {next} --timeout 1");
    // There is something to make stable; there are only reads; and limits may be why these take long.
    for (disk, limited, of_it) in
        [(0, false, "is not stable"), (1, false, "in flight"), (1, true, "not ended")]
    {
        if limited {
            bench.ends_with("disk limit d --iops 1000000 --control unix:c.sock", 0);
        }
        let source = &sources[disk];
        let load = match disk {
            0 => bench.nbd_load("b.sock", "b", 3),
            _ => bench.nbd_reads("d.sock", "d", 3),
        };
        std::thread::sleep(Duration::from_secs(1));
        source.signal(Signal::STOP);
        let near = bench.load("vu.sock", 12);
        let mut upgrade = bench.command(&line).stderr(Stdio::piped()).spawn().expect("it begins");
        let until = Instant::now() + Duration::from_secs(45);
        while upgrade.try_wait().expect("its status").is_none() {
            if Instant::now() > until {
                let _ = upgrade.kill();
                panic!("the upgrade hangs: {}", bench.log());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let output = upgrade.wait_with_output().expect("it has ended");
        let why = said(&output);
        assert!(!output.status.success() && why.contains(of_it), "{of_it}: {why}");
        assert!(why.contains("see to"), "{why}");
        assert!(lives(server), "{}", bench.log());
        // The storage of the other is silent still.
        bench.verified(near);
        source.signal(Signal::CONT);
        let output = load.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}\n{}", said(&output), bench.log());
    }
    // Once it answers there is nothing in the way.
    let next = bench.upgrade("unix:c.sock");
    ends(server);
    bench.verified(bench.load("vu.sock", 1));
    assert!(lives(next));
}
