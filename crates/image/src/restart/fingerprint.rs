//! The fingerprint of an image whose format has no place for a stamp, by which a copy is known that lies elsewhere and has lost the
//! note beside it (`cp -p`, tar): what its head says for good, and the length of its file.
//!
//! It stands behind the path: a number of the format's (0: none), the file's length, and the length that it is about to have. Images may
//! share a fingerprint: a log that is found by it is taken up where the time of the last write fits as well, asked about where that
//! cannot be told, and else nobody's.

use std::fs;
use std::os::unix::fs::FileExt;

use super::{CAPACITY, RestartLog, data_file, path};
use crate::Container;

/// Words that it takes.
pub(super) const WORDS: usize = 3;

/// Where it stands in a log of that capacity.
fn place(capacity: u64) -> usize {
    RestartLog::words_for(capacity) + data_file::WORDS + path::WORDS
}

/// Whether the image in this container, of that number, has the fingerprint.
fn fits([noted, len, next]: [u64; WORDS], container: &Container, number: u64) -> bool {
    let known = noted != 0 && noted == number && container.traits().regular;
    known && [len, next].contains(&container.len())
}

/// Whether the log in this file, for so many records, is of an image with the fingerprint of this one.
pub(super) fn is_of(log: &fs::File, capacity: u64, container: &Container, number: u64) -> bool {
    let mut bytes = [0; 8 * WORDS];
    let read = log.read_exact_at(&mut bytes, 8 * place(capacity) as u64);
    let word = |at: usize| u64::from_ne_bytes(crate::bytes::get(&bytes, 8 * at));
    read.is_ok() && fits(std::array::from_fn(word), container, number)
}

/// What the log in this file held has been taken up: nothing else with the fingerprint of its image is to ask for it.
pub(super) fn forget(log: &fs::File) {
    let mut bytes = [0; 8];
    if log.read_exact_at(&mut bytes, 8 * CAPACITY as u64).is_ok() {
        let at = place(u64::from_ne_bytes(bytes) & u64::from(u32::MAX));
        let _ = log.write_all_at(&[0; 8], 8 * at as u64);
    }
}

impl RestartLog {
    /// Whether it is of an image with this fingerprint.
    pub(super) fn has_fingerprint(&self, container: &Container, number: u64) -> bool {
        let at = place(self.capacity);
        fits(std::array::from_fn(|next| self.word(at + next)), container, number)
    }

    /// Note that of its image, and from now on each change of its length.
    pub(super) fn note_fingerprint(&self, number: u64) {
        let Some(image) = self.image.as_ref().filter(|image| image.traits().regular) else {
            return;
        };
        let at = place(self.capacity);
        self.set(at, 0);
        image.note_length(self.words.clone(), at + 1);
        self.set(at, number);
    }
}
