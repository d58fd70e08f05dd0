//! The restart log: what a format has in memory only, kept where a killed server leaves it.
//!
//! A guest lives on when its server is killed, and remembers every write that was acknowledged,
//! flushed or not. So each change of metadata that waits for a flush is also noted in shared memory
//! before the write that made it is acknowledged; the next server of the image takes the notes up. A
//! power cut ends the guest as well: notes of another boot mean nothing and are thrown away.
//!
//! The log has two halves. A flush begins by turning to the other half; when it has ended well, what
//! the half before holds is on the disk and is dropped.
//!
//! Layout, in 64-bit words of the host's order: [`MAGIC`], boot (2), device, inode, owner's stamp (2),
//! then for each half its turn (0: empty) and the count of its records, then what the image's file system
//! calls it ([`NAME`]); from [`FIRST`] on the records
//! of half 0, then of half 1. A record is its mark (the half's turn, stored last) and three words.

mod files;

use std::fs;
use std::io;
use std::ops::Deref;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use ringtap_io::SharedWords;
use ringtap_io::sync::{broken, step};

pub(crate) use files::open_ours;
use files::{may_hold_changes, name_of, open_to_keep};

use crate::{Container, OpenError, boot, reap};

const MAGIC: u64 = 0x5254_4150_4c4f_4702;
const STAMP: usize = 5;
const TURN: [usize; 2] = [7, 9];
const COUNT: [usize; 2] = [8, 10];
/// What the image is called by its file system, see `reap`.
const NAME: usize = 11;
pub(crate) const FIRST: usize = 16;
const RECORD: usize = 4;
/// How the name of the memory beside a log ends.
pub(crate) const MEMORY: &str = "memory";

/// One change: three words whose meaning is the format's.
pub type Record = [u64; 3];

/// The memory of a log: mapped, or of a simulation.
pub type Words = Box<dyn Deref<Target = [AtomicU64]> + Send + Sync>;

/// Whose log it is. A log of another identity is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The boot of the machine, see `boot`.
    pub boot: u128,
    /// The image file's device and inode.
    pub file: (u64, u64),
}

/// What a server before us left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// The stamp it gave [`RestartLog::start`].
    pub stamp: u128,
    /// Its changes, oldest first.
    pub records: Vec<Record>,
}

impl Left {
    /// How many changes, in words.
    pub fn told(&self) -> String {
        match self.records.len() {
            1 => "a change".to_owned(),
            count => format!("{count} changes"),
        }
    }
}

/// The log of one image. Appending, and the beginning of a flush, are the caller's to serialise with
/// the changes they note.
pub struct RestartLog {
    words: Words,
    /// Where the file lies, to be removed at a clean end.
    path: Option<PathBuf>,
    /// The file, whose lock says that a server has it.
    _file: Option<fs::File>,
    /// What the image is called on any path.
    name: [u64; reap::WORDS],
    /// More memory that is kept as the log is, where a simulation provides it.
    beside: Option<Arc<[AtomicU64]>>,
    capacity: u64,
    identity: Identity,
    /// The image, whose lock keeps others from this log.
    image: Option<Container>,
}

impl RestartLog {
    /// Open the log of an image file in `folder` with room for `capacity` changes between flushes,
    /// making what is missing.
    pub fn open(folder: &Path, image: &impl rustix::fd::AsFd, capacity: u64) -> io::Result<Self> {
        let name = reap::name_of(image);
        let image = rustix::fs::fstat(image)?;
        match fs::DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let identity =
            Identity { boot: boot::identity(folder)?, file: (image.st_dev, image.st_ino) };
        let path = folder.join(name_of(&image));
        let file = open_to_keep(folder, &path)?;
        let words = SharedWords::map(&file, FIRST + 2 * RECORD * capacity as usize)?;
        let mut log = RestartLog::with(Box::new(words), identity, capacity);
        (log.path, log._file, log.name) = (Some(path), Some(file), name);
        Ok(log)
    }

    /// The log of the image that is about to be written to in a container; none, and a warning, where
    /// there cannot be one: a killed server then loses what was not flushed.
    ///
    /// # Errors
    /// Where there is one already that cannot be read.
    pub fn beside(container: &Container, capacity: u64) -> Result<Option<RestartLog>, OpenError> {
        RestartLog::beside_in(&RestartLog::usual_folder(), container, capacity)
    }

    fn beside_in(
        folder: &Path,
        container: &Container,
        capacity: u64,
    ) -> Result<Option<RestartLog>, OpenError> {
        let open = container.open_file().filter(|_| !container.traits().read_only);
        let Some((open, stat)) = open.and_then(|open| Some((open, rustix::fs::fstat(open).ok()?)))
        else {
            return Ok(None);
        };
        let log = folder.join(name_of(&stat));
        let was_there = log.symlink_metadata().is_ok();
        let path = container.path();
        match RestartLog::open(folder, open, capacity) {
            Ok(mut log) => {
                if let Ok(gone @ 1..) = reap::reap(folder, open) {
                    tracing::info!("dropped {gone} restart logs of images that were deleted");
                }
                log.image = Some(container.clone());
                Ok(Some(log))
            }
            Err(source) if was_there && may_hold_changes(folder, &log) => {
                Err(OpenError::RestartLog { path: path.to_owned(), log, source })
            }
            Err(error) => {
                if !was_there {
                    let _ = fs::remove_file(&log);
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

    /// Drop what is there under the name of an image that was made anew: a file takes the inode number,
    /// and so the name, of one that is gone. Of one that is only read, as those below it are, nothing is
    /// dropped.
    pub fn forget(container: &Container) {
        let open = container.open_file().filter(|_| !container.traits().read_only);
        let Some(image) = open.and_then(|open| rustix::fs::fstat(open).ok()) else {
            return;
        };
        let path = RestartLog::usual_folder().join(name_of(&image));
        let _ = fs::remove_file(path.with_extension(MEMORY));
        let _ = fs::remove_file(path);
    }

    /// What a killed server left for an image that is only read, and so does not take it up.
    pub fn left_for(container: &Container, capacity: u64) -> Option<Left> {
        let open = container.open_file()?;
        let folder = RestartLog::usual_folder();
        let there = folder.join(name_of(&rustix::fs::fstat(open).ok()?)).exists();
        let log = there.then(|| RestartLog::open(&folder, open, capacity).ok())??;
        log.left().filter(|left| !left.records.is_empty())
    }

    /// The folder for logs: of the system for root, else of the user.
    pub fn usual_folder() -> PathBuf {
        files::usual_folder()
    }

    /// A log in the memory of a simulation, which keeps a copy of it over a kill.
    pub fn with(words: Words, identity: Identity, capacity: u64) -> RestartLog {
        let fits = words.len().saturating_sub(FIRST) / (2 * RECORD);
        let capacity = capacity.min(fits as u64);
        let (path, beside, image, name) = (None, None, None, [0; reap::WORDS]);
        RestartLog { words, path, _file: None, name, beside, capacity, identity, image }
    }

    /// The same, with the memory of [`RestartLog::memory`] in a simulation.
    pub fn with_memory(mut self, words: Arc<[AtomicU64]>) -> RestartLog {
        self.beside = Some(words);
        self
    }

    /// Memory beside the log for what changes often: it stays where a killed server leaves it, as the
    /// log does. `count` words, or as many as there are already.
    pub fn memory(&self, count: Option<usize>) -> io::Result<Words> {
        let Some(path) = &self.path else {
            let words = self.beside.clone().ok_or(io::ErrorKind::NotFound)?;
            let enough = count.is_none_or(|count| count <= words.len());
            return if enough {
                Ok(Box::new(words))
            } else {
                Err(io::ErrorKind::OutOfMemory.into())
            };
        };
        let folder = path.parent().ok_or(io::ErrorKind::NotFound)?;
        let file = open_ours(folder, &path.with_extension(MEMORY), count.is_some())?;
        let count = match count {
            Some(count) => count,
            None => usize::try_from(file.metadata()?.len() / 8).unwrap_or(0),
        };
        Ok(Box::new(SharedWords::map(&file, count)?))
    }

    /// The boot of the machine that it belongs to.
    pub(crate) fn boot(&self) -> u128 {
        self.identity.boot
    }

    /// Words that a log of that capacity takes.
    pub fn words_for(capacity: u64) -> usize {
        FIRST + 2 * RECORD * capacity as usize
    }

    fn word(&self, index: usize) -> u64 {
        self.words.get(index).map_or(0, |word| word.load(SeqCst))
    }

    fn set(&self, index: usize, value: u64) {
        step();
        if let Some(word) = self.words.get(index) {
            word.store(value, SeqCst);
        }
    }

    /// What memory begins with that belongs to this image, on this boot.
    pub(crate) fn identity_words(&self) -> [u64; 5] {
        let Identity { boot, file } = self.identity;
        [MAGIC, (boot >> 64) as u64, boot as u64, file.0, file.1]
    }

    /// What a killed server left here, if it was of this boot and this image.
    pub fn left(&self) -> Option<Left> {
        let same = (0..).zip(self.identity_words()).all(|(at, word)| self.word(at) == word);
        if !same {
            return None;
        }
        let mut halves = [0, 1].map(|half| (self.word(TURN[half]), half));
        halves.sort_unstable();
        let mut records = Vec::new();
        for (turn, half) in halves.into_iter().filter(|(turn, _)| *turn > 0) {
            for number in 0..self.word(COUNT[half]).min(self.capacity) {
                let at = self.place(half, number);
                // One that was being written when the end came: nothing was acknowledged for it.
                if self.word(at) == turn {
                    records.push([1, 2, 3].map(|next| self.word(at + next)));
                }
            }
        }
        let stamp = u128::from(self.word(STAMP)) << 64 | u128::from(self.word(STAMP + 1));
        Some(Left { stamp, records })
    }

    fn place(&self, half: usize, number: u64) -> usize {
        FIRST + RECORD * (half as u64 * self.capacity + number) as usize
    }

    /// Begin anew, with nothing noted. `stamp` is what the image itself keeps too, so that notes are
    /// believed only for the image as their writer left it.
    pub fn start(&self, stamp: u128) {
        self.set(0, 0);
        let turn = self.word(TURN[0]).max(self.word(TURN[1])).saturating_add(1);
        for at in TURN[0]..=COUNT[1] {
            self.set(at, 0);
        }
        // Marks of what was there before must not match.
        self.set(TURN[0], turn);
        self.set(STAMP, (stamp >> 64) as u64);
        self.set(STAMP + 1, stamp as u64);
        (NAME..).zip(self.name).for_each(|(at, word)| self.set(at, word));
        for (at, word) in self.identity_words().into_iter().enumerate().rev() {
            self.set(at, word);
        }
    }

    /// As where the image's file system could not be asked for a name.
    #[cfg(test)]
    pub(crate) fn forget_name(&mut self) {
        self.name = [0; reap::WORDS];
        (NAME..).zip(self.name).for_each(|(at, word)| self.set(at, word));
    }

    /// The half that is written to now.
    fn current(&self) -> usize {
        usize::from(self.word(TURN[1]) > self.word(TURN[0]))
    }

    /// Changes that a half has room for.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Changes that can be noted before the next flush has ended.
    pub fn room(&self) -> u64 {
        self.capacity.saturating_sub(self.word(COUNT[self.current()]))
    }

    /// Note a change; false where there is no room, and a flush must come first.
    #[must_use = "without room the change is not noted"]
    pub fn append(&self, record: Record) -> bool {
        let half = self.current();
        let number = self.word(COUNT[half]);
        if number >= self.capacity {
            return false;
        }
        let at = self.place(half, number);
        if broken("log: told first") {
            self.set(at, self.word(TURN[half]));
            self.set(COUNT[half], number + 1);
        }
        for (next, word) in (1..).zip(record) {
            self.set(at + next, word);
        }
        self.set(at, self.word(TURN[half]));
        self.set(COUNT[half], number + 1);
        true
    }

    /// A flush begins: it will make everything noted so far stable.
    pub fn begin_flush(&self) {
        let now = self.current();
        let other = 1 - now;
        // After a flush that failed the other half is still needed: this one goes on.
        if self.word(TURN[other]) == 0 {
            let turn = self.word(TURN[now]) + 1;
            self.set(COUNT[other], 0);
            self.set(TURN[other], turn);
        }
    }

    /// The flush has ended well: forget what was noted before it began.
    pub fn end_flush(&self) {
        self.set(TURN[1 - self.current()], 0);
    }

    /// The image was closed in good order: nothing is left to be taken up.
    pub fn close(&self) {
        self.set(0, 0);
        self.remove();
    }

    fn remove(&self) {
        if let Some(path) = &self.path {
            // A log that stays is empty.
            let _ = fs::remove_file(path);
            let _ = fs::remove_file(path.with_extension(MEMORY));
        }
    }
}

impl Drop for RestartLog {
    /// Of an image that could not be opened nothing was noted. It is locked still: nobody else has
    /// begun to use the log.
    fn drop(&mut self) {
        if self.image.is_some() && self.word(0) != MAGIC {
            self.remove();
        }
    }
}

/// What the image of a log, which begins with these words, is called; none where it is no log of an image
/// on that device that has a name.
pub(crate) fn name_in(words: &[u64; FIRST], device: u64) -> Option<[u64; reap::WORDS]> {
    let is_one = words[0] == MAGIC && words[3] == device;
    let mut name = [0; reap::WORDS];
    name.copy_from_slice(words.get(NAME..NAME + reap::WORDS)?);
    Some(name).filter(|name| is_one && name[0] != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(log: &RestartLog) -> Vec<u64> {
        log.left().expect("a log").records.iter().map(|record| record[0]).collect()
    }

    fn note(log: &RestartLog, numbers: std::ops::Range<u64>) {
        for number in numbers {
            assert!(log.append([number, number + 1, number + 2]));
        }
    }

    #[test]
    fn what_was_noted_is_found_by_the_next_process() {
        let folder = tempfile::tempdir().expect("a folder");
        let image = tempfile::NamedTempFile::new().expect("a file");
        let open = || RestartLog::open(&folder.path().join("logs"), &image, 100).expect("a log");
        let log = open();
        assert_eq!(log.left(), None);
        log.start(7);
        note(&log, 0..3);
        drop(log);
        let log = open();
        let left = log.left().expect("a log");
        assert_eq!((left.stamp, left.records), (7, vec![[0, 1, 2], [1, 2, 3], [2, 3, 4]]));
        log.start(8);
        assert_eq!(open().left(), Some(Left { stamp: 8, records: vec![] }));
        note(&log, 5..6);
        log.close();
        assert_eq!(open().left(), None);
        // The same inode number on another boot or another file is somebody else's.
        log.start(9);
        let words: Vec<_> =
            log.words.iter().map(|word| AtomicU64::new(word.load(SeqCst))).collect();
        let other = Identity { boot: 1, ..log.identity };
        assert_eq!(RestartLog::with(Box::new(words), other, 100).left(), None);
    }

    #[test]
    fn a_log_that_was_never_begun_is_removed() {
        let image = tempfile::NamedTempFile::new().expect("a file");
        let options = crate::OpenOptions {
            cache: crate::CacheMode::Writeback,
            ..crate::OpenOptions::default()
        };
        let container = Container::open(image.path(), &options).expect("an image");
        let open = || RestartLog::beside(&container, 10).expect("opened").expect("a log");
        let log = open();
        let path = log.path.clone().expect("a file");
        assert!(path.exists());
        drop(log);
        assert!(!path.exists());
        let log = open();
        log.start(1);
        drop(log);
        // Somebody's notes stay, whoever else fails to open the image.
        drop(open());
        assert!(path.exists());
        open().close();
        assert!(!path.exists());
    }

    #[test]
    fn a_log_that_cannot_be_read_is_no_reason_to_go_on_without_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let image = tempfile::NamedTempFile::new().expect("a file");
        let options = crate::OpenOptions {
            cache: crate::CacheMode::Writeback,
            ..crate::OpenOptions::default()
        };
        let container = Container::open(image.path(), &options).expect("an image");
        let beside = || RestartLog::beside_in(folder.path(), &container, 10);
        let log = beside().expect("opened").expect("a log");
        log.start(7);
        note(&log, 0..3);
        let path = log.path.clone().expect("a file");
        drop(log);
        let kept = folder.path().join("kept");
        fs::rename(&path, &kept).expect("renamed");
        // A link is not followed.
        std::os::unix::fs::symlink(&kept, &path).expect("a link");
        let error = beside().err().expect("refused").to_string();
        assert!(error.contains(path.to_str().expect("a name")), "{error}");
        fs::rename(&kept, &path).expect("renamed");
        assert_eq!(records(&beside().expect("opened").expect("a log")), [0, 1, 2]);
        // What nobody ever began holds nothing.
        fs::write(&kept, "").expect("written");
        fs::remove_file(&path).expect("removed");
        std::os::unix::fs::symlink(&kept, &path).expect("a link");
        assert!(beside().expect("opened").is_none());
        // Nor does what somebody else has put there, or what nobody ever writes to.
        fs::remove_file(&path).expect("removed");
        fs::write(&path, MAGIC.to_ne_bytes()).expect("written");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(folder.path(), Some(1), None).expect("given away");
            assert!(beside().expect("opened").is_none());
            std::os::unix::fs::chown(folder.path(), Some(0), None).expect("taken back");
        }
        fs::remove_file(&path).expect("removed");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).expect("a pipe");
        assert!(beside().expect("opened").is_none());
    }

    fn simulated(capacity: u64) -> RestartLog {
        let words: Vec<AtomicU64> =
            (0..RestartLog::words_for(capacity)).map(|_| AtomicU64::new(0)).collect();
        let log = RestartLog::with(Box::new(words), Identity { boot: 1, file: (2, 3) }, capacity);
        log.start(1);
        log
    }

    #[test]
    fn a_flush_drops_what_was_noted_before_it_began() {
        let log = simulated(4);
        note(&log, 0..4);
        assert_eq!(log.room(), 0);
        assert!(!log.append([9, 9, 9]));
        log.begin_flush();
        note(&log, 4..6);
        assert_eq!(records(&log), [0, 1, 2, 3, 4, 5]);
        log.end_flush();
        assert_eq!(records(&log), [4, 5]);
        for round in 0..10 {
            log.begin_flush();
            note(&log, 10 * round..10 * round + 1);
            log.end_flush();
            assert_eq!(records(&log), [10 * round]);
        }
    }

    #[test]
    fn a_flush_that_fails_drops_nothing() {
        let log = simulated(4);
        note(&log, 0..2);
        log.begin_flush();
        note(&log, 2..4);
        log.begin_flush();
        note(&log, 4..6);
        assert_eq!(records(&log), [0, 1, 2, 3, 4, 5]);
        assert_eq!(log.room(), 0);
        log.end_flush();
        assert_eq!(records(&log), [2, 3, 4, 5]);
        log.begin_flush();
        log.end_flush();
        assert!(records(&log).is_empty());
    }

    #[test]
    fn a_log_of_nonsense_gives_no_more_than_it_holds() {
        let log = simulated(4);
        note(&log, 0..1);
        for at in FIRST - 8..log.words.len() {
            log.set(at, u64::MAX);
        }
        for at in 5..FIRST {
            log.set(at, u64::MAX);
        }
        assert!(log.left().is_none_or(|left| left.records.len() <= 8));
        log.start(3);
        assert!(records(&log).is_empty());
    }
}
