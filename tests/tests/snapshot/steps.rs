//! The server killed at a step of writing down where disks go on, or such a step failing: whichever name the disk is served
//! by next, it is the same disk.

use ringtap_tests::{Control, ok};
use serde_json::json;

use crate::bench::{Bench, snapshot};
use crate::checkpoints::count_of;
use crate::jobs::{hear, make, none_left};
use crate::stream::backing;
use crate::tampered::{Tampered, is_killed_by, successor};

fn copy(bench: &Bench, name: &str) -> String {
    let (uri, copy) = (bench.uri("a"), bench.text(name));
    ok("qemu-img", "qemu-utils", &["convert", "-f", "raw", "-O", "raw", &uri, &copy]);
    copy
}

fn same(one: &str, other: &str) {
    ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "raw", one, other]);
}

#[test]
fn a_pivot_that_cannot_be_written_down_leaves_the_disk_where_it_was() {
    for job in ["block-commit", "blockdev-mirror"] {
        let bench = Bench::new();
        make(&bench, "a.img", "raw", &[]);
        make(&bench, "copy", "raw", &[]);
        let server = bench.serve(&["a.img"], &["-f", "raw"]);
        let mut control = bench.control();
        bench.io("a", &["write -P 1 0 1M"]);
        snapshot(&mut control, "a", &bench.text("one.qcow2"));
        bench.io("a", &["write -P 2 0 512k"]);
        match job {
            "block-commit" => control.ok(job, json!({ "device": "a", "job-id": "j" })),
            _ => {
                let file = json!({ "driver": "file", "filename": bench.text("copy") });
                let add = json!({ "driver": "raw", "node-name": "copy", "file": file });
                control.ok("blockdev-add", add);
                let to = json!({ "device": "a", "job-id": "j", "target": "copy", "sync": "full" });
                control.ok(job, to)
            }
        };
        hear(&mut control, "BLOCK_JOB_READY");
        let top = bench.text("one.qcow2");
        let tampered = Tampered::begin(&server, &top, "fsync:error=EIO:when=1");
        control.ok("block-job-complete", json!({ "device": "j" }));
        let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
        let error = told["error"].as_str().unwrap_or_default();
        assert!(error.contains("cannot write down where it goes on"), "{job}: {told}");
        tampered.end();
        bench.io("a", &["write -P 3 256k 512k", "flush"]);
        let held = copy(&bench, "held");
        server.kill();
        for name in ["a.img", "one.qcow2"] {
            let server = bench.serve_as("a", name, &[]);
            same(&held, &copy(&bench, "found"));
            server.stop();
        }
        assert_eq!(successor(&top), "", "{job}");
        assert!(successor(&bench.text("a.img")).contains("written"), "{job}: it is sealed");
    }
}

/// Between them lie the header that names another image, and what is sealed.
const STEPS: [&str; 4] = ["setxattr:1", "fsync:1", "setxattr:2", "fsync:2"];

#[test]
fn a_commit_of_images_between_that_is_killed_at_a_record_goes_on() {
    for step in STEPS {
        let bench = Bench::new();
        make(&bench, "a.img", "raw", &[]);
        // Attributes are set by this very process then.
        let server = bench.serve(&["a.img"], &["-f", "raw", "--sandbox", "off"]);
        let mut control = bench.control();
        let names = ["one.qcow2", "two.qcow2", "three.qcow2"].map(|name| bench.text(name));
        for (name, own) in names.iter().zip(1..) {
            bench.io("a", &[&format!("write -P {own} {own}M 2M")]);
            snapshot(&mut control, "a", name);
        }
        bench.io("a", &["write -P 4 4M 512k", "flush"]);
        let held = copy(&bench, "held");
        let (call, when) = step.split_once(':').expect("both");
        let what = format!("{call}:signal=KILL:when={when}");
        let tampered = Tampered::begin(&server, &names[1], &what);
        let commit =
            json!({ "device": "a", "job-id": "j", "top": names[0], "base": bench.text("a.img") });
        is_killed_by(&mut control, "block-commit", commit);
        drop((tampered, server));
        let server = bench.serve(&["a.img"], &["-f", "raw"]);
        same(&held, &copy(&bench, "found"));
        let mut control = bench.control();
        none_left(&mut control);
        same(&held, &copy(&bench, "found"));
        assert_eq!(backing(&bench, "two.qcow2"), bench.text("a.img"), "{step}");
        server.stop();
        for image in &names[..2] {
            let record = successor(image);
            assert!(record.is_empty() || record.contains("written"), "{step}: {image}: {record}");
        }
        std::fs::remove_file(&names[0]).expect("removed");
        let server = bench.serve_as("a", "a.img", &[]);
        same(&held, &copy(&bench, "found"));
        server.stop();
    }
}

#[test]
fn a_stream_that_is_killed_at_a_record_leads_past_what_goes() {
    for step in ["setxattr:1", "fsync:1"] {
        let bench = Bench::new();
        make(&bench, "a.img", "raw", &[]);
        let server = bench.serve(&["a.img"], &["-f", "raw", "--sandbox", "off"]);
        let mut control = bench.control();
        let names = ["one.qcow2", "two.qcow2"].map(|name| bench.text(name));
        for (name, own) in names.iter().zip(1..) {
            bench.io("a", &[&format!("write -P {own} {own}M 2M")]);
            snapshot(&mut control, "a", name);
        }
        let held = copy(&bench, "held");
        let (call, when) = step.split_once(':').expect("both");
        let what = format!("{call}:signal=KILL:when={when}");
        let base = bench.text("a.img");
        let tampered = Tampered::begin(&server, &base, &what);
        let stream = json!({ "device": "a", "job-id": "j", "base": base });
        is_killed_by(&mut control, "block-stream", stream);
        drop((tampered, server));
        let server = bench.serve(&["a.img"], &["-f", "raw"]);
        none_left(&mut bench.control());
        same(&held, &copy(&bench, "found"));
        server.stop();
        std::fs::remove_file(&names[0]).expect("removed");
        let server = bench.serve_as("a", "a.img", &[]);
        same(&held, &copy(&bench, "found"));
        server.stop();
    }
}

/// A chain of three on `a.img`, of which a job has brought all into `to`, and waits to be told to have the disk go on there.
fn ready(bench: &Bench, control: &mut Control, to: &str) {
    bench.io("a", &["write -P 1 0 1M"]);
    for name in ["one.qcow2", "two.qcow2"] {
        snapshot(control, "a", &bench.text(name));
    }
    bench.io("a", &["write -P 2 0 512k"]);
    if to == "a.img" {
        control.ok("block-commit", json!({ "device": "a", "job-id": "j" }));
    } else {
        let file = json!({ "driver": "file", "filename": bench.text(to) });
        control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "copy", "file": file }));
        let job = json!({ "device": "a", "job-id": "j", "target": "copy", "sync": "full" });
        control.ok("blockdev-mirror", job);
    }
    hear(control, "BLOCK_JOB_READY");
}

#[test]
fn a_commit_of_a_whole_disk_that_is_killed_at_a_record_leaves_one_disk() {
    for (file, step) in [
        ("two.qcow2", "setxattr:1"),
        ("two.qcow2", "fsync:1"),
        ("a.img", "removexattr:1"),
        ("a.img", "fsync:1"),
        ("a.img", "fsync:2"),
    ] {
        let bench = Bench::new();
        make(&bench, "a.img", "raw", &[]);
        let server = bench.serve(&["a.img"], &["-f", "raw", "--sandbox", "off"]);
        let mut control = bench.control();
        ready(&bench, &mut control, "a.img");
        let (call, when) = step.split_once(':').expect("both");
        let what = format!("{call}:signal=KILL:when={when}");
        let tampered = Tampered::begin(&server, &bench.text(file), &what);
        is_killed_by(&mut control, "block-job-complete", json!({ "device": "j" }));
        drop((tampered, server));
        // Each name leads to the same disk, whoever is served first.
        let write = ["read -P 2 0 512k", "read -P 1 512k 512k", "write -P 3 256k 512k"];
        for (name, commands) in [
            ("a.img", &write[..]),
            ("two.qcow2", &["read -P 2 0 256k", "read -P 3 256k 512k", "write -P 4 0 4k"]),
            ("one.qcow2", &["read -P 4 0 4k", "read -P 3 256k 512k", "read -P 1 768k 256k"]),
            ("a.img", &["read -P 4 0 4k", "read -P 3 256k 512k"]),
        ] {
            println!("{file} {step}: {name}");
            let server = bench.serve_as("a", name, &[]);
            bench.io("a", commands);
            server.stop();
        }
    }
}

/// The record leads to the other image, and the server is killed before it has noted that with the bitmaps.
#[test]
fn checkpoints_go_along_with_a_disk_whose_server_is_killed_just_after_the_pivot() {
    for (to, late) in [("a.img", false), ("copy", false), ("a.img", true), ("copy", true)] {
        let bench = Bench::new();
        make(&bench, "a.img", "raw", &[]);
        make(&bench, "copy", "raw", &[]);
        let server = bench.serve(&["a.img"], &["-f", "raw", "--sandbox", "off"]);
        let mut control = bench.control();
        let add = json!({ "node": "a", "name": "since", "persistent": true });
        if !late {
            control.ok("block-dirty-bitmap-add", add.clone());
        }
        ready(&bench, &mut control, to);
        // One that the job does not know of when it begins.
        if late {
            control.ok("block-dirty-bitmap-add", add);
        }
        let before = if late { 0 } else { 1 << 20 };
        assert_eq!(count_of(&mut control, "a"), before, "{to}");
        bench.io("a", &["write -P 3 8M 64k", "flush"]);
        let tampered =
            Tampered::begin(&server, &bench.text("two.qcow2"), "fsync:signal=KILL:when=1");
        is_killed_by(&mut control, "block-job-complete", json!({ "device": "j" }));
        drop((tampered, server));
        let server = bench.serve(&["a.img"], &["-f", "raw"]);
        let mut control = bench.control();
        let found = control.ok("query-named-block-nodes", json!({}));
        assert!(found.to_string().contains(&bench.text(to)), "{to}: {found}");
        assert_eq!(count_of(&mut control, "a"), before + (64 << 10), "{to}, late: {late}");
        bench.io("a", &["write -P 4 20M 64k", "read -P 3 8M 64k"]);
        server.kill();
        let server = bench.serve(&["a.img"], &["-f", "raw"]);
        let mut control = bench.control();
        let wanted = before + (128 << 10);
        assert_eq!(count_of(&mut control, "a"), wanted, "{to}, late: {late}: killed again");
        control.ok("block-dirty-bitmap-remove", json!({ "node": "a", "name": "since" }));
        server.stop();
    }
}
