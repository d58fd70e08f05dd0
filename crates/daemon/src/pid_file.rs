//! The file that holds the process id while it serves.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;

/// Removed when this drops, if it still holds our id.
#[derive(Debug)]
pub(crate) struct PidFile(PathBuf);

impl PidFile {
    pub(crate) fn write(path: &Path) -> Result<PidFile, Error> {
        fs::write(path, format!("{}\n", std::process::id()))
            .map_err(|source| Error::PidFile { path: path.to_owned(), source })?;
        Ok(PidFile(path.to_owned()))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let held = fs::read_to_string(&self.0).unwrap_or_default();
        if held.trim() == std::process::id().to_string() {
            // What cannot be removed is a stale file, which its readers must expect anyway.
            let _ = fs::remove_file(&self.0);
        }
    }
}
