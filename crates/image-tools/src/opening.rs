//! Images at rest, opened by the tools to be changed.

use std::path::{Path, PathBuf};

use ringtap_image::qcow2::header::autoclear;
use ringtap_image::{
    CacheMode, Container, Format, OpenError, OpenOptions, Place, RestartChoice, on_a_ring, open_on,
    probe, record, vhd,
};

use crate::error::Tried;
use crate::{Doing, Error, chain, format_of};

/// The format of an image that is to be written: named or recorded. What the bytes look like does
/// not count, for a guest may have written them; but where they look like nothing, that is said.
pub fn format_to_write(path: &Path, named: Option<Format>) -> Result<Format, Error> {
    if let Some(format) = named.or_else(|| record::format(path)) {
        return Ok(format);
    }
    let looks_like = probe::signature(path).tried(|| format!("cannot read {}", path.display()))?;
    Err(Error::FormatUnknown { path: path.to_owned(), looks_like })
}

/// The format of an image that a tool looks at, or changes.
pub fn format(path: &Path, named: Option<Format>, change: bool) -> Result<Format, Error> {
    if change { format_to_write(path, named) } else { Ok(format_of(path, named)?.0) }
}

/// How an image at rest is changed.
#[derive(Clone, Copy, Debug)]
pub struct Writing<'a> {
    /// Its format.
    pub format: Format,
    /// Write to it as that though it is recorded as another, or bears another's signature.
    pub force_format: bool,
    /// What the image may name for its data. What lies below it is not opened.
    pub data_files: &'a [PathBuf],
    /// What becomes of a restart log in doubt.
    pub restart_log: Option<RestartChoice>,
    /// Its disk may go on in another image.
    pub succeeded: bool,
}

impl<'a> Writing<'a> {
    /// As it is usual.
    pub fn new(format: Format, force_format: bool, data_files: &'a [PathBuf]) -> Writing<'a> {
        Writing { format, force_format, data_files, restart_log: None, succeeded: false }
    }

    /// Options to open the image with.
    pub fn options(&self) -> OpenOptions {
        OpenOptions {
            format: Some(self.format),
            force_format: self.force_format,
            cache: CacheMode::Writeback,
            data_files: self.data_files.to_owned(),
            restart_log: self.restart_log,
            succeeded: self.succeeded,
            ..OpenOptions::default()
        }
    }

    /// Open the file of an image to change it, locked against everybody.
    pub fn open(self, place: impl Into<Place>) -> Result<Container, OpenError> {
        let place = place.into();
        match probe::unfinished_work(&place.at()) {
            Some(verb) => Err(OpenError::Unfinished { path: place.path().to_owned(), verb }),
            None => Container::open(&place, &self.options()),
        }
    }

    /// Open the file of a qcow2 image to change it, once it has taken up what a killed server left in its
    /// restart log: those notes would not fit the changed image.
    pub fn settled(self, place: impl Into<Place>) -> Result<Container, Error> {
        let place = place.into();
        let own = chain::layer(&place, Some(Format::Qcow2), true)?;
        // An image of version 2 cannot say so.
        let noted = own.header.is_some_and(|header| {
            header.version == 2 || header.autoclear & autoclear::RESTART_LOG != 0
        });
        // Nor is one that says nothing of it to take up what is another's.
        let noted = noted || self.restart_log == Some(RestartChoice::Use);
        if noted && own.in_use.is_none() {
            let options = OpenOptions { layers: Some(1), tables_only: true, ..self.options() };
            let opened = place.clone();
            on_a_ring(place.path(), |io| async move {
                let image = open_on(&io, &opened, &options).await?;
                let closed = image.close(&io).await;
                Ok::<_, OpenError>(closed)
            })??
            .doing(|| format!("{}: what a killed process left", place.path().display()))?;
        }
        Ok(self.open(place)?)
    }

    /// As [`Writing::settled`], of a VHD.
    pub fn settled_vhd(self, place: impl Into<Place>) -> Result<Container, Error> {
        let place = place.into();
        let container = self.open(&place)?;
        let own = container.clone();
        on_a_ring(
            place.path(),
            |io| async move { vhd::settle(&io, &own, self.restart_log).await },
        )??;
        Ok(container)
    }
}

/// Open the file of an image to look at it.
pub fn container(path: &Path, share: bool) -> Result<Container, OpenError> {
    let options = OpenOptions {
        cache: CacheMode::Writeback,
        read_only: true,
        force_share: share,
        ..OpenOptions::default()
    };
    Container::open(path, &options)
}

/// That only some formats can do what was asked.
pub fn cannot(path: &Path, format: Format, what: &str) -> Error {
    Error::Format { path: path.to_owned(), format, what: what.to_owned() }
}
