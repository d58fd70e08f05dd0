//! The files of sidecars.

use std::fs;
use std::sync::Arc;

use super::memory::{BitMemory, FolderMemory};
use crate::{CacheMode, Container, OpenError, OpenOptions, record};

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
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        let memory = Arc::new(FolderMemory::of(name));
        Ok(Some(Sidecar { container, memory }))
    }
}

/// Remove the sidecar of an image, stably: nobody takes its bits for what has changed since.
///
/// # Errors
/// Where that cannot be.
pub fn remove_sidecar(image: &Container) -> Result<(), OpenError> {
    let failed = |source| OpenError::Os {
        what: "remove the bitmaps of",
        path: image.path().to_owned(),
        source,
    };
    let Some(path) = record::sidecar(&image.place().at(), false).map_err(failed)? else {
        return Ok(());
    };
    fs::remove_file(&path).map_err(failed)?;
    let folder = path.parent().map(fs::File::open);
    folder.map_or(Ok(()), |folder| folder?.sync_all()).map_err(failed)
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
    let to = record::sidecar(&image.place().at(), true).map_err(failed)?;
    let to = to.ok_or_else(|| failed(std::io::ErrorKind::Unsupported.into()))?;
    fs::rename(&from, &to).map_err(failed)?;
    memory.moved(to.file_stem().and_then(|name| name.to_str()).unwrap_or_default());
    let folder = to.parent().map(fs::File::open);
    folder.map_or(Ok(()), |folder| folder?.sync_all()).map_err(failed)
}
