//! Memory for the data of a queue's slots: one mapping, cut into equal pieces.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

use ringtap_io::Mem;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Page-aligned memory, a piece a slot. A page of it takes room only once it was used.
///
/// Operations in flight may use a piece, so an arena must outlive the tasks that were given its
/// memory: drop it after them.
pub(crate) struct Arena {
    base: NonNull<u8>,
    pieces: usize,
    each: usize,
}

impl Arena {
    /// `pieces` pieces of `each` bytes, a multiple of the page size.
    pub(crate) fn new(pieces: usize, each: usize) -> io::Result<Arena> {
        let len = pieces.checked_mul(each).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Arena { base, pieces, each })
    }

    /// Have every page take its room now (Linux 5.14): later there may be none without a disk's help.
    pub(crate) fn bring_in(&self) -> io::Result<()> {
        let (base, len) = (self.base.as_ptr().cast(), self.pieces * self.each);
        // SAFETY: the mapping is ours; its bytes stay as they are.
        Ok(unsafe { madvise(base, len, Advice::LinuxPopulateWrite) }?)
    }

    fn at(&self, piece: usize) -> *mut u8 {
        assert!(piece < self.pieces, "a slot that is not");
        self.base.as_ptr().wrapping_add(piece * self.each)
    }

    /// Bytes of a piece.
    pub(crate) fn each(&self) -> usize {
        self.each
    }

    /// The address of a piece, for a driver that is told it.
    pub(crate) fn address(&self, piece: usize) -> u64 {
        self.at(piece) as u64
    }

    /// The first `len` bytes of a piece, all of it at most.
    pub(crate) fn mem(&self, piece: usize, len: usize) -> Mem {
        // SAFETY: the memory is mapped as long as the arena lives, which is to outlive its users.
        unsafe { Mem::from_raw(self.at(piece), len.min(self.each)) }
    }

    /// Read all of `len` bytes at an offset of a file into a piece.
    pub(crate) fn read_at(
        &self,
        piece: usize,
        file: impl AsFd,
        offset: u64,
        len: usize,
    ) -> io::Result<()> {
        let (fd, at) = (file.as_fd().as_raw_fd(), self.at(piece).cast());
        // SAFETY: the piece may be written for its length.
        let read = unsafe { libc::pread(fd, at, len.min(self.each), offset as i64) };
        whole(read, len)
    }

    /// Write the first `len` bytes of a piece at an offset of a file.
    pub(crate) fn write_at(
        &self,
        piece: usize,
        file: impl AsFd,
        offset: u64,
        len: usize,
    ) -> io::Result<()> {
        let (fd, at) = (file.as_fd().as_raw_fd(), self.at(piece).cast());
        // SAFETY: the piece may be read for its length.
        let written = unsafe { libc::pwrite(fd, at, len.min(self.each), offset as i64) };
        whole(written, len)
    }

    /// Read once from a file: the first bytes into `head`, the rest into a piece.
    pub(crate) fn read(
        &self,
        piece: usize,
        file: BorrowedFd<'_>,
        head: &mut [u8],
    ) -> io::Result<usize> {
        let iovecs = [
            libc::iovec { iov_base: head.as_mut_ptr().cast(), iov_len: head.len() },
            libc::iovec { iov_base: self.at(piece).cast(), iov_len: self.each },
        ];
        // SAFETY: both iovecs name memory that may be written for their length.
        let read = unsafe { libc::readv(file.as_raw_fd(), iovecs.as_ptr(), 2) };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    }

    /// Write once to a file: `head`, then the first `len` bytes of a piece.
    pub(crate) fn write(
        &self,
        piece: usize,
        file: BorrowedFd<'_>,
        head: &[u8],
        len: usize,
    ) -> io::Result<usize> {
        let iovecs = [
            libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() },
            libc::iovec { iov_base: self.at(piece).cast(), iov_len: len.min(self.each) },
        ];
        // SAFETY: both iovecs name memory that may be read for their length.
        let written = unsafe { libc::writev(file.as_raw_fd(), iovecs.as_ptr(), 2) };
        usize::try_from(written).map_err(|_| io::Error::last_os_error())
    }
}

/// What a transfer that must be whole came to.
fn whole(moved: isize, len: usize) -> io::Result<()> {
    match usize::try_from(moved) {
        Ok(moved) if moved == len => Ok(()),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours, and its users are gone (see the type).
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.pieces * self.each) };
    }
}
