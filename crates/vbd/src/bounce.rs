//! Transfers that O_DIRECT does not take as they are: memory that is not aligned goes through an
//! aligned buffer, a block that a write covers in part is read, changed and written back.

use ringtap_image::Error;
use ringtap_io::{File, Io, Mem};

use crate::Vbd;

/// The most that one bounce buffer holds.
const BOUNCE: u64 = 1 << 20;

impl Vbd {
    pub(crate) async fn read_bounced(
        &self,
        io: &Io,
        file: File,
        offset: u64,
        mem: Mem,
    ) -> Result<(), Error> {
        let align = self.info().request_alignment;
        let (mut at, end) = (offset, offset + mem.len() as u64);
        while at < end {
            let to = piece_end(at, end, align);
            let part = mem.window((at - offset) as usize, (to - at) as usize);
            if self.direct(at, &part) {
                let read = self.read_whole(io, file, at, part).await?;
                part.window(read, usize::MAX).zero();
            } else {
                let first = at - at % align;
                let len = to.next_multiple_of(align) - first;
                let buffer = io.buffer(len as usize).map_err(Error::Os)?;
                let all = buffer.mem();
                let read = self.read_whole(io, file, first, all).await?;
                all.window(read, usize::MAX).zero();
                all.window((at - first) as usize, part.len()).copy_into(&part);
            }
            at = to;
        }
        Ok(())
    }

    pub(crate) async fn write_bounced(
        &self,
        io: &Io,
        file: File,
        offset: u64,
        mem: Mem,
        durable: bool,
    ) -> Result<(), Error> {
        let align = self.info().request_alignment;
        let (mut at, end) = (offset, offset + mem.len() as u64);
        while at < end {
            let to = piece_end(at, end, align);
            let part = mem.window((at - offset) as usize, (to - at) as usize);
            if self.direct(at, &part) {
                self.write_whole(io, file, at, part, durable).await?;
            } else if (at | to) % align == 0 {
                let buffer = io.buffer(part.len()).map_err(Error::Os)?;
                part.copy_into(&buffer.mem());
                self.write_whole(io, file, at, buffer.mem(), durable).await?;
            } else {
                self.write_in_block(io, file, at, part, durable).await?;
            }
            at = to;
        }
        Ok(())
    }

    /// Write a part of one block: nobody else may write to it between our read and our write.
    async fn write_in_block(
        &self,
        io: &Io,
        file: File,
        at: u64,
        part: Mem,
        durable: bool,
    ) -> Result<(), Error> {
        let align = self.info().request_alignment;
        let first = at - at % align;
        let buffer = io.buffer(align as usize).map_err(Error::Os)?;
        let block = buffer.mem();
        let _alone = self.shared.gate.alone(io).await;
        let read = self.read_whole(io, file, first, block).await?;
        block.window(read, usize::MAX).zero();
        part.copy_into(&block.window((at - first) as usize, part.len()));
        io.write(file, first, block, durable).await.map_err(Error::from_errno)
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
