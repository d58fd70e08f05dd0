//! Memory in pieces, to send or receive with one operation.

use std::ops::Range;

use ringtap_io::{Buffer, Mem};

/// The most pieces that the kernel takes at once (UIO_MAXIOV).
const MOST: usize = 1024;

/// A list of pieces of buffers.
#[derive(Default)]
pub(super) struct Pieces {
    iovecs: Vec<libc::iovec>,
}

impl Pieces {
    /// Add a piece; it joins the last one where it follows it in memory.
    pub(super) fn push(&mut self, buffer: &Buffer, range: Range<usize>) {
        let bytes = &buffer.bytes()[range];
        let base = bytes.as_ptr().cast_mut();
        match self.iovecs.last_mut() {
            Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base => {
                last.iov_len += bytes.len();
            }
            _ => self.iovecs.push(libc::iovec { iov_base: base.cast(), iov_len: bytes.len() }),
        }
    }

    pub(super) fn clear(&mut self) {
        self.iovecs.clear();
    }

    /// The pieces as memory for operations, so many of them at a time as the kernel takes. As with
    /// [`Buffer::mem`], the buffers and this list must outlive the operations: whoever awaits them
    /// holds both, and leaves both as they are.
    pub(super) fn mems(&self) -> impl Iterator<Item = Mem> {
        // SAFETY: the list and the buffers stay in place while the operation goes on; see above.
        self.iovecs.chunks(MOST).map(|iovecs| unsafe { Mem::from_iovecs(iovecs) })
    }
}
