//! Memory for keys: never swapped out, left out of core dumps, wiped before it is given back. A process that has had any is read by
//! no other of its user.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::atomic::{Ordering, compiler_fence};

use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use crate::PAGE;

/// Pages of their own, wiped and unmapped at the end.
struct Pages {
    base: NonNull<u8>,
    len: usize,
    locked: bool,
}

impl Pages {
    /// Zeroed pages for `len` bytes. That the kernel will not lock them (RLIMIT_MEMLOCK) is no error.
    fn new(len: usize) -> io::Result<Pages> {
        // Before there is a key. What is on the stack meanwhile, and in registers, no advice keeps out of anything.
        set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
        let too_long = || io::Error::from_raw_os_error(libc::ENOMEM);
        let len = len.max(1).checked_next_multiple_of(PAGE).ok_or_else(too_long)?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping, at an address of the kernel's choice, touches no memory in use.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, protection, flags) }?;
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(too_long)?;
        // SAFETY: the range is the mapping just made; locking changes none of its bytes.
        let locked = unsafe { rustix::mm::mlock(base.as_ptr().cast(), len) }.is_ok();
        // SAFETY: as above; this advice changes what a core dump holds, nothing else.
        let _a_core_dump_may_have_it =
            unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxDontDump) };
        Ok(Pages { base, len, locked })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let words: *mut u64 = self.base.as_ptr().cast();
        for i in 0..self.len / size_of::<u64>() {
            // SAFETY: `i` words from the page-aligned base lie inside the mapping, which is ours
            // alone. Volatile, so that the compiler does not find it pointless.
            unsafe { words.add(i).write_volatile(0) };
        }
        compiler_fence(Ordering::SeqCst);
        // SAFETY: the mapping is ours, and nothing refers to it after the owner's end.
        let _mapped_until_the_process_ends =
            unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A value on locked pages of its own. What made it may have left traces on the stack.
pub struct Locked<T> {
    pages: Pages,
    value: NonNull<T>,
}

// SAFETY: it owns its value as a box does.
unsafe impl<T: Send> Send for Locked<T> {}
// SAFETY: a shared one gives out nothing but `&T`.
unsafe impl<T: Sync> Sync for Locked<T> {}

impl<T> Locked<T> {
    /// Move a value onto locked pages.
    pub fn new(value: T) -> io::Result<Locked<T>> {
        const { assert!(align_of::<T>() <= PAGE) }
        let pages = Pages::new(size_of::<T>())?;
        let place: NonNull<T> = pages.base.cast();
        // SAFETY: the pages are large enough, aligned enough, ours, and hold no other value.
        unsafe { place.write(value) };
        Ok(Locked { pages, value: place })
    }

    /// Whether the kernel keeps it in memory.
    pub fn is_locked(&self) -> bool {
        self.pages.locked
    }
}

impl<T> Deref for Locked<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: written by `new`, dropped by `drop` only.
        unsafe { self.value.as_ref() }
    }
}

impl<T> Drop for Locked<T> {
    fn drop(&mut self) {
        // SAFETY: the value is live, and nothing uses it after this; the pages are wiped next.
        unsafe { self.value.drop_in_place() };
    }
}

/// Bytes on locked pages of their own.
pub struct LockedBytes {
    pages: Pages,
    len: usize,
}

// SAFETY: it owns its bytes as a vector does.
unsafe impl Send for LockedBytes {}
// SAFETY: a shared one gives out nothing but `&[u8]`.
unsafe impl Sync for LockedBytes {}

impl LockedBytes {
    /// So many zeros.
    pub fn zeroed(len: usize) -> io::Result<LockedBytes> {
        Ok(LockedBytes { pages: Pages::new(len)?, len })
    }

    /// The first `len` bytes only, where there are more; the rest is wiped with them.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Whether the kernel keeps them in memory.
    pub fn is_locked(&self) -> bool {
        self.pages.locked
    }
}

impl Deref for LockedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping holds at least `len` bytes, zeros at first, and is ours.
        unsafe { std::slice::from_raw_parts(self.pages.base.as_ptr(), self.len) }
    }
}

impl DerefMut for LockedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` excludes other slices.
        unsafe { std::slice::from_raw_parts_mut(self.pages.base.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::dumpable_behavior;

    #[test]
    fn who_has_had_a_key_is_not_looked_into() {
        drop(Locked::new(7).expect("memory"));
        assert_eq!(dumpable_behavior().ok(), Some(DumpableBehavior::NotDumpable));
    }

    /// The VmFlags of the mapping that holds an address, as /proc tells them.
    fn flags_at(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let mut inside = false;
        for line in maps.lines() {
            let range = line.split(' ').next().unwrap_or_default();
            if let Some((from, to)) = range.split_once('-') {
                let hex = |text| usize::from_str_radix(text, 16);
                if let (Ok(from), Ok(to)) = (hex(from), hex(to)) {
                    inside = (from..to).contains(&address);
                }
            }
            if inside && line.starts_with("VmFlags:") {
                return line.to_owned();
            }
        }
        panic!("no mapping at {address:x}")
    }

    #[test]
    fn bytes_are_locked_and_left_out_of_core_dumps() {
        let mut bytes = LockedBytes::zeroed(5000).expect("memory");
        assert_eq!(bytes.len(), 5000);
        assert!(bytes.iter().all(|byte| *byte == 0));
        bytes[4999] = 7;
        let flags = flags_at(bytes.as_ptr() as usize);
        assert!(flags.contains(" dd"), "{flags}");
        assert_eq!(flags.contains(" lo"), bytes.is_locked(), "{flags}");
        bytes.truncate(3);
        assert_eq!(*bytes, [0; 3]);
    }

    #[test]
    fn a_value_is_dropped_once() {
        struct Count<'a>(&'a std::cell::Cell<u32>, [u64; 1000]);
        impl Drop for Count<'_> {
            fn drop(&mut self) {
                self.0.set(self.0.get() + 1);
            }
        }
        let drops = std::cell::Cell::new(0);
        let value = Locked::new(Count(&drops, [5; 1000])).expect("memory");
        assert_eq!(value.1, [5; 1000]);
        assert_eq!(drops.get(), 0);
        drop(value);
        assert_eq!(drops.get(), 1);
    }
}
