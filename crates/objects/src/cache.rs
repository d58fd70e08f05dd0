//! An object's chunks on this host: a sparse file, and a map of which of them are there.
//!
//! Every object has a folder of its own, by what its bytes are known by: `data` is as long as the object, `map` has a byte
//! for each chunk, which is 1 once its data is stable, and `used` is locked by whoever has the object open, shared. Any
//! number of processes may have it: two that bring the same chunk write the same bytes. A power cut or a kill leaves
//! at most chunks that are brought again.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use ringtap_io::{Nature, OpenFile, Time};
use rustix::fs::FlockOperation;

use crate::budget::{self, is_at};
use crate::index::{CHUNK, digest};

/// Chunks that are made stable together.
const TOGETHER: usize = 64;
/// For how long one may not be stable.
pub(crate) const SOON: Duration = Duration::from_secs(1);

/// How often the length of a file that is read is looked at, at most.
const LOOK: Time = 1_000_000;

/// Where local caches lie, and what they may take.
#[derive(Clone, Debug)]
pub struct CacheDir {
    /// The folder.
    pub path: PathBuf,
    /// Bytes of all objects in it together, where that is bounded.
    pub size: Option<u64>,
}

/// The chunks of one object that are here.
pub(crate) struct Cache {
    dir: CacheDir,
    data: OpenFile,
    /// What `data` has, or it is not what was kept.
    size: u64,
    /// It was not.
    lost: AtomicBool,
    /// When that was looked at last.
    looked: AtomicU64,
    map: File,
    /// Locked, shared, while it is open.
    _used: File,
    bits: Vec<AtomicU64>,
    unstable: Mutex<Vec<u32>>,
    /// Held by who syncs: of what was lost the kernel tells one of those who sync a file at a time.
    settling: Mutex<()>,
    /// Syncs that failed.
    failures: AtomicU64,
    /// Bytes that were stored since it was last looked whether there is room.
    unchecked: AtomicU64,
    full: AtomicBool,
    /// Why nothing is kept any more: its disk has failed.
    given_up: OnceLock<String>,
    /// Chunks that could not be read, which the map is still to lose.
    unreadable: Mutex<Vec<u32>>,
}

/// Why there is no local cache.
#[derive(Debug)]
pub(crate) enum Unusable {
    /// By what the operator says of it.
    Refused(String),
    /// Its disk has no room, or fails.
    Disk(String),
}

impl Unusable {
    fn of(dir: &CacheDir, error: io::Error) -> Unusable {
        use libc::{EBADMSG, EDQUOT, EIO, ENOSPC, EROFS, EUCLEAN};
        let why = format!("cannot use the cache folder {}: {error}", dir.path.display());
        let disks = [EBADMSG, EDQUOT, EIO, ENOSPC, EROFS, EUCLEAN];
        match error.raw_os_error().is_some_and(|errno| disks.contains(&errno)) {
            true => Unusable::Disk(why),
            false => Unusable::Refused(why),
        }
    }
}

impl Cache {
    /// That of an object, by what its bytes are known by.
    pub(crate) fn open(dir: &CacheDir, identity: &str, size: u64) -> Result<Cache, Unusable> {
        let failed = |error: io::Error| Unusable::of(dir, error);
        make_folder(&dir.path).map_err(failed)?;
        may_trust(&dir.path).map_err(Unusable::Refused)?;
        let name = hex::encode(&digest(format!("{size} {identity}").as_bytes())[..16]);
        let folder = dir.path.join(name);
        let used = take(&folder).map_err(failed)?;
        used.set_modified(SystemTime::now()).map_err(failed)?;
        let count = size.div_ceil(CHUNK);
        let (data, map) = files(&folder, size, count).map_err(failed)?;
        let about = folder.join("about");
        if !about.exists() {
            fs::write(&about, format!("{identity}\n{size} bytes\n")).map_err(failed)?;
        }
        let mut known = vec![0; count as usize];
        map.read_exact_at(&mut known, 0).map_err(failed)?;
        let data = OpenFile::new(OwnedFd::from(data));
        data.set_nature(Nature { image: true, page_cache: true, ..Nature::default() });
        let cache = Cache {
            dir: dir.clone(),
            data,
            size,
            lost: AtomicBool::new(false),
            looked: AtomicU64::new(0),
            map,
            _used: used,
            bits: (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            unstable: Mutex::default(),
            settling: Mutex::default(),
            failures: AtomicU64::new(0),
            // The first looks.
            unchecked: AtomicU64::new(u64::MAX / 2),
            full: AtomicBool::new(false),
            given_up: OnceLock::new(),
            unreadable: Mutex::default(),
        };
        known.iter().zip(0..).filter(|(byte, _)| **byte == 1).for_each(|(_, at)| cache.set(at));
        Ok(cache)
    }

    /// The folder of all caches.
    pub(crate) fn folder(&self) -> &PathBuf {
        &self.dir.path
    }

    /// The file that holds them.
    pub(crate) fn file(&self) -> ringtap_io::File {
        self.data.handle()
    }

    /// Whether the file was as long as ever within the last millisecond: a read costs no system call by it where many come.
    pub(crate) fn is_whole_at(&self, now: Time) -> bool {
        if now.saturating_sub(self.looked.load(Relaxed)) < LOOK {
            return !self.lost.load(Relaxed);
        }
        self.looked.store(now, Relaxed);
        self.is_whole()
    }

    /// Whether the file is as long as ever. One that somebody has cut would read as shorter, and so as zeros: then nothing is
    /// here any more, and nothing is kept until it is opened anew.
    pub(crate) fn is_whole(&self) -> bool {
        let len = rustix::fs::fstat(self.data.as_fd()).map(|facts| facts.st_size as u64);
        if !self.lost.load(SeqCst) && len.is_ok_and(|len| len >= self.size) {
            return true;
        }
        if !self.lost.swap(true, SeqCst) {
            let (folder, found) = (self.dir.path.display(), len.unwrap_or_default());
            tracing::error!(
                "the cache in {folder}: a file of {} bytes has only {found}: somebody has cut it, and it is not used any more",
                self.size
            );
            self.full.store(true, SeqCst);
            let _ = self.given_up.set("somebody has cut its file".to_owned());
            self.unstable().clear();
            self.bits.iter().for_each(|word| word.store(0, SeqCst));
            // For others, whose chunks may make it as long again.
            let none = vec![0; self.size.div_ceil(CHUNK) as usize];
            if let Err(error) = self.map.write_all_at(&none, 0) {
                tracing::warn!("the map of the cache in {folder}: {error}");
            }
        }
        false
    }

    /// Keep nothing more: the disk has failed at that.
    fn give_up(&self, at: &str, error: &io::Error) {
        let why = format!("{at}: {error}");
        if self.given_up.set(why.clone()).is_ok() {
            tracing::error!(
                "the cache in {}: {why}: nothing more is kept there until the image is opened anew, and what it cannot give comes from the server",
                self.dir.path.display()
            );
            self.full.store(true, SeqCst);
        }
    }

    /// Why it keeps nothing any more.
    pub(crate) fn given_up(&self) -> Option<&str> {
        self.given_up.get().map(String::as_str)
    }

    /// These cannot be read here, by this errno: they are not here any more. [`Cache::settle`] says so in the map.
    pub(crate) fn lose(&self, numbers: Range<u32>, errno: i32) {
        if !self.is_whole() {
            return;
        }
        self.give_up("cannot read", &io::Error::from_raw_os_error(errno));
        numbers.clone().for_each(|number| self.clear(number));
        self.unreadable.lock().unwrap_or_else(PoisonError::into_inner).extend(numbers);
    }

    fn clear(&self, number: u32) {
        self.bits[number as usize / 64].fetch_and(!(1 << (number % 64)), SeqCst);
    }

    /// A chunk is here, in its place.
    pub(crate) fn set(&self, number: u32) {
        self.bits[number as usize / 64].fetch_or(1 << (number % 64), SeqCst);
    }

    /// Whether a chunk is here, as far as this process knows.
    #[inline]
    pub(crate) fn has(&self, number: u32) -> bool {
        let word = self.bits.get(number as usize / 64);
        word.is_some_and(|word| word.load(SeqCst) >> (number % 64) & 1 == 1)
    }

    /// Whether all of those are.
    #[inline]
    pub(crate) fn has_all(&self, mut numbers: Range<u32>) -> bool {
        numbers.all(|number| self.has(number))
    }

    /// Whether another process has brought it since.
    pub(crate) fn look_again(&self, number: u32) -> bool {
        if self.given_up.get().is_some() {
            return false;
        }
        let mut byte = [0];
        let there = self.map.read_exact_at(&mut byte, number.into()).is_ok() && byte == [1];
        if there && self.is_whole() {
            self.set(number);
            return true;
        }
        false
    }

    /// The bytes of one that is here. Waits for the disk.
    pub(crate) fn read(&self, number: u32, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            let at = u64::from(number) * CHUNK + done as u64;
            match rustix::io::pread(self.data.as_fd(), &mut bytes[done..], at)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => done += read,
            }
        }
        Ok(bytes)
    }

    /// Keep a chunk whose bytes are right: whether there is room for it. Waits for the disk.
    pub(crate) fn store(&self, number: u32, bytes: &[u8]) -> bool {
        // A chunk at the end would make a file that was cut as long as ever again.
        if !self.is_whole() {
            return false;
        }
        if self.has(number) || !self.has_room(bytes.len() as u64) {
            return self.has(number);
        }
        let failures = self.failures.load(SeqCst);
        let mut done = 0;
        while done < bytes.len() {
            let at = u64::from(number) * CHUNK + done as u64;
            match rustix::io::pwrite(self.data.as_fd(), &bytes[done..], at) {
                Ok(written) => done += written,
                Err(error) => {
                    self.give_up("cannot write", &error.into());
                    return false;
                }
            }
        }
        let many = {
            let mut unstable = self.unstable();
            // It may be among what the sync that failed meanwhile has lost.
            if self.failures.load(SeqCst) != failures {
                return false;
            }
            self.set(number);
            unstable.push(number);
            unstable.len() >= TOGETHER
        };
        if many {
            self.settle();
        }
        true
    }

    fn unstable(&self) -> MutexGuard<'_, Vec<u32>> {
        self.unstable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Make what was stored stable, and say so in the map. Waits for the disk.
    pub(crate) fn settle(&self) {
        self.settle_by(|| Ok(rustix::fs::fdatasync(self.data.as_fd())?));
    }

    fn settle_by(&self, sync: impl FnOnce() -> io::Result<()>) {
        let _alone = self.settling.lock().unwrap_or_else(PoisonError::into_inner);
        self.forget_unreadable();
        let stored = std::mem::take(&mut *self.unstable());
        if stored.is_empty() {
            return;
        }
        if let Err(error) = sync() {
            // What the page cache has lost is brought again: all since the last sync that went well, for nobody is told which.
            self.give_up("cannot make stable", &error);
            self.failures.fetch_add(1, SeqCst);
            let since = std::mem::take(&mut *self.unstable());
            stored.into_iter().chain(since).for_each(|number| self.clear(number));
            return;
        }
        for number in stored {
            if let Err(error) = self.map.write_all_at(&[1], number.into()) {
                return self.give_up("cannot write its map", &error);
            }
        }
    }

    /// The next server brings them again, and a disk may have room elsewhere for what is written anew.
    fn forget_unreadable(&self) {
        let numbers =
            std::mem::take(&mut *self.unreadable.lock().unwrap_or_else(PoisonError::into_inner));
        for number in numbers {
            if let Err(error) = self.map.write_all_at(&[0], number.into()) {
                tracing::debug!("the map of the cache in {}: {error}", self.dir.path.display());
            }
        }
    }

    /// Whether more is not kept.
    pub(crate) fn is_full(&self) -> bool {
        self.full.load(SeqCst)
    }

    /// Whether so many bytes more may be kept: objects that nobody uses make room for them.
    fn has_room(&self, len: u64) -> bool {
        if self.given_up.get().is_some() {
            return false;
        }
        let Some(most) = self.dir.size else { return !self.full.load(SeqCst) };
        // Others store, too.
        let step = (64 << 20).min(most / 8).max(CHUNK);
        if self.unchecked.fetch_add(len, SeqCst) >= step {
            self.unchecked.store(0, SeqCst);
            let full = !budget::make_room(&self.dir.path, most, step);
            if full && !self.full.swap(full, SeqCst) {
                tracing::warn!(
                    "the cache in {} is full of {most} bytes, and all of it is in use: more is read, and not kept",
                    self.dir.path.display()
                );
            }
            self.full.store(full, SeqCst);
        }
        !self.full.load(SeqCst)
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.settle();
    }
}

fn options() -> fs::OpenOptions {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options
}

pub(crate) fn make_folder(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Who writes there decides what guests read.
fn may_trust(path: &Path) -> Result<(), String> {
    let facts = fs::metadata(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let user = rustix::process::geteuid().as_raw();
    let own = facts.uid() == user || facts.uid() == 0;
    match own && facts.mode() & 0o022 == 0 {
        true => Ok(()),
        false => Err(format!(
            "others may write to the cache folder {}, and so to what guests read: chmod go-w, or name another",
            path.display()
        )),
    }
}

/// The lock of an object's folder, which is made where there is none.
fn take(folder: &Path) -> io::Result<File> {
    loop {
        make_folder(folder)?;
        let path = folder.join("used");
        let used = match options().open(&path) {
            // It was just taken away.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            used => used?,
        };
        rustix::fs::flock(&used, FlockOperation::LockShared)?;
        if is_at(&path, &used) {
            return Ok(used);
        }
    }
}

/// The data and the map of an object. A map says nothing of data that is not as long as the object.
fn files(folder: &Path, size: u64, count: u64) -> io::Result<(File, File)> {
    let alone = File::open(folder)?;
    rustix::fs::flock(&alone, FlockOperation::LockExclusive)?;
    let open = || -> io::Result<(File, File)> {
        Ok((options().open(folder.join("data"))?, options().open(folder.join("map"))?))
    };
    let (mut data, mut map) = open()?;
    let (found, said) = (data.metadata()?.len(), map.metadata()?.len());
    if found != size && found + said > 0 {
        // Who has them open finds his own as short as ever, and not as long again. The map first: a kill between the two must
        // leave none that counts.
        for name in ["map", "data"] {
            fs::remove_file(folder.join(name))?;
            alone.sync_all()?;
        }
        (data, map) = open()?;
    }
    if map.metadata()?.len() != count {
        map.set_len(count)?;
    }
    if data.metadata()?.len() != size {
        data.set_len(size)?;
    }
    Ok((data, map))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir(folder: &tempfile::TempDir, size: Option<u64>) -> CacheDir {
        CacheDir { path: folder.path().join("cache"), size }
    }

    #[test]
    fn what_is_stable_is_there_for_the_next_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = dir(&folder, None);
        let size = 10 * CHUNK + 5;
        let open = |identity: &str| Cache::open(&dir, identity, size).expect("a cache");
        let chunk = vec![7; CHUNK as usize];
        let first = open("a");
        assert!(!first.has(3) && first.store(3, &chunk) && first.has(3));
        assert!(first.store(10, &[9; 5]));
        // Another process sees what is stable.
        let second = open("a");
        assert!(!second.has(3) && !second.look_again(3));
        first.settle();
        assert!(second.look_again(3) && second.has_all(3..4) && !second.has_all(3..5));
        assert_eq!(second.read(3, chunk.len()).expect("read"), chunk);
        assert_eq!(second.read(10, 5).expect("read"), [9; 5]);
        // Killed before it was stable.
        assert!(second.store(4, &chunk));
        std::mem::forget(second);
        let third = open("a");
        assert!(third.has(3) && third.has(10) && !third.has(4));
        assert!(!open("b").has(3), "another object");
        assert!(!Cache::open(&dir, "a", size + 1).expect("a cache").has(3), "another size");
    }

    /// The kernel tells of a loss once, and not of what.
    #[test]
    fn what_was_written_before_a_sync_that_failed_is_not_taken_for_stable() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = dir(&folder, None);
        let cache = Cache::open(&dir, "a", 10 * CHUNK).expect("a cache");
        let chunk = vec![7; CHUNK as usize];
        assert!(cache.store(1, &chunk));
        cache.settle_by(|| Ok(()));
        assert!(cache.store(2, &chunk));
        cache.settle_by(|| {
            assert!(cache.settling.try_lock().is_err(), "nobody syncs meanwhile");
            assert!(cache.store(3, &chunk));
            Err(io::ErrorKind::StorageFull.into())
        });
        assert!(cache.has(1) && !cache.has(2) && !cache.has(3));
        assert!(!cache.store(2, &chunk) && !cache.has(2), "it is given up");
        assert!(cache.given_up().is_some_and(|why| why.contains("cannot make stable")));
        let again = Cache::open(&dir, "a", 10 * CHUNK).expect("a cache");
        assert!(again.store(2, &chunk));
        again.settle_by(|| Ok(()));
        let next = Cache::open(&dir, "a", 10 * CHUNK).expect("a cache");
        assert_eq!([1, 2, 3].map(|number| next.has(number)), [true, true, false]);
    }

    #[test]
    fn whole_objects_that_nobody_uses_make_room() {
        let folder = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let dir = dir(&folder, Some(16 * CHUNK));
        let chunk = vec![7; CHUNK as usize];
        let open = |identity: &str| Cache::open(&dir, identity, 64 * CHUNK).expect("a cache");
        let (old, used) = (open("old"), open("used"));
        (0..6).for_each(|number| assert!(old.store(number, &chunk)));
        (0..4).for_each(|number| assert!(used.store(number, &chunk)));
        drop(old);
        let new = open("new");
        (0..8).for_each(|number| assert!(new.store(number, &chunk), "{number}"));
        assert!(!open("old").has(0), "it had to go");
        assert!(open("used").has(0) || used.has(0), "it is in use");
        // All that is left is in use.
        let stored = (8..64).filter(|number| new.store(*number, &chunk)).count();
        assert!((1..8).contains(&stored), "{stored}");
        assert!(new.has(0) && used.has(3));
    }

    #[test]
    fn a_map_counts_for_nothing_where_the_data_is_not_as_long() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = dir(&folder, None);
        let open = || Cache::open(&dir, "a", 4 * CHUNK).expect("a cache");
        let first = open();
        assert!(first.store(1, &vec![7; CHUNK as usize]));
        drop(first);
        assert!(open().has(1));
        let own = fs::read_dir(&dir.path).expect("listed").next().expect("one").expect("read");
        let data = File::options().write(true).open(own.path().join("data")).expect("the data");
        data.set_len(CHUNK).expect("cut");
        let again = open();
        assert!(!again.has(1) && !again.look_again(1));
        let anew = fs::metadata(own.path().join("data")).expect("facts");
        assert_eq!(anew.len(), 4 * CHUNK);
    }

    #[test]
    fn a_file_that_was_cut_is_not_made_whole_for_who_has_it_open() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = dir(&folder, None);
        let open = || Cache::open(&dir, "a", 4 * CHUNK).expect("a cache");
        let cut = || {
            let own = fs::read_dir(&dir.path).expect("listed").next().expect("one").expect("read");
            let data = File::options().write(true).open(own.path().join("data"));
            data.and_then(|data| data.set_len(0)).expect("cut");
        };
        let chunk = vec![7; CHUNK as usize];
        // By a chunk that comes to its end.
        let first = open();
        assert!(first.store(1, &chunk));
        cut();
        assert!(!first.store(3, &chunk) && !first.is_whole() && !first.has(1));
        drop(first);
        // By another process that opens it.
        let second = open();
        assert!(second.store(1, &chunk));
        second.settle();
        cut();
        let third = open();
        assert!(third.store(3, &chunk) && third.is_whole() && !third.has(1));
        third.settle();
        assert!(!second.is_whole() && !second.has(1) && !second.look_again(3));
        drop(second);
        assert!(open().has(3), "what is stable since counts");
    }

    #[test]
    fn a_folder_that_others_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let dir = dir(&folder, None);
        fs::create_dir(&dir.path).expect("made");
        fs::set_permissions(&dir.path, fs::Permissions::from_mode(0o777)).expect("changed");
        let why = Cache::open(&dir, "a", 1).err().expect("refused");
        let others = |why: &str| why.contains("others may write");
        assert!(matches!(&why, Unusable::Refused(why) if others(why)), "{why:?}");
    }

    /// A failing disk may read well what is written anew.
    #[test]
    fn what_cannot_be_read_is_brought_again_by_the_next_server() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = dir(&folder, None);
        let open = || Cache::open(&dir, "a", 4 * CHUNK).expect("a cache");
        let (first, chunk) = (open(), vec![7; CHUNK as usize]);
        (0..3).for_each(|number| assert!(first.store(number, &chunk)));
        first.settle();
        first.lose(1..2, libc::EIO);
        assert!(first.has(0) && !first.has(1) && !first.look_again(1) && first.has(2));
        assert!(!first.store(1, &chunk) && first.is_full());
        drop(first);
        let next = open();
        assert!(next.has(0) && !next.has(1) && next.has(2));
        assert!(next.store(1, &chunk) && next.given_up().is_none());
    }
}
