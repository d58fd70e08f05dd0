//! Tests of the ring that look inside it.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;

use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::{Io, Nature, OpenFile, Witness};

/// What tests see of a ring, and do to it.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) enters: u32,
    /// Writes that its thread asked the kernel for itself, and operations handed to the ring.
    pub(super) here: u32,
    pub(super) pushed: u32,
    /// What the next enters fail with, instead of being made; 0 for one that is made.
    pub(super) fails: VecDeque<i32>,
}

/// So many operations that end at once, or one after the other.
fn timeouts(count: Key) -> Vec<(Key, Op)> {
    (0..count).map(|key| (key, Op::Timeout { nanos: 1 })).collect()
}

/// Take until so many are done; how many each was.
fn take(ring: &mut Ring, submit: &mut Vec<(Key, Op)>, count: usize) -> Vec<(Key, i32)> {
    let mut done = vec![];
    while done.len() < count {
        ring.turn(submit, &mut done, true).expect("the ring");
    }
    done.sort_unstable();
    done
}

/// A kernel without room for a request or for completions, or with a signal for the thread, has taken none
/// of what was to be handed over, and it is again the next time.
#[test]
fn an_enter_that_takes_nothing_loses_nothing() {
    for errno in [libc::EAGAIN, libc::EBUSY, libc::EINTR] {
        for count in [1, 200, 700] {
            let mut ring = Ring::new().expect("io_uring");
            ring.seen.fails.extend([errno, errno, 0, errno, errno, errno, 0, errno]);
            let mut submit = timeouts(count);
            let done = take(&mut ring, &mut submit, count as usize);
            assert!(submit.is_empty() && ring.seen.fails.len() < 6, "{errno}: {count}");
            assert!(done.iter().map(|(key, _)| *key).eq(0..count), "{errno}: {count}");
            let mut more = vec![];
            ring.turn(&mut vec![], &mut more, false).expect("the ring");
            assert!(more.is_empty(), "{errno}: some ended twice");
        }
    }
}

/// Where it fails for good what was handed over and what was not are told apart.
#[test]
fn an_enter_that_fails_leaves_what_was_not_handed_over() {
    for count in [100, 257, 700] {
        let mut ring = Ring::new().expect("io_uring");
        ring.seen.fails.push_back(libc::EIO);
        let (mut submit, mut done) = (timeouts(count), vec![]);
        let error = ring.turn(&mut submit, &mut done, true).expect_err("it fails");
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        assert_eq!(submit.len(), (count as usize).saturating_sub(SUBMISSIONS as usize));
        let done = take(&mut ring, &mut submit, count as usize - done.len());
        assert!(done.iter().map(|(key, _)| *key).eq(0..count), "{count}");
    }
}

/// A task waits for what it has asked for, handed over or not, before its memory goes.
#[test]
fn tasks_of_a_ring_that_fails_once_can_be_dropped() {
    let mut ring = Ring::new().expect("io_uring");
    ring.seen.fails.push_back(libc::EIO);
    let mut tasks = crate::Tasks::new(Box::new(ring));
    for _ in 0..700 {
        let io = tasks.io().clone();
        tasks.spawn(async move { io.sleep(1_000_000_000_000).await });
    }
    tasks.run_ready();
    tasks.turn(true).expect_err("it fails");
    assert_eq!(tasks.io().in_flight(), 700);
    drop(tasks);
}

#[test]
fn completions_past_the_rings_room_are_all_taken() {
    for newest in [true, false] {
        let event = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let event = OpenFile::new(event);
        let mut ring = match newest {
            true => Ring::new().expect("io_uring"),
            false => Ring::of(Ring::build(false, false).expect("io_uring"), false).expect("a ring"),
        };
        let count = 3 * COMPLETIONS + 7;
        let wait = |key| (key, Op::PollIn { file: event.handle() });
        let (mut submit, mut done) = ((0..count).map(wait).collect(), vec![]);
        ring.turn(&mut submit, &mut done, false).expect("the ring");
        assert!(submit.is_empty() && done.is_empty());
        rustix::io::write(&event, &1u64.to_ne_bytes()).expect("a signal");
        // Handed over and completed while the kernel keeps what there is no room for.
        submit.extend((count..count + 700).map(|key| (key, Op::Timeout { nanos: 1 })));
        let done = take(&mut ring, &mut submit, count as usize + 700);
        assert!(done.iter().map(|(key, _)| *key).eq(0..count + 700), "each once");
    }
}

#[test]
fn a_turn_enters_the_kernel_once() {
    let file = tempfile::tempfile().expect("a temporary file");
    file.set_len(1 << 20).expect("its length");
    let file = OpenFile::new(OwnedFd::from(file));
    let buffers =
        Io::new(Box::new(Ring::new().expect("io_uring"))).buffer(512 * 1024).expect("memory");
    let mut ring = Ring::new().expect("io_uring");
    let mut done = vec![];
    let entered = |ring: &mut Ring| std::mem::take(&mut ring.seen.enters);
    for count in [1, 32, SUBMISSIONS as usize, 512] {
        let mut submit: Vec<_> = (0..count)
            .map(|key| {
                let mem = buffers.mem().window(key * 512, 512);
                let file = file.handle();
                (key as Key, Op::Read { file, offset: key as u64 * 512, mem })
            })
            .collect();
        ring.turn(&mut submit, &mut done, true).expect("the ring");
        assert!(submit.is_empty() && !done.is_empty());
        // One more each time the submission queue is full.
        let full = count.saturating_sub(1) / SUBMISSIONS as usize;
        assert_eq!(entered(&mut ring), 1 + full as u32, "{count} reads");
        while done.len() < count {
            let before = done.len();
            ring.turn(&mut submit, &mut done, false).expect("the ring");
            assert!(entered(&mut ring) <= 1);
            if done.len() == before {
                std::thread::yield_now();
            }
        }
        done.clear();
    }
    // Nothing to hand over and nothing to wait for.
    ring.turn(&mut vec![], &mut done, false).expect("the ring");
    assert!(entered(&mut ring) <= 1 && done.is_empty());
}

#[test]
fn what_others_wait_for_goes_first() {
    let file = tempfile::tempfile().expect("a temporary file");
    file.set_len(1 << 20).expect("its length");
    let file = OpenFile::new(OwnedFd::from(file));
    file.set_nature(Nature { page_cache: true, ..Nature::default() });
    let event = eventfd(0, EventfdFlags::NONBLOCK);
    let event = OpenFile::new(event.expect("an eventfd"));
    let buffer = Io::new(Box::new(Ring::new().expect("io_uring"))).buffer(8192).expect("memory");
    let (from, to) = (buffer.mem().window(0, 4096), buffer.mem().window(4096, 4096));
    let file = file.handle();
    let transfers = [
        Op::Write { file, offset: 0, mem: from, durable: false },
        Op::Read { file, offset: 0, mem: to },
    ];
    let mut ring = Ring::new().expect("io_uring");
    for transfer in transfers {
        let (mut submit, mut done) =
            (vec![(0, transfer), (1, Op::SignalEvent { file: event.handle() })], vec![]);
        while done.len() < 2 {
            ring.turn(&mut submit, &mut done, true).expect("the ring");
        }
        assert_eq!(done, [(1, 8), (0, 4096)]);
    }
}

/// The kernel's workers find a file by its place in the ring's table only as they begin.
#[test]
fn what_is_in_flight_keeps_its_file() {
    let file = tempfile::tempfile().expect("a temporary file");
    let file = OpenFile::new(OwnedFd::from(file));
    file.set_nature(Nature { image: true, ..Nature::default() });
    let mut ring = Ring::new().expect("io_uring");
    for round in 0..50 {
        let syncs = (0..200).map(|key| (key, Op::Sync { file: file.handle() }));
        let (mut submit, mut done) = (syncs.collect(), vec![]);
        ring.turn(&mut submit, &mut done, false).expect("the ring");
        ring.forget_images();
        done.append(&mut take(&mut ring, &mut submit, 200 - done.len()));
        assert!(done.iter().all(|(_, result)| *result == 0), "{round}: {done:?}");
        assert!(ring.files.images().is_empty(), "it is let go of once nothing is in flight");
    }
}

#[test]
fn a_file_is_let_go_of_once_all_is_noted_of_its_changes() {
    let file = tempfile::tempfile().expect("a temporary file");
    let file = OpenFile::new(OwnedFd::from(file));
    file.set_nature(Nature { image: true, ..Nature::default() });
    let words: Arc<[AtomicU64]> = (0..Witness::WORDS).map(|_| AtomicU64::new(0)).collect();
    let witness = Arc::new(Witness::default());
    witness.start(Arc::new(words), 0);
    file.set_witness(witness);
    let mut ring = Ring::new().expect("io_uring");
    take(&mut ring, &mut vec![(0, Op::Sync { file: file.handle() })], 1);
    let beside = ring.files.watched.begin(ring.files.images()[0].0, 512, true);
    ring.forget_images();
    assert_eq!(ring.files.images().len(), 1, "a change of it is being begun");
    take(&mut ring, &mut timeouts(1), 1);
    ring.files.watched.end(beside, 512);
    take(&mut ring, &mut timeouts(1), 1);
    assert!(ring.files.images().is_empty(), "and is let go of afterwards");
}
