//! Operations by the system calls of one thread.

use std::io;
use std::os::fd::RawFd;

use super::Known;
use crate::{File, Mem, Op};

const RWF_DSYNC: i32 = 0x2;
const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// What became of an operation that was tried.
pub(super) enum Attempt {
    Ended(i32),
    /// It has to be tried again when the file can be read from or written to.
    Waits,
}

/// The file that an operation is about, unless it is one that only io_uring has.
pub(super) fn file_of(op: &Op) -> Option<File> {
    match *op {
        Op::Read { file, .. }
        | Op::Write { file, .. }
        | Op::Sync { file }
        | Op::PunchHole { file, .. }
        | Op::ZeroRange { file, .. }
        | Op::Allocate { file, .. }
        | Op::SetLen { file, .. }
        | Op::ReadEvent { file }
        | Op::SignalEvent { file }
        | Op::Recv { file, .. }
        | Op::Send { file, .. }
        | Op::PollIn { file }
        | Op::PollOut { file } => Some(file),
        Op::Timeout { .. } | Op::Cancel { .. } | Op::Command { .. } => None,
        // Their files are elsewhere.
        Op::Forget { .. } | Op::Status { .. } => None,
    }
}

/// The pipe that it moves bytes to or from.
pub(super) fn pipe_of(op: &Op) -> Option<File> {
    match op {
        Op::Read { mem, .. } | Op::Send { mem, .. } => mem.pipe(),
        _ => None,
    }
}

/// Whether it waits for others, and so may wait for ever.
pub(super) fn is_waited_for(op: &Op) -> bool {
    match op {
        Op::ReadEvent { .. } | Op::Recv { .. } | Op::PollIn { .. } | Op::PollOut { .. } => true,
        Op::Send { mem, .. } => mem.pipe().is_none(),
        _ => false,
    }
}

/// What a call gave, as the ring gives it.
fn result(given: isize) -> i32 {
    match given {
        -1 => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        given => given as i32,
    }
}

fn polled(fd: RawFd, events: i16) -> i16 {
    let mut one = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one entry, which outlives the call.
    match unsafe { libc::poll(&raw mut one, 1, 0) } {
        1 => one.revents,
        _ => 0,
    }
}

/// Try what waits for others, without waiting for them.
pub(super) fn attempt(op: &Op, known: &Known) -> Attempt {
    let fd = known.fd;
    let given = match op {
        Op::PollIn { .. } => match polled(fd, libc::POLLIN) {
            0 => return Attempt::Waits,
            events => return Attempt::Ended(events.into()),
        },
        Op::PollOut { .. } => match polled(fd, libc::POLLOUT) {
            0 => return Attempt::Waits,
            events => return Attempt::Ended(events.into()),
        },
        Op::ReadEvent { .. } => read_event(fd),
        Op::Recv { mem, .. } => with_message(mem, |message| {
            // SAFETY: the message names memory that is valid for writes (the promise of `Mem`).
            unsafe { libc::recvmsg(fd, message, libc::MSG_DONTWAIT) }
        }),
        Op::Send { mem, .. } => with_message(mem, |message| {
            // SAFETY: as above, for reads.
            unsafe { libc::sendmsg(fd, message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) }
        }),
        _ => -libc::EOPNOTSUPP,
    };
    match -given {
        libc::EAGAIN => Attempt::Waits,
        _ => Attempt::Ended(given),
    }
}

/// Whether it would wait is said with the call itself: the open file is also a front-end's, which may change its flags and read
/// it at any time. A file that knows no such word is asked beforehand.
fn read_event(fd: RawFd) -> i32 {
    let mut word = 0u64;
    let one = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: 8 };
    // SAFETY: the word outlives the call and has as many bytes.
    match result(unsafe { libc::preadv2(fd, &raw const one, 1, -1, libc::RWF_NOWAIT) }) {
        unknown if unknown == -libc::EOPNOTSUPP => {}
        given => return given,
    }
    if polled(fd, libc::POLLIN) == 0 {
        return -libc::EAGAIN;
    }
    // SAFETY: as above.
    result(unsafe { libc::read(fd, (&raw mut word).cast(), 8) })
}

/// One that is full has been signalled, and is not waited for.
fn signal_event(fd: RawFd) -> i32 {
    if polled(fd, libc::POLLOUT) == 0 {
        return 8;
    }
    let word = 1u64;
    // SAFETY: the word outlives the call and has as many bytes.
    match result(unsafe { libc::write(fd, (&raw const word).cast(), 8) }) {
        full if full == -libc::EAGAIN => 8,
        given => given,
    }
}

fn with_message(mem: &Mem, call: impl FnOnce(*mut libc::msghdr) -> isize) -> i32 {
    with_iovecs(mem, |iovecs| {
        // SAFETY: all zeros is a valid msghdr.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = iovecs.as_ptr().cast_mut();
        message.msg_iovlen = iovecs.len();
        call(&raw mut message)
    })
}

fn with_iovecs(mem: &Mem, call: impl FnOnce(&[libc::iovec]) -> isize) -> i32 {
    if let Some(base) = mem.contiguous() {
        return result(call(&[libc::iovec { iov_base: base.cast(), iov_len: mem.len() }]));
    }
    if let Some(whole) = mem.whole_iovecs() {
        return result(call(whole));
    }
    let mut iovecs = Vec::new();
    mem.pieces(|(base, len)| iovecs.push(libc::iovec { iov_base: base.cast(), iov_len: len }));
    result(call(&iovecs))
}

/// Carry out what does not wait for others: here and now, however long the disk takes.
pub(super) fn carry_out(op: &Op, fd: RawFd, pipe: Option<RawFd>) -> i32 {
    match *op {
        Op::Read { offset, mem, .. } if mem.is_kernels() => match pipe {
            Some(pipe) => splice(fd, Some(offset), pipe, mem.len()),
            None => -libc::EOPNOTSUPP,
        },
        Op::Write { mem, .. } if mem.is_kernels() => -libc::EOPNOTSUPP,
        Op::Read { offset, mem, .. } => with_iovecs(&mem, |iovecs| {
            let (base, count) = (iovecs.as_ptr(), iovecs.len() as i32);
            // SAFETY: the iovecs name memory that is valid for writes (the promise of `Mem`).
            unsafe { libc::preadv(fd, base, count, offset as i64) }
        }),
        Op::Write { offset, mem, durable, .. } => with_iovecs(&mem, |iovecs| {
            let (base, count) = (iovecs.as_ptr(), iovecs.len() as i32);
            let flags = if durable { RWF_DSYNC } else { 0 };
            // SAFETY: as above, for reads.
            unsafe { libc::pwritev2(fd, base, count, offset as i64, flags) }
        }),
        // SAFETY: these take no memory.
        Op::Sync { .. } => result(unsafe { libc::fdatasync(fd) } as isize),
        Op::PunchHole { offset, len, .. } => allocate(fd, PUNCH_HOLE, offset, len),
        Op::ZeroRange { offset, len, .. } => allocate(fd, ZERO_RANGE, offset, len),
        Op::Allocate { offset, len, .. } => allocate(fd, libc::FALLOC_FL_KEEP_SIZE, offset, len),
        Op::SetLen { len, .. } => match i64::try_from(len) {
            // SAFETY: as above.
            Ok(len) => result(unsafe { libc::ftruncate(fd, len) } as isize),
            Err(_) => -libc::EFBIG,
        },
        Op::ReadEvent { .. } => read_event(fd),
        Op::SignalEvent { .. } => signal_event(fd),
        Op::PollIn { .. } => i32::from(libc::POLLIN),
        Op::PollOut { .. } => i32::from(libc::POLLOUT),
        Op::Send { mem, .. } if mem.is_kernels() => match pipe {
            Some(pipe) => splice(pipe, None, fd, mem.len()),
            None => -libc::EOPNOTSUPP,
        },
        Op::Recv { .. } | Op::Send { .. } => -libc::ENOTSOCK,
        Op::Timeout { .. } | Op::Cancel { .. } | Op::Command { .. } => -libc::EOPNOTSUPP,
        Op::Forget { .. } | Op::Status { .. } => -libc::EOPNOTSUPP,
    }
}

fn allocate(fd: RawFd, mode: i32, offset: u64, len: u64) -> i32 {
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else {
        return -libc::EFBIG;
    };
    // SAFETY: it takes no memory.
    result(unsafe { libc::fallocate(fd, mode, offset, len) } as isize)
}

/// Move bytes between a pipe and a file, at a place in it, or a socket, which has none.
fn splice(from: RawFd, place: Option<u64>, to: RawFd, len: usize) -> i32 {
    // A pipe without room for more must not hold a worker for ever.
    let flags = if place.is_some() { libc::SPLICE_F_NONBLOCK } else { 0 };
    let mut place = place.map(|place| place as i64);
    let at = place.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
    // SAFETY: the place, where there is one, outlives the call.
    result(unsafe { libc::splice(from, at, to, std::ptr::null_mut(), len, flags) })
}
