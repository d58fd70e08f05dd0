//! A window of memory that an operation reads or writes: guest iovecs, or one buffer.

use std::ptr;

use crate::File;

/// A window of memory: `len` bytes, either contiguous or spread over iovecs, or the kernel's own:
/// a buffer that only reads and writes of the ring it is registered with can touch, or a pipe.
///
/// It is `Copy` and narrows without touching the iovecs; the reactor trims them when it must.
#[derive(Clone, Copy, Debug)]
pub struct Mem {
    /// The iovec array where `count` > 0, the place in the kernel's buffer where it is `KERNEL`,
    /// else the memory itself.
    base: *const u8,
    count: u32,
    /// Bytes of the first iovecs that lie before the window; the index of the kernel's buffer, or the
    /// file of the pipe.
    skip: usize,
    len: usize,
}

/// What `count` is of a window over the kernel's memory; no request has so many iovecs.
const KERNEL: u32 = u32::MAX;
/// What `count` is of a window over a pipe.
const PIPE: u32 = KERNEL - 1;

/// A piece of memory of a window: where it is, and its bytes.
pub type Piece = (*mut u8, usize);

impl Mem {
    /// No memory.
    pub const EMPTY: Mem = Mem { base: ptr::null(), count: 0, skip: 0, len: 0 };

    /// A window over all of `iovecs`.
    ///
    /// # Safety
    /// The array and the memory it names stay valid, for reads and writes, for as long as this value
    /// or a copy of it is used, and until every operation that was given one has completed. Others
    /// (a guest) may change the bytes meanwhile.
    pub unsafe fn from_iovecs(iovecs: &[libc::iovec]) -> Mem {
        let len = iovecs.iter().map(|iov| iov.iov_len).sum();
        match iovecs {
            [] => Mem::EMPTY,
            // SAFETY: the caller's promise is the one asked here.
            [one] => unsafe { Mem::from_raw(one.iov_base.cast(), len) },
            _ => Mem { base: iovecs.as_ptr().cast(), count: iovecs.len() as u32, skip: 0, len },
        }
    }

    /// A window over contiguous memory.
    ///
    /// # Safety
    /// As for [`Mem::from_iovecs`].
    pub unsafe fn from_raw(base: *mut u8, len: usize) -> Mem {
        Mem { base, count: 0, skip: 0, len }
    }

    /// A window over the first `len` bytes of a buffer that the kernel registers with a ring, at
    /// `index`. Nobody can look at it: see [`Mem::is_kernels`].
    pub fn of_kernel(index: u16, len: usize) -> Mem {
        Mem { base: ptr::null(), count: KERNEL, skip: index.into(), len }
    }

    /// The next `len` bytes of a pipe, by its end for writing where a file is read into it, by its end
    /// for reading where they are sent. Nothing is copied: the pipe holds pages of the file's. A
    /// window that does not begin at its start is what is left when so much has been moved.
    pub fn of_pipe(end: File, len: usize) -> Mem {
        let end = u64::from(end.slot()) << 32 | u64::from(end.generation());
        Mem { base: ptr::null(), count: PIPE, skip: end as usize, len }
    }

    /// Whether it is the kernel's: its bytes can be read from files and written to them, not
    /// copied, changed or zeroed here.
    #[inline]
    pub fn is_kernels(&self) -> bool {
        self.count >= PIPE
    }

    /// The end of a pipe.
    #[inline]
    pub(crate) fn pipe(&self) -> Option<File> {
        let end = self.skip as u64;
        (self.count == PIPE).then(|| File::from_parts((end >> 32) as u32, end as u32))
    }

    /// The index of a kernel's buffer, and where in it the window begins.
    #[inline]
    pub(crate) fn registered(&self) -> Option<(u16, *mut u8)> {
        (self.count == KERNEL).then_some((self.skip as u16, self.base.cast_mut()))
    }

    /// Bytes in the window.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the window has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The part of the window from `offset`, `len` bytes at most.
    #[inline]
    pub fn window(&self, offset: usize, len: usize) -> Mem {
        let offset = offset.min(self.len);
        let len = len.min(self.len - offset);
        if self.count == 0 || self.is_kernels() {
            return Mem { base: self.base.wrapping_add(offset), len, ..*self };
        }
        Mem { skip: self.skip + offset, len, ..*self }
    }

    /// The address where the window is contiguous.
    #[inline]
    pub(crate) fn contiguous(&self) -> Option<*mut u8> {
        (self.count == 0).then_some(self.base.cast_mut())
    }

    /// The iovecs as they stand, where the window covers all of them.
    pub(crate) fn whole_iovecs(&self) -> Option<&[libc::iovec]> {
        if self.is_kernels() {
            return None;
        }
        let all = self.iovecs();
        let total: usize = all.iter().map(|iov| iov.iov_len).sum();
        (self.count > 0 && self.skip == 0 && total == self.len).then_some(all)
    }

    fn iovecs(&self) -> &[libc::iovec] {
        if self.count == 0 || self.is_kernels() {
            return &[];
        }
        // SAFETY: `base` and `count` are those of the array given to `from_iovecs`, which promised
        // that it stays valid while this value is used.
        unsafe { std::slice::from_raw_parts(self.base.cast(), self.count as usize) }
    }

    /// Call `each` with every piece of memory of the window, in order.
    #[inline]
    pub fn pieces(&self, mut each: impl FnMut(Piece)) {
        if let Some(base) = self.contiguous() {
            if self.len > 0 {
                each((base, self.len));
            }
            return;
        }
        let (mut skip, mut left) = (self.skip, self.len);
        for iov in self.iovecs() {
            if left == 0 {
                break;
            }
            if skip >= iov.iov_len {
                skip -= iov.iov_len;
                continue;
            }
            let len = (iov.iov_len - skip).min(left);
            each((iov.iov_base.cast::<u8>().wrapping_add(skip), len));
            left -= len;
            skip = 0;
        }
    }

    /// Whether every piece starts and ends at a multiple of `align` (a power of two).
    #[inline]
    pub fn is_aligned(&self, align: usize) -> bool {
        let mask = align.wrapping_sub(1);
        if self.is_kernels() {
            // Its pages are laid as its driver was told; only the window's place in it is ours.
            return (self.base as usize | self.len) & mask == 0;
        }
        if self.count == 0 {
            return (self.base as usize | self.len) & mask == 0;
        }
        let mut bits = 0;
        self.pieces(|(base, len)| bits |= base as usize | len);
        bits & mask == 0
    }

    /// Copy the window's first bytes into `to`; gives the number copied.
    pub fn copy_to(&self, to: &mut [u8]) -> usize {
        let mut at = 0;
        self.window(0, to.len()).pieces(|(base, len)| {
            // SAFETY: the piece is valid memory (promise of the constructor) and the window is no
            // longer than `to`, so `at + len` stays inside it.
            unsafe { ptr::copy(base, to.as_mut_ptr().add(at), len) };
            at += len;
        });
        at
    }

    /// Copy `from` to the window's start; gives the number copied.
    pub fn copy_from(&self, from: &[u8]) -> usize {
        let mut at = 0;
        self.window(0, from.len()).pieces(|(base, len)| {
            // SAFETY: as in `copy_to`, with `from` as the source.
            unsafe { ptr::copy(from.as_ptr().add(at), base, len) };
            at += len;
        });
        at
    }

    /// Copy this window's bytes into another; gives the number copied, the shorter of the two.
    pub fn copy_into(&self, to: &Mem) -> usize {
        let mut at = 0;
        self.window(0, to.len).pieces(|(base, len)| {
            // SAFETY: the piece is valid memory; it is only read, and only within this call.
            let from = unsafe { std::slice::from_raw_parts(base, len) };
            to.window(at, len).copy_from(from);
            at += len;
        });
        at
    }

    /// Fill the window with zeros.
    pub fn zero(&self) {
        // SAFETY: every piece is valid for writes (promise of the constructor).
        self.pieces(|(base, len)| unsafe { ptr::write_bytes(base, 0, len) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iov(bytes: &mut [u8]) -> libc::iovec {
        libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
    }

    #[test]
    fn a_window_crosses_iovecs() {
        let (mut a, mut b, mut c) = (*b"abc", *b"defg", *b"hi");
        let iovecs = [iov(&mut a), iov(&mut b), iov(&mut c)];
        // SAFETY: the arrays outlive the window.
        let mem = unsafe { Mem::from_iovecs(&iovecs) };
        assert_eq!(mem.len(), 9);
        for offset in 0..=9 {
            for len in 0..=9 - offset {
                let mut out = vec![0; len];
                assert_eq!(mem.window(offset, len).copy_to(&mut out), len);
                assert_eq!(out, b"abcdefghi"[offset..offset + len]);
            }
        }
        mem.window(2, 3).copy_from(b"XYZ");
        mem.window(7, 2).zero();
        let mut out = [0; 9];
        mem.copy_to(&mut out);
        assert_eq!(&out, b"abXYZfg\0\0");
    }

    #[test]
    fn nobody_reaches_into_the_kernels_memory() {
        let mem = Mem::of_kernel(7, 4096).window(512, 1024);
        assert_eq!(mem.registered().map(|(index, at)| (index, at as usize)), Some((7, 512)));
        assert!(mem.is_kernels() && mem.is_aligned(512) && !mem.is_aligned(1024));
        assert_eq!((mem.len(), mem.contiguous(), mem.copy_to(&mut [0; 8])), (1024, None, 0));
        mem.zero();
        assert!(mem.whole_iovecs().is_none());

        let end = File::from_parts(u32::MAX, 5);
        let mem = Mem::of_pipe(end, 4096).window(512, 1024);
        assert_eq!((mem.pipe(), mem.registered().is_none()), (Some(end), true));
        assert_eq!((mem.len(), mem.contiguous(), mem.copy_to(&mut [0; 8])), (1024, None, 0));
        assert!(mem.is_kernels() && mem.whole_iovecs().is_none());
        mem.zero();
    }

    #[test]
    fn windows_of_windows_and_alignment() {
        let mut bytes = [0u8; 64];
        let start = bytes.as_ptr().align_offset(16);
        let (one, two) = bytes[start..start + 32].split_at_mut(16);
        let iovecs = [iov(one), iov(two)];
        // SAFETY: the buffer outlives the window.
        let mem = unsafe { Mem::from_iovecs(&iovecs) };
        assert!(mem.is_aligned(16));
        assert!(!mem.window(8, 24).is_aligned(16));
        assert!(mem.window(8, 24).window(8, 16).is_aligned(16));
        assert!(mem.whole_iovecs().is_some());
        assert!(mem.window(0, 31).whole_iovecs().is_none());
    }
}
