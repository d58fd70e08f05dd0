//! How another thread ends the sleep of a ring: an eventfd that the ring polls.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use io_uring::{cqueue, opcode, types};
use rustix::event::{EventfdFlags, eventfd};

use super::Ring;
use crate::{Alarm, Key};

/// The user data of the poll.
pub(super) const ALARM: u64 = 1 << 34;

struct Event(OwnedFd);

impl Alarm for Event {
    fn ring(&self) {
        // Nobody reads it: the poll completes at each write. It cannot be full before 2^64 of them.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// The eventfd, and whether it was heard.
pub(super) struct Doorbell {
    event: Arc<Event>,
    /// Somebody has the means to ring.
    wanted: bool,
    /// The poll is in flight; one entry of the ring is enough for many times.
    polled: bool,
    rung: bool,
}

impl Doorbell {
    pub(super) fn new() -> io::Result<Doorbell> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let event = Arc::new(Event(event));
        Ok(Doorbell { event, wanted: false, polled: false, rung: false })
    }

    pub(super) fn alarm(&mut self) -> Arc<dyn Alarm> {
        self.wanted = true;
        self.event.clone()
    }

    pub(super) fn completed(&mut self, entry: &cqueue::Entry) {
        if entry.user_data() & ALARM != 0 {
            self.rung = true;
            self.polled = cqueue::more(entry.flags());
        }
    }

    /// Whether it was, since this was asked last.
    #[inline]
    pub(super) fn take(&mut self) -> bool {
        std::mem::take(&mut self.rung)
    }
}

impl Ring {
    /// Before it sleeps: see that the alarm is heard.
    #[inline]
    pub(super) fn listen(&mut self, done: &mut Vec<(Key, i32)>) -> io::Result<()> {
        if self.doorbell.polled || !self.doorbell.wanted {
            return Ok(());
        }
        self.doorbell.polled = true;
        let fd = types::Fd(self.doorbell.event.0.as_raw_fd());
        let poll = opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true).build();
        self.push_entry(&poll.user_data(ALARM), done)
    }
}
