//! Threads with a connection of their own, where the server has room for that.
//!
//! A server may allow fewer connections than the URI, or others may have them. So what a thread asks goes by the owner's
//! connection while its own does not come; and where the owner has none either, one of those that stand is given up for it.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use ringtap_io::{Event, Io, Key, Op, Session};

use super::Nbd;
use super::link::{Link, Role};
use super::requests::Who;

/// Who has a connection of his own.
#[derive(Default)]
pub(super) struct Places {
    taken: AtomicUsize,
    most: AtomicUsize,
    /// The owner waits for a connection, and the server has no room: who has one is to give it up.
    wanted: AtomicBool,
    /// The owner has one.
    met: AtomicBool,
    told: Event,
}

impl Places {
    pub(super) fn new(most: usize) -> Places {
        Places { most: AtomicUsize::new(most), ..Places::default() }
    }

    /// Whether there was one.
    pub(super) fn take(&self) -> bool {
        let most = self.most.load(SeqCst);
        let next = |taken| (taken < most).then_some(taken + 1);
        self.taken.fetch_update(SeqCst, SeqCst, next).is_ok()
    }

    /// A thread has none any more. Where `for_good`, the server has no more than those that are left.
    pub(super) fn leave(&self, for_good: bool) {
        let left = self.taken.fetch_sub(1, SeqCst) - 1;
        if for_good {
            self.most.fetch_min(left, SeqCst);
        }
    }

    /// One is to be given up.
    pub(super) fn want(&self) {
        self.wanted.store(true, SeqCst);
        self.told.notify();
    }

    /// The owner has one: none is to be given up any more.
    pub(super) fn meet(&self) {
        self.met.store(true, SeqCst);
        self.wanted.store(false, SeqCst);
        self.told.notify();
    }

    /// The owner has lost it.
    pub(super) fn miss(&self) {
        self.met.store(false, SeqCst);
    }

    pub(super) fn are_met(&self) -> bool {
        self.met.load(SeqCst)
    }

    /// Who listens looks again whether his connection is there.
    pub(super) fn tell(&self) {
        self.told.notify();
    }

    /// Wait until one is to be given up: true; or `over`.
    pub(super) async fn are_wanted(&self, over: impl Fn() -> bool) -> bool {
        loop {
            let told = self.told.listen();
            if over() {
                return false;
            }
            if self.wanted.load(SeqCst) && !self.are_met() {
                return true;
            }
            told.await;
        }
    }

    /// Whether one is to be given up; nobody else is told so.
    pub(super) fn answer(&self) -> bool {
        !self.are_met() && self.wanted.swap(false, SeqCst)
    }
}

/// The session of a thread with a connection of its own.
pub(super) struct Near {
    nbd: Arc<Nbd>,
    link: Rc<Link>,
}

impl Near {
    /// For who has taken a place.
    pub(super) fn start(nbd: Arc<Nbd>, io: &Io) -> Rc<Near> {
        let link = Link::start(nbd.clone(), io, Role::Near);
        Rc::new(Near { nbd, link })
    }
}

impl Session for Near {
    fn begin(&self, io: &Io, key: Key, op: Op) {
        match self.link.passes_to() {
            Some(far) => far.begin(io, key, op),
            None => self.link.begin(io, Who::Here(key), op),
        }
    }

    fn cancel(&self, io: &Io, key: Key) {
        let own = self.link.cancel(io, |who| matches!(who, Who::Here(other) if *other == key));
        if let Some(far) = self.link.far().filter(|_| !own) {
            far.cancel(io, key);
        }
    }
}

impl Drop for Near {
    fn drop(&mut self) {
        if !self.link.has_left() {
            self.nbd.places.leave(false);
        }
    }
}
