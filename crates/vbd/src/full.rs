//! Requests that found no room where the image lies, and wait until there is some: where the operator wants that, who uses
//! the disk sees it stand still and not fail.
//!
//! A request waits outside the image's epoch, so that the disk can be made to stand still meanwhile, and its image be
//! replaced.

use std::sync::OnceLock;

use ringtap_io::Event;
use ringtap_io::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use ringtap_io::sync::broken;

type Tell = Box<dyn Fn() + Send + Sync>;

/// Of one of those by whom requests come: whether theirs wait no more.
#[derive(Default)]
pub(crate) struct GivenUp(AtomicBool);

/// Those who wait for room.
#[derive(Default)]
pub(crate) struct Full {
    /// Told when the first of them begins to wait; none: nobody waits.
    tell: OnceLock<Tell>,
    /// How often they were told to try again.
    again: AtomicU64,
    /// When somebody was told last.
    told: AtomicU64,
    waiting: AtomicUsize,
    /// How many jobs deal with it themselves.
    dealt_with: AtomicUsize,
    /// They are not to wait any more.
    over: AtomicBool,
    event: Event,
}

impl Full {
    pub(crate) fn wait_for_room(&self, tell: impl Fn() + Send + Sync + 'static) {
        let _the_first_stays = self.tell.set(Box::new(tell));
    }

    /// By which it is known whether it was said since that there is room.
    pub(crate) fn tries(&self) -> u64 {
        self.again.load(SeqCst)
    }

    /// Wait until somebody says that there is room; false where nobody will, or those by whom the request came are given up.
    pub(crate) async fn wait(&self, tries: u64, by: &GivenUp) -> bool {
        let is_over = || self.is_dealt_with() || by.0.load(SeqCst);
        let Some(tell) = self.tell.get().filter(|_| !is_over()) else { return false };
        if self.told.swap(tries + 1, SeqCst) != tries + 1 {
            tell();
        }
        self.waiting.fetch_add(1, SeqCst);
        let room = loop {
            let told = self.event.listen();
            if self.over.load(SeqCst) || is_over() {
                break false;
            }
            if self.tries() != tries {
                break true;
            }
            told.await;
        };
        self.waiting.fetch_sub(1, SeqCst);
        room
    }

    fn is_dealt_with(&self) -> bool {
        self.dealt_with.load(SeqCst) > 0
    }

    /// A job that alone writes here hears of it from now on.
    pub(crate) fn tell_job(&self) {
        self.dealt_with.fetch_add(1, SeqCst);
    }

    /// It does not any more.
    pub(crate) fn job_is_over(&self) {
        self.dealt_with.fetch_sub(1, SeqCst);
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(SeqCst)
    }

    pub(crate) fn try_again(&self) {
        self.again.fetch_add(1, SeqCst);
        if !broken("room told in silence") {
            self.event.notify();
        }
    }

    pub(crate) fn give_up(&self) {
        self.over.store(true, SeqCst);
        self.event.notify();
    }

    /// The requests that come by one of many wait no more.
    pub(crate) fn give_up_those(&self, by: &GivenUp) {
        by.0.store(true, SeqCst);
        if !broken("room given up in silence") {
            self.event.notify();
        }
    }

    pub(crate) fn wait_again(&self) {
        self.over.store(false, SeqCst);
    }
}
