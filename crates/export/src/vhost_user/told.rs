//! What a front-end does again and again, in the log: only so often in a time.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use ringtap_vbd::Seldom;

/// Of one socket: a front-end that comes again has no more for that.
#[derive(Debug, Default)]
pub(crate) struct Told(Mutex<Seldom>);

impl Told {
    /// Whether one more is logged.
    #[cold]
    pub(crate) fn admits(&self) -> bool {
        let mut seldom = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (admitted, count) = seldom.admit(Instant::now());
        drop(seldom);
        if count > 0 {
            tracing::warn!(count, "front-ends did more that was not logged one by one");
        }
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_are_told_of() {
        let told = Told::default();
        let admitted = (0..1000).filter(|_| told.admits()).count();
        // Ten more where the machine has stood still for as many seconds.
        assert!((10..100).contains(&admitted), "{admitted}");
    }
}
