//! The files of sidecars.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
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
        let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
        let container = Container::open(&path, &options)?;
        let memory = Arc::new(FolderMemory::of(stem(&path)));
        Ok(Some(Sidecar { container, memory }))
    }
}

fn stem(sidecar: &Path) -> &str {
    sidecar.file_stem().and_then(|name| name.to_str()).unwrap_or_default()
}

/// A server was killed, perhaps, when it had moved the sidecar of `former` to `image`, and not yet the memory.
///
/// # Errors
/// Where nothing tells whether `former` has a sidecar.
pub fn take_memory(former: &Container, image: &Container) -> Result<(), OpenError> {
    let path = |of: &Container| {
        let failed = |source| OpenError::Os {
            what: "find the bitmaps of",
            path: of.path().to_owned(),
            source,
        };
        record::sidecar(&of.place().at(), false).map_err(failed)
    };
    let (None, Some(own)) = (path(former)?, path(image)?) else { return Ok(()) };
    if let Some(theirs) = record::sidecar_name(&former.place().at()) {
        FolderMemory::of(stem(&theirs)).moved(stem(&own));
    }
    Ok(())
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
    fs::remove_file(&path).map_err(failed)?;
    let folder = path.parent().map(fs::File::open);
    folder.map_or(Ok(()), |folder| folder?.sync_all()).map_err(failed)?;
    Ok(true)
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
    let to = to.ok_or_else(|| failed(std::io::ErrorKind::Unsupported.into()))?;
    if from == to {
        return Ok(());
    }
    fs::rename(&from, &to).map_err(failed)?;
    memory.moved(stem(&to));
    let folder = to.parent().map(fs::File::open);
    folder.map_or(Ok(()), |folder| folder?.sync_all()).map_err(failed)
}
