//! A watcher who has had enough.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use ringtap_image_tools::{Progress, Watch};

/// Stops the work once something has been done of it.
#[derive(Default)]
pub struct Stops {
    /// How much there was to do.
    pub total: AtomicU64,
}

impl Watch for Stops {
    fn begins(&self, total: u64, progress: &Arc<Progress>) {
        self.total.store(total, SeqCst);
        let progress = progress.clone();
        thread::spawn(move || {
            while progress.done() == 0 {
                thread::sleep(Duration::from_millis(1));
            }
            progress.stop();
        });
    }
}
