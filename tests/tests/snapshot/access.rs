//! Moments that a node keeps and another shows: copy-before-write and snapshot-access.

use ringtap_tests::{Control, Server, is_well, ok, program};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB, said};
use crate::checkpoints::add_copy;
use crate::jobs::{load, make};

fn served(bench: &Bench, format: &str) -> (Server, Control) {
    make(bench, "a.img", format, &[]);
    make(bench, "copy", "qcow2", &[]);
    let server = bench.serve(&["a.img"], &["-f", format]);
    let mut control = bench.control();
    bench.io("a", &["write -P 1 0 16M", "write -P 2 1M 64k", "write -P 3 32M 128k"]);
    add_copy(&mut control, bench, "qcow2");
    let data = json!({ "path": bench.text("pull") });
    control.ok("nbd-server-start", json!({ "addr": { "type": "unix", "data": data } }));
    (server, control)
}

fn keep(more: Value) -> Value {
    let mut all =
        json!({ "driver": "copy-before-write", "node-name": "cbw", "file": "a", "target": "copy" });
    more.as_object().into_iter().flatten().for_each(|(key, value)| all[key] = value.clone());
    all
}

fn show(name: &str) -> Value {
    json!({ "driver": "snapshot-access", "node-name": name, "file": "cbw" })
}

fn export(id: &str, node: &str, writable: bool) -> Value {
    json!({ "id": id, "type": "nbd", "node-name": node, "name": id, "writable": writable })
}

fn del(name: &str) -> Value {
    json!({ "node-name": name })
}

#[test]
fn a_moment_is_pulled_from_a_node_while_the_guest_goes_on() {
    for format in ["raw", "qcow2"] {
        let bench = Bench::new();
        let (server, mut control) = served(&bench, format);
        let then = bench.text("then.raw");
        ok(
            "qemu-img",
            "qemu-utils",
            &["convert", "-f", "raw", "-O", "raw", &bench.uri("a"), &then],
        );
        control.ok(
            "blockdev-add",
            keep(json!({ "on-cbw-error": "break-snapshot", "cbw-timeout": 30 })),
        );
        for name in ["moment", "again"] {
            control.ok("blockdev-add", show(name));
        }
        control.ok("block-export-add", export("pull", "moment", false));
        let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", bench.text("pull"));
        bench.io("a", &["write -P 7 0 2M", "write -z 32M 64k", "write -P 8 60M 1M"]);
        // The node that keeps it is the disk, for an export.
        control.ok("block-export-add", export("disk", "cbw", true));
        let io = [
            "-f",
            "raw",
            "-c",
            "read -P 7 0 2M",
            "-c",
            "write -P 9 8M 1M",
            "-c",
            "read -P 9 8M 1M",
            &uri("disk"),
        ];
        let text = ok("qemu-io", "qemu-utils", &io);
        assert!(!text.contains("failed"), "{text}");
        let guest = load(&bench, "3");
        let copies = ["by-nbdcopy.raw", "by-qemu.raw"].map(|name| bench.text(name));
        ok("nbdcopy", "libnbd-bin", &[&uri("pull"), &copies[0]]);
        let pull = uri("pull");
        ok("qemu-img", "qemu-utils", &["convert", "-f", "raw", "-O", "raw", &pull, &copies[1]]);
        for copy in &copies {
            ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "raw", &then, copy]);
        }
        is_well(guest);
        let nodes = control.ok("query-named-block-nodes", json!({}));
        let drivers: Vec<String> = nodes
            .as_array()
            .into_iter()
            .flatten()
            .map(|node| {
                format!("{} {} {}", node["node-name"], node["drv"], node["ro"]).replace('"', "")
            })
            .collect();
        for wanted in [
            "cbw copy-before-write false",
            "moment snapshot-access true",
            "again snapshot-access true",
        ] {
            assert!(drivers.iter().any(|one| one == wanted), "{drivers:?}");
        }
        let listed =
            said(&["disk", "list", "--control", &format!("unix:{}", bench.text("control"))]);
        assert!(listed.contains("moment: snapshot-access, 67108864 bytes, read-only"), "{listed}");
        let mut no = |command: &str, arguments: Value, text: &str| {
            let error = control.call(command, arguments).expect_err("it cannot be");
            assert!(error.contains(text), "{command}: {error}");
        };
        no("block-export-add", export("w", "moment", true), "read-only");
        no("block-export-add", export("w", "copy", true), "read-only");
        no("blockdev-del", del("cbw"), "Node 'cbw' is in use");
        no("blockdev-del", del("copy"), "Node 'copy' is in use");
        no("blockdev-del", del("moment"), "Node 'moment' is in use");
        no("blockdev-add", show("cbw"), "Duplicate nodes with node-name='cbw'");
        no(
            "blockdev-snapshot-sync",
            json!({ "node-name": "a", "snapshot-file": bench.text("x") }),
            "being changed",
        );
        no("__ringtap_upgrade", json!({}), "cbw");
        for id in ["pull", "disk"] {
            control.ok("block-export-del", json!({ "id": id, "mode": "hard" }));
        }
        for name in ["moment", "again", "cbw", "copy"] {
            control.ok("blockdev-del", del(name));
        }
        // It is a disk like others again.
        let node = json!({ "node-name": "a", "snapshot-file": bench.text("x.qcow2") });
        control.ok("blockdev-snapshot-sync", node);
        bench.io("a", &["write -P 4 0 64k", "read -P 4 0 64k"]);
        server.stop();
        ok("qemu-img", "qemu-utils", &["check", "-q", &bench.text("copy")]);
    }
}

#[test]
fn a_moment_that_cannot_be_kept_breaks_and_the_guest_does_not() {
    let bench = Bench::new();
    let (server, mut control) = served(&bench, "raw");
    control.ok("blockdev-add", keep(json!({ "__ringtap_scratch-limit": MIB, "cbw-timeout": 30 })));
    control.ok("blockdev-add", show("moment"));
    control.ok("block-export-add", export("pull", "moment", false));
    let uri = format!("nbd+unix:///pull?socket={}", bench.text("pull"));
    let read = || {
        let args = ["-r", "-f", "raw", "-c", "read -P 1 8M 64k", &uri];
        let output = program("qemu-io", "qemu-utils", args);
        output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("failed")
    };
    bench.io("a", &["write -P 4 0 512k"]);
    assert!(read());
    bench.io("a", &["write -P 5 4M 4M", "read -P 5 4M 4M", "read -P 4 0 512k"]);
    assert!(!read(), "it is not to be believed any more");
    // A server that ends, or is killed, with all that: the disk holds what was written.
    server.kill();
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["read -P 5 4M 4M", "read -P 4 0 512k", "read -P 1 8M 8M"]);
    let mut control = bench.control();
    add_copy(&mut control, &bench, "qcow2");
    control.ok("blockdev-add", keep(json!({ "cbw-timeout": 0 })));
    control.ok("blockdev-add", show("moment"));
    bench.io("a", &["write -P 6 4M 64k"]);
    let end = server.stop();
    assert!(!end.contains("ERROR"), "{end}");
    bench.holds("a.img", "raw", &["read -P 6 4M 64k"]);
}

#[test]
fn what_keeps_no_moment_is_refused() {
    let bench = Bench::new();
    let (server, mut control) = served(&bench, "raw");
    bench.raw("small", MIB);
    let file = json!({ "driver": "file", "filename": bench.text("small") });
    control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "small", "file": file }));
    for (arguments, text) in [
        (keep(json!({ "file": "nobody" })), "Cannot find device='nobody' nor node-name='nobody'"),
        (keep(json!({ "target": "nobody" })), "Cannot find device='nobody' nor node-name='nobody'"),
        (keep(json!({ "target": "a" })), "Source and target cannot be the same"),
        (keep(json!({ "target": "small" })), "the disk"),
        (keep(json!({ "on-cbw-error": "break-guest-write" })), "does not accept value"),
        (keep(json!({ "bitmap": { "node": "a", "name": "b" } })), "'bitmap' is unexpected"),
        (
            json!({ "driver": "copy-before-write", "node-name": "cbw", "file": "a" }),
            "'target' is missing",
        ),
        (json!({ "driver": "snapshot-access", "node-name": "s" }), "'file' is missing"),
        (show("s"), "Cannot find device='cbw' nor node-name='cbw'"),
        (json!({ "driver": "snapshot-access", "node-name": "s", "file": "a" }), "keeps no moment"),
    ] {
        let error = control.call("blockdev-add", arguments.clone()).expect_err("it cannot be");
        assert!(error.contains(text), "{arguments}: {error}");
    }
    // What could not be keeps nothing in use.
    for name in ["small", "copy"] {
        control.ok("blockdev-del", del(name));
    }
    server.stop();
}
