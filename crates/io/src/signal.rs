//! Tasks of one thread that wait for one another.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::Io;
use crate::wake::TaskId;

/// Something that happens again and again; tasks of one thread wait for the next time.
#[derive(Default)]
pub struct Signal {
    count: Cell<u64>,
    waiting: RefCell<Vec<TaskId>>,
}

impl Signal {
    /// Wake every task that waits.
    #[inline]
    pub fn notify(&self, io: &Io) {
        self.count.set(self.count.get().wrapping_add(1));
        if self.is_awaited() {
            io.shared.ready.borrow_mut().append(&mut self.waiting.borrow_mut());
        }
    }

    /// Whether a task waits.
    #[inline]
    pub(crate) fn is_awaited(&self) -> bool {
        !self.waiting.borrow().is_empty()
    }

    /// Wait for the next [`Signal::notify`]. What was waited for must be looked at again after it.
    pub fn wait<'a>(&'a self, io: &'a Io) -> Wait<'a> {
        Wait { signal: self, io, seen: self.count.get(), listed: false }
    }
}

/// The future of [`Signal::wait`].
#[must_use = "a signal is waited for by awaiting this"]
pub struct Wait<'a> {
    signal: &'a Signal,
    io: &'a Io,
    seen: u64,
    listed: bool,
}

impl Future for Wait<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        if self.signal.count.get() != self.seen {
            return Poll::Ready(());
        }
        if !self.listed {
            self.listed = true;
            self.signal.waiting.borrow_mut().push(self.io.shared.current.get());
        }
        Poll::Pending
    }
}
