//! What of an upload has arrived: a line for each part, so that who was killed need not send it again.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::index::digest;

const FIRST: &str = "ringtap upload 1";

/// The notes of one image's upload to one place; none where they cannot be kept.
pub(crate) struct Journal {
    file: Option<(File, PathBuf)>,
    parts: usize,
}

impl Journal {
    /// In that folder, of the image of that index at that place.
    pub(crate) fn open(folder: Option<&Path>, place: &str, index: &[u8; 32]) -> Journal {
        let Some(folder) = folder else { return Journal { file: None, parts: 0 } };
        let name = hex::encode(digest(format!("{place}\n{}", hex::encode(index)).as_bytes()));
        let path = folder.join(format!("{}.upload", &name[..32]));
        let file = match open(&path) {
            Ok(file) => Some((file, path)),
            Err(error) => {
                tracing::warn!(
                    "{}: {error}: if this is broken off, all is sent again",
                    path.display()
                );
                None
            }
        };
        Journal { file, parts: 0 }
    }

    /// The upload that was begun in parts of that size, and what has arrived of it.
    pub(crate) fn begun(&mut self, part: u64) -> Option<(String, BTreeMap<usize, String>)> {
        let (_, path) = self.file.as_ref()?;
        let text = fs::read_to_string(path).ok()?;
        // The last line may have been cut off.
        let whole = text.rfind('\n')? + 1;
        let (text, cut) = text.split_at(whole);
        if !cut.is_empty() {
            self.file.as_ref()?.0.set_len(whole as u64).ok()?;
        }
        let mut lines = text.lines();
        let is_it = lines.next()? == FIRST && lines.next()?.parse() == Ok(part);
        let id = lines.next().filter(|id| is_it && !id.is_empty())?.to_owned();
        let parts = lines.map(|line| {
            let (number, content) = line.split_once(' ')?;
            Some((number.parse().ok()?, content.to_owned()))
        });
        let parts: BTreeMap<usize, String> = parts.collect::<Option<_>>()?;
        self.parts = parts.len();
        Some((id, parts))
    }

    /// Whether an upload was begun before, and not ended.
    pub(crate) fn is_begun(&self) -> bool {
        let len = |(file, _): &(File, PathBuf)| file.metadata().map_or(0, |facts| facts.len());
        self.file.as_ref().map_or(0, len) > 0
    }

    /// One has begun.
    pub(crate) fn begin(&mut self, id: &str, part: u64) {
        self.parts = 0;
        if let Some((file, _)) = &self.file {
            let emptied = file.set_len(0);
            self.note(emptied, &format!("{FIRST}\n{part}\n{id}\n"));
        }
    }

    /// A part of it is there.
    pub(crate) fn arrived(&mut self, number: usize, content: &str) {
        self.parts += 1;
        self.note(Ok(()), &format!("{number} {content}\n"));
    }

    /// In one write, so that a kill leaves all of it or nothing that counts.
    fn note(&mut self, before: io::Result<()>, text: &str) {
        let Some((file, path)) = &mut self.file else { return };
        if let Err(error) = before.and_then(|()| file.write_all(text.as_bytes())) {
            tracing::warn!("{}: {error}: if this is broken off, all is sent again", path.display());
            self.end();
        }
    }

    /// There is nothing to go on with.
    pub(crate) fn forget(&mut self) {
        if let Some((file, _)) = &self.file {
            let _ = file.set_len(0);
        }
        self.parts = 0;
    }

    /// Nor will there be.
    pub(crate) fn end(&mut self) {
        self.forget();
        if let Some((_, path)) = self.file.take() {
            let _ = fs::remove_file(path);
        }
    }

    /// Why it ended early, and what that leaves.
    pub(crate) fn told(&self, why: String, parts: u64) -> String {
        match (&self.file, self.parts) {
            (Some(_), 1..) => format!(
                "{why} ({} of {parts} parts have arrived: publish it again, and the others are sent)",
                self.parts
            ),
            _ => why,
        }
    }
}

/// It, for this process alone.
fn open(path: &Path) -> io::Result<File> {
    let file = File::options().append(true).read(true).create(true).open(path)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(io::Error::other("another process publishes this image there"))
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_arrived_is_known_to_the_next_and_to_no_other_upload() {
        let folder = tempfile::tempdir().expect("a folder");
        let open = |place: &str| Journal::open(Some(folder.path()), place, &[7; 32]);
        let mut first = open("a");
        assert_eq!(first.begun(16), None);
        first.begin("id one", 16);
        first.arrived(2, "\"etag\" x");
        first.arrived(0, "other");
        assert_eq!(open("a").begun(16), None, "another process has it");
        let path = first.file.as_ref().expect("a file").1.clone();
        drop(first);
        let parts = BTreeMap::from([(0, "other".to_owned()), (2, "\"etag\" x".to_owned())]);
        assert_eq!(open("a").begun(16), Some(("id one".to_owned(), parts.clone())));
        assert_eq!(open("a").begun(32), None, "of parts of another size");
        assert_eq!(open("b").begun(16), None, "at another place");
        // Killed in the middle of a line, and broken.
        let text = fs::read_to_string(&path).expect("read");
        fs::write(&path, format!("{text}3 cut")).expect("written");
        assert_eq!(open("a").begun(16), Some(("id one".to_owned(), parts)));
        fs::write(&path, format!("{text}x y\n")).expect("written");
        assert_eq!(open("a").begun(16), None);
        let mut last = open("a");
        last.begin("id two", 16);
        assert_eq!(last.begun(16), Some(("id two".to_owned(), BTreeMap::new())));
        last.end();
        assert!(!path.exists());
        let mut none = Journal::open(None, "a", &[7; 32]);
        none.begin("id", 16);
        assert_eq!(none.begun(16), None);
    }
}
