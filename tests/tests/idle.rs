//! Disks that nobody uses cost nothing: no thread of their server wakes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use ringtap_tests::{Server, program, ringtap};

/// What the last request leaves to be done is done by then.
const SETTLES: Duration = Duration::from_secs(2);
/// How long is watched.
const WATCHED: Duration = Duration::from_secs(5);

/// How often threads of a process have gone to sleep, all together.
fn sleeps(pid: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("its threads");
    let of = |status: String| -> u64 {
        let lines = status.lines().filter(|line| line.contains("ctxt_switches"));
        lines.filter_map(|line| line.rsplit('\t').next()?.parse::<u64>().ok()).sum()
    };
    let all = threads.flatten().map(|thread| fs::read_to_string(thread.path().join("status")));
    all.filter_map(Result::ok).map(of).sum()
}

fn make(words: &[&str], path: &Path) {
    let made = program(
        &ringtap().display().to_string(),
        "ringtap",
        words.iter().map(|word| word.to_string()).chain([path.display().to_string(), "64M".into()]),
    );
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

/// Two disks on every transport that needs no other machine, one of them written to before.
#[test]
fn an_idle_disk_wakes_nobody() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    make(&["create", "-q", "-f", "qcow2"], &folder.path().join("one.qcow2"));
    make(&["create", "-q", "-f", "raw"], &folder.path().join("two.raw"));
    fs::write(at("mounted"), b"").expect("a place to mount on");
    let nbd = at("nbd.sock");
    let server = Server::start([
        at("one.qcow2"),
        "-f".into(),
        "qcow2".into(),
        "--nbd".into(),
        format!("unix:{nbd}"),
        "--vhost-user".into(),
        at("one.sock"),
        at("two.raw"),
        "-f".into(),
        "raw".into(),
        "--fuse".into(),
        at("mounted"),
    ]);
    let uri = format!("nbd+unix:///?socket={nbd}");
    let wrote = program(
        "qemu-io",
        "qemu-utils",
        ["-f", "raw", "-c", "write -P 7 1M 300k", "-c", "flush", &uri],
    );
    assert!(wrote.status.success(), "{}", String::from_utf8_lossy(&wrote.stderr));
    fs::OpenOptions::new().read(true).open(at("mounted")).expect("the mounted disk");
    std::thread::sleep(SETTLES);
    let before = sleeps(server.pid());
    std::thread::sleep(WATCHED);
    let wakes = sleeps(server.pid()) - before;
    assert_eq!(wakes, 0, "in {WATCHED:?}");
    server.stop();
}
