//! Transactions that killed servers have left behind. Whoever has one of their images sees whether a part of it was ever written
//! down there; where none is, that part is gone.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::kept::folder;
use super::transaction::{self, Part, Writes};

/// The longest such file that is looked at, and the most of them.
const LONGEST: u64 = 1 << 20;
const MOST: usize = 10_000;

/// A part that may be written down with an image.
struct Left {
    image: PathBuf,
    writes: Writes,
    part: Part,
}

/// Those that were there when this process first looked: none of them is its own.
fn all() -> &'static [Left] {
    static ALL: OnceLock<Vec<Left>> = OnceLock::new();
    ALL.get_or_init(|| folder().map(|folder| left_in(&folder)).unwrap_or_default())
}

/// Before this process begins one of its own.
pub(super) fn look() {
    all();
}

/// Nothing of an unfinished transaction of that kind is written down with the image at a path, which nobody else has.
pub fn none_is_written(image: &Path, writes: Writes) {
    gone(all(), image, writes);
}

fn gone(all: &[Left], image: &Path, writes: Writes) {
    if all.is_empty() {
        return;
    }
    let Ok(image) = fs::canonicalize(image) else { return };
    let here = all.iter().filter(|left| left.image == image && left.writes == writes);
    here.for_each(|left| left.part.is_gone());
}

fn left_in(folder: &Path) -> Vec<Left> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| {
        let path = entry.path();
        let name = transaction::name_of(&path)?;
        let facts = fs::symlink_metadata(&path).ok()?;
        let fits = facts.is_file() && facts.len() <= LONGEST;
        fits.then(|| parts(&name, &fs::read(&path).ok()?))?
    });
    files.take(MOST).flatten().collect()
}

/// The parts of one as its file says, which tells nothing where it was torn.
fn parts(name: &str, text: &[u8]) -> Option<Vec<Left>> {
    let mut lines = text.strip_suffix(b"\n")?.split(|byte| *byte == b'\n');
    let kinds = lines.next()?;
    let images: Vec<&[u8]> = lines.collect();
    if images.len() != kinds.len() {
        return None;
    }
    let parts = kinds.iter().zip(images).enumerate().filter_map(|(number, (kind, image))| {
        let image = PathBuf::from(std::ffi::OsStr::from_bytes(image));
        Some(Left { image, writes: Writes::of(*kind)?, part: Part::new(name, number) })
    });
    Some(parts.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Transaction;
    use crate::record::kept::made_folder;

    #[test]
    fn a_transaction_ends_once_each_image_is_seen_to_have_none_of_it() {
        let dir = tempfile::tempdir().expect("a folder");
        let images = ["one", "two"].map(|name| dir.path().join(name));
        images.iter().for_each(|image| fs::write(image, "").expect("written"));
        let paths = images.each_ref().map(PathBuf::as_path);
        let there = || left_in(&made_folder().expect("a folder"));
        for writes in [Writes::Successors, Writes::Bitmaps] {
            let Ok(transaction) = Transaction::begin(&paths, writes) else {
                eprintln!("skipped: there is nowhere to record an image");
                return;
            };
            let part = transaction.part(0);
            // As where its process is killed.
            drop(transaction);
            let other = match writes {
                Writes::Successors => Writes::Bitmaps,
                Writes::Bitmaps => Writes::Successors,
            };
            for (image, seen) in [(0, other), (1, other), (0, writes), (0, writes)] {
                gone(&there(), paths[image], seen);
                assert!(!part.holds(), "the other image may have its part");
            }
            gone(&there(), paths[1], writes);
            assert!(part.holds() && there().iter().all(|left| left.image != images[0]));
        }
    }

    #[test]
    fn what_was_torn_or_is_of_an_older_version_is_left_alone() {
        let name = "0123456789abcdef0123456789abcdef";
        let count = |text: &str| parts(name, text.as_bytes()).map(|parts| parts.len());
        assert_eq!(count("rr\n/one\n/two\n"), Some(2));
        assert_eq!(count("..\n/one\n/two\n"), Some(0));
        assert_eq!(count("xb\n/one\n/two\n"), Some(1));
        for torn in ["", "r", "rr\n/one\n", "rr\n/one\n/tw", "rr\n/o\nne\n/two\n"] {
            assert_eq!(count(torn), None, "{torn}");
        }
    }
}
