//! Memory of a frontend, mapped: rings, and data that stays granted.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::ioctl::forget;
use super::wire::PAGE;
use crate::vhost_user::mapping::Other;

/// Pages of a frontend, one after the other in this process. It may change them at any time.
pub(crate) struct Pages {
    base: NonNull<u8>,
    count: usize,
    /// The device and place they were mapped from, where they are granted.
    grants: Option<(Arc<OwnedFd>, u64)>,
    /// What is granted counts among the mappings of this process.
    _counted: Option<Other>,
}

// SAFETY: the mapping belongs to no thread, and its words are atomics.
unsafe impl Send for Pages {}

impl Pages {
    /// Map granted pages that the device has noted at `index`.
    pub(crate) fn granted(
        device: Arc<OwnedFd>,
        index: u64,
        count: usize,
        counted: Other,
    ) -> io::Result<Pages> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base =
            unsafe { mmap(ptr::null_mut(), count * PAGE, protection, flags, &*device, index) };
        match base {
            Ok(base) => {
                let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
                let (grants, _counted) = (Some((device, index)), Some(counted));
                Ok(Pages { base, count, grants, _counted })
            }
            Err(error) => {
                forget(&device, index, count);
                Err(error.into())
            }
        }
    }

    /// Pages of a file that stands for a frontend's memory in tests, from the one numbered `first`.
    pub(crate) fn shared(file: impl AsFd, first: usize, count: usize) -> io::Result<Pages> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let (flags, offset) = (MapFlags::SHARED, (first * PAGE) as u64);
        // SAFETY: as in `granted`.
        let base = unsafe { mmap(ptr::null_mut(), count * PAGE, protection, flags, file, offset)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Pages { base, count, grants: None, _counted: None })
    }

    /// How many.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The 32-bit word of that number.
    #[inline]
    pub(crate) fn word(&self, number: usize) -> &AtomicU32 {
        assert!(number < self.count * PAGE / 4, "a word past the pages");
        // SAFETY: the word lies in the mapping, which lives as long as `self`; it is atomic, so the
        // frontend may change it.
        unsafe { &*self.base.as_ptr().cast::<AtomicU32>().add(number) }
    }

    /// Where a byte of a page lies.
    pub(crate) fn address(&self, page: usize, offset: usize) -> *mut u8 {
        assert!(page < self.count && offset < PAGE, "a byte past the pages");
        self.base.as_ptr().wrapping_add(page * PAGE + offset)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours; whoever was given addresses in it has ended (see `address`'s
        // callers), and references to words borrow `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.count * PAGE) };
        if let Some((device, index)) = &self.grants {
            forget(device, *index, self.count);
        }
    }
}
