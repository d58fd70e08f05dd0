//! The reactor where io_uring is forbidden: a few threads that block in the system calls for files, and epoll
//! for what is waited for. Slower, not other: the same operations end with the same results.

mod blocking;
mod waits;
mod workers;

use std::collections::BTreeSet;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

use blocking::{Attempt, carry_out};
use waits::Waits;
use workers::{Job, Workers};

use crate::clock::beginning;
use crate::watched::{Watched, change_of};
use crate::{Alarm, File, Key, Nature, Op, Reactor, Time, Watch};

/// A copy of so many bytes takes less time than waking a thread for it.
const SMALL: usize = 64 << 10;

/// What is known of a file.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    generation: u32,
    pub(crate) fd: RawFd,
    nature: Nature,
    watched: bool,
}

/// A [`Reactor`] of threads, `pread`, `pwrite` and epoll.
pub struct Threads {
    workers: Workers,
    waits: Waits,
    known: Vec<Option<Known>>,
    watched: Watched,
    /// When timeouts end.
    timeouts: BTreeSet<(Time, Key)>,
    /// Kept from one look to the next.
    ready: Vec<(File, Key, Op)>,
    start: Instant,
}

impl Threads {
    /// One without threads: each is started when it is needed.
    pub fn new() -> io::Result<Threads> {
        let waits = Waits::new()?;
        Ok(Threads {
            workers: Workers::new(waits.doorbell()),
            waits,
            known: Vec::new(),
            watched: Watched::default(),
            timeouts: BTreeSet::new(),
            ready: Vec::new(),
            start: beginning(),
        })
    }

    fn find(&mut self, file: File) -> Option<Known> {
        let slot = file.slot() as usize;
        match self.known.get(slot) {
            Some(Some(known)) if known.generation == file.generation() => Some(*known),
            _ => self.learn(file),
        }
    }

    #[cold]
    fn learn(&mut self, file: File) -> Option<Known> {
        let (fd, slot) = (file.raw_fd()?, file.slot() as usize);
        if self.known.len() <= slot {
            self.known.resize(slot + 1, None);
        }
        let witness = file.witness();
        let watched = witness.is_some();
        self.watched.put(slot, witness.map(Watch::new));
        let (generation, nature) = (file.generation(), file.nature());
        let known = Known { generation, fd, nature, watched };
        self.known[slot] = Some(known);
        Some(known)
    }

    /// Note that a change of a watched file begins.
    fn watch(&mut self, key: Key, op: &Op) {
        if let Some((file, bytes, write)) = change_of(op) {
            let watched = self.find(file).is_some_and(|known| known.watched);
            let slot = file.slot() as usize;
            let beside = if watched { self.watched.begin(slot, bytes, write) } else { 0 };
            if beside != 0 {
                self.watched.keep(key, beside);
            }
        }
    }

    fn end(&mut self, key: Key, result: i32, done: &mut Vec<(Key, i32)>) {
        if let Some(beside) = self.watched.take(key) {
            self.watched.end(beside, result);
        }
        done.push((key, result));
    }

    /// Begin an operation: it ends here, or a worker has it, or it waits.
    fn begin(&mut self, key: Key, op: Op, done: &mut Vec<(Key, i32)>) {
        if let Op::Timeout { nanos } = op {
            self.timeouts.insert((self.now().saturating_add(nanos), key));
            return;
        }
        if let Op::Cancel { file } = op {
            let mut ended = vec![];
            self.waits.cancel_file(file, &mut ended);
            let count = ended.len() as i32;
            ended.into_iter().for_each(|key| self.end(key, -libc::ECANCELED, done));
            self.end(key, count, done);
            return;
        }
        let Some(file) = blocking::file_of(&op) else {
            self.end(key, -libc::EOPNOTSUPP, done);
            return;
        };
        let Some(known) = self.find(file) else {
            self.end(key, -libc::EBADF, done);
            return;
        };
        let watches = match blocking::is_waited_for(&op) {
            true => self.waits.watches(file, known.fd),
            false => Ok(false),
        };
        // A file that epoll does not take is an error of this operation alone, as on the ring.
        if let Err(error) = watches {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            self.end(key, -errno, done);
            return;
        }
        if watches.is_ok_and(|watches| watches) {
            match blocking::attempt(&op, &known) {
                Attempt::Ended(result) => self.end(key, result, done),
                Attempt::Waits => self.waits.add(file, key, op),
            }
            return;
        }
        if self.is_quick(&op, known.nature) {
            let result = carry_out(&op, known.fd, None);
            self.end(key, result, done);
            return;
        }
        let pipe = blocking::pipe_of(&op).map(|pipe| self.find(pipe).map(|known| known.fd));
        match pipe {
            Some(None) => self.end(key, -libc::EBADF, done),
            pipe => {
                let job = Job { key, op, fd: known.fd, pipe: pipe.flatten() };
                // A limit of threads is reached: slowly is better than not at all.
                if let Some(job) = self.workers.take(job) {
                    let result = carry_out(&job.op, job.fd, job.pipe);
                    self.end(key, result, done);
                }
            }
        }
    }

    /// Whether it takes less time than waking a worker for it.
    fn is_quick(&self, op: &Op, nature: Nature) -> bool {
        match op {
            Op::Read { mem, .. } => nature.in_memory && mem.len() <= SMALL && !mem.is_kernels(),
            Op::Write { mem, durable, .. } => {
                let fast = nature.in_memory || nature.page_cache;
                fast && !durable && mem.len() <= SMALL && !mem.is_kernels()
            }
            Op::SignalEvent { .. } => true,
            _ => false,
        }
    }

    fn hand_over(&mut self, submit: &mut Vec<(Key, Op)>, done: &mut Vec<(Key, i32)>) {
        for (key, op) in &*submit {
            self.watch(*key, op);
        }
        self.watched.settle_begun();
        for (key, op) in submit.drain(..) {
            self.begin(key, op, done);
        }
    }

    /// What has ended meanwhile.
    fn collect(&mut self, done: &mut Vec<(Key, i32)>) {
        let mut ended = self.workers.ended();
        ended.drain(..).for_each(|(key, result)| self.end(key, result, done));
        self.workers.give_back(ended);
        let now = self.now();
        while let Some((until, key)) = self.timeouts.first().copied().filter(|(at, _)| *at <= now) {
            self.timeouts.remove(&(until, key));
            self.end(key, -libc::ETIME, done);
        }
        self.watched.settle_ended();
    }

    /// See what can be read and written by now, asleep for so long until something can be.
    fn look(&mut self, limit: Option<Time>, done: &mut Vec<(Key, i32)>) -> io::Result<()> {
        self.waits.wait(limit)?;
        let mut ready = std::mem::take(&mut self.ready);
        self.waits.take_ready(&mut ready);
        for (file, key, op) in ready.drain(..) {
            let Some(known) = self.find(file) else {
                self.end(key, -libc::EBADF, done);
                continue;
            };
            match blocking::attempt(&op, &known) {
                Attempt::Ended(result) => self.end(key, result, done),
                Attempt::Waits => self.waits.add(file, key, op),
            }
        }
        self.ready = ready;
        Ok(())
    }

    /// Sleep until so many have ended, the time is over, or the alarm was rung.
    fn sleep(
        &mut self,
        events: usize,
        until: Option<Time>,
        done: &mut Vec<(Key, i32)>,
    ) -> io::Result<()> {
        loop {
            self.collect(done);
            let now = self.now();
            let mut over = done.len() >= events || until.is_some_and(|until| until <= now);
            over |= self.waits.take_rung();
            let next = self.timeouts.first().map(|(at, _)| *at);
            let first = [next, until].into_iter().flatten().min();
            // Who ends from now on rings; who has ended before is seen.
            let sleeps = !over && self.workers.fall_asleep();
            let limit = if sleeps { first.map(|at| at.saturating_sub(now)) } else { Some(0) };
            let looked = self.look(limit, done);
            self.workers.wake_up();
            looked?;
            self.collect(done);
            if over || done.len() >= events || self.waits.take_rung() {
                return Ok(());
            }
        }
    }
}

impl Reactor for Threads {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        wait: bool,
    ) -> io::Result<()> {
        self.hand_over(submit, done);
        self.sleep(usize::from(wait), None, done)
    }

    fn turn_for(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        events: u32,
        nanos: Time,
    ) -> io::Result<()> {
        self.hand_over(submit, done);
        let events = if done.is_empty() { events as usize } else { 0 };
        self.sleep(events, Some(self.now() + nanos), done)
    }

    fn cancel(&mut self, key: Key, done: &mut Vec<(Key, i32)>) -> io::Result<()> {
        let timeout = self.timeouts.iter().find(|(_, other)| *other == key).copied();
        let found = match timeout {
            Some(timeout) => self.timeouts.remove(&timeout),
            None => self.waits.cancel(key) || self.workers.cancel(key),
        };
        if found {
            self.end(key, -libc::ECANCELED, done);
            self.watched.settle_ended();
        }
        Ok(())
    }

    fn alarm(&mut self) -> Arc<dyn Alarm> {
        self.waits.doorbell()
    }

    fn now(&self) -> Time {
        self.start.elapsed().as_nanos() as Time
    }
}
