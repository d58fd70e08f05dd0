//! A disk whose requests wait until somebody has them go on.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ringtap_tests::{Control, patience, ringtap};
use serde_json::{Value, json};

use crate::{Empty, ok, options, qemu_io};

/// A client that does something, and need not come to an end.
fn begins(uri: &str, command: &str) -> Child {
    let options = format!("driver=nbd,{}", options(uri));
    let mut program = Command::new("qemu-io");
    program.args(["--image-opts", &options, "-c", command]).stdin(Stdio::null());
    program.stdout(Stdio::null()).spawn().expect("apt-get install qemu-utils")
}

fn held(control: &mut Control) -> u64 {
    let stats = control.ok("query-blockstats", json!({}));
    stats[0]["__ringtap_state"]["held_by_pause"].as_u64().expect("a number")
}

/// Wait until so many requests wait.
fn until_held(control: &mut Control, wanted: u64) {
    let end = Instant::now() + patience();
    while held(control) != wanted {
        assert!(Instant::now() < end, "{} requests wait, not {wanted}", held(control));
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn disk(empty: &Empty, verb: &str) -> Command {
    let mut program = Command::new(ringtap());
    program.args(["disk", verb, "--control", &format!("unix:{}", empty.text("control"))]);
    program
}

#[test]
fn nothing_goes_on_until_it_is_resumed() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "1M");
    let uri = empty.nbd()("a");
    empty.export("x", "a", "nbd", json!({}));
    qemu_io(&uri, &["write -P 1 0 64k"]).expect("it is served");
    ok(disk(&empty, "pause").arg("a"));
    let name = json!({"node-name": "a"});
    assert_eq!(empty.control.event(), ("__ringtap_PAUSED".into(), name.clone()));
    let refused = empty.control.call("__ringtap_pause", name.clone()).expect_err("it is");
    assert!(refused.contains("paused already"), "{refused}");
    let listed = disk(&empty, "list").output().expect("ringtap");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.contains("writable, paused"), "{listed}");
    // One that writes, one that reads, one that flushes, one that discards.
    let commands = ["write -P 2 0 64k", "read 128k 64k", "flush", "discard 192k 64k"];
    let mut clients = commands.map(|command| begins(&uri, command));
    until_held(&mut empty.control, 4);
    assert!(clients.iter_mut().all(|one| one.try_wait().expect("its status").is_none()));
    let found = fs::read(empty.path("a")).expect("the image");
    assert!(found[..64 << 10].iter().all(|byte| *byte == 1), "it was written to");
    let refused = empty.control.call("__ringtap_upgrade", json!({})).expect_err("it is paused");
    assert!(refused.contains("is paused"), "{refused}");
    // Others find the disk as ever.
    let over = empty.text("over");
    let snapshot = json!({"node-name": "a", "snapshot-file": over, "format": "qcow2"});
    empty.control.ok("blockdev-snapshot-sync", snapshot);
    assert_eq!(held(&mut empty.control), 4);
    ok(disk(&empty, "resume").arg("a"));
    while empty.control.event() != ("__ringtap_RESUMED".into(), name.clone()) {}
    for client in &mut clients {
        assert!(client.wait().expect("it ends").success());
    }
    qemu_io(&uri, &["read -P 2 0 64k"]).expect("what was held is there");
    let nodes = empty.control.ok("query-named-block-nodes", json!({}));
    assert_eq!(nodes[0].get("__ringtap_paused"), None::<&Value>, "{nodes}");
    // What a job writes to would hold up its source's guests.
    empty.add("b", "raw", "1M");
    let slow = json!({"device": "a", "target": "b", "sync": "full", "job-id": "m", "speed": 65536});
    empty.control.ok("blockdev-mirror", slow);
    let used = empty.control.call("__ringtap_pause", json!({"node-name": "b"}));
    assert!(used.expect_err("used").contains("a job writes to it"));
    empty.control.ok("job-cancel", json!({"id": "m"}));
    while empty.control.event().0 != "BLOCK_JOB_CANCELLED" {}
    empty.control.ok("__ringtap_pause", json!({"node-name": "b"}));
    let again = json!({"device": "a", "target": "b", "sync": "full", "job-id": "m"});
    let paused = empty.control.call("blockdev-mirror", again).expect_err("it is paused");
    assert!(paused.contains("is paused"), "{paused}");
    empty.control.ok("__ringtap_resume", json!({"node-name": "b"}));
    let unknown = empty.control.call("__ringtap_pause", json!({"node-name": "c"}));
    assert!(unknown.expect_err("none").contains("Cannot find"));
}

/// A server that is told to end waits for no word.
#[test]
fn a_server_that_ends_lets_them_go_on() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "1M");
    let uri = empty.nbd()("a");
    empty.export("x", "a", "nbd", json!({}));
    empty.control.ok("__ringtap_pause", json!({"node-name": "a"}));
    let mut client = begins(&uri, "write -P 2 0 64k");
    until_held(&mut empty.control, 1);
    let image = empty.path("a");
    let Empty { dir, server, control } = empty;
    drop(control);
    server.stop();
    let _ = client.wait();
    let found = fs::read(image).expect("the image");
    assert!(found[..64 << 10].iter().all(|byte| *byte == 2), "what was held is lost");
    drop(dir);
}

#[test]
fn a_file_whose_size_is_asked_for_behind_what_is_held_holds_up_nobody() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "1M");
    let mount = empty.path("file");
    empty.export("x", "a", "fuse", json!({"mountpoint": mount}));
    ok(disk(&empty, "pause").arg("a"));
    let mut load = Command::new("fio");
    load.args(["--name=x", "--rw=randread", "--direct=1", "--ioengine=libaio", "--iodepth=200"]);
    load.args(["--bs=4k", "--numjobs=2", "--size=1M", "--io_size=2M", "--filename"]).arg(&mount);
    let mut load = load.stdout(Stdio::null()).spawn().expect("apt-get install fio");
    // As many as its threads take at a time.
    let end = Instant::now() + patience();
    let (mut before, mut same) = (0, 0);
    while before == 0 || same < 25 {
        assert!(Instant::now() < end, "{before} requests wait");
        std::thread::sleep(Duration::from_millis(20));
        let now = held(&mut empty.control);
        same = if now == before { same + 1 } else { 0 };
        before = now;
    }
    fs::File::options()
        .write(true)
        .open(empty.path("a"))
        .expect("the image")
        .set_len(2 << 20)
        .expect("its size");
    empty.server.signal(libc::SIGHUP);
    ok(disk(&empty, "resume").arg("a"));
    assert!(load.wait().expect("it ends").success());
    assert_eq!(fs::metadata(&mount).expect("the file").len(), 2 << 20);
    // What it has mounted goes with it.
    empty.server.stop();
}
