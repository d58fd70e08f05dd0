//! Images that a disk has gone on from, and clients that rest.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use std::{fs, thread};

use ringtap_tests::{Server, ok, patience, ringtap};

use serde_json::json;

use crate::bench::Bench;
use crate::jobs::hear;
use crate::moment::served;

/// An NBD client that has chosen an export and asks for nothing.
fn rests(socket: &str, export: &str) -> UnixStream {
    let mut stream = UnixStream::connect(socket).expect("a server");
    stream.read_exact(&mut [0; 18]).expect("its greeting");
    let len = u32::try_from(export.len()).expect("a name").to_be_bytes();
    let choice = [&b"\0\0\0\x03IHAVEOPT\0\0\0\x01"[..], &len, export.as_bytes()].concat();
    stream.write_all(&choice).expect("sent");
    stream.read_exact(&mut [0; 10]).expect("the export's size and flags");
    stream
}

/// It reads a block, and by that its thread's ring comes to know the file that has it.
fn reads(stream: &mut UnixStream, offset: u64) {
    let place = offset.to_be_bytes();
    let request = [&b"\x25\x60\x95\x13"[..], &[0; 2], &[0; 2], &[0; 8], &place, &[0, 0, 2, 0]];
    stream.write_all(&request.concat()).expect("sent");
    stream.read_exact(&mut [0; 16 + 512]).expect("a reply");
}

fn writes(stream: &mut UnixStream, offset: u64) {
    let place = offset.to_be_bytes();
    let request =
        [&b"\x25\x60\x95\x13"[..], &[0; 2], &[0, 1], &[0; 8], &place, &[0, 0, 2, 0], &[7; 512]];
    stream.write_all(&request.concat()).expect("sent");
    stream.read_exact(&mut [0; 16]).expect("a reply");
}

/// By a descriptor, or in the table of a ring, which the kernel tells of beside the ring's own.
fn has_open(server: &Server, image: &str) -> bool {
    let of = |what: &str| fs::read_dir(format!("/proc/{}/{what}", server.pid()));
    let links = of("fd").expect("its descriptors").flatten();
    let mut links = links.filter_map(|one| fs::read_link(one.path()).ok());
    let facts = of("fdinfo").expect("its descriptors").flatten();
    let mut facts = facts.filter_map(|one| fs::read_to_string(one.path()).ok());
    links.any(|path| path.to_string_lossy().contains(image))
        || facts.any(|text| text.contains(image))
}

/// What a job's node had is free once it is gone, though the guest stays.
#[test]
fn a_client_that_rests_keeps_no_file_of_a_job_open_that_has_ended() {
    let bench = Bench::new();
    let (server, mut control) = served(&bench, "raw");
    let mut resting = rests(&bench.text("a.nbd"), "a");
    let mut backup = json!({ "device": "a", "target": "copy", "sync": "none", "job-id": "j" });
    backup["__ringtap_guest-timeout"] = 60_000.into();
    control.ok("blockdev-backup", backup);
    // By the same thread: its ring comes to know the file that old content goes to.
    writes(&mut resting, 4096);
    assert!(has_open(&server, &bench.text("copy")));
    control.ok("block-job-cancel", json!({ "device": "j" }));
    hear(&mut control, "BLOCK_JOB_CANCELLED");
    control.ok("blockdev-del", json!({ "node-name": "copy" }));
    let end = Instant::now() + patience();
    while has_open(&server, &bench.text("copy")) {
        assert!(Instant::now() < end, "the target is open, and what it takes is not free");
        thread::sleep(Duration::from_millis(20));
    }
    reads(&mut resting, 4096);
    server.stop();
}

#[test]
fn a_client_that_rests_keeps_no_image_open_that_its_disk_has_gone_on_from() {
    let bench = Bench::new();
    let disk = |words: &[&str]| {
        let control = format!("unix:{}", bench.text("control"));
        let words = [&["disk", "--control", &control], words].concat();
        ok(ringtap().to_str().expect("plain"), "ringtap", &words);
    };
    let (image, over) = (bench.text("a.qcow2"), bench.text("over.qcow2"));
    ok(
        ringtap().to_str().expect("plain"),
        "ringtap",
        &["create", "-q", "-f", "qcow2", &image, "16M"],
    );
    let server = bench.serve(&["a.qcow2"], &["-f", "qcow2"]);
    let mut resting = rests(&bench.text("a.nbd"), "a");
    bench.io("a", &["write -P 1 0 1M"]);
    disk(&["snapshot", "a", &over]);
    bench.io("a", &["write -P 2 4k 64k"]);
    reads(&mut resting, 4096);
    assert!(has_open(&server, "over.qcow2"));
    disk(&["commit", "a", "--quiet"]);
    let end = Instant::now() + patience();
    while has_open(&server, "over.qcow2") {
        assert!(Instant::now() < end, "the overlay is open, and what it takes is not free");
        thread::sleep(Duration::from_millis(20));
    }
    bench.io("a", &["read -P 1 0 4k", "read -P 2 4k 64k"]);
    server.stop();
}
