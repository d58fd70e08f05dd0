//! The log of an image that is opened: beside one that is written to, or found of one that is only read.

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::files::{may_hold_changes, name_of};
use super::{CLOSED, MAGIC, RestartLog};
use crate::{Container, OpenError, reap};

impl RestartLog {
    /// The log of the image that is about to be written to in a container; where there cannot be one, a killed
    /// server loses what was not flushed: an error where `needed`, else none and a warning.
    ///
    /// # Errors
    /// Also where there is one already that cannot be read.
    pub fn beside(
        container: &Container,
        capacity: u64,
        needed: bool,
    ) -> Result<Option<RestartLog>, OpenError> {
        RestartLog::beside_in(&RestartLog::usual_folder(), container, capacity, needed)
    }

    pub(super) fn beside_in(
        folder: &Path,
        container: &Container,
        capacity: u64,
        needed: bool,
    ) -> Result<Option<RestartLog>, OpenError> {
        let open = container.open_file().filter(|_| !container.traits().read_only);
        let Some((open, stat)) = open.and_then(|open| Some((open, rustix::fs::fstat(open).ok()?)))
        else {
            return Ok(None);
        };
        let log = folder.join(name_of(&stat));
        let path = container.path();
        if !super::aside::make_way(folder, &log, container) {
            let why = "it holds what a killed process left for another image, and cannot make way";
            let (path, source) = (path.to_owned(), io::Error::other(why));
            return Err(OpenError::RestartLog { path, log, source });
        }
        let was_there = log.symlink_metadata().is_ok();
        let mut opened = RestartLog::open(folder, open, capacity);
        let is_full = |error: &io::Error| {
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::OutOfMemory)
        };
        if opened.as_ref().is_err_and(is_full) && reap::reap(folder, open).is_ok() {
            opened = RestartLog::open(folder, open, capacity);
        }
        match opened {
            Ok(log) => {
                if let Ok(gone @ 1..) = reap::reap_at_times(folder, open) {
                    tracing::info!("dropped {gone} restart logs of images that were deleted");
                }
                Ok(Some(log.of(container)))
            }
            Err(source) if was_there && may_hold_changes(folder, &log) => {
                Err(OpenError::RestartLog { path: path.to_owned(), log, source })
            }
            Err(error) => {
                if !was_there {
                    let _ = fs::remove_file(&log);
                }
                if needed {
                    let (path, folder) = (path.to_owned(), folder.to_owned());
                    return Err(OpenError::NoRestartLog { path, folder, source: error });
                }
                tracing::warn!(
                    "no restart log for {}: {error}; what is not flushed would not outlive a killed \
                     server",
                    path.display()
                );
                Ok(None)
            }
        }
    }

    /// The log of an image that is only read, and so takes up nothing, if there is one.
    ///
    /// # Errors
    /// Where there is one that cannot be read.
    pub fn to_read(container: &Container, capacity: u64) -> Result<Option<RestartLog>, OpenError> {
        let open = container.open_file();
        let Some((open, stat)) = open.and_then(|open| Some((open, rustix::fs::fstat(open).ok()?)))
        else {
            return Ok(None);
        };
        let folder = RestartLog::usual_folder();
        let log = folder.join(name_of(&stat));
        let begin = fs::File::open(&log).and_then(|file| {
            let mut word = [0; 8];
            file.read_exact_at(&mut word, 0).map(|()| u64::from_ne_bytes(word))
        });
        match begin {
            Ok(MAGIC | CLOSED) => {}
            Ok(_) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(_) if !may_hold_changes(&folder, &log) => return Ok(None),
            Err(_) => {}
        }
        match RestartLog::open(&folder, open, capacity) {
            Ok(log) => Ok(Some(log.of(container))),
            Err(source) => {
                Err(OpenError::RestartLog { path: container.path().to_owned(), log, source })
            }
        }
    }
}
