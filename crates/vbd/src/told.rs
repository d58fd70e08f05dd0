//! What a queue's thread tells of itself.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

/// Who a queue serves.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) transport: &'static str,
    pub(crate) peer: String,
    pub(crate) queue: u16,
}

/// What a queue's thread tells of itself.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) served: OnceLock<Served>,
    /// The window; the lowest bit says whether it spins.
    pub(crate) poll: AtomicU64,
}
