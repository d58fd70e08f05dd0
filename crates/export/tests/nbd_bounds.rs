//! What a client can make the server hold: alone in its process, for the whole process is weighed.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use ringtap_export::Stop;
use ringtap_export::nbd::wire::cmd;
use ringtap_export::nbd::{Listener, NamedExport, Server};
use ringtap_image::{CacheMode, Null};

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

/// What it holds more than then.
fn held(before: usize) -> usize {
    weight().saturating_sub(before)
}

/// Wait until it is so; how long that takes depends on what else the machine does.
fn within(most: Duration, what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < most, "not within {most:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// How often threads of this process went to sleep by themselves.
fn wakeups() -> u64 {
    let threads = fs::read_dir("/proc/self/task").expect("the threads");
    let of = |path: std::path::PathBuf| {
        // A thread may be gone by now.
        let status = fs::read_to_string(path.join("status")).ok()?;
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches:"));
        line?.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    threads.flatten().filter_map(|entry| of(entry.path())).sum()
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
    let vbd = ringtap_vbd::Disk::from(ringtap_vbd::Vbd::new(
        Box::new(Null::new(1 << 40, false)),
        CacheMode::None,
    ));
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

        // One client that has as much in flight as it may, takes it all, and then rests.
        let mut client = Raw::transmit(&socket);
        for cookie in 0..200 {
            client.send(&request(cmd::READ, 0, cookie, 0, 1 << 20));
        }
        // So much is in flight that there will be something to give back.
        within(Duration::from_secs(30), "32 MiB in flight", || held(before) > 32 << 20);
        for _ in 0..200 {
            assert!(matches!(client.reply(), Reply::Simple { error: 0, .. }));
            client.take(1 << 20);
        }
        within(Duration::from_secs(30), "a client that rests gives memory back", || {
            held(before) < 16 << 20
        });
        // The alarm that gave it back may still be at its end.
        std::thread::sleep(Duration::from_millis(500));
        let (woken, spent) = (wakeups(), cpu());
        std::thread::sleep(Duration::from_secs(3));
        // This thread wakes once, from its own sleep; the others have no reason to.
        let (woken, spent) = (wakeups().saturating_sub(woken), cpu() - spent);
        assert!(woken <= 2, "woken {woken} times in 3 s of rest");
        assert!(spent <= 10, "{spent} ms of CPU time in 3 s of rest");
        assert!(vbd.stats().cpu_ns > 0);
        drop(ending);
        serving.join().expect("the thread").expect("the server");
    });
}
