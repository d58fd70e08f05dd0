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

async fn stand_still<'a>(io: &Io, disk: &Disk, vbd: &'a Vbd) -> Result<Quiesced<'a>, Error> {
    let limit = u64::try_from(LIMIT.as_nanos()).unwrap_or(u64::MAX);
    vbd.quiesce(io, limit).await.map_err(|busy| failed(disk, busy.to_string()))
}

/// Make a disk's image larger.
pub(crate) fn make_larger(disk: &Disk, vbd: &ringtap_vbd::Disk, size: u64) -> Result<(), Error> {
    let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
    let (io, own, disk) = (tasks.io().clone(), vbd.fork(), disk.clone());
    let driven = |source| Error::Process { tried: "drive the io_uring", source };
    tasks.block_on(async move { change(&io, &disk, &own, size).await }).map_err(driven)?
}

/// Of the image that it is in now: it may have been opened in another.
fn format_of(vbd: &ringtap_vbd::Disk) -> Result<&'static str, ringtap_image::Error> {
    Ok(vbd.image()?.info().format)
}

fn failed(disk: &Disk, why: impl Into<String>) -> Error {
    Error::Resize { path: disk.path.clone(), why: why.into() }
}

async fn change(io: &Io, disk: &Disk, vbd: &Vbd, size: u64) -> Result<(), Error> {
    let wrong = |error: ringtap_image::Error| failed(disk, error.to_string());
    if format_of(vbd.disk()).map_err(wrong)? == Format::Luks.name() {
        return Box::pin(append(io, disk, vbd, size)).await;
    }
    let still = stand_still(io, disk, vbd).await?;
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
    if options.format == Some(Format::Vhd) {
        let container = Container::open(place, options)?;
        return Ok(vhd::resize(io, &container, size, backing_size).await?);
    }
    let (container, data) = qcow2::open_to_resize(io, place, options).await?;
    let wanted = ResizeOptions { size, backing_size, ..ResizeOptions::default() };
    let end = qcow2::resize(io, &container, data.as_ref(), &wanted).await;
    end.map_err(|error| failed(disk, error.to_string()))
}

/// Make a LUKS container larger: zeros are written through its cipher behind the disk's end, where nobody reads yet.
async fn append(io: &Io, disk: &Disk, vbd: &Vbd, size: u64) -> Result<(), Error> {
    let wrong = |error: ringtap_image::Error| match error {
        ringtap_image::Error::Unsupported => {
            let why =
                "its header says how long it is, or it lies on a device, which others make larger";
            failed(disk, why)
        }
        error => failed(disk, format!("cannot write zeros behind its end: {error}")),
    };
    let before = vbd.disk().size();
    let written = async {
        // The guest may write to the rest of this block.
        let block = before.next_multiple_of(vbd.disk().info().request_alignment).min(size);
        if block > before {
            let still = stand_still(io, disk, vbd).await?;
            still.image().map_err(wrong)?.append_zeros(io, before..block).await.map_err(wrong)?;
        }
        let image = vbd.disk().image().map_err(wrong)?;
        image.append_zeros(io, block..size).await.map_err(wrong)?;
        vbd.disk().grow(size).map_err(wrong)
    };
    let end = written.await;
    if end.is_err() && vbd.disk().size() == before {
        let cut = async { vbd.disk().image()?.cut_to(io, before).await };
        if let Err(error) = cut.await {
            tracing::warn!("what was written behind the disk's end stays there: {error}");
        }
    }
    end
}
