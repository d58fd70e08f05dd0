//! Images made in files that the caller has found, and holds.

use std::fs;
use std::path::Path;

use ringtap_image::{
    CacheMode, Container, Format, OpenOptions, Place, Role, Secret, luks, on_a_ring, qcow2, record,
    vhd,
};

use crate::error::Tried;
use crate::files::beside;
use crate::{Doing, Error, chain};

/// What is written into a file, so that it is an empty image.
#[derive(Clone, Debug)]
pub enum Content {
    /// qcow2.
    Qcow2(Box<qcow2::CreateOptions>),
    /// VHD.
    Vhd(Box<vhd::CreateOptions>),
    /// A LUKS container.
    Luks {
        /// Bytes of its disk.
        size: u64,
        /// What else it is to be.
        options: Box<luks::CreateOptions>,
        /// What is to open it.
        secret: Secret,
    },
}

impl Content {
    /// The format.
    pub fn format(&self) -> Format {
        match self {
            Content::Qcow2(_) => Format::Qcow2,
            Content::Vhd(_) => Format::Vhd,
            Content::Luks { .. } => Format::Luks,
        }
    }
}

/// Write it into an image's file. `data` is the external data file of a qcow2 image.
pub(crate) fn write(
    path: &Path,
    file: Container,
    data: Option<Container>,
    content: Content,
) -> Result<(), Error> {
    on_a_ring(path, |io| async move {
        match content {
            Content::Qcow2(options) => {
                qcow2::create(&io, &file, data.as_ref(), &options).await?;
            }
            Content::Vhd(options) => {
                vhd::create(&io, &file, &options).await?;
            }
            Content::Luks { size, options, secret } => {
                luks::create(&io, &file, size, &options, &secret).await?;
            }
        }
        Ok(())
    })?
}

/// Make an image in a file that is held, and that nobody uses; what is in it is lost. What it names as lying below is not looked
/// at, and recorded as what it may name. It is stable when this returns.
///
/// # Errors
///
/// [`Error::Open`] where the file cannot be had; else [`Error::While`] around why it cannot be made.
pub fn make_held(place: &Place, content: Content) -> Result<(), Error> {
    let (path, format) = (place.path(), content.format());
    let (backing, of_format) = match &content {
        Content::Qcow2(options) => (options.backing_file.clone(), options.backing_format.clone()),
        Content::Vhd(_) | Content::Luks { .. } => (None, None),
    };
    let making = || format!("making {} a {format} image", path.display());
    // It is made anew: it need not be what it was.
    let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
    let container = Container::open(place, &options)?;
    let own = container.clone();
    write(path, own, None, content).doing(making)?;
    let own = container.clone();
    on_a_ring(path, |io| async move { own.sync(&io).await })?.doing(making)?;
    record::set_format(&place.at(), format)
        .tried(|| format!("cannot write down that {} is {format}", path.display()))
        .doing(making)?;
    // What it names is what the caller wants it to.
    let below = backing.map(|name| beside(path, Path::new(&name)));
    chain::record(place, Role::Backing, below.as_deref());
    let of_format = of_format.and_then(|name| name.parse().ok());
    if let (Some(below), Some(format)) = (below, of_format) {
        chain::record_format_below(place, &below, format);
    }
    Ok(())
}

/// Make a file of zeros, so long; what was in one that is there is lost. It is stable when this returns, and so is its name.
///
/// # Errors
///
/// [`Error::Open`] where it is in use; else [`Error::Os`] or [`Error::While`] around why it cannot be made.
pub fn make_file(path: &Path, size: u64) -> Result<(), Error> {
    let making = || format!("making {}", path.display());
    let made = fs::OpenOptions::new().write(true).create(true).truncate(false).open(path);
    made.tried(making)?;
    let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
    let container = Container::open(path, &options)?;
    on_a_ring(path, |io| async move {
        container.set_len(&io, 0).await?;
        container.set_len(&io, size).await?;
        container.sync(&io).await
    })?
    .doing(making)?;
    record::forget_format(path);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = fs::File::open(folder.unwrap_or(Path::new(".")));
    folder.and_then(|folder| folder.sync_all()).tried(making)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Known, Reading, info};

    #[test]
    fn a_file_becomes_an_image_and_is_recorded_as_one() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("a");
        fs::write(&path, [7; 4096]).expect("a file");
        make_file(&path, 1 << 20).expect("made");
        assert!(fs::read(&path).expect("read") == vec![0; 1 << 20]);
        let options = qcow2::CreateOptions { size: 1 << 30, ..qcow2::CreateOptions::default() };
        let place = Place::hold(&path).expect("held");
        make_held(&place, Content::Qcow2(options.clone().into())).expect("made");
        let told = info::info(&path, None, &Reading::default()).expect("facts");
        assert_eq!((told.format, told.size), (Format::Qcow2, 1 << 30));
        assert_eq!(told.known, Known::Recorded);
        let wrong = qcow2::CreateOptions { cluster_size: 3, ..options };
        let error = make_held(&place, Content::Qcow2(wrong.into())).expect_err("no such clusters");
        assert!(error.cause().to_string().contains("cluster_size"), "{error:?}");
    }
}
