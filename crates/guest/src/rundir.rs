//! The directory of one guest's links, logs and library, and the removal of those whose owner was
//! killed before it could.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use crate::error::{Result, io};

const PREFIX: &str = "ringtap-guest-";
const LOCK: &str = "owner";
/// A directory younger than this may have an owner that has not locked it yet.
const GRACE: Duration = Duration::from_secs(60);

/// Removed with all in it when dropped; locked for as long as it lives.
#[derive(Debug)]
pub(crate) struct RunDir {
    dir: TempDir,
    _lock: File,
}

impl RunDir {
    /// Makes one, with a name that needs no quoting anywhere.
    pub(crate) fn new() -> Result<Self> {
        let parent = std::env::temp_dir();
        let plain = |p: &Path| {
            p.to_str().is_some_and(|s| {
                s.len() < 60 && s.chars().all(|c| c.is_ascii_alphanumeric() || "/._-+".contains(c))
            })
        };
        let parent = if plain(&parent) { parent } else { PathBuf::from("/tmp") };
        sweep(&parent, GRACE);
        Self::new_in(&parent)
    }

    fn new_in(parent: &Path) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent);
        let dir = dir.map_err(io("make a directory in", parent))?;
        let path = dir.path().join(LOCK);
        let lock = File::create(&path).map_err(io("make", &path))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|e| io("lock", &path)(e.into()))?;
        Ok(Self { dir, _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Removes the directories nobody holds any more. What cannot be removed is another user's.
fn sweep(parent: &Path, grace: Duration) {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    for dir in entries.filter(|e| e.file_name().to_string_lossy().starts_with(PREFIX)) {
        let age = dir.metadata().and_then(|m| m.modified()).map(|t| t.elapsed());
        if !matches!(age, Ok(Ok(age)) if age > grace) {
            continue;
        }
        let Ok(lock) = File::open(dir.path().join(LOCK)) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = fs::remove_dir_all(dir.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_holds_is_swept() {
        let parent = tempfile::tempdir().unwrap();
        let held = RunDir::new_in(parent.path()).unwrap();
        let left = RunDir::new_in(parent.path()).unwrap().dir.keep();
        fs::write(left.join("console"), b"last words").unwrap();
        sweep(parent.path(), GRACE);
        assert!(left.exists(), "too young to judge");
        sweep(parent.path(), Duration::ZERO);
        assert!(!left.exists());
        assert!(held.path().exists());
        let path = held.path().to_path_buf();
        drop(held);
        assert!(!path.exists());
    }
}
