//! Which requests are in flight, in memory that outlives this process.
//!
//! Answers may be published in another order than requests were fetched in, and each takes the place
//! of some request in the ring. So what was fetched is kept here, a copy of each request, until its
//! answer is published: a killed server's successor serves what is left, each exactly once.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ringtap_io::SharedWords;

use super::wire::{Raw, WORDS};

/// "xenring" and the layout's version.
const MAGIC: u64 = 0x7865_6e72_696e_6701;
/// Words before the first entry: the magic, the identity, the number of entries.
const HEAD: usize = 8;
/// Words of an entry: its state, the request, its number.
const ENTRY: usize = 16;
const NUMBER: usize = 15;

/// States of an entry, in the lower half of its first word.
const FREE: u64 = 0;
const FETCHED: u64 = 1;
/// The upper half says as which answer it will be published.
const ANSWERING: u64 = 2;

/// A request that a server left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    /// The slot it had, and is to have again.
    pub(crate) tag: u16,
    pub(crate) raw: Raw,
}

/// The record of one ring.
pub(crate) struct Record {
    words: SharedWords,
    entries: usize,
    number: u64,
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

impl Record {
    /// Begin a record for a connection just made. What was there before is forgotten.
    pub(crate) fn create(path: &Path, entries: u32, identity: &str) -> io::Result<Record> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = File::options().read(true).write(true).create_new(true).open(path)?;
        let record = Record::map(&file, entries)?;
        record.words[1].store(hash(identity), Relaxed);
        record.words[2].store(entries.into(), Relaxed);
        record.words[0].store(MAGIC, Release);
        Ok(record)
    }

    /// The record of a connection that a server before this one made.
    pub(crate) fn open(path: &Path, entries: u32, identity: &str) -> io::Result<Record> {
        let file = File::options().read(true).write(true).open(path)?;
        let record = Record::map(&file, entries)?;
        let found = [0, 1, 2].map(|word| record.words[word].load(Acquire));
        if found != [MAGIC, hash(identity), entries.into()] {
            return Err(io::Error::other("it is of another connection"));
        }
        Ok(record)
    }

    fn map(file: &File, entries: u32) -> io::Result<Record> {
        let entries = entries as usize;
        let words = SharedWords::map(file, HEAD + entries * ENTRY)?;
        Ok(Record { words, entries, number: 0 })
    }

    /// What a server left that published so many answers, oldest first.
    pub(crate) fn take_up(&mut self, published: u32) -> Vec<Left> {
        let mut left = vec![];
        for tag in 0..self.entries {
            let from = HEAD + tag * ENTRY;
            let state = self.words[from].load(Acquire);
            let open = match state & u64::from(u32::MAX) {
                FETCHED => true,
                // Whether the answers reached the frontend before the server's end.
                ANSWERING => published.wrapping_sub((state >> 32) as u32) as i32 <= 0,
                _ => false,
            };
            if !open {
                self.words[from].store(FREE, Relaxed);
                continue;
            }
            let mut raw = [0; WORDS];
            for (pair, word) in raw.chunks_exact_mut(2).zip(&self.words[from + 1..]) {
                let word = word.load(Relaxed);
                pair.copy_from_slice(&[word as u32, (word >> 32) as u32]);
            }
            let number = self.words[from + NUMBER].load(Relaxed);
            left.push((number, Left { tag: tag as u16, raw }));
        }
        left.sort_unstable_by_key(|(number, _)| *number);
        self.number = left.last().map_or(0, |(number, _)| number.wrapping_add(1));
        left.into_iter().map(|(_, left)| left).collect()
    }

    /// A request was fetched into slot `tag`.
    #[inline]
    pub(crate) fn fetched(&mut self, tag: u16, raw: &Raw) {
        let from = HEAD + usize::from(tag) * ENTRY;
        for (pair, word) in raw.chunks_exact(2).zip(&self.words[from + 1..]) {
            word.store(u64::from(pair[0]) | u64::from(pair[1]) << 32, Relaxed);
        }
        self.words[from + NUMBER].store(self.number, Relaxed);
        self.number = self.number.wrapping_add(1);
        self.words[from].store(FETCHED, Release);
    }

    /// Slot `tag`'s answer is about to be put as that of this index.
    #[inline]
    pub(crate) fn answering(&self, tag: u16, index: u32) {
        let from = HEAD + usize::from(tag) * ENTRY;
        self.words[from].store(ANSWERING | u64::from(index) << 32, Release);
    }

    /// Slot `tag`'s answer is published.
    #[inline]
    pub(crate) fn published(&self, tag: u16) {
        self.words[HEAD + usize::from(tag) * ENTRY].store(FREE, Release);
    }
}

/// Remove from a folder the records of disks that are gone: those called `DISKqNUMBER`.
pub(crate) fn forget(folder: &Path, mut is_gone: impl FnMut(&str) -> bool) {
    // Where there is no folder, there are no records.
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some((disk, queue)) = name.to_str().and_then(|name| name.rsplit_once('q')) else {
            continue;
        };
        if queue.parse::<u16>().is_ok() && is_gone(disk) {
            if let Err(error) = fs::remove_file(entry.path()) {
                tracing::debug!("cannot remove {}: {error}", entry.path().display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(seed: u32) -> Raw {
        std::array::from_fn(|i| seed * 1000 + i as u32)
    }

    #[test]
    fn a_successor_takes_up_what_was_left_in_order() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("below/1-51712-0");
        let mut first = Record::create(&path, 8, "one").expect("a record");
        for tag in [5, 0, 3] {
            first.fetched(tag, &raw(tag.into()));
        }
        first.answering(0, 70);
        first.published(0);
        drop(first);
        let mut second = Record::open(&path, 8, "one").expect("the record");
        let left = |tag: u16| Left { tag, raw: raw(tag.into()) };
        assert_eq!(second.take_up(71), [left(5), left(3)]);
        second.fetched(0, &raw(0));
        let mut third = Record::open(&path, 8, "one").expect("the record");
        assert_eq!(third.take_up(71), [left(5), left(3), left(0)]);
    }

    #[test]
    fn what_was_published_is_not_served_again_and_what_was_not_is() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("record");
        for before in [0u32, u32::MAX - 1] {
            let mut record = Record::create(&path, 8, "").expect("a record");
            for (tag, ahead) in [(1, 0), (2, 1), (3, 2)] {
                record.fetched(tag, &raw(9));
                record.answering(tag, before.wrapping_add(ahead));
            }
            let tags = |left: Vec<Left>| left.iter().map(|left| left.tag).collect::<Vec<_>>();
            let mut next = Record::open(&path, 8, "").expect("the record");
            assert_eq!(tags(next.take_up(before)), [1, 2, 3]);
            assert_eq!(tags(next.take_up(before.wrapping_add(2))), [3]);
        }
    }

    #[test]
    fn records_go_with_their_disks() {
        let dir = tempfile::tempdir().expect("a folder");
        let names = ["xen1-51712q0", "xen1-51712q1", "xen11-51712q0", "xen1-517q0", "xen1-51712qq"];
        for name in names {
            Record::create(&dir.path().join(name), 8, "one").expect("a record");
        }
        forget(dir.path(), |disk| disk == "xen1-51712");
        let left = names.map(|name| dir.path().join(name).exists());
        assert_eq!(left, [false, false, true, true, true]);
        forget(&dir.path().join("none"), |_| panic!("nothing is there"));
    }

    #[test]
    fn another_connection_is_not_taken_up() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("record");
        Record::create(&path, 8, "one").expect("a record").fetched(0, &raw(1));
        assert!(Record::open(&path, 8, "two").is_err());
        assert!(Record::open(&path, 16, "one").is_err());
        assert!(Record::open(&dir.path().join("none"), 8, "one").is_err());
        let mut again = Record::create(&path, 8, "one").expect("a new record");
        assert!(again.take_up(0).is_empty());
    }
}
