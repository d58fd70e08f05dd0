//! That an image has a log, noted beside the image for formats that have no place for it in themselves.
//!
//! A log that lies in another folder, or is of a device that has another number by now, is not found, and nobody would miss
//! it. The note begins with the log and ends when the image is closed in good order. One of another boot means nothing, and one that
//! was copied with a file says that the file is a copy. It need not be stable: a power cut ends the log, too.

use std::fs;

use super::files::name_of;
use super::{MEMORY, RestartChoice, RestartLog, is_any};
use crate::{Container, OpenError, record};

/// What an image says of its log, beside what was found of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    /// It has one, and that is not there.
    pub(crate) missing: bool,
    /// And would be that of another file, from which this one was moved or copied.
    pub(crate) elsewhere: bool,
    /// It is a copy of an image that was being served.
    pub(crate) copy: bool,
}

impl Said {
    /// By what it says of the boot and the file that its log is of, if it says that it has one. `is_kept`: whether there is
    /// the log of which it says so, though it is another's.
    pub(crate) fn of(
        of_boot: bool,
        of_file: bool,
        log: Option<&RestartLog>,
        is_kept: impl FnOnce() -> bool,
    ) -> Said {
        let closed = log.is_some_and(RestartLog::is_closed);
        if !of_boot || log.is_some_and(|log| log.left().is_some()) {
            return Said::default();
        }
        // A copy's image has a log, or had one.
        let missing = if of_file { !closed } else { !is_kept() };
        Said { missing, elsewhere: !of_file, copy: !missing }
    }

    /// By the note beside the image; `log` is what was found.
    pub(crate) fn beside(container: &Container, log: Option<&RestartLog>) -> Said {
        let said = container.open_file().and_then(|_| record::noted_log(&container.place().at()));
        let own = || log.map(RestartLog::own).or_else(|| RestartLog::whose(container));
        let (Some(note), Some((boot, file))) = (said, own()) else { return Said::default() };
        let (of_boot, noted) = (note.boot == boot, log.map(|log| log.noted_own().1));
        let is_own = |number| number == file || Some(number) == noted;
        let is_named = |number, _| note.file.is_none_or(|file| number == file);
        let is_kept = || is_any(container, is_named);
        Said::of(of_boot, of_boot && note.file.is_none_or(is_own), log, is_kept)
    }

    /// An error where a log is missing and nobody gave it up; a warning where the image is a copy.
    pub(crate) fn heed(
        self,
        container: &Container,
        choice: Option<RestartChoice>,
    ) -> Result<(), OpenError> {
        // Whoever only reads a copy loses nothing of it.
        let is_read = self.elsewhere && container.traits().read_only;
        if self.missing && !is_read && choice != Some(RestartChoice::Drop) {
            let folder = RestartLog::usual_folder();
            return Err(OpenError::RestartLogMissing { path: container.path().to_owned(), folder });
        }
        if self.missing && !container.traits().read_only {
            forget_note(container);
        }
        if self.copy || self.missing && is_read {
            tracing::warn!(
                "{}: it is a copy of an image that was being served: what its server had not written to it yet \
                 is not here",
                container.path().display()
            );
        }
        Ok(())
    }
}

impl RestartLog {
    /// Note beside the image that this log is begun, and in the log the image's fingerprint, with that number of the format's.
    pub(crate) fn note_beside(&self, number: u64) {
        self.note_fingerprint(number);
        let Some(image) = self.image.as_ref().filter(|image| image.open_file().is_some()) else {
            return;
        };
        let (boot, file) = self.own;
        if let Err(error) = record::note_log(&image.place().at(), boot, file) {
            tracing::warn!(
                "cannot write down that {} has a restart log: {error}; one that is not found after a kill would not be \
                 missed",
                image.path().display()
            );
        }
    }

    /// As [`RestartLog::close`], of an image that has a note beside it.
    pub(crate) fn close_beside(&self) {
        self.image.iter().for_each(forget_note);
        // What is closed is known for that, should an older note come back with a copy of the image.
        self.close(true);
    }

    /// Drop what is there under the name of an image that was made anew: a file takes the inode number,
    /// and so the name, of one that is gone. Of one that is only read, as those below it are, nothing is
    /// dropped.
    pub fn forget(container: &Container) {
        let open = container.open_file().filter(|_| !container.traits().read_only);
        let Some(image) = open.and_then(|open| rustix::fs::fstat(open).ok()) else {
            return;
        };
        forget_note(container);
        let folder = RestartLog::usual_folder();
        super::path::forget(&folder, container);
        let path = folder.join(name_of(&image));
        if super::aside::make_way(&folder, &path, container) {
            if let Ok(log) = super::open_ours(&folder, &path, false) {
                super::spent::note(&folder, &log);
            }
            let _ = fs::remove_file(path.with_extension(MEMORY));
            let _ = fs::remove_file(path);
        }
    }
}

/// No log waits for the image.
pub(crate) fn forget_note(container: &Container) {
    if container.open_file().is_none() {
        return;
    }
    if let Err(error) = record::forget_log(&container.place().at()) {
        let path = container.path().display();
        tracing::warn!(
            "cannot take back that {path} has a restart log: {error}; if it is missed later, ringtap check \
             --restart-log drop gives it up"
        );
    }
}
