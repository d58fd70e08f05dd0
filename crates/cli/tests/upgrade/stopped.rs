//! Upgrades that do not come to their end: to a program that does not know the state, and of a server that is told to end.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use crate::bench::{Bench, READY, RINGTAP, ends, image, lives, pid, said};

/// Between a server and the program, it makes the state one of another version.
const OF_ANOTHER_VERSION: &str = r#"
import os, socket, struct, subprocess, sys
_, number = os.environ["RINGTAP_HANDOVER"].split(":")
giver = socket.socket(fileno=int(number))
ours, theirs = socket.socketpair()
def heard(channel):
    head = channel.recv(16, socket.MSG_WAITALL)
    if len(head) < 16:
        return None
    kind, length, count, _ = struct.unpack("=IIII", head)
    text, files = channel.recv(length, socket.MSG_WAITALL) if length else b"", []
    while len(files) < count:
        _, more, _, _ = socket.recv_fds(channel, 1, 253)
        files += more
    return kind, text, files
def say(channel, kind, text, files):
    channel.sendall(struct.pack("=IIII", kind, len(text), len(files), 0) + text)
    for at in range(0, len(files), 200):
        socket.send_fds(channel, [b"\0"], files[at:at + 200])
env = dict(os.environ, RINGTAP_HANDOVER=f"{os.getpid()}:{theirs.fileno()}")
program = subprocess.Popen([sys.argv[1]] + sys.argv[2:], env=env, pass_fds=[theirs.fileno()])
theirs.close()
kind, text, files = heard(giver)
state = os.pread(files[0], os.fstat(files[0]).st_size, 0)
assert state.startswith(b"ringtap-handover 1 ")
changed = os.memfd_create("changed")
os.write(changed, state.replace(b"ringtap-handover 1 ", b"ringtap-handover 999 ", 1))
say(ours, kind, text, [changed] + files[1:])
answer = heard(ours)
if answer:
    say(giver, *answer)
program.wait()
"#;

#[test]
fn a_program_that_does_not_know_the_state_leaves_the_old_one_serving() {
    let mut bench = Bench::new();
    let file = image(&bench, "qcow2");
    fs::write(bench.path("between.py"), OF_ANOTHER_VERSION).expect("a program");
    let line = format!("serve --control unix:c.sock {file} -f qcow2 --vhost-user vu.sock");
    let (_child, server) = bench.serve(&line);
    let load = bench.load("vu.sock", 5);
    let between = bench.path("between.py");
    bench.install(&format!("exec python3 {} {RINGTAP} \"$@\"", between.display()));
    for of in ["unix:c.sock".to_owned(), server.to_string()] {
        let why = bench.ends_with(&format!("upgrade {of}"), 1);
        assert!(why.contains("version 999") && why.contains("reads 1 to"), "{why}");
        assert!(lives(server), "{}", bench.log());
    }
    bench.verified(load);
    // And its guests are another's once one comes that knows it.
    bench.install_again();
    let load = bench.load("vu.sock", 2);
    let next = bench.upgrade("unix:c.sock");
    ends(server);
    bench.verified(load);
    let _ = kill_process(pid(next), Signal::TERM);
    ends(next);
    bench.ends_with(&format!("check -f qcow2 {file}"), 0);
}

#[test]
fn a_server_that_is_told_to_end_during_an_upgrade_ends_in_order() {
    // It prepares for long; it takes long to take over.
    let cases = [
        ("exec sleep 3217".to_owned(), "which prepares"),
        (format!("{READY}; exec sleep 3217"), "images are closed"),
    ];
    for sandbox in ["auto", "off"] {
        for (text, seen) in &cases {
            let mut bench = Bench::new();
            let file = image(&bench, "qcow2");
            let line = format!(
                "serve --sandbox {sandbox} --log debug --control unix:c.sock {file} -f qcow2 --nbd unix:n.sock"
            );
            let (mut child, server) = bench.serve(&line);
            let uri = format!("nbd+unix:///?socket={}", bench.path("n.sock").display());
            let mut write = Command::new("qemu-io");
            write.args(["-f", "raw", "-t", "writeback", "-c", "write -P 7 1M 3M", &uri]);
            assert!(write.output().expect("qemu-io").status.success());
            bench.install(text);
            let mut upgrade = bench.command("upgrade unix:c.sock --timeout 300");
            let upgrade = upgrade.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
            let until = Instant::now() + Duration::from_secs(60);
            while !bench.log().contains(seen) {
                assert!(Instant::now() < until, "{}", bench.log());
                std::thread::sleep(Duration::from_millis(5));
            }
            let told = Instant::now();
            let _ = kill_process(pid(server), Signal::TERM);
            ends(server);
            assert!(
                told.elapsed() < Duration::from_secs(9),
                "{sandbox} {seen}: it is not waited for"
            );
            assert!(child.wait().expect("its end").success(), "{}", bench.log());
            let end = upgrade.and_then(|it| it.wait_with_output()).expect("its end");
            assert!(!end.status.success(), "{}", said(&end));
            assert!(!bench.path("n.sock").exists() && !bench.path("c.sock").exists());
            let sleepers = Command::new("pgrep").args(["-f", "-x", "sleep 3217"]).output();
            let sleepers = sleepers.expect("pgrep").stdout;
            assert!(
                sleepers.is_empty(),
                "the other process goes on: {}",
                String::from_utf8_lossy(&sleepers)
            );
            bench.ends_with(&format!("check -f qcow2 {file}"), 0);
            let mut read = Command::new("qemu-io");
            read.args(["-f", "qcow2", "-r", "-c", "read -P 7 1M 3M"]).arg(bench.path(file));
            let read = read.output().expect("qemu-io");
            assert!(read.status.success() && !said(&read).contains("failed"), "{}", said(&read));
        }
    }
}
