//! The reactor on io_uring: one ring for one queue thread, one enter for one turn.

mod alarm;
mod cached;
mod close;
mod files;
mod given;
mod here;
mod pace;
mod watched;

use std::io;
use std::sync::Arc;
use std::time::Instant;

use io_uring::{IoUring, opcode, squeue, types};

use alarm::{ALARM, Doorbell};
use files::{Files, Known, Target};
pub use given::{restricted, rings_to_be_given};

use crate::clock::beginning;
use crate::{Alarm, File, Key, Mem, Op, Reactor, Time};

const SUBMISSIONS: u32 = 256;
const COMPLETIONS: u32 = 4096;
/// A copy of so many bytes takes longer than waking a worker for it.
const LARGE: usize = 256 << 10;
const ENTER_GETEVENTS: u32 = 1;
const ENTER_EXT_ARG: u32 = 8;
const RWF_DSYNC: i32 = 0x2;
const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
static ONE: u64 = 1;
/// Beside the key of an operation that a disk carries out.
const OF_DISK: u64 = 1 << 32;
/// The completion of a cancel that nobody awaits.
const NOBODYS: u64 = 1 << 33;

/// A [`Reactor`] on io_uring. Make it on the thread that will use it.
pub struct Ring {
    ring: IoUring,
    files: Files,
    /// What an operation needs to stay in place while in flight, by key; boxed, for the vector grows.
    #[allow(clippy::vec_box)]
    scratch: Vec<Box<Scratch>>,
    /// Whether completions wait in the kernel for an enter that asks for them.
    deferred: bool,
    /// Whether an enter can be told how long to sleep (Linux 5.11).
    limits: bool,
    /// Operations in flight that a disk carries out.
    on_disk: usize,
    doorbell: Doorbell,
    start: Instant,
    #[cfg(test)]
    seen: tests::Seen,
}

#[derive(Default)]
struct Scratch {
    iovecs: Vec<libc::iovec>,
    message: Option<libc::msghdr>,
    word: u64,
    time: types::Timespec,
}

/// How long one enter sleeps: until so many completions wait to be taken, at most for so long.
#[derive(Clone, Copy)]
struct Sleep {
    events: u32,
    limit: Option<Time>,
}

impl Sleep {
    const NONE: Sleep = Sleep { events: 0, limit: None };
    const FOR_ONE: Sleep = Sleep { events: 1, limit: None };
}

fn timespec(nanos: Time) -> types::Timespec {
    types::Timespec::new().sec(nanos / 1_000_000_000).nsec((nanos % 1_000_000_000) as u32)
}

impl Ring {
    /// A ring with the newest ways of working the kernel has.
    pub fn new() -> io::Result<Ring> {
        let (ring, deferred) = Ring::given().unwrap_or_else(|| Ring::newest(false))?;
        Ring::of(ring, deferred)
    }

    /// As new as the kernel has them, and whether completions wait in the kernel then.
    fn newest(disabled: bool) -> io::Result<(IoUring, bool)> {
        match Self::build(true, disabled) {
            Ok(ring) => Ok((ring, true)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Ok((Self::build(false, disabled)?, false))
            }
            Err(error) => Err(error),
        }
    }

    fn of(ring: IoUring, deferred: bool) -> io::Result<Ring> {
        let doorbell = Doorbell::new()?;
        let files = Files::new(&ring);
        let limits = ring.params().is_feature_ext_arg();
        let (scratch, start) = (Vec::new(), beginning());
        Ok(Ring {
            ring,
            files,
            scratch,
            deferred,
            limits,
            on_disk: 0,
            doorbell,
            start,
            #[cfg(test)]
            seen: tests::Seen::default(),
        })
    }

    fn since_start(&self) -> Time {
        self.start.elapsed().as_nanos() as Time
    }

    fn build(newest: bool, disabled: bool) -> io::Result<IoUring> {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(COMPLETIONS).setup_clamp();
        if disabled {
            builder.setup_r_disabled();
        }
        if newest {
            // Linux 6.1: completions are worked off by this thread, when it asks.
            builder
                .setup_submit_all()
                .setup_coop_taskrun()
                .setup_taskrun_flag()
                .setup_single_issuer()
                .setup_defer_taskrun();
        }
        builder.build(SUBMISSIONS)
    }

    fn scratch(&mut self, key: Key) -> &mut Scratch {
        let index = key as usize;
        while self.scratch.len() <= index {
            self.scratch.push(Box::default());
        }
        &mut self.scratch[index]
    }

    /// The address and number of iovecs for a window, kept in place under `key` if they must be made.
    fn iovecs(&mut self, key: Key, mem: &Mem) -> (*const libc::iovec, u32) {
        if let Some(whole) = mem.whole_iovecs() {
            return (whole.as_ptr(), whole.len() as u32);
        }
        let iovecs = &mut self.scratch(key).iovecs;
        iovecs.clear();
        mem.pieces(|(base, len)| {
            iovecs.push(libc::iovec { iov_base: base.cast(), iov_len: len });
        });
        (iovecs.as_ptr(), iovecs.len() as u32)
    }

    fn message(&mut self, key: Key, mem: &Mem) -> *mut libc::msghdr {
        let (iovecs, count) = self.iovecs(key, mem);
        let message = &mut self.scratch(key).message;
        // SAFETY: all zeros is a valid msghdr.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = iovecs.cast_mut();
        header.msg_iovlen = count as usize;
        message.insert(header)
    }

    /// Move bytes between a pipe and a file, at a place in it, or a socket, which has none.
    fn splice(
        &mut self,
        from: File,
        place: Option<u64>,
        to: File,
        len: usize,
    ) -> Option<squeue::Entry> {
        let from = types::Fd(self.files.find(&self.ring, from)?.fd);
        let to = types::Fd(self.files.find(&self.ring, to)?.fd);
        // A pipe without room for more must not hold a worker for ever.
        let flags = if place.is_some() { libc::SPLICE_F_NONBLOCK } else { 0 };
        let place = place.map_or(-1, |place| place as i64);
        Some(opcode::Splice::new(from, place, to, -1, len as u32).flags(flags).build())
    }

    fn entry(&mut self, key: Key, op: &Op) -> Option<squeue::Entry> {
        macro_rules! with_file {
            ($file:expr, $fd:ident => $entry:expr) => {
                match self.files.target(&self.ring, $file)? {
                    Target::Fixed(place) => {
                        let $fd = types::Fixed(place);
                        $entry
                    }
                    Target::Plain(fd) => {
                        let $fd = types::Fd(fd);
                        $entry
                    }
                }
            };
        }
        let entry = match *op {
            Op::Read { file, offset, mem } if mem.is_kernels() => match mem.pipe() {
                Some(pipe) => self.splice(file, Some(offset), pipe, mem.len())?,
                None => {
                    let (index, at) = mem.registered()?;
                    with_file!(file, fd =>
                        opcode::ReadFixed::new(fd, at, mem.len() as u32, index)
                            .offset(offset).build())
                }
            },
            Op::Write { file, offset, mem, durable } if mem.is_kernels() => {
                let (index, at) = mem.registered()?;
                let flags = if durable { RWF_DSYNC } else { 0 };
                with_file!(file, fd =>
                    opcode::WriteFixed::new(fd, at, mem.len() as u32, index)
                        .offset(offset).rw_flags(flags).build())
            }
            Op::Read { file, offset, mem } => match mem.contiguous() {
                Some(base) => with_file!(file, fd =>
                    opcode::Read::new(fd, base, mem.len() as u32).offset(offset).build()),
                None => {
                    let (iovecs, count) = self.iovecs(key, &mem);
                    with_file!(file, fd =>
                        opcode::Readv::new(fd, iovecs, count).offset(offset).build())
                }
            },
            Op::Write { file, offset, mem, durable } => {
                let flags = if durable { RWF_DSYNC } else { 0 };
                match mem.contiguous() {
                    Some(base) => with_file!(file, fd =>
                        opcode::Write::new(fd, base, mem.len() as u32)
                            .offset(offset).rw_flags(flags).build()),
                    None => {
                        let (iovecs, count) = self.iovecs(key, &mem);
                        with_file!(file, fd =>
                            opcode::Writev::new(fd, iovecs, count)
                                .offset(offset).rw_flags(flags).build())
                    }
                }
            }
            Op::Sync { file } => with_file!(file, fd =>
                opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build()),
            Op::PunchHole { file, offset, len } => with_file!(file, fd =>
                opcode::Fallocate::new(fd, len).offset(offset).mode(PUNCH_HOLE).build()),
            Op::ZeroRange { file, offset, len } => with_file!(file, fd =>
                opcode::Fallocate::new(fd, len).offset(offset)
                    .mode(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE).build()),
            Op::Allocate { file, offset, len } => with_file!(file, fd =>
                opcode::Fallocate::new(fd, len).offset(offset)
                    .mode(libc::FALLOC_FL_KEEP_SIZE).build()),
            // Carried out by `set_len`, before it comes to an entry.
            Op::SetLen { .. } => return None,
            Op::Timeout { nanos } => {
                let time = &mut self.scratch(key).time;
                *time = timespec(nanos);
                opcode::Timeout::new(time).build()
            }
            Op::ReadEvent { file } => {
                let word: *mut u64 = &mut self.scratch(key).word;
                let fd = self.files.plain(&self.ring, file)?;
                opcode::Read::new(fd, word.cast(), 8).offset(u64::MAX).build()
            }
            Op::SignalEvent { file } => with_file!(file, fd =>
                opcode::Write::new(fd, (&raw const ONE).cast(), 8).offset(u64::MAX).build()),
            Op::Cancel { file } => {
                let builder = match self.files.target(&self.ring, file)? {
                    Target::Fixed(place) => types::CancelBuilder::fd(types::Fixed(place)),
                    Target::Plain(fd) => types::CancelBuilder::fd(types::Fd(fd)),
                };
                opcode::AsyncCancel2::new(builder.all()).build()
            }
            Op::Recv { file, mem } => {
                let fd = self.files.plain(&self.ring, file)?;
                match mem.contiguous() {
                    Some(base) => opcode::Recv::new(fd, base, mem.len() as u32).build(),
                    None => opcode::RecvMsg::new(fd, self.message(key, &mem)).build(),
                }
            }
            Op::Send { file, mem } if mem.is_kernels() => {
                self.splice(mem.pipe()?, None, file, mem.len())?
            }
            Op::Send { file, mem } => match mem.contiguous() {
                Some(base) => with_file!(file, fd =>
                    opcode::Send::new(fd, base, mem.len() as u32)
                        .flags(libc::MSG_NOSIGNAL).build()),
                None => {
                    let message = self.message(key, &mem);
                    with_file!(file, fd =>
                        opcode::SendMsg::new(fd, message).flags(libc::MSG_NOSIGNAL as u32).build())
                }
            },
            Op::PollIn { file } => {
                let fd = self.files.plain(&self.ring, file)?;
                opcode::PollAdd::new(fd, libc::POLLIN as u32).build()
            }
            Op::PollOut { file } => {
                let fd = self.files.plain(&self.ring, file)?;
                opcode::PollAdd::new(fd, libc::POLLOUT as u32).build()
            }
            // Never handed to a reactor: their files are elsewhere.
            Op::Forget { .. } | Op::Status { .. } => return None,
            Op::Command { file, command, payload, buffer } => {
                let fd = self.files.plain(&self.ring, file)?;
                let command = opcode::UringCmd16::new(fd, command).cmd(payload);
                command.addr(buffer.map(u64::from)).build()
            }
        };
        Some(entry.user_data(u64::from(key) | if op.is_disks() { OF_DISK } else { 0 }))
    }

    /// A large read among others goes to the kernel's workers, so that other processors take part.
    /// Writes to one file would only wait there for one another.
    fn is_large_copy(&mut self, op: &Op) -> bool {
        match op {
            Op::Read { file, mem, .. } if mem.len() >= LARGE => self
                .files
                .find(&self.ring, *file)
                .is_some_and(|known| known.nature.in_memory || known.nature.page_cache),
            _ => false,
        }
    }

    fn enter(&mut self, sleep: Sleep) -> io::Result<()> {
        let (waiting, taskrun, overflow) = {
            let mut queue = self.ring.submission();
            queue.sync();
            (queue.len() as u32, queue.taskrun(), queue.cq_overflow())
        };
        let sleeps = sleep.events > 0;
        let reap = self.deferred || sleeps || overflow;
        if waiting == 0 && !sleeps && !taskrun && !overflow {
            return Ok(());
        }
        let mut flags = if reap { ENTER_GETEVENTS } else { 0 };
        let time = sleep.limit.map(timespec);
        let limit = time.as_ref().map(|time| types::SubmitArgs::new().timespec(time));
        if limit.is_some() {
            flags |= ENTER_EXT_ARG;
        }
        #[cfg(test)]
        {
            self.seen.enters += 1;
        }
        self.files.watched.settle_begun();
        // SAFETY: the argument is of the type that the flags say and outlives the call, and every
        // entry in the queue names memory that its task keeps valid until completion (the promise
        // of `Mem` and of `Io`).
        let enter =
            || unsafe { self.ring.submitter().enter(waiting, sleep.events, flags, limit.as_ref()) };
        #[cfg(test)]
        let fails = self.seen.fails.pop_front().filter(|errno| *errno != 0);
        #[cfg(not(test))]
        let fails = None;
        let entered = match fails {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => enter(),
        };
        match entered {
            Ok(_) => Ok(()),
            // EBUSY: completions must be taken first. EAGAIN: no memory for a request just now.
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::EBUSY | libc::EAGAIN | libc::ETIME) => Ok(()),
                _ => Err(error),
            },
        }
    }

    fn reap(&mut self, done: &mut Vec<(Key, i32)>) {
        for entry in self.ring.completion() {
            if entry.user_data() & (NOBODYS | ALARM) != 0 {
                self.doorbell.completed(&entry);
                continue;
            }
            if entry.user_data() & OF_DISK != 0 {
                self.on_disk -= 1;
            }
            self.files.watched.end(entry.user_data(), entry.result());
            done.push((entry.user_data() as Key, entry.result()));
        }
        self.files.watched.settle_ended();
        self.files.forget_at_rest(&self.ring, self.on_disk);
    }

    /// Put every operation into the submission queue, or carry it out here; leave `submit` empty. What
    /// others wait for goes first: the kernel carries out what needs no device while it is told.
    fn hand_over(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
    ) -> io::Result<()> {
        let mut handed = (0, 0);
        let outcome = self.hand_over_some(submit, done, &mut handed);
        if outcome.is_err() {
            // Those that were not stay listed, for whoever owns their memory waits for each that was.
            let (mut awaited, mut others) = handed;
            submit.retain(|(_, op)| {
                let left = if is_awaited(op) { &mut awaited } else { &mut others };
                let goes = *left > 0;
                *left -= usize::from(goes);
                !goes
            });
            return outcome;
        }
        submit.clear();
        Ok(())
    }

    /// `handed` counts those that somebody outside waits for, and the others.
    fn hand_over_some(
        &mut self,
        submit: &[(Key, Op)],
        done: &mut Vec<(Key, i32)>,
        handed: &mut (usize, usize),
    ) -> io::Result<()> {
        let alone = submit.len() == 1;
        let mut told = false;
        for (key, op) in submit.iter().filter(|(_, op)| is_awaited(op)) {
            self.push(*key, op, false, done)?;
            handed.0 += 1;
            told = true;
        }
        for (key, op) in submit.iter().filter(|(_, op)| !is_awaited(op)) {
            if let Some(small) = self.small_write(op) {
                if std::mem::take(&mut told) {
                    self.enter(Sleep::NONE)?;
                    self.reap(done);
                }
                match self.write_cached(*key, op, &small) {
                    Some(result) => done.push((*key, result)),
                    None => self.push(*key, op, false, done)?,
                }
            } else if let Op::SetLen { file, len } = *op {
                done.push((*key, self.watch_here(op, |ring| ring.set_len(file, len))));
            } else {
                let by_worker = !alone && self.is_large_copy(op);
                self.push(*key, op, by_worker, done)?;
            }
            handed.1 += 1;
        }
        Ok(())
    }

    fn push(
        &mut self,
        key: Key,
        op: &Op,
        by_worker: bool,
        done: &mut Vec<(Key, i32)>,
    ) -> io::Result<()> {
        let Some(mut entry) = self.entry(key, op) else {
            done.push((key, -libc::EBADF));
            return Ok(());
        };
        if by_worker {
            entry = entry.flags(squeue::Flags::ASYNC);
        }
        let beside = self.watch_in_flight(key, op);
        if beside != 0 {
            let key = entry.get_user_data();
            entry = entry.user_data(key | beside);
        }
        self.push_entry(&entry, done)?;
        #[cfg(test)]
        {
            self.seen.pushed += 1;
        }
        self.on_disk += usize::from(op.is_disks());
        Ok(())
    }

    fn push_entry(&mut self, entry: &squeue::Entry, done: &mut Vec<(Key, i32)>) -> io::Result<()> {
        loop {
            // SAFETY: the memory the entry names stays valid until its completion: the window's
            // by the promise of `Mem`, the scratch because it is boxed and kept by key.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.enter(Sleep::NONE)?;
            self.reap(done);
        }
    }
}

fn last_error() -> i32 {
    -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Whether somebody outside waits for it: an answer, and the call that there is one.
fn is_awaited(op: &Op) -> bool {
    matches!(op, Op::SignalEvent { .. } | Op::Send { .. } | Op::Command { .. })
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel takes a ring down in its own time; files are to be free when we say so.
        let _ = self.ring.submitter().unregister_files();
    }
}

impl Reactor for Ring {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        wait: bool,
    ) -> io::Result<()> {
        self.hand_over(submit, done)?;
        if wait {
            self.listen(done)?;
        }
        loop {
            let wait = wait
                && done.is_empty()
                && !self.doorbell.take()
                && self.ring.completion().is_empty();
            self.enter(if wait { Sleep::FOR_ONE } else { Sleep::NONE })?;
            self.reap(done);
            if !wait || !done.is_empty() || self.doorbell.take() {
                return Ok(());
            }
        }
    }

    fn turn_for(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        events: u32,
        nanos: Time,
    ) -> io::Result<()> {
        self.hand_over(submit, done)?;
        let sleep = match done.is_empty() && self.limits {
            true => Sleep { events, limit: Some(nanos) },
            false => Sleep::NONE,
        };
        self.enter(sleep)?;
        self.reap(done);
        Ok(())
    }

    fn cancel(&mut self, key: Key, done: &mut Vec<(Key, i32)>) -> io::Result<()> {
        let plain = [u64::from(key), u64::from(key) | OF_DISK];
        let watched = self.files.watched.beside(key);
        for target in plain.into_iter().chain(watched.map(|beside| plain[1] | beside)) {
            let entry = opcode::AsyncCancel::new(target).build().user_data(NOBODYS);
            self.push_entry(&entry, done)?;
        }
        Ok(())
    }

    fn take_last(&mut self, submit: &mut Vec<(Key, Op)>) -> io::Result<()> {
        self.hand_over_last(submit)
    }

    fn forget_images(&mut self) {
        self.files.forget(&self.ring, self.on_disk);
    }

    fn alarm(&mut self) -> Arc<dyn Alarm> {
        self.doorbell.alarm()
    }

    fn now(&self) -> Time {
        self.since_start()
    }
}

#[cfg(test)]
mod tests;
