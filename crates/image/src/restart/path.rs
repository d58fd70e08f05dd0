//! The path at which an image lay when its log was begun, by which the log is found where another file has taken the
//! image's place.
//!
//! It stands behind the words of `data_file`: its length in bytes, and the bytes. The log has a second name in its folder by
//! it ([`link_of`]), so that nobody looks through all logs for it.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::{RestartLog, data_file, files};
use crate::Container;
use crate::file_facts::born_at;

/// Bytes that a path may have (PATH_MAX).
const MOST: usize = 4096;
/// Words that it takes.
pub(super) const WORDS: usize = 1 + MOST / 8;
/// How the second names end.
pub(crate) const LINK: &str = "path";

/// Where the image lies; none for one that has no path by which it could be found again.
pub(super) fn path_of(container: &Container) -> Option<PathBuf> {
    let own = rustix::fs::fstat(container.open_file()?).ok()?;
    let path = fs::canonicalize(container.path()).ok()?;
    let facts = fs::metadata(&path).ok()?;
    let is_own = (facts.dev(), facts.ino()) == (own.st_dev, own.st_ino);
    (is_own && facts.is_file() && path.as_os_str().len() <= MOST).then_some(path)
}

/// The name of a log by its image's path.
pub(super) fn link_of(folder: &Path, path: &Path) -> PathBuf {
    let hash = Sha256::digest(path.as_os_str().as_bytes());
    folder.join(format!("{}.{LINK}", hex::encode(&hash[..16])))
}

/// The log of whatever lay where this image lies is not found by that any more.
pub(super) fn forget(folder: &Path, container: &Container) {
    if let Some(path) = path_of(container) {
        let _ = fs::remove_file(link_of(folder, &path));
    }
}

impl RestartLog {
    fn path_at(&self) -> usize {
        self.data_at() + data_file::WORDS
    }

    /// Where its image lay when it was begun.
    pub(super) fn noted_path(&self) -> Option<PathBuf> {
        let at = self.path_at();
        let len = usize::try_from(self.word(at)).ok().filter(|len| (1..=MOST).contains(len))?;
        let bytes = (at + 1..).take(len.div_ceil(8)).flat_map(|at| self.word(at).to_ne_bytes());
        let bytes: Vec<u8> = bytes.take(len).collect();
        Some(PathBuf::from(OsStr::from_bytes(&bytes)))
    }

    /// Note where its image lies now. It need not be known: then the log is found by the image's file alone.
    pub(super) fn note_path(&self) {
        let (Some(image), Some(log)) = (&self.image, &self.path) else { return };
        let path = path_of(image);
        if self.noted_path() != path {
            self.forget_path();
        }
        let bytes = path.as_ref().map_or(&[][..], |path| path.as_os_str().as_bytes());
        self.set(self.path_at(), 0);
        for (at, chunk) in (self.path_at() + 1..).zip(bytes.chunks(8)) {
            let mut word = [0; 8];
            word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
            self.set(at, u64::from_ne_bytes(word));
        }
        self.set(self.path_at(), bytes.len() as u64);
        let (Some(path), Some(folder)) = (path, log.parent()) else { return };
        let link = link_of(folder, &path);
        if self.has_name(&link) {
            return;
        }
        // What bears it is of an image that has lain there.
        let _ = fs::remove_file(&link);
        if let Err(error) = fs::hard_link(log, &link) {
            tracing::debug!(
                "cannot give {} its name by {}: {error}",
                log.display(),
                path.display()
            );
        }
    }

    /// It is not found by its image's path any more.
    pub(super) fn forget_path(&self) {
        let folder = self.path.as_ref().and_then(|log| log.parent());
        let (Some(path), Some(folder)) = (self.noted_path(), folder) else { return };
        let link = link_of(folder, &path);
        if self.has_name(&link) {
            let _ = fs::remove_file(link);
        }
    }

    fn has_name(&self, name: &Path) -> bool {
        let own = || -> io::Result<bool> {
            let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
            Ok(file.metadata()?.ino() == fs::symlink_metadata(name)?.ino())
        };
        own().unwrap_or(false)
    }

    /// Whether the image's file is still where it was when the log was begun.
    pub(super) fn image_is_in_its_place(&self) -> bool {
        let Some(path) = self.noted_path() else { return false };
        let born = self.word(super::BORN);
        rustix::fs::stat(&path).is_ok_and(|facts| {
            files::place_of(&facts) == self.identity.file
                && (born == 0 || born_at(&path).is_none_or(|time| time == born))
        })
    }
}
