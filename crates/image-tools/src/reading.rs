//! Images opened by the tools to be read, with their formats found.

use std::path::PathBuf;

use ringtap_image::{CacheMode, Format, OpenOptions, Place, open_place, probe, record};
use ringtap_vbd::Vbd;

use crate::error::Tried;
use crate::files::is_null;
use crate::{Error, LazySecret, Note, Watcher};

/// How an image's format came to be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// The caller named it, or the image that has it as its backing file.
    Named,
    /// Ringtap recorded it when it made the image.
    Recorded,
    /// The image bears its signature, or none: raw.
    Probed,
}

/// How images that are read are opened.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    /// Read though another program may be writing; what is read may contradict itself.
    pub force_share: bool,
    /// What the images may name.
    pub names: Names,
    /// What opens the encrypted ones.
    pub secret: Option<LazySecret>,
}

/// What an image may name, where that is not recorded, and image and folder are others'.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Files, or folders of such, that lie below: backing files, parents, extents.
    pub backing: Vec<PathBuf>,
    /// External data files.
    pub data_files: Vec<PathBuf>,
}

impl Reading {
    /// Options to open an image with, of a format and for reading unless they are changed.
    ///
    /// # Errors
    ///
    /// The secret cannot be read.
    pub fn options(&self, format: Format, cache: CacheMode) -> Result<OpenOptions, Error> {
        Ok(OpenOptions {
            format: Some(format),
            cache,
            read_only: true,
            force_share: self.force_share,
            heed_log: self.force_share,
            allow_backing: self.names.backing.clone(),
            data_files: self.names.data_files.clone(),
            secret: self.secret.as_ref().map(LazySecret::read).transpose()?,
            ..OpenOptions::default()
        })
    }

    /// The same for writing, which nobody else may do.
    pub(crate) fn options_to_write(
        &self,
        format: Format,
        cache: CacheMode,
        force_format: bool,
    ) -> Result<OpenOptions, Error> {
        let own = self.options(format, cache)?;
        Ok(OpenOptions { read_only: false, force_share: false, force_format, ..own })
    }

    /// Open an image to read. `watch` hears where its format was told by its signature alone.
    pub fn open(
        &self,
        place: impl Into<Place>,
        named: Option<Format>,
        cache: CacheMode,
        watch: &Watcher,
    ) -> Result<Vbd, Error> {
        let place = place.into();
        let (format, known) = format_of(&place, named)?;
        if known == Known::Probed && format != Format::Raw {
            watch.note(&Note::Probed { path: place.path().to_owned(), format });
        }
        let options = self.options(format, cache)?;
        Ok(Vbd::new(open_place(&place, &options)?, cache))
    }
}

/// The format of an image that is only read: named, else recorded, else by its signature.
pub fn format_of(place: impl Into<Place>, named: Option<Format>) -> Result<(Format, Known), Error> {
    let place = place.into();
    let (path, at) = (place.path(), place.at());
    if let Some(format) = named {
        return Ok((format, Known::Named));
    }
    if is_null(path) {
        return Ok((Format::Raw, Known::Named));
    }
    if let Some(format) = record::format(&at) {
        return Ok((format, Known::Recorded));
    }
    let found =
        probe::signature_before_opening(&at).tried(|| format!("cannot read {}", path.display()))?;
    let Some(signature) = found else { return Ok((Format::Raw, Known::Probed)) };
    match signature.parse() {
        Ok(format) => Ok((format, Known::Probed)),
        Err(_) => Err(Error::FormatUnread { path: path.to_owned(), signature }),
    }
}
