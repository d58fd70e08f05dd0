//! Servers that are there, and answer nothing.

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::{Control, Server, is_served, ok, patience};
use serde_json::json;

use crate::bench::{Bench, Kind, MIB};

/// Its thread is joined when its front-end leaves, and has writes to the target in flight then.
#[test]
fn a_guest_may_begin_anew_where_the_target_of_a_backup_fell_silent() {
    // With a connection of each thread's own, and with one that all share.
    for kind in [Kind::Nbdkit, Kind::NbdkitOne] {
        let bench = Bench::new();
        bench.raw("a.raw", 4096 * MIB);
        bench.raw("b.raw", 4096 * MIB);
        let source = bench.source(kind, "a.raw");
        let listen = format!("unix:{}", bench.text("control"));
        let own = ["-f", "raw", "--node-name", "vm", "--control", &listen];
        let server = bench.serve(&bench.text("b.raw"), &own);
        bench.io_well(&["write -P 6 0 64M"]);
        let mut qmp = Control::open(&bench.path("control"));
        let at = json!({ "type": "unix", "path": bench.text("source") });
        let file = json!({ "driver": "nbd", "server": at, "export": "e" });
        qmp.ok("blockdev-add", json!({ "driver": "raw", "node-name": "far", "file": file }));
        let backup = json!({ "device": "vm", "target": "far", "sync": "full", "job-id": "j",
                             "speed": MIB, "__ringtap_guest-timeout": 1000 });
        qmp.ok("blockdev-backup", backup);
        let guest = bench.load("4");
        // What the guest changes is saved first, by its own thread: more than the job copies by itself.
        let until = Instant::now() + patience();
        let saved = || qmp.ok("query-jobs", json!({}))[0]["current-progress"].as_u64();
        let mut saved = saved;
        while saved().is_none_or(|bytes| bytes < MIB) {
            assert!(Instant::now() < until, "nothing is copied");
            thread::sleep(Duration::from_millis(20));
        }
        source.pause();
        let told = loop {
            let (name, data) = qmp.event();
            if name == "BLOCK_JOB_COMPLETED" {
                break data;
            }
        };
        assert!(told["error"].as_str().is_some_and(|why| why.contains("1000 ms")), "{told}");
        is_served(guest);
        // Its front-end has left; the next is served.
        is_served(bench.load("1"));
        source.resume();
        // Its server may have gone meanwhile: then what was written there cannot be made stable, and that is said.
        let _ = qmp.call("blockdev-del", json!({ "node-name": "far" }));
        let said = server.stop();
        assert!(!said.contains("canceled"), "{said}");
    }
}

/// All is copied, and only to be made stable. One that is slow at that, and answers what else it is asked, is waited for.
#[test]
fn a_backup_ends_though_its_target_fell_silent_as_it_was_to_make_it_stable() {
    let end = |silent: bool| {
        let bench = Bench::new();
        bench.raw("a.raw", 4 * MIB);
        bench.raw("b.raw", 4 * MIB);
        bench.raw("held", 0);
        let source = bench.source_that_flushes_slowly("a.raw", 4 * MIB);
        let listen = format!("unix:{}", bench.text("control"));
        let own = ["-f", "raw", "--node-name", "vm", "--control", &listen];
        let server = bench.serve(&bench.text("b.raw"), &own);
        bench.io_well(&["write -P 6 0 1M"]);
        let mut qmp = Control::open(&bench.path("control"));
        let at = json!({ "type": "unix", "path": bench.text("source") });
        let file = json!({ "driver": "nbd", "server": at, "export": "e" });
        qmp.ok("blockdev-add", json!({ "driver": "raw", "node-name": "far", "file": file }));
        let backup = json!({ "device": "vm", "target": "far", "sync": "full", "job-id": "j",
                             "__ringtap_guest-timeout": 5000 });
        qmp.ok("blockdev-backup", backup);
        let until = Instant::now() + patience();
        while !bench.path("flushing").exists() {
            assert!(Instant::now() < until, "nothing is made stable");
            thread::sleep(Duration::from_millis(20));
        }
        if silent {
            source.pause();
        }
        let guest = bench.load("1");
        if !silent {
            // For longer than one that is silent is waited for.
            thread::sleep(Duration::from_secs(33));
            std::fs::remove_file(bench.path("held")).expect("removed");
        }
        let told = loop {
            let (name, data) = qmp.event();
            if name == "BLOCK_JOB_COMPLETED" {
                break data;
            }
        };
        is_served(guest);
        let why = told["error"].as_str();
        assert_eq!(why.is_some_and(|why| why.contains("nothing for 30000 ms")), silent, "{told}");
        assert_eq!(why.is_some(), silent, "{told}");
        bench.io_well(&["write -P 7 0 1M", "read -P 7 0 1M"]);
        let _ = std::fs::remove_file(bench.path("held"));
        source.resume();
        let _ = qmp.call("blockdev-del", json!({ "node-name": "far" }));
        server.stop();
    };
    thread::scope(|scope| {
        let silent = scope.spawn(|| end(true));
        end(false);
        silent.join().expect("it ends as well");
    });
}

/// Its requests are in flight, by NBD or FUSE, or there are none and only its image is to be closed; the disk beside it ends
/// as ever, and nothing stays mounted.
#[test]
fn a_server_ends_though_the_storage_of_a_disk_is_silent() {
    let ends = |busy: Option<&str>| {
        let bench = Bench::new();
        bench.raw("a.raw", 64 * MIB);
        let near = bench.text("near.qcow2");
        ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &near, "64M"]);
        let source = bench.source(Kind::Nbdkit, "a.raw");
        let nbd = format!("unix:{}", bench.text("nbd"));
        let shown = bench.text("shown");
        let more =
            ["-f", "raw", "--fuse", &shown, &near, "-f", "qcow2", "--name", "n", "--nbd", &nbd];
        let server = bench.serve(&bench.uri(), &more);
        bench.io_well(&["write -P 1 0 1M"]);
        let at = |name: &str| format!("nbd+unix:///{name}?socket={}", bench.text("nbd"));
        ok("qemu-io", "qemu-utils", &["-f", "raw", "-c", "write -P 2 0 1M", &at("n")]);
        source.pause();
        let reads = busy.map(|by| {
            let mut reads = Command::new(if by == "nbd" { "qemu-io" } else { "dd" });
            match by {
                "nbd" => reads.args(["-f", "raw", "-r", "-c", "read 0 4k", &at("d")]),
                _ => reads.args([&format!("if={shown}"), "bs=4k", "count=1"]),
            };
            reads.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it begins")
        });
        thread::sleep(Duration::from_secs(1));
        let said = server.stop_badly();
        if let Some(mut reads) = reads {
            let _ = reads.kill();
            let _ = reads.wait();
        }
        let mounts = std::fs::read_to_string("/proc/mounts").expect("them");
        assert!(!mounts.contains(&shown), "{mounts}");
        assert!(!bench.path("shown").exists(), "what was made to be mounted over stays");
        let what = if busy.is_some() { "requests have not ended" } else { "it is not closed" };
        assert!(said.contains(what) && said.contains(&bench.uri()), "{said}");
        assert!(said.contains("has answered nothing for 30 s"), "{said}");
        // Without what a server after this one would know.
        ok("qemu-img", "qemu-utils", &["check", "-q", &near]);
        bench.holds("near.qcow2", "qcow2", &["read -P 2 0 1M"]);
    };
    thread::scope(|scope| {
        let busy = ["nbd", "fuse"].map(|by| scope.spawn(move || ends(Some(by))));
        ends(None);
        busy.into_iter().for_each(|one| one.join().expect("it ends as well"));
    });
}

/// One that could not be opened is tried again while nobody answers there.
#[test]
fn who_is_served_does_not_wait_for_a_disk_that_is_opened_late() {
    let bench = Bench::new();
    bench.raw("a.raw", 64 * MIB);
    bench.raw("b.raw", 64 * MIB);
    let (control, vhost) = (format!("unix:{}", bench.text("control")), bench.text("vhost"));
    let (near, far) = (bench.text("b.raw"), bench.uri());
    let near = [&near, "-f", "raw", "--node-name", "near", "--vhost-user", &vhost];
    let far = [&far, "-f", "raw", "--node-name", "far"];
    let server = Server::start(["--control", &control].iter().chain(&near).chain(&far));
    let mut qmp = Control::open(&bench.path("control"));
    let source = bench.source(Kind::Nbdkit, "a.raw");
    source.pause();
    server.signal(libc::SIGHUP);
    thread::sleep(Duration::from_secs(1));
    let nodes = |qmp: &mut Control| qmp.ok("query-named-block-nodes", json!({})).to_string();
    // Nobody waits for it for longer than the store does, and then this would come after its failure.
    assert!(!nodes(&mut qmp).contains("\"far\""));
    is_served(bench.load("1"));
    source.resume();
    let until = Instant::now() + patience();
    while !nodes(&mut qmp).contains("\"far\"") {
        assert!(Instant::now() < until, "it is not served");
        thread::sleep(Duration::from_millis(20));
    }
    let said = server.stop();
    assert!(said.contains("served from now on") && !said.contains("still not served"), "{said}");
}
