//! Who may write while a block is read, changed and written back.
//!
//! Whole-block writes go through side by side; each queue thread counts its own, so that they share
//! nothing. A partial write shuts the gate and waits until none is under way: else it could write
//! back old bytes over those of a write that landed between its read and its write.

use std::sync::{Arc, PoisonError, Weak};

use ringtap_io::Io;
use ringtap_io::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use ringtap_io::sync::{Mutex, broken};

/// How long to wait before looking again. Partial writes are rare; looking costs nothing to others.
const PAUSE: u64 = 20_000;

#[derive(Default)]
pub(crate) struct Gate {
    shut: AtomicBool,
    writers: Mutex<Vec<Weak<Writers>>>,
}

/// The whole-block writes that one queue thread has under way, on a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Writers(AtomicU32);

pub(crate) struct Ticket<'a>(&'a Writers);

impl Drop for Ticket<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, SeqCst);
    }
}

/// While it lives nobody else writes.
pub(crate) struct Alone<'a>(&'a Gate);

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.shut.store(false, SeqCst);
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
    pub(crate) async fn enter<'a>(&self, writers: &'a Writers, io: &Io) -> Ticket<'a> {
        loop {
            // Counted first, looked at second; `alone` shuts first and counts second. One of the
            // two sees the other.
            let early = broken("gate looked at first").then(|| self.shut.load(SeqCst));
            writers.0.fetch_add(1, SeqCst);
            let ticket = Ticket(writers);
            if !early.unwrap_or_else(|| self.shut.load(SeqCst)) {
                return ticket;
            }
            drop(ticket);
            io.sleep(PAUSE).await;
        }
    }

    /// Wait until nobody else writes, and keep it so.
    pub(crate) async fn alone(&self, io: &Io) -> Alone<'_> {
        while self.shut.compare_exchange(false, true, SeqCst, SeqCst).is_err() {
            io.sleep(PAUSE).await;
        }
        let alone = Alone(self);
        while self.writes_under_way() > 0 && !broken("gate not waited at") {
            io.sleep(PAUSE).await;
        }
        alone
    }

    fn writes_under_way(&self) -> u32 {
        let all = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).map(|writers| writers.0.load(SeqCst)).sum()
    }
}
