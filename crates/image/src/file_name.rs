//! What a file is called whatever its path, and by which file system.

use std::io;

use ringtap_io::FileHandle;
use rustix::fd::AsFd;
use rustix::fs::{fstat, fstatfs, fstatvfs};

/// Words of [`name_of`].
pub(crate) const WORDS: usize = 1 + FileHandle::WORDS;
/// Those whose identity is one of the file system's own, not of the device it lies on.
const KNOWN: [u64; 3] = [EXT, BTRFS, TMPFS];
const EXT: u64 = 0xef53;
const BTRFS: u64 = 0x9123_683e;
const TMPFS: u64 = 0x0102_1994;

/// What the file is called on any path, and by which file system; zeros where that is not known.
pub(crate) fn name_of(file: impl AsFd) -> [u64; WORDS] {
    let name = || -> io::Result<[u64; WORDS]> {
        let mut words = [file_system_of(&file)?; WORDS];
        words[1..].copy_from_slice(&FileHandle::of(&file)?.words());
        Ok(words)
    };
    name().unwrap_or_default()
}

/// A number that tells the file from others, copies of it among them; the same on any path to it.
pub(crate) fn number_of(file: impl AsFd, born: u64) -> u64 {
    let mut words = FileHandle::of(&file).map(|handle| handle.words().to_vec()).unwrap_or_default();
    words.extend([fstat(&file).map_or(0, |facts| facts.st_ino), born]);
    let step =
        |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    words.into_iter().fold(0, step)
}

/// Which file system the file lies on, by an identity that is the file system's own.
pub(crate) fn file_system_of(file: impl AsFd) -> io::Result<u64> {
    let known = KNOWN.contains(&(fstatfs(&file)?.f_type as u64));
    let id = if known { fstatvfs(&file)?.f_fsid } else { 0 };
    if id == 0 { Err(io::ErrorKind::Unsupported.into()) } else { Ok(id) }
}
