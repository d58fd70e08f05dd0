//! Raw images: the disk's bytes as they are, in a file or on a block device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ringtap_io::Io;

use crate::{
    Boxed, Container, Discard, Error, Extent, Image, Info, LayerState, OpenError, OpenOptions,
    Place, Status, Traits,
};

/// A raw image.
#[derive(Clone)]
pub struct Raw {
    container: Container,
    info: Info,
    /// Its size at opening, or since it has grown.
    size: Arc<AtomicU64>,
}

impl Raw {
    /// Open and lock a regular file or a block device.
    pub fn open(place: impl Into<Place>, options: &OpenOptions) -> Result<Raw, OpenError> {
        Ok(Raw::new(Container::open(place, options)?))
    }

    /// A raw image in a container.
    pub fn new(container: Container) -> Raw {
        let Traits { regular, read_only, request_alignment, memory_alignment, .. } =
            *container.traits();
        let Traits { logical_block_size, physical_block_size, .. } = *container.traits();
        let discard_alignment =
            if regular { request_alignment } else { u64::from(logical_block_size) };
        let info = Info {
            format: "raw",
            size: container.len().next_multiple_of(512),
            read_only,
            request_alignment,
            memory_alignment,
            discard_alignment,
            logical_block_size,
            physical_block_size,
            discard: true,
            fast_zero: true,
            rotational: container.is_rotational(),
        };
        let size = Arc::new(AtomicU64::new(info.size));
        Raw { container, info, size }
    }

    async fn discard_range(
        &self,
        io: &Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Result<(), Error> {
        let container = &self.container;
        let punch = || container.punch(io, offset, len);
        let forget = || container.forget(io, offset, len);
        let zero = || container.zero_range(io, offset, len);
        match mode {
            Discard::Free => match forget().await {
                Err(Error::Unsupported) => Ok(()),
                end => end,
            },
            Discard::Zero { unmap: true } => match punch().await {
                Err(Error::Unsupported) => zero().await,
                end => end,
            },
            Discard::Zero { unmap: false } => match zero().await {
                Err(Error::Unsupported) if container.can_allocate() => {
                    punch().await?;
                    container.allocate(io, offset, len).await
                }
                end => end,
            },
        }
    }
}

impl Image for Raw {
    fn info(&self) -> &Info {
        &self.info
    }

    fn state(&self) -> LayerState {
        LayerState::of(&self.info, Some(&self.container))
    }

    fn fork(&self) -> Box<dyn Image> {
        let mut own = self.clone();
        // Who opens an image upon it reads as far as it reaches now.
        own.info.size = own.size.load(Relaxed);
        Box::new(own)
    }

    #[inline]
    fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        Extent::Data { file: self.container.file(), offset, len, writable: true, cipher: None }
    }

    fn container(&self) -> Option<&Container> {
        Some(&self.container)
    }

    fn place(&self) -> Option<Place> {
        Some(self.container.place())
    }

    fn let_write(&self, may: bool) {
        self.container.let_write(may);
    }

    fn lost_by(&self) -> Option<Error> {
        self.container.lost_by()
    }

    fn is_written_anew(&self) {
        self.container.is_written_anew();
    }

    fn stop_writing(&self) {
        self.container.stop_writing();
    }

    fn flush<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.container.sync(io))
    }

    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.discard_range(io, offset, len, mode))
    }

    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        Box::pin(self.container.status(io, offset, len))
    }

    fn grow(&self, size: u64) -> Result<(), Error> {
        self.container.lengthen(size)?;
        self.size.fetch_max(size, Relaxed);
        Ok(())
    }

    fn current_size(&self) -> Result<u64, Error> {
        let (size, known) = (self.container.present_len()?, self.size.load(Relaxed));
        // A write to an incomplete last block made the file longer, not the disk.
        let whole = known.next_multiple_of(self.info.request_alignment);
        if size > known && size <= whole {
            return Ok(known);
        }
        let size = size.next_multiple_of(512);
        self.size.store(size, Relaxed);
        Ok(size)
    }
}
