//! How near the requests that pass come to their limit, on this machine and its clock:
//!
//!     target/release/examples/caps [SECONDS [THREADS [DEPTH]]]
//!
//! A disk that holds nothing is read from by so many threads, each with so many requests in flight; it prints a line for
//! each limit, and ends with status 1 where one was missed by more than a hundredth.

use std::process::ExitCode;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use ringtap_image::{CacheMode, Null};
use ringtap_io::{Ring, Tasks};
use ringtap_vbd::{Disk, Kind, Limits, Rate, Rates, Request, Vbd};

const LEN: u64 = 4096;

/// Keep so many requests in flight for so long: how many ended.
fn load(disk: &Disk, time: Duration, depth: u64) -> u64 {
    let mut tasks = Tasks::new(Box::new(Ring::new().expect("io_uring")));
    let (vbd, served) = (Rc::new(disk.fork()), Rc::new(std::cell::Cell::new(0)));
    let end = Instant::now() + time;
    for slot in 0..depth {
        let (io, vbd, served) = (tasks.io().clone(), vbd.clone(), served.clone());
        tasks.spawn(async move {
            let buffer = io.buffer(LEN as usize).expect("memory");
            loop {
                let (offset, mem) = (slot * LEN, buffer.mem());
                let request = Request { kind: Kind::Read, offset, len: LEN, mem, fua: false };
                vbd.serve(&io, request).await.expect("served");
                if Instant::now() >= end {
                    return;
                }
                served.set(served.get() + 1);
                // Nothing here takes time, and the clock is read once a turn.
                io.next_turn().await;
            }
        });
    }
    tasks.run().expect("the ring works");
    served.get()
}

fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse().expect("a number"));
    let mut number = |usual: u64| numbers.next().unwrap_or(usual);
    let (time, threads, depth) = (Duration::from_secs(number(5)), number(2), number(32));
    println!("{threads} threads, {depth} requests of each in flight, {} s", time.as_secs());
    let mut missed = false;
    for cap in [100, 1000, 10_000, 30_000, 100_000] {
        let disk = Disk::from(Vbd::new(Box::new(Null::new(1 << 30, false)), CacheMode::None));
        let total = Rate { average: cap, ..Rate::default() };
        disk.set_limits(Limits { iops: Rates { total, ..Rates::default() }, ..Limits::default() });
        let began = Instant::now();
        let all: u64 = thread::scope(|scope| {
            let one = || scope.spawn(|| load(&disk, time, depth));
            let loads: Vec<_> = (0..threads).map(|_| one()).collect();
            loads.into_iter().map(|load| load.join().expect("no panic")).sum()
        });
        let found = all as f64 / time.as_secs_f64();
        let off = (found / cap as f64 - 1.0) * 100.0;
        missed |= off.abs() > 1.0;
        println!("limit {cap:>6}/s: {found:>9.1}/s, {off:+.2} %, {:.1?}", began.elapsed());
    }
    ExitCode::from(u8::from(missed))
}
