//! What is printed where nobody reads it, and what is no image.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::bench::Bench;

/// A pipe that nobody reads.
fn unread() -> Stdio {
    let mut gone = Command::new("true").stdin(Stdio::piped()).spawn().expect("true");
    let writer = gone.stdin.take().expect("its end of a pipe");
    gone.wait().expect("it ends");
    writer.into()
}

fn ringtap(bench: &Bench, words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringtap"));
    command.args(words.split(' ')).current_dir(bench.path("."));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

#[test]
fn who_reads_no_more_changes_neither_the_work_nor_its_status() {
    let bench = Bench::new();
    bench.ok("ringtap create -q -f qcow2 a.qcow2 1M");
    bench.ok("ringtap create -q -f raw b.raw 1M");
    for (words, status) in [
        ("create -f qcow2 new.qcow2 1M", 0),
        ("resize a.qcow2 2M", 0),
        ("check a.qcow2", 0),
        ("check --output json a.qcow2", 0),
        ("check -f raw b.raw", 63),
        ("measure --size 1M -O qcow2", 0),
        ("compare -f raw -F raw b.raw b.raw", 0),
        ("compare -f raw b.raw a.qcow2", 0),
        ("bench -c 1 -f raw b.raw", 0),
        ("amend -o help a.qcow2", 0),
        ("snapshot -c s a.qcow2", 0),
        ("snapshot -l a.qcow2", 0),
        ("info a.qcow2", 0),
        ("map a.qcow2", 0),
        ("info", 2),
        ("nonsense", 2),
    ] {
        let mut command = ringtap(&bench, words);
        let ended = command.stdout(unread()).stderr(unread()).status().expect("it runs");
        assert_eq!(ended.code(), Some(status), "{words}: {ended}");
    }
    for words in
        ["check a.qcow2", "measure --size 1M -O qcow2", "resize a.qcow2 3M", "info a.qcow2"]
    {
        let full = File::options().write(true).open("/dev/full").expect("the device");
        let ended = ringtap(&bench, words).stdout(full).status().expect("it runs");
        assert_eq!(ended.code(), Some(1), "{words}: {ended}");
    }
    // 1 says that they differ.
    for (words, status) in [("compare a.qcow2 a.qcow2", 2), ("--help", 1), ("--version", 1)] {
        let full = File::options().write(true).open("/dev/full").expect("the device");
        let ended = ringtap(&bench, words).stdout(full).status().expect("it runs");
        assert_eq!(ended.code(), Some(status), "{words}: {ended}");
    }
}

#[test]
fn a_pipe_is_no_image_and_nobody_waits_for_it() {
    let bench = Bench::new();
    bench.ok("mkfifo pipe");
    bench.ok("ringtap create -q -f raw b.raw 1M");
    for words in [
        "info pipe",
        "map pipe",
        "check pipe",
        "measure -O raw pipe",
        "snapshot -l pipe",
        "convert pipe c.raw",
        "compare pipe b.raw",
        "create -f qcow2 -b pipe d.qcow2",
    ] {
        let ended = Command::new("timeout")
            .arg("60")
            .arg(env!("CARGO_BIN_EXE_ringtap"))
            .args(words.split(' '))
            .current_dir(bench.path("."))
            .output()
            .expect("timeout");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.code() != Some(124) && !ended.status.success(), "{words}: {ended:?}");
        assert!(said.contains("pipe"), "{words}: {said}");
    }
}
