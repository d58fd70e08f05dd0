//! Objects that are read: by verbs, by guests, and from below an overlay.

use std::fs;

use ringtap_tests::ok;

use crate::bench::{Bench, MIB, pattern, refusal, said};
use crate::origin::Origin;

#[test]
fn verbs_and_guests_read_an_object_as_a_file() {
    let bench = Bench::new();
    // The last chunk is short, and the last sector, too.
    let object = pattern(9 * MIB + 700);
    let origin = Origin::new(object.clone());
    let uri = origin.uri();
    let info: serde_json::Value =
        serde_json::from_str(&said(&["info", "--output", "json", &uri])).expect("JSON");
    assert_eq!(info["virtual-size"], (object.len().next_multiple_of(512)), "{info}");
    assert_eq!(info["format"], "raw", "{info}");
    let path = bench.text("a.raw");
    fs::write(&path, &object).expect("written");
    said(&["compare", "-f", "raw", "-F", "raw", &uri, &path]);
    said(&["map", "-f", "raw", &uri]);
    let copy = bench.text("b.qcow2");
    said(&["convert", "-q", "-f", "raw", "-O", "qcow2", &uri, &copy]);
    ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "qcow2", &path, &copy]);
    origin.with(|state| state.asked.clear());
    let server = bench.serve_raw(&origin);
    bench.io_well(&["read -P 1 0 4k", "read -P 2 4k 4k", "read -P 32 5145k 1k"]);
    let whole = bench.whole();
    assert!(whole[..object.len()] == object[..], "the bytes differ");
    assert!(whole[object.len()..].iter().all(|byte| *byte == 0));
    server.stop();
    let (headers, asked) = origin.with(|state| (state.headers.clone(), state.asked.clone()));
    let has = |wanted: &str| headers.iter().any(|line| line.eq_ignore_ascii_case(wanted));
    assert!(has("accept-encoding: identity") && has("if-match: \"one\""), "{headers:?}");
    let largest = asked.iter().map(|(from, to)| to - from + 1).max();
    assert_eq!(largest, Some(256 << 10), "{asked:?}");
}

#[test]
fn an_object_is_not_written_to_and_an_overlay_is() {
    let bench = Bench::new();
    let origin = Origin::new(pattern(8 * MIB));
    let (uri, top) = (origin.uri(), bench.text("top.qcow2"));
    let nbd = format!("unix:{}", bench.text("nbd"));
    let why = refusal(&["serve", &uri, "-f", "raw", "--nbd", &nbd]);
    assert!(why.contains("ringtap create") && why.contains("--read-only"), "{why}");
    let server = bench.serve_raw(&origin);
    assert!(!bench.io(&["write -P 9 0 4k"]).contains("wrote 4096"));
    server.stop();
    said(&["create", "-q", "-f", "qcow2", "-b", &uri, "-F", "raw", &top]);
    let server = bench.serve(&top, &["-f", "qcow2"]);
    bench.io_well(&["read -P 1 0 4k", "write -P 99 6k 512", "flush"]);
    bench.io_well(&["read -P 2 4k 2k", "read -P 99 6k 512", "read -P 3 8k 4k"]);
    server.stop();

    // Whoever made it elsewhere may have written any name into it.
    let other = bench.text("other.qcow2");
    let head = ["create", "-q", "-u", "-f", "qcow2", "-b", &uri, "-F", "raw", &other, "8M"];
    ok("qemu-img", "qemu-utils", &head);
    let why = refusal(&["serve", &other, "-f", "qcow2", "--nbd", &nbd]);
    assert!(why.contains("lies on a server") && why.contains("--backing"), "{why}");
    let server = bench.serve(&other, &["-f", "qcow2", "--backing", &uri]);
    bench.io_well(&["read -P 1 0 4k"]);
    server.stop();
}

#[test]
fn a_qcow2_image_is_read_and_checked_where_it_lies() {
    let bench = Bench::new();
    let path = bench.text("a.qcow2");
    ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &path, "64M"]);
    let write = ["-c", "write -P 7 1M 3M", "-c", "write -P 8 40M 64k", &path];
    ok("qemu-io", "qemu-utils", &write);
    let origin = Origin::new(fs::read(&path).expect("the image"));
    let uri = origin.uri();
    assert!(!said(&["check", "-f", "qcow2", &uri]).contains("ERROR"));
    let info = said(&["info", &uri]);
    assert!(info.contains("qcow2"), "{info}");
    let server = bench.serve(&uri, &["-f", "qcow2", "--read-only"]);
    bench.io_well(&["read -P 7 1M 3M", "read -P 8 40M 64k", "read -P 0 0 1M", "read -P 0 60M 1M"]);
    server.stop();
}

#[test]
fn two_disks_of_one_base_ask_for_it_once() {
    let bench = Bench::new();
    let origin = Origin::new(pattern(8 * MIB));
    let uri = origin.uri();
    for name in ["a.qcow2", "b.qcow2"] {
        said(&["create", "-q", "-f", "qcow2", "-b", &uri, "-F", "raw", &bench.text(name)]);
    }
    origin.with(|state| state.asked.clear());
    let nbd = format!("unix:{}", bench.text("nbd"));
    let (a, b) = (bench.text("a.qcow2"), bench.text("b.qcow2"));
    let both = ["-f", "qcow2", "--name", "e", "--nbd", &nbd];
    let more = [&["-f", "qcow2", &*b][..], &both[..]].concat();
    let server = bench.serve(&a, &more);
    bench.io_well(&["read -P 1 0 4k", "read -P 1 0 1k"]);
    let other = format!("nbd+unix:///e?socket={}", bench.text("nbd"));
    ok("qemu-io", "qemu-utils", &["-f", "raw", "-r", "-c", "read -P 2 4k 4k", &other]);
    server.stop();
    let asked = origin.with(|state| state.asked.clone());
    let first = asked.iter().filter(|(from, to)| *from == 0 && *to > 0).count();
    assert_eq!(first, 1, "{asked:?}");
}

#[test]
fn what_cannot_be_is_said_with_what_to_do() {
    let origin = Origin::new(pattern(MIB));
    let uri = origin.uri();
    let info = |uri: &str| refusal(&["info", "-f", "raw", uri]);
    assert!(info(&uri.replace("disk.img", "none.img")).contains("no such object"));
    let nobody = info("http://127.0.0.1:1/a/disk.img?reconnect=never");
    assert!(nobody.contains("refused"), "{nobody}");
    assert!(info("https://user:secret@host/x").contains("credentials"));
    for etag in [None, Some("W/\"one\"".to_owned())] {
        origin.with(|state| state.etag = etag);
        let why = info(&uri);
        assert!(why.contains("no strong ETag") && why.contains("ringtap publish"), "{why}");
    }
    origin.with(|state| (state.etag, state.ranges) = (Some("\"one\"".into()), false));
    let why = info(&uri);
    assert!(why.contains("no ranges") && why.contains("copy the image"), "{why}");
    origin.with(|state| (state.object, state.ranges) = (vec![], true));
    assert!(info("s3:bucket/x").contains("s3://BUCKET/KEY"));
}
