//! The files of sidecars.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::memory::{BitMemory, FolderMemory};
use crate::{CacheMode, Container, OpenError, OpenOptions, Place, record};

/// The file of a sidecar, and where the bits are meanwhile.
pub struct Sidecar {
    /// The file.
    pub container: Container,
    /// Where the bits are.
    pub memory: Arc<dyn BitMemory>,
}

impl Sidecar {
    /// That of an image; none where it has none, unless it is to have one.
    ///
    /// # Errors
    /// Where there cannot be one, or another server has it.
    pub fn of(image: &Container, create: bool) -> Result<Option<Sidecar>, OpenError> {
        let failed = |source| OpenError::Os {
            what: "keep bitmaps of",
            path: image.path().to_owned(),
            source,
        };
        let Some(path) = record::sidecar(&image.place().at(), create).map_err(failed)? else {
            return Ok(None);
        };
        Sidecar::at(&path).map(Some)
    }

    fn at(path: &Path) -> Result<Sidecar, OpenError> {
        let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
        let container = Container::open(path, &options)?;
        let memory = Arc::new(FolderMemory::of(stem(path)));
        Ok(Sidecar { container, memory })
    }

    /// That of another image, whose disk was about to go on in this one, and does according to its record: whether it says so
    /// itself is to be looked at. None where another server has it: it is that one's disk's.
    pub fn coming(image: &Container) -> Option<Sidecar> {
        let place = image.place();
        let at = place.at();
        let pointer = Pointer::of(&at)?;
        let sidecar = pointer.sidecar();
        if !sidecar.exists() {
            // Killed when it had moved the sidecar, and not yet the memory.
            let own = record::sidecar_name(&at)?;
            FolderMemory::of(&pointer.name).moved(stem(&own));
            return None;
        }
        let leads_here = match Place::hold(&pointer.image) {
            Ok(former) if Some(sidecar.clone()) == record::sidecar_name(&former.at()) => {
                let next = record::find_successor(&former).ok().flatten();
                next.is_some_and(|next| record::identity(&next.at()) == record::identity(&at))
            }
            // It is gone: whoever removed it has seen that the disk needs it no more.
            _ => true,
        };
        if leads_here { Sidecar::at(&sidecar).ok() } else { None }
    }
}

fn stem(sidecar: &Path) -> &str {
    sidecar.file_stem().and_then(|name| name.to_str()).unwrap_or_default()
}

/// The longest such file.
const LONGEST: u64 = 1 << 16;
/// Digits of the name of a sidecar.
const DIGITS: usize = 32;

/// Where an image's disk may come from, with its sidecar.
struct Pointer {
    /// The file that says so.
    path: PathBuf,
    /// The name of the other's sidecar.
    name: String,
    /// The other image.
    image: PathBuf,
}

impl Pointer {
    fn path(to: &Path) -> Option<PathBuf> {
        Some(record::sidecar_name(to)?.with_extension(record::COMING))
    }

    /// That of the image at a path.
    fn of(image: &Path) -> Option<Pointer> {
        let path = Pointer::path(image)?;
        let facts = fs::symlink_metadata(&path).ok()?;
        if !facts.is_file() || facts.len() > LONGEST || record::is_ours(path.parent()?).is_err() {
            return None;
        }
        let (name, image) = parse(&fs::read(&path).ok()?)?;
        Some(Pointer { path, name, image })
    }

    fn sidecar(&self) -> PathBuf {
        self.path.with_file_name(format!("{}.{}", self.name, record::SIDECAR))
    }
}

/// The name of the other's sidecar, and the other image.
pub(super) fn parse(text: &[u8]) -> Option<(String, PathBuf)> {
    let (name, image) = text.split_at_checked(DIGITS)?;
    let name = name.iter().all(u8::is_ascii_hexdigit).then(|| std::str::from_utf8(name).ok());
    let image = PathBuf::from(OsStr::from_bytes(image.strip_prefix(b"\n")?));
    Some((name??.to_owned(), image))
}

pub(super) fn text_of(name: &str, image: &Path) -> Vec<u8> {
    [name.as_bytes(), b"\n", image.as_os_str().as_bytes()].concat()
}

/// A disk that has that sidecar is about to go on from one image in another: by the name of that one it is found, too, by
/// [`Sidecar::coming`]. Stable when this returns.
///
/// # Errors
/// Where that cannot be.
pub fn point_to(sidecar: &Container, from: &Place, to: &Container) -> Result<(), OpenError> {
    let failed = |source| OpenError::Os { what: "keep bitmaps of", path: to.path().into(), source };
    let own = fs::read_link(sidecar.place().at()).map_err(failed)?;
    let unknown = || failed(io::ErrorKind::Unsupported.into());
    let path = Pointer::path(&to.place().at()).ok_or_else(unknown)?;
    if path == own.with_extension(record::COMING) {
        return Ok(());
    }
    let image = fs::canonicalize(from.at()).unwrap_or_else(|_| from.path().to_owned());
    let text = text_of(stem(&own), &image);
    // Not the name that a record has which is being written.
    let made = path.with_extension(format!("{}.{}.new", std::process::id(), record::COMING));
    record::put(&path, &made, &text).map_err(failed)
}

/// The disk of the image at `to` comes from nowhere, or has come.
///
/// # Errors
/// Where that cannot be written down.
pub fn point_no_more(to: &Place) -> Result<(), OpenError> {
    let failed = |source| OpenError::Os { what: "keep bitmaps of", path: to.path().into(), source };
    // What is not there is not removed: the folder may be one that only can be read.
    let path = Pointer::path(&to.at()).filter(|path| fs::symlink_metadata(path).is_ok());
    match path.map(|path| record::remove_stably(&path)) {
        Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
        _ => Ok(()),
    }
}

/// Remove the sidecar of an image, stably: nobody takes its bits for what has changed since.
///
/// # Errors
/// Where that cannot be.
pub fn remove_sidecar(image: &Container) -> Result<(), OpenError> {
    remove_sidecar_of(&image.place(), None).map(drop)
}

/// The same, unless it is `but`; whether there was one.
///
/// # Errors
/// Where that cannot be.
pub fn remove_sidecar_of(image: &Place, but: Option<&Container>) -> Result<bool, OpenError> {
    let failed = |source| OpenError::Os {
        what: "remove the bitmaps of",
        path: image.path().to_owned(),
        source,
    };
    let Some(path) = record::sidecar(&image.at(), false).map_err(failed)? else {
        return Ok(false);
    };
    let file = |path: &Path| fs::metadata(path).map(|facts| (facts.dev(), facts.ino()));
    let but = but.map(|but| file(&but.place().at())).transpose().map_err(failed)?;
    if but.is_some() && but == file(&path).ok() {
        return Ok(false);
    }
    record::remove_stably(&path).map_err(failed)?;
    Ok(true)
}

/// Remove a sidecar that is in use here, and in which no bitmap is kept: it says the same as none, so that nothing is believed
/// wrongly where a power cut brings it back. Whether it is gone.
///
/// # Errors
/// Where it cannot be removed.
pub(super) fn remove_empty(sidecar: &Container) -> io::Result<bool> {
    if sidecar.is_simulated() {
        return Ok(false);
    }
    let place = sidecar.place();
    let path = fs::read_link(place.at())?;
    let file = |path: &Path| fs::symlink_metadata(path).map(|facts| (facts.dev(), facts.ino()));
    let own = fs::metadata(place.at()).map(|facts| (facts.dev(), facts.ino()))?;
    // Somebody else has removed it, or it is no file of ours.
    if path.extension() != Some(OsStr::new(record::SIDECAR)) || file(&path)? != own {
        return Ok(false);
    }
    record::remove_stably(&path).map(|()| true)
}

/// Have a sidecar be found as that of another image from now on.
///
/// # Errors
/// Where that cannot be.
pub fn move_sidecar(
    sidecar: &Container,
    memory: &dyn BitMemory,
    image: &Container,
) -> Result<(), OpenError> {
    let failed = |source| OpenError::Os { what: "move", path: sidecar.path().to_owned(), source };
    let from = fs::read_link(sidecar.place().at()).map_err(failed)?;
    // Its folder is there; a file by the new name that is empty would be believed where the server is killed before the next step.
    let to = record::sidecar_name(&image.place().at());
    let to = to.ok_or_else(|| failed(io::ErrorKind::Unsupported.into()))?;
    if from != to {
        fs::rename(&from, &to).map_err(failed)?;
        memory.moved(stem(&to));
        record::sync_folder_of(&to).map_err(failed)?;
    }
    point_no_more(&image.place())
}
