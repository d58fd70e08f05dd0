//! A disk that moves to another server while its guest writes, over a line that is slow and breaks.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use ringtap_tests::{Control, Server, is_well};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB, refusal, said};

/// Carries bytes between clients and a server; each piece takes time, and after so many bytes a connection is cut.
struct Line {
    /// How often it was.
    cuts: Arc<AtomicU64>,
}

impl Line {
    fn new(near: PathBuf, far: PathBuf, delay: Duration, whole: u64) -> Line {
        let listener = UnixListener::bind(near).expect("a socket");
        let cuts = Arc::new(AtomicU64::new(0));
        let own = cuts.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = UnixStream::connect(&far) else { continue };
                let left = Arc::new(AtomicU64::new(whole));
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().expect("one"), to.try_clone().expect("one"));
                    let (left, cuts) = (left.clone(), own.clone());
                    thread::spawn(move || carry(from, to, delay, &left, &cuts));
                }
            }
        });
        Line { cuts }
    }
}

fn carry(
    mut from: UnixStream,
    mut to: UnixStream,
    delay: Duration,
    left: &AtomicU64,
    cuts: &AtomicU64,
) {
    let mut bytes = vec![0; 256 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        thread::sleep(delay);
        let before =
            left.fetch_update(SeqCst, SeqCst, |left| Some(left.saturating_sub(count as u64)));
        if before == Ok(0) {
            break;
        }
        if before.is_ok_and(|before| before <= count as u64) {
            cuts.fetch_add(1, SeqCst);
            // In the middle of what it says.
            let _ = to.write_all(&bytes[..count / 2]);
            break;
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

#[test]
fn a_disk_moves_to_another_server_over_a_slow_line_that_breaks() {
    let bench = Bench::new();
    bench.raw("here.raw", 64 * MIB);
    said(&["create", "-q", "-f", "qcow2", &bench.text("there.qcow2"), "64M"]);
    let source = bench.text("source");
    let there = [bench.text("there.qcow2"), format!("unix:{source}")];
    let there = Server::start(["-f", "qcow2", "--name", "e", &*there[0], "--nbd", &*there[1]]);
    let line =
        Line::new(bench.path("line"), bench.path("source"), Duration::from_millis(2), 24 * MIB);

    let listen = format!("unix:{}", bench.text("control"));
    let here = bench
        .serve(&bench.text("here.raw"), &["-f", "raw", "--node-name", "vm", "--control", &listen]);
    bench.io_well(&["write -P 6 0 40M"]);
    let guest = bench.load("5");
    let uri = format!("nbd+unix:///e?socket={}", bench.text("line"));
    let local = refusal(&["disk", "migrate", "--control", &listen, "vm", &source]);
    assert!(local.contains("disk mirror"), "{local}");
    let checkpoint = ["disk", "checkpoint", "add", "--control", &listen, "vm", "nightly"];
    said(&checkpoint);
    let migrate = ["disk", "migrate", "--control", &listen, "--output", "json", "vm", &uri];
    let told = ringtap_tests::ringtap_of(&migrate);
    let stays = String::from_utf8_lossy(&told.stderr);
    assert!(
        told.status.success() && stays.contains("stay behind") && stays.contains("nightly"),
        "{stays}"
    );
    let told: Value = serde_json::from_slice(&told.stdout).expect("JSON");
    assert_eq!((told["node-name"].as_str(), told["file"].as_str()), (Some("vm"), Some(&*uri)));
    let pause = told["pause-ns"].as_u64().unwrap_or_default();
    // It stood still for the end, which is begun anew where that takes more than 100 ms.
    assert!(pause > 0, "{told}");
    println!(
        "requests waited for {:.1} ms; the line was cut {} times",
        pause as f64 / 1e6,
        line.cuts.load(SeqCst)
    );
    is_well(guest);
    is_well(bench.load("1"));
    assert!(line.cuts.load(SeqCst) > 0);
    bench.io_well(&["write -P 7 41M 1M", "flush"]);
    here.stop();
    there.stop();
    bench.holds("there.qcow2", "qcow2", &["read -P 7 41M 1M"]);
}

/// Each region that is copied would be changed by that, and copied again.
#[test]
fn a_disk_does_not_move_into_an_export_of_itself() {
    let bench = Bench::new();
    bench.raw("a.raw", MIB);
    let listen = format!("unix:{}", bench.text("control"));
    let more = ["-f", "raw", "--node-name", "vm", "--control", &listen];
    let server = bench.serve(&bench.text("a.raw"), &more);
    let uri = format!("nbd+unix:///d?socket={}", bench.text("nbd"));
    let own = ringtap_tests::ringtap();
    let own = own.to_str().expect("a plain path");
    let args = ["20", own, "disk", "migrate", "--control", &listen, "vm", &uri];
    let told = ringtap_tests::program("timeout", "coreutils", args);
    let why = String::from_utf8_lossy(&told.stderr);
    assert!(why.contains("is an export of vm itself"), "{why}");
    // Of another name, at another address, which is written in several ways.
    let mut control = Control::open(&bench.path("control"));
    let port = TcpListener::bind("127.0.0.1:0").and_then(|one| one.local_addr());
    let port = port.expect("a port").port();
    let at = json!({"type": "inet", "data": {"host": "127.0.0.1", "port": port.to_string()}});
    control.ok("nbd-server-start", json!({"addr": at}));
    let export =
        json!({"id": "e", "type": "nbd", "node-name": "vm", "name": "o", "writable": true});
    control.ok("block-export-add", export);
    for at in ["127.0.0.1", "localhost", "127.1"] {
        let uri = format!("nbd://{at}:{port}/o");
        let args = ["20", own, "disk", "migrate", "--control", &listen, "vm", &uri];
        let told = ringtap_tests::program("timeout", "coreutils", args);
        let why = String::from_utf8_lossy(&told.stderr);
        assert!(why.contains("'vm' itself") || why.contains("of vm itself"), "{uri}: {why}");
    }
    server.stop();
}

/// The source of a move goes on, and passes all on: to move back there would be to move into oneself.
#[test]
fn a_disk_does_not_move_back_into_a_server_that_has_it_from_here() {
    let bench = Bench::new();
    bench.raw("here.img", 64 * MIB);
    let (here, there, [near, far]) = both(&bench, "raw");
    bench.io_well(&["write -P 6 0 4M"]);
    let to = |name: &str, export: &str| format!("nbd+unix:///{export}?socket={}", bench.text(name));
    said(&["disk", "migrate", "--control", &near, "vm", &to("source", "e")]);
    let own = ringtap_tests::ringtap();
    let own = own.to_str().expect("a plain path");
    let back = |export: &str| {
        let uri = to("nbd", export);
        let args = ["30", own, "disk", "migrate", "--control", &far, "there", &uri];
        let told = ringtap_tests::program("timeout", "coreutils", args);
        assert_eq!(told.status.code(), Some(1), "{told:?}");
        String::from_utf8_lossy(&told.stderr).into_owned()
    };
    let why = back("d");
    assert!(why.contains("passes all on to here") && why.contains("disk remove"), "{why}");
    // Refused, it has left nothing behind; and so it is where both servers have taken over from themselves.
    let pids = [&far, &near].map(|control| {
        let told = said(&["upgrade", control, "--output", "json"]);
        let told: Value = serde_json::from_str(&told).expect("JSON");
        rustix::process::Pid::from_raw(told["pid"].as_i64().expect("a process") as i32)
    });
    bench.io_well(&["read -P 6 0 4M", "write -P 7 1M 1M"]);
    let why = back("d");
    assert!(why.contains("passes all on to here"), "{why}");
    let nodes = said(&["disk", "list", "--control", &far, "--output", "json"]);
    let nodes: Vec<Value> = serde_json::from_str(&nodes).expect("JSON");
    assert_eq!(nodes.len(), 1, "{nodes:?}");
    // Another export is as good a target as any.
    bench.raw("new.img", 64 * MIB);
    let (new, third) = (bench.text("new.img"), format!("unix:{}", bench.text("third")));
    let third = Server::start(["-f", "raw", "--name", "e", &*new, "--nbd", &*third]);
    said(&["disk", "migrate", "--control", &far, "there", &to("third", "e")]);
    // Each before the one that it passes all on to.
    for pid in pids.into_iter().rev() {
        rustix::process::kill_process(pid.expect("one"), rustix::process::Signal::TERM)
            .expect("it is there");
    }
    there.ends();
    here.ends();
    third.stop();
}

/// Servers here and there, each with its control socket; there lies `there.qcow2`.
fn both(bench: &Bench, here: &str) -> (Server, Server, [String; 2]) {
    said(&["create", "-q", "-f", "qcow2", &bench.text("there.qcow2"), "64M"]);
    let [near, far] = ["control", "far"].map(|name| format!("unix:{}", bench.text(name)));
    let there = serve_there(bench, &far);
    let more = ["-f", here, "--node-name", "vm", "--control", &near];
    let here = bench.serve(&bench.text("here.img"), &more);
    (here, there, [near, far])
}

fn serve_there(bench: &Bench, control: &str) -> Server {
    let (image, nbd) = (bench.text("there.qcow2"), format!("unix:{}", bench.text("source")));
    let args = ["-f", "qcow2", "--name", "e", "--node-name", "there", &image, "--nbd", &nbd];
    Server::start(args.iter().chain(&["--control", control]))
}

/// The checkpoints of a disk, by their names, with the bytes that have changed.
fn checkpoints(control: &str, node: &str) -> Vec<(String, u64)> {
    let list = ["disk", "checkpoint", "list", "--control", control, "--output", "json", node];
    let all: Value = serde_json::from_str(&said(&list)).expect("JSON");
    let one = |one: &Value| {
        let name = one["name"].as_str().expect("a name").to_owned();
        (name, one["count"].as_u64().expect("bytes"))
    };
    all.as_array().expect("a list").iter().map(one).collect()
}

#[test]
fn checkpoints_go_with_a_disk_and_know_what_has_changed_on_the_way() {
    let bench = Bench::new();
    bench.raw("here.img", 64 * MIB);
    let (here, there, [near, far]) = both(&bench, "raw");
    bench.io_well(&["write -P 6 0 20M"]);
    let uri = format!("nbd+unix:///e?socket={}", bench.text("source"));
    let own = format!("nbd+unix:///d?socket={}", bench.text("nbd"));
    let [old, new] = ["old.qcow2", "new.raw"].map(|name| bench.text(name));
    // A copy of the moment at which the checkpoint begins.
    said(&["create", "-q", "-f", "qcow2", &old, "64M"]);
    let backup = ["disk", "backup", "--control", &near, "vm", &old, "-f", "qcow2", "--zeroed"];
    // A disk of the host may stand still for long.
    let patient = ["--guest-timeout", "60000"];
    said(&[&backup[..], &patient, &["--checkpoint", "nightly"]].concat());
    said(&["disk", "checkpoint", "add", "--control", &near, "vm", "idle", "-g", "1M"]);
    let guest = bench.load("4");
    let migrate = ["disk", "migrate", "--control", &near, "--there", &far, "--node-there", "there"];
    let stays = [&migrate[..], &["vm", &uri]].concat();
    let told = ringtap_tests::ringtap_of(&stays);
    let error = String::from_utf8_lossy(&told.stderr);
    assert!(told.status.success() && !error.contains("behind"), "{error}");
    is_well(guest);
    bench.io_well(&["write -P 7 50M 1M", "flush"]);
    let names = |all: &[(String, u64)]| -> Vec<String> {
        all.iter().map(|(name, _)| name.clone()).collect()
    };
    let all = checkpoints(&far, "there");
    assert_eq!(names(&all), ["nightly", "idle"], "{all:?}");
    assert!(checkpoints(&near, "vm").is_empty(), "they have gone");
    said(&["convert", "-q", "-f", "raw", "-O", "raw", &own, &new]);
    here.stop();
    // They outlive the server there, and the guest is that one's own from now on.
    there.kill();
    let there = serve_there(&bench, &far);
    assert_eq!(names(&checkpoints(&far, "there")), ["nightly", "idle"]);
    let since = ["disk", "backup", "--control", &far, "there", &old, "-f", "qcow2"];
    said(&[&since[..], &patient, &["--since", "nightly"]].concat());
    let same = ["compare", "-f", "raw", "-F", "qcow2", &new, &old];
    ringtap_tests::ok("qemu-img", "qemu-utils", &same);
    there.stop();
}

#[test]
fn checkpoints_that_have_gone_are_exact() {
    let bench = Bench::new();
    said(&["create", "-q", "-f", "qcow2", &bench.text("here.img"), "64M"]);
    let (here, there, [near, far]) = both(&bench, "qcow2");
    bench.io_well(&["write -P 6 0 40M"]);
    said(&["disk", "checkpoint", "add", "--control", &near, "vm", "nightly"]);
    bench.io_well(&["write -P 7 1M 64k", "write -P 8 63M 128k"]);
    let uri = format!("nbd+unix:///e?socket={}", bench.text("source"));
    let migrate = ["disk", "migrate", "--control", &near, "--there", &far, "--node-there", "there"];
    // One of that name is there: nothing is begun.
    said(&["disk", "checkpoint", "add", "--control", &far, "there", "nightly"]);
    let clash = refusal(&[&migrate[..], &["vm", &uri]].concat());
    assert!(clash.contains("nightly") && clash.contains("there"), "{clash}");
    said(&["disk", "checkpoint", "remove", "--control", &far, "there", "nightly"]);
    said(&[&migrate[..], &["vm", &uri]].concat());
    bench.io_well(&["write -P 9 10M 64k"]);
    assert_eq!(checkpoints(&far, "there"), [("nightly".to_owned(), (4 * 64) << 10)]);
    let mut control = ringtap_tests::Control::open(&bench.path("far"));
    let which = serde_json::json!({ "node": "there", "name": "nightly" });
    let told = control.ok("__ringtap_bitmap-regions", which);
    let wanted = [(1 << 20, 64 << 10), (10 << 20, 64 << 10), (63 << 20, 128 << 10)];
    let wanted: Vec<Value> = wanted
        .iter()
        .map(|(offset, length): &(u64, u64)| serde_json::json!({ "offset": offset, "length": length }))
        .collect();
    assert_eq!(told["regions"], Value::from(wanted), "{told}");
    let mark = |name: &str, offset: u64| {
        let regions = [serde_json::json!({ "offset": offset, "length": 512 })];
        serde_json::json!({ "node": "there", "name": name, "regions": regions })
    };
    let refused = control.call("__ringtap_bitmap-mark", mark("nightly", 0));
    assert!(refused.expect_err("it records").contains("records"));
    let add = serde_json::json!({ "node": "there", "name": "own", "disabled": true });
    control.ok("block-dirty-bitmap-add", add);
    let refused = control.call("__ringtap_bitmap-mark", mark("own", 64 << 20));
    assert!(refused.expect_err("there is no such place").contains("past the disk's end"));
    control.ok("__ringtap_bitmap-mark", mark("own", 32 << 20));
    here.stop();
    there.stop();
}
