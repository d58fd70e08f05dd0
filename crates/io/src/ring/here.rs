//! What the thread does itself, where who else would do or end it costs more.

use std::os::fd::RawFd;

use super::{Known, Ring, last_error};
use crate::{File, Key, Mem, Op};

/// A copy of so many bytes takes less time than waking a worker.
const SMALL: usize = 64 << 10;

impl Ring {
    /// Where in `submit` the only operation for a disk stands, if it is a small write past the page cache
    /// and none is in flight.
    pub(super) fn lone_write(&mut self, submit: &[(Key, Op)]) -> Option<usize> {
        if self.on_disk > 0 {
            return None;
        }
        let mut for_disk = submit.iter().enumerate().filter(|(_, (_, op))| op.is_disks());
        let (Some((place, (_, op))), None) = (for_disk.next(), for_disk.next()) else {
            return None;
        };
        let (Known { nature, .. }, ..) = self.volatile_write(op)?;
        nature.ended_by_worker.then_some(place)
    }

    pub(super) fn volatile_write<'a>(&mut self, op: &'a Op) -> Option<(Known, u64, &'a Mem)> {
        let Op::Write { file, offset, ref mem, durable: false } = *op else { return None };
        if mem.len() > SMALL || mem.is_kernels() {
            return None;
        }
        Some((self.files.find(&self.ring, file)?, offset, mem))
    }

    /// Make it here, asleep while the disk is at it. None where the file would have us wait for more
    /// than that: blocks to be found for it, a lock. Those may wait for memory, which in turn may wait for
    /// what this thread serves. (A frozen file system is waited for all the same: there is no asking.)
    pub(super) fn write_to_disk(&mut self, (key, op): &(Key, Op)) -> Option<i32> {
        let (Known { fd, .. }, offset, mem) = self.volatile_write(op)?;
        let nowait = libc::RWF_NOWAIT;
        match self.watch_here(op, |ring| ring.write_here(*key, fd, offset, mem, nowait)) {
            refused if refused == -libc::EAGAIN || refused == -libc::EOPNOTSUPP => None,
            result => Some(result),
        }
    }

    /// Make it here.
    pub(super) fn write_here(
        &mut self,
        key: Key,
        fd: RawFd,
        offset: u64,
        mem: &Mem,
        flags: i32,
    ) -> i32 {
        #[cfg(test)]
        {
            self.seen.here += 1;
        }
        let one;
        let (iovecs, count) = match mem.contiguous() {
            Some(base) => {
                one = libc::iovec { iov_base: base.cast(), iov_len: mem.len() };
                (&raw const one, 1)
            }
            None => self.iovecs(key, mem),
        };
        // SAFETY: the iovecs name memory that is valid for reads (the promise of `Mem`).
        match unsafe { libc::pwritev2(fd, iovecs, count as i32, offset as i64, flags) } {
            -1 => last_error(),
            written => written as i32,
        }
    }

    /// io_uring has this operation from Linux 6.9 on; it is rare, and never waits for a device long.
    pub(super) fn set_len(&mut self, file: File, len: u64) -> i32 {
        let Some(Known { fd, .. }) = self.files.find(&self.ring, file) else {
            return -libc::EBADF;
        };
        let Ok(len) = i64::try_from(len) else { return -libc::EFBIG };
        // SAFETY: it takes no memory, and the descriptor is open while its `OpenFile` lives.
        match unsafe { libc::ftruncate(fd, len) } {
            0 => 0,
            _ => last_error(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::os::fd::AsFd;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::{Io, Nature, OpenFile, Reactor};

    /// Where a socket's stream goes on.
    const ON: u64 = u64::MAX;

    /// A stream that takes writes as a file on a disk, and where they come out.
    fn stream() -> (UnixStream, OpenFile) {
        let (from, to) = UnixStream::pair().expect("a pair of sockets");
        let to = OpenFile::new(OwnedFd::from(to));
        to.set_nature(Nature { ended_by_worker: true, ..Nature::default() });
        (from, to)
    }

    #[test]
    fn a_lone_write_is_made_by_this_thread_after_what_others_wait_for() {
        let (mut from, to) = stream();
        let event = OpenFile::new(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"));
        let mut buffer =
            Io::new(Box::new(Ring::new().expect("io_uring"))).buffer(4096).expect("memory");
        buffer.bytes_mut().fill(7);
        let write = Op::Write { file: to.handle(), offset: ON, mem: buffer.mem(), durable: false };
        let mut ring = Ring::new().expect("io_uring");
        let mut submit = vec![(4, write), (5, Op::SignalEvent { file: event.handle() })];
        assert!(ring.has_lone_write(&submit));
        let mut done = vec![];
        assert!(ring.turn_in_write(&mut submit, &mut done).expect("the ring"));
        assert!(submit.is_empty());
        done.sort_unstable();
        assert_eq!(done, [(4, 4096), (5, 8)]);
        let mut bytes = [0; 4096];
        from.read_exact(&mut bytes).expect("what was written");
        assert_eq!(bytes, [7; 4096]);
    }

    #[test]
    fn a_write_that_must_wait_for_more_than_the_disk_is_handed_over() {
        let (mut from, to) = stream();
        let buffer =
            Io::new(Box::new(Ring::new().expect("io_uring"))).buffer(4096).expect("memory");
        let write = Op::Write { file: to.handle(), offset: ON, mem: buffer.mem(), durable: false };
        let mut into = UnixStream::from(to.as_fd().try_clone_to_owned().expect("a copy"));
        into.set_nonblocking(true).expect("the stream's way");
        let mut full = 0;
        let end = loop {
            match into.write(&[0; 4096]) {
                Ok(count) => full += count,
                Err(error) => break error.kind(),
            }
        };
        assert_eq!(end, ErrorKind::WouldBlock);
        into.set_nonblocking(false).expect("the stream's way");
        let mut ring = Ring::new().expect("io_uring");
        let (mut submit, mut done) = (vec![(0, write)], vec![]);
        assert!(!ring.turn_in_write(&mut submit, &mut done).expect("the ring"));
        assert!(submit.is_empty() && done.is_empty());
        // It is in flight, so that no other is alone.
        assert!(!ring.has_lone_write(&[(1, write)]));
        from.read_exact(&mut vec![0; full]).expect("what there was before");
        ring.turn(&mut submit, &mut done, true).expect("the ring");
        assert_eq!(done, [(0, 4096)]);
        assert!(ring.has_lone_write(&[(1, write)]));
    }

    #[test]
    fn only_one_small_volatile_write_past_the_page_cache_is_a_lone_one() {
        let (_from, to) = stream();
        let (_other_end, cached) = stream();
        cached.set_nature(Nature { page_cache: true, ..Nature::default() });
        let buffer =
            Io::new(Box::new(Ring::new().expect("io_uring"))).buffer(2 * SMALL).expect("memory");
        let (file, mem) = (to.handle(), buffer.mem().window(0, 512));
        let write = Op::Write { file, offset: 0, mem, durable: false };
        let mut ring = Ring::new().expect("io_uring");
        for (lone, ops) in [
            (true, vec![write]),
            (true, vec![Op::Timeout { nanos: 1 }, write]),
            (false, vec![]),
            (false, vec![write, write]),
            (false, vec![write, Op::Sync { file }]),
            (false, vec![write, Op::Read { file, offset: 0, mem }]),
            (false, vec![Op::Read { file, offset: 0, mem }]),
            (false, vec![Op::Write { file, offset: 0, mem, durable: true }]),
            (false, vec![Op::Write { file, offset: 0, mem: buffer.mem(), durable: false }]),
            (
                false,
                vec![Op::Write { file, offset: 0, mem: Mem::of_kernel(0, 512), durable: false }],
            ),
            (false, vec![Op::Write { file: cached.handle(), offset: 0, mem, durable: false }]),
        ] {
            let submit: Vec<_> = ops.into_iter().map(|op| (0, op)).collect();
            assert_eq!(ring.has_lone_write(&submit), lone, "{submit:?}");
        }
    }
}
