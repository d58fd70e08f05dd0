//! Servers that are told nothing about a sandbox, and their brokers.

mod keys;
mod renewed;
mod user;

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::{Control, file_system, listens, ok, patience, plain, ringtap, ringtap_of};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::json;

const MIB: u64 = 1 << 20;

/// A server that is ready, first of a group of processes and in a folder.
struct Server {
    child: Child,
    log: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn pid(of: u32) -> Pid {
    i32::try_from(of).ok().and_then(Pid::from_raw).expect("a process")
}

impl Server {
    fn start(folder: &Path, log: &Path, words: &str) -> Server {
        Server::begin(Command::new(ringtap()), folder, log, words)
    }

    fn begin(mut command: Command, folder: &Path, log: &Path, words: &str) -> Server {
        command.args(words.split_whitespace()).current_dir(folder).process_group(0);
        let file = File::options().create(true).append(true).open(log).expect("a log");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
        let mut child = command.spawn().expect("ringtap starts");
        let mut ready = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("its output"));
        out.read_line(&mut ready).expect("a line");
        let server = Server { child, log: log.to_owned() };
        assert_eq!(ready.trim(), "ready", "{}", server.log());
        server
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn fact(&self, name: &str) -> String {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("its status");
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
        line.trim_start_matches(':').trim().to_owned()
    }

    /// Its broker's process, where it has one.
    fn broker(&self) -> Option<u32> {
        broker_of(self.child.id())
    }

    fn signal(&self, signal: Signal) {
        kill_process(pid(self.child.id()), signal).expect("told");
    }

    fn ends(&mut self) -> ExitStatus {
        let until = Instant::now() + patience();
        loop {
            if let Some(status) = self.child.try_wait().expect("its status") {
                return status;
            }
            assert!(Instant::now() < until, "it does not end: {}", self.log());
            thread::sleep(Duration::from_millis(2));
        }
    }
}

fn broker_of(server: u32) -> Option<u32> {
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    let mut numbers = processes.filter_map(|it| it.file_name().to_str()?.parse().ok());
    numbers.find(|number: &u32| {
        let text = fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
        let rest = text.split_once(" (ringtap-broker) ").map(|(_, rest)| rest);
        let parent = rest.and_then(|rest| rest.split(' ').nth(1));
        parent == Some(server.to_string().as_str())
    })
}

/// Whether a process is there and has not ended.
fn lives(process: u32) -> bool {
    let state = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    state.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[track_caller]
fn until(what: &str, is: impl Fn() -> bool) {
    let until = Instant::now() + patience();
    while !is() {
        assert!(Instant::now() < until, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn disk(folder: &Path, name: &str) {
    File::create(folder.join(name)).and_then(|file| file.set_len(16 * MIB)).expect("a file");
}

#[test]
fn a_server_is_confined_unless_it_is_told_otherwise() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path();
    disk(folder, "a.raw");
    for (n, (words, walls)) in [
        ("serve a.raw -f raw --nbd unix:n.sock", true),
        ("serve a.raw -f raw --nbd unix:n.sock --control unix:c.sock", true),
        ("daemon --disks disks.d --control unix:c.sock", true),
        ("serve a.raw -f raw --nbd unix:n.sock --sandbox off", false),
        ("daemon --disks disks.d --control unix:c.sock --sandbox off", false),
    ]
    .into_iter()
    .enumerate()
    {
        fs::create_dir_all(folder.join("disks.d")).expect("a folder");
        let mut server = Server::start(folder, &folder.join(format!("log{n}")), words);
        let expected = if walls { ("1", "2") } else { ("0", "0") };
        let found = (server.fact("NoNewPrivs"), server.fact("Seccomp"));
        assert_eq!((&*found.0, &*found.1), expected, "{words}");
        assert_eq!(server.broker().is_some(), walls, "{words}");
        server.signal(Signal::TERM);
        assert!(server.ends().success(), "{words}: {}", server.log());
        // What this kernel lacks is one line, and all that is said of it.
        let said = server.log().lines().filter(|line| line.contains("confined")).count();
        assert!(said <= usize::from(walls), "{words}: {}", server.log());
    }
}

/// As a terminal does, and systemd.
#[test]
fn a_broker_does_its_part_whatever_its_whole_group_is_told() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let folder = dir.path().canonicalize().expect("it");
    disk(&folder, "a.raw");
    fs::write(folder.join("shown"), "").expect("a file");
    let words = "serve a.raw -f raw --fuse shown --nbd unix:n.sock";
    let mut server = Server::start(&folder, &folder.join("log"), words);
    let broker = server.broker().expect("a broker");
    let group = pid(server.child.id());
    for signal in [Signal::HUP, Signal::USR1] {
        kill_process_group(group, signal).expect("told");
    }
    until("it tells what it does", || server.log().contains("\"stats\""));
    assert!(lives(broker));
    assert_eq!(fs::metadata(folder.join("shown")).expect("the disk").len(), 16 * MIB);
    kill_process_group(group, Signal::TERM).expect("told");
    assert!(server.ends().success(), "{}", server.log());
    // By the broker: nobody else may.
    assert_eq!(fs::metadata(folder.join("shown")).expect("the file").len(), 0);
    assert!(!lives(broker));
}

#[test]
fn nothing_of_a_server_that_has_ended_is_left() {
    let place = file_system("tmpfs", &[], "");
    let log = place.dir.path().join("log");
    disk(place.folder(), "a.raw");
    for turn in 0..20 {
        let words = "serve a.raw -f raw --cache writeback --nbd unix:n.sock";
        let mut server = Server::start(place.folder(), &log, words);
        let broker = server.broker().expect("a broker");
        server.signal(Signal::TERM);
        assert!(server.ends().success(), "{}", server.log());
        assert!(!lives(broker), "turn {turn}: the broker is still there");
    }
}

/// The kernel has whoever made a ring take part in its end, and holds the files that it works on until then.
#[test]
fn a_killed_servers_image_is_the_next_ones_though_its_broker_stands_still() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let (folder, log) = (dir.path(), dir.path().join("log"));
    disk(folder, "a.raw");
    let words = "serve a.raw -f raw --nbd unix:n.sock";
    let mut server = Server::start(folder, &log, words);
    let uri = format!("nbd+unix:///?socket={}", folder.join("n.sock").display());
    ok("qemu-io", "qemu-utils", &["-f", "raw", "-c", "write 0 64k", &uri]);
    let broker = server.broker().expect("a broker");
    kill_process(pid(broker), Signal::STOP).expect("it stands still");
    server.signal(Signal::KILL);
    server.ends();
    let mut next = Server::start(folder, &log, words);
    kill_process(pid(broker), Signal::CONT).ok();
    // Nobody has the rights of a server after it.
    until("the broker is still there", || !lives(broker));
    next.signal(Signal::TERM);
    assert!(next.ends().success(), "{}", next.log());
}

#[test]
fn a_server_whose_broker_is_killed_serves_on_and_flushes_at_its_end() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let folder = dir.path();
    ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", plain(&folder.join("a")), "16M"]);
    let words = "serve a -f qcow2 --nbd unix:n.sock";
    let mut server = Server::start(folder, &folder.join("log"), words);
    let broker = server.broker().expect("a broker");
    kill_process(pid(broker), Signal::KILL).expect("killed");
    until("the broker is still there", || !lives(broker));
    let uri = format!("nbd+unix:///?socket={}", folder.join("n.sock").display());
    let io = ["-f", "raw", "-t", "unsafe", "-c", "write -P 7 1M 64k", "-c", "read -P 7 1M 64k"];
    let said = ok("qemu-io", "qemu-utils", &[&io[..], &[&uri]].concat());
    assert!(said.contains("wrote 65536/65536") && !said.contains("failed"), "{said}");
    server.signal(Signal::TERM);
    assert!(server.ends().success(), "{}", server.log());
    assert_eq!(server.log().matches("ringtap-broker").count(), 1, "{}", server.log());
    let image = folder.join("a");
    ok("qemu-img", "qemu-utils", &["check", "-q", plain(&image)]);
    let said = ok("qemu-io", "qemu-utils", &["-c", "read -P 7 1M 64k", plain(&image)]);
    assert!(!said.contains("failed"), "{said}");
}

/// What may be opened of a folder is not what may be of a file system that is mounted there.
#[test]
fn a_disk_that_was_left_out_is_served_once_its_file_system_is_mounted() {
    let place = file_system("tmpfs", &[], "");
    let (dir, mounted) = (place.dir.path(), plain(place.folder()));
    ok("umount", "mount", &[mounted]);
    let socket = dir.join("a.sock");
    let words = format!(
        "serve null:1M --nbd unix:n.sock mnt/vms/a.raw -f raw --cache writeback --nbd unix:{}",
        socket.display()
    );
    let server = Server::start(dir, &dir.join("log"), &words);
    assert!(!listens(&socket), "{}", server.log());
    ok("mount", "mount", &["-t", "tmpfs", "none", mounted]);
    fs::create_dir(place.folder().join("vms")).expect("a folder");
    disk(&place.folder().join("vms"), "a.raw");
    server.signal(Signal::HUP);
    until("nothing was done", || listens(&socket) || server.log().contains("still not"));
    assert!(listens(&socket), "{}", server.log());
    drop(server);
}

/// As without walls: another server of the same user says at once who is in the way.
#[test]
fn a_users_own_servers_see_each_other() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let folder = dir.path();
    disk(folder, "a.raw");
    let binary = folder.join("ringtap");
    ok("cp", "coreutils", &[plain(&ringtap()), plain(&binary)]);
    fs::create_dir(folder.join("state")).expect("a folder");
    ok("chown", "coreutils", &["-R", "65534:65534", plain(folder)]);
    let nobody = || {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&binary);
        command.env("RINGTAP_STATE_DIR", folder.join("state"));
        command
    };
    let words = "serve a.raw -f raw --nbd unix:n.sock";
    let mut server = Server::begin(nobody(), folder, &folder.join("log"), words);
    assert_eq!(server.fact("Seccomp"), "2", "{}", server.log());
    let words = "serve a.raw -f raw --nbd unix:o.sock";
    let second = nobody().args(words.split(' ')).current_dir(folder).output().expect("it runs");
    let said = String::from_utf8_lossy(&second.stderr);
    let holder = format!("process {} (ringtap)", server.child.id());
    assert!(said.contains(&holder) && !said.contains("waiting up to"), "{said}");
    server.signal(Signal::TERM);
    assert!(server.ends().success(), "{}", server.log());
}

#[test]
fn a_folder_of_disks_is_made_wherever_it_is_to_lie() {
    let (dir, run) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir_in("/run"));
    let run = run.expect("a folder");
    let disks = run.path().join("ringtap/disks.d");
    let words = format!("daemon --persist --control unix:c.sock --disks {}", disks.display());
    let mut server = Server::start(dir.path(), &dir.path().join("log"), &words);
    let control = format!("unix:{}", dir.path().join("c.sock").display());
    let added = ringtap_of(&["disk", "add", "null:1M", "--node-name", "a", "--control", &control]);
    assert!(added.status.success(), "{added:?}");
    assert!(disks.join("a.toml").is_file(), "{}", server.log());
    server.signal(Signal::TERM);
    assert!(server.ends().success(), "{}", server.log());
}

#[test]
fn a_confined_server_says_how_block_devices_of_this_host_are_had() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let socket = dir.path().join("c.sock");
    let words = "serve null:1M --node-name a --control unix:c.sock";
    let _server = Server::start(dir.path(), &dir.path().join("log"), words);
    let arguments = json!({"type": "__ringtap_ublk", "id": "u", "node-name": "a"});
    let end = Control::open(&socket).call("block-export-add", arguments);
    let why = end.expect_err("it makes none");
    assert!(why.contains("serve --ublk") && why.contains("--sandbox off"), "{why}");
}
