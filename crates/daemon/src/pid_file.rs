//! The file that holds the process id while it serves.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::{Error, handover};

/// Removed when this drops, if it still holds our id.
#[derive(Debug)]
pub(crate) struct PidFile(PathBuf);

impl PidFile {
    pub(crate) fn write(path: &Path) -> Result<PidFile, Error> {
        PidFile::say(path, std::process::id())
            .map_err(|source| Error::PidFile { path: path.to_owned(), source })?;
        Ok(PidFile(path.to_owned()))
    }

    /// Write that id there. Who reads it meanwhile finds one before, or this.
    pub(crate) fn say(path: &Path, id: u32) -> io::Result<()> {
        let text = format!("{id}\n");
        let mut file = File::options().write(true).create(true).truncate(false).open(path)?;
        file.write_all(text.as_bytes())?;
        file.set_len(text.len() as u64)
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        if handover::leaves_all() {
            return;
        }
        let held = fs::read_to_string(&self.0).unwrap_or_default();
        if held.trim() == std::process::id().to_string() {
            // What cannot be removed is a stale file, which its readers must expect anyway.
            let _ = fs::remove_file(&self.0);
        }
    }
}
