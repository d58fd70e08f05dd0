//! Whether an image that is being closed is still waited for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};

const CLOSES: u8 = 0;
const CLOSED: u8 = 1;
const GIVEN_UP: u8 = 2;

/// Whether an image that is being closed is waited for: who closes it, and who waits, agree on that.
#[derive(Clone, Default)]
pub(crate) struct Closing(Arc<AtomicU8>);

impl Closing {
    /// It is closed; whether it was waited for until then.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.end(CLOSED)
    }

    /// It is waited for no more; false where it has been closed.
    pub(super) fn give_up(&self) -> bool {
        self.end(GIVEN_UP)
    }

    /// Whether that has been said already.
    pub(super) fn is_closed(&self) -> bool {
        self.0.load(SeqCst) == CLOSED
    }

    fn end(&self, how: u8) -> bool {
        self.0.compare_exchange(CLOSES, how, SeqCst, SeqCst).is_ok()
    }
}
