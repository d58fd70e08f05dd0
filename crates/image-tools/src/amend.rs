//! What an image says of itself, and what is recorded of it, changed where it is.

use std::path::{Path, PathBuf};

use ringtap_image::qcow2::{self, Amendment, Header};
use ringtap_image::{
    CacheMode, Container, Format, OpenError, OpenOptions, Place, Role, on_a_ring, probe, record,
};

use crate::error::Tried;
use crate::files::{beside, same_file};
use crate::{BackingFile, Error, NamedFormat, Note, Reading, Watcher, Writing, chain, resize};

/// What is changed of a qcow2 image.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// What its header says of itself.
    pub header: Amendment,
    /// The name of the image below; empty: none. What is read is up to the caller.
    pub backing: Option<String>,
    /// The format of that.
    pub backing_format: Option<NamedFormat>,
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
    let below = match (&wanted.backing, wanted.backing_format) {
        (None, None) => None,
        (Some(name), _) if name.is_empty() => Some(None),
        (name, format) => {
            let own = header.backing_file.as_deref().map(std::str::from_utf8);
            let own = own.transpose().map_err(|_| {
                Error::usage("backing_fmt: the name of its backing file is not UTF-8: give backing_file= too")
            })?;
            let name = name.clone().or_else(|| own.map(str::to_owned));
            let name = name.ok_or_else(|| Error::usage("backing_fmt: it has no backing file"))?;
            let known = header.backing_format().and_then(|name| std::str::from_utf8(name).ok());
            let format = format.or(known.and_then(|name| name.parse().ok()));
            let backing = BackingFile::find(file, name, format)?;
            if same_file(file, &backing.path) {
                return Err(Error::usage("an image cannot lie below itself"));
            }
            Some(Some(backing))
        }
    };
    let new = below
        .as_ref()
        .map(|below| below.as_ref().map(|it| (it.name.clone(), it.format_name.to_owned())));
    let amendment = Amendment { backing: new, ..wanted.header.clone() };
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
            if wanted.header.data_file.is_some() {
                let why = "size and data_file at once: it is not told which of the two files is to be longer";
                return Err(Error::usage(why));
            }
            let size_of = |below: &BackingFile| {
                resize::disk_size(&Place::from(&*below.path), below.format, reading)
            };
            // Of what will lie below, and not of what the image names now, which may be gone.
            let next = match below.as_ref().filter(|_| wanted.backing.is_some()) {
                Some(next) => Some(next.as_ref().map(size_of).transpose()?),
                None => None,
            };
            drop((changed, container));
            resize::set(&image, writing, size, next, reading)?;
            writing.settled(file)?
        }
        None => container,
    };
    let changed = container.clone();
    // A name that the image has had is not followed because its format is said.
    let names = wanted.backing.is_some();
    if let Some(name) = &wanted.header.data_file {
        let path = beside(file, Path::new(name));
        record::may_own(&image, &(&path).into(), true)?;
        chain::also_allow(&image, Role::DataFile, &path);
    }
    if let Some(Some(backing)) = below.as_ref().filter(|_| names) {
        chain::also_allow(&image, Role::Backing, &backing.path);
    }
    on_a_ring(file, |io| async move { qcow2::amend(&io, &container, &amendment).await })??;
    if let Some(below) = below.as_ref().filter(|_| names) {
        chain::record(&image, Role::Backing, below.as_ref().map(|it| it.path.as_path()));
    }
    if let Some(Some(below)) = &below {
        chain::record_format_below(&image, &below.path, below.format);
    }
    if let Some(name) = &wanted.header.data_file {
        let path = beside(file, Path::new(name));
        chain::record(&image, Role::DataFile, Some(&path));
        record::set_owner(&image, &(&path).into())
            .tried(|| format!("cannot write down whose data file {} is", path.display()))?;
    }
    changed.confirm_format(Format::Qcow2);
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
