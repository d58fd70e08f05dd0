//! Snapshots of disks that are served: an overlay takes an image's place while its guest goes on.
//!
//! The order is what makes it safe. The overlay is made and opened; the image's record says that its disk goes on there,
//! stable before the guest can have written to it; the disks stand still, all of them; the overlays take their images'
//! places; all go on; the images below are made stable and closed. Stopped anywhere, the disk is found by the image's old
//! name: before the overlay was written to it holds nothing, and the disk reads the same with it as without. Of several
//! disks the records are the parts of a transaction: either all of them go on in their overlays, or none does.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringtap_image::qcow2::{self, CreateOptions, Crypt, Header, There};
use ringtap_image::record::{self, Transaction};
use ringtap_image::{
    CacheMode, Container, Format, Image, OpenError, OpenOptions, Place, Role, on_a_ring,
};
use ringtap_io::{Io, Tasks};
use ringtap_vbd::{Former, Quiesced, Vbd};

use crate::carried::{self, Both, carry};
use crate::{Disk, Error, checkpoints};

/// The most images on one another that are opened again: docs/images.md.
const DEEPEST: usize = 200;

/// A disk whose image an overlay is to take the place of.
pub(crate) struct Wanted {
    pub(crate) disk: Disk,
    pub(crate) vbd: ringtap_vbd::Disk,
    /// The overlay.
    pub(crate) overlay: PathBuf,
    /// It is there already: a qcow2 image that holds nothing, and names the disk's image.
    pub(crate) exists: bool,
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// How long requests waited, the slowest of those in flight included.
    pub(crate) pause: Duration,
    /// Of that, until the slowest of those in flight had ended.
    pub(crate) drain: Duration,
}

/// One of the disks on its way.
struct Prepared {
    vbd: Vbd,
    base: PathBuf,
    overlay: PathBuf,
    image: Box<dyn Image>,
    /// The dirty bitmaps inside both images.
    bitmaps: Option<Both>,
    made: bool,
}

/// Have overlays take the places of the disks' images, all at one moment. Requests in flight may take so long, else
/// nothing is changed.
pub(crate) fn take(wanted: &[Wanted], limit: Duration) -> Result<Taken, Error> {
    // What can fail of itself comes before anything is changed.
    let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
    let images: Vec<PathBuf> = wanted.iter().map(|one| one.disk.path.clone()).collect();
    let together = begin(wanted)?;
    let mut prepared = vec![];
    for (number, one) in wanted.iter().enumerate() {
        match prepare(one, together.as_ref().map(|together| (together, number))) {
            Ok(ready) => prepared.push(ready),
            Err(error) => {
                undo(&images, prepared, together);
                return Err(error);
            }
        }
    }
    // Before the first of them can be written to.
    if let Some(Err(error)) = together.as_ref().map(Transaction::decide) {
        undo(&images, prepared, together);
        return Err(unwritten(wanted, &error));
    }
    let io = tasks.io().clone();
    let driven = |source| Error::Process { tried: "drive the io_uring", source };
    let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
    tasks
        .block_on(async move {
            let (taken, formers) = match pivot(&io, &prepared, limit).await {
                Ok(done) => done,
                Err(error) => {
                    undo(&images, prepared, together);
                    return Err(error);
                }
            };
            // All of them, before any is waited for that takes long.
            for one in &prepared {
                let _disk = one.vbd.span().enter();
                checkpoints::moved(&io, one.vbd.disk()).await;
            }
            for (one, former) in prepared.iter().zip(formers) {
                let _disk = one.vbd.span().enter();
                settle(&io, one, &former).await;
            }
            Ok(taken)
        })
        .map_err(driven)?
}

/// Where there are several, all are to go on in their overlays, or none.
fn begin(wanted: &[Wanted]) -> Result<Option<Transaction>, Error> {
    if wanted.len() < 2 {
        return Ok(None);
    }
    let images: Vec<&Path> = wanted.iter().map(|one| &*one.disk.path).collect();
    Transaction::begin(&images).map(Some).map_err(|error| unwritten(wanted, &error))
}

fn unwritten(wanted: &[Wanted], error: &io::Error) -> Error {
    let overlay = wanted.first().map(|one| one.overlay.clone()).unwrap_or_default();
    let why = format!("cannot write down that {} disks go on at one moment: {error}", wanted.len());
    Error::Snapshot { overlay, why }
}

fn failed(overlay: &Path, why: impl Into<String>) -> Error {
    Error::Snapshot { overlay: overlay.to_owned(), why: why.into() }
}

fn prepare(wanted: &Wanted, part: Option<(&Transaction, usize)>) -> Result<Prepared, Error> {
    let Wanted { disk, vbd, overlay, .. } = wanted;
    let refused = |why: String| Err(failed(overlay, why));
    if ringtap_stores::is_store(&disk.path) {
        let of_ceph = ringtap_stores::rbd::is_path_of_rbd(&disk.path);
        let own = if of_ceph { "; ringtap snapshot -c NAME takes one of Ceph's own" } else { "" };
        return refused(format!(
            "{} is no file of this host, where it would be written down that its disk goes on elsewhere{own}",
            disk.path.display()
        ));
    }
    if disk.is_null() {
        return refused(format!(
            "{} is no file, in which it would be written down that its disk goes on elsewhere",
            disk.path.display()
        ));
    }
    let base = match fs::canonicalize(&disk.path) {
        Ok(base) => base,
        Err(error) => return refused(format!("{} is not there: {error}", disk.path.display())),
    };
    let Ok(format) = vbd.info().format.parse::<Format>() else {
        return refused(format!("{} is no image", disk.path.display()));
    };
    if vbd.is_read_only() {
        return refused("the disk is read-only".into());
    }
    let current = vbd.image().map_err(|error| failed(overlay, error.to_string()))?;
    let format = current.info().format.parse().unwrap_or(format);
    let images = std::iter::successors(Some(&*current), |image| image.below()).count();
    if images >= DEEPEST {
        return refused(format!(
            "{images} images lie on one another, and with more they could not be opened again: commit some first"
        ));
    }
    let enciphers = wanted.exists && header(overlay)?.crypt != Crypt::None;
    if !enciphers && is_encrypted(&base, format)? {
        return refused(format!(
            "{} is encrypted, and what is written from now on would not be: make an encrypted overlay with ringtap \
             create, and name it as one that exists",
            base.display()
        ));
    }
    let made = match wanted.exists {
        true => {
            names(overlay, &base)?;
            note(overlay, &base)?;
            false
        }
        false => make(overlay, &base, format, vbd.size())?,
    };
    let opened = place(overlay).and_then(|place| {
        let bitmaps = carried::of(&*current);
        if wanted.exists && !bitmaps.is_empty() {
            at_rest(disk, &place, &*current)?;
        }
        carry(disk, &place, Format::Qcow2, &bitmaps, There::IsReplaced)
            .map_err(|why| failed(overlay, why))?;
        let shown = disk.options.bitmaps.clone();
        let image = open(disk, &place, shown, current.fork())?;
        Ok((Both::of(&*current, &*image), image))
    });
    let opened = opened.and_then(|(bitmaps, image)| {
        let (own, handle) = (vbd.clone(), image.fork());
        let moves =
            on_a_ring(overlay, |io| async move { checkpoints::moves(&io, &own, &*handle).await });
        if let Err(error) = moves {
            close(overlay, image);
            return Err(error.into());
        }
        // From here on who begins anew finds the disk in the overlay, which holds nothing yet.
        let set = match part {
            None => record::set_successor(&base, overlay),
            Some(part) => record::set_successor_in(&base, overlay, part, made),
        };
        set.map_err(|error| {
            // A part of it may be written.
            let undone = record::forget_successor(&base);
            close(overlay, image.fork());
            let base = base.display();
            let also = undone.err().map_or(String::new(), |error| {
                format!(
                    "; nor that it does not: {error}; run ringtap amend --forget-successor {base}"
                )
            });
            failed(overlay, format!("cannot write down that it goes on with {base}: {error}{also}"))
        })?;
        Ok(Prepared {
            vbd: vbd.fork(),
            base: base.clone(),
            overlay: overlay.clone(),
            image,
            bitmaps,
            made,
        })
    });
    match opened {
        Ok(prepared) => Ok(prepared),
        Err(error) => {
            checkpoints::stays(vbd);
            // One that the image still leads to is looked for.
            if made && record::successor(&base).is_none() {
                let _ = fs::remove_file(overlay);
            }
            Err(error)
        }
    }
}

/// Whether the image's own content is enciphered.
pub(crate) fn is_encrypted(path: &Path, format: Format) -> Result<bool, Error> {
    if format != Format::Qcow2 {
        return Ok(format == Format::Luks);
    }
    Ok(header(path)?.crypt != Crypt::None)
}

/// The header of a qcow2 image that may be in use.
pub(crate) fn header(path: &Path) -> Result<Header, Error> {
    let options = OpenOptions {
        read_only: true,
        force_share: true,
        cache: CacheMode::Writeback,
        ..OpenOptions::default()
    };
    let container = Container::open(path, &options)?;
    Ok(on_a_ring(path, |io| async move { Header::read(&io, &container).await })??)
}

/// An error where an overlay that is there names another image than the disk's: it would be opened upon that one next time.
fn names(overlay: &Path, base: &Path) -> Result<(), Error> {
    let header = header(overlay)?;
    let name = header.backing_file.unwrap_or_default();
    let name = Path::new(OsStr::from_bytes(&name));
    let folder = overlay.parent().unwrap_or(Path::new("/"));
    match fs::canonicalize(folder.join(name)) {
        Ok(named) if !name.as_os_str().is_empty() && named == base => Ok(()),
        _ => Err(failed(
            overlay,
            format!(
                "it names {} as its backing file, and the disk's image is {}: name that, with ringtap rebase -u",
                name.display(),
                base.display()
            ),
        )),
    }
}

/// Make an empty overlay; true where its file is new. It is stable, and known to be what it is.
fn make(overlay: &Path, base: &Path, format: Format, size: u64) -> Result<bool, Error> {
    let cannot =
        |what: &str, error: io::Error| failed(overlay, format!("cannot {what} it: {error}"));
    let new = match fs::File::create_new(overlay) {
        Ok(_) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let facts = fs::metadata(overlay).map_err(|error| cannot("look at", error))?;
            if !facts.is_file() || facts.len() > 0 {
                return Err(failed(
                    overlay,
                    "it exists: remove it, choose another name, or name it as one that exists",
                ));
            }
            false
        }
        Err(error) => return Err(cannot("create", error)),
    };
    let name = base.to_str().ok_or_else(|| failed(overlay, "the image's path is not UTF-8"))?;
    let options = CreateOptions {
        size,
        backing_file: Some(name.to_owned()),
        backing_format: Some(format.name().to_owned()),
        // A write then copies nothing of the image below.
        extended_l2: true,
        ..CreateOptions::default()
    };
    let end = write(overlay, options).and_then(|()| {
        note(overlay, base)?;
        let known = record::set_format_below(overlay, base, format);
        known.map_err(|error| cannot("record what lies below", error))?;
        let stable = fs::File::open(overlay).and_then(|file| file.sync_all());
        let stable = stable.and_then(|()| record::sync_folder_of(overlay));
        stable.map_err(|error| cannot("make stable", error))
    });
    match end {
        Ok(()) => Ok(new),
        Err(error) => {
            if new {
                let _ = fs::remove_file(overlay);
            }
            Err(error)
        }
    }
}

/// Write down what an overlay is and what lies below it, without which a command line that names the image is not enough to open it.
fn note(overlay: &Path, base: &Path) -> Result<(), Error> {
    let cannot = |what: &str, error: io::Error| {
        failed(overlay, format!("cannot record the {what} of it: {error}"))
    };
    record::set_format(overlay, Format::Qcow2).map_err(|error| cannot("format", error))?;
    record::set_allowed(overlay, Role::Backing, Some(base))
        .map_err(|error| cannot("backing file", error))
}

fn write(overlay: &Path, options: CreateOptions) -> Result<(), Error> {
    let open = OpenOptions {
        format: Some(Format::Qcow2),
        cache: CacheMode::Writeback,
        ..OpenOptions::default()
    };
    let container = Container::open(overlay, &open)?;
    let made =
        on_a_ring(
            overlay,
            |io| async move { qcow2::create(&io, &container, None, &options).await },
        )?;
    made.map(drop).map_err(|error| failed(overlay, error.to_string()))
}

fn place(overlay: &Path) -> Result<Place, Error> {
    let held = Place::hold(overlay);
    Ok(held.map_err(|source| OpenError::Os { what: "open", path: overlay.to_owned(), source })?)
}

/// Open the overlay upon the image that is served.
fn open(
    disk: &Disk,
    place: &Place,
    bitmaps: Vec<String>,
    base: Box<dyn Image>,
) -> Result<Box<dyn Image>, Error> {
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        force_format: false,
        bitmaps,
        ..disk.options.clone()
    };
    let (held, path) = (place.clone(), place.path());
    let image =
        on_a_ring(path, |io| async move { qcow2::open_upon(&io, &held, &options, base).await })??;
    Ok(image)
}

/// What a killed server has left of an overlay is taken up, before anything in it is changed.
fn at_rest(disk: &Disk, place: &Place, base: &dyn Image) -> Result<(), Error> {
    let image = open(disk, place, vec![], base.fork())?;
    let closed = on_a_ring(place.path(), |io| async move { image.close(&io).await })?;
    closed.map_err(|error| failed(place.path(), error.to_string()))
}

/// With all disks standing still, have the overlays take their images' places.
async fn pivot(io: &Io, all: &[Prepared], limit: u64) -> Result<(Taken, Vec<Former>), Error> {
    let mut quiesced: Vec<Quiesced<'_>> = vec![];
    let began = Instant::now();
    for one in all {
        let still = one.vbd.quiesce(io, limit).await;
        quiesced.push(still.map_err(|busy| failed(&one.overlay, busy.to_string()))?);
    }
    let drain = began.elapsed();
    let mut formers: Vec<Former> = vec![];
    for (one, still) in all.iter().zip(&quiesced) {
        match still.overlay(one.image.fork()) {
            Ok(former) => formers.push(former),
            Err(error) => {
                // Nobody has written yet: those before it are as they were.
                for (still, former) in quiesced.iter().zip(&formers) {
                    let back = still.put_back(former);
                    debug_assert!(back.is_ok(), "it was there a moment ago");
                }
                return Err(failed(
                    &one.overlay,
                    format!("it cannot take the image's place: {error}"),
                ));
            }
        }
    }
    // Nothing fails any more: what is written below and missed here would be missed for ever.
    all.iter().filter_map(|one| one.bitmaps.as_ref()).for_each(Both::go_on);
    drop(quiesced);
    Ok((Taken { pause: began.elapsed(), drain }, formers))
}

/// Make the image below stable. Where that cannot be, the disk's flushes go on to try.
async fn settle(io: &Io, one: &Prepared, former: &Former) {
    let base = one.base.display();
    if let Err(error) = former.settle(io).await {
        tracing::error!("cannot make {base} stable below {}: {error}", one.overlay.display());
        return;
    }
    if let Err(error) = record::seal(&one.base) {
        tracing::warn!("cannot write down when {base} was last written to: {error}");
    }
}

/// Nothing came of it.
fn undo(images: &[PathBuf], all: Vec<Prepared>, together: Option<Transaction>) {
    if let Some(Err(error)) = together.as_ref().map(Transaction::recall) {
        tracing::warn!(
            "where this server is killed now some disks go on in their overlays, and others do not: {error}"
        );
    }
    all.into_iter().for_each(undo_one);
    let Some(together) = together else { return };
    if !images.iter().any(|image| record::is_part_of(image, &together)) {
        together.call_off();
    }
}

/// Nothing uses it: what was kept in memory for it is gone with it.
fn close(overlay: &Path, image: Box<dyn Image>) {
    let closed = on_a_ring(overlay, |io| async move { image.close(&io).await });
    if let Err(error) = closed
        .map_err(|error| error.to_string())
        .and_then(|end| end.map_err(|error| error.to_string()))
    {
        tracing::warn!("cannot close {}: {error}", overlay.display());
    }
}

/// It is to be as it was.
fn undo_one(one: Prepared) {
    let Prepared { vbd, base, overlay, image, made, .. } = one;
    checkpoints::stays(vbd.disk());
    close(&overlay, image);
    if let Err(error) = record::forget_successor(&base) {
        tracing::error!(
            "cannot forget that {} goes on in {}: {error}",
            base.display(),
            overlay.display()
        );
        return;
    }
    if made {
        let _ = fs::remove_file(&overlay);
    }
}
