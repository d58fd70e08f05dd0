//! Images that are checked while their guests go on.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use ringtap_tests::{ok as made, program, ringtap};
use serde_json::{Value, json};

use crate::{Empty, ok, vhost};

impl Empty {
    /// `ringtap disk check` of a node: its exit status, and what it prints.
    fn check(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let control = format!("unix:{}", self.text("control"));
        let args = ["disk", "--control", &control, "check"].into_iter().chain(args.iter().copied());
        told(program(ringtap().to_str().expect("a path"), "ringtap", args))
    }
}

fn told(output: Output) -> (Option<i32>, String, String) {
    let [out, err] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    (output.status.code(), out, err)
}

/// `ringtap check` of an image at rest.
fn at_rest(image: &Path) -> (Option<i32>, String, String) {
    let image = image.to_str().expect("a path");
    told(program(ringtap().to_str().expect("a path"), "ringtap", ["check", image]))
}

/// Writes, zeros, discards and flushes at random places until its input ends; it says how many so far, now and then.
const GUEST: &str = r#"
import nbd, random, select, sys
h = nbd.NBD()
h.connect_uri(sys.argv[1])
size, done, rng = h.get_size(), 0, random.Random(7)
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(16):
        length = rng.choice([512, 4096, 16384, 65536])
        at = rng.randrange((size - length) // 512) * 512
        kind = rng.randrange(8)
        if kind == 0:
            h.trim(length, at)
        elif kind == 1:
            h.zero(length, at)
        else:
            h.pwrite(bytes([rng.randrange(1, 256)]) * length, at)
    h.flush()
    done += 1
    print(done, flush=True)
"#;

/// A guest that goes on until it is told to end.
struct Guest {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Guest {
    fn start(uri: &str) -> Guest {
        let mut python = Command::new("/usr/bin/python3");
        python.args(["-c", GUEST, uri]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = python.spawn().expect("python3, with python3-libnbd");
        let said = BufReader::new(child.stdout.take().expect("its output"));
        Guest { child, said }
    }

    /// Wait until it has flushed once more; how often it has.
    fn goes_on(&mut self) -> u64 {
        let mut line = String::new();
        self.said.read_line(&mut line).expect("it goes on");
        line.trim().parse().unwrap_or_else(|_| panic!("the guest has ended: {line:?}"))
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        let mut rest = String::new();
        self.said.read_to_string(&mut rest).expect("its output");
        assert!(self.child.wait().expect("its end").success());
    }
}

#[test]
fn a_served_image_is_sound_at_each_of_twenty_moments_while_its_guest_writes() {
    let mut empty = Empty::new();
    let path = empty.path("vm");
    // Small clusters: many tables.
    let image = empty.text("vm");
    made(
        "qemu-img",
        "qemu-utils",
        &["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", &image, "64M"],
    );
    empty.control.ok("blockdev-add", crate::node("vm", "qcow2", &path));
    let uri = empty.nbd();
    empty.export("n", "vm", "nbd", json!({}));
    let mut guest = Guest::start(&uri("vm"));
    for round in 0..20 {
        guest.goes_on();
        let (status, out, err) = empty.check(&["vm"]);
        assert_eq!(status, Some(0), "{round}: {out}{err}");
        assert!(out.starts_with("No errors were found on the image.\n"), "{out}");
        assert!(out.contains("% allocated"), "{out}");
    }
    // Neither waits for the other: the guest has gone on all the while.
    let flushed = guest.goes_on();
    assert!(flushed >= 20, "{flushed}");
    guest.end();
    let (_, out, _) = empty.check(&["vm", "--output", "json"]);
    let online: Value = serde_json::from_str(&out).expect("JSON");
    empty.control.ok("quit", json!({}));
    empty.server.ends();
    // What is said is what is said of it at rest, but for where the file ends.
    let image = path.to_str().expect("a path");
    let args = ["check", "--output", "json", image];
    let output = program(ringtap().to_str().expect("a path"), "ringtap", args);
    let mut rest: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    rest["image-end-offset"] = online["image-end-offset"].clone();
    assert_eq!(online, rest);
    ok(Command::new("qemu-img").args(["check", "-q", "-f", "qcow2", image]));
}

/// Set the refcount of a cluster, of an image whose clusters have 64 KiB and whose refcounts have 16 bits.
fn set_refcount(image: &Path, cluster: u64, count: u16) {
    let file = File::options().read(true).write(true).open(image).expect("the image");
    let word = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).expect("read");
        u64::from_be_bytes(bytes)
    };
    let block = word(word(48));
    file.write_all_at(&count.to_be_bytes(), block + 2 * cluster).expect("written");
}

/// An image of 16 MiB with 1 MiB of data, and how many clusters its file has.
fn image_with_data(empty: &Empty, name: &str) -> u64 {
    let image = empty.text(name);
    made("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &image, "16M"]);
    made("qemu-io", "qemu-utils", &["-f", "qcow2", "-c", "write -P 7 0 1M", &image]);
    std::fs::metadata(&image).expect("the image").len() / (64 << 10)
}

#[test]
fn what_is_wrong_with_a_served_image_is_found_as_at_rest() {
    let mut empty = Empty::new();
    for (name, past_the_end, count, status, said) in [
        ("leaky", true, 1, 3, "1 leaked clusters were found"),
        ("corrupt", false, 0, 2, "2 errors were found"),
    ] {
        let clusters = image_with_data(&empty, name);
        let path = empty.path(name);
        // One that there is not, or the last of the data.
        let cluster = if past_the_end { clusters } else { clusters - 1 };
        set_refcount(&path, cluster, count);
        let wanted = at_rest(&path);
        assert_eq!(wanted.0, Some(status), "{wanted:?}");
        empty.control.ok("blockdev-add", crate::node(name, "qcow2", &path));
        let found = empty.check(&[name]);
        assert_eq!(found.0, Some(status), "{found:?}");
        assert!(found.1.contains(said), "{found:?}");
        assert_eq!(found, wanted);
    }
    let answer = empty.control.ok("__ringtap_check", json!({"node-name": "leaky"}));
    assert_eq!((&answer["leaks"], &answer["checked"]), (&json!(1), &json!(true)), "{answer}");
    assert_eq!(answer["corruptions"], Value::Null);
    empty.server.stop();
}

#[test]
fn disks_of_other_formats_are_checked_by_what_they_have() {
    let mut empty = Empty::new();
    for (name, format) in [("raw", "raw"), ("vhd", "vpc")] {
        empty.add(name, format, "16M");
    }
    empty
        .control
        .ok("blockdev-add", json!({"driver": "null-co", "node-name": "null", "size": 1 << 20}));
    for format in ["vhdx", "vmdk"] {
        let path = empty.path(format);
        let image = empty.text(format);
        made("qemu-img", "qemu-utils", &["create", "-q", "-f", format, &image, "16M"]);
        made("qemu-io", "qemu-utils", &["-f", format, "-c", "write -P 7 0 1M", &image]);
        let mut node = crate::node(format, format, &path);
        node["read-only"] = true.into();
        empty.control.ok("blockdev-add", node);
    }
    let uri = empty.nbd();
    empty.export("n", "vhd", "nbd", json!({}));
    let mut guest = Guest::start(&uri("vhd"));
    for _ in 0..5 {
        guest.goes_on();
        let (status, out, err) = empty.check(&["vhd"]);
        assert_eq!(status, Some(0), "{out}{err}");
    }
    guest.end();
    for name in ["vhdx", "vmdk"] {
        let (status, out, err) = empty.check(&[name]);
        assert_eq!(
            (status, out.lines().next()),
            (Some(0), Some("No errors were found on the image.")),
            "{err}"
        );
    }
    for name in ["raw", "null"] {
        let (status, out, err) = empty.check(&[name]);
        assert_eq!((status, &*out), (Some(63), ""), "{err}");
        assert!(err.contains("this format has nothing to check"), "{err}");
    }
    let raw = at_rest(&empty.path("raw"));
    let said = empty.check(&["raw"]);
    assert_eq!((said.0, &said.1), (raw.0, &raw.1));
    let (status, _, err) = empty.check(&["nobody"]);
    assert!(status == Some(1) && err.contains("node-name='nobody'"), "{status:?} {err}");
    // Of a check 2 says that the image is corrupt.
    assert_eq!(empty.check(&["raw", "--nope"]).0, Some(1));
    empty.server.stop();
}

#[test]
fn a_disk_that_a_job_is_at_is_not_checked() {
    let mut empty = Empty::new();
    empty.add("vm", "qcow2", "16M");
    empty.add("copy", "raw", "16M");
    empty.export("v", "vm", "vhost-user-blk", vhost(&empty.path("v")));
    empty.control.ok(
        "blockdev-mirror",
        json!({"device": "vm", "job-id": "j", "target": "copy", "sync": "full"}),
    );
    for name in ["vm", "copy"] {
        let said = empty.control.call("__ringtap_check", json!({"node-name": name}));
        let said = said.expect_err("a job is at it");
        assert!(said.contains("a job is at work on it"), "{said}");
    }
    empty.control.ok("block-job-cancel", json!({"device": "j", "force": true}));
    while !empty.control.ok("query-jobs", json!({})).as_array().expect("a list").is_empty() {}
    let answer = empty.control.ok("__ringtap_check", json!({"node-name": "vm"}));
    assert_eq!(answer["format"], "qcow2");
    empty.server.stop();
}
