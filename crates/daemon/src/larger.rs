//! Images of formats with tables, made larger while their disks are served: while a disk stands still its image is closed,
//! changed as an image at rest is, and opened anew.

use std::time::Duration;

use ringtap_image::qcow2::{self, ResizeOptions};
use ringtap_image::{Container, Format, Image, OpenOptions, Place, vhd};
use ringtap_io::{Io, Tasks};
use ringtap_vbd::{Quiesced, Vbd};

use crate::reopen::{Anew, as_it_is, reopen};
use crate::{Disk, Error};

/// How long requests in flight may take before nothing is changed.
const LIMIT: Duration = Duration::from_secs(10);

/// Make a disk's image larger.
pub(crate) fn make_larger(disk: &Disk, vbd: &ringtap_vbd::Disk, size: u64) -> Result<(), Error> {
    if !disk.options.bitmaps.is_empty() {
        return Err(failed(disk, "it shows dirty bitmaps, whose clients would not follow"));
    }
    let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
    let (io, own, disk) = (tasks.io().clone(), vbd.fork(), disk.clone());
    let driven = |source| Error::Process { tried: "drive the io_uring", source };
    tasks.block_on(async move { change(&io, &disk, &own, size).await }).map_err(driven)?
}

fn failed(disk: &Disk, why: impl Into<String>) -> Error {
    Error::Resize { path: disk.path.clone(), why: why.into() }
}

async fn change(io: &Io, disk: &Disk, vbd: &Vbd, size: u64) -> Result<(), Error> {
    let wrong = |error: ringtap_image::Error| failed(disk, error.to_string());
    let limit = u64::try_from(LIMIT.as_nanos()).unwrap_or(u64::MAX);
    let still = vbd.quiesce(io, limit).await.map_err(|busy| failed(disk, busy.to_string()))?;
    let image = still.image().map_err(wrong)?;
    let format = image.info().format.parse::<Format>();
    let format = format.ok().filter(|format| matches!(format, Format::Qcow2 | Format::Vhd));
    let Some(format) = format else {
        let format = image.info().format;
        return Err(failed(
            disk,
            format!("images of the format {format} are not made larger while they are served"),
        ));
    };
    let below = image.below().map(Image::fork);
    let backing_size = below.as_ref().map(|below| below.info().size);
    drop(image);
    let options = as_it_is(disk, format);
    let anew = Anew { options: options.clone(), below };
    let change = async |place: &Place| at_rest(io, disk, place, &options, size, backing_size).await;
    let put = |still: &Quiesced<'_>, image| still.larger(image).map(drop);
    // Threads here have small stacks.
    Box::pin(reopen(io, vbd, &still, &|why| failed(disk, why), anew, change, put)).await
}

async fn at_rest(
    io: &Io,
    disk: &Disk,
    place: &Place,
    options: &OpenOptions,
    size: u64,
    backing_size: Option<u64>,
) -> Result<(), Error> {
    let container = Container::open(place, options)?;
    match options.format {
        Some(Format::Vhd) => Ok(vhd::resize(io, &container, size).await?),
        _ => {
            let wanted = ResizeOptions { size, backing_size, ..ResizeOptions::default() };
            let end = qcow2::resize(io, &container, None, &wanted).await;
            end.map_err(|error| failed(disk, error.to_string()))
        }
    }
}
