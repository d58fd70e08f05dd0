//! What the thread does itself, where who else would do or end it costs more.

use std::os::fd::RawFd;

use super::{Known, Ring, last_error};
use crate::{File, Key, Mem, Op};

/// A copy of so many bytes takes less time than waking a worker.
const SMALL: usize = 64 << 10;

impl Ring {
    pub(super) fn volatile_write<'a>(&mut self, op: &'a Op) -> Option<(Known, u64, &'a Mem)> {
        let Op::Write { file, offset, ref mem, durable: false } = *op else { return None };
        if mem.len() > SMALL || mem.is_kernels() {
            return None;
        }
        Some((self.files.find(&self.ring, file)?, offset, mem))
    }

    /// Make it here.
    pub(super) fn write_here(
        &mut self,
        key: Key,
        fd: RawFd,
        offset: u64,
        mem: &Mem,
        flags: i32,
    ) -> i32 {
        #[cfg(test)]
        {
            self.seen.here += 1;
        }
        let one;
        let (iovecs, count) = match mem.contiguous() {
            Some(base) => {
                one = libc::iovec { iov_base: base.cast(), iov_len: mem.len() };
                (&raw const one, 1)
            }
            None => self.iovecs(key, mem),
        };
        // SAFETY: the iovecs name memory that is valid for reads (the promise of `Mem`).
        match unsafe { libc::pwritev2(fd, iovecs, count as i32, offset as i64, flags) } {
            -1 => last_error(),
            written => written as i32,
        }
    }

    /// io_uring has this operation from Linux 6.9 on; it is rare, and never waits for a device long.
    pub(super) fn set_len(&mut self, file: File, len: u64) -> i32 {
        let Some(Known { fd, .. }) = self.files.find(&self.ring, file) else {
            return -libc::EBADF;
        };
        let Ok(len) = i64::try_from(len) else { return -libc::EFBIG };
        // SAFETY: it takes no memory, and the descriptor is open while its `OpenFile` lives.
        match unsafe { libc::ftruncate(fd, len) } {
            0 => 0,
            _ => last_error(),
        }
    }
}
