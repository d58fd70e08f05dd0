//! Transfers that O_DIRECT does not take as they are: memory that is not aligned goes through an
//! aligned buffer, a block that a write covers in part is read, changed and written back.

use ringtap_image::Error;
use ringtap_io::{Buffer, Io, Mem};

use crate::level::Pass;
use crate::transfer::{Place, touchable};

/// The most that one bounce buffer holds.
const BOUNCE: u64 = 1 << 20;

impl Place<'_> {
    fn move_on(&self, bytes: u64) -> Self {
        let cipher = self
            .cipher
            .map(|cipher| ringtap_image::Cipher { offset: cipher.offset + bytes, ..cipher });
        Place { offset: self.offset + bytes, cipher, ..*self }
    }

    fn move_back(&self, bytes: u64) -> Self {
        let cipher = self
            .cipher
            .map(|cipher| ringtap_image::Cipher { offset: cipher.offset - bytes, ..cipher });
        Place { offset: self.offset - bytes, cipher, ..*self }
    }
}

impl Pass<'_> {
    pub(crate) async fn read_bounced(
        &self,
        io: &Io,
        place: Place<'_>,
        mem: Mem,
    ) -> Result<(), Error> {
        touchable(&mem)?;
        let align = self.image.info().request_alignment;
        let (mut at, end) = (place.offset, place.offset + mem.len() as u64);
        while at < end {
            let to = piece_end(at, end, align);
            let from = at - place.offset;
            let part = mem.window(from as usize, (to - at) as usize);
            let here = place.move_on(from);
            if self.direct(&here, &part) {
                let read = self.read_whole(io, here.file, at, part).await?;
                part.window(read, usize::MAX).zero();
            } else {
                let skip = at % align;
                let len = to.next_multiple_of(align) - (at - skip);
                let mut buffer = io.buffer(len as usize).map_err(Error::Os)?;
                self.stats.record_bounced(part.len(), here.cipher.is_some());
                self.read_clear(io, here.move_back(skip), &mut buffer).await?;
                buffer.mem().window(skip as usize, part.len()).copy_into(&part);
            }
            at = to;
        }
        Ok(())
    }

    /// Read whole blocks, and decipher them.
    async fn read_clear(
        &self,
        io: &Io,
        place: Place<'_>,
        buffer: &mut Buffer,
    ) -> Result<(), Error> {
        let read = self.read_whole(io, place.file, place.offset, buffer.mem()).await?;
        let (there, past_the_end) = buffer.bytes_mut().split_at_mut(read);
        if let Some(cipher) = place.cipher {
            // A file may end inside a sector only where nothing was ever written to it.
            let whole = there.len() - there.len() % cipher.key.sector_size() as usize;
            cipher.key.decrypt(cipher.offset, &mut there[..whole]);
            there[whole..].fill(0);
        }
        past_the_end.fill(0);
        Ok(())
    }

    pub(crate) async fn write_bounced(
        &self,
        io: &Io,
        place: Place<'_>,
        mem: Mem,
        durable: bool,
    ) -> Result<(), Error> {
        touchable(&mem)?;
        let align = self.image.info().request_alignment;
        let (mut at, end) = (place.offset, place.offset + mem.len() as u64);
        while at < end {
            let to = piece_end(at, end, align);
            let from = at - place.offset;
            let part = mem.window(from as usize, (to - at) as usize);
            let here = place.move_on(from);
            if self.direct(&here, &part) {
                self.write_whole(io, here.file, at, part, durable).await?;
            } else if (at | to) % align == 0 {
                let mut buffer = io.buffer(part.len()).map_err(Error::Os)?;
                self.stats.record_bounced(part.len(), here.cipher.is_some());
                part.copy_into(&buffer.mem());
                encipher(&here, &mut buffer);
                self.write_whole(io, here.file, at, buffer.mem(), durable).await?;
            } else {
                self.write_in_block(io, here, part, durable).await?;
            }
            at = to;
        }
        Ok(())
    }

    /// Write a part of one block: nobody else may write to it between our read and our write.
    async fn write_in_block(
        &self,
        io: &Io,
        place: Place<'_>,
        part: Mem,
        durable: bool,
    ) -> Result<(), Error> {
        let align = self.image.info().request_alignment;
        let skip = place.offset % align;
        let block = place.move_back(skip);
        let mut buffer = io.buffer(align as usize).map_err(Error::Os)?;
        self.stats.record_bounced(part.len(), block.cipher.is_some());
        let _alone = self.medium.gate.alone().await;
        self.read_clear(io, block, &mut buffer).await?;
        part.copy_into(&buffer.mem().window(skip as usize, part.len()));
        encipher(&block, &mut buffer);
        io.write(block.file, block.offset, buffer.mem(), durable).await.map_err(Error::from_errno)
    }

    /// Write zeros where the image cannot make them otherwise.
    pub(crate) async fn write_zero_bytes(
        &self,
        io: &Io,
        offset: u64,
        len: u64,
        durable: bool,
    ) -> Result<(), Error> {
        if len == 0 {
            return Ok(());
        }
        let mut buffer = io.buffer(len.min(BOUNCE) as usize).map_err(Error::Os)?;
        buffer.bytes_mut().fill(0);
        let mut done = 0;
        while done < len {
            let part = buffer.mem().window(0, (len - done).min(BOUNCE) as usize);
            self.write(io, offset + done, part, durable).await?;
            done += part.len() as u64;
        }
        Ok(())
    }

    /// fallocate is not a write and takes no durability flag: sync after it.
    pub(crate) async fn settle(&self, io: &Io, durable: bool) -> Result<(), Error> {
        if durable { self.image.flush(io).await } else { Ok(()) }
    }
}

fn encipher(place: &Place<'_>, buffer: &mut Buffer) {
    if let Some(cipher) = place.cipher {
        cipher.key.encrypt(cipher.offset, buffer.bytes_mut());
    }
}

/// Where the piece that begins at `at` ends: before the next block where `at` is inside one, before
/// the last, incomplete block, and after a buffer's length at most.
fn piece_end(at: u64, end: u64, align: u64) -> u64 {
    if at % align != 0 {
        return at.next_multiple_of(align).min(end);
    }
    let whole = end - end % align;
    if at < whole { whole.min(at + BOUNCE.next_multiple_of(align)) } else { end }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cut_at_the_edges_only() {
        let pieces = |mut at, end, align| {
            let mut cuts = vec![];
            while at < end {
                at = piece_end(at, end, align);
                cuts.push(at);
            }
            cuts
        };
        assert_eq!(pieces(100, 200, 512), [200]);
        assert_eq!(pieces(100, 600, 512), [512, 600]);
        assert_eq!(pieces(100, 5000, 512), [512, 4608, 5000]);
        assert_eq!(pieces(512, 1024, 512), [1024]);
        assert_eq!(pieces(0, (1 << 20) + 512, 512), [1 << 20, (1 << 20) + 512]);
        assert_eq!(pieces(5, 7, 1), [7]);
    }
}
