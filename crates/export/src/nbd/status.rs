//! Block status: one chunk of extents for each context that the client selected.

use ringtap_io::{Buffer, PAGE};
use ringtap_vbd::Error;

use super::carry_out::Reply;
use super::connection::Connection;
use super::context;
use super::reply::Head;
use super::request::Header;
use super::wire::{dirty, state};

/// Extents of one context; the client asks on from there.
const MAX_EXTENTS: usize = 1024;
/// Bytes of a chunk before its extents, and of an extent.
const HEAD: usize = 24;
const EXTENT: usize = 8;

/// Bytes of memory for an answer about so many contexts.
pub(super) fn memory_for(contexts: usize, one: bool) -> usize {
    let extents = if one { 1 } else { MAX_EXTENTS };
    (contexts * (HEAD + extents * EXTENT)).next_multiple_of(PAGE)
}

/// Extents being written down.
struct Extents<'a> {
    bytes: &'a mut [u8],
    most: usize,
    count: usize,
    last: (u32, u32),
}

impl Extents<'_> {
    /// Add an extent; false where there is no room for it.
    fn add(&mut self, len: u32, flags: u32) -> bool {
        if self.count > 0 && self.last.1 == flags {
            self.last.0 += len; // all of them together are no longer than the request
        } else if self.count == self.most {
            return false;
        } else {
            self.count += 1;
            self.last = (len, flags);
        }
        let [one, two, three, four] = self.last.0.to_be_bytes();
        let [five, six, seven, eight] = self.last.1.to_be_bytes();
        let place = self.bytes.chunks_exact_mut(EXTENT).nth(self.count - 1);
        if let Some(place) = place {
            place.copy_from_slice(&[one, two, three, four, five, six, seven, eight]);
        }
        true
    }
}

impl Connection {
    pub(super) async fn block_status(
        &self,
        header: &Header,
        one: bool,
        mut buffer: Buffer,
    ) -> Result<Reply, Error> {
        let most = if one { 1 } else { MAX_EXTENTS };
        let mut used = 0;
        let last = self.contexts.numbers().last();
        for number in self.contexts.numbers() {
            let start = used + HEAD;
            let bytes = &mut buffer.bytes_mut()[start..][..most * EXTENT];
            let mut extents = Extents { bytes, most, count: 0, last: (0, 0) };
            let end = match number.checked_sub(1) {
                None => self.allocation(header, &mut extents).await,
                Some(bitmap) => self.dirty(header, bitmap, &mut extents),
            };
            if let Err(error) = end {
                self.memory.give_back(buffer);
                return Err(error);
            }
            let len = extents.count * EXTENT;
            let (done, id) = (Some(number) == last, context::id(number));
            let head = Head::block_status(header.cookie, done, id, len as u32);
            buffer.bytes_mut()[used..start].copy_from_slice(head.bytes());
            used = start + len;
        }
        Ok(Reply::Status(buffer, used))
    }

    async fn allocation(&self, header: &Header, extents: &mut Extents<'_>) -> Result<(), Error> {
        let (mut at, end) = (header.offset, header.offset + u64::from(header.len));
        while at < end {
            let status = match self.vbd.status(&self.io, at, end - at).await {
                Ok(status) => status,
                // What is known already is a valid answer.
                Err(_) if extents.count > 0 => break,
                Err(error) => return Err(error),
            };
            let len = status.len.clamp(1, end - at);
            let hole = if status.allocated { 0 } else { state::HOLE };
            if !extents.add(len as u32, hole | if status.zero { state::ZERO } else { 0 }) {
                break;
            }
            at += len;
        }
        Ok(())
    }

    fn dirty(&self, header: &Header, bitmap: usize, to: &mut Extents<'_>) -> Result<(), Error> {
        let shown = self.vbd.bitmaps().and_then(|bitmaps| bitmaps.shown().get(bitmap));
        let (_, bits) = shown.ok_or(Error::Unsupported)?;
        let (mut at, end) = (header.offset, header.offset + u64::from(header.len));
        while at < end {
            let (is_set, len) = bits.run(at, end - at);
            let len = len.clamp(1, end - at);
            if !to.add(len as u32, if is_set { dirty::DIRTY } else { 0 }) {
                break;
            }
            at += len;
        }
        Ok(())
    }
}
