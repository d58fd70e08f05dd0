//! Files of the folder of disks, written so that a power cut leaves the former or the new one.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// The end of a file's name that is being written.
pub(crate) const UNFINISHED: &str = ".unfinished";

/// Remove files of the folder, and then write others; stable when this returns.
pub(crate) fn write(
    folder: &Path,
    removed: &[PathBuf],
    written: &[(PathBuf, String)],
) -> io::Result<()> {
    if removed.is_empty() && written.is_empty() {
        return Ok(());
    }
    for file in removed {
        match fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    let stable = || File::open(folder)?.sync_all();
    if !removed.is_empty() {
        stable()?;
    }
    for (file, text) in written {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let unfinished = folder.join(format!(".{name}{UNFINISHED}"));
        let mut new = File::create(&unfinished)?;
        new.write_all(text.as_bytes())?;
        new.sync_all()?;
        fs::rename(&unfinished, file)?;
    }
    stable()
}
