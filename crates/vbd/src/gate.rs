//! Who may write while a block is read, changed and written back.
//!
//! Whole-block writes go through side by side; each queue thread counts its own, so that they share
//! nothing. A partial write shuts the gate and waits until none is in flight: else it could write
//! back old bytes over those of a write that landed between its read and its write.

use std::sync::{Arc, PoisonError, Weak};

use ringtap_io::Event;
use ringtap_io::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use ringtap_io::sync::{Mutex, broken};

#[derive(Default)]
pub(crate) struct Gate {
    shut: AtomicBool,
    opened: Event,
    /// A whole-block write has ended while the gate was shut.
    left: Event,
    writers: Mutex<Vec<Weak<Writers>>>,
}

/// The whole-block writes that one queue thread has in flight, on a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Writers(AtomicU32);

pub(crate) struct Ticket<'a> {
    gate: &'a Gate,
    writers: &'a Writers,
}

impl Drop for Ticket<'_> {
    #[inline]
    fn drop(&mut self) {
        // Who shuts the gate does that first and counts second.
        self.writers.0.fetch_sub(1, SeqCst);
        if self.gate.shut.load(SeqCst) && !broken("gate left in silence") {
            self.gate.left.notify();
        }
    }
}

/// While it lives nobody else writes.
pub(crate) struct Alone<'a>(&'a Gate);

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.shut.store(false, SeqCst);
        self.0.opened.notify();
    }
}

impl Gate {
    pub(crate) fn add_writers(&self) -> Arc<Writers> {
        let writers = Arc::new(Writers::default());
        let mut all = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|writers| writers.strong_count() > 0);
        all.push(Arc::downgrade(&writers));
        writers
    }

    /// Begin a whole-block write.
    #[inline]
    pub(crate) async fn enter<'a>(&'a self, writers: &'a Writers) -> Ticket<'a> {
        match self.try_enter(writers) {
            Some(ticket) => ticket,
            None => self.enter_later(writers).await,
        }
    }

    #[cold]
    async fn enter_later<'a>(&'a self, writers: &'a Writers) -> Ticket<'a> {
        loop {
            let opened = self.opened.listen();
            if let Some(ticket) = self.try_enter(writers) {
                return ticket;
            }
            opened.await;
        }
    }

    #[inline]
    fn try_enter<'a>(&'a self, writers: &'a Writers) -> Option<Ticket<'a>> {
        // Counted first, looked at second; `alone` shuts first and counts second. One of the
        // two sees the other.
        let early = broken("gate looked at first").then(|| self.shut.load(SeqCst));
        writers.0.fetch_add(1, SeqCst);
        let ticket = Ticket { gate: self, writers };
        let shut = early.unwrap_or_else(|| self.shut.load(SeqCst));
        (!shut).then_some(ticket)
    }

    /// Wait until nobody else writes, and keep it so.
    pub(crate) async fn alone(&self) -> Alone<'_> {
        loop {
            let opened = self.opened.listen();
            if self.shut.compare_exchange(false, true, SeqCst, SeqCst).is_ok() {
                break;
            }
            opened.await;
        }
        let alone = Alone(self);
        loop {
            let left = self.left.listen();
            if self.writes_in_flight() == 0 || broken("gate not waited at") {
                return alone;
            }
            left.await;
        }
    }

    /// The disk is stopped: see [`ringtap_image::Image::abandon`].
    pub(crate) fn abandon(&self) {
        self.opened.close();
        self.left.close();
    }

    fn writes_in_flight(&self) -> u32 {
        let all = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).map(|writers| writers.0.load(SeqCst)).sum()
    }
}
