//! The external data file of an image, opened with it; and what a killed server left for both.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::slice;

use ringtap_io::Io;

use super::header::incompatible;
use super::{Header, restart};
use crate::names::{self, Role};
use crate::{Container, Format, LeftBehind, OpenError, OpenOptions, Place, record};

/// What a killed server left for an image, as whoever only looks at it finds it: whether that belongs to the image
/// and to its external data file as they are. `options` says which that may be.
pub fn left(
    container: &Container,
    header: &Header,
    options: &OpenOptions,
) -> Result<Option<LeftBehind>, OpenError> {
    let data = || open_data(container, header, options);
    restart::left(container, header, header.has(incompatible::DATA_FILE).then_some(data))
}

/// An image at rest, and its external data file where it has one: for [`super::resize`].
pub async fn open_to_resize(
    io: &Io,
    place: &Place,
    options: &OpenOptions,
) -> Result<(Container, Option<Container>), OpenError> {
    let container = Container::open(place, options)?;
    let header = Header::read(io, &container).await?;
    let has_data = header.has(incompatible::DATA_FILE);
    let data = has_data.then(|| open_data(&container, &header, options)).transpose()?;
    Ok((container, data))
}

/// The external data file that an image names.
pub(super) fn open_data(
    image: &Container,
    header: &Header,
    options: &OpenOptions,
) -> Result<Container, OpenError> {
    let why = "its guest data lies in an external file, and it does not name that";
    let refused = OpenError::Refused { path: image.path().to_owned(), why };
    let name = PathBuf::from(OsStr::from_bytes(header.data_file().ok_or(refused)?));
    let data = names::find(image, Role::DataFile, slice::from_ref(&name), options)?;
    let options = OpenOptions { format: Some(Format::Raw), ..options.clone() };
    let container = Container::open(&data, &options)?;
    record::belong_together(&image.place(), &data, &options)?;
    Ok(container)
}
