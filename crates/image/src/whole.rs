//! Locks of what a panic may leave half changed.

use ringtap_io::Panic;
use ringtap_io::sync::{Mutex, MutexGuard};

/// Lock it. What a thread left half changed as it panicked nobody looks at again, and nobody writes to the
/// image by it: whoever wants to panics as well, without a further report, and its request fails.
pub(crate) fn whole<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.lock() {
        Ok(guard) => guard,
        Err(_) => Panic::of("a panic left this image half changed in memory").pass_on(),
    }
}
