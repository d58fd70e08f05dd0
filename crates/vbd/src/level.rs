//! The image as one queue thread serves it, until another takes its place.

use std::sync::Arc;

use ringtap_image::qcow2::BitmapSet;
use ringtap_image::{Discard, Error, Extent, Grace, Image, UnderWay};
use ringtap_io::{Io, Mem};

use crate::disk::Shared;
use crate::gate::Writers;
use crate::stats::QueueStats;
use crate::transfer::Place;
use crate::{Kind, Request};

/// After the first what was freed is not referred to any more, after the others nobody can be looking at it.
const FLUSHES_TO_REUSE: usize = 3;

/// A queue thread's handle of the image.
pub(crate) struct Level {
    /// Which of the disk's images it is.
    pub(crate) number: u64,
    pub(crate) image: Box<dyn Image>,
    pub(crate) under_way: Arc<UnderWay>,
    bitmaps: Option<Arc<BitmapSet>>,
}

impl Level {
    /// `grace` is the image's, or that of a disk whose image has none.
    pub(crate) fn new(number: u64, image: Box<dyn Image>, grace: &Arc<Grace>) -> Level {
        let bitmaps = image.bitmaps().cloned();
        Level { number, image, under_way: grace.add_thread(), bitmaps }
    }

    /// Wait until what was freed lately may be used again, outside of the epoch: it rests until flushes have come,
    /// and nobody is under way who may have looked at it.
    pub(crate) async fn rest(&self, io: &Io) -> Result<(), Error> {
        for _ in 0..FLUSHES_TO_REUSE {
            self.image.flush(io).await.map_err(|_| Error::Full)?;
            if let Some(grace) = self.image.grace() {
                grace.over(grace.epoch()).await;
            }
        }
        Ok(())
    }
}

/// One request's way to the image.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub(crate) image: &'a dyn Image,
    pub(crate) shared: &'a Shared,
    pub(crate) writers: &'a Writers,
    pub(crate) stats: &'a QueueStats,
    bitmaps: Option<&'a BitmapSet>,
}

impl<'a> Pass<'a> {
    pub(crate) fn new(
        level: &'a Level,
        shared: &'a Shared,
        writers: &'a Writers,
        stats: &'a QueueStats,
    ) -> Pass<'a> {
        let bitmaps = level.bitmaps.as_deref();
        Pass { image: &*level.image, shared, writers, stats, bitmaps }
    }

    /// Carry a request out.
    #[inline]
    pub(crate) async fn carry_out(&self, io: &Io, request: &Request) -> Result<(), Error> {
        let Request { kind, offset, len, mem, .. } = *request;
        let end = offset.checked_add(len).ok_or(Error::Range)?;
        if end > self.shared.size() {
            return Err(Error::Range);
        }
        match kind {
            Kind::Read => self.read(io, offset, mem).await,
            Kind::Flush => self.flush(io).await,
            _ if self.shared.info.read_only => Err(Error::ReadOnly),
            Kind::Write => {
                self.note(offset, len);
                self.write(io, offset, mem, self.durable(request)).await
            }
            Kind::Discard => {
                self.note(offset, len);
                self.discard(io, offset, len, Discard::Free, self.durable(request)).await
            }
            Kind::WriteZeroes { unmap, fast } => {
                self.note(offset, len);
                self.write_zeroes(io, offset, len, unmap, fast, self.durable(request)).await
            }
        }
    }

    /// Note in bitmaps what is about to change: before anything does, for the server may be killed in
    /// the middle of it.
    #[inline]
    pub(crate) fn note(&self, offset: u64, len: u64) {
        if let Some(bitmaps) = self.bitmaps {
            bitmaps.note(offset, len);
        }
    }

    fn durable(&self, request: &Request) -> bool {
        let wanted = request.fua || !self.shared.write_cache();
        wanted && self.shared.cache.flushes()
    }

    pub(crate) async fn flush(&self, io: &Io) -> Result<(), Error> {
        if self.shared.cache.flushes() && !self.shared.info.read_only {
            self.image.flush(io).await?;
        }
        Ok(())
    }

    /// See [`Image::compress`].
    pub(crate) async fn compress(&self, io: &Io, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.note(offset, bytes.len() as u64);
        self.image.compress(io, offset, bytes).await
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
