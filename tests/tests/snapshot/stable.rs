//! What is to be stable before the next step, as the system calls show it: no test cuts the power of a real file system.

use std::os::unix::fs::MetadataExt;

use ringtap_tests::{ok, ringtap};
use serde_json::json;

use crate::bench::{Bench, snapshot};
use crate::jobs::make;
use crate::tampered::{Tampered, calls, lines, successor};

/// Where the first line is that has all these words, from `from` on.
fn find(lines: &[String], from: usize, words: &[&str]) -> usize {
    let has_all = |line: &String| words.iter().all(|word| line.contains(word));
    let found = lines.iter().skip(from).position(has_all);
    from + found.unwrap_or_else(|| panic!("no {words:?} from {from} on in {lines:#?}"))
}

#[test]
fn a_record_that_is_removed_does_not_come_back() {
    let bench = Bench::new();
    make(&bench, "a.img", "raw", &[]);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    snapshot(&mut bench.control(), "a", &bench.text("one.qcow2"));
    server.stop();
    let image = bench.text("a.img");
    let all = calls(&bench.text("calls"), None, &["amend", "--forget-successor", &image]);
    let removed = find(&all, 0, &["unlink(", ".record\""]);
    find(&all, removed, &["fsync(", "/ringtap>"]);
}

#[test]
fn a_folder_for_records_is_there_after_a_power_cut() {
    let bench = Bench::new();
    let (image, state) = (bench.text("a.qcow2"), bench.text("one/two"));
    bench.raw("base", 1 << 20);
    let args = ["create", "-q", "-f", "qcow2", "-b", &bench.text("base"), "-F", "raw", &image];
    let all = calls(&bench.text("calls"), Some(&state), &args);
    for folder in [bench.dir.path().display().to_string(), bench.text("one"), state] {
        find(&all, 0, &["fsync(", &format!("<{folder}>")]);
    }
}

#[test]
fn an_overlay_that_was_there_is_stable_before_its_disk_is_said_to_go_on_in_it() {
    let bench = Bench::new();
    bench.raw("a.img", 16 << 20);
    let (image, overlay) = (bench.text("a.img"), bench.text("o.qcow2"));
    let args = ["create", "-q", "-f", "qcow2", "-b", &image, "-F", "raw", &overlay];
    ok(ringtap().to_str().expect("plain"), "ringtap", &args);
    let server = bench.serve(&["a.img"], &["-f", "raw", "--sandbox", "off"]);
    let looks = Tampered::look(&server, &bench.text("calls"));
    let wanted = json!({ "node-name": "a", "snapshot-file": overlay, "mode": "existing" });
    bench.control().ok("blockdev-snapshot-sync", wanted);
    looks.end();
    server.stop();
    let all = lines(&bench.text("calls"));
    let said = find(&all, 0, &["setxattr(", "successor"]);
    let folder = bench.dir.path().display().to_string();
    for what in [overlay, folder] {
        let stable = find(&all, 0, &["fsync(", &format!("<{what}>")]);
        assert!(stable < said, "{what}: {all:#?}");
    }
}

#[test]
fn an_overlay_that_cannot_be_written_down_leaves_nothing() {
    let bench = Bench::new();
    bench.raw("a.img", 16 << 20);
    let server = bench.serve(&["a.img"], &["-f", "raw", "--sandbox", "off"]);
    bench.io("a", &["write -P 1 0 1M"]);
    let (image, overlay) = (bench.text("a.img"), bench.text("o.qcow2"));
    let tampered = Tampered::begin(&server, &image, "fsync:error=EIO:when=1");
    let wanted = json!({ "node-name": "a", "snapshot-file": overlay });
    let why = bench.control().call("blockdev-snapshot-sync", wanted).expect_err("it fails");
    assert!(why.contains("cannot write down that it goes on"), "{why}");
    tampered.end();
    bench.io("a", &["write -P 2 0 64k", "flush"]);
    server.kill();
    assert_eq!(successor(&image), "");
    assert!(!bench.path("o.qcow2").exists());
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["read -P 2 0 64k", "read -P 1 64k 960k"]);
    server.stop();
}

/// What a server keeps in memory beside its images: of the overlay there is nothing.
#[test]
fn an_overlay_that_was_given_up_leaves_no_memory() {
    let bench = Bench::new();
    make(&bench, "a.qcow2", "qcow2", &[]);
    let (image, overlay) = (bench.text("a.qcow2"), bench.text("o.qcow2"));
    let state = bench.text("state");
    let more = ["-f", "qcow2", "--sandbox", "off", "--state-dir", &state];
    let server = bench.serve(&["a.qcow2"], &more);
    bench.io("a", &["write -P 1 0 1M", "flush"]);
    let kib = || -> u64 {
        let all = std::fs::read_dir(&state).expect("the folder").flatten();
        all.map(|one| one.metadata().map_or(0, |facts| facts.blocks() / 2)).sum()
    };
    let before = kib();
    assert!(before > 0, "a log");
    let tampered = Tampered::begin(&server, &image, "fsync:error=EIO:when=1");
    let wanted = json!({ "node-name": "a", "snapshot-file": overlay });
    bench.control().call("blockdev-snapshot-sync", wanted).expect_err("it fails");
    tampered.end();
    // Which log an image had stays known.
    assert!(kib() <= before + 4, "{} KiB, {before} before", kib());
    server.stop();
}

/// Else a power cut could leave an image that names what it may not.
#[test]
fn what_an_image_may_name_is_stable_before_it_names_that() {
    let bench = Bench::new();
    ["base", "other"].iter().for_each(|name| bench.raw(name, 1 << 20));
    let (image, base, other) = (bench.text("a.qcow2"), bench.text("base"), bench.text("other"));
    let args = ["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &image];
    ok(ringtap().to_str().expect("plain"), "ringtap", &args);
    let args = ["--io", "threads", "rebase", "-q", "-u", "-F", "raw", "-b", &other, &image];
    let all = calls(&bench.text("calls"), None, &args);
    let file = format!("<{image}>");
    let allowed = find(&all, 0, &["setxattr(", "ringtap.names"]);
    let stable = find(&all, allowed, &["fsync(", &file]);
    let named = find(&all, 0, &["pwritev2(", &file]);
    assert!(stable < named, "{all:#?}");
}
