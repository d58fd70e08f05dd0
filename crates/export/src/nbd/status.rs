//! Block status: one chunk of extents for each context that the client selected.

use ringtap_io::{Buffer, PAGE};
use ringtap_vbd::Error;

use super::answer::Reply;
use super::connection::Connection;
use super::context::{self, Contexts};
use super::reply::Head;
use super::request::Header;
use super::wire::{dirty, state};

/// Extents of one context; the client asks on from there.
const MAX_EXTENTS: usize = 1024;
/// Times the image is asked for one answer, at most: with 64 bits of length the client may ask about
/// all of a disk at once.
const MAX_LOOKS: usize = 16 << 10;

/// Bytes of a chunk before its extents, and of an extent.
fn sizes(extended: bool) -> (usize, usize) {
    if extended { (40, 16) } else { (24, 8) }
}

/// Bytes of memory for an answer about so many contexts.
pub(super) fn memory_for(contexts: usize, one: bool, extended: bool) -> usize {
    let extents = if one { 1 } else { MAX_EXTENTS };
    let (head, extent) = sizes(extended);
    (contexts * (head + extents * extent)).next_multiple_of(PAGE)
}

/// Extents being written down.
struct Extents<'a> {
    bytes: &'a mut [u8],
    most: usize,
    count: usize,
    last: (u64, u32),
    extended: bool,
}

impl Extents<'_> {
    /// Add an extent; false where there is no room for it.
    fn add(&mut self, len: u64, flags: u32) -> bool {
        if self.count > 0 && self.last.1 == flags {
            self.last.0 += len; // all of them together are no longer than the request
        } else if self.count == self.most {
            return false;
        } else {
            self.count += 1;
            self.last = (len, flags);
        }
        let (_, size) = sizes(self.extended);
        if let Some(place) = self.bytes.chunks_exact_mut(size).nth(self.count - 1) {
            // A compact request is about no more than 32 bits can tell.
            let (len, flags) = place.split_at_mut(size / 2);
            len.copy_from_slice(&self.last.0.to_be_bytes()[8 - size / 2..]);
            flags.copy_from_slice(&u64::from(self.last.1).to_be_bytes()[8 - size / 2..]);
        }
        true
    }
}

impl Connection {
    pub(super) async fn block_status(
        &self,
        header: &Header,
        one: bool,
        of: Contexts,
        mut buffer: Buffer,
    ) -> Result<Reply, Error> {
        let most = if one { 1 } else { MAX_EXTENTS };
        let extended = header.extended;
        let (head, extent) = sizes(extended);
        let mut used = 0;
        let last = of.numbers().last();
        for number in of.numbers() {
            let start = used + head;
            let bytes = &mut buffer.bytes_mut()[start..][..most * extent];
            let mut extents = Extents { bytes, most, count: 0, last: (0, 0), extended };
            let end = match number.checked_sub(1) {
                None => self.allocation(header, &mut extents).await,
                Some(bitmap) => self.dirty(header, bitmap, &mut extents),
            };
            if let Err(error) = end {
                self.memory.give_back(buffer);
                return Err(error);
            }
            let count = extents.count;
            let (done, id) = (Some(number) == last, context::id(number));
            let head = Head::block_status(header.into(), done, id, count as u32);
            buffer.bytes_mut()[used..start].copy_from_slice(head.bytes());
            used = start + count * extent;
        }
        Ok(Reply::Status(buffer, used))
    }

    async fn allocation(&self, header: &Header, extents: &mut Extents<'_>) -> Result<(), Error> {
        let (mut at, end) = (header.offset, header.offset + header.len);
        let mut looks = 0;
        while at < end && looks < MAX_LOOKS {
            looks += 1;
            let status = match self.vbd.status(&self.io, at, end - at).await {
                Ok(status) => status,
                // What is known already is a valid answer.
                Err(_) if extents.count > 0 => break,
                Err(error) => return Err(error),
            };
            let len = status.len.clamp(1, end - at);
            let hole = if status.allocated { 0 } else { state::HOLE };
            if !extents.add(len, hole | if status.zero { state::ZERO } else { 0 }) {
                break;
            }
            at += len;
        }
        Ok(())
    }

    fn dirty(&self, header: &Header, bitmap: usize, to: &mut Extents<'_>) -> Result<(), Error> {
        let bitmaps = self.vbd.bitmaps();
        let shown = bitmaps.as_ref().and_then(|bitmaps| bitmaps.shown().get(bitmap));
        let (_, bits) = shown.ok_or(Error::Unsupported)?;
        let (mut at, end) = (header.offset, header.offset + header.len);
        while at < end {
            let (is_set, len) = bits.run(at, end - at);
            let len = len.clamp(1, end - at);
            if !to.add(len, if is_set { dirty::DIRTY } else { 0 }) {
                break;
            }
            at += len;
        }
        Ok(())
    }
}
