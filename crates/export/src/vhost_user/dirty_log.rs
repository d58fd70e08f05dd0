//! The log of a live migration: which pages of the guest's memory this device has written to.
//!
//! The front-end shares a bitmap with one bit for each 4 KiB of guest addresses. It clears bits, and copies their
//! pages, while the guest runs; so a bit is set after its page was written, never before. Source: vhost-user.rst,
//! "Migration".

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Release};

use libc::iovec;
use vhost::vhost_user::message::VhostUserLog;

use super::mapping::{self, Mapping, Maps};
use super::memory::Memory;

/// Guest addresses that one bit stands for, and one byte.
const PAGE: u64 = 4096;
const BYTE: u64 = PAGE * 8;

/// The bitmap.
pub(crate) struct DirtyLog {
    mapping: Mapping,
}

impl DirtyLog {
    /// Map what the front-end describes.
    pub(crate) fn map(
        message: &VhostUserLog,
        file: &File,
        maps: &Maps,
    ) -> Result<DirtyLog, mapping::Error> {
        let VhostUserLog { mmap_size, mmap_offset } = *message;
        Ok(DirtyLog { mapping: Mapping::new(file, mmap_offset, mmap_size, maps)? })
    }

    /// The first guest address that it has no bit for.
    pub(crate) fn end(&self) -> u64 {
        (self.mapping.len() as u64).saturating_mul(BYTE)
    }

    /// Whether its front-end cut it short.
    pub(crate) fn is_cut(&self) -> bool {
        self.mapping.is_cut()
    }

    /// Mark `len` bytes at a guest address as written to. What the log has no bits for is passed over.
    fn mark(&self, address: u64, len: u64) {
        let Some(more) = len.checked_sub(1) else { return };
        let (first, last) = (address / PAGE, address.saturating_add(more) / PAGE);
        let end = (last / 8 + 1).min(self.mapping.len() as u64);
        for byte in first / 8..end {
            let mut bits = u8::MAX;
            if byte == first / 8 {
                bits &= u8::MAX << (first % 8);
            }
            if byte == last / 8 {
                bits &= u8::MAX >> (7 - last % 8);
            }
            let at = self.mapping.base().wrapping_add(byte as usize).cast::<AtomicU8>();
            // SAFETY: `byte` lies within the mapping, which lives as long as this does; it is only ever
            // changed atomically here, and the front-end may change it at any time.
            let at = unsafe { &*at };
            // Whoever sees the bit sees what was written.
            at.fetch_or(bits, Release);
        }
    }
}

/// What one queue logs.
#[derive(Clone)]
pub(crate) struct Logging {
    log: Arc<DirtyLog>,
    /// Whether that is what it writes for requests.
    data: bool,
    /// From which address on the used ring counts in the log, where that is logged.
    used: Option<u64>,
}

impl Logging {
    /// Into that log; none where there is nothing to log.
    pub(crate) fn new(log: Arc<DirtyLog>, data: bool, used: Option<u64>) -> Option<Logging> {
        (data || used.is_some()).then_some(Logging { log, data, used })
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.log.is_cut()
    }

    /// The first `len` bytes of that memory were written to.
    #[cold]
    pub(crate) fn wrote(&self, memory: &Memory, places: &[iovec], mut len: usize) {
        if !self.data {
            return;
        }
        for place in places {
            let piece = place.iov_len.min(len);
            memory.guest_pieces(place.iov_base.cast(), piece as u64, |at, len| {
                self.log.mark(at, len);
            });
            len -= piece;
        }
    }

    /// Bytes of the used ring were written to, so far behind its beginning.
    #[cold]
    pub(crate) fn wrote_used(&self, offset: u64, len: u64) {
        if let Some(at) = self.used.and_then(|used| used.checked_add(offset)) {
            self.log.mark(at, len);
        }
    }
}
