//! Images between a disk's topmost one and one below, brought into that one while the guest writes; and streams of some
//! images alone.

use std::fs;
use std::thread;
use std::time::Duration;

use ringtap_tests::{Control, Server, is_well, ok};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB, refusal, said, snapshot};
use crate::jobs::{goes_on, hear, load, make, none_left};
use crate::stream::backing;

/// A disk of five images: `a.img`, and four overlays, each with something of its own.
pub fn tower(bench: &Bench, format: &str, more: &[&str]) -> (Server, Control) {
    make(bench, "a.img", format, more);
    let server = bench.serve(&["a.img"], &["-f", format]);
    let mut control = bench.control();
    bench.io("a", &["write -P 1 0 6M", "write -P 1 48M 2M"]);
    for (at, name) in NAMES.iter().enumerate() {
        snapshot(&mut control, "a", &bench.text(name));
        let (own, zeros) = (at + 2, 100 + 200 * at);
        let writes = [
            format!("write -P {own} {at}M 512k"),
            format!("write -z {at}{zeros}k 64k"),
            "flush".into(),
        ];
        bench.io("a", &writes.each_ref().map(String::as_str));
    }
    (server, control)
}

pub const NAMES: [&str; 4] = ["one.qcow2", "two.qcow2", "three.qcow2", "four.qcow2"];

/// What the disk holds now, as a file.
pub fn copy(bench: &Bench, name: &str) -> String {
    let (uri, copy) = (bench.uri("a"), bench.text(name));
    ok("qemu-img", "qemu-utils", &["convert", "-f", "raw", "-O", "raw", &uri, &copy]);
    copy
}

pub fn same(copy: &str, format: &str, image: &str) {
    ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", format, copy, image]);
}

/// The names of the images, the topmost first.
pub fn chain(control: &mut Control) -> Vec<String> {
    let nodes = control.ok("query-named-block-nodes", json!({}));
    let (mut names, mut image) = (vec![], &nodes[0]["image"]);
    while let Some(path) = image["filename"].as_str() {
        names.extend(path.rsplit('/').next().map(str::to_owned));
        image = &image["backing-image"];
    }
    names
}

pub fn ends(control: &mut Control) {
    let told = hear(control, "BLOCK_JOB_COMPLETED");
    assert!(told.get("error").is_none(), "{told}");
}

#[test]
fn images_between_are_committed_while_the_guest_writes() {
    // The image below, those that go, and what is left.
    for (format, top, base, left) in [
        ("raw", "three.qcow2", "a.img", &["four.qcow2", "a.img"][..]),
        ("qcow2", "two.qcow2", "one.qcow2", &["four.qcow2", "three.qcow2", "one.qcow2", "a.img"]),
        ("vpc", "one.qcow2", "a.img", &["four.qcow2", "three.qcow2", "two.qcow2", "a.img"]),
    ] {
        let bench = Bench::new();
        let (server, mut control) = tower(&bench, format, &[]);
        let before = copy(&bench, "before");
        let [top_path, base_path] = [top, base].map(|name| bench.text(name));
        let commit = json!({ "device": "a", "job-id": "j", "top": top_path, "base": base_path });
        control.ok("block-commit", commit);
        ends(&mut control);
        assert_eq!(chain(&mut control), left, "{format}");
        let after = copy(&bench, "after");
        same(&before, "raw", &after);
        // Under load, with what is left of it.
        let guest = load(&bench, "2");
        thread::sleep(Duration::from_millis(200));
        if format == "qcow2" {
            let (top, base) = (bench.text("three.qcow2"), bench.text("one.qcow2"));
            let more = json!({ "device": "a", "job-id": "j", "top": top, "base": base, "backing-file": "one.qcow2" });
            control.ok("block-commit", more);
            ends(&mut control);
            assert_eq!(backing(&bench, "four.qcow2"), "one.qcow2");
        }
        is_well(guest);
        bench.io("a", &["write -P 9 60M 64k"]);
        let written = copy(&bench, "written");
        server.kill();
        // What went can be deleted, and the disk is found by the name of what stays.
        let goes =
            |name: &&&str| !left.contains(name) || format == "qcow2" && **name == "three.qcow2";
        for name in NAMES.iter().filter(goes) {
            fs::remove_file(bench.path(name)).expect("removed");
        }
        let server = bench.serve(&["a.img"], &["-f", format]);
        let again = copy(&bench, "again");
        same(&written, "raw", &again);
        server.stop();
        ok("qemu-img", "qemu-utils", &["check", "-q", &bench.text("four.qcow2")]);
        if format == "qcow2" {
            ok("qemu-img", "qemu-utils", &["check", "-q", &bench.text("one.qcow2")]);
        }
        same(&written, "qcow2", &bench.text("four.qcow2"));
    }
}

#[test]
fn a_commit_of_images_between_that_is_killed_goes_on() {
    for format in ["raw", "qcow2"] {
        let bench = Bench::new();
        let (server, mut control) = tower(&bench, format, &[]);
        bench.io("a", &["write -P 7 20M 8M"]);
        snapshot(&mut control, "a", &bench.text("five.qcow2"));
        let slowly = json!({ "device": "a", "job-id": "j", "speed": 256 << 10, "top": bench.text("four.qcow2"),
                             "base": bench.text("a.img") });
        let mut server = server;
        control.ok("block-commit", slowly);
        for at in 0..3u64 {
            let place = format!("write -P {} {}M 64k", 20 + at, 30 + at);
            bench.io("a", &[&place]);
            let held = copy(&bench, "held");
            thread::sleep(Duration::from_millis(300 + 211 * at));
            server.kill();
            server = bench.serve(&["a.img"], &["-f", format]);
            same(&held, "raw", &copy(&bench, "found"));
            goes_on_slowly(&mut bench.control());
        }
        let mut control = bench.control();
        goes_on(&mut control, "commit");
        let held = copy(&bench, "held");
        none_left(&mut control);
        server.kill();
        let server = bench.serve(&["a.img"], &["-f", format]);
        assert_eq!(chain(&mut bench.control()), ["five.qcow2", "a.img"]);
        same(&held, "raw", &copy(&bench, "found"));
        server.stop();
        same(&held, "qcow2", &bench.text("five.qcow2"));
        if format == "qcow2" {
            ok("qemu-img", "qemu-utils", &["check", "-q", &bench.text("a.img")]);
        }
    }
}

fn goes_on_slowly(control: &mut Control) {
    let jobs = control.ok("query-jobs", json!({}));
    assert_eq!((&jobs[0]["id"], &jobs[0]["type"]), (&json!("j"), &json!("commit")), "{jobs}");
}

#[test]
fn what_cannot_be_committed_or_streamed_is_refused_as_by_qemu() {
    let bench = Bench::new();
    let (server, mut control) = tower(&bench, "raw", &[]);
    let path = |name: &str| bench.text(name);
    bench.raw("other.raw", MIB);
    let file = json!({ "driver": "file", "filename": path("other.raw") });
    control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "other", "file": file }));
    let with = |more: Value| {
        let mut all = json!({ "device": "a", "job-id": "j" });
        more.as_object().into_iter().flatten().for_each(|(key, value)| all[key] = value.clone());
        all
    };
    for (more, text) in [
        (json!({ "top": "x", "top-node": "y" }), "'top-node' and 'top' are mutually exclusive"),
        (json!({ "base": "x", "base-node": "y" }), "'base-node' and 'base' are mutually exclusive"),
        (json!({ "top": "/nowhere" }), "Top image file /nowhere not found"),
        (json!({ "top-node": "nobody" }), "Cannot find device='' nor node-name='nobody'"),
        (json!({ "top-node": "other" }), "'other' is not in this backing file chain"),
        (json!({ "base-node": "other" }), "'other' is not in this backing file chain"),
        (json!({ "base": "/nowhere" }), "Can't find '/nowhere' in the backing chain"),
        (json!({ "top": path("one.qcow2"), "base": path("two.qcow2") }), "Can't find"),
        (json!({ "base-node": "a" }), "cannot commit an image into itself"),
        (json!({ "top": path("a.img") }), "cannot commit an image into itself"),
        (json!({ "backing-file": "x" }), "'backing-file' specified, but 'top' is the active layer"),
        (
            json!({ "top": path("two.qcow2"), "base": path("a.img"), "backing-file": "one.qcow2" }),
            "does not lead to",
        ),
    ] {
        let error = control.call("block-commit", with(more.clone())).expect_err("it cannot be");
        assert!(error.contains(text), "{more}: {error}");
    }
    for (more, text) in [
        (
            json!({ "base": "x", "bottom": "y" }),
            "'base' and 'bottom' cannot be specified at the same time",
        ),
        (
            json!({ "base-node": "x", "bottom": "y" }),
            "'bottom' and 'base-node' cannot be specified at the same time",
        ),
        (json!({ "bottom": "other" }), "Node 'other' is not in a chain starting from 'a'"),
        (json!({ "bottom": "nobody" }), "Cannot find device='' nor node-name='nobody'"),
    ] {
        let error = control.call("block-stream", with(more.clone())).expect_err("it cannot be");
        assert!(error.contains(text), "{more}: {error}");
    }
    // Another disk reads what is to be written to.
    let at = format!("unix:{}", path("control"));
    let file = json!({ "driver": "file", "filename": path("two.qcow2") });
    let open = json!({ "driver": "qcow2", "node-name": "reader", "read-only": true, "file": file });
    control.ok("blockdev-add", open);
    let args = [
        "disk",
        "commit",
        "--control",
        &at,
        "a",
        "--top",
        &path("three.qcow2"),
        "--base",
        &path("a.img"),
    ];
    let error = refusal(&args);
    assert!(error.contains("Node 'reader' is busy"), "{error}");
    control.ok("blockdev-del", json!({ "node-name": "reader" }));
    let before = copy(&bench, "before");
    said(&args);
    assert_eq!(chain(&mut control), ["four.qcow2", "a.img"]);
    same(&before, "raw", &copy(&bench, "after"));
    server.stop();
}

#[test]
fn the_lowest_image_that_is_brought_up_may_be_said() {
    let bench = Bench::new();
    let (server, mut control) = tower(&bench, "raw", &[]);
    let before = copy(&bench, "before");
    let at = format!("unix:{}", bench.text("control"));
    let stream = |bottom: &str| {
        said(&["disk", "stream", "--control", &at, "a", "--bottom", &bench.text(bottom)]);
    };
    stream("three.qcow2");
    // All clients are told of its end; the next is another's.
    ends(&mut control);
    assert_eq!(chain(&mut control), ["four.qcow2", "two.qcow2", "one.qcow2", "a.img"]);
    let itself = json!({ "device": "a", "job-id": "j", "bottom": "a" });
    control.ok("block-stream", itself);
    ends(&mut control);
    assert_eq!(chain(&mut control), ["four.qcow2", "two.qcow2", "one.qcow2", "a.img"]);
    stream("a.img");
    assert_eq!(chain(&mut control), ["four.qcow2"]);
    same(&before, "raw", &copy(&bench, "after"));
    let error = refusal(&["disk", "stream", "--control", &at, "a", "--bottom", "/nowhere"]);
    assert!(error.contains("no image of a"), "{error}");
    server.stop();
}
