//! Small writes into the page cache: this thread makes them, for a copy costs less than waking a worker. But the
//! kernel may hold up who writes: for room in the page cache (dirty throttling), for a server (NFS), for a journal.
//! A queue must not stop for that. The first write to a file asks whether writes to it can be told not to wait
//! (RWF_NOWAIT). Where they can (XFS), each is, and one that would have to wait goes to a worker, as those that
//! follow do for a while. Where they cannot (ext4 and tmpfs of Linux 6.18), or the first few all would have to (btrfs), a write
//! that was held up sends those that follow to a worker for a while. A thread that lost its processor in a write was not held up by it: the
//! count of switches tells, and is only asked for while there is a doubt.

use std::os::fd::RawFd;

use super::pace::{Nowait, Pace};
use super::{Known, Ring};
use crate::{File, Key, Mem, Op, Time};

/// And for so long after one that would have had to wait and did not.
const REFUSED_REST: Time = 1_000_000;

/// Where to write, and what.
pub(super) struct Small<'a> {
    fd: RawFd,
    file: File,
    /// None where it is in memory alone, and nothing holds up who writes.
    pace: Option<Pace>,
    offset: u64,
    mem: &'a Mem,
}

impl Ring {
    /// A small write into the page cache that this thread may make.
    pub(super) fn small_write<'a>(&mut self, op: &'a Op) -> Option<Small<'a>> {
        let (Known { fd, nature, pace, .. }, offset, mem) = self.volatile_write(op)?;
        let Op::Write { file, .. } = *op else { return None };
        let rests = pace.rests_until > 0 && self.since_start() < pace.rests_until;
        let pace = (!nature.in_memory).then_some(pace);
        (nature.page_cache && !rests).then_some(Small { fd, file, pace, offset, mem })
    }

    /// Make it here; none where a worker has to.
    pub(super) fn write_cached(&mut self, key: Key, op: &Op, small: &Small) -> Option<i32> {
        let Small { fd, offset, mem, .. } = *small;
        let Some(pace) = small.pace else {
            return Some(self.watch_here(op, |ring| ring.write_here(key, fd, offset, mem, 0)));
        };
        if pace.nowait == Nowait::Cannot {
            return Some(self.write_timed(key, op, small, pace));
        }
        let nowait = libc::RWF_NOWAIT;
        let result = self.watch_here(op, |ring| ring.write_here(key, fd, offset, mem, nowait));
        if result == -libc::EOPNOTSUPP {
            let pace = Pace { nowait: Nowait::Cannot, ..pace };
            self.files.goes(small.file, pace);
            return Some(self.write_timed(key, op, small, pace));
        }
        let waits = result == -libc::EAGAIN;
        let nowait = if waits { pace.nowait.refused() } else { Nowait::Can };
        let rests = waits && nowait == Nowait::Can;
        let rests_until = if rests { self.since_start() + REFUSED_REST } else { 0 };
        let next = Pace { nowait, rests_until, ..pace };
        if next != pace {
            self.files.goes(small.file, next);
        }
        (!waits).then_some(result)
    }

    /// Make it here, however long that takes.
    fn write_timed(&mut self, key: Key, op: &Op, small: &Small, pace: Pace) -> i32 {
        let Small { fd, offset, mem, .. } = *small;
        let before = (pace.doubted > 0).then(sleeps);
        let began = self.since_start();
        let result = self.watch_here(op, |ring| ring.write_here(key, fd, offset, mem, 0));
        let took = self.since_start() - began;
        let next = pace.after(began, took, before.map(|before| sleeps() > before));
        if next != pace {
            self.files.goes(small.file, next);
        }
        result
    }
}

/// How often this thread has waited for something.
fn sleeps() -> i64 {
    // SAFETY: a plain structure of numbers, for which zeroes are fine.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is there.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nvcsw
}

#[cfg(test)]
mod tests {
    use std::fs::File as StdFile;
    use std::io::Read;
    use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
    use std::thread;
    use std::time::Duration;

    use super::super::pace::{ASKED, DOUBTED, LONGEST_REST, RESTS, SLOW};
    use super::*;
    use crate::{Buffer, Io, Nature, OpenFile, Reactor};

    /// Where a stream goes on.
    const ON: u64 = u64::MAX;

    fn cached(fd: OwnedFd) -> OpenFile {
        let file = OpenFile::new(fd);
        file.set_nature(Nature { page_cache: true, ..Nature::default() });
        file
    }

    fn buffer(len: usize) -> Buffer {
        Io::new(Box::new(Ring::new().expect("io_uring"))).buffer(len).expect("memory")
    }

    fn write(file: &OpenFile, mem: Mem) -> Op {
        Op::Write { file: file.handle(), offset: ON, mem, durable: false }
    }

    /// Write until there is no more room, and none comes of what the kernel moves on by itself.
    fn fill(fd: impl AsFd) {
        rustix::io::ioctl_fionbio(&fd, true).expect("the stream's way");
        let mut full = 0;
        while full < 10 {
            full += 1;
            while rustix::io::write(&fd, &[b'x'; 512]).is_ok() {
                full = 0;
            }
            thread::sleep(Duration::from_millis(2));
        }
        rustix::io::ioctl_fionbio(&fd, false).expect("the stream's way");
    }

    /// A terminal's two ends, that change no byte. It cannot be asked not to wait.
    fn terminal() -> (StdFile, OwnedFd) {
        let (mut near, mut far) = (0, 0);
        // SAFETY: two places for descriptors, no name, no settings.
        let made = unsafe {
            libc::openpty(
                &raw mut near,
                &raw mut far,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        assert_eq!(made, 0, "openpty");
        // SAFETY: both were made just now, and nobody else knows them.
        let (near, far) = unsafe { (StdFile::from_raw_fd(near), OwnedFd::from_raw_fd(far)) };
        // SAFETY: a plain structure of numbers, for which zeroes are fine.
        let mut settings: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open and the structure is there.
        let set = unsafe {
            libc::tcgetattr(far.as_raw_fd(), &raw mut settings);
            libc::cfmakeraw(&raw mut settings);
            libc::tcsetattr(far.as_raw_fd(), libc::TCSANOW, &raw const settings)
        };
        assert_eq!(set, 0, "tcsetattr");
        (near, far)
    }

    /// Write where there is no room until somebody reads, 60 ms later; how writes go from then on. The kernel may find
    /// room in between: then once more.
    fn held_up(
        ring: &mut Ring,
        near: &mut StdFile,
        far: &OpenFile,
        (key, bytes): (Key, &Buffer),
    ) -> Pace {
        for _ in 0..20 {
            fill(far);
            let mut drains = near.try_clone().expect("a copy");
            let drained = thread::spawn(move || {
                thread::sleep(Duration::from_millis(60));
                let mut some = vec![0; 8192];
                // Up to what it waits to write.
                while drains.read(&mut some).is_ok_and(|count| !some[..count].ends_with(b"y")) {}
            });
            let mut done = vec![];
            let began = ring.since_start();
            ring.turn(&mut vec![(key, write(far, bytes.mem()))], &mut done, false)
                .expect("the ring");
            assert_eq!(done, [(key, 512)]);
            let (took, pace) =
                (ring.since_start() - began, ring.files.pace(far.handle()).expect("a known file"));
            drained.join().expect("it ends");
            if took > 20_000_000 {
                return pace;
            }
        }
        panic!("no write was held up");
    }

    #[test]
    fn a_write_that_was_held_up_sends_those_that_follow_to_the_ring() {
        let (mut near, far) = terminal();
        let far = cached(far);
        let mut bytes = buffer(512);
        bytes.bytes_mut().fill(b'y');
        let mut ring = Ring::new().expect("io_uring");
        let mut done = vec![];
        ring.turn(&mut vec![(1, write(&far, bytes.mem()))], &mut done, false).expect("the ring");
        assert_eq!(done, [(1, 512)]);

        assert_eq!(ring.files.pace(far.handle()).map(|pace| pace.nowait), Some(Nowait::Cannot));
        ring.files.goes(far.handle(), Pace { nowait: Nowait::Cannot, ..Pace::default() });
        // Held up twice: the first time it is only doubted.
        for (key, rests) in [(2, false), (3, true)] {
            let pace = held_up(&mut ring, &mut near, &far, (key, &bytes));
            assert_eq!(pace.rests_until > ring.since_start(), rests, "{pace:?}");
            assert!(pace.doubted > 0, "{pace:?}");
        }

        fill(&far);
        done.clear();
        ring.turn(&mut vec![(4, write(&far, bytes.mem()))], &mut done, false).expect("the ring");
        assert_eq!(done, [], "the queue goes on");
        rustix::io::ioctl_fionbio(&near, true).expect("its way");
        while done.is_empty() {
            let _ = near.read(&mut [0; 8192]);
            ring.turn(&mut vec![], &mut done, false).expect("the ring");
        }
        assert_eq!(done, [(4, 512)]);
    }

    /// The writes that the kernel was asked for here, and those that went to the ring.
    fn made(ring: &mut Ring) -> (u32, u32) {
        (std::mem::take(&mut ring.seen.here), std::mem::take(&mut ring.seen.pushed))
    }

    #[test]
    fn what_would_have_to_wait_goes_to_a_worker_where_that_can_be_asked() {
        let (mut near, far) = std::os::unix::net::UnixStream::pair().expect("a pair of sockets");
        let far = cached(far.into());
        let bytes = buffer(512);
        let mut ring = Ring::new().expect("io_uring");
        let mut done = vec![];
        let mut write_one = |ring: &mut Ring, key| {
            done.clear();
            ring.turn(&mut vec![(key, write(&far, bytes.mem()))], &mut done, false)
                .expect("a turn");
            done.clone()
        };
        assert_eq!(write_one(&mut ring, 1), [(1, 512)]);
        assert_eq!(made(&mut ring), (1, 0), "nothing is asked beside the write");
        let pace = |ring: &Ring| ring.files.pace(far.handle()).expect("a known file");
        assert_eq!(pace(&ring), Pace { nowait: Nowait::Can, ..Pace::default() });

        fill(&far);
        let began = ring.since_start();
        assert_eq!(write_one(&mut ring, 2), [], "the queue goes on");
        assert!(pace(&ring).rests_until >= began + REFUSED_REST, "{:?}", pace(&ring));
        assert_eq!(made(&mut ring), (1, 1));
        // Those that follow are not tried here.
        let for_ever = Pace { rests_until: Time::MAX, ..pace(&ring) };
        ring.files.goes(far.handle(), for_ever);
        assert_eq!(write_one(&mut ring, 3), []);
        assert_eq!(made(&mut ring), (0, 1));

        near.set_nonblocking(true).expect("its way");
        let mut ended = vec![];
        while ended.len() < 2 {
            let _ = near.read(&mut [0; 8192]);
            ring.turn(&mut vec![], &mut ended, false).expect("the ring");
        }
        ended.sort_unstable();
        assert_eq!(ended, [(2, 512), (3, 512)]);
        ring.files.goes(far.handle(), Pace { nowait: Nowait::Can, ..Pace::default() });
        while near.read(&mut [0; 8192]).is_ok_and(|count| count > 0) {}
        assert_eq!(write_one(&mut ring, 4), [(4, 512)]);
    }

    #[test]
    fn where_none_can_be_made_without_waiting_it_is_asked_no_more() {
        let mut nowait = Nowait::default();
        for _ in 1..ASKED {
            nowait = nowait.refused();
            assert!(matches!(nowait, Nowait::Asked(_)), "{nowait:?}");
        }
        assert_eq!(nowait.refused(), Nowait::Cannot);
        assert_eq!(Nowait::Can.refused(), Nowait::Can, "there it is worth it");
    }

    #[test]
    fn a_file_is_asked_once_whether_writes_to_it_can_be_told_not_to_wait() {
        let (mut near, far) = terminal();
        let far = cached(far);
        let bytes = buffer(512);
        let mut ring = Ring::new().expect("io_uring");
        for (key, calls) in [(1, 2), (2, 1), (3, 1)] {
            let mut done = vec![];
            ring.turn(&mut vec![(key, write(&far, bytes.mem()))], &mut done, false)
                .expect("a turn");
            assert_eq!(done, [(key, 512)]);
            assert_eq!(made(&mut ring), (calls, 0), "{key}");
            near.read_exact(&mut [0; 512]).expect("what was written");
        }
        // One in memory alone, which nothing holds up, is not.
        let file = OpenFile::new(tempfile::tempfile().expect("a file").into());
        file.set_nature(Nature { page_cache: true, in_memory: true, ..Nature::default() });
        let mut done = vec![];
        let write = Op::Write { file: file.handle(), offset: 0, mem: bytes.mem(), durable: false };
        ring.turn(&mut vec![(1, write)], &mut done, false).expect("a turn");
        assert_eq!((done, made(&mut ring)), (vec![(1, 512)], (1, 0)));
    }

    #[test]
    fn only_who_slept_was_held_up() {
        let none = Pace::default();
        let doubted = Pace { doubted: DOUBTED, ..none };
        assert_eq!(none.after(5, SLOW, None), none);
        assert_eq!(none.after(5, SLOW + 1, None), doubted);
        assert_eq!(doubted.after(5, SLOW + 1, Some(false)), doubted);
        assert_eq!(doubted.after(5, 7, Some(true)), Pace { doubted: DOUBTED - 1, ..none });
        let rests_until = 5 + (SLOW + 1) * (RESTS + 1);
        assert_eq!(doubted.after(5, SLOW + 1, Some(true)), Pace { rests_until, ..doubted });
        let rests_until = 10_000_000_000 + LONGEST_REST;
        assert_eq!(doubted.after(0, 10_000_000_000, Some(true)), Pace { rests_until, ..doubted });
    }
}
