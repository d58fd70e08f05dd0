//! Opening an image by its name.

use std::path::Path;

use ringtap_io::Io;

use crate::backing::Chain;
use crate::{
    Boxed, Format, Image, Luks, Null, OpenError, OpenOptions, Place, Raw, mixture, on_a_ring,
    parse_size, probe, qcow2, record, vhd, vhdx, vmdk,
};

/// Open `disk`: a path, or `null:SIZE` with a size in bytes or like 10G.
pub fn open(disk: &Path, options: &OpenOptions) -> Result<Box<dyn Image>, OpenError> {
    open_place(&disk.into(), options)
}

/// As [`open`], of what is held.
pub fn open_place(place: &Place, options: &OpenOptions) -> Result<Box<dyn Image>, OpenError> {
    let disk = place.path();
    if let Some(text) = disk.to_str().and_then(|text| text.strip_prefix("null:")) {
        let size = parse_size(text).ok_or_else(|| OpenError::NullSize { text: text.to_owned() })?;
        without_bitmaps(disk, options)?;
        return Ok(Box::new(Null::new(size, options.read_only)));
    }
    let options = &settled(place, options)?;
    if options.format.is_some_and(|format| format != Format::Qcow2) {
        without_bitmaps(disk, options)?;
    }
    if options.format == Some(Format::Raw) {
        return Ok(Box::new(Raw::open(place, options)?));
    }
    let (place, options) = (place.clone(), options.clone());
    let image = on_a_ring(disk, |io| async move {
        open_in_chain(&io, &place, &options, Chain::new(open_in_chain)).await
    })??;
    mixture::warn_of(&*image);
    Ok(image)
}

fn without_bitmaps(disk: &Path, options: &OpenOptions) -> Result<(), OpenError> {
    let why = "bitmaps are to be shown, and only qcow2 images have any";
    let refused = OpenError::Refused { path: disk.to_owned(), why };
    if options.bitmaps.is_empty() { Ok(()) } else { Err(refused) }
}

/// The options with the format found where it is not named.
fn settled(place: &Place, options: &OpenOptions) -> Result<OpenOptions, OpenError> {
    let at = place.at();
    if let Some(verb) = probe::unfinished_work(&at) {
        return Err(OpenError::Unfinished { path: place.path().to_owned(), verb });
    }
    let format = options.format.or_else(|| record::format(&at));
    Ok(OpenOptions { format, ..options.clone() })
}

/// As [`open`], from a task: a path only, and the format named.
pub fn open_on<'a>(
    io: &'a Io,
    place: impl Into<Place>,
    options: &'a OpenOptions,
) -> Boxed<'a, Result<Box<dyn Image>, OpenError>> {
    let place = place.into();
    Box::pin(async move { open_in_chain(io, &place, options, Chain::new(open_in_chain)).await })
}

/// As [`open_on`], below the images of `chain`.
fn open_in_chain<'a>(
    io: &'a Io,
    place: &'a Place,
    options: &'a OpenOptions,
    chain: Chain,
) -> Boxed<'a, Result<Box<dyn Image>, OpenError>> {
    Box::pin(async move {
        match options.format {
            Some(Format::Raw) => Ok(Box::new(Raw::open(place, options)?) as Box<dyn Image>),
            Some(Format::Qcow2) => qcow2::open_chain(io, place, options, chain.with(place)?).await,
            Some(Format::Vhd) => vhd::open(io, place, options).await,
            Some(Format::Luks) => Ok(Box::new(Luks::open(io, place, options).await?) as _),
            Some(Format::Vhdx) => vhdx::open(io, place, options).await,
            Some(Format::Vmdk) => vmdk::open(io, place, options).await,
            None => Err(OpenError::NoFormat { path: place.path().to_owned() }),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_must_be_named() {
        let error = open(Path::new("/tmp/x"), &OpenOptions::default()).err().expect("refused");
        assert!(error.to_string().contains("-f raw"), "{error}");
        assert!(open(Path::new("null:1G"), &OpenOptions::default()).is_ok());
    }
}
