//! Disks made larger, or smaller where that is asked for.

use std::ffi::OsStr;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringtap_image::qcow2::{self, Header, Preallocation, ResizeOptions};
use ringtap_image::{
    CacheMode, Container, Format, OpenError, OpenOptions, Place, Role, find_named, is_store, luks,
    on_a_ring, open_place, record, vhd,
};
use ringtap_vbd::{Copy, Progress, Vbd, copy};

use crate::create::{Space, or_limit, reserve};
use crate::opening::{cannot, format_to_write};
use crate::unfinished::finish;
use crate::{Doing, Error, Reading, Watcher, Writing, chain};

/// How large a disk is to be, in bytes; rounded up to 512.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// So large.
    To(u64),
    /// So much larger.
    More(u64),
    /// So much smaller.
    Less(u64),
}

impl NewSize {
    /// The size of a disk that has had another; none where there is no such.
    pub fn from(self, old: u64) -> Option<u64> {
        let size = match self {
            NewSize::To(size) => size,
            NewSize::More(more) => old.checked_add(more)?,
            NewSize::Less(less) => old.checked_sub(less)?,
        };
        size.checked_next_multiple_of(512)
    }
}

/// What is to become of a disk.
#[derive(Clone, Debug)]
pub struct Resize {
    /// Its image, which nobody uses.
    pub path: PathBuf,
    /// The format, if that is named; else it is recorded.
    pub format: Option<Format>,
    /// Write to it though it is recorded as of another format.
    pub force_format: bool,
    /// How large.
    pub size: NewSize,
    /// It may become smaller, and lose what lies past its end.
    pub shrink: bool,
    /// What exists of what is new.
    pub preallocation: Preallocation,
    /// How what lies below it is opened.
    pub reading: Reading,
}

/// Make a disk larger or smaller. Gives its size.
///
/// # Errors
///
/// [`Error::Size`] where there is no such size, [`Error::Shrinks`] where it is not to become smaller; its format cannot be
/// resized, or the image cannot be opened or written. The size is then the former one, unless it says otherwise; so it is where
/// the work was stopped, which can be as long as what is new is allocated.
pub fn resize(job: &Resize, watch: &Watcher) -> Result<u64, Error> {
    let file = &job.path;
    let format = format_to_write(file, job.format)?;
    let writing = Writing::new(format, job.force_format, &job.reading.names.data_files);
    let place = Place::from(file);
    let container = to_change(&place, writing)?;
    let changed = container.clone();
    let former = container.len();
    let payload = match format {
        Format::Luks => Some(payload(file, &container)?),
        _ => None,
    };
    let old = match payload {
        Some(payload) => payload.size,
        None => size_of(file, format, &container)?,
    };
    let sector = payload.map_or(512, |payload| payload.sector);
    let new = job.size.from(old).and_then(|new| new.checked_next_multiple_of(sector));
    let new = new.ok_or(Error::Size)?;
    if new < old && !job.shrink {
        return Err(Error::Shrinks { path: file.clone(), old, new });
    }
    let preallocation = if new == old { Preallocation::Off } else { job.preallocation };
    if preallocation != Preallocation::Off && new < old {
        return Err(Error::usage("--preallocation is for disks that become larger"));
    }
    match (format, preallocation) {
        (_, Preallocation::Off) | (Format::Qcow2, _) => {}
        (Format::Raw | Format::Luks, Preallocation::Falloc | Preallocation::Full) => {}
        (Format::Raw | Format::Luks, Preallocation::Metadata) => {
            let what = "have no metadata to preallocate: --preallocation falloc or full";
            return Err(cannot(file, format, what));
        }
        _ => {
            let what = "take no --preallocation: raw, qcow2 and luks do";
            return Err(cannot(file, format, what));
        }
    }
    let progress = Arc::new(Progress::default());
    if preallocation != Preallocation::Off {
        let written = preallocation == Preallocation::Full;
        watch.begins(if written { new - old } else { 0 }, &progress);
    }
    if let Some(payload) = payload {
        let part = payload.from + old..payload.from.checked_add(new).ok_or(Error::Size)?;
        set_len(file, container, part.end)?;
        changed.confirm_format(format);
        let space = match preallocation {
            Preallocation::Off | Preallocation::Metadata => return Ok(new),
            Preallocation::Falloc => Space::Falloc,
            Preallocation::Full => Space::Full,
        };
        // As it lies there: what is new reads as noise whether or not it is written.
        let (own, work) = (changed.clone(), progress.clone());
        on_a_ring(file, |io| async move {
            reserve(&io, &own, part, space, &work).await?;
            own.sync(&io).await
        })?
        .doing(not_all_of(file))?;
        return match progress.stopped() {
            true => Err(stopped(file, set_len(file, changed, former))),
            false => Ok(new),
        };
    }
    let (container, changed) =
        match format == Format::Qcow2 && new > old && shows_past(job, &place, old)? {
            true => {
                drop((container, changed));
                own_end(job, writing, old)?;
                let container = to_change(&place, writing)?;
                (container.clone(), container)
            }
            false => (container, changed),
        };
    // Tables and space come with the size; zeros are written when that is there.
    let (at_once, later) = match (format, preallocation) {
        (Format::Qcow2, Preallocation::Metadata | Preallocation::Falloc) => {
            (preallocation, Preallocation::Off)
        }
        _ => (Preallocation::Off, preallocation),
    };
    let wanted = Wanted { preallocation: at_once, ..Wanted::size(new) };
    change(&place, writing, container, wanted, &job.reading)?;
    changed.confirm_format(format);
    drop(changed);
    let end = match later {
        Preallocation::Off => Ok(()),
        _ => preallocate(job, writing, old..new, &progress),
    };
    match end {
        Err(error) if !error.is_stopped() => Err(error).doing(not_all_of(file)),
        _ if progress.stopped() => {
            let taken_back = to_change(&place, writing).and_then(|container| match format {
                Format::Raw => set_len(file, container, former),
                _ => change(&place, writing, container, Wanted::size(old), &job.reading),
            });
            Err(stopped(file, taken_back))
        }
        end => end.map(|()| new),
    }
}

/// It was stopped, and then made as large as it was, if that could be.
fn stopped(file: &Path, taken_back: Result<(), Error>) -> Error {
    let what = match taken_back {
        Ok(()) => format!("{} has its former size", file.display()),
        Err(error) => format!("{}, and cannot have its former one: {error}", not_all_of(file)()),
    };
    Error::While { what, source: Box::new(Error::Stopped) }
}

fn not_all_of(file: &Path) -> impl FnOnce() -> String {
    move || format!("{} has its new size, and not all of it is allocated", file.display())
}

/// Where a LUKS container has its disk.
#[derive(Clone, Copy, Debug)]
struct Payload {
    from: u64,
    size: u64,
    sector: u64,
}

/// Of a container whose payload ends where the file does. What it gains reads as noise, and not as the zeros that who
/// makes a disk larger for what lies above it counts on: so this is of [`resize`] alone.
fn payload(path: &Path, container: &Container) -> Result<Payload, Error> {
    let own = container.clone();
    let header = on_a_ring(path, |io| async move { luks::read_header(&io, &own).await })?
        .doing(|| format!("cannot read the header of {}", path.display()))?;
    if let Some(len) = header.payload_len {
        return Err(Error::Refused(format!(
            "{}: its header says that the payload has {len} bytes: cryptsetup resize changes what it maps of it",
            path.display()
        )));
    }
    let (from, sector) = (header.payload_offset, header.sector_size as u64);
    let size = container.len().saturating_sub(from);
    Ok(Payload { from, size: size - size % sector, sector })
}

/// Whether a disk ends within a cluster, and what lies below goes on behind that.
fn shows_past(job: &Resize, place: &Place, end: u64) -> Result<bool, Error> {
    let own = chain::layer(place, Some(Format::Qcow2), true)?;
    // The end of an encrypted one is left as it is, or refused.
    let within = own.header.is_some_and(|header| {
        end % header.cluster_size() != 0 && header.crypt == qcow2::Crypt::None
    });
    Ok(within
        && own.backing.is_some()
        && backing_size(&job.path, Format::Qcow2, &job.reading)? > end)
}

/// Have the last sector of a disk in its own image, and so the cluster that it ends in.
fn own_end(job: &Resize, writing: Writing<'_>, end: u64) -> Result<(), Error> {
    let progress = Arc::new(Progress::default());
    copy_onto_itself(job, writing, end.saturating_sub(512)..end, &progress)
}

/// Have the new part of a disk in the image.
fn preallocate(
    job: &Resize,
    writing: Writing<'_>,
    part: Range<u64>,
    progress: &Arc<Progress>,
) -> Result<(), Error> {
    let file = &job.path;
    if job.preallocation == Preallocation::Falloc {
        let container = writing.open(file)?;
        let end = on_a_ring(file, |io| async move {
            container.allocate(&io, part.start, part.end - part.start).await?;
            container.sync(&io).await
        })?;
        return Ok(end?);
    }
    copy_onto_itself(job, writing, part, progress)
}

/// Have a part of a disk in its image, every byte of it as data, zeros as they are.
fn copy_onto_itself(
    job: &Resize,
    writing: Writing<'_>,
    part: Range<u64>,
    progress: &Arc<Progress>,
) -> Result<(), Error> {
    let file = &job.path;
    let cache = CacheMode::Writeback;
    let options = job.reading.options_to_write(writing.format, cache, job.force_format)?;
    let disk = Vbd::new(open_place(&Place::from(file), &options)?, cache);
    let job = Copy {
        range: part.clone(),
        to_offset: part.start,
        sparse: 0,
        ..Copy::new(disk.fork(), disk.fork())
    };
    let end = copy(job, progress);
    let stable = finish(disk, file);
    end?;
    stable
}

/// Make a disk at least so large, for what lies above it, which counts on zeros there.
pub(crate) fn grow(
    place: &Place,
    writing: Writing<'_>,
    size: u64,
    reading: &Reading,
) -> Result<(), Error> {
    let container = to_change(place, writing)?;
    if size_of(place.path(), writing.format, &container)? < size {
        let wanted = Wanted { gains_zeros: true, ..Wanted::size(size) };
        change(place, writing, container, wanted, reading)?;
    }
    Ok(())
}

/// What a disk is to be.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    size: u64,
    preallocation: Preallocation,
    /// Whether an image is refused whose raw data file would show what it holds behind the end.
    gains_zeros: bool,
}

impl Wanted {
    fn size(size: u64) -> Wanted {
        Wanted { size, preallocation: Preallocation::Off, gains_zeros: false }
    }
}

/// Make a disk larger, or nothing but what it is; one that would become smaller is refused.
pub(crate) fn set(
    place: &Place,
    writing: Writing<'_>,
    size: u64,
    reading: &Reading,
) -> Result<(), Error> {
    let container = to_change(place, writing)?;
    let old = size_of(place.path(), writing.format, &container)?;
    let too_large = || Error::Refused("the size is too large".into());
    let size = size.checked_next_multiple_of(512).ok_or_else(too_large)?;
    if size < old {
        let why = format!(
            "{} has {old} bytes: make it smaller with ringtap resize --shrink",
            place.path().display()
        );
        return Err(Error::Usage(why));
    }
    change(place, writing, container, Wanted::size(size), reading)
}

/// Open the file of an image to change it, with what a killed server left for it in it.
pub(crate) fn to_change(place: &Place, writing: Writing<'_>) -> Result<Container, Error> {
    match writing.format {
        Format::Qcow2 => writing.settled(place),
        Format::Vhd => writing.settled_vhd(place),
        _ => Ok(writing.open(place)?),
    }
}

fn size_of(path: &Path, format: Format, container: &Container) -> Result<u64, Error> {
    let container = container.clone();
    match format {
        Format::Raw => Ok(container.len().next_multiple_of(512)),
        Format::Qcow2 => {
            let header = on_a_ring(path, |io| async move {
                let header = Header::read(&io, &container).await?;
                let wrong = |source| OpenError::Qcow2 { path: container.path().into(), source };
                header.check_tables(container.len()).map_err(wrong)?;
                Ok::<_, OpenError>(header)
            })??;
            Ok(header.size.next_multiple_of(512))
        }
        Format::Vhd => {
            let facts = on_a_ring(path, |io| async move { vhd::facts(&io, &container).await })??;
            Ok(facts.size)
        }
        other => Err(cannot(path, other, "cannot be resized here")),
    }
}

fn change(
    place: &Place,
    writing: Writing<'_>,
    container: Container,
    Wanted { size, preallocation, gains_zeros }: Wanted,
    reading: &Reading,
) -> Result<(), Error> {
    let (format, path) = (writing.format, place.path());
    match format {
        Format::Raw => set_len(path, container, size),
        Format::Qcow2 => {
            let own = chain::layer(place, Some(format), true)?;
            let data = match own.header.as_ref().and_then(|header| header.data_file()) {
                Some(name) => {
                    let name = PathBuf::from(OsStr::from_bytes(name));
                    let found =
                        find_named(&container, Role::DataFile, &[name], &writing.options())?;
                    record::may_own(place, &found, !writing.data_files.is_empty())?;
                    let writing = Writing { format: Format::Raw, ..writing };
                    Some(writing.open(&found)?)
                }
                None => None,
            };
            let backing_size = match &own.backing {
                Some(_) => Some(backing_size(path, format, reading)?),
                None => None,
            };
            let options =
                ResizeOptions { size, shrink: true, backing_size, preallocation, gains_zeros };
            Ok(on_a_ring(path, |io| async move {
                qcow2::resize(&io, &container, data.as_ref(), &options).await
            })??)
        }
        Format::Vhd => {
            let parent = Some(backing_size(path, format, reading)?);
            Ok(on_a_ring(
                path,
                |io| async move { vhd::resize(&io, &container, size, parent).await },
            )??)
        }
        other => Err(cannot(path, other, "cannot be resized here")),
    }
}

fn set_len(path: &Path, container: Container, size: u64) -> Result<(), Error> {
    if !container.traits().regular {
        let what = if is_store(path) { "lies on a server" } else { "is a block device" };
        let why = format!("{} {what}, whose size others decide", path.display());
        return Err(Error::Refused(why));
    }
    on_a_ring(path, |io| async move {
        container.set_len(&io, size).await?;
        container.sync(&io).await
    })?
    .map_err(|error| or_limit(error, path, size))
    .doing(|| format!("cannot make {} {size} bytes long", path.display()))
}

/// Bytes of the disk below an image.
fn backing_size(path: &Path, format: Format, reading: &Reading) -> Result<u64, Error> {
    let layers = chain::layers(path, Some(format), true, &reading.names)?;
    let Some(below) = layers.get(1) else { return Ok(0) };
    match &below.header {
        Some(header) => Ok(header.size),
        None => disk_size(&below.place, below.format, reading),
    }
}

/// Bytes of a disk that may be in use.
fn disk_size(place: &Place, format: Format, reading: &Reading) -> Result<u64, Error> {
    let own = reading.options(format, CacheMode::Writeback)?;
    let options = OpenOptions { force_share: true, ..own };
    Ok(open_place(place, &options)?.info().size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwatched;

    #[test]
    fn sizes_are_new_or_more_or_less() {
        assert_eq!(NewSize::To(1000).from(0), Some(1024));
        assert_eq!(NewSize::More(1 << 20).from(1 << 20), Some(2 << 20));
        assert_eq!(NewSize::Less(1024).from(2048), Some(1024));
        assert_eq!(NewSize::Less(3072).from(2048), None);
        assert_eq!(NewSize::More(u64::MAX).from(2048), None);
    }

    #[test]
    fn a_disk_becomes_smaller_only_where_it_may() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("a.raw");
        std::fs::write(&path, [1; 8192]).expect("a file");
        let job = |size, shrink, preallocation| Resize {
            path: path.clone(),
            format: Some(Format::Raw),
            force_format: false,
            size,
            shrink,
            preallocation,
            reading: Reading::default(),
        };
        let len = || path.metadata().expect("a file").len();
        let less = job(NewSize::Less(4096), false, Preallocation::Off);
        let error = resize(&less, &unwatched()).expect_err("not so");
        assert!(matches!(error, Error::Shrinks { old: 8192, new: 4096, .. }) && error.is_usage());
        assert_eq!(len(), 8192);
        let end = resize(&Resize { shrink: true, ..less }, &unwatched());
        assert_eq!((end.expect("smaller"), len()), (4096, 4096));
        let end = resize(&job(NewSize::More(4096), false, Preallocation::Full), &unwatched());
        assert_eq!((end.expect("larger"), len()), (8192, 8192));
    }
}
