//! What is said to those who attach a guest wrongly.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::program::{Running, program};
use crate::served::Server;
use crate::{disk, folder};

/// A guest without a disk of its own, whose firmware looks for a system on the served one.
fn guest(folder: &Path, memory: &[&str]) -> Running {
    let mut qemu = program("qemu-system-x86_64", "qemu-system-x86");
    qemu.current_dir(folder).args(["-display", "none", "-serial", "none", "-monitor", "none"]);
    qemu.args(["-m", "64M"]).args(memory).args(["-chardev", "socket,id=d,path=v"]);
    qemu.args(["-device", "vhost-user-blk-pci,chardev=d"]);
    Running::start(qemu)
}

fn memory(share: &str) -> [String; 4] {
    let memory = format!("memory-backend-memfd,id=mem,size=64M,share={share}");
    ["-object", &memory, "-machine", "memory-backend=mem"].map(str::to_owned)
}

#[test]
fn who_shares_no_memory_is_told_to() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let mut server = Server::start(dir.path(), "a.raw -f raw --vhost-user v --log debug");
    let private = memory("off");
    let private: Vec<&str> = private.iter().map(String::as_str).collect();
    for (options, said) in [
        (&[][..], "let go: handler failed to handle request: it shares no memory"),
        (&private[..], "keeps the guest's memory private"),
    ] {
        let _guest = guest(dir.path(), options);
        let line = server.process().until(said, |server| {
            let all = server.stderr();
            all.lines().find(|line| line.contains(said)).map(str::to_owned)
        });
        assert!(line.contains(" a.raw: ") && line.contains("share=on"), "{line}");
    }
    server.stop().ok();
    // One that does is served, and nobody complains.
    let mut server = Server::start(dir.path(), "a.raw -f raw --vhost-user v --log debug");
    let shared = memory("on");
    let _guest = guest(dir.path(), &shared.iter().map(String::as_str).collect::<Vec<_>>());
    server.process().until("queue", |server| server.stderr().contains("queue runs").then_some(()));
    let said = server.stop().stderr;
    assert!(!said.contains("share=on"), "{said}");
}

#[test]
fn a_second_front_end_is_refused_and_both_are_named() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let mut server = Server::start(dir.path(), "a.raw -f raw --vhost-user v");
    let connect = || UnixStream::connect(dir.path().join("v")).expect("a connection");
    let ends = |mut stream: UnixStream| {
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        assert_eq!(stream.read(&mut [0]).expect("an end"), 0);
    };
    let first = connect();
    let ours = format!("process {} (", std::process::id());
    server.process().until("first", |server| server.stderr().contains(&ours).then_some(()));
    ends(connect());
    ends(connect());
    let second = guest(dir.path(), &[]);
    let theirs = format!("process {} (qemu-system-", second.pid());
    let end = second.wait();
    assert!(!end.status.success() && !end.stderr.is_empty(), "{end:?}");
    // Who comes when the first has left has the disk.
    drop(first);
    let mut next = connect();
    next.set_read_timeout(Some(Duration::from_millis(200))).expect("a timeout");
    assert!(next.read(&mut [0]).is_err(), "it is neither refused nor spoken to");
    drop(next);
    let said = server.stop().stderr;
    let refused: Vec<&str> = said.lines().filter(|line| line.contains("is refused")).collect();
    assert_eq!(refused.len(), 2, "once for each: {said}");
    for (line, who) in refused.iter().zip([&ours, &theirs]) {
        let wanted = format!("WARN a.raw: a second front-end, {who}");
        assert!(line.contains(&wanted) && line.contains("is refused: process"), "{line}");
    }
}
