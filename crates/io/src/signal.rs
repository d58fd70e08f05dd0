//! Tasks of one thread that wait for one another.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::Io;
use crate::waiting::Waiting;

/// Something that happens again and again; tasks of one thread wait for the next time.
#[derive(Default)]
pub struct Signal {
    waiting: Waiting,
}

impl Signal {
    /// Wake every task that waits.
    #[inline]
    pub fn notify(&self, io: &Io) {
        self.waiting.happen(&io.shared.ready);
    }

    /// Wait for the next [`Signal::notify`]. What was waited for must be looked at again after it.
    pub fn wait<'a>(&'a self, io: &'a Io) -> Wait<'a> {
        Wait::of(&self.waiting, io)
    }
}

/// The future of [`Signal::wait`].
#[must_use = "a signal is waited for by awaiting this"]
pub struct Wait<'a> {
    waiting: &'a Waiting,
    io: &'a Io,
    seen: u64,
    listed: bool,
}

impl<'a> Wait<'a> {
    fn of(waiting: &'a Waiting, io: &'a Io) -> Wait<'a> {
        Wait { waiting, io, seen: waiting.count(), listed: false }
    }
}

impl Future for Wait<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        if self.waiting.count() != self.seen {
            return Poll::Ready(());
        }
        if !self.listed {
            self.listed = true;
            self.waiting.list(self.io.shared.current.get());
        }
        Poll::Pending
    }
}

impl Io {
    /// Go on when the reactor has taken what was asked for so far: it begins on that while more is
    /// prepared.
    pub fn next_turn(&self) -> Wait<'_> {
        Wait::of(&self.shared.turned, self)
    }
}
