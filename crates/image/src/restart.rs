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
//! A log is believed only of the image in the state in which its writer left it ([`Standing`]). Where the
//! image was closed in good order, the beginning of its log stays and says so ([`CLOSED`]): a copy of the
//! image from before is then known for one.
//!
//! Layout, in 64-bit words of the host's order: [`MAGIC`], boot (2), device, inode, the image's generation
//! and the next ([`GENERATION`]), then for each half its turn (0: empty) and the count of its records, then
//! what the image's file system calls it ([`NAME`]), when it came to be, bytes written to the device it is,
//! the number of the image's file and the records of a half ([`NUMBER`], [`CAPACITY`]; older servers left 0), the witness; from
//! [`FIRST`] on the records of half 0, then of half 1. A record is its mark (the half's turn, stored last) and three words.
//! Behind them `data_file`, `path` and `fingerprint`.

mod aside;
mod choice;
mod data_file;
mod files;
mod fingerprint;
mod kept;
mod left;
mod moved;
mod note;
mod opening;
mod path;
mod space;
mod spent;
mod standing;

use std::fs;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use ringtap_io::sync::{broken, step};
use ringtap_io::{SharedWords, Witness};

pub use choice::RestartChoice;
pub(crate) use files::keep_as;
pub(crate) use files::make_folder;
pub(crate) use files::open_ours;
pub use files::{folder_is_on_disk, has_folder, set_folder};
use files::{name_of, open_to_keep};
pub(crate) use kept::give_back;
pub use left::{Left, LeftBehind};
use moved::Former;
pub(crate) use moved::{Moved, Sign, is_any, seek, seek_beside};
pub(crate) use note::{Said, forget_note};
pub(crate) use path::LINK;
pub(crate) use spent::note as note_spent;

use rustix::fs::FallocateFlags;

use crate::file_name::{self, number_of};
use crate::{Container, OpenError, Standing, boot};

const MAGIC: u64 = 0x5254_4150_4c4f_4703;
/// In place of [`MAGIC`]: the image was closed in good order.
const CLOSED: u64 = 0x5254_4150_4c4f_47ff;
/// The generation that the image has, and that which is being written to it.
const GENERATION: [usize; 2] = [5, 6];
const TURN: [usize; 2] = [7, 9];
const COUNT: [usize; 2] = [8, 10];
/// What the image is called by its file system, see `reap`.
const NAME: usize = 11;
/// When the image's file came to be.
const BORN: usize = 16;
/// Bytes that had been written to the device when the witness began.
const WRITTEN: usize = 17;
/// The number of the image's file, by which the image says that the log is its own.
const NUMBER: usize = 18;
/// Records that a half has room for.
const CAPACITY: usize = 19;
/// Not 0: that its image is gone has been told.
const TOLD: usize = 20;
const WITNESS: usize = 23;
pub(crate) const FIRST: usize = 32;
const RECORD: usize = 4;
const PAGE: u64 = 4096;
/// No server gets so far: what says so was not written by one.
const LAST_TURN: u64 = 1 << 48;
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

/// The log of one image. Appending, and the beginning of a flush, are the caller's to serialise with
/// the changes they note.
pub struct RestartLog {
    words: ringtap_io::Words,
    /// Where the file lies, to be removed at a clean end.
    path: Option<PathBuf>,
    /// The file, whose lock says that a server has it.
    file: Option<fs::File>,
    /// What the image is called on any path.
    name: [u64; file_name::WORDS],
    /// More memory that is kept as the log is, where a simulation provides it.
    beside: Option<Arc<[AtomicU64]>>,
    capacity: u64,
    /// Changes of each half that have memory, see `space`.
    ready: AtomicU64,
    /// Whether its memory is left when the image is closed, for whoever opens it next.
    stays_whole: AtomicBool,
    identity: Identity,
    /// The image, whose lock keeps others from this log.
    image: Option<Container>,
    /// The image's external data file.
    data: Option<Container>,
    standing: Standing,
    /// The boot, and a number of the image's file.
    own: (u128, u64),
    /// Whether it was noted for another file than that which has its name by now.
    reborn: bool,
    /// Where what it holds was found.
    former: Option<Former>,
}

impl RestartLog {
    /// Open the log of an image file in `folder` with room for `capacity` changes between flushes,
    /// making what is missing.
    pub fn open(folder: &Path, image: &impl rustix::fd::AsFd, capacity: u64) -> io::Result<Self> {
        let name = file_name::name_of(image);
        let image = rustix::fs::fstat(image)?;
        make_folder(folder)?;
        let identity = Identity { boot: boot::identity(folder)?, file: files::place_of(&image) };
        let path = folder.join(name_of(&image));
        let file = open_to_keep(folder, &path)?;
        let count = RestartLog::all_words_for(capacity);
        let words = SharedWords::map_parts(&file, count, space::at_first(capacity))?;
        let mut log = RestartLog::with(Arc::new(words), identity, capacity);
        log.ready = space::least(capacity).into();
        (log.path, log.file, log.name) = (Some(path), Some(file), name);
        Ok(log)
    }

    /// A log in the memory of a simulation, which keeps a copy of it over a kill.
    pub fn with(words: ringtap_io::Words, identity: Identity, capacity: u64) -> RestartLog {
        let fits = words.len().saturating_sub(FIRST) / (2 * RECORD);
        let capacity = capacity.min(fits as u64);
        let (path, beside, image, name) = (None, None, None, [0; file_name::WORDS]);
        let (standing, own) = (Standing::Same, (identity.boot, identity.file.1));
        RestartLog {
            words,
            path,
            file: None,
            name,
            beside,
            capacity,
            ready: capacity.into(),
            stays_whole: AtomicBool::new(false),
            identity,
            image,
            data: None,
            standing,
            own,
            reborn: false,
            former: None,
        }
    }

    /// The log of the image in this container, which nobody has written to since it was opened: whether
    /// it is in the state in which the log's writer left it is seen now.
    pub fn of(mut self, container: &Container) -> RestartLog {
        let facts = container.file_facts();
        let (name, born) = (self.name, facts.born);
        let known = self.word(NAME) != 0 && name[0] != 0;
        let renamed = known && (NAME..).zip(name).any(|(at, word)| self.word(at) != word);
        let reborn = born != 0 && self.word(BORN) != 0 && born != self.word(BORN);
        self.reborn = renamed || reborn;
        self.standing = if self.reborn {
            Standing::Other("the file that it was of is gone, and this is another".into())
        } else {
            let said = Witness::read(&self.words, WITNESS);
            Standing::of(said, &facts, self.word(WRITTEN))
        };
        if let Some(file) = container.open_file() {
            self.own.1 = number_of(file, born);
        }
        container.stands(&self.standing);
        self.image = Some(container.clone());
        self
    }

    /// Whether there is anything in it.
    pub(crate) fn holds_changes(&self) -> bool {
        self.left().is_some_and(|left| !left.records.is_empty())
    }

    /// What it holds, if that is anything, for those who only tell of it.
    pub(crate) fn left_behind(&self) -> Option<LeftBehind> {
        let left = self.left().filter(|left| !left.records.is_empty())?;
        let standing = Some(self.standing.clone());
        Some(LeftBehind { changes: left.records.len(), standing })
    }

    /// Whether what it holds belongs to the image as it is.
    pub fn standing(&self) -> &Standing {
        &self.standing
    }

    /// It does not, for what the image itself says.
    pub(crate) fn belongs_to_another(&mut self, why: &str) {
        self.standing = Standing::Other(why.into());
    }

    /// Decide what becomes of what it holds: from then on it is [`Standing::Same`], and to be taken up, or
    /// [`Standing::Other`], and void, which is told. `choice` is the operator's.
    ///
    /// # Errors
    /// Where there is something in it, whether it belongs to the image cannot be told, and nobody chose.
    pub(crate) fn decide(&mut self, choice: Option<RestartChoice>) -> Result<(), OpenError> {
        let Some(left) = self.left().filter(|left| !left.records.is_empty() || self.has_memory())
        else {
            if let Standing::Unknown(why) = &self.standing {
                self.standing = Standing::Other(why.clone());
            }
            return Ok(());
        };
        let path = self.image.as_ref().map_or(Path::new("the image"), |image| image.path());
        self.standing = match (&self.standing, choice) {
            (_, Some(RestartChoice::Use)) => Standing::Same,
            (_, Some(RestartChoice::Drop)) => Standing::Other("that was asked for".into()),
            (Standing::Unknown(why), None | Some(RestartChoice::Optional)) => {
                let (path, why, told) = (path.to_owned(), why.clone(), left.told());
                return Err(OpenError::RestartLogInDoubt { path, told, why });
            }
            (known, None | Some(RestartChoice::Optional)) => known.clone(),
        };
        if let Standing::Other(why) = &self.standing {
            tracing::warn!(
                "{}: not used, of what a killed process left, {}: {why}",
                path.display(),
                left.told()
            );
        }
        Ok(())
    }

    /// Whether it holds something that belongs to the image.
    pub(crate) fn is_to_be_used(&self) -> bool {
        self.standing == Standing::Same && self.left().is_some()
    }

    fn has_memory(&self) -> bool {
        match &self.path {
            Some(path) => path.with_extension(MEMORY).exists(),
            None => self.beside.is_some(),
        }
    }

    /// Whether the image was closed in good order by the last who had this log.
    pub(crate) fn is_closed(&self) -> bool {
        let [_, whose @ ..] = self.identity_words();
        self.word(0) == CLOSED && (1..).zip(whose).all(|(at, word)| self.word(at) == word)
    }

    /// The image is as it is, and from now on every change of its file is noted. Nothing is in flight.
    pub(crate) fn watch(&self) {
        let Some(container) = &self.image else { return };
        // Pages that others left to be written would count as somebody else's writes later.
        container.settle_device();
        let facts = container.file_facts();
        Witness::reset(&self.words, WITNESS, facts.modified.unwrap_or_default());
        self.set(WRITTEN, facts.written.unwrap_or_default());
        self.set(BORN, facts.born);
        container.witness().start(self.words.clone(), WITNESS);
        self.watch_data();
    }

    /// Generations that the image may have, if it is in the state in which the log's writer left it.
    pub(crate) fn generations(&self) -> [u64; 2] {
        GENERATION.map(|at| self.word(at))
    }

    /// The next generation, before it is written to the image.
    pub(crate) fn begin_generation(&self) -> u64 {
        let next = self.word(GENERATION[0]).wrapping_add(1);
        self.copy_generation(1, next);
        self.set(GENERATION[1], next);
        next
    }

    /// The image has it.
    pub(crate) fn end_generation(&self) {
        let now = self.word(GENERATION[1]);
        self.copy_generation(0, now);
        self.set(GENERATION[0], now);
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

    /// The boot of the machine, and a number of the image's file, that a log of it here would have.
    pub(crate) fn whose(container: &Container) -> Option<(u128, u64)> {
        let open = container.open_file()?;
        let boot = boot::identity(&RestartLog::usual_folder()).ok()?;
        Some((boot, number_of(open, container.file_facts().born)))
    }

    /// The same of this log.
    pub(crate) fn own(&self) -> (u128, u64) {
        self.own
    }

    /// The same as its writer noted it, of which it may be a former file.
    pub(crate) fn noted_own(&self) -> (u128, u64) {
        match self.word(NUMBER) {
            0 => self.own,
            number => (self.own.0, number),
        }
    }

    fn all_words_for(capacity: u64) -> usize {
        RestartLog::words_for(capacity) + data_file::WORDS + path::WORDS + fingerprint::WORDS
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
        Some(Left { records })
    }

    fn place(&self, half: usize, number: u64) -> usize {
        FIRST + RECORD * (half as u64 * self.capacity + number) as usize
    }

    /// Begin anew, with nothing noted. `generation` is what the image itself keeps too, where it can.
    pub fn start(&self, generation: u64) {
        // What was there is stable by now, so that it is as after a good end until the new one stands.
        self.set(0, CLOSED);
        let last = self.word(TURN[0]).max(self.word(TURN[1]));
        let turn = if last < LAST_TURN { last + 1 } else { 1 };
        if last >= LAST_TURN {
            // Of turns that come again. What has no memory is 0.
            let _room = self.room_for(self.capacity);
            let ready = self.ready.load(SeqCst);
            let places = (0..2).flat_map(|half| (0..ready).map(move |number| (half, number)));
            places.for_each(|(half, number)| self.set(self.place(half, number), 0));
        }
        for at in TURN[0]..=COUNT[1] {
            self.set(at, 0);
        }
        // Marks of what was there before must not match.
        self.set(TURN[0], turn);
        GENERATION.into_iter().for_each(|at| self.set(at, generation));
        self.watch();
        (NAME..).zip(self.name).for_each(|(at, word)| self.set(at, word));
        for (at, word) in [(NUMBER, self.own.1), (CAPACITY, self.capacity), (TOLD, 0)] {
            self.set(at, word);
        }
        self.note_path();
        self.former.iter().for_each(Former::settle);
        for (at, word) in self.identity_words().into_iter().enumerate().rev() {
            self.set(at, word);
        }
    }

    /// As where the image's file system could not be asked for a name.
    #[cfg(test)]
    pub(crate) fn forget_name(&mut self) {
        self.name = [0; file_name::WORDS];
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

    /// Changes that may be noted at once, whatever else is.
    pub(crate) fn at_once(&self) -> u64 {
        (space::least(self.capacity) / 8).max(1)
    }

    /// Changes that can be noted before the next flush has ended, as far as there is memory for them.
    pub fn room(&self) -> u64 {
        self.capacity.saturating_sub(self.word(COUNT[self.current()]))
    }

    /// Note a change; false where there is no room, and a flush must come first.
    #[must_use = "without room the change is not noted"]
    pub fn append(&self, record: Record) -> bool {
        let half = self.current();
        let number = self.word(COUNT[half]);
        if number >= self.ready.load(SeqCst) {
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

    /// The image is opened again as soon as it is closed: its memory is left for that. What stands in it means nothing, for
    /// marks of the turns until then match no later one.
    pub(crate) fn stays_whole(&self) {
        self.stays_whole.store(true, SeqCst);
    }

    /// The image was closed in good order: nothing is left to be taken up. `remembered`: where the image
    /// can say which log it had, that stays known.
    pub fn close(&self, remembered: bool) {
        self.set(0, if remembered { CLOSED } else { 0 });
        if remembered { self.shrink() } else { self.remove() }
    }

    /// Give back the memory of all but the beginning.
    fn shrink(&self) {
        let Some(path) = &self.path else { return };
        self.forget_path();
        let _ = fs::remove_file(path.with_extension(MEMORY));
        if let Some(file) = self.file.as_ref().filter(|_| !self.stays_whole.load(SeqCst)) {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let end = 8 * RestartLog::all_words_for(self.capacity) as u64;
            let len = end.next_multiple_of(PAGE) - PAGE;
            let _ = rustix::fs::fallocate(file, punch, PAGE, len);
        }
    }

    fn remove(&self) {
        if let Some(path) = &self.path {
            self.forget_path();
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
        let writable = self.image.as_ref().is_some_and(|image| !image.traits().read_only);
        match self.word(0) {
            MAGIC => {}
            CLOSED => self.shrink(),
            _ if writable => self.remove(),
            _ => {}
        }
    }
}

/// What the image of a log, which begins with these words, is called; none where it is no log of an image
/// on that device that has a name.
pub(crate) fn name_in(words: &[u64; FIRST], device: u64) -> Option<[u64; file_name::WORDS]> {
    let is_one = [MAGIC, CLOSED].contains(&words[0]) && words[3] == device;
    let mut name = [0; file_name::WORDS];
    name.copy_from_slice(words.get(NAME..NAME + file_name::WORDS)?);
    Some(name).filter(|name| is_one && name[0] != 0)
}

#[cfg(test)]
mod tests;
