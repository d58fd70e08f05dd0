//! Handles of open files: small and `Copy` on the hot path, closed by their one owner.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::Witness;

/// A handle of an open file, valid on every queue thread while its [`OpenFile`] lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct File {
    slot: u32,
    generation: u32,
}

impl File {
    /// A handle that only a reactor other than [`crate::Ring`] knows.
    pub fn from_parts(slot: u32, generation: u32) -> File {
        File { slot, generation }
    }

    /// A handle of what is no descriptor, by its place in a table of its own.
    pub(crate) fn elsewhere(place: u32, generation: u32) -> File {
        File { slot: ELSEWHERE | place, generation }
    }

    /// Whether it is no descriptor of this machine: see [`crate::Remote`].
    #[inline]
    pub fn is_elsewhere(self) -> bool {
        self.slot & ELSEWHERE != 0
    }

    pub(crate) fn place_elsewhere(self) -> u32 {
        self.slot & !ELSEWHERE
    }

    /// Its place in the table of open files.
    pub fn slot(self) -> u32 {
        self.slot
    }

    /// How often that place was used before.
    pub fn generation(self) -> u32 {
        self.generation
    }

    /// The descriptor behind the handle, while it is open.
    pub(crate) fn raw_fd(self) -> Option<RawFd> {
        self.look(|slot| slot.fd).flatten()
    }

    /// How its transfers behave, as its owner said.
    pub(crate) fn nature(self) -> Nature {
        self.look(|slot| slot.nature).unwrap_or_default()
    }

    /// Who notes its changes, where somebody does.
    pub(crate) fn witness(self) -> Option<Arc<Witness>> {
        self.look(|slot| slot.witness.clone()).flatten()
    }

    fn look<T>(self, at: impl FnOnce(&Slot) -> T) -> Option<T> {
        let table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = table.get(self.slot as usize)?;
        (slot.generation == self.generation).then(|| at(slot))
    }
}

/// Set in the slot of what is no descriptor.
const ELSEWHERE: u32 = 1 << 31;

/// How the transfers of a file behave, where that asks for more than the usual.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Nature {
    /// It is an image's: others may wait for it to be closed.
    pub image: bool,
    /// Its bytes are in memory (tmpfs): no transfer waits for a device.
    pub in_memory: bool,
    /// Writes end in the page cache, which io_uring leaves to its workers on most file systems.
    pub page_cache: bool,
}

struct Slot {
    generation: u32,
    fd: Option<RawFd>,
    nature: Nature,
    witness: Option<Arc<Witness>>,
}

static TABLE: Mutex<Vec<Slot>> = Mutex::new(Vec::new());

/// An open file of the process, listed so that every ring can find it by its [`File`].
#[derive(Debug)]
pub struct OpenFile {
    fd: OwnedFd,
    handle: File,
}

impl OpenFile {
    /// List a descriptor; it closes when the value drops.
    pub fn new(fd: OwnedFd) -> OpenFile {
        let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        let free = table.iter().position(|slot| slot.fd.is_none());
        let slot = free.unwrap_or_else(|| {
            table.push(Slot { generation: 0, fd: None, nature: Nature::default(), witness: None });
            table.len() - 1
        });
        table[slot].fd = Some(fd.as_raw_fd());
        table[slot].nature = Nature::default();
        table[slot].witness = None;
        let handle = File { slot: slot as u32, generation: table[slot].generation };
        OpenFile { fd, handle }
    }

    /// Say how the file's transfers behave. Before its first operation.
    pub fn set_nature(&self, nature: Nature) {
        let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = table.get_mut(self.handle.slot as usize) {
            slot.nature = nature;
        }
    }

    /// Have every change of the file noted. Before its first operation.
    pub fn set_witness(&self, witness: Arc<Witness>) {
        let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = table.get_mut(self.handle.slot as usize) {
            slot.witness = Some(witness);
        }
    }

    /// The handle operations take.
    pub fn handle(&self) -> File {
        self.handle
    }
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = table.get_mut(self.handle.slot as usize) {
            slot.fd = None;
            slot.witness = None;
            slot.generation = slot.generation.wrapping_add(1);
        }
    }
}
