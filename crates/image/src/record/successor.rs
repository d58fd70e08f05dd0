//! Where a disk goes on that was served from an image: since a snapshot in an overlay on it, since a commit in what lay
//! below, since a mirror in another image. Who serves the image by its old name must not write to it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::folder::{remove_stably, sync_folder_of};
use super::goes_on::Successor;
use super::kept::{Kept, forget_coming};
use super::known::Known;
use super::named::{also_kept, remove_attribute, set_attribute};
use super::transaction::{Part, Transaction};
use super::{attribute, identity};
use crate::{OpenError, OpenOptions, Place};

/// An attribute that only root sees and writes.
const SUCCESSOR: &str = "trusted.ringtap.successor";

/// The most images after one another that are looked at for who was written last.
const MOST: usize = 200;

fn of(image: &Path) -> Option<Successor> {
    written_down(image).filter(|successor| successor.holds() && successor.is_of(image))
}

/// Whether it holds or not, and is of this file or not.
fn written_down(image: &Path) -> Option<Successor> {
    match attribute(image, SUCCESSOR) {
        Some(text) => serde_json::from_str(&text).ok(),
        None => Kept::of(image)?.successor,
    }
}

fn time_of(image: &Path) -> Option<(i64, i64)> {
    let facts = fs::metadata(image).ok().filter(|facts| facts.is_file())?;
    Some((facts.mtime(), facts.mtime_nsec()))
}

fn set(image: &Path, successor: Option<Successor>) -> io::Result<()> {
    let successor = successor.map(|successor| Successor { of: identity(image), ..successor });
    let set = match &successor {
        None => remove_attribute(image, SUCCESSOR),
        Some(successor) => set_attribute(image, SUCCESSOR, successor)?,
    };
    let needless = set || successor.is_none();
    also_kept(set, Kept::change(image, needless, |kept| kept.successor = successor))?;
    // With the attribute, the time of the last write.
    fs::File::open(image)?.sync_all()
}

/// Whoever wants to write to the disk of `image` finds it in `successor` from now on: stable when this returns.
pub fn set_successor(image: &Path, successor: &Path) -> io::Result<()> {
    set_one(image, successor, None, false)
}

/// The same once all of a transaction is written down, as its part with that number. `made`: the successor goes where it is
/// not to be.
pub fn set_successor_in(
    image: &Path,
    successor: &Path,
    (transaction, number): (&Transaction, usize),
    made: bool,
) -> io::Result<()> {
    set_one(image, successor, Some((transaction, transaction.part(number))), made)
}

fn set_one(
    image: &Path,
    successor: &Path,
    part: Option<(&Transaction, Part)>,
    made: bool,
) -> io::Result<()> {
    let file = known(successor)?;
    // A name that a power cut takes would leave the disk nowhere to be found.
    name_is_stable(successor)?;
    let mut turn = 0;
    let mut at = successor.to_owned();
    for _ in 0..MOST {
        let Some(next) = of(&at) else { break };
        turn = turn.max(next.turn + 1);
        at = next.file.path().to_owned();
    }
    let made_at = made.then(|| time_of(successor)).flatten();
    let begun =
        |(transaction, part): (&Transaction, Part)| transaction.writes_down(&part).map(|()| part);
    let part = part.map(begun).transpose()?;
    let at_least = time_of(image);
    set(image, Some(Successor { file, written: None, at_least, turn, part, made_at, of: None }))
}

/// Where this process may not look at the folder it has made nothing there, either.
fn name_is_stable(image: &Path) -> io::Result<()> {
    if ringtap_stores::is_store(image) {
        return Ok(());
    }
    let path = fs::canonicalize(image)?;
    if !path.metadata()?.is_file() {
        return Ok(());
    }
    fs::File::open(&path)?.sync_all()?;
    match sync_folder_of(&path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        end => end,
    }
}

/// A server was killed before all of a transaction was written down: what of it concerns this image is taken back, and the
/// file that was made for it goes, unless it has been written to since. Whether there was anything. Nobody else has the image.
pub fn take_back_unfinished(image: &Path) -> io::Result<bool> {
    let Some(successor) = written_down(image) else { return Ok(false) };
    let is_own = successor.is_of(image);
    let Some(part) = successor.part.filter(|part| !part.holds()) else { return Ok(false) };
    if !is_own {
        // What was made was made for the image that this is a copy of.
        return set(image, None).map(|()| false);
    }
    // First: where it cannot be removed, the next server finds it by the record.
    if let Some(time) = successor.made_at {
        remove_made(&successor.file, time)?;
    }
    set(image, None)?;
    part.is_gone();
    Ok(true)
}

/// Remove a file that was made for a successor, and had been written to last at that time.
fn remove_made(file: &Known, time: (i64, i64)) -> io::Result<()> {
    let path = file.path();
    let Some(made) = Place::hold(path).ok().filter(|made| file.is(made)) else { return Ok(()) };
    if time_of(&made.at()) != Some(time) {
        tracing::warn!(
            "{} was made for a snapshot that was not written down as a whole, and has been written to since: it stays",
            path.display()
        );
        return Ok(());
    }
    forget_coming(path);
    remove_stably(path)
}

/// Whether what is written down of an image is a part of that transaction.
pub fn is_part_of(image: &Path, transaction: &Transaction) -> bool {
    let part = written_down(image).and_then(|successor| successor.part);
    part.is_some_and(|part| part.is_of(transaction))
}

/// Of images that lead to one another that of the one that was written last is the highest.
pub fn turn(image: &Path) -> Option<u64> {
    of(image).map(|successor| successor.turn)
}

fn known(successor: &Path) -> io::Result<Known> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "there is no such image");
    Known::of(successor).ok_or_else(none)
}

/// The disk of an image goes on in another than is written down: stable when this returns. Whether it is sealed stays as it is.
pub fn lead_on(image: &Path, successor: &Path) -> io::Result<()> {
    let before = of(image);
    let [written, at_least] = [|it: &Successor| it.written, |it: &Successor| it.at_least]
        .map(|time| before.as_ref().and_then(time));
    let (part, made_at, turn) = (None, None, before.map_or(0, |before| before.turn));
    let file = known(successor)?;
    set(image, Some(Successor { file, written, at_least, turn, part, made_at, of: None }))
}

/// It is about to be written to by who knows, which is no sign that somebody put it back. Whether its disk goes on elsewhere.
pub fn unseal(image: &Path) -> io::Result<bool> {
    match successor(image) {
        Some(next) => set_successor(image, &next).map(|()| true),
        None => Ok(false),
    }
}

/// An image with a successor is closed and written to no more: one that is put in its place, or written to, is told
/// from it.
pub fn seal(image: &Path) -> io::Result<()> {
    match of(image) {
        Some(successor) => {
            let (written, part) = (time_of(image), None);
            set(image, Some(Successor { written, part, ..successor }))
        }
        None => Ok(()),
    }
}

/// Whether the image has a successor, and may have been written to shortly before without that being stable.
pub fn is_unsealed(image: &Path) -> bool {
    of(image).is_some_and(|successor| successor.written.is_none())
}

/// The image's disk goes on in itself: it may be written to.
pub fn forget_successor(image: &Path) -> io::Result<()> {
    if written_down(image).is_some() { set(image, None) } else { Ok(()) }
}

/// Where the disk of the image at `place` goes on, held; none where that is this image. [`OpenError::Succeeded`] where it
/// cannot be found, because the other is gone or the image has changed.
pub fn find_successor(place: &Place) -> Result<Option<Place>, OpenError> {
    let at = place.at();
    let Some(successor) = written_down(&at).filter(Successor::holds) else { return Ok(None) };
    let refused = |why| refusal(place.path(), &successor, why);
    if !successor.is_of(&at) {
        return Err(refused(
            "and this is a copy of the image that it left; if the other was copied with it, name that copy",
        ));
    }
    let now = time_of(&at);
    let changed = now.is_some() && successor.written.is_some_and(|time| now != Some(time));
    if changed || now.is_some_and(|now| successor.at_least.is_some_and(|least| now < least)) {
        return Err(refused("but this one has been written to, or put back, since"));
    }
    let found = Place::hold(successor.file.path()).ok();
    match found.filter(|found| successor.file.is(found)) {
        Some(found) => Ok(Some(found)),
        None => Err(refused("which is not there any more")),
    }
}

/// An error where the disk of the image behind `at`, which is called `name`, goes on in another; else whether nothing at all is
/// written down of that.
pub(crate) fn may_go_on(at: &Path, name: &Path, options: &OpenOptions) -> Result<bool, OpenError> {
    let written = written_down(at);
    match written.as_ref().filter(|successor| successor.holds()).filter(|_| !options.succeeded) {
        Some(successor) => Err(refusal(name, successor, "and writing to this one would harm that")),
        None => Ok(written.is_none()),
    }
}

fn refusal(image: &Path, successor: &Successor, why: &'static str) -> OpenError {
    let (path, successor) = (image.to_owned(), successor.file.path().to_owned());
    OpenError::Succeeded { path, successor, why }
}

/// Where the record says that the image's disk goes on; for people.
pub fn successor(image: &Path) -> Option<PathBuf> {
    of(image).map(|successor| successor.file.path().to_owned())
}

/// The same also of a copy of an image whose disk goes on elsewhere.
pub fn successor_of_this_or_original(image: &Path) -> Option<PathBuf> {
    let written = written_down(image).filter(Successor::holds);
    written.map(|successor| successor.file.path().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_goes_on_in_one_image() {
        let dir = tempfile::tempdir().expect("a folder");
        let (base, top) = (dir.path().join("base"), dir.path().join("top"));
        fs::write(&base, "base").expect("written");
        fs::write(&top, "top").expect("written");
        if set_successor(&base, &top).is_err() {
            eprintln!("skipped: there is nowhere to record an image");
            return;
        }
        let find = || find_successor(&Place::hold(&base).expect("there"));
        let found = |end: Result<Option<Place>, OpenError>| end.expect("no error").is_some();
        let options = OpenOptions::default();
        assert!(found(find()));
        // An older one is another before it is sealed, too.
        let time = fs::metadata(&base).and_then(|facts| facts.modified()).expect("its time");
        let set_time = |time| fs::File::open(&base).and_then(|file| file.set_modified(time));
        set_time(time - std::time::Duration::from_secs(1)).expect("set");
        let error = find().expect_err("put back").to_string();
        assert!(error.contains("put back"), "{error}");
        set_time(time).expect("set");
        assert!(may_go_on(&top, &top, &options).expect("it goes on"), "nothing is written down");
        let error = may_go_on(&base, &base, &options).expect_err("written elsewhere").to_string();
        assert!(error.contains("top") && error.contains("--forget-successor"), "{error}");
        seal(&base).expect("sealed");
        assert!(found(find()));
        // Another file of the name is another disk.
        fs::rename(&top, dir.path().join("aside")).expect("moved");
        assert!(find().is_err());
        fs::write(&top, "another").expect("written");
        assert!(find().is_err());
        fs::rename(dir.path().join("aside"), &top).expect("moved");
        assert!(found(find()));
        // Led elsewhere it stays sealed.
        let other = dir.path().join("other");
        fs::write(&other, "other").expect("written");
        lead_on(&base, &other).expect("led");
        assert!(!is_unsealed(&base));
        assert_eq!(successor(&base), fs::canonicalize(&other).ok());
        lead_on(&base, &top).expect("led");
        // A file system stamps files by the kernel's tick.
        std::thread::sleep(std::time::Duration::from_millis(25));
        fs::write(&base, "put back").expect("written");
        let error = find().expect_err("changed").to_string();
        assert!(error.contains("put back"), "{error}");
        forget_successor(&base).expect("forgotten");
        assert!(!found(find()));
        may_go_on(&base, &base, &options).expect("its own disk again");
    }

    fn copied(from: &Path, to: &Path) {
        let end = std::process::Command::new("cp").arg("-a").args([from, to]).status();
        assert!(end.expect("cp").success());
    }

    #[test]
    fn the_disk_of_a_copy_goes_on_nowhere_else() {
        let dir = tempfile::tempdir().expect("a folder");
        let [base, top, copy] = ["base", "top", "copy"].map(|name| dir.path().join(name));
        fs::write(&base, "base").expect("written");
        fs::write(&top, "top").expect("written");
        if set_successor(&base, &top).is_err() || attribute(&base, SUCCESSOR).is_none() {
            eprintln!("skipped: no attribute holds a record here");
            return;
        }
        for sealed in [false, true] {
            if sealed {
                seal(&base).expect("sealed");
            }
            copied(&base, &copy);
            let find = |path: &Path| find_successor(&Place::hold(path).expect("there"));
            let error = find(&copy).expect_err("a copy").to_string();
            assert!(error.contains("is a copy") && error.contains("--forget-successor"), "{error}");
            assert!(find(&base).expect("itself").is_some());
            may_go_on(&copy, &copy, &OpenOptions::default()).expect_err("a copy");
            assert_eq!((successor(&copy), is_unsealed(&copy)), (None, false));
            // Nothing makes the record its own.
            seal(&copy).expect("nothing to seal");
            assert!(!unseal(&copy).expect("nothing to unseal"));
            find(&copy).expect_err("a copy");
            forget_successor(&copy).expect("forgotten");
            assert!(find(&copy).expect("its own disk").is_none());
            fs::remove_file(&copy).expect("removed");
        }
        // Wherever it is called from now on, it is that file.
        fs::rename(&base, &copy).expect("moved");
        assert_eq!(successor(&copy), fs::canonicalize(&top).ok());
    }

    #[test]
    fn a_copy_takes_back_nothing_of_its_original() {
        let dir = tempfile::tempdir().expect("a folder");
        let [base, top, copy] = ["base", "top", "copy"].map(|name| dir.path().join(name));
        fs::write(&base, "base").expect("written");
        fs::write(&top, "").expect("written");
        let Ok(transaction) = Transaction::begin(&[base.as_path()]) else {
            eprintln!("skipped: there is nowhere to record an image");
            return;
        };
        let set = set_successor_in(&base, &top, (&transaction, 0), true);
        if set.is_err() || attribute(&base, SUCCESSOR).is_none() {
            eprintln!("skipped: no attribute holds a record here");
            transaction.call_off();
            return;
        }
        copied(&base, &copy);
        assert!(!take_back_unfinished(&copy).expect("nothing of its own"));
        assert!(top.exists() && written_down(&copy).is_none());
        assert!(take_back_unfinished(&base).expect("taken back"));
        assert!(!top.exists());
    }

    #[test]
    fn a_file_that_was_written_to_is_not_removed_with_its_record() {
        let dir = tempfile::tempdir().expect("a folder");
        let base = dir.path().join("base");
        fs::write(&base, "base").expect("written");
        for written in [false, true] {
            let top = dir.path().join(format!("top {written}"));
            fs::write(&top, "").expect("written");
            let Ok(transaction) = Transaction::begin(&[base.as_path()]) else {
                eprintln!("skipped: there is nowhere to record an image");
                return;
            };
            if set_successor_in(&base, &top, (&transaction, 0), true).is_err() {
                eprintln!("skipped: there is nowhere to record an image");
                transaction.call_off();
                return;
            }
            if written {
                // A file system stamps files by the kernel's tick.
                std::thread::sleep(std::time::Duration::from_millis(25));
                fs::write(&top, "a guest's").expect("written");
            }
            assert!(take_back_unfinished(&base).expect("taken back"));
            assert_eq!(top.exists(), written);
            assert!(written_down(&base).is_none());
            assert!(!take_back_unfinished(&base).expect("nothing is left"));
        }
    }

    #[test]
    fn an_older_record_is_read_and_removes_nothing() {
        let text = r#"{"file":{"path":"/top"},"turn":3,"made":true}"#;
        let successor: Successor = serde_json::from_str(text).expect("read");
        assert_eq!((successor.turn, successor.made_at), (3, None));
    }
}
