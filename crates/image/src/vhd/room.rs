//! The room of a dynamic VHD's file, and what is in flight in it.

use std::collections::HashMap;

use super::BLOCK_ALIGN;
use super::footer::SECTOR;
use crate::Container;

/// The file's room and what is in flight in it.
pub(super) struct Room {
    /// Where the last structure or block ends.
    pub(super) data_end: u64,
    /// Where the next block's part of the grid begins.
    pub(super) next: u64,
    /// Where the room ends that the file has.
    pub(super) end: u64,
    /// Up to where what a device held there has made way for zeros.
    pub(super) clean: u64,
    /// The file is as long as its last writer left it: there may be anything behind the last block.
    pub(super) untouched: bool,
    pub(super) growing: bool,
    /// Whether a footer ends the file.
    pub(super) tail: bool,
    /// Blocks that have a place, and nobody can see them.
    pub(super) pending: HashMap<u32, Pending>,
    /// Writes in flight to places that were allocated for them.
    pub(super) writes: HashMap<u64, Write>,
    pub(super) last_write: u64,
    /// Blocks whose entries the table on the disk lacks.
    pub(super) new: Vec<u32>,
    /// As `new`, but a flush that failed may have written the entries.
    pub(super) doubtful: Vec<u32>,
    /// Older blocks whose bitmaps on the disk lack bits.
    pub(super) changed: Vec<u32>,
    /// Writes that ended in places allocated for them.
    pub(super) commits: u64,
}

/// A block's place before its first write is visible.
#[derive(Clone, Copy)]
pub(super) struct Pending {
    /// Where its bitmap begins.
    pub(super) place: u64,
    /// Whether it held zeros, and is to be taken as a whole.
    pub(super) fresh: bool,
    /// Whether a write to it failed, and may have left bytes there.
    pub(super) stained: bool,
}

/// A write in flight.
pub(super) struct Write {
    pub(super) block: u32,
    /// Sectors of the block.
    pub(super) first: u64,
    pub(super) end: u64,
    /// Whether it changes a part of a sector, and writes the rest back.
    pub(super) partial: bool,
}

impl Room {
    pub(super) fn new(container: &Container, data_end: u64, tail: bool) -> Room {
        let next = data_end.next_multiple_of(BLOCK_ALIGN);
        let regular = container.traits().regular;
        // A device's footer is at its end and stays there.
        let end = if regular { next } else { container.len().saturating_sub(SECTOR) };
        Room {
            data_end,
            next,
            end,
            clean: if regular { u64::MAX } else { next },
            untouched: regular,
            growing: false,
            tail,
            pending: HashMap::new(),
            writes: HashMap::new(),
            last_write: 0,
            new: Vec::new(),
            doubtful: Vec::new(),
            changed: Vec::new(),
            commits: 0,
        }
    }

    /// Writes to places allocated for them that have not ended.
    pub(super) fn writes_in_flight(&self) -> u64 {
        self.writes.len() as u64
    }

    pub(super) fn disturbed(&self, block: u32, first: u64, end: u64, partial: bool) -> bool {
        self.writes.values().any(|write| {
            write.block == block
                && write.first < end
                && first < write.end
                && (write.partial || partial)
        })
    }
}
