//! What all who use a dynamic VHD have of it.

use std::sync::OnceLock;

use ringtap_io::Event;
use ringtap_io::sync::atomic::{AtomicBool, AtomicU32, Ordering::Acquire};
use ringtap_io::sync::{Mutex, MutexGuard};

use super::bitmap::Bitmaps;
use super::footer::{Footer, SECTOR};
use super::header::{Header, UNUSED};
use super::room::Room;
use super::sabotage::Sabotage;
use crate::group_commit::GroupCommit;
use crate::lower::Lower;
use crate::whole::whole;
use crate::{Container, Info, RestartLog};

pub(super) struct Shared {
    pub(super) container: Container,
    pub(super) info: Info,
    pub(super) footer: Footer,
    pub(super) header: Header,
    /// Blocks have this many bytes as a power of two.
    pub(super) shift: u32,
    /// Where each block begins in the file, in sectors.
    pub(super) table: Box<[AtomicU32]>,
    pub(super) bitmaps: Bitmaps,
    pub(super) parent: Lower,
    pub(super) room: Mutex<Room>,
    /// Where changes are kept over a killed server.
    pub(super) restart: OnceLock<RestartLog>,
    pub(super) dirty: AtomicBool,
    pub(super) flushes: GroupCommit,
    /// A write to a place allocated for it has ended, or the file was made longer.
    pub(super) settled: Event,
    #[cfg(feature = "sabotage")]
    pub(super) sabotage: Option<Sabotage>,
}

impl Shared {
    pub(super) fn room(&self) -> MutexGuard<'_, Room> {
        whole(&self.room)
    }

    pub(super) fn block_size(&self) -> u64 {
        u64::from(self.header.block_size)
    }

    /// The block with the byte at `offset` of the disk, and that byte's place in it.
    #[inline]
    pub(super) fn block_of(&self, offset: u64) -> (u32, u64) {
        ((offset >> self.shift) as u32, offset & (self.block_size() - 1))
    }

    /// Where the block begins in the file: with its bitmap.
    #[inline]
    pub(super) fn place_of(&self, block: u32) -> Option<u64> {
        let entry = self.table.get(block as usize)?.load(Acquire);
        (entry != UNUSED).then(|| u64::from(entry) * SECTOR)
    }

    #[cfg(feature = "sabotage")]
    pub(super) fn sabotaged(&self, how: Sabotage) -> bool {
        self.sabotage == Some(how)
    }

    #[cfg(not(feature = "sabotage"))]
    pub(super) fn sabotaged(&self, _: Sabotage) -> bool {
        false
    }
}
