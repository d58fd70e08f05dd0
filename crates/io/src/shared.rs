//! Memory that outlives the process: a file on tmpfs, mapped.

use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Words of a file that is mapped shared: what is stored in them is in the file at once, and stays
/// there when the process is killed.
#[derive(Debug)]
pub struct SharedWords {
    base: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the mapping belongs to no thread, and its words are atomics.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Map the first `count` words of a file, which is made long enough. Nobody may make it shorter
    /// while it is mapped: keep it where only this user may write.
    pub fn map(file: &File, count: usize) -> io::Result<SharedWords> {
        SharedWords::map_parts(file, count, std::iter::once(0..count))
    }

    /// The same with space for these parts alone: others must not be touched before they have some, by
    /// [`SharedWords::take_space`].
    pub fn map_parts(
        file: &File,
        count: usize,
        parts: impl IntoIterator<Item = Range<usize>>,
    ) -> io::Result<SharedWords> {
        let bytes = count.max(1).checked_mul(8).ok_or(io::ErrorKind::InvalidInput)?;
        if file.metadata()?.len() < bytes as u64 {
            file.set_len(bytes as u64)?;
        }
        parts.into_iter().try_for_each(|part| SharedWords::take_space(file, part))?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(SharedWords { base, count })
    }

    /// Give words of a file space: a full tmpfs would be a SIGBUS later.
    pub fn take_space(file: &File, words: Range<usize>) -> io::Result<()> {
        if words.is_empty() {
            return Ok(());
        }
        let [offset, len] = [words.start, words.len()].map(|count| 8 * count as u64);
        // A signal interrupts it, and so does what a ring has for this thread to do.
        let none = rustix::fs::FallocateFlags::empty();
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, none, offset, len))?;
        Ok(())
    }
}

impl Deref for SharedWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: `count` words are mapped from `base`, page-aligned, until drop; other processes may
        // change them, which atomics allow.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.count) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `map` made, and no reference to it is left.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.count.max(1) * 8) };
    }
}
