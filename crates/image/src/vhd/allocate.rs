//! Room for new blocks, and writes in flight in sectors that are not yet visible.
//!
//! A file grows ahead of need, so that no write extends it. What is new reads as zeros, so a block of
//! a dynamic VHD is taken as a whole: its bitmap is all ones, and a write to it has nothing more to
//! note. So it is on a device, where room is made zeros before: QEMU looks at no bitmap. Over a parent bits are set one by
//! one.
//!
//! Blocks lie on a grid of [`Shared::pitch`] bytes that begins where the used part ends, each behind
//! its bitmap. While the file grows, the footer at its end stands on that grid too, at the end of a page;
//! that is inside the next block's bitmap, so a footer left behind never shows in a block's bytes.

use std::sync::atomic::Ordering::{Release, SeqCst};

use ringtap_io::sync::broken;
use ringtap_io::{Io, Listener};

use super::bitmap::Bitmap;
use super::footer::SECTOR;
use super::room::{Pending, Room, Write};
use super::sabotage::Sabotage;
use super::shared::Shared;
use super::{BLOCK_ALIGN, end_with_footer, header};
use crate::{Allocation, Error};

/// The file grows by as much as it has, within a block and this.
const STEP: u64 = 64 << 20;
/// So many blocks of a device are made zeros at once.
const CLEANED: u64 = 4;
/// Where the table's 32-bit sector numbers end.
const FILE_MOST: u64 = (header::UNUSED as u64) * SECTOR;

enum Found<'a> {
    Room(Allocation<'a>),
    /// Others must come to an end first.
    Wait(Listener<'a>),
    /// The file must grow, which is the asker's to do now.
    Grow,
    /// It may be written to as it is by now.
    Look,
    /// A flush has to make room for notes first.
    Flush,
}

impl Shared {
    /// What the bitmap takes on the grid, so that the block's bytes are aligned.
    fn lead(&self) -> u64 {
        self.header.bitmap_size().next_multiple_of(BLOCK_ALIGN)
    }

    /// What a block takes on the grid.
    fn pitch(&self) -> u64 {
        self.lead() + self.block_size().next_multiple_of(BLOCK_ALIGN)
    }

    pub(super) async fn allocate(
        &self,
        io: &Io,
        offset: u64,
        len: u64,
    ) -> Result<Option<Allocation<'_>>, Error> {
        if self.info.read_only {
            return Err(Error::ReadOnly);
        }
        match self.reserve(offset, len)? {
            Found::Room(room) => return Ok(Some(room)),
            Found::Look => {}
            Found::Flush => self.flush(io).await?,
            Found::Wait(settled) => settled.await,
            Found::Grow => {
                let end = self.grow(io).await;
                self.room().growing = false;
                self.settled.notify();
                end?;
            }
        }
        Ok(None)
    }

    fn reserve(&self, offset: u64, len: u64) -> Result<Found<'_>, Error> {
        let (block, inside) = self.block_of(offset);
        let len = len.min(self.block_size() - inside);
        let mut room = self.room();
        if self.log_is_crowded(room.writes.len() as u64) {
            return Ok(Found::Flush);
        }
        let (place, fresh) = match (self.place_of(block), room.pending.get(&block)) {
            (Some(place), _) => (place, false),
            (None, Some(pending)) => (pending.place, pending.fresh),
            (None, None) => match self.take_place(&mut room, block)? {
                Ok(taken) => taken,
                Err(found) => return Ok(found),
            },
        };
        let mut write = Write {
            block,
            first: inside / SECTOR,
            end: (inside + len).div_ceil(SECTOR),
            partial: false,
        };
        let (mut head, mut tail, mut len) = (0, 0, len);
        if !fresh {
            let Some(bitmap) = self.bitmaps.get(block) else { return Ok(Found::Look) };
            if bitmap.run(write.first, write.end).0 {
                return Ok(Found::Look);
            }
            head = inside % SECTOR;
            if head > 0 || len < SECTOR {
                len = len.min(SECTOR - head);
                tail = SECTOR - head - len;
                write.partial = true;
            }
            len -= if write.partial { 0 } else { len % SECTOR };
            write.end = (inside + len).div_ceil(SECTOR);
            if room.disturbed(block, write.first, write.end, write.partial) {
                return Ok(Found::Wait(self.settled.listen()));
            }
        }
        room.last_write += 1;
        let token = room.last_write;
        room.writes.insert(token, write);
        Ok(Found::Room(Allocation {
            file: self.container.file(),
            offset: place + self.header.bitmap_size() + inside - head,
            head,
            len,
            tail,
            cipher: None,
            token,
        }))
    }

    /// A place for the block: where it begins, and whether it is zeros; or what must be done first.
    fn take_place(
        &self,
        room: &mut Room,
        block: u32,
    ) -> Result<Result<(u64, bool), Found<'_>>, Error> {
        if room.growing {
            return Ok(Err(Found::Wait(self.settled.listen())));
        }
        if room.next + self.pitch() > FILE_MOST {
            return Err(Error::Full);
        }
        let regular = self.container.traits().regular;
        if room.next + self.pitch() > room.end {
            if !regular {
                return Err(Error::Full);
            }
            room.growing = true;
            return Ok(Err(Found::Grow));
        }
        let clean = room.next + self.pitch() <= room.clean || self.sabotaged(Sabotage::RoomIsZeros);
        let fresh = !self.parent.is_there();
        if fresh && !clean {
            room.growing = true;
            return Ok(Err(Found::Grow));
        }
        let place = room.next + self.lead() - self.header.bitmap_size();
        room.next += self.pitch();
        room.data_end = place + self.header.bitmap_size() + self.block_size();
        room.pending.insert(block, Pending { place, fresh, stained: false });
        if !fresh {
            self.bitmaps.put(block, Bitmap::empty(self.block_size() / SECTOR));
        }
        Ok(Ok((place, fresh)))
    }

    /// Have zeros in a device where the next blocks will be.
    async fn clean(&self, io: &Io) -> Result<(), Error> {
        let (next, end) = {
            let room = self.room();
            (room.next, room.end)
        };
        let blocks = ((end - next) / self.pitch()).min(CLEANED);
        let (mut at, end) = (next, next + blocks * self.pitch());
        match self.container.zero_range(io, at, end - at).await {
            Ok(()) => at = end,
            Err(Error::Unsupported) => {}
            Err(error) => return Err(error),
        }
        let zeros = vec![0; 1 << 20];
        while at < end {
            let len = (end - at).min(zeros.len() as u64);
            self.container.write(io, at, &zeros[..len as usize]).await?;
            at += len;
        }
        self.room().clean = end;
        Ok(())
    }

    /// Make the file longer, with a footer at its new end.
    async fn grow(&self, io: &Io) -> Result<(), Error> {
        let container = &self.container;
        if !container.traits().regular {
            return self.clean(io).await;
        }
        let (next, end, untouched) = {
            let room = self.room();
            (room.next, room.end, room.untouched)
        };
        if untouched {
            // Not where the last block ends: a guest may have made its last bytes look like a footer.
            container.set_len(io, next + SECTOR).await?;
            let mut room = self.room();
            room.untouched = false;
            room.tail = false;
        }
        let pitch = self.pitch();
        // Nothing is reserved: a block that holds little would take as much space as a full one.
        let step = next.clamp(pitch, STEP.max(pitch)).next_multiple_of(pitch);
        container.set_len(io, end + step + BLOCK_ALIGN).await?;
        self.write_footer(io, end + step).await?;
        let mut room = self.room();
        room.end = end + step;
        room.tail = true;
        Ok(())
    }

    /// Write the footer at the end of the page at `page`.
    async fn write_footer(&self, io: &Io, page: u64) -> Result<(), Error> {
        let mut bytes = [0; BLOCK_ALIGN as usize];
        crate::bytes::put(&mut bytes, (BLOCK_ALIGN - SECTOR) as usize, self.footer.bytes());
        self.container.write(io, page, &bytes).await
    }

    pub(super) fn commit(&self, allocation: &Allocation<'_>, written: bool) {
        self.commit_quietly(allocation, written);
        if !broken("settled in silence") {
            self.settled.notify();
        }
    }

    fn commit_quietly(&self, allocation: &Allocation<'_>, written: bool) {
        let mut room = self.room();
        let Some(Write { block, first, end, .. }) = room.writes.remove(&allocation.token) else {
            return;
        };
        if written {
            // Also where others have made it visible: its bytes are not stable before a flush.
            room.commits += 1;
            if !broken("dirty late") {
                self.dirty.store(true, SeqCst);
            }
        }
        let Some(pending) = room.pending.get(&block).copied() else {
            let bitmap = self.bitmaps.get(block).filter(|bitmap| !bitmap.is_full() && written);
            if bitmap.is_some_and(|bitmap| bitmap.set(first, end) && !bitmap.mark()) {
                room.changed.push(block);
            }
            if bitmap.is_some() {
                self.note_bits(block, first, end);
            }
            return;
        };
        if !written {
            room.pending.insert(block, Pending { stained: true, ..pending });
            return;
        }
        if pending.fresh {
            let whole = !pending.stained;
            let empty = || Bitmap::empty(self.block_size() / SECTOR);
            self.bitmaps.put(block, if whole { Bitmap::full() } else { empty() });
        }
        let whole = self.bitmaps.get(block).is_some_and(|bitmap| {
            bitmap.set(first, end);
            bitmap.is_full()
        });
        self.note_block(block, pending.place, whole);
        if !whole {
            self.note_bits(block, first, end);
        }
        room.pending.remove(&block);
        room.new.push(block);
        if let Some(entry) = self.table.get(block as usize) {
            entry.store((pending.place / SECTOR) as u32, Release);
        }
        if broken("dirty late") {
            self.dirty.store(true, SeqCst);
        }
    }

    /// A block lies there that a killed server had in memory only: room begins behind it.
    pub(super) fn take_up_place(&self, block: u32, place: u64) {
        let start = place + self.header.bitmap_size() - self.lead();
        let mut room = self.room();
        room.next = room.next.max(start + self.pitch());
        room.data_end = room.data_end.max(place + self.header.bitmap_size() + self.block_size());
        if self.container.traits().regular {
            room.end = room.next;
        }
        room.new.push(block);
    }

    /// Bits were taken up that an older block's bitmap on the disk lacks.
    pub(super) fn take_up_bits(&self, block: u32) {
        self.room().changed.push(block);
    }

    /// Give back what was not used, and leave a footer at the very end.
    pub(super) async fn close(&self, io: &Io) -> Result<(), Error> {
        self.flush(io).await?;
        let container = &self.container;
        let (data_end, next, untouched, tail) = {
            let room = self.room();
            (room.data_end, room.next, room.untouched, room.tail)
        };
        if tail && (untouched || !container.traits().regular) {
            if let Some(log) = self.restart.get() {
                log.close_beside();
            }
            return Ok(());
        }
        if container.traits().regular {
            end_with_footer(io, container, &self.footer, data_end).await?;
        } else {
            let at = container.len().saturating_sub(SECTOR);
            container.write(io, at, self.footer.bytes()).await?;
            container.sync(io).await?;
        }
        let mut room = self.room();
        room.tail = true;
        if let Some(log) = self.restart.get() {
            log.close_beside();
        }
        if container.traits().regular {
            room.end = next;
            room.untouched = true;
        }
        Ok(())
    }
}
