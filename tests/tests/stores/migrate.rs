//! A disk that moves to another server while its guest writes, over a line that is slow and breaks.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use ringtap_tests::{Server, is_well};
use serde_json::Value;

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
