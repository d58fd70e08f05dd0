//! Restart logs of images that were deleted after their server had been killed: nobody will ask for them,
//! and each takes memory until the machine starts anew.
//!
//! A log is dropped only where it holds no changes, and its image is proven to be gone: one that was moved to another file
//! system is gone, too, and will ask for its changes. Of those that hold changes the rest of the memory is given back.
//!
//! That an image's path leads nowhere proves nothing: it may have been moved. So a log keeps what the file system itself calls the image ([`FileHandle`]),
//! and which file system that was; whoever opens another image there asks it. Where it cannot be asked
//! (not being root, on a file system without such names or without an identity of its own), logs stay.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ringtap_io::FileHandle;
use rustix::fd::AsFd;
use rustix::fs::{FlockOperation, Stat, flock, fstat};

use crate::file_name::file_system_of;
use crate::restart::{FIRST, LINK, MEMORY, give_back, name_in, note_spent, open_ours};

/// How long logs of one folder and one device are not looked at again by this process.
const SELDOM: Duration = Duration::from_secs(10);
/// When that was last done, by folder and device.
static LAST: Mutex<BTreeMap<(PathBuf, u64), Instant>> = Mutex::new(BTreeMap::new());

/// [`reap`], though not for each of many images that are opened one after another: it looks at all logs that there are.
pub(crate) fn reap_at_times(folder: &Path, image: impl AsFd) -> io::Result<usize> {
    let place = (folder.to_owned(), fstat(&image)?.st_dev);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if last.get(&place).is_some_and(|last| last.elapsed() < SELDOM) {
        return Ok(0);
    }
    last.insert(place, Instant::now());
    drop(last);
    reap(folder, image)
}

/// Drop what is in the folder of images that are gone and lay where `image` lies, but for changes; gives how many.
pub(crate) fn reap(folder: &Path, image: impl AsFd) -> io::Result<usize> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder)? {
        paths.push(entry?.path());
    }
    let is_link = |path: &&PathBuf| path.extension().is_some_and(|end| end == LINK);
    paths.iter().filter(is_link).for_each(|path| forget_if_last(path));
    let (facts, file_system) = (fstat(&image)?, file_system_of(&image)?);
    let own = Some((facts.st_dev, facts.st_ino, None));
    let mut gone = 0;
    for path in paths {
        let of = path.file_name().and_then(|name| parse(name.to_str()?));
        let there = of.is_some_and(|(dev, ..)| dev == facts.st_dev) && of != own;
        // One that cannot be looked at stays.
        if there && is_of_no_use(folder, &path, &image, &facts, file_system).unwrap_or(false) {
            let _ = fs::remove_file(path.with_extension(MEMORY));
            gone += usize::from(fs::remove_file(&path).is_ok());
        }
    }
    Ok(gone)
}

/// A log's name by its image's path goes after the log.
fn forget_if_last(link: &Path) {
    if fs::symlink_metadata(link).is_ok_and(|facts| facts.nlink() == 1) {
        let _ = fs::remove_file(link);
    }
}

/// The device and inode in a log's name, and the number of one that has made way.
fn parse(name: &str) -> Option<(u64, u64, Option<u64>)> {
    let mut parts =
        name.strip_suffix(".restart")?.splitn(3, '-').map(|part| u64::from_str_radix(part, 16));
    let (dev, ino) = (parts.next()?.ok()?, parts.next()?.ok()?);
    Some((dev, ino, parts.next().transpose().ok()?))
}

/// Whether no server has the log, its image is gone, and it holds no changes.
fn is_of_no_use(
    folder: &Path,
    path: &Path,
    image: impl AsFd,
    facts: &Stat,
    file_system: u64,
) -> io::Result<bool> {
    let log = open_ours(folder, path, false)?;
    flock(&log, FlockOperation::NonBlockingLockExclusive)?;
    let mut bytes = [0; FIRST * 8];
    log.read_exact_at(&mut bytes, 0)?;
    let word = |at: usize| crate::bytes::get(&bytes, 8 * at);
    let words: [u64; FIRST] = std::array::from_fn(|at| u64::from_ne_bytes(word(at)));
    let Some(name) = name_in(&words, facts.st_dev) else { return Ok(false) };
    if name[0] != file_system {
        return Ok(false);
    }
    let mut handle = [0; FileHandle::WORDS];
    handle.copy_from_slice(&name[1..]);
    let is_gone = FileHandle::from_words(handle).is_gone(image)?;
    let goes = is_gone && !give_back(&log, path, &words);
    if goes {
        note_spent(folder, &log);
    }
    Ok(goes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RestartLog;

    #[test]
    fn logs_of_deleted_images_go_and_no_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let logs = folder.path().join("logs");
        let path = |name: &str| folder.path().join(name);
        let make = |name: &str| {
            let image = fs::File::create(path(name)).expect("an image");
            let log = RestartLog::open(&logs, &image, 1000).expect("a log");
            log.start(1);
            if !["deleted", "served"].contains(&name) {
                assert!(log.append([1, 2, 3]));
            }
            log
        };
        let names = ["deleted", "moved", "kept", "served", "unknown"];
        let [deleted, moved, kept, served, mut unknown] = names.map(make);
        let lost = make("lost");
        assert!((0..999).all(|number| lost.append([number, 5, 6])));
        // Its file system cannot be asked.
        unknown.forget_name();
        drop([deleted, moved, kept, unknown]);
        let name = |of: &str| {
            let facts = fs::metadata(path(of)).expect("an image");
            logs.join(format!("{:x}-{:x}.restart", facts.dev(), facts.ino()))
        };
        let lost_log = name("lost");
        let whole = fs::metadata(&lost_log).expect("a log").blocks();
        let memory = lost.left();
        drop(lost);
        let other = fs::File::create(path("other")).expect("an image");
        fs::remove_file(path("deleted")).expect("deleted");
        let away_for_good = fs::File::open(path("lost")).expect("the image");
        fs::remove_file(path("lost")).expect("deleted");
        fs::remove_file(path("served")).expect("deleted");
        fs::remove_file(path("unknown")).expect("deleted");
        fs::rename(path("moved"), path("away")).expect("moved");
        let logs_left = || fs::read_dir(&logs).expect("the logs").flatten();
        let is_log = |entry: &fs::DirEntry| parse(entry.file_name().to_str()?).map(drop);
        let count = || logs_left().filter(|entry| is_log(entry).is_some()).count();
        assert_eq!(count(), 6);
        drop(away_for_good);
        let asked = FileHandle::of(&other).and_then(|handle| handle.is_gone(&other));
        let Ok(gone) = reap(&logs, &other).and_then(|gone| asked.map(|_| gone)) else {
            eprintln!("skipped: the file system cannot be asked");
            return assert_eq!(count(), 6);
        };
        assert_eq!((gone, count()), (1, 5));
        drop(served);
        assert_eq!((reap(&logs, &other).expect("looked at"), count()), (1, 4));
        // Of what a lost image left nothing is lost but the room beside it.
        let kept = fs::metadata(&lost_log).expect("it is kept").blocks();
        assert!(kept < whole, "{kept} of {whole}");
        let words = fs::read(&lost_log).expect("it");
        let word = |at: usize| u64::from_ne_bytes(crate::bytes::get(&words, 8 * at));
        for (number, record) in memory.expect("changes").records.into_iter().enumerate() {
            let at = FIRST + 4 * number;
            assert_eq!([1, 2, 3].map(|next| word(at + next)), record);
        }
        // What a moved image left is still found.
        let away = fs::File::open(path("away")).expect("the image");
        let left = RestartLog::open(&logs, &away, 1000).expect("a log").left();
        assert_eq!(left.map(|left| left.records), Some(vec![[1, 2, 3]]));
    }
}
