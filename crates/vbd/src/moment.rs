//! A moment of a disk as an image, which is only read: what it holds lies in the disk and in what was saved of it.

use std::sync::{Arc, Mutex, PoisonError};

use ringtap_image::qcow2::{BitmapSet, Bits};
use ringtap_image::{Boxed, Error, Extent, Image, Info, Status};
use ringtap_io::{Io, Mem};

use crate::backup::{Moment, Moments, View};
use crate::mirror::error::MirrorError;
use crate::track::Tracker;

/// The image. Forks share it.
#[derive(Clone)]
struct MomentImage(Arc<Shared>);

struct Shared {
    info: Info,
    moments: Moments,
    /// Views that nobody reads by at the moment.
    idle: Mutex<Vec<View>>,
    bitmaps: Option<Arc<BitmapSet>>,
}

impl Moment {
    /// The moment as an image, with what these marks were when this was called as bitmaps that are shown. It can be read as long
    /// as the moment is kept.
    pub fn image(&self, bitmaps: &[(String, Arc<Tracker>)]) -> Box<dyn Image> {
        let of = self.disk().info();
        let info = Info {
            format: "moment",
            size: self.size(),
            read_only: true,
            request_alignment: 1,
            memory_alignment: 1,
            discard: false,
            fast_zero: false,
            ..of.clone()
        };
        let shown = bitmaps.iter().filter_map(|(name, marks)| {
            let bits = Bits::new(info.size, marks.granularity().trailing_zeros() as u8)?;
            let mut at = 0;
            while let Some(range) = marks.next(at, u64::MAX) {
                at = range.end;
                bits.set(range.start, range.end - range.start);
            }
            Some((name.clone(), Arc::new(bits)))
        });
        let bitmaps = Some(Arc::new(BitmapSet::showing(shown.collect())));
        let moments = self.moments();
        Box::new(MomentImage(Arc::new(Shared { info, moments, idle: Mutex::default(), bitmaps })))
    }
}

/// A view for as long as it is used.
struct Borrowed<'a>(&'a Shared, Option<View>);

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        self.0.idle.lock().unwrap_or_else(PoisonError::into_inner).extend(self.1.take());
    }
}

impl Shared {
    fn view(&self) -> Borrowed<'_> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Borrowed(self, Some(idle.unwrap_or_else(|| self.moments.fork())))
    }
}

fn failed(why: MirrorError) -> Error {
    match why {
        MirrorError::Read { error, .. } | MirrorError::Status { error, .. } => error,
        _ => Error::Os(libc::EIO),
    }
}

impl Image for MomentImage {
    fn info(&self) -> &Info {
        &self.0.info
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(self.clone())
    }

    fn map(&self, _: u64, len: u64) -> Extent<'_> {
        // Read by the image itself, as clusters are that are compressed.
        Extent::Compressed { len }
    }

    fn decompress<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        mem: Mem,
    ) -> Boxed<'a, Result<usize, Error>> {
        Box::pin(async move {
            let view = self.0.view();
            let Some(own) = &view.1 else { return Err(Error::Stopped) };
            own.read(io, offset, mem).await.map_err(failed)?;
            Ok(mem.len())
        })
    }

    fn bitmaps(&self) -> Option<&Arc<BitmapSet>> {
        self.0.bitmaps.as_ref()
    }

    fn flush<'a>(&'a self, _: &'a Io) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }

    fn discard<'a>(
        &'a self,
        _: &'a Io,
        _: u64,
        _: u64,
        _: ringtap_image::Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Err(Error::ReadOnly) })
    }

    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        Box::pin(async move {
            let view = self.0.view();
            let Some(own) = &view.1 else { return Err(Error::Stopped) };
            own.status(io, offset, len).await.map_err(failed)
        })
    }

    fn current_size(&self) -> Result<u64, Error> {
        Ok(self.0.info.size)
    }
}
