//! VHDX, Hyper-V's later format, read-only and without parents (source: [MS-VHDX]).
//!
//! A log that was not yet carried out is carried out in memory (`log.rs`); the file is not changed.

mod check;
mod entry;
mod header;
mod image;
mod layout;
mod log;
mod wrong;

use ringtap_io::Io;

use crate::container::os;
use crate::{Boxed, Container, Image, OpenError, OpenOptions, Place};

pub use check::{Findings, check};
use image::Vhdx;
use wrong::bad;

/// Open a VHDX, which must be asked for read-only.
pub fn open<'a>(
    io: &'a Io,
    place: &'a Place,
    options: &'a OpenOptions,
) -> Boxed<'a, Result<Box<dyn Image>, OpenError>> {
    Box::pin(async move { open_in(io, Container::open(place, options)?).await })
}

/// Open a VHDX in a container, which must be read-only.
pub async fn open_in(io: &Io, container: Container) -> Result<Box<dyn Image>, OpenError> {
    if !container.traits().read_only {
        let found = "it is opened for writing";
        return Err(bad(
            &container,
            0,
            found,
            "VHDX is read-only here: convert it, or add --read-only",
        ));
    }
    let layout = layout::Layout::read(io, &container).await?;
    Ok(Box::new(Vhdx::new(container, layout)))
}

/// Bytes of the blocks that a VHDX consists of.
///
/// # Errors
///
/// Those of [`open`].
pub async fn block_size(io: &Io, place: &Place, options: &OpenOptions) -> Result<u64, OpenError> {
    let container = Container::open(place, options)?;
    Ok(layout::Layout::read(io, &container).await?.block_size)
}
