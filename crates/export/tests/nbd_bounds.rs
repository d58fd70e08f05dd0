//! What a client can make the server hold: alone in its process, for the whole process is weighed.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringtap_export::Stop;
use ringtap_export::nbd::wire::cmd;
use ringtap_export::nbd::{Listener, NamedExport, Server};
use ringtap_image::{CacheMode, Null};
use ringtap_vbd::Vbd;

#[path = "nbd/raw.rs"]
#[allow(dead_code)]
mod raw;

use raw::{Raw, Reply, request};

/// Stops the server also where an assertion fails, or the test would wait for it for ever.
struct Ending<'a>(&'a Stop);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.raise();
    }
}

/// Bytes of memory this process holds now.
fn weight() -> usize {
    let text = fs::read_to_string("/proc/self/statm").expect("statm");
    let pages = text.split(' ').nth(1).and_then(|word| word.parse::<usize>().ok());
    pages.expect("a number") * 4096
}

/// CPU time of this process in milliseconds.
fn cpu() -> u64 {
    let usage = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    usage.tv_sec as u64 * 1000 + usage.tv_nsec as u64 / 1_000_000
}

#[test]
fn deaf_clients_are_paused_and_resting_ones_cost_nothing() {
    let dir = tempfile::TempDir::new().expect("a folder");
    let socket = dir.path().join("nbd");
    let listener = Listener::Unix(UnixListener::bind(&socket).expect("a socket"));
    let vbd = Arc::new(Vbd::new(Box::new(Null::new(1 << 40, false)), CacheMode::None));
    let export = NamedExport { name: "null".into(), description: String::new(), vbd: vbd.clone() };
    let server = Server::new(vec![listener], vec![export]);
    let stop = Stop::new().expect("an eventfd");
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| server.serve(&stop));
        let ending = Ending(&stop);
        let before = weight();

        // A thousand reads of 1 MiB, tiny reads without end, writes: and no reply is taken.
        for (kind, len) in [(cmd::READ, 1 << 20), (cmd::READ, 1), (cmd::FLUSH, 0)] {
            let mut deaf = Raw::transmit(&socket);
            deaf.0.set_nonblocking(true).expect("non-blocking");
            let mut sent = 0;
            let began = Instant::now();
            let mut full = None;
            while full.is_none_or(|since: Instant| since.elapsed() < Duration::from_millis(300)) {
                match deaf.0.write(&request(kind, 0, sent, 0, len)) {
                    Ok(_) => (sent, full) = (sent + 1, None),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::WouldBlock);
                        full = full.or(Some(Instant::now()));
                        std::thread::sleep(Duration::from_millis(10));
                    }
                }
                assert!(began.elapsed() < Duration::from_secs(30), "{sent} requests were taken");
            }
            let held = weight().saturating_sub(before);
            assert!(held < 100 << 20, "{held} bytes for {sent} requests");
            // It is served on as soon as it listens.
            deaf.0.set_nonblocking(false).expect("blocking");
            assert_eq!(deaf.reply(), Reply::Simple { error: 0, cookie: 0 });
        }

        // One client that has as much under way as it may, takes it all, and then rests.
        let mut client = Raw::transmit(&socket);
        for cookie in 0..200 {
            client.send(&request(cmd::READ, 0, cookie, 0, 1 << 20));
        }
        std::thread::sleep(Duration::from_millis(300));
        let held = weight().saturating_sub(before);
        assert!(held > 32 << 20, "only {held} bytes are under way: there is nothing to give back");
        for _ in 0..200 {
            assert!(matches!(client.reply(), Reply::Simple { error: 0, .. }));
            client.take(1 << 20);
        }
        std::thread::sleep(Duration::from_millis(2500));
        let held = weight().saturating_sub(before);
        assert!(held < 16 << 20, "{held} bytes are held by a client that rests");
        let spent = cpu();
        std::thread::sleep(Duration::from_secs(3));
        let spent = cpu() - spent;
        assert!(spent <= 1, "{spent} ms of CPU time in 3 s of rest");
        assert!(vbd.stats().cpu_ns > 0);
        drop(ending);
        serving.join().expect("the thread").expect("the server");
    });
}
