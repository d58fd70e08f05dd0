//! The image as one queue thread serves it, until another takes its place.

use std::ops::Range;
use std::sync::Arc;

use ringtap_image::qcow2::BitmapSet;
use ringtap_image::{Boxed, Discard, Epochs, Error, Image, InFlight};
use ringtap_io::{Io, probes};

use crate::former::Former;
use crate::gate::Writers;
use crate::medium::Medium;
use crate::stats::QueueStats;
use crate::track::Changing;
use crate::{Kind, Request};

/// After the first what was freed is not referred to any more, after the others nobody can be looking at it.
const FLUSHES_TO_REUSE: usize = 3;

/// A queue thread's handle of the image.
pub(crate) struct Level {
    /// Which of the disk's images it is.
    pub(crate) number: u64,
    pub(crate) image: Box<dyn Image>,
    pub(crate) in_flight: Arc<InFlight>,
    bitmaps: Option<Arc<BitmapSet>>,
    /// Images below it that are not stable yet, the lowest first.
    formers: Vec<Former>,
}

impl Level {
    /// `epochs` is the image's, or that of a disk whose image has none.
    pub(crate) fn new(
        number: u64,
        image: Box<dyn Image>,
        formers: Vec<Former>,
        epochs: &Arc<Epochs>,
    ) -> Level {
        let bitmaps = image.bitmaps().cloned();
        Level { number, image, in_flight: epochs.add_thread(), bitmaps, formers }
    }

    /// Wait until what was freed lately may be used again, outside of the epoch: it rests until flushes have come,
    /// and nobody is in flight who may have looked at it.
    pub(crate) async fn rest(&self, io: &Io) -> Result<(), Error> {
        for _ in 0..FLUSHES_TO_REUSE {
            self.image.flush(io).await.map_err(|_| Error::Full)?;
            if let Some(epochs) = self.image.epochs() {
                epochs.over(epochs.epoch()).await;
            }
        }
        Ok(())
    }
}

/// One request's way to the image.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub(crate) image: &'a dyn Image,
    pub(crate) medium: &'a Medium,
    pub(crate) writers: &'a Writers,
    pub(crate) stats: &'a QueueStats,
    level: &'a Level,
    /// Whether whoever asks may only read.
    pub(crate) read_only: bool,
}

impl<'a> Pass<'a> {
    pub(crate) fn new(
        level: &'a Level,
        medium: &'a Medium,
        writers: &'a Writers,
        stats: &'a QueueStats,
        read_only: bool,
    ) -> Pass<'a> {
        Pass { image: &*level.image, medium, writers, stats, level, read_only }
    }

    /// What a request covers, on the disk.
    #[inline]
    pub(crate) fn checked(&self, request: &Request) -> Result<Range<u64>, Error> {
        let end = request.offset.checked_add(request.len).ok_or(Error::Range)?;
        if end > self.medium.size() { Err(Error::Range) } else { Ok(request.offset..end) }
    }

    /// As [`Pass::carry_out`], on the heap: its state would make the future of every request larger.
    pub(crate) fn carry_out_boxed(
        self,
        io: &'a Io,
        request: &'a Request,
    ) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async move { self.carry_out(io, request).await })
    }

    /// Carry a request out.
    #[inline]
    pub(crate) async fn carry_out(&self, io: &Io, request: &Request) -> Result<(), Error> {
        let Request { kind, offset, len, mem, .. } = *request;
        let range = self.checked(request)?;
        match kind {
            Kind::Read => self.read(io, offset, mem).await,
            Kind::Flush => self.flush(io).await,
            _ if self.read_only => Err(Error::ReadOnly),
            Kind::Write => {
                let _changing = self.note(offset, len);
                if let Some(keep) = self.medium.bitmaps.note(offset, len) {
                    Box::pin(keep.log(io, range)).await;
                }
                self.write(io, offset, mem, self.durable(request)).await
            }
            Kind::Discard => {
                let _changing = self.note(offset, len);
                if let Some(keep) = self.medium.bitmaps.note(offset, len) {
                    Box::pin(keep.log(io, range)).await;
                }
                self.discard(io, offset, len, Discard::Free, self.durable(request)).await
            }
            Kind::WriteZeroes { unmap, fast } => {
                let _changing = self.note(offset, len);
                if let Some(keep) = self.medium.bitmaps.note(offset, len) {
                    Box::pin(keep.log(io, range)).await;
                }
                self.write_zeroes(io, offset, len, unmap, fast, self.durable(request)).await
            }
        }
    }

    /// Carry out a request that changes the disk, checked and with nothing noted in trackers: for filters.
    pub(crate) async fn change(&self, io: &Io, request: &Request) -> Result<(), Error> {
        let Request { kind, offset, len, mem, .. } = *request;
        if let Some(bitmaps) = &self.level.bitmaps {
            bitmaps.note(offset, len);
        }
        if let Some(keep) = self.medium.bitmaps.note(offset, len) {
            keep.log(io, offset..offset + len).await;
        }
        let durable = self.durable(request);
        match kind {
            Kind::Read | Kind::Flush => Err(Error::Unsupported),
            Kind::Write => self.write(io, offset, mem, durable).await,
            Kind::Discard => self.discard(io, offset, len, Discard::Free, durable).await,
            Kind::WriteZeroes { unmap, fast } => {
                self.write_zeroes(io, offset, len, unmap, fast, durable).await
            }
        }
    }

    /// Whether a request changes the disk, if it is carried out at all.
    pub(crate) fn may_change(&self, request: &Request) -> bool {
        let inside =
            request.offset.checked_add(request.len).is_some_and(|end| end <= self.medium.size());
        let changes = !matches!(request.kind, Kind::Read | Kind::Flush);
        inside && changes && !self.medium.is_read_only()
    }

    /// Note in bitmaps what is about to change: before anything does, for the server may be killed in
    /// the middle of it. And in trackers, for which that must be late, when what this gives is dropped.
    #[inline]
    pub(crate) fn note(&self, offset: u64, len: u64) -> Changing<'a> {
        if let Some(bitmaps) = &self.level.bitmaps {
            bitmaps.note(offset, len);
        }
        Changing::new(&self.medium.trackers, offset, len)
    }

    #[inline]
    pub(crate) fn durable(&self, request: &Request) -> bool {
        let wanted = request.fua || !self.medium.write_cache();
        wanted && self.medium.cache().flushes()
    }

    pub(crate) async fn flush(&self, io: &Io) -> Result<(), Error> {
        if self.medium.cache().flushes() && !self.medium.is_read_only() {
            let began = io.now();
            probes::flush_start();
            let end = self.flush_all(io).await;
            probes::flush_done(io.now().saturating_sub(began), end.is_ok());
            end?;
        }
        Ok(())
    }

    async fn flush_all(&self, io: &Io) -> Result<(), Error> {
        // What is below first: a write that is stable shows what it hid as gone, too.
        for former in &self.level.formers {
            former.flush(io).await?;
        }
        self.image.flush(io).await
    }

    /// See [`Image::compress`].
    pub(crate) async fn compress(&self, io: &Io, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let len = bytes.len() as u64;
        let _changing = self.note(offset, len);
        if let Some(keep) = self.medium.bitmaps.note(offset, len) {
            keep.log(io, offset..offset + len).await;
        }
        self.image.compress(io, offset, bytes).await
    }
}
