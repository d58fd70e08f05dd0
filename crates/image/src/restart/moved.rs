//! What a killed server left of an image that lies in another file by now: it was moved to another file system, or a copy
//! has taken its place.
//!
//! Its log is not under the new file's name. The image says which it is: by the stamp in its header (version 3 of qcow2), or by
//! the note that was copied with it; else the path is the same. Then the time of its last write tells whether its bytes are those
//! that the log was noted for. A copy without that time may be older or not: so it is asked, unless the image is still there.

use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

use ringtap_io::{FileHandle, Witness};
use rustix::fs::{FlockOperation, flock};

use super::standing::{Facts, Standing};
use super::{
    BORN, CAPACITY, FIRST, Identity, MAGIC, MEMORY, NAME, NUMBER, RestartChoice, RestartLog,
    WITNESS, aside, files, path,
};
use crate::{Container, OpenError, boot, reap, record};

/// How long a killed server may have its log.
const DYING: Duration = Duration::from_secs(5);

/// By what a log is known as that of an image.
pub(crate) enum Sign<'a> {
    /// By what the image says of it.
    Number(&'a dyn Fn(&RestartLog) -> bool),
    /// By where the image lies.
    Path,
}

/// A log with changes whose image lies in another file by now.
pub(crate) struct Moved {
    /// A copy of it, and how it stands to the image.
    log: RestartLog,
    /// The log itself; held against whoever opens the image that it was noted for.
    former: Former,
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
    /// What it held is taken up, or dropped: it goes.
    pub(super) fn settle(&self) {
        let same = |path: &Path| {
            let own = self.held.metadata().map(|facts| facts.ino());
            fs::symlink_metadata(path).is_ok_and(|facts| own.is_ok_and(|own| own == facts.ino()))
        };
        for path in self.by_path.iter().chain([&self.path]).filter(|path| same(path)) {
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
            Sign::Number(is_of) => is_of(own),
            Sign::Path => by_path().is_some_and(|path| own.noted_path() == Some(path)),
        };
        let left = own.left().is_some();
        if own.reborn && is_of_this && left {
            // The copy has got the number of the file that it is a copy of.
            own.standing =
                Standing::of_copy(Witness::read(&own.words, WITNESS), &Facts::of(container));
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
        let is_own = left && (is_of_this || matches!(sign, Sign::Path)) || own.is_closed();
        if is_own && !own.reborn && !(own.is_closed() && matches!(sign, Sign::Number(_))) {
            return None;
        }
    }
    look_for(container, capacity, sign)
}

fn look_for(container: &Container, capacity: u64, sign: &Sign) -> Option<Moved> {
    let folder = RestartLog::usual_folder();
    let own = files::name_of(&rustix::fs::fstat(container.open_file()?).ok()?);
    let look = |path: &Path| {
        let file = super::open_ours(&folder, path, false).ok()?;
        Moved::read(file, &folder, container, capacity).ok().flatten()
    };
    let found = match sign {
        Sign::Path => {
            let link = path::link_of(&folder, &path::path_of(container)?);
            look(&link).filter(|found| !found.former.path.ends_with(&own))
        }
        Sign::Number(is_of) => {
            let entries = fs::read_dir(&folder).ok()?.flatten();
            let logs = entries.filter(|entry| {
                let name = entry.file_name();
                Path::new(&name).extension().is_some_and(|end| end == "restart") && *name != *own
            });
            logs.filter_map(|entry| look(&entry.path())).find(|found| is_of(&found.log))
        }
    };
    found?.hold(&folder, container, capacity)
}

/// The same of an image that has no place to say which log is its own: by the note beside it, else by where it lies.
pub(crate) fn seek_beside(
    container: &Container,
    mut own: Option<&mut RestartLog>,
    capacity: u64,
) -> Option<Moved> {
    let place = container.open_file().map(|_| container.place())?;
    let note = record::noted_log(&place.at()).and_then(|note| Some((note.boot, note.file?)));
    let is_of = |log: &RestartLog| note.is_some_and(|note| log.noted_own() == note);
    let found =
        note.and_then(|_| seek(container, own.as_deref_mut(), capacity, &Sign::Number(&is_of)));
    found.or_else(|| seek(container, own, capacity, &Sign::Path))
}

impl Moved {
    /// The log in `file`, if it has changes of this boot.
    fn read(
        file: fs::File,
        folder: &Path,
        container: &Container,
        capacity: u64,
    ) -> io::Result<Option<Moved>> {
        let mut head = [0; FIRST * 8];
        file.read_exact_at(&mut head, 0)?;
        let word = |at: usize| u64::from_ne_bytes(crate::bytes::get(&head, 8 * at));
        let boot = boot::identity(folder)?;
        let said = [0, 1, 2, CAPACITY].map(word);
        if said != [MAGIC, (boot >> 64) as u64, boot as u64, capacity] || word(NUMBER) == 0 {
            return Ok(None);
        }
        let mut bytes = vec![0; 8 * RestartLog::all_words_for(capacity)];
        file.read_exact_at(&mut bytes, 0)?;
        let word_of = |bytes: &[u8]| u64::from_ne_bytes(crate::bytes::get(bytes, 0));
        let words: Vec<AtomicU64> =
            bytes.chunks_exact(8).map(|bytes| AtomicU64::new(word_of(bytes))).collect();
        let identity = Identity { boot, file: (word(3), word(4)) };
        let mut log = RestartLog::with(Arc::new(words), identity, capacity);
        let by_path = log.noted_path().map(|path| path::link_of(folder, &path));
        // One that was removed under its own name is nobody's.
        let inode = file.metadata()?.ino();
        let names = [files::name_at(identity.file), aside::name_of(identity.file, word(NUMBER))];
        let mut paths = names.iter().map(|name| folder.join(name));
        let is_it = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|it| it.ino() == inode);
        let Some(path) = paths.find(is_it).filter(|_| log.holds_changes()) else { return Ok(None) };
        log.path = Some(path.clone());
        log.own = (boot, word(NUMBER));
        log.standing = Standing::of_copy(Witness::read(&log.words, WITNESS), &Facts::of(container));
        log.image = Some(container.clone());
        let former = Former { path, by_path, held: file };
        Ok(Some(Moved { log, former, disowned: false }))
    }

    /// Hold it against whoever opens the image that it was noted for: none where a server has it, of an image that is there, and
    /// nothing is lost. The files of a server that was killed are closed some time after its end.
    fn hold(self, folder: &Path, container: &Container, capacity: u64) -> Option<Moved> {
        let end = Instant::now() + DYING;
        let held = || flock(&self.former.held, FlockOperation::NonBlockingLockExclusive).is_ok();
        while !held() {
            if self.image_is_there(container) == Some(true) {
                return None;
            }
            if Instant::now() >= end {
                let why = "the process that noted them still runs";
                let (mut log, disowned) = (self.log, self.disowned);
                log.standing = Standing::Unknown(why.into());
                return Some(Moved { log, former: self.former, disowned });
            }
            thread::sleep(Duration::from_millis(5));
        }
        Moved::read(self.former.held, folder, container, capacity).ok().flatten()
    }

    /// The image is another's, for what it says itself.
    pub(crate) fn belongs_to_another(mut self, why: &str) -> Moved {
        self.disowned = true;
        self.log.belongs_to_another(why);
        self
    }

    /// Whether the file that it was noted for is there; none where nobody knows. One that was deleted and is open yet, by a
    /// server that ends, is found by its handle, too.
    fn image_is_there(&self, container: &Container) -> Option<bool> {
        if self.log.image_is_in_its_place() {
            return Some(true);
        }
        let file = container.open_file()?;
        let name: [u64; reap::WORDS] = std::array::from_fn(|at| self.log.word(NAME + at));
        if name[0] == 0 || reap::file_system_of(file).ok()? != name[0] {
            return None;
        }
        let mut handle = [0; FileHandle::WORDS];
        handle.copy_from_slice(&name[1..]);
        let gone = FileHandle::from_words(handle).is_gone(file).ok()?;
        gone.then_some(false)
    }

    fn of(&self) -> String {
        self.log.noted_path().map_or("another image".into(), |path| path.display().to_string())
    }

    /// Whether nobody will ask for it once this image goes on.
    fn may_go(&self, container: &Container) -> bool {
        self.image_is_there(container) != Some(true)
    }

    /// For those who only tell of it: none where the image that it is of still has it.
    pub(crate) fn for_telling(self, container: &Container) -> Option<RestartLog> {
        let is_told = *self.log.standing() == Standing::Same || self.may_go(container);
        is_told.then_some(self.log)
    }

    /// Decide what becomes of it: `own` holds it from then on, if it is to be taken up. `choice` is the operator's, `data` the
    /// image's external data file.
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
            (_, Some(RestartChoice::Use)) => Standing::Same,
            (_, Some(RestartChoice::Drop)) => Standing::Other("that was asked for".into()),
            (Standing::Unknown(_), _) if there == Some(true) => {
                let of = self.of();
                Standing::Other(format!("it is a copy of {of}, which is there and has them"))
            }
            (Standing::Unknown(why), _) => {
                return Err(OpenError::RestartLogInDoubt { path: path(), told, why });
            }
            (known, _) => known,
        };
        // What is not asked for, and may be in use yet, is only left alone.
        let goes = match (&standing, choice) {
            (Standing::Same, _) | (_, Some(RestartChoice::Drop)) => there != Some(true),
            _ => there == Some(false),
        };
        if let Standing::Other(why) = &standing {
            let (at, of) = (container.path().display(), self.of());
            tracing::warn!("{at}: not used, of what a killed process left for {of}, {told}: {why}");
        }
        let is_same = standing == Standing::Same;
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
            own.adopt(&self.log, &Facts::of(container));
        }
        own.former = goes.then_some(self.former);
        Ok(())
    }
}

impl RestartLog {
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
            own.unwrap_or_else(|| word.load(std::sync::atomic::Ordering::SeqCst))
        };
        for ((at, from), to) in from.iter().enumerate().zip(to.iter()) {
            to.store(word((at, from)), std::sync::atomic::Ordering::SeqCst);
        }
        Ok(())
    }
}
