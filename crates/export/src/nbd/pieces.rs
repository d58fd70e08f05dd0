//! Memory in pieces, to send or receive with one operation.

use std::ops::Range;

use ringtap_io::{Buffer, Mem};

/// The most pieces that the kernel takes at once (UIO_MAXIOV).
const MOST: usize = 1024;

/// A list of pieces of buffers, and of what comes out of pipes between them.
#[derive(Default)]
pub(super) struct Pieces {
    iovecs: Vec<libc::iovec>,
    /// How many iovecs go before it.
    pipes: Vec<(usize, Mem)>,
}

impl Pieces {
    /// Add what is in a pipe.
    pub(super) fn pipe(&mut self, mem: Mem) {
        self.pipes.push((self.iovecs.len(), mem));
    }

    /// Add a piece; it joins the last one where it follows it in memory.
    pub(super) fn push(&mut self, buffer: &Buffer, range: Range<usize>) {
        let bytes = &buffer.bytes()[range];
        let base = bytes.as_ptr().cast_mut();
        let after_pipe = self.pipes.last().is_some_and(|(at, _)| *at == self.iovecs.len());
        match self.iovecs.last_mut().filter(|_| !after_pipe) {
            Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base => {
                last.iov_len += bytes.len();
            }
            _ => self.iovecs.push(libc::iovec { iov_base: base.cast(), iov_len: bytes.len() }),
        }
    }

    pub(super) fn clear(&mut self) {
        self.iovecs.clear();
        self.pipes.clear();
    }

    /// The pieces as bytes, without what is in pipes. As with [`Pieces::mems`], whoever looks at them
    /// holds the buffers.
    pub(super) fn slices(&self) -> impl Iterator<Item = &[u8]> {
        self.iovecs.iter().map(|piece| {
            // SAFETY: it was made of so many bytes of a buffer, which stays in place; see above.
            unsafe { std::slice::from_raw_parts(piece.iov_base.cast(), piece.iov_len) }
        })
    }

    /// The pieces as memory for operations, so many of them at a time as the kernel takes. As with
    /// [`Buffer::mem`], the buffers and this list must outlive the operations: whoever awaits them
    /// holds both, and leaves both as they are.
    pub(super) fn mems(&self) -> impl Iterator<Item = Mem> {
        let end = (self.iovecs.len(), Mem::EMPTY);
        let mut from = 0;
        self.pipes.iter().copied().chain([end]).flat_map(move |(to, pipe)| {
            let iovecs = self.iovecs.get(std::mem::replace(&mut from, to)..to).unwrap_or_default();
            // SAFETY: the list and the buffers stay in place while the operation goes on; see above.
            let mems = iovecs.chunks(MOST).map(|iovecs| unsafe { Mem::from_iovecs(iovecs) });
            mems.chain([pipe])
        })
    }
}

#[cfg(test)]
mod tests {
    use ringtap_io::{File, Ring, Tasks};

    use super::*;

    #[test]
    fn what_a_pipe_parts_does_not_join() {
        let tasks = Tasks::new(Box::new(Ring::new().expect("io_uring")));
        let mut buffer = tasks.io().buffer(4096).expect("memory");
        buffer.bytes_mut()[..6].copy_from_slice(b"abcdef");
        let mut pieces = Pieces::default();
        pieces.push(&buffer, 0..1);
        pieces.push(&buffer, 1..3);
        pieces.pipe(Mem::of_pipe(File::from_parts(7, 1), 100));
        pieces.push(&buffer, 3..5);
        pieces.push(&buffer, 5..6);
        let shown = pieces.mems().map(|mem| {
            let mut bytes = vec![0; mem.len()];
            let copied = mem.copy_to(&mut bytes);
            (mem.is_kernels(), mem.len(), bytes[..copied].to_vec())
        });
        let expected = [
            (false, 3, b"abc".to_vec()),
            (true, 100, vec![]),
            (false, 3, b"def".to_vec()),
            (false, 0, vec![]),
        ];
        assert_eq!(shown.collect::<Vec<_>>(), expected);
        assert_eq!(pieces.slices().collect::<Vec<_>>(), [&b"abc"[..], b"def"]);
    }
}
