//! The load loop: one queue, one thread, its depth always full.

use crate::engine::{Done, Engine, Op};
use crate::pattern::{Blocks, Random};
use crate::verify::{Ledger, Verified};
use crate::{Error, LoadArgs, Rw};
use hdrhistogram::Histogram;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What one thread is to do.
pub struct Plan {
    rw: Rw,
    bs: u64,
    depth: usize,
    first: u64,
    blocks: u64,
    ramp: Duration,
    seconds: Duration,
    fsync_every: Option<u64>,
    verify: bool,
    seed: u64,
}

impl Plan {
    /// The plans of `queues` threads on a device of `capacity` bytes.
    ///
    /// Random load goes everywhere from every thread; sequential load and load that is verified
    /// goes to a part of the disk per thread.
    pub fn split(args: &LoadArgs, capacity: u64, queues: usize) -> Result<Vec<Plan>, Error> {
        let size = args.size.unwrap_or(capacity);
        if size > capacity {
            return Err(Error::Arguments(format!(
                "--size {size}: the device has only {capacity} bytes"
            )));
        }
        let all = size / args.bs;
        let apart = args.rw.sequential() || args.verify;
        let blocks = if apart { all / queues as u64 } else { all };
        let least = if args.verify { 2 * args.depth as u64 } else { 1 };
        if blocks < least {
            return Err(Error::Arguments(format!(
                "{size} bytes hold {all} blocks of {} for {queues} queues; each queue needs {least}",
                args.bs
            )));
        }
        let seed = Random::fresh_seed();
        let plan = |queue: usize| Plan {
            rw: args.rw,
            bs: args.bs,
            depth: args.depth,
            first: if apart { queue as u64 * blocks * args.bs } else { 0 },
            blocks,
            ramp: Duration::from_secs_f64(args.ramp),
            seconds: Duration::from_secs_f64(args.seconds),
            fsync_every: args.fsync_every,
            verify: args.verify,
            seed: seed.wrapping_add(queue as u64),
        };
        Ok((0..queues).map(plan).collect())
    }
}

/// What one thread, or all together, measured.
pub struct Tally {
    /// Latency in nanoseconds of the reads and writes inside the window.
    pub latency: Histogram<u64>,
    /// Latency in nanoseconds of the flushes inside the window.
    pub flush_latency: Histogram<u64>,
    /// Reads and writes from the first to the last, ramp and drain included.
    pub total_ios: u64,
    /// Writes among them.
    pub total_writes: u64,
    /// Length of the window.
    pub window: Duration,
    /// When it ended, in milliseconds since 1970.
    pub ended_ms: f64,
    /// CPU time of the load threads inside the window.
    pub cpu: Duration,
    /// Requests that failed, at any time.
    pub errors: u64,
    /// What the first failed request was.
    pub first_error: Option<String>,
    /// What `--verify` found.
    pub verified: Option<Verified>,
}

impl Tally {
    /// Nothing measured yet.
    pub fn new() -> Tally {
        let empty = || {
            let mut histogram = Histogram::new_with_bounds(1, 60_000_000_000, 3)
                .unwrap_or_else(|_| unreachable!("1 to 60e9 with 3 digits are valid bounds"));
            histogram.auto(true);
            histogram
        };
        Tally {
            latency: empty(),
            flush_latency: empty(),
            total_ios: 0,
            total_writes: 0,
            window: Duration::ZERO,
            ended_ms: 0.0,
            cpu: Duration::ZERO,
            errors: 0,
            first_error: None,
            verified: None,
        }
    }

    /// Adds what another thread measured at the same time.
    pub fn add(&mut self, other: Tally) {
        // Both resize themselves, so adding cannot fail.
        let _ = self.latency.add(&other.latency);
        let _ = self.flush_latency.add(&other.flush_latency);
        self.total_ios += other.total_ios;
        self.total_writes += other.total_writes;
        self.window = self.window.max(other.window);
        self.ended_ms = self.ended_ms.max(other.ended_ms);
        self.cpu += other.cpu;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
        self.verified = match (self.verified.take(), other.verified) {
            (Some(a), Some(b)) => Some(a.and(b)),
            (a, b) => a.or(b),
        };
    }

    fn failed(&mut self, op: Op, offset: u64, result: i32) {
        self.errors += 1;
        self.first_error.get_or_insert_with(|| {
            let why = std::io::Error::from_raw_os_error(-result);
            format!("{op:?} at byte {offset}: {why}")
        });
    }
}

#[derive(Clone, Copy)]
struct Slot {
    op: Op,
    block: u64,
    since: Duration,
}

struct Worker<E> {
    engine: E,
    plan: Plan,
    blocks: Blocks,
    ledger: Option<Ledger>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    unflushed: u64,
    tally: Tally,
}

/// Runs `plan` on `engine`: ramp, measured window, drain, and the reading back if asked for.
pub fn work<E: Engine>(engine: E, plan: Plan) -> Result<Tally, Error> {
    let ledger = plan.verify.then(|| Ledger::new(plan.seed, plan.first, plan.bs, plan.blocks));
    let nothing = Slot { op: Op::Flush, block: 0, since: Duration::ZERO };
    let mut worker = Worker {
        engine,
        blocks: Blocks::new(plan.blocks, plan.rw.sequential(), plan.seed),
        ledger,
        slots: vec![nothing; plan.depth],
        free: (0..plan.depth).rev().collect(),
        unflushed: 0,
        tally: Tally::new(),
        plan,
    };
    worker.measure()?;
    worker.read_back()?;
    worker.tally.verified = worker.ledger.map(|ledger| ledger.found);
    Ok(worker.tally)
}

impl<E: Engine> Worker<E> {
    /// One reading of the clock per turn serves the whole batch: it ends the latency of what came
    /// back and begins that of what is sent in its place.
    fn measure(&mut self) -> Result<(), Error> {
        let begin = Instant::now();
        let mut now = Duration::ZERO;
        let mut window = self.plan.ramp.is_zero().then(|| (now, thread_cpu()));
        let mut closed = false;
        let mut done = Vec::with_capacity(self.plan.depth);
        loop {
            if !closed {
                while let Some(slot) = self.free.pop() {
                    self.next(slot, now);
                }
            } else if self.free.len() == self.plan.depth {
                return Ok(());
            }
            self.engine.turn(&mut done)?;
            now = begin.elapsed();
            let counts = window.is_some() && !closed;
            for done in done.drain(..) {
                self.end(done, now, counts);
            }
            if window.is_none() && now >= self.plan.ramp {
                window = Some((now, thread_cpu()));
            }
            if let Some((from, cpu)) = window {
                // As long as asked, even where a busy machine let it open late.
                if now >= from + self.plan.seconds && !closed {
                    closed = true;
                    self.tally.window = now - from;
                    let date = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                    self.tally.ended_ms = date.as_secs_f64() * 1e3;
                    self.tally.cpu = thread_cpu().saturating_sub(cpu);
                }
            }
        }
    }

    fn next(&mut self, slot: usize, now: Duration) {
        if self.plan.fsync_every.is_some_and(|n| self.unflushed >= n) {
            self.unflushed = 0;
            return self.send(slot, Op::Flush, 0, now);
        }
        let op = match self.plan.rw {
            Rw::Randread | Rw::Read => Op::Read,
            Rw::Randwrite | Rw::Write => Op::Write,
            Rw::Randrw if self.blocks.coin() => Op::Write,
            Rw::Randrw => Op::Read,
        };
        let mut block = self.blocks.next();
        if let Some(ledger) = &mut self.ledger {
            while !ledger.claim(block) {
                block = self.blocks.next();
            }
            if op == Op::Write {
                ledger.stamp(block, self.engine.buffers().slice(slot));
            }
        }
        self.send(slot, op, block, now);
    }

    fn send(&mut self, slot: usize, op: Op, block: u64, now: Duration) {
        self.unflushed += u64::from(op == Op::Write);
        self.slots[slot] = Slot { op, block, since: now };
        self.engine.list(slot, op, self.offset(block));
    }

    fn offset(&self, block: u64) -> u64 {
        self.plan.first + block * self.plan.bs
    }

    fn end(&mut self, done: Done, now: Duration, counts: bool) {
        let Slot { op, block, since } = self.slots[done.slot];
        self.free.push(done.slot);
        let ok = done.result >= 0;
        if !ok {
            self.tally.failed(op, self.offset(block), done.result);
        }
        if let Some(ledger) = &mut self.ledger {
            let buffer = self.engine.buffers().slice(done.slot);
            match op {
                Op::Read => ledger.read(block, ok.then_some(&*buffer)),
                Op::Write => ledger.wrote(block, ok),
                Op::Flush => {}
            }
        }
        self.tally.total_ios += u64::from(op != Op::Flush);
        self.tally.total_writes += u64::from(op == Op::Write);
        if counts && ok {
            let latency = (now - since).as_nanos() as u64;
            let histogram = match op {
                Op::Flush => &mut self.tally.flush_latency,
                _ => &mut self.tally.latency,
            };
            histogram.saturating_record(latency);
        }
    }

    fn read_back(&mut self) -> Result<(), Error> {
        let Some(ledger) = &self.ledger else {
            return Ok(());
        };
        let mut blocks = ledger.written().into_iter();
        let mut done = Vec::with_capacity(self.plan.depth);
        let (ios, now) = (self.tally.total_ios, Duration::ZERO);
        loop {
            while let Some(slot) = self.free.pop() {
                let Some(block) = blocks.next() else {
                    self.free.push(slot);
                    break;
                };
                if let Some(ledger) = &mut self.ledger {
                    ledger.claim(block);
                }
                // Other content than the block's: a server that moves no bytes must not pass.
                self.engine.buffers().slice(slot).fill(0xa5);
                self.send(slot, Op::Read, block, now);
            }
            if self.free.len() == self.plan.depth {
                self.tally.total_ios = ios;
                return Ok(());
            }
            self.engine.turn(&mut done)?;
            for done in done.drain(..) {
                self.end(done, now, false);
            }
        }
    }
}

/// CPU time this thread has used so far, user and system.
fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.max(0) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::Buffers;
    use std::collections::VecDeque;

    /// A disk in memory that answers in bursts, and can lie.
    struct Memory {
        disk: Vec<u8>,
        buffers: Buffers,
        listed: VecDeque<(usize, Op, u64)>,
        lose_writes_to: Option<u64>,
        fail_at: Option<u64>,
    }

    impl Memory {
        fn new(bytes: usize, bs: usize, depth: usize) -> Memory {
            Memory {
                disk: vec![0; bytes],
                buffers: Buffers::anonymous(bs, depth).unwrap(),
                listed: VecDeque::new(),
                lose_writes_to: None,
                fail_at: None,
            }
        }
    }

    impl Engine for Memory {
        fn list(&mut self, slot: usize, op: Op, offset: u64) {
            self.listed.push_back((slot, op, offset));
        }

        fn turn(&mut self, done: &mut Vec<Done>) -> Result<(), Error> {
            for _ in 0..self.listed.len().div_ceil(2) {
                let (slot, op, offset) = self.listed.pop_front().unwrap();
                let buffer = self.buffers.slice(slot);
                let disk = &mut self.disk[offset as usize..][..buffer.len()];
                match op {
                    Op::Read => buffer.copy_from_slice(disk),
                    Op::Write if self.lose_writes_to == Some(offset) => {}
                    Op::Write => disk.copy_from_slice(buffer),
                    Op::Flush => {}
                }
                let failed = self.fail_at == Some(offset) && op != Op::Flush;
                let result = if failed { -libc::EIO } else { 0 };
                done.push(Done { slot, result });
            }
            Ok(())
        }

        fn buffers(&mut self) -> &mut Buffers {
            &mut self.buffers
        }
    }

    fn plan(rw: Rw, verify: bool) -> Plan {
        Plan {
            rw,
            bs: 4096,
            depth: 4,
            first: 0,
            blocks: 16,
            ramp: Duration::from_millis(5),
            seconds: Duration::from_millis(100),
            fsync_every: Some(10),
            verify,
            seed: 1,
        }
    }

    #[test]
    fn an_honest_disk_verifies() {
        let tally = work(Memory::new(65536, 4096, 4), plan(Rw::Randrw, true)).unwrap();
        let verified = tally.verified.unwrap();
        assert_eq!((tally.errors, verified.mismatches), (0, 0));
        assert!(verified.blocks >= 16 && tally.latency.len() > 100);
        assert!(tally.latency.len() < tally.total_ios, "the ramp must not count");
        let flushes = tally.flush_latency.len();
        assert!(flushes > 0 && flushes <= tally.total_writes / 10);
    }

    #[test]
    fn a_lost_write_is_found() {
        let mut disk = Memory::new(65536, 4096, 4);
        disk.lose_writes_to = Some(3 * 4096);
        let tally = work(disk, plan(Rw::Write, true)).unwrap();
        let verified = tally.verified.unwrap();
        assert_eq!((verified.blocks, verified.mismatches), (16, 1));
        assert_eq!(verified.first_mismatch.unwrap() / 4096, 3);
    }

    #[test]
    fn errors_are_counted_and_named() {
        let mut disk = Memory::new(65536, 4096, 4);
        disk.fail_at = Some(2 * 4096);
        let tally = work(disk, plan(Rw::Randread, false)).unwrap();
        assert!(tally.errors > 0);
        let text = tally.first_error.unwrap();
        assert!(text.contains("Read at byte 8192") && text.contains("error"), "{text}");
    }

    #[test]
    fn sequential_threads_get_parts_of_the_disk() {
        use clap::{Args, FromArgMatches};
        let command = LoadArgs::augment_args(clap::Command::new("load"));
        let words = ["load", "--socket", "s", "--rw", "write", "--bs", "64k", "--size", "1M"];
        let args = LoadArgs::from_arg_matches(&command.get_matches_from(words)).unwrap();
        let plans = Plan::split(&args, 1 << 21, 2).unwrap();
        let parts: Vec<_> = plans.iter().map(|p| (p.first, p.blocks)).collect();
        assert_eq!(parts, [(0, 8), (512 << 10, 8)]);
        assert!(Plan::split(&args, 1 << 19, 2).is_err(), "--size beyond the device");
    }
}
