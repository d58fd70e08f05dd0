//! Changes of several images that are written down one by one, and hold all at one moment.
//!
//! A transaction is a file in the state folder: stable before the first of its parts is written, removed once the last is
//! stable. What is written down as a part does not hold as long as that file is there. So a kill or a power cut leaves all
//! parts or none, and whoever finds a part that does not hold takes it back.
//!
//! Before a part is written the file says, stable, that it may be. So where all that may have been written are taken back
//! the file goes: those that it does not say that of are written nowhere, and the server that would have is gone, for it
//! had the images of those that were taken back.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::folder::{made_folder, remove_stably, sync_folder_of};
use crate::number::new_number;

/// Digits of a transaction's name.
const DIGITS: usize = 32;
/// The end of its file's name.
const ENDING: &str = "transaction";
/// A part that is written down nowhere yet, one that may be, and one that was taken back.
const NOT_BEGUN: u8 = b'-';
const PENDING: u8 = b'.';
const GONE: u8 = b'x';

/// A transaction that has begun. Where it is neither decided nor called off its parts do not hold.
#[derive(Debug)]
pub struct Transaction {
    path: PathBuf,
    name: String,
    text: Mutex<Vec<u8>>,
}

/// One change of a transaction, as it is written down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    transaction: String,
    number: usize,
}

impl Transaction {
    /// Begin one with a part for each of these images. Nothing is written of it before the first part is about to be.
    ///
    /// # Errors
    /// Where there is no folder to write it down in.
    pub fn begin(images: &[&Path]) -> io::Result<Transaction> {
        let none = || io::Error::new(io::ErrorKind::NotFound, "there is no folder for records");
        let folder = made_folder().ok_or_else(none)?;
        let name = format!("{:016x}{:016x}", new_number(), new_number());
        // A byte for each part; then the images, for who looks.
        let mut text = vec![NOT_BEGUN; images.len()];
        for image in images {
            text.push(b'\n');
            text.extend(image.as_os_str().as_encoded_bytes());
        }
        text.push(b'\n');
        Ok(Transaction { path: file_of(&folder, &name), name, text: Mutex::new(text) })
    }

    /// The part is about to be written down: that it may be is stable when this returns.
    ///
    /// # Errors
    /// Where that cannot be written down: nor is the part to be.
    pub fn writes_down(&self, part: &Part) -> io::Result<()> {
        let mut text = self.text();
        let first = !may_be_written(&text);
        let end = text.iter().position(|byte| *byte == b'\n').unwrap_or(0);
        let Some(byte) = text.get_mut(part.number).filter(|_| part.number < end) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        *byte = PENDING;
        match first {
            // No part of it is written down yet.
            true => self.write(&text).inspect_err(|_| forget(&self.path)),
            false => {
                let mut options = fs::File::options();
                let file = options.write(true).custom_flags(libc::O_NOFOLLOW).open(&self.path)?;
                file.write_all_at(&[PENDING], part.number as u64)?;
                file.sync_data()
            }
        }
    }

    fn text(&self) -> MutexGuard<'_, Vec<u8>> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, text: &[u8]) -> io::Result<()> {
        let mut options = fs::File::options();
        options.write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let mut file = options.open(&self.path)?;
        file.write_all(text)?;
        file.sync_all()?;
        sync_folder_of(&self.path)
    }

    /// That of the image with that number.
    pub fn part(&self, number: usize) -> Part {
        Part { transaction: self.name.clone(), number }
    }

    /// All parts are stable: they hold from now on, stable when this returns.
    ///
    /// # Errors
    /// Where whether they do cannot be told: [`Transaction::recall`].
    pub fn decide(&self) -> io::Result<()> {
        remove_stably(&self.path)
    }

    /// Its parts do not hold, after all: nobody has relied on them yet. Each is to be taken back.
    ///
    /// # Errors
    /// Where that cannot be written down: after a kill some may hold.
    pub fn recall(&self) -> io::Result<()> {
        let text = self.text();
        if !may_be_written(&text) {
            return Ok(());
        }
        match self.write(&text) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            end => end,
        }
    }

    /// No part of it is written down anywhere any more.
    pub fn call_off(self) {
        forget(&self.path);
    }
}

impl Part {
    fn path(&self) -> Option<PathBuf> {
        let name = &self.transaction;
        let is_name = name.len() == DIGITS && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_name.then(made_folder).flatten().map(|folder| file_of(&folder, name))
    }

    pub(super) fn is_of(&self, transaction: &Transaction) -> bool {
        self.transaction == transaction.name
    }

    /// Whether it holds: all parts of its transaction were written down.
    pub fn holds(&self) -> bool {
        !self.path().is_some_and(|path| path.exists())
    }

    /// It was taken back, stably. The last one takes the transaction along.
    pub fn is_gone(&self) {
        let Some(path) = self.path() else { return };
        if take_back(&path, self.number).unwrap_or(false) {
            forget(&path);
        }
    }
}

/// A part is taken back, stably; whether it was the last one.
pub(super) fn take_back(path: &Path, number: usize) -> io::Result<bool> {
    let mut options = fs::File::options();
    let file = options.read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    let mut all = Vec::new();
    io::Read::read_to_end(&mut &file, &mut all)?;
    // One that a power cut tore tells of no part that it is gone.
    let Some(end) = all.iter().position(|byte| *byte == b'\n') else {
        return Ok(false);
    };
    if number < end {
        file.write_all_at(&[GONE], number as u64)?;
        // Others may be taken back at the same time.
        file.read_exact_at(&mut all[..end], 0)?;
    }
    Ok(all[..end].iter().all(|byte| [GONE, NOT_BEGUN].contains(byte)))
}

/// Whether any part may be written down.
fn may_be_written(text: &[u8]) -> bool {
    text.iter().take_while(|byte| **byte != b'\n').any(|byte| *byte == PENDING)
}

/// One that is left behind, as where a server was killed just before it wrote the part that it said it would, is looked at
/// by nobody.
fn forget(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::debug!("cannot remove {}: {error}", path.display());
    }
}

fn file_of(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.{ENDING}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server was killed before it came to the second part: that of the first is all there is to take back.
    #[test]
    fn the_file_goes_with_the_last_part_that_may_have_been_written_down() {
        let images = ["/one.img", "/two.img", "/three.img"].map(Path::new);
        let Ok(transaction) = Transaction::begin(&images) else {
            eprintln!("skipped: there is nowhere to record an image");
            return;
        };
        let (path, parts) = (transaction.path.clone(), [0, 1, 2].map(|at| transaction.part(at)));
        assert!(!path.exists(), "nothing may be written down yet");
        transaction.writes_down(&parts[1]).expect("written down");
        transaction.writes_down(&parts[0]).expect("written down");
        drop(transaction);
        parts[0].is_gone();
        assert!(path.exists() && !parts[1].holds(), "another may be written down");
        parts[1].is_gone();
        assert!(!path.exists(), "it is left behind");
    }

    /// One that an older server wrote says of every part that it may be written down.
    #[test]
    fn nothing_is_known_of_the_parts_of_an_older_server() {
        let Ok(transaction) = Transaction::begin(&["/one", "/two"].map(Path::new)) else {
            eprintln!("skipped: there is nowhere to record an image");
            return;
        };
        let parts = [0, 1].map(|at| transaction.part(at));
        fs::write(&transaction.path, "..\n/one\n/two\n").expect("written");
        parts[0].is_gone();
        assert!(!parts[1].holds());
        parts[1].is_gone();
        assert!(!transaction.path.exists());
    }

    #[test]
    fn parts_hold_once_all_are_written_down() {
        let images = ["/one.img", "/two.img"].map(Path::new);
        let Ok(transaction) = Transaction::begin(&images) else {
            eprintln!("skipped: there is nowhere to record an image");
            return;
        };
        let parts = [0, 1].map(|number| transaction.part(number));
        let hold = || parts.each_ref().map(Part::holds);
        transaction.recall().expect("nothing is written down");
        assert!(!transaction.path.exists());
        transaction.writes_down(&parts[0]).expect("written down");
        transaction.writes_down(&parts[1]).expect("written down");
        assert_eq!(hold(), [false, false]);
        transaction.decide().expect("decided");
        assert_eq!(hold(), [true, true]);
        transaction.recall().expect("recalled");
        transaction.recall().expect("it is already");
        assert_eq!(hold(), [false, false]);
        let path = transaction.path.clone();
        drop(transaction);
        parts[1].is_gone();
        parts[1].is_gone();
        assert!(path.exists() && !parts[0].holds());
        parts[0].is_gone();
        assert!(!path.exists());
        // Nothing is known of one that was torn.
        fs::write(&path, "").expect("written");
        parts[0].is_gone();
        assert!(path.exists() && !parts[0].holds());
        fs::remove_file(&path).expect("removed");
        // Nor is anything looked at outside of the folder.
        let other = Part { transaction: "../../etc/passwd".into(), number: 0 };
        assert!(other.holds());
        other.is_gone();
    }
}
