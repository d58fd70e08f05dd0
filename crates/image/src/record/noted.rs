//! That an image has a restart log, where the image itself has no place to say so.

use std::io;
use std::path::Path;

use ringtap_sandbox::ask;

use super::attribute;
use super::kept::Kept;

/// Holds the boot and the number of the file, in hexadecimal digits.
const LOG: &str = "user.ringtap.restart-log";

/// The log that an image has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Note {
    /// The boot of the machine that it is of.
    pub(crate) boot: u128,
    /// The number of the file that it is of; none where the note is found by the file itself.
    pub(crate) file: Option<u64>,
}

fn text(boot: u128, file: u64) -> String {
    format!("{boot:032x} {file:016x}")
}

fn parse(text: &str) -> Option<(u128, u64)> {
    let (boot, file) = text.split_once(' ')?;
    Some((u128::from_str_radix(boot, 16).ok()?, u64::from_str_radix(file, 16).ok()?))
}

pub(super) fn again(noted: &str) -> Option<Vec<u8>> {
    parse(noted).map(|(boot, file)| text(boot, file).into_bytes())
}

/// What is noted of the image at `path`.
pub(crate) fn noted_log(path: &Path) -> Option<Note> {
    // An attribute is copied with its file.
    if let Some((boot, file)) = attribute(path, LOG).and_then(|text| parse(&text)) {
        return Some(Note { boot, file: Some(file) });
    }
    let (boot, _) = parse(&Kept::of(path)?.restart_log?)?;
    Some(Note { boot, file: None })
}

/// Note that the image at `path` has a log, on that boot and as the file of that number.
pub(crate) fn note_log(path: &Path, boot: u128, file: u64) -> io::Result<()> {
    let text = text(boot, file);
    let set = ask::set_attribute(path, LOG, Some(text.as_bytes()));
    keep(path, set.is_err().then_some(text))
}

/// It has none any more.
pub(crate) fn forget_log(path: &Path) -> io::Result<()> {
    match ask::set_attribute(path, LOG, None) {
        // Where none may be removed none could be set.
        Err(error) if attribute(path, LOG).is_some() => return Err(error),
        _ => {}
    }
    keep(path, None)
}

fn keep(path: &Path, note: Option<String>) -> io::Result<()> {
    if Kept::of(path).and_then(|own| own.restart_log) == note {
        return Ok(());
    }
    Kept::change(path, note.is_none(), |own| own.restart_log = note)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_note_says_of_which_boot_and_file_it_is() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("image");
        fs::write(&path, "x").expect("written");
        assert_eq!(noted_log(&path), None);
        forget_log(&path).expect("there is none");
        if note_log(&path, 7 << 100, 9).is_err() {
            eprintln!("skipped: there is nowhere to record an image");
            return;
        }
        let note = noted_log(&path).expect("noted");
        assert_eq!(note.boot, 7 << 100);
        assert!(note.file.is_none_or(|file| file == 9), "{note:?}");
        forget_log(&path).expect("forgotten");
        assert_eq!(noted_log(&path), None);
        assert_eq!(parse(&text(u128::MAX, u64::MAX)), Some((u128::MAX, u64::MAX)));
        assert_eq!(parse("no note"), None);
    }
}
