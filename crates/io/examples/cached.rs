//! What a 4 KiB write into the page cache takes, by who makes it. `cached FILE`: a file of at least 64 MiB on the file
//! system that is meant; it is overwritten. One write at a time, four ways in turn, the median of 20 rounds.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Instant;

use ringtap_io::{Nature, Op, OpenFile, Reactor, Ring, Tasks};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 16384;
const WRITES: u64 = 2000;

/// Nanoseconds a write.
fn one_by_one(ring: &mut Ring, op: impl Fn(u64) -> Op) -> f64 {
    let (mut submit, mut done) = (Vec::new(), Vec::new());
    let began = Instant::now();
    for number in 0..WRITES {
        submit.push((0, op(number * 7919 % BLOCKS * BLOCK)));
        while done.is_empty() {
            ring.turn(&mut submit, &mut done, true).expect("the ring");
        }
        let (_, result) = done.remove(0);
        assert_eq!(result, BLOCK as i32, "a write");
    }
    began.elapsed().as_nanos() as f64 / WRITES as f64
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let path = std::env::args().nth(1).expect("usage: cached FILE");
    let opened = || -> OwnedFd {
        File::options().read(true).write(true).open(&path).expect("the file").into()
    };
    let natures = [
        (
            "no question, no clock",
            Nature { page_cache: true, in_memory: true, ..Nature::default() },
        ),
        ("as it is chosen", Nature { page_cache: true, ..Nature::default() }),
        ("by the ring, which hands it to a worker where it must", Nature::default()),
    ];
    let files = natures.map(|(_, nature)| {
        let file = OpenFile::new(opened());
        file.set_nature(nature);
        file
    });
    let mut ring = Ring::new().expect("io_uring");
    let tasks = Tasks::new(Box::new(Ring::new().expect("io_uring")));
    let buffer = tasks.io().buffer(BLOCK as usize).expect("memory");
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..20 {
        for (file, times) in files.iter().zip(&mut times) {
            let (file, mem) = (file.handle(), buffer.mem());
            let op = |offset| Op::Write { file, offset, mem, durable: false };
            times.push(one_by_one(&mut ring, op));
        }
    }
    for ((name, _), times) in natures.iter().zip(&mut times) {
        println!("{:>8.0} ns  {name}", median(times));
    }
}
