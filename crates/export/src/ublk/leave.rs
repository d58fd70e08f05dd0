//! The word to the queue threads to let go of a device, which waits for its next server then.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use ringtap_io::Event;

/// Said once; a device that is served again has another.
#[derive(Debug, Default)]
pub(crate) struct Leave {
    asked: AtomicBool,
    event: Event,
}

impl Leave {
    /// Have the threads leave once what they have taken is served.
    pub(crate) fn ask(&self) {
        self.asked.store(true, SeqCst);
        self.event.notify();
    }

    /// Until that is said.
    pub(crate) async fn asked(&self) {
        loop {
            let told = self.event.listen();
            if self.asked.load(SeqCst) {
                return;
            }
            told.await;
        }
    }
}
