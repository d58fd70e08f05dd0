//! Files that an image names: where they may lie, and chains of them.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::{Format, OpenError, OpenOptions, qcow2};

/// The most images above each other.
const DEEPEST: usize = 200;

/// A file as an image names it.
#[derive(Clone, Copy)]
pub(crate) struct Named<'a> {
    /// The image.
    pub(crate) by: &'a Path,
    /// The name.
    pub(crate) name: &'a OsStr,
    /// The format it names, in QEMU's words.
    pub(crate) format: Option<&'a [u8]>,
}

impl Named<'_> {
    fn refused(&self, why: &'static str) -> OpenError {
        OpenError::Backing { image: self.by.to_owned(), name: self.name.to_owned(), why }
    }

    /// The file, if it lies where such may lie: in the image's own folder or below, or in one that
    /// was allowed.
    pub(crate) fn find(&self, options: &OpenOptions) -> Result<PathBuf, OpenError> {
        let bytes = self.name.as_bytes();
        let bytes = bytes.strip_prefix(b"file:").unwrap_or(bytes);
        let protocol = bytes.iter().position(|byte| *byte == b':');
        if protocol.is_some_and(|at| !bytes.get(..at).unwrap_or_default().contains(&b'/')) {
            return Err(self.refused("only a file's path is understood"));
        }
        let real = |path: &Path| {
            let failed =
                |source: io::Error| OpenError::Os { what: "find", path: path.to_owned(), source };
            fs::canonicalize(path).map_err(failed)
        };
        let image = real(self.by)?;
        let own = image.parent().unwrap_or(Path::new("/"));
        let found = real(&own.join(OsStr::from_bytes(bytes)))?;
        let mut allowed = options.allow_backing.iter().filter_map(|dir| fs::canonicalize(dir).ok());
        if !found.starts_with(own) && !allowed.any(|dir| found.starts_with(dir)) {
            return Err(self.refused(
                "that is outside the image's own folder: allow it with --allow-backing DIR",
            ));
        }
        Ok(found)
    }

    /// The format that is recorded, else what the file's first bytes say: enough to read it.
    pub(crate) fn find_format(&self, path: &Path) -> Result<Format, OpenError> {
        match self.format {
            Some(b"raw" | b"file" | b"host_device") => Ok(Format::Raw),
            Some(b"qcow2") => Ok(Format::Qcow2),
            Some(_) => Err(self.refused("it is said to be of a format that is not known here")),
            None => probe(path),
        }
    }
}

fn probe(path: &Path) -> Result<Format, OpenError> {
    let mut start = Vec::new();
    let failed = |source| OpenError::Os { what: "read", path: path.to_owned(), source };
    let file = fs::File::open(path).map_err(failed)?;
    file.take(4).read_to_end(&mut start).map_err(failed)?;
    Ok(if start == qcow2::header::MAGIC { Format::Qcow2 } else { Format::Raw })
}

/// The images opened above one another, so that none is met twice.
#[derive(Clone, Default)]
pub(crate) struct Chain {
    /// Device and inode.
    above: Vec<(u64, u64)>,
}

impl Chain {
    /// One image more, that in this file.
    pub(crate) fn with(mut self, path: &Path) -> Result<Chain, OpenError> {
        let failed = |source| OpenError::Os { what: "open", path: path.to_owned(), source };
        let facts = fs::metadata(path).map_err(failed)?;
        let place = match facts.file_type().is_block_device() {
            true => (u64::MAX, facts.rdev()),
            false => (facts.dev(), facts.ino()),
        };
        let refused = |why| OpenError::Refused { path: path.to_owned(), why };
        if self.above.contains(&place) {
            return Err(refused("it is its own backing file, directly or by way of others"));
        }
        if self.above.len() >= DEEPEST {
            return Err(refused("more than 200 images lie above it"));
        }
        self.above.push(place);
        Ok(self)
    }
}
