//! Disks that are to stand still together, one of them on storage that takes long for each request.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::{Server, listens, patience, program};
use serde_json::json;

use crate::bench::{Bench, MIB};

/// An NBD server each of whose reads takes so many seconds; it ends with this.
struct Slow(Child);

impl Slow {
    fn new(bench: &Bench, seconds: u32) -> Slow {
        bench.raw("slow.raw", 64 * MIB);
        let (socket, file) = (bench.text("slow"), bench.text("slow.raw"));
        let delay = format!("rdelay={seconds}");
        let args = ["-f", "-U", &socket, "--filter=delay", "file", &file, &delay];
        let child = Command::new("nbdkit").args(args).stderr(Stdio::null()).spawn();
        let slow = Slow(child.expect("nbdkit begins"));
        let until = Instant::now() + patience();
        while !listens(&bench.path("slow")) {
            assert!(Instant::now() < until, "nbdkit does not listen");
            thread::sleep(Duration::from_millis(10));
        }
        slow
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// While it is tried again and again to have both stand still, the requests of one do not wait for those of the other.
#[test]
fn a_disk_does_not_wait_for_the_requests_of_another_for_long() {
    let bench = Bench::new();
    bench.raw("a.raw", 64 * MIB);
    let _slow = Slow::new(&bench, 6);
    let far = format!("nbd+unix:///?socket={}", bench.text("slow"));
    let (image, control) = (bench.text("a.raw"), format!("unix:{}", bench.text("control")));
    let [a, b] = ["a", "b"].map(|letter| format!("unix:{}.nbd", bench.text(letter)));
    let near = [&*image, "-f", "raw", "--name", "a", "--node-name", "a", "--nbd", &a];
    let others = [&*far, "-f", "raw", "--name", "b", "--node-name", "b", "--nbd", &b];
    let server = Server::start(near.iter().chain(&others).chain(&["--control", &control]));
    let over = AtomicBool::new(false);
    let longest = thread::scope(|scope| {
        // There is always one in flight for longer than the disks may stand still for.
        for _ in 0..3 {
            scope.spawn(|| {
                while !over.load(SeqCst) {
                    let uri = bench.uri("b");
                    program("qemu-io", "qemu-utils", ["-r", "-f", "raw", "-c", "read 0 4k", &*uri]);
                }
            });
            thread::sleep(Duration::from_millis(2000));
        }
        let asks = scope.spawn(|| {
            let add = |node| json!({ "type": "block-dirty-bitmap-add", "data": { "node": node, "name": "x" } });
            let both = json!({ "actions": [add("a"), add("b")] });
            // Whether they come to stand still is the storage's matter.
            let _ = bench.control().call("transaction", both);
        });
        let mut longest = Duration::ZERO;
        while !asks.is_finished() {
            let began = Instant::now();
            bench.io("a", &["read 0 4k"]);
            longest = longest.max(began.elapsed());
        }
        over.store(true, SeqCst);
        longest
    });
    assert!(longest < Duration::from_secs(4), "a request has waited for {longest:?}");
    server.stop();
}
