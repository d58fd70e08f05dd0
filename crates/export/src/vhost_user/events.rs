//! Descriptors by which a queue is kicked, and its guest told.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringtap_io::OpenFile;
use rustix::fs::{AtFlags, FileType, StatxFlags, statx};
use vhost::vhost_user::{Error, Result};

pub(super) fn event_file(file: Option<File>) -> Option<Arc<OpenFile>> {
    file.map(|file| Arc::new(OpenFile::new(OwnedFd::from(file))))
}

/// What a file is that no one can wait for: it would keep a processor busy. Eventfds are of no kind at all;
/// User-Mode Linux has pipes.
pub(super) fn always_readable(file: &File) -> Option<&'static str> {
    // What is known of it will do: its file system may be the front-end's own, and not answer.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let mode = statx(file, "", flags, StatxFlags::TYPE).ok()?.stx_mode;
    match FileType::from_raw_mode(mode.into()) {
        FileType::RegularFile => Some("a regular file"),
        FileType::CharacterDevice => Some("a character device"),
        FileType::BlockDevice => Some("a block device"),
        FileType::Directory => Some("a folder"),
        _ => None,
    }
}

/// A descriptor by which a queue signals its front-end. A file may never take the signal, and nothing ends what waits for it.
pub(super) fn signalled(
    file: Option<File>,
    what: &str,
    queue: u8,
) -> Result<Option<Arc<OpenFile>>> {
    match file.as_ref().and_then(always_readable) {
        None => Ok(event_file(file)),
        Some(kind) => Err(Error::ReqHandlerError(std::io::Error::other(format!(
            "the {what} descriptor of queue {queue} is {kind}, which may never take a signal: it must be an eventfd"
        )))),
    }
}
