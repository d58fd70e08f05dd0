//! How many operations on files that are elsewhere there were.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Operations of this process on files that are elsewhere, since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elsewhere {
    /// Those that were begun.
    pub begun: u64,
    /// Those that have ended.
    pub ended: u64,
}

static BEGUN: AtomicU64 = AtomicU64::new(0);
static ENDED: AtomicU64 = AtomicU64::new(0);

impl Elsewhere {
    /// As it is now.
    pub fn now() -> Elsewhere {
        let ended = ENDED.load(Relaxed);
        Elsewhere { begun: BEGUN.load(Relaxed), ended }
    }

    /// One is begun.
    #[cold]
    pub(crate) fn begin() {
        BEGUN.fetch_add(1, Relaxed);
    }

    /// One has ended.
    #[cold]
    pub(crate) fn end() {
        ENDED.fetch_add(1, Relaxed);
    }
}
