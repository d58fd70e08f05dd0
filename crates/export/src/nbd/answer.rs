//! How a request ended, as it is gathered into a batch.

use ringtap_io::Buffer;

use super::batch::Batch;
use super::pipes::Pipe;
use super::reply::Head;
use super::request::Header;

/// How a request ended.
pub(super) enum Reply {
    Done,
    Failed(u32, &'static str),
    /// The first `len` bytes of the buffer.
    Data(Buffer, usize),
    /// So many bytes that are in the pipe, then so many of the buffer's.
    Piped(Pipe, usize, Buffer, usize),
    /// The buffer's bytes and holes, in order.
    Parts(Buffer, Parts),
    /// So many zeros and no data.
    Hole(usize),
    /// Block status: so many bytes, heads and all.
    Status(Buffer, usize),
}

/// Data or a hole, from the request's own offset on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) from: usize,
    pub(super) len: usize,
    pub(super) hole: bool,
}

/// The parts of a read's answer, and room for their heads.
pub(super) struct Parts {
    pub(super) parts: Vec<Part>,
    pub(super) heads: Buffer,
}

impl Parts {
    /// Add them to a batch, the data being that of `buffer`.
    pub(super) fn gather(&mut self, header: &Header, buffer: &Buffer, batch: &mut Batch) {
        let mut used = 0;
        for (i, part) in self.parts.iter().enumerate() {
            let done = i + 1 == self.parts.len();
            let (at, len) = (header.offset + part.from as u64, part.len as u32);
            let head = if part.hole {
                Head::hole(header.into(), done, at, len)
            } else {
                Head::data(header.into(), done, at, len)
            };
            let bytes = head.bytes();
            self.heads.bytes_mut()[used..][..bytes.len()].copy_from_slice(bytes);
            batch.data(&self.heads, used..used + bytes.len());
            used += bytes.len();
            if !part.hole {
                batch.data(buffer, part.from..part.from + part.len);
            }
        }
    }
}
