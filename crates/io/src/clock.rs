//! The clock of all reactors of a process.

use std::sync::OnceLock;
use std::time::Instant;

/// The moment from which they count: what one of them calls a time, another calls so, too.
pub(crate) fn beginning() -> Instant {
    static BEGINNING: OnceLock<Instant> = OnceLock::new();
    *BEGINNING.get_or_init(Instant::now)
}
