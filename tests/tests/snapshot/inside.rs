//! Dirty bitmaps inside qcow2 images, shown to NBD clients, as their disks go on in other images and grow.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};

use ringtap_tests::{Control, Server, ok, ringtap};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB, snapshot};
use crate::jobs::{commit, hear, make};

/// One that records, and one that does not and has the first MiB.
const SHOWN: [&str; 6] = ["-f", "qcow2", "--bitmap", "since", "--bitmap", "old"];
const KIB: u64 = 1 << 10;

fn verb(args: &[&str]) -> String {
    ok(ringtap().to_str().expect("plain"), "ringtap", args)
}

/// An image that holds something, a full backup of it, and from then on bitmaps.
fn begin() -> Bench {
    let bench = Bench::new();
    let image = bench.text("a.img");
    make(&bench, "a.img", "qcow2", &[]);
    let write = |text: &str| ok("qemu-io", "qemu-utils", &["-f", "qcow2", "-c", text, &image]);
    write("write -P 1 0 16M");
    ok("qemu-img", "qemu-utils", &["bitmap", "--add", &image, "old"]);
    write("write -P 2 0 1M");
    ok("qemu-img", "qemu-utils", &["bitmap", "--disable", &image, "old"]);
    ok("qemu-img", "qemu-utils", &["convert", "-O", "raw", &image, &bench.text("backup")]);
    ok("qemu-img", "qemu-utils", &["bitmap", "--add", &image, "since"]);
    bench
}

fn serve(bench: &Bench) -> Server {
    bench.serve(&["a.img"], &SHOWN)
}

/// What a bitmap marks, as clients see it: offset and length.
fn marked(bench: &Bench, name: &str) -> Vec<(u64, u64)> {
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    let said = ok("nbdinfo", "libnbd-bin", &["--json", &map, &bench.uri("a")]);
    let all: Value = serde_json::from_str(&said).expect("JSON");
    let number = |of: &Value| of.as_u64().expect("a number");
    let all = all.as_array().expect("extents").iter();
    all.filter(|one| one["type"] == 1)
        .map(|one| (number(&one["offset"]), number(&one["length"])))
        .collect()
}

/// Put what is marked upon the backup, which is the disk then; gives how much that was.
fn back_up(bench: &Bench) -> u64 {
    let [now, backup] = ["now", "backup"].map(|name| bench.path(name));
    let now_name = bench.text("now");
    ok(
        "qemu-img",
        "qemu-utils",
        &["convert", "-f", "raw", "-O", "raw", &bench.uri("a"), &now_name],
    );
    let now = fs::read(now).expect("the disk");
    let file = fs::OpenOptions::new().write(true).open(&backup).expect("the backup");
    // What stands behind its end there is not known.
    let before = file.metadata().expect("a file").len();
    let noise = vec![0x5a; now.len() - before as usize];
    file.write_all_at(&noise, before).expect("noise");
    let all = marked(bench, "since");
    for (offset, len) in &all {
        let bytes = &now[*offset as usize..(offset + len) as usize];
        file.write_all_at(bytes, *offset).expect("written");
    }
    let backup = fs::read(backup).expect("the backup");
    let wrong = backup.iter().zip(&now).position(|(one, other)| one != other);
    assert_eq!((wrong, backup.len()), (None, now.len()), "the backup is not the disk: {all:?}");
    all.iter().map(|(_, len)| len).sum()
}

/// What QEMU says of an image's bitmaps: names and flags.
fn listed(bench: &Bench, image: &str) -> Value {
    let path = bench.text(image);
    ok("qemu-img", "qemu-utils", &["check", "-q", &path]);
    let said = ok("qemu-img", "qemu-utils", &["info", "--output", "json", &path]);
    let told: Value = serde_json::from_str(&said).expect("JSON");
    let all = told["format-specific"]["data"]["bitmaps"].as_array().cloned().unwrap_or_default();
    let of =
        |name: &str| all.iter().find(|one| one["name"] == name).map(|one| one["flags"].clone());
    json!([of("since"), of("old")])
}

/// Both are saved, the one recording.
fn are_there(bench: &Bench, image: &str) {
    assert_eq!(listed(bench, image), json!([["auto"], []]), "{image}");
}

/// A client that has connected, and asks how much is marked whenever it is told.
struct Client {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Client {
    fn connect(bench: &Bench) -> Client {
        let script = format!(
            "
import nbd, sys
h = nbd.NBD()
h.add_meta_context('qemu:dirty-bitmap:since')
h.connect_uri('{}')
for line in sys.stdin:
    total = [0]
    def look(context, offset, entries, error):
        total[0] += sum(l for l, flag in zip(entries[::2], entries[1::2]) if flag & 1)
    h.block_status(64 << 20, 0, look)
    print(total[0], flush=True)
",
            bench.uri("a")
        );
        // The distribution's, for which libnbd is packaged.
        let mut child = Command::new("/usr/bin/python3")
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        let said = BufReader::new(child.stdout.take().expect("its output"));
        Client { child, said }
    }

    fn sees(&mut self) -> u64 {
        self.child.stdin.as_mut().expect("its input").write_all(b"look\n").expect("it is told");
        let mut line = String::new();
        self.said.read_line(&mut line).expect("an answer");
        line.trim().parse().expect("a number")
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn bitmaps_inside_an_image_go_on_in_an_overlay_and_come_back() {
    let bench = begin();
    let server = serve(&bench);
    let mut control = bench.control();
    let mut client = Client::connect(&bench);
    bench.io("a", &["write -P 3 1M 64k"]);
    snapshot(&mut control, "a", &bench.text("one.qcow2"));
    assert_eq!(client.sees(), 64 * KIB, "as it was");
    bench.io("a", &["write -P 4 20M 64k", "discard 1088k 64k"]);
    assert_eq!(client.sees(), 192 * KIB, "its client follows");
    snapshot(&mut control, "a", &bench.text("two.qcow2"));
    bench.io("a", &["write -P 5 30M 64k"]);
    assert_eq!(client.sees(), 256 * KIB);
    assert_eq!(back_up(&bench), 256 * KIB);
    assert_eq!(marked(&bench, "old"), [(0, MIB)]);
    // As in QEMU it stays with the image below, too, as it was.
    are_there(&bench, "a.img");
    are_there(&bench, "one.qcow2");
    server.kill();

    let server = serve(&bench);
    assert_eq!(back_up(&bench), 256 * KIB, "killed");
    bench.io("a", &["write -P 6 31M 64k"]);
    server.stop();
    are_there(&bench, "two.qcow2");

    let server = serve(&bench);
    let mut control = bench.control();
    let mut client = Client::connect(&bench);
    assert_eq!(back_up(&bench), 320 * KIB, "stopped");
    commit(&mut control, json!({ "device": "a", "job-id": "j" }));
    assert_eq!(client.sees(), 320 * KIB, "as much, in the image below");
    bench.io("a", &["write -P 7 40M 64k"]);
    assert_eq!((client.sees(), back_up(&bench)), (384 * KIB, 384 * KIB));
    assert_eq!(marked(&bench, "old"), [(0, MIB)]);
    server.stop();
    are_there(&bench, "a.img");
    let server = serve(&bench);
    assert_eq!(back_up(&bench), 384 * KIB, "committed, and stopped");
    server.stop();
}

/// All of what lies below comes up, or a part, while the image between is taken into the deepest.
#[test]
fn bitmaps_inside_an_image_stay_as_images_below_it_go() {
    let bench = begin();
    let server = serve(&bench);
    let mut control = bench.control();
    let mut client = Client::connect(&bench);
    for (number, name) in [(3, "one.qcow2"), (4, "two.qcow2")] {
        bench.io("a", &[&format!("write -P {number} {number}M 64k")]);
        snapshot(&mut control, "a", &bench.text(name));
    }
    let top = json!({ "device": "a", "job-id": "c", "top": bench.text("one.qcow2"), "base": bench.text("a.img") });
    control.ok("block-commit", top);
    let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
    assert!(told.get("error").is_none(), "{told}");
    bench.io("a", &["write -P 5 5M 64k"]);
    assert_eq!((client.sees(), back_up(&bench)), (192 * KIB, 192 * KIB), "between");
    control.ok("block-stream", json!({ "device": "a", "job-id": "s" }));
    let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
    assert!(told.get("error").is_none(), "{told}");
    bench.io("a", &["write -P 6 6M 64k"]);
    assert_eq!((client.sees(), back_up(&bench)), (256 * KIB, 256 * KIB), "alone");
    server.stop();
    are_there(&bench, "two.qcow2");
    let server = serve(&bench);
    assert_eq!(back_up(&bench), 256 * KIB, "stopped");
    server.stop();
}

/// Also of those that nobody is shown: the next server shows them.
#[test]
fn bitmaps_that_are_not_shown_go_on_as_well() {
    let bench = begin();
    let server = bench.serve(&["a.img"], &SHOWN[..2]);
    let mut control = bench.control();
    bench.io("a", &["write -P 3 1M 64k"]);
    snapshot(&mut control, "a", &bench.text("one.qcow2"));
    bench.io("a", &["write -P 4 20M 64k"]);
    server.stop();
    assert_eq!(listed(&bench, "one.qcow2"), json!([["auto"], null]));
    let server = bench.serve(&["a.img"], &SHOWN[..4]);
    assert_eq!(back_up(&bench), 128 * KIB);
    server.stop();
}

/// One of the same name may be there, of another granularity, and one that was never saved.
#[test]
fn bitmaps_go_on_in_an_overlay_that_exists() {
    let bench = begin();
    let (image, over) = (bench.text("a.img"), bench.text("one.qcow2"));
    let create = ["create", "-q", "-f", "qcow2", "-b", &image, "-F", "qcow2", &over];
    ok("qemu-img", "qemu-utils", &create);
    ok("qemu-img", "qemu-utils", &["bitmap", "--add", "-g", "4k", &over, "since"]);
    ok("qemu-img", "qemu-utils", &["bitmap", "--add", "-g", "1M", &over, "old"]);
    let server = serve(&bench);
    let mut control = bench.control();
    bench.io("a", &["write -P 3 1M 64k"]);
    let there = json!({ "device": "a", "snapshot-file": over, "mode": "existing" });
    control.ok("blockdev-snapshot-sync", there);
    hear(&mut control, "__ringtap_SNAPSHOT");
    bench.io("a", &["write -P 4 20M 64k"]);
    assert_eq!(back_up(&bench), 128 * KIB);
    assert_eq!(marked(&bench, "old"), [(0, MIB)]);
    server.stop();
    are_there(&bench, "one.qcow2");

    // One of version 2 holds none.
    let bench = begin();
    let (image, over) = (bench.text("a.img"), bench.text("one.qcow2"));
    let old =
        ["create", "-q", "-f", "qcow2", "-o", "compat=0.10", "-b", &image, "-F", "qcow2", &over];
    ok("qemu-img", "qemu-utils", &old);
    let server = serve(&bench);
    let there = json!({ "device": "a", "snapshot-file": over, "mode": "existing" });
    let said = bench.control().call("blockdev-snapshot-sync", there).expect_err("it shows them");
    assert!(said.contains("version 2 has no bitmaps"), "{said}");
    bench.io("a", &["write -P 3 1M 64k"]);
    assert_eq!(back_up(&bench), 64 * KIB);
    server.stop();
    are_there(&bench, "a.img");
}

fn resize(control: &mut Control, size: u64) {
    control.ok("block_resize", json!({ "node-name": "a", "size": size }));
}

#[test]
fn a_disk_grows_and_the_bitmaps_inside_its_image_with_it() {
    for overlay in [false, true] {
        let bench = begin();
        let server = serve(&bench);
        let mut control = bench.control();
        let mut client = Client::connect(&bench);
        bench.io("a", &["write -P 3 1M 64k"]);
        if overlay {
            snapshot(&mut control, "a", &bench.text("one.qcow2"));
        }
        // Within a granule; and so far that the bits take another cluster of the table.
        resize(&mut control, 64 * MIB + 8 * KIB);
        assert_eq!(client.sees(), 64 * KIB, "what it knew of is as it was");
        bench.io("a", &["write -P 4 64M 4k", "write -P 5 20M 64k"]);
        assert_eq!(back_up(&bench), 128 * KIB + 8 * KIB, "{overlay}");
        resize(&mut control, 128 * MIB);
        bench.io("a", &["write -P 6 100M 64k"]);
        assert_eq!(back_up(&bench), 64 * MIB + 128 * KIB, "all that is new is marked");
        assert_eq!(marked(&bench, "old"), [(0, MIB)]);
        server.kill();
        let server = serve(&bench);
        assert_eq!(back_up(&bench), 64 * MIB + 128 * KIB, "killed");
        let mut control = bench.control();
        resize(&mut control, 96 << 30);
        bench.io("a", &["write -P 7 95G 64k"]);
        let all = marked(&bench, "since");
        assert_eq!(all.last(), Some(&(64 * MIB, (96 << 30) - 64 * MIB)), "{all:?}");
        server.stop();
        are_there(&bench, if overlay { "one.qcow2" } else { "a.img" });
        let server = serve(&bench);
        assert_eq!(marked(&bench, "since"), all, "stopped");
        server.stop();
    }
}

/// As an image at rest does.
#[test]
fn an_image_at_rest_grows_and_its_bitmaps_mark_what_is_new() {
    let bench = begin();
    verb(&["resize", "-q", &bench.text("a.img"), "80M"]);
    are_there(&bench, "a.img");
    let server = serve(&bench);
    assert_eq!(back_up(&bench), 16 * MIB);
    assert_eq!(marked(&bench, "old"), [(0, MIB)]);
    server.stop();
}

/// Nothing else than raw lies below: there is no room for them.
#[test]
fn bitmaps_that_are_shown_do_not_vanish_in_a_raw_image() {
    let bench = Bench::new();
    make(&bench, "base", "raw", &[]);
    let (base, image) = (bench.text("base"), bench.text("a.img"));
    ok(
        "qemu-img",
        "qemu-utils",
        &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &image],
    );
    ok("qemu-img", "qemu-utils", &["bitmap", "--add", &image, "since"]);
    ok("qemu-img", "qemu-utils", &["convert", "-O", "raw", &image, &bench.text("backup")]);
    let server = bench.serve(&["a.img"], &SHOWN[..4]);
    let mut control = bench.control();
    bench.io("a", &["write -P 3 1M 64k"]);
    control.ok("block-commit", json!({ "device": "a", "job-id": "j" }));
    let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
    assert!(
        told["error"].as_str().is_some_and(|why| why.contains("raw images hold none")),
        "{told}"
    );
    bench.io("a", &["write -P 4 2M 64k"]);
    assert_eq!(back_up(&bench), 128 * KIB);
    server.stop();
}
