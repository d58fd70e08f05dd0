//! Verbs that read an image or write one, where that is on a server.

use ringtap_tests::ok;

use crate::bench::{Bench, Kind, MIB, refusal, said};

#[test]
fn verbs_take_an_export_for_an_image() {
    let bench = Bench::new();
    bench.raw("a.raw", 16 * MIB);
    let path = bench.text("a.raw");
    ok("qemu-io", "qemu-utils", &["-f", "raw", "-c", "write -P 7 1M 3M", &path]);
    let _source = bench.source(Kind::Qemu, "a.raw");
    let uri = bench.uri();
    let info: serde_json::Value =
        serde_json::from_str(&said(&["info", "-f", "raw", "--output", "json", &uri]))
            .expect("JSON");
    assert_eq!((&info["virtual-size"], &info["format"]), (&(16 * MIB).into(), &"raw".into()));
    let map = said(&["map", "-f", "raw", "--output", "json", &uri]);
    let map: Vec<serde_json::Value> = serde_json::from_str(&map).expect("JSON");
    let data: u64 =
        map.iter().filter(|it| it["data"] == true).filter_map(|it| it["length"].as_u64()).sum();
    assert!((3 * MIB..5 * MIB).contains(&data), "{map:?}");
    let local = bench.text("b.qcow2");
    said(&["convert", "-q", "-f", "raw", "-O", "qcow2", &uri, &local]);
    said(&["compare", "-f", "raw", "-F", "qcow2", &uri, &local]);
    ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "qcow2", &path, &local]);
    said(&["measure", "-f", "raw", "-O", "qcow2", &uri]);

    let head = ["create", "-q", "-f", "raw"];
    said(&[&head[..], &[&*bench.text("c.raw"), "16M"]].concat());
    ok("qemu-io", "qemu-utils", &["-f", "raw", "-c", "write -P 9 2M 5M", &bench.text("c.raw")]);
    said(&["convert", "-q", "-n", "-f", "raw", "-O", "raw", &bench.text("c.raw"), &uri]);
    ok(
        "qemu-img",
        "qemu-utils",
        &["compare", "-U", "-f", "raw", "-F", "raw", &path, &bench.text("c.raw")],
    );
}

#[test]
fn what_cannot_be_is_said_with_what_to_do() {
    let bench = Bench::new();
    ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &bench.text("a.img"), "16M"]);
    let uri = bench.uri();
    let nobody = refusal(&["info", "-f", "raw", &uri]);
    assert!(nobody.contains("is the server running?"), "{nobody}");
    let _source = bench.source(Kind::Qemu, "a.img");
    let other = uri.replace("/e?", "/f?");
    let missing = refusal(&["info", "-f", "raw", &other]);
    assert!(missing.contains("has no export \"f\""), "{missing}");
    let nbd = format!("unix:{}", bench.text("nbd"));
    let unnamed = refusal(&["serve", &uri, "--nbd", &nbd]);
    assert!(unnamed.contains("-f raw"), "{unnamed}");
    // One wrong letter.
    let wrong = refusal(&["serve", &uri, "-f", "raw", "--nbd", &nbd]);
    assert!(wrong.contains("qcow2") && wrong.contains("--force-format"), "{wrong}");
    let old = refusal(&["info", &format!("nbd:unix:{}", bench.text("source"))]);
    assert!(old.contains("nbd+unix:///"), "{old}");
    drop(_source);
    bench.raw("b.raw", MIB);
    let path = bench.text("b.raw");
    let source = ringtap_tests::Server::start([
        "--read-only",
        &path,
        "-f",
        "raw",
        "--name",
        "e",
        "--nbd",
        &format!("unix:{}", bench.text("source")),
    ]);
    let read_only = refusal(&["serve", &uri, "-f", "raw", "--nbd", &nbd]);
    assert!(read_only.contains("--read-only"), "{read_only}");
    source.stop();
}

#[test]
fn a_commit_says_that_an_export_grows_no_larger() {
    let bench = Bench::new();
    bench.raw("a.raw", MIB);
    let _source = bench.source(Kind::Qemu, "a.raw");
    let (uri, top) = (bench.uri(), bench.text("top.qcow2"));
    said(&["create", "-q", "-f", "qcow2", "-b", &uri, "-F", "raw", &top, "2M"]);
    let why = refusal(&["commit", "-f", "qcow2", &top]);
    assert!(why.contains("lies on a server, whose size others decide"), "{why}");
}
