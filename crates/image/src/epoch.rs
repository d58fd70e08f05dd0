//! How long freed room must rest: until every request has ended that may have seen it in use.
//!
//! Time is cut into epochs. A request counts itself into the epoch in which it begins, on a counter of
//! its own queue thread; an epoch begins only when the last but one has no request left. What is freed
//! in epoch `n` may be used again from epoch `n + 2` on.

use std::sync::{Arc, PoisonError, Weak};

use ringtap_io::Event;
use ringtap_io::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use ringtap_io::sync::{Mutex, broken};

/// The epochs of one image.
#[derive(Debug, Default)]
pub struct Epochs {
    epoch: AtomicU64,
    threads: Mutex<Vec<Weak<InFlight>>>,
    /// A request has ended.
    ended: Event,
}

/// The requests that one queue thread has in flight, on a cache line of its own.
#[derive(Debug)]
#[repr(align(128))]
pub struct InFlight {
    epochs: Arc<Epochs>,
    /// By the epoch's parity.
    counts: [AtomicU32; 2],
}

/// Held by a request while it is in flight.
#[derive(Debug)]
pub struct Ticket<'a> {
    count: &'a AtomicU32,
    epochs: &'a Epochs,
}

impl Drop for Ticket<'_> {
    #[inline]
    fn drop(&mut self) {
        self.count.fetch_sub(1, SeqCst);
        if !broken("ended in silence") {
            self.epochs.ended.notify();
        }
    }
}

impl InFlight {
    /// A request begins.
    #[inline]
    pub fn enter(&self) -> Ticket<'_> {
        loop {
            let epoch = self.epochs.epoch.load(SeqCst);
            let count = &self.counts[(epoch & 1) as usize];
            count.fetch_add(1, SeqCst);
            let ticket = Ticket { count, epochs: &self.epochs };
            // Else the epoch had ended before we were counted, and nobody waited for us.
            if self.epochs.epoch.load(SeqCst) == epoch || broken("epoch not seen again") {
                return ticket;
            }
        }
    }
}

impl Epochs {
    /// A counter for another queue thread.
    pub fn add_thread(self: &Arc<Epochs>) -> Arc<InFlight> {
        let thread = Arc::new(InFlight { epochs: self.clone(), counts: Default::default() });
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| thread.strong_count() > 0);
        threads.push(Arc::downgrade(&thread));
        thread
    }

    /// The present epoch, to note beside what is freed now.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(SeqCst)
    }

    /// Whether every request has ended that was in flight in `epoch`. Asking also moves time on.
    pub fn is_over(&self, epoch: u64) -> bool {
        let rest = if broken("rest of one epoch") { 1 } else { 2 };
        while self.epoch() < epoch + rest {
            if !self.advance() {
                return false;
            }
        }
        true
    }

    /// Wait for that. Who holds a ticket of its own waits for ever.
    pub async fn over(&self, epoch: u64) {
        loop {
            let ended = self.ended.listen();
            if self.is_over(epoch) {
                return;
            }
            ended.await;
        }
    }

    /// See [`crate::Image::abandon`].
    pub fn abandon(&self) {
        self.ended.close();
    }

    fn advance(&self) -> bool {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let next = self.epoch.load(SeqCst) + 1;
        let free = threads
            .iter()
            .filter_map(Weak::upgrade)
            .all(|thread| thread.counts[(next & 1) as usize].load(SeqCst) == 0);
        if free {
            self.epoch.store(next, SeqCst);
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rest_lasts_until_older_requests_have_ended() {
        let epochs = Arc::new(Epochs::default());
        let (one, two) = (epochs.add_thread(), epochs.add_thread());
        let old = one.enter();
        let freed = epochs.epoch();
        assert!(!epochs.is_over(freed));
        let young = two.enter();
        assert!(!epochs.is_over(freed));
        drop(old);
        assert!(epochs.is_over(freed));
        // The young one began after the freeing, and holds up only what is freed from now on.
        let freed = epochs.epoch();
        assert!(!epochs.is_over(freed));
        drop(young);
        assert!(epochs.is_over(freed));
    }

    #[test]
    fn a_thread_that_left_holds_up_nothing() {
        let epochs = Arc::new(Epochs::default());
        let thread = epochs.add_thread();
        std::mem::forget(thread.enter());
        assert!(!epochs.is_over(epochs.epoch()));
        drop(thread);
        assert!(epochs.is_over(epochs.epoch()));
    }
}
