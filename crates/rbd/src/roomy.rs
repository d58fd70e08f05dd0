//! Calls of librbd that take more stack than a server's threads have: opening an image ends in a fault with 256 KiB.

use std::panic::resume_unwind;
use std::thread::{self, Builder};

const STACK: usize = 4 << 20;

/// Do it on a thread with room, and wait for it. None, and nothing is done, where none can be begun.
pub(crate) fn with_room<T: Send>(what: impl FnOnce() -> T + Send) -> Option<T> {
    thread::scope(|scope| {
        let begun = Builder::new().name("rbd".into()).stack_size(STACK).spawn_scoped(scope, what);
        let thread = begun.ok()?;
        Some(thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// The same of what may fail.
pub(crate) fn tried<T: Send>(what: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    let none = || Err("no thread can be begun for it: the process has as many as it may".into());
    with_room(what).unwrap_or_else(none)
}
