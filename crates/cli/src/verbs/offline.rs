//! Images at rest, opened for the tools that change their tables.

use std::path::Path;

use anyhow::Context;
use ringtap_daemon::Error as Fault;
use ringtap_image::qcow2::header::autoclear;
use ringtap_image::{
    CacheMode, Container, Format, OpenError, OpenOptions, Place, RestartChoice, on_a_ring, open_on,
    probe, vhd,
};

use super::chain;
use super::source::{DataFiles, Force, format_of, format_to_write};

/// The format of an image that a verb looks at, or changes.
pub(crate) fn format(path: &Path, named: Option<Format>, change: bool) -> anyhow::Result<Format> {
    if change { format_to_write(path, named) } else { Ok(format_of(path, named)?.0) }
}

/// How an image is written to.
#[derive(Clone, Copy)]
pub(crate) struct Writing<'a> {
    pub(crate) format: Format,
    pub(crate) force: &'a Force,
    /// What the image may name for its data. What lies below it is not opened.
    pub(crate) data: &'a DataFiles,
    /// What becomes of a restart log in doubt.
    pub(crate) restart_log: Option<RestartChoice>,
    /// Its disk may go on in another image.
    pub(crate) succeeded: bool,
}

impl<'a> Writing<'a> {
    pub(crate) fn new(format: Format, force: &'a Force, data: &'a DataFiles) -> Writing<'a> {
        Writing { format, force, data, restart_log: None, succeeded: false }
    }

    /// Options to open the image with.
    pub(crate) fn options(&self) -> OpenOptions {
        OpenOptions {
            format: Some(self.format),
            force_format: self.force.force_format,
            cache: CacheMode::Writeback,
            data_files: self.data.data_file.clone(),
            restart_log: self.restart_log,
            succeeded: self.succeeded,
            ..OpenOptions::default()
        }
    }
}

/// Open the file of an image to look at it.
pub(crate) fn container(path: &Path, share: bool) -> Result<Container, OpenError> {
    let options = OpenOptions {
        cache: CacheMode::Writeback,
        read_only: true,
        force_share: share,
        ..OpenOptions::default()
    };
    Container::open(path, &options)
}

/// Open the file of an image to change it, locked against everybody.
pub(crate) fn to_change(
    place: impl Into<Place>,
    writing: Writing<'_>,
) -> Result<Container, OpenError> {
    let place = place.into();
    match probe::unfinished_work(&place.at()) {
        Some(verb) => Err(OpenError::Unfinished { path: place.path().to_owned(), verb }),
        None => Container::open(&place, &writing.options()),
    }
}

/// Open the file of a qcow2 image to change it, once it has taken up what a killed server left in its
/// restart log: those notes would not fit the changed image.
pub(crate) fn settled(place: impl Into<Place>, writing: Writing<'_>) -> anyhow::Result<Container> {
    let place = place.into();
    let own = chain::layer(&place, Some(Format::Qcow2), true)?;
    // An image of version 2 cannot say so.
    let noted = own.header.is_some_and(|header| {
        header.version == 2 || header.autoclear & autoclear::RESTART_LOG != 0
    });
    if noted && own.in_use.is_none() {
        let options = OpenOptions { layers: Some(1), tables_only: true, ..writing.options() };
        let opened = place.clone();
        on_a_ring(place.path(), |io| async move {
            let image = open_on(&io, &opened, &options).await?;
            let closed = image.close(&io).await;
            Ok::<_, OpenError>(closed)
        })??
        .with_context(|| format!("{}: what a killed server left", place.path().display()))?;
    }
    Ok(to_change(&place, writing)?)
}

/// As [`settled`], of a VHD.
pub(crate) fn settled_vhd(
    place: impl Into<Place>,
    writing: Writing<'_>,
) -> anyhow::Result<Container> {
    let (place, restart_log) = (place.into(), writing.restart_log);
    let container = to_change(&place, writing)?;
    let own = container.clone();
    on_a_ring(place.path(), |io| async move { vhd::settle(&io, &own, restart_log).await })??;
    Ok(container)
}

/// That only some formats can do what was asked.
pub(crate) fn cannot(path: &Path, format: Format, what: &str) -> anyhow::Error {
    Fault::Usage(format!("{}: {format} images {what}", path.display())).into()
}
