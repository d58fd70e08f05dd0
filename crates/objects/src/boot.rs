//! Boot lists: which chunks a guest reads as it starts, in their order, so that the next start has them fetched before.
//!
//! A line that names the format, then one number of a chunk a line. It is a hint: what it names is verified as all else is.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};

/// How a boot list's name ends, behind its image's.
pub const ENDING: &str = ".rtboot";
/// The most bytes of one.
pub const MOST: usize = 16 << 20;

const HEAD: &str = "ringtap boot list 1, chunks of 256 KiB";

/// The numbers that a list has, each once, of an object of `count` chunks; else what is wrong with it.
pub fn parse(text: &[u8], count: u32) -> Result<Vec<u32>, String> {
    let text = std::str::from_utf8(text).map_err(|_| "is no text".to_owned())?;
    let mut lines = text.lines();
    if lines.next() != Some(HEAD) {
        return Err(format!("does not begin with {HEAD:?}"));
    }
    let seen = Seen::of(count);
    let mut numbers = vec![];
    for (line, place) in lines.zip(2..) {
        let number: u32 = line.parse().map_err(|_| format!("has no number in line {place}"))?;
        if number < count && seen.is_first(number) {
            numbers.push(number);
        }
    }
    Ok(numbers)
}

struct Seen(Vec<AtomicU64>);

impl Seen {
    fn of(count: u32) -> Seen {
        Seen((0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    fn is_first(&self, number: u32) -> bool {
        let bit = 1 << (number % 64);
        let Some(word) = self.0.get(number as usize / 64) else { return false };
        word.load(SeqCst) & bit == 0 && word.fetch_or(bit, SeqCst) & bit == 0
    }
}

/// Writes the list of one object while it is read.
pub(crate) struct Recorder {
    seen: Seen,
    file: Mutex<File>,
}

impl Recorder {
    /// One of an object of `count` chunks. What is there is written over, but where it `goes_on`: then the server before this
    /// one has written it.
    pub(crate) fn new(path: &Path, count: u32, goes_on: bool) -> io::Result<Recorder> {
        let seen = Seen::of(count);
        let before = if goes_on { std::fs::read(path).ok() } else { None };
        let before = before.and_then(|text| parse(&text, count).ok());
        // Two servers write while the one takes over from the other.
        let mut file = File::options().create(true).append(true).open(path)?;
        match before {
            Some(numbers) => numbers.iter().for_each(|number| _ = seen.is_first(*number)),
            None => {
                file.set_len(0)?;
                writeln!(file, "{HEAD}")?;
            }
        }
        Ok(Recorder { seen, file: Mutex::new(file) })
    }

    /// Those are read.
    pub(crate) fn note(&self, numbers: Range<u32>) {
        for number in numbers.filter(|number| self.seen.is_first(*number)) {
            let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
            if let Err(error) = file.write_all(format!("{number}\n").as_bytes()) {
                tracing::warn!("cannot record what is read: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_takes_over_goes_on_with_the_list_and_others_begin_anew() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("list");
        let list = || parse(&std::fs::read(&path).expect("the list"), 100);
        let first = Recorder::new(&path, 100, true).expect("made");
        first.note(5..7);
        let next = Recorder::new(&path, 100, true).expect("made");
        first.note(9..10);
        next.note(6..8);
        assert_eq!(list(), Ok(vec![5, 6, 9, 7]));
        Recorder::new(&path, 100, false).expect("made").note(1..2);
        assert_eq!(list(), Ok(vec![1]));
    }

    #[test]
    fn what_was_recorded_is_read_back_in_order_and_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("list");
        let recorder = Recorder::new(&path, 100, false).expect("made");
        for numbers in [5..7, 90..91, 5..8, 0..1] {
            recorder.note(numbers);
        }
        let text = std::fs::read(&path).expect("the list");
        assert_eq!(parse(&text, 100), Ok(vec![5, 6, 90, 7, 0]));
        assert_eq!(parse(&text, 7), Ok(vec![5, 6, 0]));
        assert!(parse(b"5\n6\n", 100).is_err_and(|why| why.contains("begin")));
        let wrong = [&text[..], b"x\n"].concat();
        assert!(parse(&wrong, 100).is_err_and(|why| why.contains("line 7")));
    }
}
