//! Disks that go while others are under load.

use std::process::{Child, Command, Stdio};

use ringtap_tests::lab;
use serde_json::json;

use crate::{Empty, nbd_size, ok, vhost};

fn load(socket: &std::path::Path, seconds: &str) -> Child {
    let mut load = Command::new(lab());
    load.arg("load").arg("--socket").arg(socket);
    load.args(["--rw", "randrw", "--verify", "--depth", "4", "--seconds", seconds]);
    load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("ringtap-lab load")
}

#[test]
fn disks_come_and_go_beside_one_that_is_under_load() {
    let mut empty = Empty::new();
    empty.add("busy", "qcow2", "64M");
    let (busy, idle) = (empty.path("busy.sock"), empty.path("idle.sock"));
    empty.export("busy", "busy", "vhost-user-blk", vhost(&busy));
    let uri = empty.nbd();
    let under_load = load(&busy, "4");
    // Until it is.
    loop {
        let stats = empty.control.ok("query-blockstats", json!({}));
        if stats[0]["stats"]["wr_operations"].as_u64() > Some(100) {
            break;
        }
    }
    for round in 0..5 {
        let name = format!("idle{round}");
        empty.add(&name, "qcow2", "16M");
        empty.export("v", &name, "vhost-user-blk", vhost(&idle));
        empty.export("n", &name, "nbd", json!({}));
        assert_eq!(nbd_size(&uri(&name)), Ok(16 << 20));
        // A front-end is no reason to keep an export: as QEMU has it.
        let mut other = load(&idle, "30");
        loop {
            let stats = empty.control.ok("query-blockstats", json!({}));
            let mine =
                stats.as_array().expect("a list").iter().find(|one| one["node-name"] == *name);
            if mine.expect("its node")["stats"]["wr_operations"].as_u64() > Some(10) {
                break;
            }
        }
        empty.control.ok("block-export-del", json!({"id": "v"}));
        empty.control.ok("block-export-del", json!({"id": "n"}));
        empty.control.ok("blockdev-del", json!({"node-name": name}));
        let _ = other.kill();
        let _ = other.wait();
        let mut check = Command::new("qemu-img");
        ok(check.args(["check", "-q", "-f", "qcow2"]).arg(empty.path(&name)));
    }
    let output = under_load.wait_with_output().expect("its end");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    empty.server.stop();
}

#[test]
fn an_export_that_is_used_goes_only_by_force() {
    let mut empty = Empty::new();
    empty.add("a", "qcow2", "16M");
    empty.add("b", "qcow2", "16M");
    let uri = empty.nbd();
    for node in ["a", "b"] {
        empty.export(node, node, "nbd", json!({}));
    }
    // Each writes until it is told to end, or its export goes.
    let write = |node: &str| {
        let script = format!(
            "import nbd, sys\nh = nbd.NBD()\nh.connect_uri('{}')\nprint('there', flush=True)\n\
             h.pwrite(b'x' * 4096, 8192)\nsys.stdin.readline()\nh.pwrite(b'y' * 4096, 4096)\nh.flush()\nprint('done')",
            uri(node)
        );
        let mut python = Command::new("/usr/bin/python3");
        python
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = python.spawn().expect("python3, with python3-libnbd");
        let mut line = [0; 6];
        std::io::Read::read_exact(child.stdout.as_mut().expect("its output"), &mut line)
            .expect("it is there");
        child
    };
    let (a, b) = (write("a"), write("b"));
    let said = empty.control.call("block-export-del", json!({"id": "a"})).expect_err("in use");
    assert!(said.contains("still in use"), "{said}");
    let said = empty.control.call("block-export-del", json!({"id": "a", "mode": "safe"}));
    assert!(said.is_err());
    empty.control.ok("block-export-del", json!({"id": "a", "mode": "hard"}));
    assert_eq!(empty.control.event().1, json!({"id": "a"}));
    assert_eq!(empty.exports(), ["b"]);
    empty.control.ok("blockdev-del", json!({"node-name": "a"}));
    let ended = |mut child: Child| {
        drop(child.stdin.take());
        child.wait_with_output().expect("its end")
    };
    let (a, b) = (ended(a), ended(b));
    assert!(!a.status.success(), "{a:?}");
    assert!(b.status.success() && b.stdout == b"done\n", "{b:?}");
    // What was acknowledged before is there.
    let image = empty.text("a");
    let mut read = Command::new("qemu-io");
    ok(read.args(["-f", "qcow2", "-c", "read -P 120 8k 4k", &image]));
    empty.server.stop();
}
