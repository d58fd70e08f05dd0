//! Descriptors by which a queue is kicked, and its guest told.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringtap_io::OpenFile;
use rustix::fs::FileType;

pub(super) fn event_file(file: Option<File>) -> Option<Arc<OpenFile>> {
    file.map(|file| Arc::new(OpenFile::new(OwnedFd::from(file))))
}

/// What a file is that no one can wait for: it would keep a processor busy. Eventfds are of no kind at all;
/// User-Mode Linux has pipes.
pub(super) fn always_readable(file: &File) -> Option<&'static str> {
    let mode = rustix::fs::fstat(file).ok()?.st_mode;
    match FileType::from_raw_mode(mode) {
        FileType::RegularFile => Some("a regular file"),
        FileType::CharacterDevice => Some("a character device"),
        FileType::BlockDevice => Some("a block device"),
        FileType::Directory => Some("a folder"),
        _ => None,
    }
}
