//! How a disk is made to stand still, and its image replaced, while it is served.
//!
//! A request counts itself into the image's epoch ([`ringtap_image::Epochs`]) and then looks whether the door
//! is open and the image still the one that it has a handle of. Who shuts the door does that first and waits
//! for the epoch second: one of the two sees the other.

use ringtap_image::Epochs;
use ringtap_io::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use ringtap_io::sync::broken;
use ringtap_io::{Event, Listener};

const SHUT: u64 = 1;
/// Requests that change the disk pass a filter.
const FILTERED: u64 = 2;
/// Requests wait for limits.
const LIMITED: u64 = 4;
/// Requests wait until somebody has them go on.
const PAUSED: u64 = 8;
/// What requests have to look at that may pass.
const LED: u64 = FILTERED | LIMITED | PAUSED;
/// One image more.
pub(crate) const NEXT: u64 = 16;

/// Who may pass to which image.
#[derive(Debug, Default)]
pub(crate) struct Door {
    /// The image's number, whether the door is shut, and whether there are filters, limits and a pause.
    state: AtomicU64,
    opened: Event,
    /// Filters that there were, which had files of their own.
    former_filters: AtomicU64,
    /// Requests that have left the epoch and hold on to the image.
    waiting: AtomicU32,
    resumed: Event,
    /// Requests that a pause holds, and what tells them of its end.
    held: AtomicU32,
    unpaused: Event,
}

/// While it lives, a pause holds its request.
struct Held<'a>(&'a Door);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, SeqCst);
    }
}

/// While it lives, its request waits outside the epoch for others to leave it.
pub(crate) struct Waiting<'a>(&'a Door);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, SeqCst);
        self.0.resumed.notify();
    }
}

impl Door {
    /// The image that new handles are of.
    #[inline]
    pub(crate) fn image(&self) -> u64 {
        self.state.load(SeqCst) & !(SHUT | LED)
    }

    /// Whether a request with a handle of that image may go on, and has nothing more to look at. It has counted
    /// itself into the epoch.
    #[inline]
    pub(crate) fn lets_in(&self, image: u64) -> bool {
        self.state.load(SeqCst) == image || broken("door not looked at")
    }

    /// As [`Door::lets_in`], of a request that looks whether there are filters and limits, or that none concerns.
    pub(crate) fn admits(&self, image: u64) -> bool {
        self.state.load(SeqCst) & !LED == image
    }

    /// Whether requests pass a filter, or wait for limits.
    #[inline]
    pub(crate) fn leads_on(&self) -> bool {
        self.state.load(SeqCst) & LED != 0
    }

    /// Whether requests wait for limits.
    pub(crate) fn is_limited(&self) -> bool {
        self.state.load(SeqCst) & LIMITED != 0
    }

    /// Whether they are to.
    pub(crate) fn limit(&self, limited: bool) {
        match limited {
            true => self.state.fetch_or(LIMITED, SeqCst),
            false => self.state.fetch_and(!LIMITED, SeqCst),
        };
    }

    /// Whether requests wait until somebody has them go on.
    pub(crate) fn is_paused(&self) -> bool {
        self.state.load(SeqCst) & PAUSED != 0
    }

    /// Whether they are to; gives whether they were. Those that have passed go on to their end.
    pub(crate) fn pause(&self, paused: bool) -> bool {
        let before = match paused {
            true => self.state.fetch_or(PAUSED, SeqCst),
            false => self.state.fetch_and(!PAUSED, SeqCst),
        };
        self.unpaused.notify();
        before & PAUSED != 0
    }

    /// Wait until there is no pause.
    pub(crate) async fn unpaused(&self) {
        if !self.is_paused() {
            return;
        }
        self.held.fetch_add(1, SeqCst);
        let _held = Held(self);
        loop {
            let unpaused = self.unpaused.listen();
            if !self.is_paused() {
                return;
            }
            unpaused.await;
        }
    }

    /// How many requests a pause holds.
    pub(crate) fn held(&self) -> u32 {
        self.held.load(SeqCst)
    }

    /// Whether requests that change the disk pass a filter.
    #[inline]
    pub(crate) fn is_filtered(&self) -> bool {
        self.state.load(SeqCst) & FILTERED != 0
    }

    /// Whether they are to.
    pub(crate) fn filter(&self, filtered: bool) {
        match filtered {
            true => self.state.fetch_or(FILTERED, SeqCst),
            false => self.state.fetch_and(!FILTERED, SeqCst),
        };
    }

    /// A filter is there no more: who listens for the door lets go of its files.
    pub(crate) fn filter_has_gone(&self) {
        self.former_filters.fetch_add(1, SeqCst);
        self.opened.notify();
    }

    /// How many filters there were.
    pub(crate) fn former_filters(&self) -> u64 {
        self.former_filters.load(SeqCst)
    }

    /// Listen from now on for the door to be opened, or a filter to go.
    pub(crate) fn opens(&self) -> Listener<'_> {
        self.opened.listen()
    }

    /// Wait until the door is open.
    pub(crate) async fn open(&self) {
        loop {
            let opened = self.opened.listen();
            if self.state.load(SeqCst) & SHUT == 0 {
                return;
            }
            opened.await;
        }
    }

    /// Before a request leaves the epoch to wait for others that are in it.
    pub(crate) fn wait_outside(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, SeqCst);
        Waiting(self)
    }

    /// Shut the door; false where somebody else has.
    pub(crate) fn try_shut(&self) -> bool {
        self.state.fetch_or(SHUT, SeqCst) & SHUT == 0
    }

    /// Shut the door when nobody else has it shut.
    pub(crate) async fn shut(&self) {
        loop {
            let opened = self.opened.listen();
            if self.try_shut() {
                return;
            }
            opened.await;
        }
    }

    /// With the door shut: wait until every request has ended that had passed it.
    pub(crate) async fn drain(&self, epochs: &Epochs) {
        if broken("door shut without waiting") {
            return;
        }
        epochs.over(epochs.epoch()).await;
        loop {
            let resumed = self.resumed.listen();
            if self.waiting.load(SeqCst) == 0 || broken("those outside forgotten") {
                return;
            }
            resumed.await;
        }
    }

    /// With the door shut and all drained: from now on there is another image.
    pub(crate) fn replaced(&self) {
        self.state.fetch_add(NEXT, SeqCst);
    }

    /// Open it again.
    pub(crate) fn unlock(&self) {
        self.state.fetch_and(!SHUT, SeqCst);
        if !broken("door opened in silence") {
            self.opened.notify();
        }
    }

    /// The disk is stopped: see [`ringtap_image::Image::abandon`].
    pub(crate) fn abandon(&self) {
        self.opened.close();
        self.resumed.close();
        self.pause(false);
        self.unpaused.close();
    }
}
