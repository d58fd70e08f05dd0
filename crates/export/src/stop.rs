//! The word to stop: take no more, drain, flush, leave.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringtap_vbd::{Disk, Listening};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// Raised once, seen by everyone who holds a clone; its descriptor stays readable from then on, unless it is lowered.
#[derive(Clone, Debug)]
pub struct Stop(Arc<OwnedFd>);

impl Stop {
    /// A stop not yet raised.
    pub fn new() -> io::Result<Stop> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Stop(Arc::new(eventfd(0, flags)?)))
    }

    /// One that is raised when the disk is stopped by a panic.
    pub(crate) fn at_failure(vbd: &Disk) -> io::Result<(Stop, Listening)> {
        let stop = Stop::new()?;
        let theirs = stop.clone();
        Ok((stop, vbd.health().when_failed(move |_| theirs.raise())))
    }

    /// Ask everyone to stop.
    pub fn raise(&self) {
        // It fails only where the count is full, and then it is raised already.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Take it back.
    pub(crate) fn lower(&self) {
        // It fails where it is not raised.
        let _ = rustix::io::read(&*self.0, &mut [0; 8]);
    }

    /// Whether it was raised.
    pub fn is_raised(&self) -> bool {
        let mut fds = [PollFd::new(&*self.0, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(1))
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
