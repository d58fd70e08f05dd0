//! Overlays that are to live without the server of their base.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ringtap_tests::{Server, ok, patience, ringtap};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB, pattern, refusal, said};
use crate::origin::{Fault, Origin};

const OWN: [&str; 3] = ["write -P 99 6k 512", "write -z 3M 64k", "write -P 98 7M 64k"];

impl Bench {
    /// A server of an object with its index.
    fn origin(&self, object: &[u8]) -> Origin {
        let www = self.text("www");
        fs::write(self.path("disk.img"), object).expect("written");
        fs::create_dir(&www).expect("made");
        said(&["publish", &self.text("disk.img"), &www]);
        let index = fs::read(self.path("www/disk.img.rtidx")).expect("the index");
        let origin = Origin::new(object.to_vec());
        origin.with(|state| state.beside = vec![(".rtidx".into(), index)]);
        origin
    }

    /// An overlay upon that, which a guest has written to; and what it reads as.
    fn overlay(&self, uri: &str, object: &[u8]) -> (String, Vec<u8>) {
        let top = self.text("top.qcow2");
        said(&["create", "-q", "-f", "qcow2", "-b", uri, "-F", "raw", &top]);
        let server = self.serve(&top, &["-f", "qcow2"]);
        let nbd = format!("nbd+unix:///d?socket={}", self.text("nbd"));
        let mut args = vec!["-f", "raw"];
        args.extend(OWN.iter().flat_map(|own| ["-c", own]));
        args.push(&nbd);
        ok("qemu-io", "qemu-utils", &args);
        server.stop();
        let mut all = object.to_vec();
        all.resize(object.len().next_multiple_of(512), 0);
        all[6 << 10..][..512].fill(99);
        all[3 * MIB..][..64 << 10].fill(0);
        all[7 * MIB..][..64 << 10].fill(98);
        (top, all)
    }

    /// By what QEMU finds in it, with nothing else there.
    fn stands_alone(&self, top: &str, all: &[u8]) {
        assert_eq!(named(top), Value::Null);
        ok("qemu-img", "qemu-utils", &["check", "-q", top]);
        let flat = self.text("flat");
        ok("qemu-img", "qemu-utils", &["convert", "-f", "qcow2", "-O", "raw", top, &flat]);
        assert!(fs::read(&flat).expect("flat") == all, "the bytes differ");
    }
}

/// What an image names as lying below it.
fn named(top: &str) -> Value {
    let args = ["info", "--output", "json", "-U", "-f", "qcow2", top];
    let info: Value =
        serde_json::from_str(&ok("qemu-img", "qemu-utils", &args)).expect("what qemu-img says");
    info["backing-filename"].clone()
}

/// Chunks that were asked for, but for the first byte that opening asks for.
fn asked(origin: &Origin) -> usize {
    let asked = origin.with(|state| std::mem::take(&mut state.asked));
    asked.iter().filter(|(_, to)| *to > 0).count()
}

fn wait_for(origin: &Origin, chunks: usize) {
    let until = Instant::now() + patience();
    while origin.with(|state| state.asked.len()) < chunks {
        assert!(Instant::now() < until, "so much is not asked for");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_overlay_that_was_detached_reads_all_with_the_server_gone() {
    let bench = Bench::new();
    let mut object = pattern(9 * MIB + 700);
    object[MIB..2 * MIB].fill(0);
    let origin = bench.origin(&object);
    let uri = origin.uri().replace("reconnect=20", "reconnect=1");
    let (top, all) = bench.overlay(&uri, &object);
    // What is not the index's is no part of it, and then nothing is cut.
    origin.with(|state| state.always = Some(Fault::Wrong));
    let why = refusal(&["detach", &top]);
    assert!(why.contains("reads as before"), "{why}");
    assert_eq!(named(&top), uri);
    origin.with(|state| state.always = None);
    let cache = bench.text("cache");
    let told = said(&["detach", "--output", "json", "-p", "--cache-dir", &cache, &top]);
    let told: Value = serde_json::from_str(&told).expect("JSON");
    let below = json!([{ "filename": uri, "format": "raw", "verified": true }]);
    assert_eq!(told["detached"], below, "{told}");
    let brought = told["brought"].as_u64().expect("a number");
    // Neither zeros nor what the overlay has itself: all of it but 1 MiB and two clusters.
    let most = 8 * MIB as u64 + 1024;
    assert!(brought > 0 && brought <= most, "{brought} of {most}");
    origin.end();
    bench.stands_alone(&top, &all);
    let server = bench.serve(&top, &["-f", "qcow2"]);
    assert!(bench.whole() == all);
    server.stop();
    let again = said(&["detach", &top]);
    assert!(again.contains("nothing lies below it"), "{again}");
}

#[test]
fn what_a_killed_detaching_has_brought_is_not_brought_again() {
    let bench = Bench::new();
    let object = pattern(64 * MIB);
    let origin = bench.origin(&object);
    let (top, all) = bench.overlay(&origin.uri(), &object);
    asked(&origin);
    origin.with(|state| state.always = Some(Fault::Slow(Duration::from_millis(30))));
    let mut first = Command::new(ringtap());
    first.args(["detach", &top]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut first = first.spawn().expect("ringtap");
    wait_for(&origin, 160);
    first.kill().expect("killed");
    first.wait().expect("its end");
    origin.with(|state| state.always = None);
    assert_eq!(named(&top), origin.uri());
    // Requests of the killed one that were on their way.
    std::thread::sleep(Duration::from_millis(200));
    asked(&origin);
    said(&["detach", "-q", &top]);
    let second = asked(&origin);
    // Of 256, what the first had written and what was on its way: 96 at the least.
    assert!((1..=170).contains(&second), "{second} chunks were fetched again");
    origin.end();
    bench.stands_alone(&top, &all);
}

#[test]
fn a_disk_is_detached_while_it_is_served_and_over_a_kill() {
    let bench = Bench::new();
    let object = pattern(16 * MIB);
    let origin = bench.origin(&object);
    let (top, all) = bench.overlay(&origin.uri(), &object);
    let (control, cache) = (format!("unix:{}", bench.text("control")), bench.text("cache"));
    let serve = || {
        let more = ["-f", "qcow2", "--control", &control, "--cache-dir", &cache];
        bench.serve(&top, &more)
    };
    let detach = |more: &[&str]| {
        said(&[&["disk", "--control", &control, "detach", "d", "--output", "json"], more].concat())
    };
    let server = serve();
    let id = detach(&["--rate", "2M", "--no-wait"]);
    let id: Value = serde_json::from_str(&id).expect("JSON");
    assert_eq!(id["job-id"], "detach-d", "{id}");
    // A part of it has been brought.
    let mut qmp = ringtap_tests::Control::open(&bench.path("control"));
    let until = Instant::now() + patience();
    let far = |qmp: &mut ringtap_tests::Control| {
        qmp.ok("query-jobs", json!({}))[0]["current-progress"].as_u64().unwrap_or_default()
    };
    while far(&mut qmp) < 2 * MIB as u64 {
        assert!(Instant::now() < until, "the job does nothing");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(qmp);
    let busy = refusal(&["detach", &top]);
    assert!(busy.contains("ringtap disk detach"), "{busy}");
    server.kill();
    assert_eq!(named(&top), origin.uri());
    // The next server goes on with it, and who asks again sees it to its end.
    let server = serve();
    let told = detach(&["--rate", "1G"]);
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(told["detached"], json!([{ "filename": origin.uri(), "format": "raw" }]), "{told}");
    assert_eq!(told["file"], top, "{told}");
    origin.end();
    fs::remove_dir_all(&cache).expect("removed");
    assert!(bench.whole() == all);
    bench.io_well(&["write -P 5 9M 64k", "read -P 5 9M 64k", "write -P 10 9M 64k"]);
    let again: Value = serde_json::from_str(&detach(&[])).expect("JSON");
    assert_eq!(again["detached"], json!([]), "{again}");
    server.kill();
    let server = bench.serve(&top, &["-f", "qcow2"]);
    bench.io_well(&["read -P 10 9M 64k"]);
    let mut now = all;
    now[9 * MIB..][..64 << 10].fill(10);
    assert!(bench.whole() == now);
    server.stop();
    bench.stands_alone(&top, &now);
}

#[test]
fn what_lies_on_an_nbd_server_is_detached_and_what_cannot_be_is_said() {
    let bench = Bench::new();
    let object = pattern(8 * MIB);
    fs::write(bench.path("base.raw"), &object).expect("written");
    let listen = format!("unix:{}", bench.text("source"));
    let base = bench.text("base.raw");
    let source = Server::start([&*base, "-f", "raw", "--name", "e", "--nbd", &listen]);
    let uri = format!("nbd+unix:///e?socket={}&reconnect=1", bench.text("source"));
    let (top, all) = bench.overlay(&uri, &object);
    // A snapshot inside it reads from below, too.
    said(&["snapshot", "-c", "s", &top]);
    let why = refusal(&["detach", &top]);
    assert!(why.contains("snapshots of its own") && why.contains("snapshot -d"), "{why}");
    said(&["snapshot", "-d", "s", &top]);
    let told = said(&["detach", &top]);
    assert!(told.contains(&uri), "{told}");
    source.stop();
    bench.stands_alone(&top, &all);
    let vhd = bench.text("top.vhd");
    said(&["create", "-q", "-f", "vpc", &vhd, "8M"]);
    let over = bench.text("over.vhd");
    said(&["create", "-q", "-f", "vpc", "-b", &vhd, "-F", "vpc", &over]);
    let why = refusal(&["detach", &over]);
    assert!(why.contains("ringtap convert"), "{why}");
    // Where the server is gone before, that is said, and nothing is changed.
    let lost = bench.text("lost.qcow2");
    ok(
        "qemu-img",
        "qemu-utils",
        &["create", "-q", "-u", "-f", "qcow2", "-b", &uri, "-F", "raw", &lost, "8M"],
    );
    let why = refusal(&["detach", &lost, "-f", "qcow2", "--backing", &uri]);
    assert!(why.contains("cannot open nbd+unix"), "{why}");
    assert_eq!(named(&lost), uri);
}
