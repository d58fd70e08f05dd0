//! What is known of how stable the target of a backup is.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

/// What is known of how stable the target is.
#[derive(Default)]
pub(super) struct Stability {
    /// Scratch keeps what it brought to the target until that is stable there.
    pub(super) until: AtomicBool,
    /// Whether the target is being made stable: by one at a time.
    pub(super) flushes: AtomicBool,
    /// How often what was given to the target may have been lost.
    pub(super) lost: AtomicU64,
}

impl Stability {
    pub(super) fn is_kept_until(&self) -> bool {
        self.until.load(SeqCst)
    }

    pub(super) fn times_lost(&self) -> u64 {
        self.lost.load(SeqCst)
    }
}

/// Who makes the target stable.
pub(super) struct Turn<'a>(pub(super) &'a Stability);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.flushes.store(false, SeqCst);
    }
}
