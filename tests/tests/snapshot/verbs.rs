//! The verbs of people.

use std::fs;

use ringtap_tests::{ok, ringtap_of};
use serde_json::Value;

use crate::bench::{Bench, MIB, refusal, said};

impl Bench {
    fn said(&self, args: &[&str]) -> String {
        let control = format!("unix:{}", self.text("control"));
        let output = ringtap_of(&[args, &["--control", &control]].concat());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        text
    }

    fn refused(&self, args: &[&str]) -> String {
        let control = format!("unix:{}", self.text("control"));
        refusal(&[args, &["--control", &control]].concat())
    }
}

#[test]
fn people_snapshot_commit_and_move_disks() {
    let bench = Bench::new();
    bench.raw("a.img", 16 * MIB);
    bench.raw("b.img", 16 * MIB);
    let server = bench.serve(&["a.img", "b.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 1M"]);
    let [one, two, ran] = ["one.qcow2", "two.qcow2", "ran"].map(|name| bench.text(name));
    let (before, after) = (format!("echo before >> {ran}"), format!("echo after >> {ran}"));
    let said = bench
        .said(&["disk", "snapshot", "a", &one, "b", &two, "--before", &before, "--after", &after]);
    assert!(said.contains(&format!("a goes on in {one}")), "{said}");
    assert!(said.contains(&format!("b goes on in {two}")), "{said}");
    assert_eq!(fs::read_to_string(&ran).expect("both ran"), "before\nafter\n");
    // What comes after comes after a failure, too; what fails before is the end.
    assert!(bench.refused(&["disk", "snapshot", "a", &one, "--after", &after]).contains("exists"));
    assert_eq!(fs::read_to_string(&ran).expect("it ran").lines().count(), 3);
    let three = bench.text("three.qcow2");
    // It may have begun.
    bench.refused(&["disk", "snapshot", "a", &three, "--before", "false", "--after", &after]);
    assert!(!bench.path("three.qcow2").exists());
    assert_eq!(fs::read_to_string(&ran).expect("it ran").lines().count(), 4);
    for signal in ["HUP", "QUIT"] {
        let before = format!("kill -{signal} $PPID");
        bench.refused(&["disk", "snapshot", "a", &three, "--before", &before, "--after", &after]);
        assert!(!bench.path("three.qcow2").exists());
    }
    assert_eq!(fs::read_to_string(&ran).expect("it ran").lines().count(), 6);
    assert!(bench.refused(&["disk", "snapshot", "a"]).contains("required"));

    bench.io("a", &["write -P 2 1M 1M"]);
    bench.said(&["disk", "commit", "a"]);
    let told: Value = serde_json::from_str(&bench.said(&["disk", "info", "a", "--output", "json"]))
        .expect("JSON");
    assert_eq!(told["file"], bench.text("a.img"), "{told}");

    let four = bench.text("four.qcow2");
    bench.said(&["disk", "snapshot", "a", &four]);
    bench.said(&["disk", "stream", "a"]);
    let told = bench.said(&["disk", "info", "a"]);
    assert!(told.contains("four.qcow2") && !told.contains("  on "), "{told}");

    bench.raw("copy.raw", 16 * MIB);
    let copy = bench.text("copy.raw");
    bench.said(&["disk", "mirror", "a", &copy, "-f", "raw", "--zeroed", "--copy"]);
    bench.holds("copy.raw", "raw", &["read -P 1 0 1M", "read -P 2 1M 1M"]);
    bench.raw("moved.raw", 16 * MIB);
    let moved = bench.text("moved.raw");
    let job = bench.said(&["disk", "mirror", "a", &moved, "-f", "raw", "--no-wait"]);
    assert_eq!(job.trim(), "mirror-a");
    assert!(bench.said(&["job", "list"]).starts_with("mirror-a: mirror, "));
    bench.said(&["job", "pause", "mirror-a"]);
    bench.said(&["job", "rate", "mirror-a", "1G"]);
    bench.said(&["job", "resume", "mirror-a"]);
    bench.said(&["job", "wait", "mirror-a"]);
    assert_eq!(bench.said(&["job", "list"]), "");
    assert!(bench.refused(&["job", "cancel", "mirror-a"]).contains("not found"));
    let told = bench.said(&["disk", "list"]);
    assert!(told.contains(&moved) && !told.contains("a-mirror"), "{told}");
    bench.io("a", &["read -P 1 0 1M", "read -P 2 1M 1M", "write -P 3 0 4k"]);
    server.stop();
    ok("qemu-io", "qemu-utils", &["-r", "-f", "raw", "-c", "read -P 3 0 4k", &moved]);
}

/// Whatever verb ends it, the disk stays where it is, and what is ready is whole.
#[test]
fn a_copy_that_nobody_waits_for_ends_as_a_copy() {
    for verb in ["wait", "cancel"] {
        let bench = Bench::new();
        bench.raw("a.img", 16 * MIB);
        bench.raw("copy.raw", 16 * MIB);
        let server = bench.serve(&["a.img"], &["-f", "raw"]);
        bench.io("a", &["write -P 1 0 1M"]);
        let copy = bench.text("copy.raw");
        bench.said(&["disk", "mirror", "a", &copy, "-f", "raw", "--copy", "--no-wait"]);
        while !bench.said(&["job", "list"]).contains("ready") {}
        bench.io("a", &["write -P 2 1M 1M"]);
        bench.said(&["job", verb, "mirror-a"]);
        while bench.said(&["job", "list"]).contains("ready") {}
        let left = bench.said(&["job", "list", "--output", "json"]);
        assert!(!left.contains("Operation canceled"), "{left}");
        let told = bench.said(&["disk", "info", "a"]);
        assert!(told.contains("a.img") && !told.contains("copy.raw"), "{told}");
        bench.holds("copy.raw", "raw", &["read -P 1 0 1M", "read -P 2 1M 1M"]);
        server.stop();
    }
}

#[test]
fn people_back_up_what_has_changed_since_a_checkpoint() {
    let bench = Bench::new();
    bench.raw("a.img", 16 * MIB);
    bench.raw("copy.raw", 16 * MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 1M"]);
    let copy = bench.text("copy.raw");
    let backup = ["disk", "backup", "a", &copy, "-f", "raw"];
    bench.said(&[&backup[..], &["--zeroed", "--checkpoint", "nightly"]].concat());
    bench.said(&["disk", "checkpoint", "add", "a", "fine", "--granularity", "4k"]);
    bench.io("a", &["write -P 2 8M 4k"]);
    server.kill();
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    let said = bench.said(&["disk", "checkpoint", "list", "a"]);
    let wanted = "nightly: 65536 bytes in regions of 65536\nfine: 4096 bytes in regions of 4096\n";
    assert_eq!(said, wanted);
    bench.said(&[&backup[..], &["--since", "nightly"]].concat());
    bench.holds("copy.raw", "raw", &["read -P 1 0 1M", "read -P 2 8M 4k"]);
    bench.said(&["disk", "checkpoint", "remove", "a", "fine"]);
    let told = bench.said(&["disk", "checkpoint", "list", "a", "--output", "json"]);
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!((&told[0]["count"], told.as_array().map(Vec::len)), (&0.into(), Some(1)), "{told}");
    assert!(bench.refused(&["disk", "checkpoint", "remove", "a", "fine"]).contains("not found"));
    let no = bench.refused(&[&backup[..], &["--since", "fine"]].concat());
    assert!(no.contains("'fine' not found"), "{no}");
    server.stop();
}

/// Whoever made what lies below it.
#[test]
fn a_disk_that_is_committed_is_found_by_the_name_that_it_had() {
    for format in ["raw", "qcow2"] {
        let bench = Bench::new();
        let [below, top] = ["below", "top.qcow2"].map(|name| bench.text(name));
        ok("qemu-img", "qemu-utils", &["create", "-q", "-f", format, &below, "16M"]);
        said(&["create", "-q", "-f", "qcow2", "-b", &below, "-F", format, &top]);
        let server = bench.serve(&["top.qcow2"], &["-f", "qcow2"]);
        bench.io("t", &["write -P 1 0 1M"]);
        bench.said(&["disk", "commit", "t"]);
        bench.io("t", &["write -P 2 1M 1M"]);
        server.kill();
        let server = bench.serve(&["top.qcow2"], &["-f", "qcow2"]);
        bench.io("t", &["read -P 1 0 1M", "read -P 2 1M 1M"]);
        server.stop();
        bench.holds("below", format, &["read -P 1 0 1M", "read -P 2 1M 1M"]);
    }
}

/// Attributes that `cp -a` copies lead nobody to the original's disk.
#[test]
fn a_copy_of_what_a_disk_has_left_is_refused() {
    let bench = Bench::new();
    bench.raw("a.img", 16 * MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    let [over, image, copy] = ["over.qcow2", "a.img", "copy.img"].map(|name| bench.text(name));
    bench.said(&["disk", "snapshot", "a", &over]);
    bench.io("a", &["write -P 1 0 1M"]);
    server.stop();
    ok("cp", "coreutils", &["-a", &image, &copy]);
    let why = refusal(&["serve", &copy, "-f", "raw", "--nbd", "unix:/nonexistent/x"]);
    // Where nothing but a record apart is kept, a copy has none.
    let is_copied = why.contains("is a copy of the image that it left");
    assert!(is_copied || !why.contains("goes on"), "{why}");
    let told = said(&["amend", "--forget-successor", &copy]);
    assert!(told.contains("by itself") || !is_copied, "{told}");
    let server = bench.serve(&["copy.img"], &["-f", "raw"]);
    bench.io("c", &["read -P 0 0 1M", "write -P 9 0 1M"]);
    server.stop();
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["read -P 1 0 1M"]);
    server.stop();
}
