//! Calls of librbd that take more stack than a server's threads have: opening an image ends in a fault with 256 KiB.

use std::panic::resume_unwind;
use std::thread::{self, Builder};

const STACK: usize = 4 << 20;

/// Do it on a thread with room, and wait for it; where none can be begun, here.
pub(crate) fn with_room<T: Send>(what: impl Fn() -> T + Sync) -> T {
    thread::scope(|scope| {
        let begun = Builder::new().name("rbd".into()).stack_size(STACK).spawn_scoped(scope, &what);
        match begun {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(_) => what(),
        }
    })
}
