//! Moving a guest's bytes: the same for every format.

use ringtap_image::{Error, Extent};
use ringtap_io::{File, Io, Mem};

use crate::Vbd;

impl Vbd {
    /// Fill `mem` from the disk; the range was checked.
    #[inline]
    pub(crate) async fn read(&self, io: &Io, mut offset: u64, mut mem: Mem) -> Result<(), Error> {
        while !mem.is_empty() {
            let moved = match self.image.map(offset, mem.len() as u64) {
                Extent::Data { file, offset: at, len, .. } => {
                    let part = mem.window(0, clamp(len));
                    if self.direct(at, &part) {
                        let read = self.read_whole(io, file, at, part).await?;
                        // The file ends before the disk does: zeros follow.
                        part.window(read, usize::MAX).zero();
                    } else {
                        self.read_bounced(io, file, at, part).await?;
                    }
                    part.len()
                }
                Extent::Zero { len, .. } => {
                    let part = mem.window(0, clamp(len));
                    part.zero();
                    part.len()
                }
            };
            offset += moved as u64;
            mem = mem.window(moved, usize::MAX);
        }
        Ok(())
    }

    /// Write `mem` to the disk; the range was checked.
    #[inline]
    pub(crate) async fn write(
        &self,
        io: &Io,
        mut offset: u64,
        mut mem: Mem,
        durable: bool,
    ) -> Result<(), Error> {
        while !mem.is_empty() {
            let moved = match self.image.map(offset, mem.len() as u64) {
                Extent::Data { writable: false, .. } | Extent::Zero { writable: false, .. } => {
                    return Err(Error::ReadOnly);
                }
                Extent::Data { file, offset: at, len, .. } => {
                    let part = mem.window(0, clamp(len));
                    if self.direct(at, &part) {
                        self.write_whole(io, file, at, part, durable).await?;
                    } else {
                        self.write_bounced(io, file, at, part, durable).await?;
                    }
                    part.len()
                }
                Extent::Zero { len, .. } => clamp(len).min(mem.len()),
            };
            offset += moved as u64;
            mem = mem.window(moved, usize::MAX);
        }
        Ok(())
    }

    /// Read whole blocks into aligned memory; gives the bytes read, fewer at the file's end.
    #[inline]
    pub(crate) async fn read_whole(
        &self,
        io: &Io,
        file: File,
        offset: u64,
        mem: Mem,
    ) -> Result<usize, Error> {
        let block = self.info().request_alignment as usize;
        io.read_blocks(file, offset, mem, block).await.map_err(Error::from_errno)
    }

    /// Write whole blocks from aligned memory.
    #[inline]
    pub(crate) async fn write_whole(
        &self,
        io: &Io,
        file: File,
        offset: u64,
        mem: Mem,
        durable: bool,
    ) -> Result<(), Error> {
        let end = if self.info().request_alignment == 1 {
            io.write(file, offset, mem, durable).await
        } else {
            let ticket = self.shared.gate.enter(&self.writers, io).await;
            let end = io.write(file, offset, mem, durable).await;
            drop(ticket);
            end
        };
        end.map_err(Error::from_errno)
    }

    /// Whether the file takes this transfer as it is.
    #[inline]
    pub(crate) fn direct(&self, offset: u64, mem: &Mem) -> bool {
        let info = self.image.info();
        let mask = info.request_alignment - 1;
        (offset | mem.len() as u64) & mask == 0
            && (info.memory_alignment == 1 || mem.is_aligned(info.memory_alignment))
    }
}

fn clamp(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}
