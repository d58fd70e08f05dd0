//! Files that an image names: where they may lie, and chains of them.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::beside::Folders;
use crate::{Format, OpenError, OpenOptions, Place, Role, foreign_name, probe, record};

/// The most images above each other.
const DEEPEST: usize = 200;

/// A file as an image names it.
#[derive(Clone, Copy)]
pub(crate) struct Named<'a> {
    /// The image.
    pub(crate) by: &'a Path,
    /// What the file is to it.
    pub(crate) what: Role,
    /// The name.
    pub(crate) name: &'a OsStr,
    /// The format it names, in QEMU's words.
    pub(crate) format: Option<&'a [u8]>,
}

impl Named<'_> {
    fn refused(&self, why: &'static str) -> OpenError {
        OpenError::Backing { image: self.by.to_owned(), name: self.name.to_owned(), why }
    }

    fn missing(&self, path: PathBuf) -> OpenError {
        let (image, name, what) = (self.by.to_owned(), self.name.to_owned(), self.what);
        OpenError::Missing { image, what, name, path }
    }

    /// The file, if it lies where such may lie: in the image's own folder or below, or in one that
    /// was allowed.
    pub(crate) fn find(&self, options: &OpenOptions) -> Result<PathBuf, OpenError> {
        let bytes = self.name.as_bytes();
        if let Some(why) = foreign_name(bytes).filter(|_| !bytes.starts_with(b"file:")) {
            return Err(self.refused(why));
        }
        let bytes = bytes.strip_prefix(b"file:").unwrap_or(bytes);
        let protocol = bytes.iter().position(|byte| *byte == b':');
        if protocol.is_some_and(|at| !bytes.get(..at).unwrap_or_default().contains(&b'/')) {
            return Err(self.refused("only a file's path is understood"));
        }
        let folders = Folders::of(self.by, &options.allow_backing)?;
        let path = folders.own.join(OsStr::from_bytes(bytes));
        let found = fs::canonicalize(&path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => self.missing(path.clone()),
            _ => OpenError::Os { what: "find", path: path.clone(), source },
        })?;
        if !folders.hold(&found) {
            return Err(self.refused(
                "that is outside the image's own folder: allow it with --allow-backing DIR",
            ));
        }
        Ok(found)
    }

    /// The format that the image names, else what Ringtap wrote down. What bears no mark is raw; a mark
    /// alone is not believed, for the guest of a raw disk may have written it.
    pub(crate) fn find_format(&self, path: &Path) -> Result<Format, OpenError> {
        if let Some(name) = self.format {
            let unknown = "it is said to be of a format that is not known here";
            return match std::str::from_utf8(name) {
                Ok("file" | "host_device") => Ok(Format::Raw),
                Ok(name) => name.parse().map_err(|_| self.refused(unknown)),
                Err(_) => Err(self.refused(unknown)),
            };
        }
        if let Some(format) = record::format(path) {
            return Ok(format);
        }
        let failed = |source| OpenError::Os { what: "read", path: path.to_owned(), source };
        match probe::mark(path).map_err(failed)? {
            None => Ok(Format::Raw),
            Some(_) => Err(self.refused(
                "the image does not say of which format that is, and its own mark may be a \
                 guest's work: write it down with ringtap rebase -u -b FILE -F FORMAT IMAGE",
            )),
        }
    }
}

/// The images opened above one another, so that none is met twice.
#[derive(Clone, Default)]
pub(crate) struct Chain {
    /// Device and inode.
    above: Vec<(u64, u64)>,
}

impl Chain {
    /// One image more, that in this file.
    pub(crate) fn with(mut self, place: &Place) -> Result<Chain, OpenError> {
        let path = place.path();
        let failed = |source| OpenError::Os { what: "open", path: path.to_owned(), source };
        let facts = fs::metadata(place.at()).map_err(failed)?;
        let file = match facts.file_type().is_block_device() {
            true => (u64::MAX, facts.rdev()),
            false => (facts.dev(), facts.ino()),
        };
        let refused = |why| OpenError::Refused { path: path.to_owned(), why };
        if self.above.contains(&file) {
            return Err(refused("it is its own backing file, directly or by way of others"));
        }
        if self.above.len() >= DEEPEST {
            return Err(refused("more than 200 images lie above it"));
        }
        self.above.push(file);
        Ok(self)
    }
}
