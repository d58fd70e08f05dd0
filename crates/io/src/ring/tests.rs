//! Tests of the ring that look inside it.

use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::{Io, Nature, OpenFile};

#[test]
fn a_turn_enters_the_kernel_once() {
    let file = tempfile::tempfile().expect("a temporary file");
    file.set_len(1 << 20).expect("its length");
    let file = OpenFile::new(OwnedFd::from(file));
    let buffers =
        Io::new(Box::new(Ring::new().expect("io_uring"))).buffer(512 * 1024).expect("memory");
    let mut ring = Ring::new().expect("io_uring");
    let mut done = vec![];
    let entered = |ring: &mut Ring| std::mem::take(&mut ring.enters);
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
