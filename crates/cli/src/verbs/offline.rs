//! Images at rest, opened for the tools that change their tables.

use std::path::Path;

use anyhow::Context;
use ringtap_daemon::Error as Fault;
use ringtap_image::qcow2::header::autoclear;
use ringtap_image::{
    CacheMode, Container, Format, OpenError, OpenOptions, on_a_ring, open_on, probe, vhd,
};

use super::chain;
use super::source::{format_of, format_to_write};

/// The format of an image that a verb looks at, or changes.
pub(crate) fn format(path: &Path, named: Option<Format>, change: bool) -> anyhow::Result<Format> {
    if change { format_to_write(path, named) } else { Ok(format_of(path, named)?.0) }
}

/// Open the file of an image, locked against everybody if it is to be changed.
pub(crate) fn container(path: &Path, change: bool, share: bool) -> Result<Container, OpenError> {
    if let (Some(verb), true) = (probe::unfinished_work(path), change) {
        return Err(OpenError::Unfinished { path: path.to_owned(), verb });
    }
    let options = OpenOptions {
        cache: CacheMode::Writeback,
        read_only: !change,
        force_share: share && !change,
        ..OpenOptions::default()
    };
    Container::open(path, &options)
}

/// Open the file of a qcow2 image to change it, once it has taken up what a killed server left in its
/// restart log: those notes would not fit the changed image.
pub(crate) fn settled(path: &Path) -> anyhow::Result<Container> {
    let own = chain::layer(path, Some(Format::Qcow2), true)?;
    // An image of version 2 cannot say so.
    let noted = own.header.is_some_and(|header| {
        header.version == 2 || header.autoclear & autoclear::RESTART_LOG != 0
    });
    if noted && own.in_use.is_none() {
        let options = OpenOptions {
            format: Some(Format::Qcow2),
            cache: CacheMode::Writeback,
            layers: Some(1),
            tables_only: true,
            ..OpenOptions::default()
        };
        let place = path.to_owned();
        on_a_ring(path, |io| async move {
            let image = open_on(&io, &place, &options).await?;
            let closed = image.close(&io).await;
            Ok::<_, OpenError>(closed)
        })??
        .with_context(|| format!("{}: what a killed server left", path.display()))?;
    }
    Ok(container(path, true, false)?)
}

/// As [`settled`], of a VHD.
pub(crate) fn settled_vhd(path: &Path) -> anyhow::Result<Container> {
    let container = container(path, true, false)?;
    let own = container.clone();
    on_a_ring(path, |io| async move { vhd::settle(&io, &own).await })??;
    Ok(container)
}

/// That only some formats can do what was asked.
pub(crate) fn cannot(path: &Path, format: Format, what: &str) -> anyhow::Error {
    Fault::Usage(format!("{}: {format} images {what}", path.display())).into()
}
