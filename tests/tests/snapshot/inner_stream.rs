//! What lies below an image between a disk's topmost one and the deepest, brought into that while the guest writes.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use ringtap_tests::{is_well, ok};
use serde_json::{Value, json};

use crate::bench::{Bench, refusal, said, snapshot};
use crate::inner::{NAMES, chain, copy, ends, same, tower};
use crate::jobs::{goes_on, hear, load, none_left, runs};
use crate::stream::backing;

fn stream(bench: &Bench, into: &str, base: Option<&str>) -> Value {
    let base = base.map(|base| bench.text(base));
    let mut all = json!({ "device": "a", "job-id": "j", "__ringtap_into": bench.text(into) });
    if let Some(base) = base {
        all["base"] = base.into();
    }
    all
}

/// A client whose queue has served a request, and rests from then on.
struct Resting(Child);

impl Resting {
    fn begin(bench: &Bench) -> Resting {
        let args = ["-r", "-f", "raw", "-c", "read 0 64k", "-c", "sleep 600000", &bench.uri("a")];
        let mut child = Command::new("stdbuf")
            .args(["-oL", "qemu-io"])
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io is missing: apt-get install qemu-utils");
        let mut line = String::new();
        let mut told = std::io::BufReader::new(child.stdout.take().expect("its words"));
        std::io::BufRead::read_line(&mut told, &mut line).expect("it has read");
        Resting(child)
    }
}

impl Drop for Resting {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn checks(bench: &Bench, images: &[&str]) {
    for image in images.iter().filter(|image| image.ends_with("qcow2")) {
        ok("qemu-img", "qemu-utils", &["check", "-q", &bench.text(image)]);
    }
}

#[test]
fn an_image_between_takes_what_lies_below_while_the_guest_writes() {
    for (format, into, base, left) in [
        ("raw", "three.qcow2", Some("a.img"), &["four.qcow2", "three.qcow2", "a.img"][..]),
        ("qcow2", "two.qcow2", None, &["four.qcow2", "three.qcow2", "two.qcow2"]),
        (
            "vpc",
            "three.qcow2",
            Some("one.qcow2"),
            &["four.qcow2", "three.qcow2", "one.qcow2", "a.img"],
        ),
    ] {
        let bench = Bench::new();
        let (server, mut control) = tower(&bench, format, &[]);
        let before = copy(&bench, "before");
        control.ok("block-stream", stream(&bench, into, base));
        ends(&mut control);
        assert_eq!(chain(&mut control), left, "{format}");
        let named = base.map(|base| bench.text(base));
        assert_eq!(backing(&bench, into), json!(named));
        same(&before, "raw", &copy(&bench, "after"));
        // What is left of it under load, into the same image again, and for the guest's own.
        let guest = load(&bench, "3");
        thread::sleep(Duration::from_millis(200));
        if base.is_some() {
            control.ok("block-stream", stream(&bench, into, None));
            ends(&mut control);
            assert_eq!(chain(&mut control), ["four.qcow2", "three.qcow2"], "{format}");
        }
        is_well(guest);
        bench.io("a", &["write -P 9 60M 64k"]);
        let written = copy(&bench, "written");
        server.kill();
        let left = if base.is_some() { &["four.qcow2", "three.qcow2"][..] } else { left };
        // What went can be deleted, and the disk is found by its old name as long as the file is there.
        for name in NAMES.iter().filter(|name| !left.contains(name)) {
            fs::remove_file(bench.path(name)).expect("removed");
        }
        let server = bench.serve(&["a.img"], &["-f", format]);
        same(&written, "raw", &copy(&bench, "again"));
        server.stop();
        fs::remove_file(bench.path("a.img")).expect("removed");
        checks(&bench, left);
        same(&written, "qcow2", &bench.text("four.qcow2"));
    }
}

#[test]
fn a_stream_into_an_image_between_goes_on_after_kills() {
    for (format, base) in [("raw", Some("a.img")), ("qcow2", None)] {
        let bench = Bench::new();
        let (mut server, mut control) = tower(&bench, format, &[]);
        bench.io("a", &["write -P 7 20M 8M"]);
        snapshot(&mut control, "a", &bench.text("five.qcow2"));
        bench.io("a", &["write -P 6 22M 1M"]);
        let mut slowly = stream(&bench, "four.qcow2", base);
        slowly["speed"] = json!(64 << 10);
        control.ok("block-stream", slowly);
        for at in 0..3u64 {
            runs(&mut bench.control());
            let place = format!("write -P {} {}M 64k", 20 + at, 30 + at);
            bench.io("a", &[&place]);
            let held = copy(&bench, "held");
            thread::sleep(Duration::from_millis(300 + 211 * at));
            server.kill();
            server = bench.serve(&["a.img"], &["-f", format]);
            same(&held, "raw", &copy(&bench, "found"));
        }
        let mut control = bench.control();
        goes_on(&mut control, "stream");
        let held = copy(&bench, "held");
        none_left(&mut control);
        server.kill();
        let server = bench.serve(&["a.img"], &["-f", format]);
        let mut left = vec!["five.qcow2", "four.qcow2"];
        left.extend(base);
        assert_eq!(chain(&mut bench.control()), left);
        same(&held, "raw", &copy(&bench, "found"));
        server.stop();
        checks(&bench, &left);
        same(&held, "qcow2", &bench.text("five.qcow2"));
    }
}

#[test]
fn jobs_at_the_same_image_follow_one_another_beside_a_queue_that_rests() {
    let bench = Bench::new();
    let (server, mut control) = tower(&bench, "raw", &[]);
    let before = copy(&bench, "before");
    let resting = Resting::begin(&bench);
    // Cancelled, and begun again.
    let mut slowly = stream(&bench, "three.qcow2", Some("one.qcow2"));
    slowly["speed"] = json!(64 << 10);
    control.ok("block-stream", slowly);
    runs(&mut control);
    control.ok("block-job-cancel", json!({ "device": "j" }));
    hear(&mut control, "BLOCK_JOB_CANCELLED");
    same(&before, "raw", &copy(&bench, "after"));
    let at = format!("unix:{}", bench.text("control"));
    let [three, two, a] = ["three.qcow2", "two.qcow2", "a.img"].map(|name| bench.text(name));
    said(&["disk", "stream", "--control", &at, "a", "--into", &three, "--bottom", &two]);
    assert_eq!(chain(&mut control), ["four.qcow2", "three.qcow2", "one.qcow2", "a.img"]);
    control.ok("block-stream", stream(&bench, "three.qcow2", Some("a.img")));
    none_left(&mut control);
    assert_eq!(chain(&mut control), ["four.qcow2", "three.qcow2", "a.img"]);
    said(&["disk", "commit", "--control", &at, "a", "--top", &three, "--base", &a]);
    assert_eq!(chain(&mut control), ["four.qcow2", "a.img"]);
    same(&before, "raw", &copy(&bench, "after"));
    drop(resting);
    server.stop();
    same(&before, "qcow2", &bench.text("four.qcow2"));
    checks(&bench, &["four.qcow2"]);
}

#[test]
fn what_is_no_image_between_takes_nothing() {
    let bench = Bench::new();
    let (server, mut control) = tower(&bench, "raw", &[]);
    let at = format!("unix:{}", bench.text("control"));
    let [two, a] = ["two.qcow2", "a.img"].map(|name| bench.text(name));
    for (into, base, text) in [
        ("nowhere", None, "is no image of 'a'"),
        ("two.qcow2", Some("three.qcow2"), "in the backing chain"),
        ("two.qcow2", Some("two.qcow2"), "in the backing chain"),
    ] {
        let error = control.call("block-stream", stream(&bench, into, base));
        let error = error.expect_err("it cannot be");
        assert!(error.contains(text), "{into}, {base:?}: {error}");
    }
    let error = refusal(&["disk", "stream", "--control", &at, "a", "--into", &two, "-b", "/no"]);
    assert!(error.contains("/no"), "{error}");
    // Nothing lies below it, and it is no qcow2 image.
    control.ok("block-stream", stream(&bench, "a.img", None));
    ends(&mut control);
    // Another disk reads what is to be written to.
    let file = json!({ "driver": "file", "filename": two });
    let open = json!({ "driver": "qcow2", "node-name": "reader", "read-only": true, "file": file });
    control.ok("blockdev-add", open);
    let error = control.call("block-stream", stream(&bench, "two.qcow2", None));
    assert!(error.expect_err("busy").contains("Node 'reader' is busy"));
    control.ok("block-stream", stream(&bench, "three.qcow2", None));
    ends(&mut control);
    assert_eq!(chain(&mut control), ["four.qcow2", "three.qcow2"]);
    assert!(fs::metadata(&a).is_ok());
    server.stop();
}
