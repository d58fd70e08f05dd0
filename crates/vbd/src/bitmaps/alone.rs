//! Changes of a disk's bitmaps, one after the other: each begins from what the one before has left.

use crate::Disk;

/// While it lives, nobody else changes the disk's bitmaps.
pub struct BitmapsAlone(Disk);

impl Drop for BitmapsAlone {
    fn drop(&mut self) {
        self.0.shared.medium.bitmaps.turns.end();
    }
}

impl Disk {
    /// Wait until nobody else changes its bitmaps. Not while the disk stands still by the same caller: who changes
    /// them has it stand still.
    pub async fn bitmaps_alone(&self) -> BitmapsAlone {
        self.shared.medium.bitmaps.turns.take().await;
        BitmapsAlone(self.clone())
    }
}
