//! Discard and write-zeroes: what the image can do on whole units, zeros written at the edges.

use std::sync::atomic::Ordering::Relaxed;

use ringtap_image::{Discard, Error};
use ringtap_io::Io;

use crate::level::Pass;

impl Pass<'_> {
    /// Free the whole units within the range; the edges keep their bytes.
    pub(crate) async fn discard(
        &self,
        io: &Io,
        offset: u64,
        len: u64,
        mode: Discard,
        durable: bool,
    ) -> Result<(), Error> {
        if mode == Discard::Free && self.medium.keeps_space.load(Relaxed) {
            return Ok(());
        }
        let (first, last) = self.whole_units(offset, len);
        if first < last {
            // An image that frees its room by itself waits for writes that have yet to find theirs;
            // those may in turn wait for the gate.
            let ticket = match self.image.epochs() {
                None => Some(self.medium.gate.enter(self.writers).await),
                Some(_) => None,
            };
            self.image.discard(io, first, last - first, mode).await?;
            drop(ticket);
            self.settle(io, durable).await?;
        }
        Ok(())
    }

    /// Make the range read as zeros, by writing them only where nothing else will do.
    pub(crate) async fn write_zeroes(
        &self,
        io: &Io,
        offset: u64,
        len: u64,
        unmap: bool,
        fast: bool,
        durable: bool,
    ) -> Result<(), Error> {
        let end = offset + len;
        let unmap = unmap && !self.medium.keeps_space.load(Relaxed);
        let (first, last) = self.whole_units(offset, len);
        if fast && (first > offset || last < end) {
            return Err(Error::Unsupported);
        }
        if first >= last {
            return self.zero_edge(io, offset, len, unmap, durable).await;
        }
        match self.discard(io, first, last - first, Discard::Zero { unmap }, durable).await {
            Err(Error::Unsupported) if !fast => {
                self.write_zero_bytes(io, first, last - first, durable).await?;
            }
            end => end?,
        }
        self.zero_edge(io, offset, first - offset, unmap, durable).await?;
        self.zero_edge(io, last, end - last, unmap, durable).await
    }

    /// Make parts of units zeros: with their units, where those hold nothing else.
    async fn zero_edge(
        &self,
        io: &Io,
        offset: u64,
        len: u64,
        unmap: bool,
        durable: bool,
    ) -> Result<(), Error> {
        let unit = self.image.info().discard_alignment;
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let next = (at - at % unit + unit).min(end);
            match self.image.zero_part(io, at, next - at, unmap).await? {
                true => self.settle(io, durable).await?,
                false => self.write_zero_bytes(io, at, next - at, durable).await?,
            }
            at = next;
        }
        Ok(())
    }

    /// The largest range of whole units inside; empty where there is none.
    fn whole_units(&self, offset: u64, len: u64) -> (u64, u64) {
        let unit = self.image.info().discard_alignment;
        let end = offset + len;
        let first = offset.next_multiple_of(unit);
        // The last unit may be cut short by the disk's own end.
        let last = if end == self.medium.size() { end } else { end - end % unit };
        (first, last)
    }
}
