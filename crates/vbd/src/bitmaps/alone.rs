//! Changes of a disk's bitmaps, one after the other: each begins from what the one before has left.

use ringtap_io::Event;
use ringtap_io::sync::atomic::{AtomicBool, Ordering::SeqCst};

use crate::Disk;

/// Whose turn it is.
#[derive(Default)]
pub(super) struct Turns {
    taken: AtomicBool,
    over: Event,
}

/// While it lives, nobody else changes the disk's bitmaps.
pub struct BitmapsAlone(Disk);

impl Drop for BitmapsAlone {
    fn drop(&mut self) {
        let turns = &self.0.shared.medium.bitmaps.turns;
        turns.taken.store(false, SeqCst);
        turns.over.notify();
    }
}

impl Disk {
    /// Wait until nobody else changes its bitmaps. Not while the disk stands still by the same caller: who changes
    /// them has it stand still.
    pub async fn bitmaps_alone(&self) -> BitmapsAlone {
        let turns = &self.shared.medium.bitmaps.turns;
        loop {
            let over = turns.over.listen();
            if !turns.taken.swap(true, SeqCst) {
                return BitmapsAlone(self.clone());
            }
            over.await;
        }
    }
}
