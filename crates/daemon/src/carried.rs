//! The dirty bitmaps inside a disk's image, which go on where the disk goes on in another image.

use std::sync::Arc;

use ringtap_image::qcow2::{self, BitmapSet, Carried, There};
use ringtap_image::{CacheMode, Container, Format, Image, OpenOptions, Place, on_a_ring};

use crate::Disk;

/// Those of an image that record, or are shown.
pub(crate) fn of(image: &dyn Image) -> Vec<Carried> {
    image.bitmaps().map(|bitmaps| bitmaps.carried()).unwrap_or_default()
}

/// Have an image at rest hold them, at first as if all had changed. Where it cannot, those that nobody is shown stay behind.
pub(crate) fn carry(
    disk: &Disk,
    place: &Place,
    format: Format,
    all: &[Carried],
    there: There,
) -> Result<(), String> {
    if all.is_empty() {
        return Ok(());
    }
    let end = match format {
        Format::Qcow2 => put(place, all, there),
        format => Err(format!("{format} images hold none")),
    };
    let Err(why) = end else { return Ok(()) };
    let why = format!(
        "the dirty bitmaps inside the disk's image do not go on in {}: {why}",
        place.path().display()
    );
    if !disk.options.bitmaps.is_empty() {
        return Err(why);
    }
    tracing::warn!("{why}");
    Ok(())
}

fn put(place: &Place, all: &[Carried], there: There) -> Result<(), String> {
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        cache: CacheMode::Writeback,
        // What lies below has one.
        succeeded: there == There::Stays,
        ..OpenOptions::default()
    };
    let container = Container::open(place, &options).map_err(|error| error.to_string())?;
    let all = all.to_vec();
    let end = on_a_ring(place.path(), |io| async move {
        qcow2::carry_bitmaps(&io, &container, &all, there).await
    });
    end.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
}

/// The bitmaps of an image and of the one that takes its place.
pub(crate) struct Both {
    from: Arc<BitmapSet>,
    to: Arc<BitmapSet>,
}

impl Both {
    pub(crate) fn of(from: &dyn Image, to: &dyn Image) -> Option<Both> {
        let (from, to) = (from.bitmaps()?.clone(), to.bitmaps()?.clone());
        Some(Both { from, to })
    }

    /// While the disk stands still: what has changed until now is known to the bitmaps that go on.
    pub(crate) fn go_on(&self) {
        self.to.be_as(&self.from);
    }
}
