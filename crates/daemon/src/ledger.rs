//! The ledger: jobs that there are, written down. The server that comes after one that was killed, or after a power cut,
//! goes on with them, or says that they are gone.
//!
//! A line is a file of its own. It is stable before its job begins to copy, and gone when the job has ended, however that
//! was. So what a server finds of its own disks when it starts is of jobs that never ended.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ringtap_image::record;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The end of a line's name, and of one that is being written.
const LINE: &str = "job";
const UNFINISHED: &str = "unfinished";
/// What begins a job that is written down.
const JOBS: [&str; 4] = ["block-commit", "block-stream", "blockdev-mirror", "blockdev-backup"];
/// Those that a server goes on with which finds them.
const GOES_ON: [&str; 2] = ["block-commit", "block-stream"];
/// What says what becomes of a job that meets an error; it fails where none does.
const ON_ERROR: [&str; 3] = ["on-error", "on-source-error", "on-target-error"];
/// What names a bitmap that goes where a backup fails.
pub(crate) const CHECKPOINT: &str = "__ringtap_checkpoint";
/// What says that a mirror leaves the disk where it is.
pub(crate) const COPY: &str = "__ringtap_copy";
/// No line is longer.
const LONGEST: u64 = 1 << 20;
/// A line that has been written for so long never will be.
const GIVEN_UP: Duration = Duration::from_secs(3600);
/// A line that nobody has come for in so long is of a disk that is no more.
const FORGOTTEN: Duration = Duration::from_secs(30 * 24 * 3600);

/// What is written of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Line {
    /// The image that the disk lies in, and others that the job changes: each with what it is, for its name may be
    /// another's by then.
    pub(crate) files: Vec<(PathBuf, Option<String>)>,
    pub(crate) id: String,
    /// What begins the job anew.
    pub(crate) command: String,
    pub(crate) arguments: Map<String, Value>,
    /// The image that was to become a copy, where it is another disk's.
    pub(crate) target: Option<PathBuf>,
}

/// A line that stands. It is removed when it drops.
#[derive(Debug)]
pub(crate) struct Written(PathBuf);

impl Drop for Written {
    fn drop(&mut self) {
        // Else the next server would begin it again after a power cut.
        if let Err(error) = record::remove_stably(&self.0) {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// The line of a job that there is: stable from before it begins until it has ended. Clones are the same job's.
#[derive(Clone, Default)]
pub(crate) struct Entered {
    book: Arc<Mutex<Option<Book>>>,
    /// The rate that was set last. Apart, for the other is held while a disk is waited for.
    speed: Arc<AtomicU64>,
    before: Arc<Mutex<Before>>,
    /// Whether the next server goes on with it where it ends without its work.
    passed_on: Arc<AtomicBool>,
}

/// The line that a killed server wrote of the job, which stands until there is another.
#[derive(Default)]
enum Before {
    #[default]
    Unknown,
    Stands(#[allow(dead_code, reason = "it is removed when it drops")] Written),
    Needless,
}

/// What is to be written, and the file, once it is.
struct Book {
    line: Line,
    written: Option<Written>,
}

impl Book {
    /// Have a file that says this; stable when this returns.
    fn write(&mut self) -> io::Result<()> {
        match &self.written {
            Some(written) => self.line.put(&written.0),
            None => {
                self.written = Some(self.line.write()?);
                Ok(())
            }
        }
    }
}

impl Entered {
    /// What is to be written of it, if anything is.
    pub(crate) fn new(line: Option<Line>) -> Entered {
        Entered::of(line.map(|line| Book { line, written: None }))
    }

    fn of(book: Option<Book>) -> Entered {
        let (speed, before, passed_on) = Default::default();
        Entered { book: Arc::new(Mutex::new(book)), speed, before, passed_on }
    }

    fn lock_before(&self) -> MutexGuard<'_, Before> {
        self.before.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It goes on with a job of a server before this one, of which this was written.
    pub(crate) fn follows(&self, written: Written) {
        let mut before = self.lock_before();
        if !matches!(*before, Before::Needless) {
            *before = Before::Stands(written);
        }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Option<Book>) -> T) -> T {
        work(&mut self.book.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The job begins; its line is stable when this returns.
    pub(crate) fn begin(&self) -> io::Result<()> {
        self.with(|entered| {
            // It is there where its rate was set before.
            let unwritten = entered.as_mut().filter(|book| book.written.is_none());
            unwritten.map_or(Ok(()), Book::write)
        })?;
        *self.lock_before() = Before::Needless;
        Ok(())
    }

    /// It is at most so fast from now on, in bytes a second; nothing is written yet.
    pub(crate) fn has_speed(&self, bytes: u64) {
        self.speed.store(bytes, Relaxed);
    }

    /// The next server goes on with it as fast as was said last; stable when this returns.
    pub(crate) fn keep_speed(&self) -> io::Result<()> {
        self.with(|entered| {
            let Some(book) = entered else { return Ok(()) };
            let speed = self.speed.load(Relaxed);
            book.line.arguments.insert("speed".to_owned(), speed.into());
            book.write()
        })
    }

    /// Whether the next server would go on with it: it stands written, and what it does is found where it is left.
    pub(crate) fn can_be_passed_on(&self) -> bool {
        self.with(|entered| {
            let book = entered.as_ref().filter(|book| book.written.is_some());
            book.is_some_and(|book| match &book.line.target {
                None => GOES_ON.contains(&&*book.line.command),
                Some(_) => book.line.is_left(),
            })
        })
    }

    /// Whether its errors are met otherwise than by its end.
    pub(crate) fn meets_errors(&self) -> bool {
        self.with(|entered| entered.as_ref().is_some_and(|book| book.line.meets_errors()))
    }

    /// Whether something goes with it where it fails.
    pub(crate) fn has_checkpoint(&self) -> bool {
        let has = |book: &Book| book.line.arguments.contains_key(CHECKPOINT);
        self.with(|entered| entered.as_ref().is_some_and(has))
    }

    /// It is to be the next server's, or, where that is not to be after all, this one's.
    pub(crate) fn pass_on(&self, wanted: bool) {
        self.passed_on.store(wanted, Relaxed);
    }

    pub(crate) fn is_passed_on(&self) -> bool {
        self.passed_on.load(Relaxed)
    }

    /// The job has ended; whether with its work done.
    pub(crate) fn end(&self, done: bool) {
        let book = self.with(Option::take);
        if self.is_passed_on() && !done {
            // What is written stays.
            return std::mem::forget(book.and_then(|book| book.written));
        }
        *self.lock_before() = Before::Needless;
    }
}

fn folder() -> io::Result<PathBuf> {
    record::state_folder("jobs")
}

impl Line {
    /// Write it down; stable when this returns.
    fn write(&mut self) -> io::Result<Written> {
        self.write_in(&folder()?)
    }

    fn write_in(&mut self, folder: &Path) -> io::Result<Written> {
        for (path, what) in &mut self.files {
            *what = record::identity(path);
            if what.is_none() {
                let why =
                    format!("nothing tells {} from the next file of its name", path.display());
                return Err(io::Error::new(io::ErrorKind::Unsupported, why));
            }
        }
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (own, next) = (std::process::id(), NEXT.fetch_add(1, Relaxed));
        let path = folder.join(format!("{:x}-{own}-{next}.{LINE}", now.as_nanos()));
        self.put(&path)?;
        Ok(Written(path))
    }

    /// Have the file at `path` say this; a kill leaves what it said before, or this.
    fn put(&self, path: &Path) -> io::Result<()> {
        let unfinished = path.with_extension(UNFINISHED);
        let mut file = File::create(&unfinished)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_all()?;
        fs::rename(&unfinished, path)?;
        record::sync_folder_of(path)
    }

    /// The image that the disk lies in.
    pub(crate) fn image(&self) -> Option<&Path> {
        self.files.first().map(|(path, _)| &**path)
    }

    /// Whether a server goes on with it that is told what is left of it.
    fn is_left(&self) -> bool {
        matches!(&*self.command, "blockdev-mirror" | "blockdev-backup")
    }

    /// Whether programs before version 6 of a server's state do not know what it was told.
    fn meets_errors(&self) -> bool {
        let word = |key: &&str| self.arguments.get(*key).and_then(Value::as_str);
        let has_scratch = self.command == "blockdev-backup"
            && self.arguments.keys().any(|key| key.starts_with("__ringtap_scratch"));
        let copies = self.arguments.contains_key(COPY);
        has_scratch || copies || ON_ERROR.iter().filter_map(word).any(|word| word != "report")
    }

    /// Whether all that the job changes is what it was when it began.
    pub(crate) fn is_of_these_files(&self) -> bool {
        self.files.iter().all(|(path, what)| what.is_some() && record::identity(path) == *what)
    }

    /// Whether its job has done its work, and the disk goes on elsewhere. An image that is not there may come yet.
    fn is_over(&self) -> bool {
        self.image().is_none_or(|image| record::successor(image).is_some())
    }
}

/// The bitmap that is to go with a backup that does not end well.
pub(crate) fn checkpoint(command: &str, arguments: &Map<String, Value>) -> Option<String> {
    let name = arguments.get(CHECKPOINT).filter(|_| command == "blockdev-backup")?;
    name.as_str().map(str::to_owned)
}

/// The lines of jobs on disks that lie in these images, which nobody else serves.
pub(crate) fn left(images: &[PathBuf]) -> Vec<(Line, Written)> {
    // Where there is no folder nothing was written.
    folder().map(|folder| left_in(&folder, images)).unwrap_or_default()
}

/// A line as it was written; none where these bytes are none, or what they name begins no job.
pub(crate) fn parse(text: &[u8]) -> Option<Line> {
    let line: Line = serde_json::from_slice(text).ok()?;
    JOBS.contains(&&*line.command).then_some(line)
}

fn read(path: &Path) -> Option<Line> {
    let mut text = vec![];
    let file = File::open(path).ok()?;
    file.take(LONGEST).read_to_end(&mut text).ok()?;
    parse(&text)
}

fn left_in(folder: &Path, images: &[PathBuf]) -> Vec<(Line, Written)> {
    let mut left = vec![];
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let ending = path.extension().and_then(|ending| ending.to_str());
        let written = entry.metadata().and_then(|facts| facts.modified()).ok();
        let age = written.and_then(|at| at.elapsed().ok()).unwrap_or_default();
        if ending == Some(UNFINISHED) && age > GIVEN_UP {
            let _ = fs::remove_file(&path);
        }
        if ending != Some(LINE) {
            continue;
        }
        let Some(line) = read(&path) else { continue };
        if line.image().is_some_and(|image| images.iter().any(|own| own == image)) {
            left.push((line, Written(path)));
        } else if line.is_over() || age > FORGOTTEN {
            drop(Written(path));
        }
    }
    left.sort_by(|(_, one), (_, other)| one.0.cmp(&other.0));
    left
}

/// A path that means the same everywhere.
pub(crate) fn whole(path: &Path) -> PathBuf {
    if ringtap_stores::is_store(path) {
        return path.to_owned();
    }
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(image: &Path, id: &str) -> Line {
        let arguments = Map::from_iter([("device".to_owned(), Value::from("vm"))]);
        let (files, id) = (vec![(image.to_owned(), None)], id.to_owned());
        Line { files, id, command: "block-commit".to_owned(), arguments, target: None }
    }

    #[test]
    fn lines_stand_until_their_job_has_ended_and_are_found_by_their_image() {
        let dir = tempfile::tempdir().expect("a folder");
        let [own, other] = ["own", "other"].map(|name| dir.path().join(name));
        File::create(&own).and_then(|_| File::create(&other)).expect("images");
        let jobs = dir.path().join("jobs");
        fs::create_dir(&jobs).expect("a folder");
        let ended = line(&own, "ended").write_in(&jobs).expect("it is written");
        drop(ended);
        for (image, id) in [(&own, "first"), (&other, "others"), (&own, "second")] {
            // A killed server drops nothing.
            std::mem::forget(line(image, id).write_in(&jobs).expect("it is written"));
        }
        fs::write(jobs.join("torn.job"), "{").expect("another file");
        // A rate that has changed is what the next server finds.
        let mut line = line(&own, "third");
        let written = Some(line.write_in(&jobs).expect("it is written"));
        let entered = Entered::of(Some(Book { line, written }));
        [7, 5].into_iter().for_each(|speed| entered.has_speed(speed));
        entered.keep_speed().expect("it is written again");
        // That of the server before stands until this one's does.
        let before = self::line(&own, "before").write_in(&jobs).expect("it is written");
        let path = before.0.clone();
        entered.follows(before);
        assert!(path.exists());
        entered.begin().expect("it stays as it is");
        assert!(!path.exists());
        let late = self::line(&own, "late").write_in(&jobs).expect("it is written");
        entered.follows(late);
        let found = left_in(&jobs, std::slice::from_ref(&own));
        let speeds: Vec<_> = found.iter().map(|(line, _)| line.arguments.get("speed")).collect();
        assert_eq!(speeds, [None, None, Some(&Value::from(5))]);
        entered.end(true);
        assert!(!found[2].1.0.exists());
        std::mem::forget(found);
        let found = left_in(&jobs, std::slice::from_ref(&own));
        let ids: Vec<&str> = found.iter().map(|(line, _)| &*line.id).collect();
        assert_eq!(ids, ["first", "second"]);
        assert!(found.iter().all(|(line, _)| line.is_of_these_files()));
        // Another file by that name.
        fs::rename(&other, &own).expect("it takes its place");
        assert!(!found.iter().any(|(line, _)| line.is_of_these_files()));
        drop(found);
        assert!(left_in(&jobs, &[own]).is_empty());
        // Its image may come back.
        assert!(left_in(&jobs, &[]).is_empty());
        let found = left_in(&jobs, &[other]);
        assert_eq!(found.len(), 1);
        assert!(!found[0].0.is_of_these_files());
    }
}
