//! Images that are made while the server runs, in files that are there.

use std::fs;
use std::path::{Path, PathBuf};

use ringtap_image::{
    CacheMode, Container, Format, OpenOptions, Place, Role, Secret, luks, on_a_ring, qcow2, record,
    vhd,
};

use crate::Error;

/// What is made.
pub(crate) enum New {
    /// A file of zeros, so long.
    File { path: PathBuf, size: u64 },
    /// An image in a file that is there; what is in it is lost.
    Image { path: PathBuf, place: Place, image: Image },
}

/// The image.
pub(crate) enum Image {
    Qcow2(Box<qcow2::CreateOptions>),
    Vhd(Box<vhd::CreateOptions>),
    Luks { size: u64, secret: Secret },
}

impl New {
    /// Make it, on this thread.
    pub(crate) fn make(self) -> Result<(), Error> {
        match self {
            New::File { path, size } => make_file(&path, size),
            New::Image { path, place, image } => image.make(&path, &place),
        }
    }
}

fn failed(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::Job(format!("Could not create '{}': {why}", path.display()))
}

/// As QEMU does: what a file held that was there is lost.
fn make_file(path: &Path, size: u64) -> Result<(), Error> {
    let made = fs::OpenOptions::new().write(true).create(true).truncate(false).open(path);
    made.map_err(|error| failed(path, error))?;
    let open = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
    let container = Container::open(path, &open)?;
    let wrong = |error: ringtap_image::Error| failed(path, error);
    let made = on_a_ring(path, |io| async move {
        container.set_len(&io, 0).await?;
        container.set_len(&io, size).await?;
        container.sync(&io).await
    })?;
    made.map_err(wrong)?;
    record::forget_format(path);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = fs::File::open(folder.unwrap_or(Path::new(".")));
    folder.and_then(|folder| folder.sync_all()).map_err(|error| failed(path, error))
}

impl Image {
    fn format(&self) -> Format {
        match self {
            Image::Qcow2(_) => Format::Qcow2,
            Image::Vhd(_) => Format::Vhd,
            Image::Luks { .. } => Format::Luks,
        }
    }

    fn make(self, path: &Path, place: &Place) -> Result<(), Error> {
        let format = self.format();
        let backing = match &self {
            Image::Qcow2(options) => options.backing_file.clone(),
            _ => None,
        };
        // It is made anew: it need not be what it was.
        let open = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
        let container = Container::open(place, &open)?;
        let own = container.clone();
        let wrong = |error: String| failed(path, error);
        let made = on_a_ring(path, |io| async move {
            let end = match self {
                Image::Qcow2(options) => {
                    let end = qcow2::create(&io, &own, None, &options).await;
                    end.map(drop).map_err(|error| error.to_string())
                }
                Image::Vhd(options) => {
                    let end = vhd::create(&io, &own, &options).await;
                    end.map(drop).map_err(|error| error.to_string())
                }
                Image::Luks { size, secret } => {
                    let options = luks::CreateOptions::default();
                    let end = luks::create(&io, &own, size, &options, &secret).await;
                    end.map(drop).map_err(|error| error.to_string())
                }
            };
            end?;
            own.sync(&io).await.map_err(|error| error.to_string())
        })?;
        made.map_err(wrong)?;
        let at = place.at();
        record::set_format(&at, format).map_err(|error| failed(path, error))?;
        // What it names is what the operator wants it to.
        let folder = path.parent().unwrap_or(Path::new("/"));
        let below = backing.map(|name| folder.join(name));
        if let Err(error) = record::set_allowed(&at, Role::Backing, below.as_deref()) {
            tracing::warn!("cannot write down what {} may lie upon: {error}", path.display());
        }
        Ok(())
    }
}
