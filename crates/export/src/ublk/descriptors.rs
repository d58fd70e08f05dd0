//! The descriptors that the driver writes and a queue reads, in memory they share.

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::wire::{DESCRIPTOR, Descriptor, descriptors_of};

/// The descriptors of one queue, one a slot.
pub(crate) struct Descriptors {
    base: NonNull<u8>,
    len: usize,
    depth: u16,
}

impl Descriptors {
    pub(crate) fn map(device: impl AsFd, queue: u16, depth: u16) -> io::Result<Descriptors> {
        let (offset, len) = descriptors_of(queue, depth);
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping, read-only, at an address of the kernel's choice.
        let base = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, flags, device, offset)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Descriptors { base, len, depth })
    }

    /// The request that slot `tag` was given. Only between its fetch's end and its answer.
    pub(crate) fn get(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "a slot that is not");
        let at = self.base.as_ptr().wrapping_add(usize::from(tag) * DESCRIPTOR);
        // SAFETY: the descriptor lies in the mapping, which is aligned to pages, at a multiple of 8;
        // the driver wrote it before the fetch ended and does not until the answer.
        unsafe {
            Descriptor {
                op_flags: ptr::read_volatile(at.cast()),
                sectors: ptr::read_volatile(at.wrapping_add(4).cast()),
                start: ptr::read_volatile(at.wrapping_add(8).cast()),
            }
        }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours, and nothing points into it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}
