//! Images of every format whose bytes lie on a server, and overlays of such.

use std::fs;

use ringtap_tests::{is_well, ok, ringtap};

use crate::bench::{Bench, Kind, MIB, refusal, said};

/// An image made by `ringtap create`, with room behind it for what it grows by.
fn made(bench: &Bench, args: &[&str]) {
    let path = bench.text("a.img");
    let all = [&["create", "-q"], args, &[&*path, "64M"]].concat();
    ok(ringtap().to_str().expect("plain"), "ringtap", &all);
    let file = fs::File::options().write(true).open(&path).expect("the image");
    let len = file.metadata().expect("its size").len();
    // A VHD ends with its file, and grows with it: this one is whole from the beginning.
    if !args.contains(&"vpc") {
        file.set_len(len.max(128 * MIB)).expect("room");
    }
}

#[test]
fn a_qcow2_image_is_written_to_and_stays_whole() {
    for (kind, options) in [
        (Kind::Nbdkit, "cluster_size=64k"),
        (Kind::QemuOne, "cluster_size=4k"),
        (Kind::Ringtap, "extended_l2=on"),
    ] {
        let bench = Bench::new();
        made(&bench, &["-f", "qcow2", "-o", options]);
        let source = bench.source(kind, "a.img");
        let server = bench.serve(&bench.uri(), &["-f", "qcow2"]);
        bench.io_well(&["write -P 1 0 4M", "write -P 2 9M 512", "flush"]);
        is_well(bench.load("2"));
        bench.io_well(&["write -P 3 63M 1M", "flush"]);
        server.stop();
        let uri = bench.uri();
        said(&["check", "-f", "qcow2", &uri]);
        source.stop();
        let image = bench.text("a.img");
        let checked = ok("qemu-img", "qemu-utils", &["check", "-f", "qcow2", &image]);
        assert!(checked.contains("No errors"), "{checked}");
        bench.holds("a.img", "qcow2", &["read -P 3 63M 1M"]);
    }
}

/// Who waits for a cluster does not keep its queue from others' requests.
#[test]
fn compressed_clusters_are_decoded_beside_the_queue_threads() {
    let bench = Bench::new();
    fs::write(bench.path("from"), vec![7; 4 * MIB as usize]).expect("a file");
    let (from, image) = (bench.text("from"), bench.text("a.img"));
    said(&["convert", "-q", "-c", "-f", "raw", "-O", "qcow2", &from, &image]);
    let _source = bench.source(Kind::Nbdkit, "a.img");
    let server = bench.serve(&bench.uri(), &["-f", "qcow2"]);
    bench.io_well(&["read -P 7 0 4M"]);
    let tasks = fs::read_dir(format!("/proc/{}/task", server.pid())).expect("its threads");
    let names =
        tasks.flatten().filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    let names: Vec<String> = names.collect();
    assert!(names.iter().any(|name| name.starts_with("decode")), "{names:?}");
    server.stop();
}

#[test]
fn a_killed_server_leaves_an_image_that_opens() {
    let bench = Bench::new();
    made(&bench, &["-f", "qcow2"]);
    let _source = bench.source(Kind::Nbdkit, "a.img");
    let server = bench.serve(&bench.uri(), &["-f", "qcow2"]);
    bench.io_well(&["write -P 1 0 4M", "flush", "write -P 2 8M 1M"]);
    server.kill();
    let server = bench.serve(&bench.uri(), &["-f", "qcow2"]);
    bench.io_well(&["read -P 1 0 4M", "write -P 3 16M 1M", "flush", "read -P 3 16M 1M"]);
    server.stop();
    let checked = said(&["check", "-f", "qcow2", &bench.uri()]);
    assert!(!checked.contains("ERROR"), "{checked}");
}

#[test]
fn an_encrypted_image_and_a_fixed_vhd() {
    let bench = Bench::new();
    fs::write(bench.path("key"), "secret").expect("a key");
    let key = format!("file:{}", bench.text("key"));
    made(&bench, &["-f", "luks", "--target-secret", &key, "-o", "iter-time=10"]);
    let source = bench.source(Kind::Nbdkit, "a.img");
    let server = bench.serve(&bench.uri(), &["-f", "luks", "--secret", &key]);
    bench.io_well(&["write -P 1 0 4M", "flush"]);
    is_well(bench.load("1"));
    bench.io_well(&["write -P 4 60M 1M", "flush"]);
    server.stop();
    drop(source);
    let image = bench.text("a.img");
    let server = bench.serve(&image, &["-f", "luks", "--secret", &key]);
    bench.io_well(&["read -P 4 60M 1M"]);
    server.stop();
    fs::remove_file(&image).expect("removed");

    made(&bench, &["-f", "vpc", "-o", "subformat=fixed,force_size=on"]);
    let _source = bench.source(Kind::Nbdkit, "a.img");
    let server = bench.serve(&bench.uri(), &["-f", "vpc"]);
    is_well(bench.load("1"));
    bench.io_well(&["write -P 4 60M 1M", "flush"]);
    server.stop();
    bench.holds("a.img", "vpc", &["read -P 4 60M 1M"]);
}

#[test]
fn an_overlay_has_its_base_on_a_server_where_the_operator_said_so() {
    let bench = Bench::new();
    bench.raw("a.raw", 64 * MIB);
    ok("qemu-io", "qemu-utils", &["-f", "raw", "-c", "write -P 7 1M 3M", &bench.text("a.raw")]);
    let _source = bench.source(Kind::Nbdkit, "a.raw");
    let (uri, top) = (bench.uri(), bench.text("top.qcow2"));
    said(&["create", "-q", "-f", "qcow2", "-b", &uri, "-F", "raw", &top]);
    let server = bench.serve(&top, &["-f", "qcow2"]);
    bench.io_well(&[
        "read -P 7 1M 3M",
        "write -P 8 2M 4k",
        "read -P 7 2052k 4k",
        "read -P 8 2M 4k",
    ]);
    is_well(bench.load("1"));
    server.stop();
    bench.holds("a.raw", "raw", &["read -P 7 1M 3M"]);

    // Whoever made it elsewhere may have written any name into it.
    let other = bench.text("other.qcow2");
    let head = ["create", "-q", "-u", "-f", "qcow2", "-b", &uri, "-F", "raw", &other, "64M"];
    ok("qemu-img", "qemu-utils", &head);
    let nbd = format!("unix:{}", bench.text("nbd"));
    let serve = ["serve", &*other, "-f", "qcow2", "--nbd", &nbd];
    let why = refusal(&serve);
    assert!(
        why.contains("lies on a server") && why.contains(&format!("--backing '{uri}'")),
        "{why}"
    );
    let server = bench.serve(&other, &["-f", "qcow2", "--backing", &uri]);
    bench.io_well(&["read -P 7 1M 3M"]);
    server.stop();
}
