//! How a server ends, and what of its memory outlives it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// How a server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The power goes: [`crate::Disk::after_power_cut`].
    PowerCut,
    /// It is killed, and its guest lives on: [`crate::Disk::after_kill`].
    Kill,
}

impl End {
    /// One or the other.
    pub fn any(rng: &mut fastrand::Rng) -> End {
        if rng.bool() { End::Kill } else { End::PowerCut }
    }

    /// What it leaves of memory that outlives a server, such as a restart log's.
    pub fn leaves(self, memory: &[AtomicU64]) -> Arc<[AtomicU64]> {
        let left = |word: &AtomicU64| match self {
            End::PowerCut => AtomicU64::new(0),
            End::Kill => AtomicU64::new(word.load(SeqCst)),
        };
        memory.iter().map(left).collect()
    }
}
