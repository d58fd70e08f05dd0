//! Moving a guest's bytes: the same for every format.

use ringtap_image::{Allocation, Cipher, Error, Extent};
use ringtap_io::{File, Io, Mem, is_all};

use crate::level::Pass;

/// Where bytes lie in a file, and how they are enciphered.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) file: File,
    pub(crate) offset: u64,
    pub(crate) cipher: Option<Cipher<'a>>,
}

impl Pass<'_> {
    /// Fill `mem` from the disk; the range was checked.
    #[inline]
    pub(crate) async fn read(&self, io: &Io, mut offset: u64, mut mem: Mem) -> Result<(), Error> {
        while !mem.is_empty() {
            let moved = match self.image.map(offset, mem.len() as u64) {
                Extent::Data { file, offset: at, len, cipher, .. } => {
                    let part = mem.window(0, clamp(len));
                    let place = Place { file, offset: at, cipher };
                    if self.direct(&place, &part) {
                        self.stats.record_direct(part.len());
                        // As `read_whole`, spelled out: each future around another costs instructions of every request.
                        let first = io.begin_read(file, at, part).await;
                        if !is_all(first, &part) {
                            let block = self.image.info().request_alignment as usize;
                            let read = io.read_on(file, at, part, block, first).await;
                            let read = read.map_err(Error::from_errno)?;
                            if read < part.len() {
                                // The file ends before the disk does: zeros follow.
                                touchable(&part)?;
                                part.window(read, usize::MAX).zero();
                            }
                        }
                    } else {
                        self.read_bounced(io, place, part).await?;
                    }
                    part.len()
                }
                Extent::Zero { len, .. } => {
                    touchable(&mem)?;
                    let part = mem.window(0, clamp(len));
                    part.zero();
                    part.len()
                }
                Extent::Compressed { len } => {
                    touchable(&mem)?;
                    self.image.decompress(io, offset, mem.window(0, clamp(len))).await?
                }
                Extent::NotLoaded => {
                    self.stats.record_map_miss(offset);
                    self.image.load(io, offset).await?;
                    0
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
        // While metadata waits for a flush, stable bytes alone would be found by nobody.
        let mut at_once = durable && self.image.takes_durable_writes() && !self.image.is_dirty();
        while !mem.is_empty() {
            let moved = match self.image.map(offset, mem.len() as u64) {
                Extent::Data { file, offset: at, len, writable: true, cipher } => {
                    let part = mem.window(0, clamp(len));
                    let place = Place { file, offset: at, cipher };
                    if self.direct(&place, &part) {
                        self.stats.record_direct(part.len());
                        // As `write_whole`, spelled out, too.
                        let ticket = match self.image.info().request_alignment {
                            1 => None,
                            _ => Some(self.medium.gate.enter(self.writers).await),
                        };
                        let first = io.begin_write(file, at, part, at_once).await;
                        if !is_all(first, &part) {
                            let end = io.write_on(file, at, part, at_once, first).await;
                            end.map_err(Error::from_errno)?;
                        }
                        drop(ticket);
                    } else {
                        self.write_bounced(io, place, part, at_once).await?;
                    }
                    part.len()
                }
                Extent::Zero { len, writable: true } => clamp(len).min(mem.len()),
                Extent::NotLoaded => {
                    self.stats.record_map_miss(offset);
                    self.image.load(io, offset).await?;
                    0
                }
                Extent::Data { .. } | Extent::Zero { .. } | Extent::Compressed { .. } => {
                    at_once = false;
                    self.write_to_new_room(io, offset, mem).await?
                }
            };
            offset += moved as u64;
            mem = mem.window(moved, usize::MAX);
        }
        if durable && (!at_once || self.image.is_dirty()) {
            self.image.flush(io).await?;
        }
        Ok(())
    }

    /// Write to room that the image has to find first; gives the bytes written, 0 where it is to be
    /// looked at again.
    async fn write_to_new_room(&self, io: &Io, offset: u64, mem: Mem) -> Result<usize, Error> {
        let len = mem.len() as u64;
        let room = match self.image.allocate_at_once(offset, len) {
            Some(room) => room,
            None => match self.image.allocate(io, offset, len).await? {
                Some(room) => room,
                None => return Ok(0),
            },
        };
        let part = mem.window(0, clamp(room.len));
        let end = self.fill(io, offset, &room, part).await;
        self.image.commit(room, end.is_ok());
        end.map(|()| part.len())
    }

    /// Write the guest's bytes, between those that were around them.
    async fn fill(
        &self,
        io: &Io,
        offset: u64,
        room: &Allocation<'_>,
        part: Mem,
    ) -> Result<(), Error> {
        let place = Place { file: room.file, offset: room.offset, cipher: room.cipher };
        let (head, tail) = (clamp(room.head), clamp(room.tail));
        if head == 0 && tail == 0 {
            return self.write_to(io, place, part, false).await;
        }
        touchable(&part)?;
        let buffer = io.buffer(head + part.len() + tail).map_err(Error::Os)?;
        let all = buffer.mem();
        self.read(io, offset - room.head, all.window(0, head)).await?;
        let after = head + part.len();
        self.read(io, offset + part.len() as u64, all.window(after, tail)).await?;
        part.copy_into(&all.window(head, part.len()));
        self.write_to(io, place, all, false).await
    }

    #[inline]
    async fn write_to(
        &self,
        io: &Io,
        place: Place<'_>,
        part: Mem,
        durable: bool,
    ) -> Result<(), Error> {
        if self.direct(&place, &part) {
            self.stats.record_direct(part.len());
            self.write_whole(io, place.file, place.offset, part, durable).await
        } else {
            self.write_bounced(io, place, part, durable).await
        }
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
        let block = self.image.info().request_alignment as usize;
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
        let end = if self.image.info().request_alignment == 1 {
            io.write(file, offset, mem, durable).await
        } else {
            let ticket = self.medium.gate.enter(self.writers).await;
            let end = io.write(file, offset, mem, durable).await;
            drop(ticket);
            end
        };
        end.map_err(Error::from_errno)
    }

    /// Whether the file takes this transfer as it is.
    #[inline]
    pub(crate) fn direct(&self, place: &Place<'_>, mem: &Mem) -> bool {
        let info = self.image.info();
        let mask = info.request_alignment - 1;
        (place.offset | mem.len() as u64) & mask == 0
            && (info.memory_alignment == 1 || mem.is_aligned(info.memory_alignment))
            && place.cipher.is_none()
    }

    /// Whether memory goes to that place as it is, see [`crate::Vbd::moves_untouched`].
    pub(crate) fn moves_untouched(&self, write: bool, offset: u64, len: u64) -> bool {
        let extent = self.image.map(offset, len);
        let Extent::Data { file, offset, len: there, writable, cipher } = extent else {
            return false;
        };
        let place = Place { file, offset, cipher };
        let whole = there >= len && (writable || !write);
        whole && self.direct(&place, &Mem::of_kernel(0, len as usize))
    }
}

/// Memory of the kernel's cannot be looked at: who gave it has to bring memory that can.
pub(crate) fn touchable(mem: &Mem) -> Result<(), Error> {
    if mem.is_kernels() { Err(Error::Unsupported) } else { Ok(()) }
}

fn clamp(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}
