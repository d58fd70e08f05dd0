//! Disks that a client opened upon others, whatever their images name, go on upon these.

use std::fs;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use crate::bench::{Bench, READY, ends, said, stop};
use crate::jobs::{qmp, until};
use crate::names::ok;
use crate::said::members;
use crate::silent::{Source, stalls};

fn qemu(bench: &Bench, program: &str, words: &[&str]) {
    let output = Command::new(program).args(words).current_dir(bench.dir.path()).output();
    let output = output.expect("it runs");
    let text = said(&output);
    let good = output.status.success() && !text.contains("failed");
    assert!(good, "{program} {words:?}: {text}\n{}", bench.log());
}

/// What a client does to the export of that name.
fn io(bench: &Bench, name: &str, commands: &[&str]) {
    let uri = format!("nbd+unix:///{name}?socket={}", bench.path("n.sock").display());
    let each = commands.iter().flat_map(|command| ["-c", command]);
    let reads = commands.iter().all(|command| command.starts_with("read"));
    let how: &[&str] = if reads { &["-r", "-f", "raw"] } else { &["-f", "raw"] };
    let words: Vec<&str> = how.iter().copied().chain(each).chain([&*uri]).collect();
    qemu(bench, "qemu-io", &words);
}

/// A lower image that is open for writing, too, or not.
fn tried(low_is_read_only: bool) {
    let mut bench = Bench::new();
    let create = |bench: &Bench, words: &str| {
        let words: Vec<&str> =
            ["create", "-q", "-f", "qcow2"].into_iter().chain(words.split(' ')).collect();
        qemu(bench, "qemu-img", &words);
    };
    for name in ["low", "other", "top", "kept", "view"] {
        create(&bench, &format!("{name}.qcow2 64M"));
    }
    // These name something else than what lies below them, or than nothing.
    create(&bench, "-b other.qcow2 -F qcow2 named.qcow2");
    create(&bench, "-b low.qcow2 -F qcow2 bare.qcow2");
    create(&bench, "-b kept.qcow2 -F qcow2 over.qcow2");
    for (name, pattern) in [("low", "0x5a"), ("other", "0x77")] {
        let write = format!("write -P {pattern} 0 8M");
        qemu(&bench, "qemu-io", &["-f", "qcow2", "-c", &write, &format!("{name}.qcow2")]);
    }
    let folder = bench.path("");
    let at = |name: &str| folder.join(name).display().to_string();
    let (_child, mut server) = bench.serve("daemon --control unix:c.sock");
    let add = |name: &str, more: &str| {
        let file = format!(r#"{{"driver":"file","filename":"{}"}}"#, at(&format!("{name}.qcow2")));
        let all = format!(r#"{{"driver":"qcow2","node-name":"{name}","file":{file}{more}}}"#);
        ok(&bench, "blockdev-add", &all);
    };
    add("low", &format!(r#","read-only":{low_is_read_only}"#));
    for (name, read_only) in [("top", false), ("kept", false), ("view", true), ("named", false)] {
        add(name, &format!(r#","backing":"low","read-only":{read_only}"#));
    }
    add("bare", r#","backing":null"#);
    add("over", r#","backing":null"#);
    let socket = |name: &str| format!(r#"{{"type":"unix","path":"{}"}}"#, at(name));
    let start = format!(r#"{{"addr":{{"type":"unix","data":{{"path":"{}"}}}}}}"#, at("n.sock"));
    ok(&bench, "nbd-server-start", &start);
    for name in ["kept", "view", "named", "bare"] {
        let writable = name != "view";
        let export =
            format!(r#"{{"type":"nbd","id":"{name}","node-name":"{name}","writable":{writable}}}"#);
        ok(&bench, "block-export-add", &export);
    }
    let export = format!(
        r#"{{"type":"vhost-user-blk","id":"top","node-name":"top","writable":true,"num-queues":2,"addr":{}}}"#,
        socket("vu.sock")
    );
    ok(&bench, "block-export-add", &export);
    io(&bench, "kept", &["write -P 7 1M 1M", "flush"]);
    let looks = |bench: &Bench| {
        io(
            bench,
            "kept",
            &["read -P 0x5a 0 1M", "read -P 7 1M 1M", "read -P 0x5a 2M 6M", "read -P 0 8M 8M"],
        );
        for (name, pattern) in [("view", "0x5a"), ("named", "0x5a"), ("bare", "0")] {
            io(bench, name, &[&format!("read -P {pattern} 0 8M"), "read -P 0 8M 8M"]);
        }
    };
    looks(&bench);
    let load = bench.load("vu.sock", 8);
    for text in ["exit 1".to_owned(), format!("{READY}; sleep 0.3; exit 4")] {
        bench.install(&text);
        bench.ends_with("upgrade unix:c.sock", 1);
        looks(&bench);
    }
    bench.install_again();
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(300));
        let next = bench.upgrade("unix:c.sock");
        ends(server);
        server = next;
        looks(&bench);
    }
    bench.verified(load);
    // Who lies upon whom is known there, too.
    let busy = qmp(&bench, r#"{"execute":"blockdev-del","arguments":{"node-name":"low"}}"#);
    assert!(busy.contains("used as backing hd"), "{busy}");
    // One that nothing lies below is what takes another's place as an overlay.
    let snapshot = r#"{"node":"kept","overlay":"over"}"#;
    ok(&bench, "blockdev-snapshot", snapshot);
    // What has come between is not to be left out: that is said, and the server goes on.
    let refused = bench.ends_with("upgrade unix:c.sock", 1);
    assert!(
        refused.contains("the disk over") && refused.contains("commit that first"),
        "{refused}"
    );
    let commit = r#"{"job-id":"j","device":"over","base-node":"kept","auto-dismiss":false}"#;
    ok(&bench, "block-commit", commit);
    until(&bench, |jobs| jobs.contains("\"ready\""));
    ok(&bench, "job-complete", r#"{"id":"j"}"#);
    until(&bench, |jobs| jobs.contains("\"concluded\""));
    ok(&bench, "job-dismiss", r#"{"id":"j"}"#);
    let kept = ["read -P 0x5a 0 1M", "read -P 7 1M 1M", "read -P 0x5a 2M 6M"];
    io(&bench, "kept", &kept);
    let next = bench.upgrade("unix:c.sock");
    ends(server);
    io(&bench, "kept", &kept);
    stop(next);
    for name in ["low", "top", "kept", "named"] {
        bench.ends_with(&format!("check -f qcow2 {name}.qcow2"), 0);
    }
    // Nothing has written to what lies below.
    qemu(
        &bench,
        "qemu-io",
        &["-r", "-f", "qcow2", "-c", "read -P 0x5a 0 8M", "-c", "read -P 0 8M 56M", "low.qcow2"],
    );
}

#[test]
fn disks_opened_upon_others_go_on_upon_them() {
    for low_is_read_only in [true, false] {
        tried(low_is_read_only);
    }
}

/// How often a process has a file open.
fn opened(server: u32, path: &str) -> usize {
    let files = fs::read_dir(format!("/proc/{server}/fd")).expect("its files").flatten();
    let there = files.filter_map(|file| fs::read_link(file.path()).ok());
    there.filter(|there| there.to_string_lossy() == path).count()
}

/// Whether a client has read from one of the disks.
fn has_read(bench: &Bench) -> bool {
    let stats = qmp(bench, r#"{"execute":"query-blockstats"}"#);
    members(&stats, "rd_operations").iter().any(|count| *count != 0)
}

/// An upgrade was given up before images were closed: what one lay upon then is let go once it lies there no more.
#[test]
fn what_an_image_lay_upon_is_not_kept_open_after_an_upgrade_that_was_given_up() {
    let mut bench = Bench::new();
    bench.ends_with("create -q -f raw d.raw 64M", 0);
    for name in ["low", "top"] {
        qemu(&bench, "qemu-img", &["create", "-q", "-f", "qcow2", &format!("{name}.qcow2"), "1M"]);
    }
    let source = Source::of(&bench, "d.raw", "d");
    let far = format!("nbd+unix:///?socket={}", bench.path("d").display());
    let line = format!(
        "serve --sandbox off --control unix:c.sock {far} -f raw --read-only --name d --node-name d --nbd unix:d.sock"
    );
    let (_child, server) = bench.serve(&line);
    let at = |name: &str| bench.path(&format!("{name}.qcow2")).display().to_string();
    for (name, more) in [("low", ""), ("top", r#","backing":"low""#)] {
        let file = format!(r#"{{"driver":"file","filename":"{}"}}"#, at(name));
        let all = format!(r#"{{"driver":"qcow2","node-name":"{name}","file":{file}{more}}}"#);
        ok(&bench, "blockdev-add", &all);
    }
    // So that its requests are not looked at before.
    bench.ends_with("disk limit d --iops 1000000 --control unix:c.sock", 0);
    let reads = bench.nbd_reads("d.sock", "d", 6);
    // They come one after the other from when the first is there.
    while !has_read(&bench) {
        std::thread::sleep(Duration::from_millis(50));
    }
    source.signal(Signal::STOP);
    let line = format!("upgrade unix:c.sock --binary {} --timeout 10", stalls(&bench));
    let why = bench.ends_with(&line, 1);
    assert!(why.contains("not ended"), "{why}");
    source.signal(Signal::CONT);
    assert!(reads.wait_with_output().expect("it ends").status.success(), "{}", bench.log());
    let stream = r#"{"job-id":"j","device":"top","auto-dismiss":false}"#;
    ok(&bench, "block-stream", stream);
    until(&bench, |jobs| jobs.contains("\"concluded\""));
    assert!(opened(server, &at("low")) > 0);
    ok(&bench, "blockdev-del", r#"{"node-name":"low"}"#);
    assert_eq!(opened(server, &at("low")), 0, "{}", bench.log());
}
