//! Dynamic and differencing VHDs: where a disk's bytes are.

use std::sync::{Arc, OnceLock};

use ringtap_io::sync::Mutex;
use ringtap_io::sync::atomic::{AtomicBool, AtomicU32, Ordering::Acquire, Ordering::SeqCst};
use ringtap_io::{Event, Io};

use super::bitmap::{Bitmap, Bitmaps};
use super::check::Served;
use super::footer::SECTOR;
use super::layout::{Layout, Sparse};
use super::room::Room;
use super::shared::Shared;
use crate::group_commit::GroupCommit;
use crate::lower::Lower;
use crate::qcow2::{ToolError, failed};
use crate::state::LogState;
use crate::{
    Allocation, Boxed, Container, Discard, Error, Extent, Image, Info, LayerState, OnlineCheck,
    Status,
};

/// A dynamic or differencing VHD. Clones are the same one.
#[derive(Clone)]
pub(super) struct Dynamic {
    pub(super) shared: Arc<Shared>,
}

impl Dynamic {
    /// The structures have been checked.
    pub(super) fn new(
        container: Container,
        layout: Layout,
        sparse: Sparse,
        parent: Option<Box<dyn Image>>,
    ) -> Dynamic {
        let traits = *container.traits();
        let below = parent.as_ref().map(|parent| parent.info());
        let request_alignment =
            traits.request_alignment.max(below.map_or(1, |info| info.request_alignment));
        let info = Info {
            format: "vpc",
            size: layout.size,
            read_only: traits.read_only,
            request_alignment,
            memory_alignment: traits
                .memory_alignment
                .max(below.map_or(1, |info| info.memory_alignment)),
            discard_alignment: request_alignment.max(SECTOR),
            logical_block_size: SECTOR as u32,
            physical_block_size: traits.physical_block_size,
            discard: true,
            fast_zero: false,
            rotational: container.is_rotational() || below.is_some_and(|info| info.rotational),
        };
        let Sparse { header, table, data_end, .. } = sparse;
        let room = Room::new(&container, data_end, layout.tail);
        let bitmaps = Bitmaps::new(table.len());
        Dynamic {
            shared: Arc::new(Shared {
                container,
                info,
                footer: layout.footer,
                shift: header.block_size.trailing_zeros(),
                header,
                table: table.into_iter().map(AtomicU32::new).collect(),
                bitmaps,
                parent: Lower::new(parent),
                room: Mutex::new(room),
                restart: OnceLock::new(),
                dirty: AtomicBool::new(false),
                flushes: GroupCommit::default(),
                settled: Event::default(),
                #[cfg(feature = "sabotage")]
                sabotage: super::sabotage::of_thread(),
            }),
        }
    }
}

impl Shared {
    #[inline]
    fn find(&self, offset: u64, len: u64) -> Extent<'_> {
        let (block, inside) = self.block_of(offset);
        let rest = self.block_size() - inside;
        let Some(place) = self.place_of(block) else {
            let mut run = rest;
            let mut next = block + 1;
            while run < len && self.place_of(next).is_none() {
                run += self.block_size();
                next += 1;
            }
            return self.parent.map(offset, run.min(len));
        };
        let Some(bitmap) = self.bitmaps.get(block) else { return Extent::NotLoaded };
        let len = len.min(rest);
        let (set, run) = bitmap.run(inside / SECTOR, (inside + len).div_ceil(SECTOR));
        let len = len.min(run * SECTOR - inside % SECTOR);
        if !set {
            return self.parent.map(offset, len);
        }
        Extent::Data {
            file: self.container.file(),
            offset: place + self.header.bitmap_size() + inside,
            len,
            writable: !self.info.read_only,
            cipher: None,
        }
    }

    pub(super) async fn load_block(&self, io: &Io, offset: u64) -> Result<(), Error> {
        let (block, _) = self.block_of(offset);
        match self.place_of(block) {
            Some(place) if self.bitmaps.get(block).is_none() => {
                let mut bytes = vec![0; self.header.bitmap_size() as usize];
                self.container.read(io, place, &mut bytes).await?;
                let sectors = self.block_size() / SECTOR;
                self.bitmaps.put(block, Bitmap::parse(&bytes, sectors));
                Ok(())
            }
            _ => match self.parent.reaching(offset, 1) {
                Some((parent, _)) => parent.load(io, offset).await,
                None => Ok(()),
            },
        }
    }

    /// Zeros without writing them: what is there is punched out, or nothing is there.
    async fn discard_range(
        &self,
        io: &Io,
        mut offset: u64,
        len: u64,
        mode: Discard,
    ) -> Result<(), Error> {
        let end = offset + len;
        while offset < end {
            offset += match self.find(offset, end - offset) {
                Extent::NotLoaded => {
                    self.load_block(io, offset).await?;
                    0
                }
                Extent::Data { offset: at, len, writable: true, .. } => {
                    self.discard_data(io, at, len, mode).await?;
                    len
                }
                Extent::Zero { len, .. } => len,
                Extent::Data { len, .. } | Extent::Compressed { len } if mode == Discard::Free => {
                    len
                }
                // The parent's bytes are hidden only by zeros written over them.
                Extent::Data { .. } | Extent::Compressed { .. } => return Err(Error::Unsupported),
            };
        }
        Ok(())
    }

    /// The block keeps its place in the file; the file system may have the space back.
    async fn discard_data(&self, io: &Io, at: u64, len: u64, mode: Discard) -> Result<(), Error> {
        let container = &self.container;
        let traits = container.traits();
        let device_block = traits.request_alignment.max(u64::from(traits.logical_block_size));
        if !traits.regular && (at | len) % device_block != 0 {
            return if mode == Discard::Free { Ok(()) } else { Err(Error::Unsupported) };
        }
        match mode {
            Discard::Free => match container.punch(io, at, len).await {
                Err(Error::Unsupported) => Ok(()),
                end => end,
            },
            Discard::Zero { unmap: true } => match container.punch(io, at, len).await {
                Err(Error::Unsupported) => container.zero_range(io, at, len).await,
                end => end,
            },
            Discard::Zero { unmap: false } => container.zero_range(io, at, len).await,
        }
    }

    async fn find_status(&self, io: &Io, offset: u64, len: u64) -> Result<Status, Error> {
        loop {
            let (block, inside) = self.block_of(offset);
            let own = self
                .place_of(block)
                .map(|place| (self.container.file(), place + self.header.bitmap_size() + inside));
            match self.find(offset, len) {
                Extent::NotLoaded => self.load_block(io, offset).await?,
                Extent::Data { file, offset: at, len, .. } if own == Some((file, at)) => {
                    return Ok(Status { at: Some(at), ..Status::data(len) });
                }
                Extent::Data { len, .. }
                | Extent::Zero { len, .. }
                | Extent::Compressed { len } => {
                    let Some((parent, len)) = self.parent.reaching(offset, len) else {
                        let depth = u32::from(self.parent.is_there());
                        return Ok(Status { depth, present: depth == 0, ..Status::hole(len) });
                    };
                    let below = parent.status(io, offset, len).await?;
                    return Ok(Status { depth: below.depth + 1, ..below });
                }
            }
        }
    }
}

impl Image for Dynamic {
    fn info(&self) -> &Info {
        &self.shared.info
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(self.clone())
    }

    #[inline]
    fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        self.shared.find(offset, len)
    }

    fn load<'a>(&'a self, io: &'a Io, offset: u64) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.shared.load_block(io, offset))
    }

    fn below(&self) -> Option<&dyn Image> {
        self.shared.parent.image()
    }

    fn container(&self) -> Option<&crate::Container> {
        Some(&self.shared.container)
    }

    fn place(&self) -> Option<crate::Place> {
        Some(self.shared.container.place())
    }

    fn let_write(&self, may: bool) {
        self.shared.container.let_write(may);
    }

    fn stop_writing(&self) {
        self.shared.container.stop_writing();
    }

    fn opens_again(&self) {
        self.shared.restart.get().into_iter().for_each(crate::RestartLog::stays_whole);
    }

    fn decompress<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        mem: ringtap_io::Mem,
    ) -> Boxed<'a, Result<usize, Error>> {
        match self.shared.parent.image() {
            Some(parent) => parent.decompress(io, offset, mem),
            None => Box::pin(async { Err(Error::Corrupt) }),
        }
    }

    fn allocate<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
    ) -> Boxed<'a, Result<Option<Allocation<'a>>, Error>> {
        Box::pin(self.shared.allocate(io, offset, len))
    }

    fn commit(&self, room: Allocation<'_>, written: bool) {
        self.shared.commit(&room, written);
    }

    fn is_dirty(&self) -> bool {
        self.shared.dirty.load(Acquire)
    }

    fn flush<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.shared.flush(io))
    }

    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.shared.discard_range(io, offset, len, mode))
    }

    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        Box::pin(self.shared.find_status(io, offset, len))
    }

    fn online_check<'a>(
        &'a self,
        io: &'a Io,
    ) -> Boxed<'a, Result<Option<Box<dyn OnlineCheck>>, ToolError>> {
        Box::pin(async move {
            let shared = &self.shared;
            if !shared.info.read_only {
                shared.flush(io).await.map_err(failed(
                    &shared.container,
                    "write the tables of",
                    0,
                ))?;
            }
            let container = self.shared.container.clone();
            Ok(Some(Box::new(Served { container, grows: !self.shared.info.read_only }) as Box<_>))
        })
    }

    fn current_size(&self) -> Result<u64, Error> {
        Ok(self.shared.info.size)
    }

    fn state(&self) -> LayerState {
        let shared = &*self.shared;
        LayerState {
            dirty: shared.dirty.load(SeqCst),
            flushing: shared.flushes.is_running(),
            allocating: shared.room().writes_in_flight(),
            restart_log: shared.restart.get().map(LogState::of),
            below: shared.parent.image().map(|parent| Box::new(parent.state())),
            ..LayerState::of(&shared.info, Some(&shared.container))
        }
    }

    fn ends_with_process(&self) -> bool {
        !self.shared.info.read_only && self.shared.restart.get().is_none()
    }

    fn abandon(&self) {
        self.shared.flushes.abandon();
        self.shared.settled.close();
        self.shared.container.abandon();
        if let Some(parent) = self.shared.parent.image() {
            parent.abandon();
        }
    }

    fn close<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.shared.close(io))
    }
}
