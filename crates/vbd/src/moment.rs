//! A moment of a disk as an image, which is only read: what it holds lies in the disk and in what was saved of it.

use std::sync::Arc;

use ringtap_image::bitmap_store::{BitPage, PAGE_WORDS};
use ringtap_image::qcow2::{BitmapSet, Bits};
use ringtap_image::{Boxed, Error, Extent, Image, Info, Status};
use ringtap_io::{Io, Mem};

use crate::backup::{Borrowed, Moment, Moments};
use crate::mirror::error::MirrorError;
use crate::{Disk, LeftMarks};

/// Bits of a page.
const PAGE: u64 = PAGE_WORDS as u64 * 64;

/// The image. Forks share it.
#[derive(Clone)]
struct MomentImage(Arc<Shared>);

struct Shared {
    info: Info,
    moments: Moments,
    bitmaps: Option<Arc<BitmapSet>>,
}

impl Moment {
    /// The moment as an image, with these as bitmaps that are shown. It can be read as long as the moment is kept.
    pub fn image(&self, bitmaps: &[LeftMarks]) -> Box<dyn Image> {
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
        let shown = bitmaps.iter().filter_map(|one| {
            let bits = bits(info.size, one.granularity, &one.marks)?;
            Some((one.bitmap.clone(), Arc::new(bits)))
        });
        let bitmaps = Some(Arc::new(BitmapSet::showing(shown.collect())));
        let moments = self.moments();
        Box::new(MomentImage(Arc::new(Shared { info, moments, bitmaps })))
    }
}

/// The bits of a bitmap, of a disk of so many bytes; behind those there is nothing.
fn bits(size: u64, granularity: u64, marks: &[BitPage]) -> Option<Bits> {
    let bits = Bits::new(size, granularity.trailing_zeros() as u8)?;
    for (number, words) in marks {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bits.add_bytes(number.checked_mul(PAGE)?, &bytes);
    }
    Some(bits)
}

/// The pages in which a bit is set.
fn pages(bits: &Bits) -> Vec<BitPage> {
    let (mut pages, mut at) = (vec![], 0);
    while at < bits.size() {
        let (is_set, len) = bits.run(at, u64::MAX);
        if !is_set {
            at += len.max(1);
            continue;
        }
        let number = (at >> bits.granularity_bits()) / PAGE;
        let mut bytes = [0; PAGE_WORDS * 8];
        bits.to_bytes(number * PAGE, &mut bytes);
        let words = bytes.chunks_exact(8).filter_map(|word| word.try_into().ok());
        pages.push((number, words.map(u64::from_le_bytes).collect()));
        at = ((number + 1) * PAGE).saturating_mul(1 << bits.granularity_bits());
    }
    pages
}

impl Disk {
    /// What its bitmaps are that are only shown, as a moment's are, in words for another process.
    pub fn shown_marks(&self) -> Vec<LeftMarks> {
        let set = self.bitmaps();
        let shown = set.iter().flat_map(|set| set.shown());
        let left = shown.map(|(name, bits)| LeftMarks {
            bitmap: name.clone(),
            granularity: 1 << bits.granularity_bits(),
            recording: false,
            marks: pages(bits),
        });
        left.collect()
    }
}

impl Shared {
    fn view(&self) -> Borrowed<'_> {
        self.moments.borrow()
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
            let Some(own) = &view.view else { return Err(Error::Stopped) };
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
            let Some(own) = &view.view else { return Err(Error::Stopped) };
            own.status(io, offset, len).await.map_err(failed)
        })
    }

    fn current_size(&self) -> Result<u64, Error> {
        Ok(self.0.info.size)
    }
}
