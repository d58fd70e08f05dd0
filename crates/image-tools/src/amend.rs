//! What an image says of itself, and what is recorded of it, changed where it is.

use std::path::{Path, PathBuf};

use ringtap_image::qcow2::{self, Amendment, Header};
use ringtap_image::{
    CacheMode, Container, Format, OpenError, OpenOptions, Place, Role, is_store, on_a_ring, probe,
    record,
};

use crate::error::Tried;
use crate::files::beside;
use crate::{Error, Note, Reading, Watcher, Writing, chain, resize};

/// What is changed of a qcow2 image.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// What its header says of itself.
    pub header: Amendment,
    /// The name of the image below, which is to be the one that there is.
    pub backing: Option<String>,
    /// The format of that, as the image has it.
    pub backing_format: Option<String>,
    /// Bytes of its disk, no fewer than they are.
    pub size: Option<u64>,
}

/// Change a qcow2 image.
///
/// # Errors
///
/// What is asked for cannot be, or the image cannot be opened, read or written. Nothing has changed then, but that a disk
/// that was to become larger may have.
pub fn amend(
    file: &Path,
    writing: Writing<'_>,
    wanted: &Changes,
    reading: &Reading,
) -> Result<(), Error> {
    let container = writing.settled(file)?;
    let (changed, image) = (container.clone(), Place::from(file));
    let own = container.clone();
    let header = on_a_ring(file, |io| async move { Header::read(&io, &own).await })??;
    stays_below(&header, wanted)?;
    let amendment = &wanted.header;
    // What cannot be is refused before anything is changed.
    let (tried, own) = (amendment.clone(), container.clone());
    on_a_ring(file, |io| async move { qcow2::may_amend(&io, &own, &tried).await })??;
    let grows =
        wanted.size.is_some_and(|size| size.checked_next_multiple_of(512) != Some(header.size));
    if grows && amendment.version == Some(2) && header.snapshots > 0 {
        let why = "size and compat=0.10 of an image with snapshots: version 2 cannot say that their disks are of \
                   another size";
        return Err(Error::usage(why));
    }
    let container = match wanted.size {
        Some(size) => {
            if amendment.data_file.is_some() {
                let why = "size and data_file at once: it is not told which of the two files is to be longer";
                return Err(Error::usage(why));
            }
            drop((changed, container));
            resize::set(&image, writing, size, reading)?;
            writing.settled(file)?
        }
        None => container,
    };
    let changed = container.clone();
    let data = amendment.data_file.as_ref().map(|name| beside(file, Path::new(name)));
    if let Some(path) = &data {
        record::may_own(&image, &path.into(), true)?;
        chain::also_allow(&image, Role::DataFile, path);
    }
    let amendment = amendment.clone();
    on_a_ring(file, |io| async move { qcow2::amend(&io, &container, &amendment).await })??;
    if let Some(path) = &data {
        chain::record(&image, Role::DataFile, Some(path));
        // One that is to come becomes the image's when it is first written to.
        if is_store(path) || path.try_exists().unwrap_or(true) {
            record::set_owner(&image, &path.into())
                .tried(|| format!("cannot write down whose data file {} is", path.display()))?;
        }
    }
    changed.confirm_format(Format::Qcow2);
    Ok(())
}

/// Another image below is `rebase`'s to name, which knows what would read otherwise then.
fn stays_below(header: &Header, wanted: &Changes) -> Result<(), Error> {
    let differs = |said: &Option<String>, own: Option<&[u8]>| {
        said.as_ref().is_some_and(|said| own != Some(said.as_bytes()))
    };
    if differs(&wanted.backing, header.backing_file.as_deref())
        || differs(&wanted.backing_format, header.backing_format())
    {
        let why = "the backing file of an image that is there: ringtap rebase -u -b FILE -F FORMAT names another";
        return Err(Error::usage(why));
    }
    Ok(())
}

/// Open an image for the record of it to be changed: whoever has it for writing goes on as what it was.
fn hold(file: &Path, succeeded: bool) -> Result<(Place, Container), Error> {
    let failed = |source| OpenError::Os { what: "open", path: file.to_owned(), source };
    let place = Place::hold(file).map_err(failed)?;
    let options = OpenOptions { cache: CacheMode::Writeback, succeeded, ..OpenOptions::default() };
    let container = Container::open(&place, &options)?;
    Ok((place, container))
}

/// Let an image be written to again though its disk goes on in another. Gives that other.
///
/// # Errors
///
/// Somebody has it for writing, or it cannot be recorded.
pub fn forget_successor(file: &Path) -> Result<Option<PathBuf>, Error> {
    // Who serves an overlay on it has it for reading.
    let (place, _container) = hold(file, true)?;
    let successor = record::successor_of_this_or_original(&place.at());
    record::forget_successor(&place.at())
        .tried(|| format!("cannot change the record of {}", file.display()))?;
    Ok(successor)
}

/// Record an image's format, and change nothing in it. It must bear the signature, unless it is raw, as which any is taken, or
/// `force` is set; `watch` hears where it does not.
///
/// # Errors
///
/// It bears another signature, somebody has it for writing, or it cannot be recorded.
pub fn record_format(
    file: &Path,
    format: Format,
    force: bool,
    watch: &Watcher,
) -> Result<(), Error> {
    let (place, _container) = hold(file, false)?;
    let looks_like = probe::signature(&place.at())
        .tried(|| format!("cannot read {}", file.display()))?
        .unwrap_or("raw");
    if looks_like != format.name() && format != Format::Raw && !force {
        let why = format!(
            "{} does not bear the signature of {format}, but looks like {looks_like}: record that, or \
             add --force-format",
            file.display()
        );
        return Err(Error::Usage(why));
    }
    record::set_format(&place.at(), format)
        .tried(|| format!("cannot write down that {} is {format}", file.display()))?;
    if looks_like != format.name() {
        watch.note(&Note::OtherSignature { path: file.to_owned(), format, looks_like });
    }
    Ok(())
}
