//! The memory that requests carry: one page-aligned buffer per slot.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ptr::{self, NonNull};

const PAGE: usize = 4096;

/// Buffers of equal length in one block of memory.
pub struct Buffers {
    base: NonNull<u8>,
    stride: usize,
    len: usize,
    slots: usize,
    owned: bool,
}

// SAFETY: the memory belongs to this value alone (or to the blkio region it was carved from, of
// which no other part is handed out), so it may move to another thread with it.
unsafe impl Send for Buffers {}

impl Buffers {
    /// Bytes that `slots` buffers of `len` bytes take.
    pub fn bytes(len: usize, slots: usize) -> usize {
        len.next_multiple_of(PAGE) * slots
    }

    /// Anonymous memory, unmapped on drop.
    pub fn anonymous(len: usize, slots: usize) -> std::io::Result<Buffers> {
        let bytes = Buffers::bytes(len, slots);
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::POPULATE,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let stride = len.next_multiple_of(PAGE);
        Ok(Buffers { base, stride, len, slots, owned: true })
    }

    /// Buffers in memory that somebody else frees.
    ///
    /// # Safety
    /// `base` must be page-aligned, at least [`Buffers::bytes`] long, used by nobody else, and
    /// outlive the value returned.
    pub unsafe fn within(base: NonNull<u8>, len: usize, slots: usize) -> Buffers {
        let stride = len.next_multiple_of(PAGE);
        Buffers { base, stride, len, slots, owned: false }
    }

    /// Length of each buffer in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Where the buffer of `slot` begins.
    pub fn pointer(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.slots);
        // SAFETY: slot < slots, so the result stays inside the block.
        unsafe { self.base.as_ptr().add(slot * self.stride) }
    }

    /// The buffer of a slot that is not in flight.
    pub fn slice(&mut self, slot: usize) -> &mut [u8] {
        let pointer = self.pointer(slot);
        // SAFETY: `pointer` begins `stride >= len` mapped bytes that no other slot shares. A device
        // may write there only while the slot is in flight, when the load loop does not call this;
        // a hostile server could, and would then fail its own verification.
        unsafe { std::slice::from_raw_parts_mut(pointer, self.len) }
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: maps exactly what `anonymous` mapped; no borrow of it can be alive here.
            let _ = unsafe { munmap(self.base.as_ptr().cast(), self.stride * self.slots) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_apart_and_aligned() {
        let mut buffers = Buffers::anonymous(512, 3).unwrap();
        for slot in 0..3 {
            buffers.slice(slot).fill(slot as u8 + 1);
        }
        for slot in 0..3 {
            assert_eq!(buffers.pointer(slot) as usize % PAGE, 0);
            assert!(buffers.slice(slot).iter().all(|&b| b == slot as u8 + 1));
        }
    }
}
