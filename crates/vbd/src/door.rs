//! How a disk is made to stand still, and its image replaced, while it is served.
//!
//! A request counts itself into the image's epoch ([`ringtap_image::Grace`]) and then looks whether the door
//! is open and the image still the one that it has a handle of. Who shuts the door does that first and waits
//! for the epoch second: one of the two sees the other.

use ringtap_image::Grace;
use ringtap_io::Event;
use ringtap_io::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use ringtap_io::sync::broken;

const SHUT: u64 = 1;
/// One image more.
const NEXT: u64 = 2;

/// Who may pass to which image.
#[derive(Debug, Default)]
pub(crate) struct Door {
    /// The image's number, and whether the door is shut.
    state: AtomicU64,
    opened: Event,
    /// Requests that have left the epoch and hold on to the image.
    waiting: AtomicU32,
    resumed: Event,
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
        self.state.load(SeqCst) & !SHUT
    }

    /// Whether a request with a handle of that image may go on. It has counted itself into the epoch.
    #[inline]
    pub(crate) fn lets_in(&self, image: u64) -> bool {
        self.state.load(SeqCst) == image || broken("door not looked at")
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
    pub(crate) async fn drain(&self, grace: &Grace) {
        if broken("door shut without waiting") {
            return;
        }
        grace.over(grace.epoch()).await;
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
    }
}
