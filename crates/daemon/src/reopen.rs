//! The image of a disk that stands still, closed, changed as an image at rest is, and opened anew.

use ringtap_image::{Format, Image, OpenOptions, Place, open_on, qcow2};
use ringtap_io::{Io, Panic};
use ringtap_vbd::{Quiesced, Vbd};

use crate::{Disk, Error};

/// What the image is opened upon, and how, once it has been changed.
pub(crate) struct Anew {
    pub(crate) options: OpenOptions,
    /// What lies below it then; those that lie below it now where it could not be changed.
    pub(crate) below: Option<Box<dyn Image>>,
}

/// Close the image of a disk, change it, and open it again. `put` lets it take its own place. Where it cannot be opened
/// again the disk is stopped.
pub(crate) async fn reopen(
    io: &Io,
    vbd: &Vbd,
    still: &Quiesced<'_>,
    failed: &dyn Fn(String) -> Error,
    anew: Anew,
    change: impl AsyncFnOnce(&Place) -> Result<(), Error>,
    put: impl FnOnce(&Quiesced<'_>, Box<dyn Image>) -> Result<(), ringtap_image::Error>,
) -> Result<(), Error> {
    let wrong = |error: ringtap_image::Error| failed(error.to_string());
    let image = still.image().map_err(wrong)?;
    let place = image.place().ok_or_else(|| failed("it has no file".into()))?;
    let before = image.below().map(Image::fork);
    if !image.info().read_only {
        image.close(io).await.map_err(wrong)?;
    }
    // What is opened next is the same image; this handle of it is not used again.
    image.stop_writing();
    image.let_write(true);
    let changed = change(&place).await;
    let below = if changed.is_ok() { anew.below } else { before };
    let opened = match below {
        // Those below stay as they are open.
        Some(below) if anew.options.format == Some(Format::Qcow2) => {
            qcow2::open_upon(io, &place, &anew.options, below).await
        }
        _ => open_on(io, &place, &anew.options).await,
    };
    let opened = opened.map_err(Error::from);
    let placed = opened.and_then(|image| put(still, image).map_err(wrong));
    if let Err(error) = &placed {
        // There is no handle left by which it could be written to.
        vbd.health().fail(Panic::of(format!("it could not be opened again: {error}")));
    }
    changed.and(placed)
}

/// How a disk's image is opened anew as what it is.
pub(crate) fn as_it_is(disk: &Disk, format: Format) -> OpenOptions {
    OpenOptions { format: Some(format), force_format: false, ..disk.options.clone() }
}
