//! Moments that a node keeps and another shows: copy-before-write and snapshot-access.

use std::fs;
use std::time::{Duration, Instant};

use ringtap_tests::{Control, Server, file_system_of, is_well, ok, plain, program, ringtap};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB, said};
use crate::checkpoints::add_copy;
use crate::jobs::load;
use crate::moment::{is_pulled, is_read, now, served, uri};

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
        let then = now(&bench);
        control.ok(
            "blockdev-add",
            keep(json!({ "on-cbw-error": "break-snapshot", "cbw-timeout": 30 })),
        );
        for name in ["moment", "again"] {
            control.ok("blockdev-add", show(name));
        }
        control.ok("block-export-add", export("pull", "moment", false));
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
            &uri(&bench, "disk"),
        ];
        let text = ok("qemu-io", "qemu-utils", &io);
        assert!(!text.contains("failed"), "{text}");
        let guest = load(&bench, "3");
        is_pulled(&bench, &uri(&bench, "pull"), &then);
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
        no("blockdev-del", del("cbw"), "'cbw' is in use: the node 'moment' shows its moment");
        no("blockdev-del", del("copy"), "in use: the node 'cbw' keeps a moment with it");
        no("blockdev-del", del("moment"), "in use: the export 'pull' shows it");
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
    let more = json!({ "on-cbw-error": "break-snapshot", "__ringtap_scratch-limit": MIB, "cbw-timeout": 30 });
    control.ok("blockdev-add", keep(more));
    control.ok("blockdev-add", show("moment"));
    control.ok("block-export-add", export("pull", "moment", false));
    let uri = uri(&bench, "pull");
    bench.io("a", &["write -P 4 0 512k"]);
    assert!(is_read(&uri));
    bench.io("a", &["write -P 5 4M 4M", "read -P 5 4M 4M", "read -P 4 0 512k"]);
    assert!(!is_read(&uri), "it is not to be believed any more");
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

/// Whether a write of the guest is carried out; one that is not is an error and no more.
fn writes(bench: &Bench, command: &str) -> bool {
    let uri = bench.uri("a");
    let output = program("qemu-io", "qemu-utils", ["-f", "raw", "-c", command, &*uri]);
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let failed = said.contains("failed: Input/output error");
    assert!(failed || output.status.success() && !said.contains("failed"), "{said}");
    !failed
}

/// Where nothing is said of it a guest's write fails, as in QEMU.
const CHOICES: [(Option<&str>, bool); 3] =
    [(None, true), (Some("break-guest-write"), true), (Some("break-snapshot"), false)];

#[test]
fn a_target_that_is_full_breaks_what_was_said() {
    for (on_error, keeps) in CHOICES {
        let bench = Bench::new();
        let set_up = file_system_of(16, "tmpfs", &[], "");
        let folder = set_up.folder();
        let (small, ballast) = (folder.join("small"), folder.join("ballast"));
        let (server, mut control) = served(&bench, "raw");
        let name = ringtap();
        ok(plain(&name), "ringtap", &["create", "-q", "-f", "qcow2", plain(&small), "64M"]);
        fs::write(&ballast, vec![1; 10 << 20]).expect("the ballast");
        let file =
            json!({ "driver": "file", "filename": plain(&small), "cache": { "direct": false } });
        let target = json!({ "driver": "qcow2", "node-name": "small", "file": file, "__ringtap_on-error": "report" });
        control.ok("blockdev-add", target);
        let then = now(&bench);
        let mut more = json!({ "target": "small" });
        if let Some(on_error) = on_error {
            more["on-cbw-error"] = on_error.into();
        }
        control.ok("blockdev-add", keep(more));
        control.ok("blockdev-add", show("moment"));
        control.ok("block-export-add", export("pull", "moment", false));
        let uri = uri(&bench, "pull");
        assert!(writes(&bench, "write -P 4 0 1M"));
        assert!(is_read(&uri));
        // More than there is room for, piece by piece.
        let all = (0..12).map(|at| writes(&bench, &format!("write -P 5 {}M 1M", at + 2)));
        let carried_out: Vec<bool> = all.collect();
        let some = carried_out.contains(&false);
        assert_eq!((some, is_read(&uri)), (keeps, keeps), "{on_error:?}: {carried_out:?}");
        for (at, written) in (2..).zip(&carried_out) {
            let value = if *written { 5 } else { 1 };
            bench.io("a", &[&format!("read -P {value} {at}M 1M")]);
        }
        fs::remove_file(&ballast).expect("removed");
        if keeps {
            assert!(writes(&bench, "write -P 6 2M 4M"), "there is room again");
            is_pulled(&bench, &uri, &then);
        }
        control.ok("block-export-del", json!({ "id": "pull", "mode": "hard" }));
        for name in ["moment", "cbw", "small"] {
            control.ok("blockdev-del", del(name));
        }
        assert!(writes(&bench, "write -P 7 0 16M"));
        server.stop();
    }
}

/// A server of its own, whose disk is the node `far`.
fn far(bench: &Bench, control: &mut Control) -> Server {
    bench.raw("far.img", 64 * MIB);
    let far = bench.serve_as("f", "far.img", &["-f", "raw"]);
    let at = json!({ "type": "unix", "path": format!("{}.nbd", bench.text("f")) });
    let file = json!({ "driver": "nbd", "server": at, "export": "f" });
    control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "far", "file": file }));
    far
}

#[test]
fn a_target_that_is_late_breaks_what_was_said() {
    for (on_error, keeps) in CHOICES {
        let bench = Bench::new();
        let (server, mut control) = served(&bench, "raw");
        let far = far(&bench, &mut control);
        let then = now(&bench);
        let mut more = json!({ "target": "far", "cbw-timeout": 1 });
        if let Some(on_error) = on_error {
            more["on-cbw-error"] = on_error.into();
        }
        control.ok("blockdev-add", keep(more));
        control.ok("blockdev-add", show("moment"));
        control.ok("block-export-add", export("pull", "moment", false));
        let uri = uri(&bench, "pull");
        assert!(writes(&bench, "write -P 4 0 64k"));
        far.signal(libc::SIGSTOP);
        let began = Instant::now();
        assert_eq!(writes(&bench, "write -P 5 2M 64k"), !keeps, "{on_error:?}");
        assert!(
            began.elapsed() >= Duration::from_secs(1),
            "it is waited for: {:?}",
            began.elapsed()
        );
        far.signal(libc::SIGCONT);
        let value = if keeps { 1 } else { 5 };
        bench.io("a", &[&format!("read -P {value} 2M 64k")]);
        assert!(writes(&bench, "write -P 6 2M 64k"));
        assert_eq!(is_read(&uri), keeps, "{on_error:?}");
        if keeps {
            is_pulled(&bench, &uri, &then);
        }
        server.stop();
        far.stop();
    }
}

/// As long as that takes, where nothing is said.
#[test]
fn a_guests_write_waits_for_the_target() {
    let bench = Bench::new();
    let (server, mut control) = served(&bench, "raw");
    let far = far(&bench, &mut control);
    control.ok("blockdev-add", keep(json!({ "target": "far" })));
    far.signal(libc::SIGSTOP);
    std::thread::scope(|scope| {
        let write = scope.spawn(|| writes(&bench, "write -P 5 2M 64k"));
        std::thread::sleep(Duration::from_secs(2));
        assert!(!write.is_finished(), "it waits");
        far.signal(libc::SIGCONT);
        assert!(write.join().expect("it ends"));
    });
    bench.io("a", &["read -P 5 2M 64k"]);
    server.stop();
    far.stop();
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
        (keep(json!({ "on-cbw-error": "break-all" })), "does not accept value"),
        (keep(json!({ "bitmap": { "node": "a", "name": "b" } })), "Dirty bitmap 'b' not found"),
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
