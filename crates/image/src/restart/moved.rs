//! What a killed server left of an image that lies in another file by now: it was moved to another file system, or a copy
//! has taken its place.
//!
//! Its log is not under the new file's name. The image says which it is: by the stamp in its header (version 3 of qcow2), or by
//! the note that was copied with it; else the path is the same, or the fingerprint is. Then the time of its last
//! write tells whether its bytes are those that the log was noted for. A copy without that time may be older or not: so it is asked,
//! unless the image is still there.

use std::cmp::Reverse;
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use ringtap_io::{FileHandle, Wall, Witness};
use rustix::fs::{FlockOperation, flock};

use super::{
    BORN, CAPACITY, CLOSED, FIRST, Identity, MAGIC, MEMORY, NAME, NUMBER, RestartChoice,
    RestartLog, WITNESS, aside, files, fingerprint, path, spent,
};
use crate::Standing;
use crate::file_facts::Facts;
use crate::{Container, OpenError, boot, file_name, record};

/// Why a log cannot be looked into.
const IS_HELD: &str = "the process that noted them still runs";

/// By what a log is known as that of an image.
#[derive(Clone, Copy)]
pub(crate) enum Sign<'a> {
    /// By what the image says of it.
    Number(&'a dyn Fn(&RestartLog) -> bool),
    /// By a note beside the image, which whoever owns it may forge: the log stays.
    Note(&'a dyn Fn(&RestartLog) -> bool),
    /// By where the image lies.
    Path,
    /// By its fingerprint, with that number of the format's.
    Fingerprint(u64),
}

/// A log whose image lies in another file by now.
pub(crate) struct Moved {
    /// A copy of it, and how it stands to the image.
    log: RestartLog,
    /// The log itself; held against whoever opens the image that it was noted for.
    former: Former,
    /// Nobody else has it.
    is_held: bool,
    /// It is known by more than a note.
    is_sure: bool,
    /// It is known by no more than its image's fingerprint.
    is_alike: bool,
    /// The image says that it is not of it.
    disowned: bool,
}

/// The log under the name of the file that the image lay in.
pub(crate) struct Former {
    path: PathBuf,
    by_path: Option<PathBuf>,
    held: fs::File,
}

impl Former {
    fn has_name(&self, path: &Path) -> bool {
        let own = self.held.metadata().map(|facts| facts.ino());
        fs::symlink_metadata(path).is_ok_and(|facts| own.is_ok_and(|own| own == facts.ino()))
    }

    /// It is not found by its image's path any more.
    fn forget_path(&self) {
        if let Some(path) = self.by_path.as_ref().filter(|path| self.has_name(path)) {
            let _ = fs::remove_file(path);
        }
    }

    /// What it held, if anything, is taken up: it goes.
    pub(super) fn settle(&self) {
        if let Some(folder) = self.path.parent() {
            spent::note_taken_up(folder, &self.held);
        }
        for path in self.by_path.iter().chain([&self.path]).filter(|path| self.has_name(path)) {
            let _ = fs::remove_file(path);
        }
        let _ = fs::remove_file(self.path.with_extension(MEMORY));
        let _ = flock(&self.held, FlockOperation::Unlock);
    }
}

/// Look for the log of an image whose own, by its file's name, is `own`; none where that is its own, or there is nothing to be
/// found.
pub(crate) fn seek(
    container: &Container,
    own: Option<&mut RestartLog>,
    capacity: u64,
    sign: &Sign,
) -> Option<Moved> {
    let by_path = || path::path_of(container);
    let number = own.as_ref().map(|own| own.own());
    if let Some(own) = own {
        let is_of_this = match sign {
            Sign::Number(is_of) | Sign::Note(is_of) => is_of(own),
            Sign::Path => by_path().is_some_and(|path| own.noted_path() == Some(path)),
            Sign::Fingerprint(number) => own.has_fingerprint(container, *number),
        };
        let left = own.left().is_some();
        if own.reborn && is_of_this && left {
            // The copy has got the number of the file that it is a copy of.
            own.standing =
                Standing::of_copy(Witness::read(&own.words, WITNESS), &container.file_facts());
            if let Some(data) = own.data.clone() {
                own.compare_data(&data);
            }
            return None;
        }
        if !own.reborn && left && is_of_this && Some(own.noted_own()) != number {
            // A server was killed as it took up what it had found elsewhere.
            let former = look_for(container, capacity, sign)?;
            own.former = former.may_go(container).then_some(former.former);
            return None;
        }
        let is_own = is_of_this || matches!(sign, Sign::Path | Sign::Fingerprint(_));
        if is_own && (left || own.is_closed()) && !own.reborn {
            return None;
        }
    }
    look_for(container, capacity, sign)
}

fn look_for(container: &Container, capacity: u64, sign: &Sign) -> Option<Moved> {
    let folder = RestartLog::usual_folder();
    let own = files::name_of(&rustix::fs::fstat(container.open_file()?).ok()?);
    let boot = boot::identity(&folder).ok()?;
    let look = |path: &Path| {
        let file = super::open_ours(&folder, path, false).ok()?;
        // A log is long, and there may be many.
        let may_be = match sign {
            Sign::Number(is_of) | Sign::Note(is_of) => {
                RestartLog::beginning_of(&file, boot).is_ok_and(|log| is_of(&log))
            }
            Sign::Fingerprint(number) => fingerprint::is_of(&file, capacity, container, *number),
            Sign::Path => true,
        };
        if !may_be {
            return None;
        }
        Moved::read(file, &folder, container, capacity).ok().flatten()
    };
    let found = match sign {
        Sign::Path => {
            let link = path::link_of(&folder, &path::path_of(container)?);
            look(&link).filter(|found| !found.former.path.ends_with(&own))
        }
        Sign::Number(is_of) | Sign::Note(is_of) => logs_in(&folder)
            .filter(|path| !path.ends_with(&own))
            .filter_map(|path| look(&path))
            .find(|found| is_of(&found.log)),
        Sign::Fingerprint(_) => logs_in(&folder)
            .filter(|path| !path.ends_with(&own))
            .filter_map(|path| look(&path))
            .filter(|found| found.may_have_this_fingerprint(container))
            .min_by_key(|found| {
                (found.log.standing != Standing::Same, Reverse(found.last_write()))
            }),
    };
    let found = found?.hold(&folder, container, capacity, *sign)?;
    match sign {
        Sign::Fingerprint(_) => Some(found)
            .filter(|found| found.may_have_this_fingerprint(container))
            .map(Moved::known_by_fingerprint),
        Sign::Number(_) | Sign::Note(_) | Sign::Path => Some(found),
    }
}

fn logs_in(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    paths.filter(|path| path.extension().is_some_and(|end| end == "restart"))
}

/// Whether there is a log that `is_named` knows by the number of its image's file and its last generation, or was one until it was
/// spent; those of a simulation nobody can look through.
pub(crate) fn is_any(container: &Container, is_named: impl Fn(u64, u64) -> bool) -> bool {
    if container.open_file().is_none() {
        return true;
    }
    let folder = RestartLog::usual_folder();
    let Ok(boot) = boot::identity(&folder) else { return false };
    let whose = [(boot >> 64) as u64, boot as u64];
    let is_there = logs_in(&folder).any(|path| {
        let file = super::open_ours(&folder, &path, false);
        let log = file.and_then(|file| RestartLog::beginning_of(&file, boot));
        log.is_ok_and(|log| {
            let is_one = [MAGIC, CLOSED].contains(&log.word(0));
            let [_, last] = log.generations();
            is_one && [1, 2].map(|at| log.word(at)) == whose && is_named(log.noted_own().1, last)
        })
    });
    is_there || spent::any(&folder, boot, is_named)
}

/// The same of an image that has no place to say which log is its own: by the note beside it, else by where it lies, else by
/// its fingerprint with that number of the format's.
pub(crate) fn seek_beside(
    container: &Container,
    mut own: Option<&mut RestartLog>,
    capacity: u64,
    number: u64,
) -> Option<Moved> {
    let place = container.open_file().map(|_| container.place())?;
    let note = record::noted_log(&place.at()).and_then(|note| Some((note.boot, note.file?)));
    let is_of = |log: &RestartLog| note.is_some_and(|note| log.noted_own() == note);
    let found =
        note.and_then(|_| seek(container, own.as_deref_mut(), capacity, &Sign::Note(&is_of)));
    found
        .or_else(|| seek(container, own.as_deref_mut(), capacity, &Sign::Path))
        .or_else(|| seek(container, own, capacity, &Sign::Fingerprint(number)))
}

/// The first words of a log's file, as they are now; an older server's has fewer.
fn words_of(file: &fs::File, count: usize) -> io::Result<ringtap_io::Words> {
    let mut bytes = vec![0; 8 * count];
    let there = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX).min(bytes.len());
    file.read_exact_at(bytes.get_mut(..there).unwrap_or_default(), 0)?;
    let word_of = |bytes: &[u8]| u64::from_ne_bytes(crate::bytes::get(bytes, 0));
    let words: Vec<AtomicU64> =
        bytes.chunks_exact(8).map(|bytes| AtomicU64::new(word_of(bytes))).collect();
    Ok(Arc::new(words))
}

impl Moved {
    /// The log in `file`, if it is of this boot.
    fn read(
        file: fs::File,
        folder: &Path,
        container: &Container,
        capacity: u64,
    ) -> io::Result<Option<Moved>> {
        let boot = boot::identity(folder)?;
        let beginning = RestartLog::beginning_of(&file, boot)?;
        let word = |at: usize| beginning.word(at);
        let said = [0, 1, 2, CAPACITY].map(word);
        if said != [MAGIC, (boot >> 64) as u64, boot as u64, capacity] || word(NUMBER) == 0 {
            return Ok(None);
        }
        let words = words_of(&file, RestartLog::all_words_for(capacity))?;
        let identity = beginning.identity;
        let mut log = RestartLog::with(words, identity, capacity);
        let by_path = log.noted_path().map(|path| path::link_of(folder, &path));
        // One that was removed under its own name is nobody's.
        let inode = file.metadata()?.ino();
        let names = [files::name_at(identity.file), aside::name_of(identity.file, word(NUMBER))];
        let mut paths = names.iter().map(|name| folder.join(name));
        let is_it = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|it| it.ino() == inode);
        let Some(path) = paths.find(is_it) else { return Ok(None) };
        log.path = Some(path.clone());
        log.own = (boot, word(NUMBER));
        log.standing =
            Standing::of_copy(Witness::read(&log.words, WITNESS), &container.file_facts());
        log.image = Some(container.clone());
        let former = Former { path, by_path, held: file };
        Ok(Some(Moved {
            log,
            former,
            is_held: false,
            is_sure: true,
            is_alike: false,
            disowned: false,
        }))
    }

    /// Hold it against whoever opens the image that it was noted for: none where a server has it, of an image that is there or of
    /// another at the same path in its container, and nothing is lost.
    fn hold(
        mut self,
        folder: &Path,
        container: &Container,
        capacity: u64,
        sign: Sign,
    ) -> Option<Moved> {
        let by_less = matches!(sign, Sign::Path | Sign::Fingerprint(_));
        let is_there = || {
            let other = by_less && matches!(self.log.standing, Standing::Other(_));
            other || self.image_is_there(container) == Some(true)
        };
        if !files::hold(&self.former.held, is_there) {
            let is_anothers = by_less || is_there();
            self.log.standing = Standing::Unknown(IS_HELD.into());
            return (!is_anothers).then_some(self);
        }
        let found = Moved::read(self.former.held, folder, container, capacity).ok().flatten()?;
        let is_sure = !matches!(sign, Sign::Note(_) | Sign::Fingerprint(_));
        Some(Moved { is_held: true, is_sure, ..found })
    }

    /// Whether it may be that of the image in this container, which has the fingerprint of its own: one that is there is another.
    fn may_have_this_fingerprint(&self, container: &Container) -> bool {
        let may_be = match self.log.standing {
            Standing::Same => true,
            Standing::Unknown(_) => self.image_is_there(container) != Some(true),
            Standing::Other(_) => false,
        };
        may_be && (self.log.holds_changes() || self.log.has_memory())
    }

    /// When its server's last write ended.
    fn last_write(&self) -> Wall {
        Witness::read(&self.log.words, WITNESS).ended
    }

    fn known_by_fingerprint(mut self) -> Moved {
        self.is_alike = true;
        if let Standing::Unknown(why) = &self.log.standing {
            let why = format!("it is as long as {} was, which is not there; {why}", self.of());
            self.log.standing = Standing::Unknown(why);
        }
        self
    }

    /// The image is another's, for what it says itself.
    pub(crate) fn belongs_to_another(mut self, why: &str) -> Moved {
        self.disowned = true;
        self.log.belongs_to_another(why);
        self
    }

    /// Whether the file that it was noted for is there, under whatever name; none where nobody knows.
    fn image_is_there(&self, container: &Container) -> Option<bool> {
        if self.log.image_is_in_its_place() {
            return Some(true);
        }
        let file = container.open_file()?;
        let name: [u64; file_name::WORDS] = std::array::from_fn(|at| self.log.word(NAME + at));
        if name[0] == 0 || file_name::file_system_of(file).ok()? != name[0] {
            return None;
        }
        let mut handle = [0; FileHandle::WORDS];
        handle.copy_from_slice(&name[1..]);
        FileHandle::from_words(handle).names(file).ok().map(|names| names > 0)
    }

    fn of(&self) -> String {
        self.log.noted_path().map_or("another image".into(), |path| path.display().to_string())
    }

    /// Whether nobody will ask for it once this image has taken it up.
    fn may_go(&self, container: &Container) -> bool {
        self.is_held && self.is_sure && self.image_is_there(container) != Some(true)
    }

    /// For those who only tell of it: none where the image that it is of still has it.
    pub(crate) fn for_telling(self, container: &Container) -> Option<RestartLog> {
        let is_told =
            *self.log.standing() == Standing::Same || self.image_is_there(container) != Some(true);
        (self.is_held && is_told).then_some(self.log)
    }

    /// Decide what becomes of it: `own` holds it from then on, if it is to be taken up, and only then it goes: another file may be
    /// the one that asks for it. `choice` is the operator's, `data` the image's external data file.
    ///
    /// # Errors
    /// Where whether it belongs to the image cannot be told, and nobody chose.
    pub(crate) fn settle(
        mut self,
        container: &Container,
        own: &mut Option<RestartLog>,
        choice: Option<RestartChoice>,
        data: Option<&Container>,
    ) -> Result<(), OpenError> {
        if !self.log.holds_changes() && !self.log.has_memory() {
            if let Some(own) = own.as_mut().filter(|_| self.may_go(container)) {
                own.former = Some(self.former);
            }
            return Ok(());
        }
        let there = self.image_is_there(container);
        let told = self.log.left().map_or(String::new(), |left| left.told());
        if let Some(data) = data {
            self.log = self.log.with_data(data);
        }
        let path = || container.path().to_owned();
        let standing = match (self.log.standing.clone(), choice) {
            (Standing::Other(why), Some(RestartChoice::Use)) if self.disowned => {
                return Err(OpenError::RestartLogOfAnother { path: path(), why });
            }
            (_, Some(RestartChoice::Drop)) => Standing::Other("that was asked for".into()),
            _ if !self.is_held => {
                return Err(OpenError::RestartLogHeld { path: path(), log: self.former.path });
            }
            (_, Some(RestartChoice::Use)) => Standing::Same,
            (Standing::Unknown(_), _) if there == Some(true) => {
                let of = self.of();
                Standing::Other(format!("it is a copy of {of}, which is there and has them"))
            }
            (Standing::Unknown(why), _) => {
                return Err(OpenError::RestartLogInDoubt { path: path(), told, why });
            }
            (known, _) => known,
        };
        let is_same = standing == Standing::Same;
        let goes = is_same && self.may_go(container);
        if is_same && self.is_held && !self.is_sure {
            // It stays, and is not asked about where another image comes to its path.
            self.former.forget_path();
        }
        if let Standing::Other(why) = &standing {
            let (at, of) = (container.path().display(), self.of());
            tracing::warn!("{at}: not used, of what a killed process left for {of}, {told}: {why}");
        }
        self.log.standing = standing;
        if container.traits().read_only {
            if is_same {
                *own = Some(self.log);
            }
            return Ok(());
        }
        let Some(own) = own else {
            let source = io::Error::other("what a killed process left elsewhere has no place here");
            let folder = RestartLog::usual_folder();
            return if is_same {
                Err(OpenError::NoRestartLog { path: path(), folder, source })
            } else {
                Ok(())
            };
        };
        if is_same {
            own.adopt(&self.log, &container.file_facts());
            // An image that is there may be moved yet.
            if self.is_alike && there != Some(true) {
                fingerprint::forget(&self.former.held);
            }
        }
        own.former = goes.then_some(self.former);
        Ok(())
    }
}

impl RestartLog {
    /// What stands before the records in the file of a log: whose it is, and in which state of the image.
    fn beginning_of(file: &fs::File, boot: u128) -> io::Result<RestartLog> {
        let words = words_of(file, FIRST)?;
        let word = |at: usize| words.get(at).map_or(0, |word| word.load(SeqCst));
        let identity = Identity { boot, file: (word(3), word(4)) };
        Ok(RestartLog::with(words, identity, 0))
    }

    /// Hold what another log holds, which was noted for the image when it lay in another file. A server that is killed now leaves
    /// it here, for the image still says that number.
    fn adopt(&mut self, other: &RestartLog, facts: &Facts) {
        self.set(0, 0);
        for at in 5..RestartLog::all_words_for(self.capacity) {
            self.set(at, other.word(at));
        }
        // It is found by the other's name for it until a log of our own is begun.
        self.set(self.data_at() + super::data_file::WORDS, 0);
        (NAME..).zip(self.name).for_each(|(at, word)| self.set(at, word));
        self.set(BORN, facts.born);
        if let Err(error) = self.adopt_memory(other)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("bits of bitmaps that a killed process left cannot be had: {error}");
        }
        for (at, word) in self.identity_words().into_iter().enumerate().rev() {
            self.set(at, word);
        }
        self.reborn = false;
        self.standing = Standing::Same;
    }

    /// The memory beside it begins with its magic number and with whose it is.
    fn adopt_memory(&self, other: &RestartLog) -> io::Result<()> {
        let from = other.memory(None)?;
        let to = self.memory(Some(from.len()))?;
        let [_, whose @ ..] = self.identity_words();
        let word = |(at, word): (usize, &AtomicU64)| {
            let own = at.checked_sub(1).and_then(|at| whose.get(at).copied());
            own.unwrap_or_else(|| word.load(SeqCst))
        };
        for ((at, from), to) in from.iter().enumerate().zip(to.iter()) {
            to.store(word((at, from)), SeqCst);
        }
        Ok(())
    }
}
