//! Where the bytes of a VHDX are.

use std::sync::{Arc, OnceLock};

use ringtap_io::Io;

use super::check::Served;
use super::entry::{FULLY_PRESENT, PAGE, PLACE, STATE};
use super::layout::Layout;
use crate::bytes::get;
use crate::qcow2::ToolError;
use crate::{Boxed, Container, Discard, Error, Extent, Image, Info, OnlineCheck, Status};

/// A VHDX. Clones are the same one.
#[derive(Clone)]
pub(super) struct Vhdx {
    shared: Arc<Shared>,
}

struct Shared {
    container: Container,
    info: Info,
    layout: Layout,
    /// The table, as far as it was needed; a page is empty where all of it is 0.
    pages: Box<[OnceLock<Box<[u64]>>]>,
}

impl Vhdx {
    pub(super) fn new(container: Container, layout: Layout) -> Vhdx {
        let traits = *container.traits();
        let info = Info {
            format: "vhdx",
            size: layout.size,
            read_only: true,
            request_alignment: traits.request_alignment,
            memory_alignment: traits.memory_alignment,
            discard_alignment: traits.request_alignment.max(512),
            logical_block_size: layout.logical_sector,
            physical_block_size: layout.physical_sector,
            discard: false,
            fast_zero: false,
            rotational: container.is_rotational(),
        };
        let entries = layout.blocks + layout.blocks / layout.chunk_ratio;
        let pages = (0..entries / PAGE + 1).map(|_| OnceLock::new()).collect();
        Vhdx { shared: Arc::new(Shared { container, info, layout, pages }) }
    }
}

impl Shared {
    /// The page and the place in it of the entry for a byte of the disk.
    fn entry_of(&self, offset: u64) -> (u64, usize) {
        let block = offset / self.layout.block_size;
        let index = block + block / self.layout.chunk_ratio;
        (index / PAGE, (index % PAGE) as usize)
    }

    fn find(&self, offset: u64, len: u64) -> Extent<'_> {
        let (page, index) = self.entry_of(offset);
        let known = self.pages.get(page as usize).and_then(OnceLock::get);
        let Some(entries) = known else { return Extent::NotLoaded };
        let entry = entries.get(index).copied().unwrap_or(0);
        let inside = offset % self.layout.block_size;
        let len = len.min(self.layout.block_size - inside);
        if entry & STATE != FULLY_PRESENT {
            return Extent::Zero { len, writable: false };
        }
        let offset = (entry & PLACE) + inside;
        Extent::Data { file: self.container.file(), offset, len, writable: false, cipher: None }
    }

    async fn load_page(&self, io: &Io, offset: u64) -> Result<(), Error> {
        let (page, _) = self.entry_of(offset);
        let place = self.layout.table_at + page * PAGE * 8;
        let mut bytes = vec![0; (PAGE * 8) as usize];
        self.layout.changes.read(io, &self.container, place, &mut bytes).await?;
        let entries: Box<[u64]> =
            bytes.chunks_exact(8).map(|entry| u64::from_le_bytes(get(entry, 0))).collect();
        for (index, entry) in (page * PAGE..).zip(&entries) {
            let chunk = self.layout.chunk_ratio + 1;
            let payload = index % chunk != self.layout.chunk_ratio;
            let block = index - index / chunk;
            if payload && block < self.layout.blocks {
                self.check(*entry)?;
            }
        }
        if let Some(place) = self.pages.get(page as usize) {
            let empty = entries.iter().all(|entry| *entry == 0);
            place.get_or_init(|| if empty { Box::default() } else { entries });
        }
        Ok(())
    }

    /// Whether an entry is one that can be followed.
    fn check(&self, entry: u64) -> Result<(), Error> {
        let place = entry & PLACE;
        match entry & STATE {
            0..=3 => Ok(()),
            FULLY_PRESENT if place < 1 << 20 || place >= self.container.len() => {
                Err(Error::Corrupt)
            }
            // The log is for metadata; here it would change the disk's bytes.
            FULLY_PRESENT if self.layout.changes.touch(place, place + self.layout.block_size) => {
                Err(Error::Unsupported)
            }
            FULLY_PRESENT => Ok(()),
            _ => Err(Error::Corrupt),
        }
    }
}

impl Image for Vhdx {
    fn info(&self) -> &Info {
        &self.shared.info
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(self.clone())
    }

    fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        self.shared.find(offset, len)
    }

    fn load<'a>(&'a self, io: &'a Io, offset: u64) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.shared.load_page(io, offset))
    }

    fn flush<'a>(&'a self, _: &'a Io) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }

    fn discard<'a>(
        &'a self,
        _: &'a Io,
        _: u64,
        _: u64,
        _: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Err(Error::ReadOnly) })
    }

    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        Box::pin(async move {
            if let Extent::NotLoaded = self.shared.find(offset, len) {
                self.shared.load_page(io, offset).await?;
            }
            match self.shared.find(offset, len) {
                Extent::Data { offset, len, .. } => {
                    Ok(Status { at: Some(offset), ..Status::data(len) })
                }
                Extent::Zero { len, .. } => Ok(Status::hole(len)),
                _ => Err(Error::Corrupt),
            }
        })
    }

    fn online_check<'a>(
        &'a self,
        _: &'a Io,
    ) -> Boxed<'a, Result<Option<Box<dyn OnlineCheck>>, ToolError>> {
        Box::pin(async { Ok(Some(Box::new(Served(self.shared.container.clone())) as Box<_>)) })
    }

    fn current_size(&self) -> Result<u64, Error> {
        Ok(self.shared.info.size)
    }
}
