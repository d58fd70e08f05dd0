//! Whose turn it is to change a disk's bitmaps.

use ringtap_io::Event;
use ringtap_io::sync::atomic::{AtomicBool, Ordering::SeqCst};

#[derive(Default)]
pub(super) struct Turns {
    taken: AtomicBool,
    over: Event,
}

impl Turns {
    /// Wait for one's own.
    pub(super) async fn take(&self) {
        loop {
            let over = self.over.listen();
            if !self.taken.swap(true, SeqCst) {
                return;
            }
            over.await;
        }
    }

    /// It is over.
    pub(super) fn end(&self) {
        self.taken.store(false, SeqCst);
        self.over.notify();
    }
}
